"""The runs of a live result, simulated: the same windows, seeds and scaled cluster; how far apart the two are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from common.errors import ConfigError
from common.perf.bounds import Turn
from common.workload.gaps import GapKind, Gaps
from common.workload.hits import Pooled
from common.workload.table2 import TABLE2
from common.workload.trajectories import Trajectory
from compose.fabric import parse_shape
from loadgen.experiments.rates import Window, arrivals
from loadgen.experiments.setting import Setting
from loadgen.measures.turns import Slo
from loadgen.report.text import number
from loadgen.simulator import Cluster, Overheads, Scenario, simulate
from loadgen.workload.load import Load, Offline, Online
from loadgen.workload.source import Source

#: Of live clusters on one host, wall seconds, which a time factor divides. TURN_S: what an agent's turn takes through
#: client, front end and scheduler beside its parts (80 ms on an idle host). FORWARD_S: what the prefill part of one
#: layerwise forward takes beside its compute and bytes (81 ms on an idle host). HANDOVER_S: from the last row in the
#: staging buffer to its copy to device memory, through four processes: 11 ms on an idle host, 85 to 270 ms while it is
#: busy; one constant for all. REPORT_S, GATHER_S: services.engine.fetching and lockstep.
TURN_S, FORWARD_S, HANDOVER_S, REPORT_S, GATHER_S = 0.08, 0.08, 0.1, 0.005, 0.01
#: What is compared, and where a run has it.
MEASURES: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
    "JCT s": lambda run: run["job_s"],
    "turns/s": lambda run: run["turns_per_s"],
    "TTFT mean s": lambda run: run["ttft_ms"]["mean"] and run["ttft_ms"]["mean"] / 1e3,
    "TTFT p50 s": lambda run: run["ttft_ms"]["p50"] and run["ttft_ms"]["p50"] / 1e3,
    "TTST mean ms": lambda run: run["ttst_ms"]["mean"],
    "TPOT mean ms": lambda run: run["tpot_ms"]["mean"],
    "trajectory JCT mean s": lambda run: run["jct_s"]["mean"],
    "scheduling s": lambda run: run["ttft_parts_s"].get("scheduling"),
    "allocation s": lambda run: run["ttft_parts_s"].get("allocation"),
    "read s": lambda run: run["ttft_parts_s"].get("read"),
    "prefill s": lambda run: run["ttft_parts_s"].get("prefill"),
    "attention max/avg": lambda run: (run["balance"]["attention"] or {}).get("rounds"),
    "SNIC max/avg": lambda run: (run["balance"]["snic"] or {}).get("mean"),
}
NIC_BYTES = "bytes per NIC"


@dataclass(frozen=True, slots=True)
class Pair:
    """A live run and its simulation. title: system, nodes, load."""

    title: str
    live: Mapping[str, Any]
    simulated: Mapping[str, Any]
    byte_scale: float

    def measures(self) -> dict[str, tuple[float, float]]:
        """(live, simulated) by name, where both have it."""
        told = {name: (of(self.live), of(self.simulated)) for name, of in MEASURES.items()}
        return {name: (live, ours) for name, (live, ours) in told.items() if live and ours is not None}

    def nic_bytes(self) -> dict[str, tuple[float, float]]:
        """(live, simulated) real bytes through each NIC and direction, KV only, of NICs that some passed through."""
        live, ours = _by_nic(self.live["nic_bytes"]), _by_nic(self.simulated["nic_bytes"])
        return {name: (value * self.byte_scale, ours.get(name, 0.0)) for name, value in live.items() if value}

    def differences(self) -> dict[str, float]:
        """Percent by which the simulation is off; of NICs the median of their absolute differences."""
        told = {name: 100 * (ours / live - 1) for name, (live, ours) in self.measures().items()}
        nics = [abs(100 * (ours / live - 1)) for live, ours in self.nic_bytes().values()]
        return {**told, NIC_BYTES: median(nics)} if nics else told


def read_live(path: Path) -> dict[str, Any]:
    """ConfigError if it is no result of an experiment on clusters."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--like {path}: {error}: give a file that loadgen wrote with --out") from None
    if not isinstance(result, dict) or not result.get("runs") or "config" not in result:
        raise ConfigError(f"--like {path}: it has no runs on clusters: give a result of loadgen offline or compare")
    return result


def simulate_like(result: Mapping[str, Any], on_pair: Callable[[int], None] = lambda done: None) -> list[Pair]:
    """All runs of a result. on_pair: told how many there are by now."""
    pairs: list[Pair] = []
    for run in result["runs"]:
        setting = setting_of(result, run)
        simulated = simulate(scenario_of(setting, result, run))
        pairs.append(Pair(_title(run), run, simulated, setting.scaling.byte_scale))
        on_pair(len(pairs))
    return pairs


def medians(pairs: Sequence[Pair]) -> dict[str, float]:
    """Of the absolute differences over all runs, in percent, by measure."""
    told = [pair.differences() for pair in pairs]
    names = dict.fromkeys(name for differences in told for name in differences)
    return {name: median(abs(of[name]) for of in told if name in of) for name in names}


