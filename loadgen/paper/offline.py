"""Figures 7, 8, 9 and 12 (right): job completion times of N agents that start at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean

from loadgen.paper.cases import Case, Runner
from loadgen.paper.exhibit import Exhibit, Row
from loadgen.systems import CHAIN

SYSTEMS = ("tiered", "basic", "dualpath", "oracle")
SETS = ("32K", "48K", "64K")
AXES_ARE_OURS = "the paper's points are an image: numbers of agents and scales of the sweeps are ours"


STAGING = (
    "ours fills the staging DRAM of the one decode node, 80 GB as published; with three times as much the two are equal"
)


ORACLE = (
    "Oracle waits for computing only, and ours computes each model at the efficiency fitted to ds-660b: a small model"
    " may well reach less, but nothing is published of it"
)


def jct(runner: Runner, case: Case) -> float:
    """Seconds."""
    return float(runner.run(case)["job_s"])


def over(runner: Runner, case: Case, of: str, to: str) -> float:
    """Job completion time of one system over another's."""
    return jct(runner, replace(case, system=of)) / jct(runner, replace(case, system=to))


def figure7(runner: Runner) -> Exhibit:
    models = {"660b": ("ds-660b", "2P4D"), "27b": ("ds-27b", "1P1D"), "32b": ("qwen-32b", "1P2D")}
    rows: list[Row] = []
    cases: list[Case] = []
    for short, (model, nodes) in models.items():
        points = _grid(runner, Case("basic", nodes, model))
        for point in points:
            cases += [replace(point, system=system) for system in SYSTEMS]
            for case in cases[-len(SYSTEMS) :]:
                runner.run(case)
        gains = [over(runner, point, "basic", "dualpath") for point in points]
        losses = [over(runner, point, "dualpath", "oracle") for point in points]
        name = f"{model} {nodes}"
        rows += [
            Row(f"speedup_{short}_max", f"{name}: Basic / DualPath, greatest", "x", max(gains)),
            Row(f"speedup_{short}_min", f"{name}: Basic / DualPath, least", "x", min(gains)),
            Row(f"dualpath_over_oracle_{short}_min", f"{name}: DualPath / Oracle, least", "x", min(losses), ORACLE),
            Row(
                f"dualpath_over_oracle_{short}_max",
                f"{name}: DualPath / Oracle, greatest",
                "x",
                max(losses),
                ORACLE,
            ),
        ]
    return Exhibit(
        "fig7",
        "Offline JCT by agents and max agent length",
        rows,
        runs=[runner.run(case) for case in cases],
        notes=(AXES_ARE_OURS, "SGL(MC) stands for `tiered`: DRAM of 1.5 TB a node before the store"),
    )


