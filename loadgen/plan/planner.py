"""How many nodes of each role serve a load within its objectives: formulas first, then a few simulations.

The formulas (common/perf/bounds.py) say how few nodes could do and which resource would bind. From there on shapes with
one node more at a time are simulated, the roomiest by the formulas first, until one meets the objectives in the mean.
What serves a heavy load is taken to be several equal clusters, of which one is simulated with its share of the load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from common.errors import ConfigError
from common.perf.bounds import NEEDS, Plan, Resource, bottleneck_free_range, ratio_limits, shares_when_saturated
from common.perf.hardware import Hardware
from loadgen.paper.calibration import ONLINE, calibrated
from loadgen.plan.rules import Asked
from loadgen.simulator import simulate
from loadgen.simulator.steady import Stream, get_stream, steady
from loadgen.systems import BOUND_AS

#: Turns of a window; how many are played in a simulation: enough for a mean, few enough for seconds; and at most.
WINDOW_TURNS, SIMULATED_TURNS, MOST_TURNS = 4, 6000, 15_000
MIN_DURATION_S, MAX_DURATION_S = 20.0, 90.0
#: Played at most, also of a load that is far too much for a shape that is given: that shows at once.
OVERLOAD_TURNS = 60_000
#: Shapes of one number of nodes that are simulated, and simulations in all.
SHAPES, SIMULATIONS = 3, 12
#: Nodes that are added at a time, as a share.
GROWTH = 0.08

Shape = tuple[int, int]
OnProgress = Callable[[int, int], None]
"""Told how many simulations of how many at most are done."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A shape by the formulas. use: share of each resource that the load takes, by name."""

    shape: Shape
    use: dict[str, float]

    @property
    def binds(self) -> str:
        return max(self.use, key=lambda name: self.use[name])

    @property
    def fullest(self) -> float:
        return self.use[self.binds]

    @property
    def nodes(self) -> int:
        return sum(self.shape)

    @property
    def name(self) -> str:
        return "{}P{}D".format(*self.shape)


def make_plan(wanted: Asked, seed: int, on_progress: OnProgress = lambda done, most: None) -> dict[str, Any]:
    """What `dualpath plan` shows, as services/launcher/plan.py reads it. ConfigError if nothing tried is enough."""
    stream = get_stream(wanted.source, wanted.cluster(*wanted.least_nodes).limit, WINDOW_TURNS, seed)
    tried = _search(wanted, stream, seed, on_progress)
    met = [run for run in tried if run["met"]]
    best = min(met, key=lambda run: (run["nodes"], run["ttft_s"])) if met else None
    if best is None and wanted.shape is None:
        fullest = min(tried, key=lambda run: run["fullest"])
        raise ConfigError(
            f"none of {len(tried)} shapes up to {fullest['shape']} meets TTFT {wanted.slo.ttft_s:g} s and TPOT"
            f" {wanted.slo.tpot_s:g} s (the roomiest had {fullest['ttft_s']} s and {fullest['tpot_s']} s): allow more"
        )
    shown = best or tried[0]
    return {
        "asked": _describe(wanted),
        "mean_turn": asdict(stream.mean_turn),
        "turns_per_trajectory": stream.mean_turns,
        "demand": demand(wanted, stream),
        "parts": num_parts(wanted, stream),
        "range": describe_range(wanted.hardware),
        "tried": tried,
        "best": best,
        "memory": memory(wanted, stream, shown),
    }


# -- by the formulas --


def demand(wanted: Asked, stream: Stream) -> dict[str, float]:
    """What the load asks for in a second."""
    turns_per_s = wanted.aps * stream.mean_turns
    a_token = wanted.model.kv_bytes_per_token
    return {
        "turns_per_s": turns_per_s,
        "read_bytes_per_s": turns_per_s * stream.mean_turn.hit * a_token,
        "written_bytes_per_s": turns_per_s * (stream.mean_turn.miss + stream.mean_turn.generated) * a_token,
        "prefill_tokens_per_s": turns_per_s * stream.mean_turn.miss,
        "decode_tokens_per_s": turns_per_s * stream.mean_turn.generated,
    }


