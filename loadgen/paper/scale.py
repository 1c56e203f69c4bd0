"""Table 3 and Figures 13 to 15: balance, and clusters of up to 1,152 GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import exp, log

from loadgen.paper.calibration import OFFLINE, ONLINE
from loadgen.paper.cases import Case, Runner, mean_latency
from loadgen.paper.exhibit import Exhibit, Line, Panel, Row
from loadgen.paper.published import PUBLISHED

SMALL = Case("dualpath", "2P4D", agents=2000)
LARGE = Case("dualpath", "48P96D", agents=48_000)
SMALL_ONLINE = Case("dualpath", "2P4D", aps=0.4)
LARGE_ONLINE = Case("dualpath", "44P88D", aps=8.8)
LATENCIES = ("ttft", "ttst", "tpot")
#: Between the rates that are tried for a like latency; its runs at most.
STEP, TRIALS = 1.05, 5


def table3(runner: Runner) -> Exhibit:
    small, large = runner.run(SMALL), runner.run(LARGE)
    tail = "_without_tail" if runner.size.turns else ""  # not what the paper measured
    rows = [
        Row(f"jct_s_2p4d{tail}", "offline, 2P4D, 2,000 agents: JCT", "s", small["job_s"]),
        Row(f"jct_s_48p96d{tail}", "offline, 48P96D, 48,000 agents: JCT", "s", large["job_s"]),
        Row("jct_48p96d_over_2p4d", "offline: 48P96D / 2P4D, JCT", "x", large["job_s"] / small["job_s"]),
    ]
    for case, words in ((SMALL_ONLINE, "online, 2P4D, 0.4 APS"), (LARGE_ONLINE, "online, 44P88D, 8.8 APS")):
        run = runner.run(case)
        rows += [
            Row(f"{name}_s_{case.nodes.lower()}", f"{words}: {name.upper()}", "s", mean_latency(run, name))
            for name in LATENCIES
        ]
    like = _like_latency(runner)
    rows.append(
        Row(
            "aps_44p88d_over_2p4d",
            "APS with the published TTFT: 44P88D / 0.4 of 2P4D",
            "x",
            like and like / SMALL_ONLINE.aps,
        )
    )
    rows += _costs(runner)
    rows += _other_calibration(runner)
    cases = (SMALL, LARGE, SMALL_ONLINE, LARGE_ONLINE)
    return Exhibit("table3", "Large scale, ds-660b, 64K, DualPath", rows, runs=[runner.run(case) for case in cases])


def _other_calibration(runner: Runner) -> list[Row]:
    """What each calibration says of the other one's kind of load: they are not one."""
    online = runner.run(replace(SMALL_ONLINE, calibration=OFFLINE))
    offline = runner.run(replace(SMALL, calibration=ONLINE))
    words = "with the calibration of the other kind of load: 2P4D"
    return [
        Row("jct_s_2p4d_online_calibration", f"{words} offline, JCT", "s", offline["job_s"]),
        *(
            Row(
                f"{name}_s_2p4d_offline_calibration", f"{words} online, {name.upper()}", "s", mean_latency(online, name)
            )
            for name in LATENCIES
        ),
    ]


def _like_latency(runner: Runner) -> float | None:
    """Agents a second of the large cluster with its published mean TTFT, as the small one was fitted to have its own at
    0.4: one run of the small one is too short to compare with."""

    def ttft(aps: float) -> float:
        return mean_latency(runner.run(replace(LARGE_ONLINE, aps=aps)), "ttft")

    return rate_at(PUBLISHED["ttft_s_44p88d"].value, LARGE_ONLINE.aps, ttft)


def rate_at(target_s: float, first: float, measure: Callable[[float], float]) -> float | None:
    """The rate at which a time that grows with the rate is target_s: from `first` on in steps, to the first two rates
    with the target between them, and there by interpolating the logarithms. None if it takes more than TRIALS runs."""
    rate, off = first, log(measure(first) / target_s)
    for _ in range(TRIALS - 1):
        next_rate = rate * STEP if off <= 0 else rate / STEP
        next_off = log(measure(next_rate) / target_s)
        if (off <= 0) is not (next_off <= 0):
            return rate * exp(log(next_rate / rate) * off / (off - next_off))
        rate, off = next_rate, next_off
    return None


def _costs(runner: Runner) -> list[Row]:
    """What simulating cost, and what the scheduler's decisions would cost a real scheduler."""
    offline, online = runner.run(LARGE)["simulator"], runner.run(LARGE_ONLINE)["simulator"]
    return [
        Row("policy_share", "48P96D: share of CPU time in the scheduling policy", "", offline["policy_share"]),
        Row(
            "scheduler_cores_44p88d",
            "44P88D at 8.8 APS: CPU time of the policy a second",
            "cores",
            online["policy_cores"],
        ),
        Row("simulation_48p96d_cpu_s", "48P96D: CPU time of the simulation", "s", offline["cpu_s"]),
    ]


def figure13(runner: Runner) -> Exhibit:
    cases = [Case(system, agents=2048) for system in ("+dual", "dualpath")]
    names = {"+dual": "snic_max_over_avg_round_robin", "dualpath": "snic_max_over_avg"}
    rows = [
        Row(names[case.system], f"{case.system}: SNIC traffic, max/avg over nodes", "x", _snic_balance(runner, case))
        for case in cases
    ]
    return Exhibit("fig13", "Balance of storage NICs", rows, runs=[runner.run(case) for case in cases])


#: Of a trajectory's 157 turns in the mean, 5 %.
FIRST_TURNS = 8


def figure14(runner: Runner) -> Exhibit:
    cases = [Case(system, agents=2048, first_turns=FIRST_TURNS) for system in ("+dual", "dualpath")]
    names = {"+dual": "attention_max_over_avg_round_robin", "dualpath": "attention_max_over_avg"}
    rows = []
    for case in cases:
        told = runner.run(case)["balance"]["attention"]
        what = f"{case.system}: attention time, max/avg in a group, first 5 % of the job"
        rows.append(Row(names[case.system], what, "x", told["rounds"] if told else None))
    note = f"the first 5 % of the job: 2,048 agents with the first {FIRST_TURNS} turns of their trajectories"
    runs = [runner.run(case) for case in cases]
    return Exhibit("fig14", "Balance of attention time", rows, runs=runs, notes=(note,))


def _snic_balance(runner: Runner, case: Case) -> float | None:
    told = runner.run(case)["balance"]["snic"]
    return None if told is None else told["mean"]


def figure15(runner: Runner) -> Exhibit:
    run = runner.run(LARGE)
    series = run["series"]
    panels = [
        Panel("48P96D, 48,000 agents", "time (s)", name.replace("_", " "), [Line("dualpath", series["at_s"], values)])
        for name, values in series.items()
        if name != "at_s"
    ]
    rate = run["prompt_tokens"] / run["job_s"]
    rows = [Row("prompt_tokens_per_s_48p96d", "prompt tokens a second, mean", "tokens/s", rate)]
    return Exhibit("fig15", "Offline at 48P96D over time", rows, panels, notes=("the paper's figure is an image",))