def _grid(runner: Runner, case: Case) -> list[Case]:
    """Agents x sets; --quick: the sets at the middle of the agents, and of the large cluster all agents at 64K."""
    agents = AGENTS[case.model]
    middle = agents[len(agents) // 2]
    return [
        replace(case, agents=number, set=name)
        for name in SETS
        for number in agents
        if not runner.size.turns or number == middle or (name == SETS[-1] and not case.small)
    ]


#: The ablation of the paper has 1,024 and 2,048 agents on ds-660b; smaller clusters get fewer.
AGENTS = {"ds-660b": (512, 1024, 2048), "ds-27b": (256, 512, 1024), "qwen-32b": (64, 128, 256)}


def figure8(runner: Runner) -> Exhibit:
    shapes = ("1P1D", "2P1D", "1P2D")
    numbers = AGENTS["ds-27b"][1:2] if runner.size.turns else AGENTS["ds-27b"][1:]
    points = [Case("basic", nodes, "ds-27b", agents=agents) for nodes in shapes for agents in numbers]
    gains = [over(runner, point, "basic", "dualpath") for point in points]

    def equal(of: tuple[str, str], to: tuple[str, str]) -> float:
        """Mean over agents of JCT (nodes, system) over another."""
        (of_nodes, of_system), (to_nodes, to_system) = of, to
        return fmean(
            jct(runner, Case(of_system, of_nodes, "ds-27b", agents=n))
            / jct(runner, Case(to_system, to_nodes, "ds-27b", agents=n))
            for n in numbers
        )

    rows = [
        Row("speedup_27b_pd_mean", "Basic / DualPath over 1P1D, 2P1D, 1P2D, mean", "x", fmean(gains)),
        Row("speedup_27b_pd_max", "Basic / DualPath, greatest", "x", max(gains)),
        Row(
            "jct_27b_basic_1p1d_over_basic_1p2d",
            "equal storage bandwidth: Basic 1P1D / Basic 1P2D",
            "x",
            equal(("1P1D", "basic"), ("1P2D", "basic")),
        ),
        Row(
            "jct_27b_dualpath_1p1d_over_basic_2p1d",
            "DualPath 1P1D / Basic 2P1D",
            "x",
            equal(("1P1D", "dualpath"), ("2P1D", "basic")),
        ),
        Row(
            "jct_27b_dualpath_2p1d_over_dualpath_1p2d",
            "DualPath 2P1D / DualPath 1P2D",
            "x",
            equal(("2P1D", "dualpath"), ("1P2D", "dualpath")),
            STAGING,
        ),
    ]
    runs = _runs(runner, points, ("basic", "dualpath"))
    return Exhibit("fig8", "Offline JCT by P:D, ds-27b", rows, runs=runs, notes=(AXES_ARE_OURS,))


SCALES = (0.5, 1.0, 2.0)


def figure9(runner: Runner) -> Exhibit:
    base = Case("basic", agents=1024)
    appends = [replace(base, append_scale=scale) for scale in SCALES]
    generations = [replace(base, generation_scale=scale) for scale in SCALES]
    systems = ("basic", "dualpath", "oracle")
    gains = [over(runner, point, "basic", "dualpath") for point in appends]
    rows = [
        Row("speedup_append_min", "Basic / DualPath over append scales, least", "x", min(gains)),
        Row("speedup_append_max", "Basic / DualPath over append scales, greatest", "x", max(gains)),
        *(
            Row(f"speedup_append_{scale:g}", f"Basic / DualPath, append x {scale:g}", "x", gain)
            for scale, gain in zip(SCALES, gains, strict=True)
        ),
        *(
            Row(
                f"speedup_generation_{point.generation_scale:g}",
                f"Basic / DualPath, generation x {point.generation_scale:g}",
                "x",
                over(runner, point, "basic", "dualpath"),
            )
            for point in generations
        ),
    ]
    return Exhibit(
        "fig9",
        "Offline JCT by append and generation length, ds-660b, 64K, 1,024 agents",
        rows,
        runs=_runs(runner, list(dict.fromkeys([*appends, *generations])), systems),
        notes=(AXES_ARE_OURS, "trajectories are cut at 64K tokens, so longer appends also make fewer turns"),
    )


#: Published.
ABLATION_AGENTS = (1024, 2048)


def ablation(runner: Runner) -> Exhibit:
    """The right half of Figure 12."""
    points = [Case("basic", agents=agents) for agents in ABLATION_AGENTS]
    names = {"basic+layerwise": "layerwise", "+dual": "dual", "dualpath": "dualpath"}
    rows = []
    for system, name in names.items():
        share = fmean(over(runner, point, system, "basic") for point in points)
        what = f"JCT, {system} / Basic, mean of 1,024 and 2,048 agents ({100 * (share - 1):+.1f} %)"
        rows.append(Row(f"jct_{name}_over_basic", what, "x", share))
    return Exhibit("fig12_ablation", "Ablation, ds-660b, 64K", rows, runs=_runs(runner, points, CHAIN))


def _runs(runner: Runner, points: Iterable[Case], systems: Sequence[str]) -> list[dict[str, object]]:
    return [runner.run(replace(point, system=system)) for point in points for system in systems]
