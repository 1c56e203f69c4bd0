"""The systems to compare (spec §9), as configurations of one cluster. One table; nothing is tuned per figure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.perf.scaling import Scaling

#: No bound. TOML's largest integer is near.
UNBOUNDED = 1 << 62
#: New tokens of a forward batch, for systems without a quota: a usual size of chunked prefill.
BATCH_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class System:
    """A row of the table. read_side: who reads hit blocks. layerwise: a prefill engine holds a few layers of a batch at
    once, or else all layers of each request. scheduled: alpha, and the compute quota. free: storage reads, copies and
    transfers cost nothing. tier_bytes: DRAM that caches blocks on a prefill node, in the real cluster's bytes."""

    read_side: str
    layerwise: bool = True
    scheduled: bool = True
    free: bool = False
    tier_bytes: float = 0.0


SYSTEMS = {
    "basic": System("pe_only", layerwise=False, scheduled=False),
    "basic+layerwise": System("pe_only", scheduled=False),
    "+dual": System("round_robin", scheduled=False),
    "dualpath": System("shorter_queue"),
    "dualpath+split": System("split"),
    "oracle": System("shorter_queue", free=True),
    "tiered": System("pe_only", layerwise=False, scheduled=False, tier_bytes=1.5e12),
}
#: Each adds one thing to the one before (the paper's ablation).
CHAIN = ("basic", "basic+layerwise", "+dual", "dualpath")
#: What a system needs of the planner's formula (common.perf.bounds.NEEDS).
BOUND_AS = {name: "oracle" if row.free else "basic" if row.read_side == "pe_only" else "dualpath"
            for name, row in SYSTEMS.items()}


def base_settings(scaling: Scaling, hit: int, miss: int) -> dict[str, Any]:
    """What all systems share, by dotted name: the scaled cluster. hit, miss: tokens of the workload's mean turn, from
    which beta follows."""
    model, stretch = scaling.model, scaling.time_factor
    together = model.expert_gpus > scaling.hardware.gpus  # experts over several nodes: all engines of a role meet
    return {
        "model.profile": model.name,
        "perf.hardware": scaling.hardware.name,
        "perf.gpus": scaling.gpus,
        "perf.time_factor": stretch,
        "perf.moved_layers": scaling.moved_layers,
        "perf.row_bytes": scaling.row_bytes,
        "storage.verify": False,  # the bytes mean nothing
        "scheduler.beta": scaling.thresholds(hit, miss).beta,
        "scheduler.max_waiting": 65_536,
        "prefill.group": "prefill" if together else "",
        "prefill.buffer": scaling.buffer,
        "prefill.max_batch_tokens": BATCH_TOKENS,
        "prefill.max_batch_requests": 64,
        "prefill.resident_layers": 2,
        "decode.group": "decode" if together else "",
        "decode.device_memory": scaling.decode_memory,
        "decode.buffer": scaling.buffer,
        "decode.max_running": 1024,
        "frontend.port": 0,
        "frontend.max_pending": 65_536,
        **{f"timeouts.{name}": seconds * stretch for name, seconds in _PATIENCE_S.items()},
        "log.level": "warning",
    }


#: Deadlines in real seconds: in an experiment a request that waits is a result, not a failure.
_PATIENCE_S = {
    "call_s": 60.0,
    "lookup_s": 10.0,
    "heartbeat_timeout_s": 60.0,
    "read_s": 600.0,
    "store_s": 600.0,
    "transfer_s": 600.0,
    "stage_s": 1200.0,
    "request_s": 3600.0,
}


def system_settings(name: str, scaling: Scaling, hit: int, miss: int) -> dict[str, Any]:
    """What a system sets beyond base_settings(), by dotted name. KeyError for one that is not in the table."""
    system = SYSTEMS[name]
    derived = scaling.thresholds(hit, miss)
    settings: dict[str, Any] = {
        "scheduler.read_side": system.read_side,
        "scheduler.alpha": derived.alpha if system.scheduled else UNBOUNDED,
        "prefill.layerwise": system.layerwise,
        "prefill.device_memory": scaling.layerwise_memory if system.layerwise else scaling.prefill_memory,
        "prefill.quota_s": derived.quota_s if system.scheduled else 0.0,
    }
    if system.tier_bytes:
        share = scaling.gpus / scaling.hardware.gpus
        settings["storage.tier"] = int(system.tier_bytes * share / scaling.byte_scale)
    if system.free:
        settings["network.transport"] = "null"
    return settings