def candidate(wanted: Asked, stream: Stream, shape: Shape) -> Candidate:
    """How full the load makes each resource of this shape. A system that reads on one side loads compute NICs and DRAM
    less than the formula says, which is DualPath's."""
    plan = Plan(wanted.model, wanted.hardware, *shape, stream.mean_turn, wanted.hardware.gpus)
    turns_per_s = wanted.aps * stream.mean_turns
    use = {str(need): turns_per_s / plan.turns_per_s(need) for need in NEEDS[BOUND_AS[wanted.system]]}
    if reads := use.get(str(Resource.ALL_SNICS)):
        node = wanted.hardware
        shares = shares_when_saturated(
            node.gpus, node.snic_rate / node.cnic_rate, node.cnic_rate, node.dram_rate, shape[0] / shape[1]
        )
        use |= {name: reads * share for name, share in shares.items()}
    return Candidate(shape, use)


def num_parts(wanted: Asked, stream: Stream) -> int:
    """Of how many equal clusters what is planned consists, for the simulation's sake."""
    parts = ceil(wanted.aps * stream.mean_turns * MIN_DURATION_S / MOST_TURNS)
    if wanted.shape is None:
        return parts
    prefill, decode = wanted.shape
    least_prefill, least_decode = wanted.least_nodes
    possible = [
        number
        for number in range(1, parts + 1)
        if prefill % number == decode % number == 0
        and prefill // number >= least_prefill
        and decode // number >= least_decode
    ]
    return possible[-1]


def roomiest(wanted: Asked, stream: Stream, nodes: int) -> list[Candidate]:
    """All shapes of so many nodes, a multiple of num_parts(), on which the model fits, the least full first."""
    parts = num_parts(wanted, stream)
    least_prefill, least_decode = (parts * least for least in wanted.least_nodes)
    shapes = [(prefill, nodes - prefill) for prefill in range(least_prefill, nodes - least_decode + 1, parts)]
    found = [candidate(wanted, stream, shape) for shape in shapes]
    return sorted(found, key=lambda one: (one.fullest, one.shape))


def fewest_nodes(wanted: Asked, stream: Stream) -> int:
    """The first number of nodes of which a shape is not more than full, from what each role needs by itself on."""
    nodes = _needed_at_least(wanted, stream)
    while roomiest(wanted, stream, nodes)[0].fullest > 1:
        nodes = _more(nodes, num_parts(wanted, stream))
    return nodes


def _more(nodes: int, parts: int) -> int:
    """The next number of nodes to try."""
    return nodes + parts * max(1, int(nodes * GROWTH / parts))


def _needed_at_least(wanted: Asked, stream: Stream) -> int:
    """Nodes without which prefill, decode or storage NICs are more than full, whatever the shape."""
    plan = Plan(wanted.model, wanted.hardware, 1, 1, stream.mean_turn, wanted.hardware.gpus)
    turns_per_s = wanted.aps * stream.mean_turns
    needs = {need: turns_per_s / plan.turns_per_s(need) for need in NEEDS[BOUND_AS[wanted.system]]}
    parts = num_parts(wanted, stream)
    least_prefill, least_decode = wanted.least_nodes
    prefill = max(least_prefill, ceil(max(needs[Resource.PREFILL], needs.get(Resource.PE_SNICS, 0.0)) / parts))
    decode = max(least_decode, ceil(needs[Resource.DECODE] / parts))
    both = ceil(2 * needs.get(Resource.ALL_SNICS, 0.0) / parts)  # 1P1D has two
    return parts * max(prefill + decode, both)


