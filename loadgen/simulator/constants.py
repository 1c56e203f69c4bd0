"""What holds throughout a run: sizes, rates, predicted times of one engine, from the settings that live ones have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from common.perf.compute import ComputeModel
from common.types import Role
from common.workload.hits import BLOCK_TOKENS
from loadgen.simulator.scenario import Scenario
from loadgen.systems import SYSTEMS, System, base_settings, system_settings
from services.prefill.batching import Budget, Quota
from services.scheduler.policy import PolicyConfig

#: Of a decode engine's staging buffer: through these its new blocks are stored (services.traffic_manager.service).
PERSIST_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class Constants:
    """free: reads, copies and transfers take no time; copies_free: those within an engine; rates: it matters how fast
    each side reads. Bytes and bytes a second are the real cluster's.

    gpus: of an engine. kv_bytes: of a token, row_bytes: of a token in one of `steps` layers. spread: experts are, so
    that prefill engines of a group meet at every layer. prefill_memory: device memory for KV, in bytes; decode_pages:
    the same in blocks, as are buffer_blocks (staging, by role) and tier_blocks. budget: of a prefill forward, with all
    of the device memory; quota: of its attention time, None: no bound. attention, decode_attention: seconds of all
    layers, of (cached, new) tokens; decode_linear_s: of a step, by the number of its sequences.
    """

    system: System
    free: bool
    copies_free: bool
    rates: bool
    gpus: int
    kv_bytes: int
    row_bytes: int
    steps: int
    cnic_rate: float
    spread: bool
    prefill_memory: int
    decode_pages: int
    buffer_blocks: dict[Role, int]
    tier_blocks: int
    max_running: int
    budget: Budget
    quota: Quota | None
    compute: ComputeModel
    attention: Callable[[float, float], float]
    decode_attention: Callable[[float, float], float]
    decode_linear_s: list[float]
    turn_s: float
    report_s: float
    gather_s: float
    forward_s: float
    handover_s: float
    policy: PolicyConfig


def constants(scenario: Scenario) -> Constants:
    """Of all its engines."""
    cluster, overheads = scenario.cluster, scenario.overheads
    scaling = cluster.scaling
    settings = {
        **base_settings(scaling, scenario.mean_turn.hit, scenario.mean_turn.miss),
        **system_settings(scenario.system, scaling, scenario.mean_turn.hit, scenario.mean_turn.miss),
    }
    system = SYSTEMS[scenario.system]
    kv_bytes = cluster.model.kv_bytes_per_token
    block_bytes = BLOCK_TOKENS * kv_bytes
    prefill_memory = int(settings["prefill.device_memory"])
    max_running = int(settings["decode.max_running"])
    compute = scaling.compute
    attention = lru_cache(1 << 12)(compute.prefill_attention)  # the same is asked for a few times in a row
    limit_s = settings["prefill.quota_s"]
    alpha = settings["scheduler.alpha"]
    return Constants(
        system=system,
        free=system.free,
        copies_free=system.free or cluster.copies_free,
        rates=system.read_side == "split",
        gpus=cluster.gpus,
        kv_bytes=kv_bytes,
        row_bytes=scaling.row_bytes,
        steps=scaling.moved_layers,
        cnic_rate=scaling.cnic_rate,
        spread=cluster.model.expert_params > 0,
        prefill_memory=prefill_memory,
        decode_pages=int(settings["decode.device_memory"]) // block_bytes,
        buffer_blocks={
            Role.PREFILL: int(settings["prefill.buffer"]) // block_bytes,
            Role.DECODE: int(settings["decode.buffer"]) // block_bytes - PERSIST_BLOCKS,
        },
        tier_blocks=int(settings.get("storage.tier", 0)) // block_bytes,
        max_running=max_running,
        budget=Budget(
            scenario.batch_tokens, prefill_memory // scaling.row_bytes, int(settings["prefill.max_batch_requests"])
        ),
        quota=Quota(limit_s * cluster.gpus, attention) if limit_s else None,  # of one GPU's time
        compute=compute,
        attention=attention,
        decode_attention=compute.decode_attention,
        decode_linear_s=[compute.decode_linear_s(number) for number in range(max_running + 1)],
        turn_s=overheads.turn_s,
        report_s=overheads.report_s,
        gather_s=overheads.gather_s,
        forward_s=overheads.forward_s,
        handover_s=overheads.handover_s,
        policy=PolicyConfig(
            settings["scheduler.read_side"],
            # of a node: all of its engines share the storage NIC
            alpha * cluster.engines if system.scheduled else alpha,
            settings["scheduler.beta"],
            max(settings["scheduler.max_waiting"], 1 << 30),
            BLOCK_TOKENS,
        ),
    )