def result_of(pairs: Sequence[Pair], live: Mapping[str, Any], name: str) -> dict[str, Any]:
    """As JSON: every run simulated, with the live one's place; the differences."""
    shared = {key: value for key, value in live.items() if key not in ("kind", "runs", "ratios", "spreads", "points")}
    return {
        **shared,
        "kind": f"simulated like {name}",
        "runs": [{**pair.live, **pair.simulated, "placement": "simulated"} for pair in pairs],
        "ratios": {f"{name} off by percent": value for name, value in medians(pairs).items()},
        "pairs": [
            {
                "title": pair.title,
                "measures": {
                    name: {"live": live, "simulated": ours, "off_by_percent": 100 * (ours / live - 1)}
                    for name, (live, ours) in pair.measures().items()
                },
                "nic_bytes": {
                    name: {"live": live, "simulated": ours} for name, (live, ours) in pair.nic_bytes().items()
                },
            }
            for pair in pairs
        ],
    }


def print_pairs(pairs: Sequence[Pair], console: Console) -> None:
    """A table a run: live, simulated, difference; then the medians over runs."""
    for pair in pairs:
        table = Table(title=pair.title, title_justify="left")
        for name in ("measure", "live", "simulated", "off by"):
            table.add_column(name, justify="left" if name == "measure" else "right")
        off = pair.differences()
        for name, (live, ours) in pair.measures().items():
            table.add_row(name, number(live), number(ours), f"{off[name]:+.1f} %")
        if NIC_BYTES in off:
            table.add_row(f"{NIC_BYTES}, median", "", "", f"{off[NIC_BYTES]:.1f} %")
        console.print(table)
    table = Table(title=f"Medians over {len(pairs)} runs, absolute", title_justify="left")
    table.add_column("measure")
    table.add_column("off by", justify="right")
    for name, value in medians(pairs).items():
        table.add_row(name, f"{value:.1f} %")
    console.print(table)


def setting_of(result: Mapping[str, Any], run: Mapping[str, Any]) -> Setting:
    """What the live run was made of."""
    config = dict(result["config"])
    source = dict(config.pop("workload"))
    gaps = dict(source.pop("gaps"))
    workload = Source(**{**source, "gaps": Gaps(GapKind(gaps.pop("kind")), **gaps)})
    if run["mal"] != config.get("mal") and not workload.sessions:
        sets = [name for name, columns in TABLE2.items() if int(columns.max_length) == run["mal"]]
        workload = replace(workload, set=sets[0] if sets else workload.set)
    workload = replace(workload, append_scale=run["append_scale"], generation_scale=run["generation_scale"])
    prefill, decode = parse_shape(run["nodes"])
    return replace(Setting(**{**config, "workload": workload}), prefill=prefill, decode=decode, model=run["model"])


def scenario_of(setting: Setting, result: Mapping[str, Any], run: Mapping[str, Any]) -> Scenario:
    """The same on a simulated cluster."""
    scaling = setting.scaling
    together = scaling.model.expert_gpus > scaling.hardware.gpus
    cluster = Cluster(
        setting.prefill,
        setting.decode,
        scaling.model,
        scaling.hardware,
        engines=1,
        gpus=scaling.gpus,
        prefill_group=setting.prefill if together else 1,
        decode_group=setting.decode if together else 1,
        moved_layers=scaling.moved_layers,
        copies_free=run["placement"].startswith("shaped"),
    )
    mean = _mean_turn(setting)
    load, slo = _load(setting, result, run)
    factor = scaling.time_factor
    return Scenario(
        cluster,
        run["system"],
        load,
        Turn(round(mean.hit), round(mean.miss), round(mean.generate)),
        seed=setting.seed,
        slo=slo,
        overheads=Overheads(
            turn_s=TURN_S / factor,
            report_s=REPORT_S / factor,
            gather_s=GATHER_S / factor,
            forward_s=FORWARD_S / factor,
            handover_s=HANDOVER_S / factor,
        ),
    )


def _load(setting: Setting, result: Mapping[str, Any], run: Mapping[str, Any]) -> tuple[Load, Slo]:
    slo = Slo(run["slo"]["ttft_s"], run["slo"]["tpot_s"])
    if "aps" not in run:
        count = run["offered"] // setting.turns
        return Offline(_windows(setting, count, run["repeat"]), run["agents"], run["makespan_s"] is not None), slo
    process = result["arrivals"]
    coming = arrivals(setting, run["aps"], Window(process["duration_s"], slo, process["cv"]), 0)
    return Online(coming, coming[-1].at + slo.ttft_s * 1.5, 1 << 62), slo


@lru_cache(8)
def _mean_turn(setting: Setting) -> Pooled:
    return setting.mean_turn


@lru_cache(8)
def _windows(setting: Setting, count: int, repeat: int) -> tuple[Trajectory, ...]:
    """What every system of a round plays."""
    return setting.windows(count, repeat)


def _by_nic(told: Mapping[str, float]) -> dict[str, float]:
    """KV bytes by node, kind of NIC and direction: engines of a live and of a simulated node differ in their names."""
    found: dict[str, float] = {}
    for name, value in told.items():
        nic, direction, traffic_class = name.split(" ")
        if traffic_class == "kv":
            node, *_, kind = nic.split("/")
            key = f"{node}/{kind} {direction}"
            found[key] = found.get(key, 0.0) + value
    return found


def _title(run: Mapping[str, Any]) -> str:
    load = f"{run['aps']:.3g} agents/s" if "aps" in run else f"{run['agents']} agents, round {run['repeat'] + 1}"
    return f"{run['system']}, {run['model']} {run['nodes']}, {load}"