def describe_range(node: Hardware) -> dict[str, Any]:
    """The bottleneck-free range, and each condition."""
    parts = (node.gpus, node.snic_rate / node.cnic_rate, node.cnic_rate, node.dram_rate)
    limits = ratio_limits(*parts)
    free = bottleneck_free_range(*parts)
    return {
        "least": free[0] if free else None,
        "greatest": free[1] if free else None,
        "least_by": max(limits, key=lambda limit: limit.least).resource,
        "greatest_by": min(limits, key=lambda limit: limit.greatest).resource,
        "limits": [{"resource": limit.resource, "rule": limit.rule} for limit in limits],
    }


# -- by simulation --


def _search(wanted: Asked, stream: Stream, seed: int, on_progress: OnProgress) -> list[dict[str, Any]]:
    """Runs, in order; the last ones are those of the first number of nodes that does."""
    if wanted.shape is not None:
        on_progress(0, 1)
        return [_simulated(wanted, stream, candidate(wanted, stream, wanted.shape), seed)]
    tried: list[dict[str, Any]] = []
    nodes = fewest_nodes(wanted, stream)
    while len(tried) < SIMULATIONS:
        for found in roomiest(wanted, stream, nodes)[:SHAPES]:
            on_progress(len(tried), SIMULATIONS)
            tried.append(_simulated(wanted, stream, found, seed))
        if any(run["met"] for run in tried):
            break
        nodes = _more(nodes, num_parts(wanted, stream))
    return tried


def _simulated(wanted: Asked, stream: Stream, found: Candidate, seed: int) -> dict[str, Any]:
    parts = num_parts(wanted, stream)
    aps = wanted.aps / parts
    turns_per_s = aps * stream.mean_turns
    duration_s = min(max(SIMULATED_TURNS / turns_per_s, MIN_DURATION_S), MAX_DURATION_S, OVERLOAD_TURNS / turns_per_s)
    prefill, decode = found.shape
    cluster = wanted.cluster(prefill // parts, decode // parts)
    scenario = steady(cluster, wanted.system, stream, aps, duration_s, seed, wanted.slo)
    run = simulate(calibrated(scenario, ONLINE))
    verdict = run["verdict"]
    ttft, tpot = verdict["window_ttft_s"]["mean"], stream.token_s(run)
    slo = wanted.slo
    within = ttft is not None and ttft <= slo.ttft_s and tpot is not None and tpot <= slo.tpot_s
    return {
        "shape": found.name,
        "prefill_nodes": found.shape[0],
        "decode_nodes": found.shape[1],
        "nodes": found.nodes,
        "use": found.use,
        "binds": found.binds,
        "fullest": found.fullest,
        "ttft_s": ttft,
        "ttft_p99_s": verdict["window_ttft_s"]["p99"],
        "tpot_s": tpot,
        "trajectory_s": stream.trajectory_s(run),
        "stationary": verdict["stationary"],
        "met": within and verdict["stationary"],
    }


# -- memory --


def memory(wanted: Asked, stream: Stream, run: dict[str, Any]) -> dict[str, float]:
    """Bytes. working_set: KV of the agents that are active at a time, each half grown (spec §11). staging: KV of the
    prompts that are between assignment and decoding (Little), of staging_limit that the nodes have. stored_a_day: what
    is added to storage, where nothing is evicted."""
    model, turn = wanted.model, stream.mean_turn
    final = stream.final_tokens * model.kv_bytes_per_token
    prompt = (turn.hit + turn.miss) * model.kv_bytes_per_token
    return {
        "working_set_bytes": wanted.aps * (run["trajectory_s"] or 0.0) * final / 2,
        "staging_bytes": wanted.aps * stream.mean_turns * (run["ttft_s"] or 0.0) * prompt,
        "staging_limit_bytes": run["nodes"] * model.dram_bytes,
        "stored_a_day_bytes": wanted.aps * final * 86_400,
    }


def _describe(wanted: Asked) -> dict[str, Any]:
    node = wanted.hardware
    return {
        "model": wanted.model.name,
        "workload": wanted.source.set,
        "aps": wanted.aps,
        "system": wanted.system,
        "slo": asdict(wanted.slo),
        "hardware": node.describe(),
        "nodes": "{}P{}D".format(*wanted.shape) if wanted.shape else None,
    }
