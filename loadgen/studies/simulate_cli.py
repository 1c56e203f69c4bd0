"""`loadgen simulate`: what a cluster that one does not have would do; or what a live one did, simulated."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from common.config import Size
from common.errors import ConfigError
from common.perf.bounds import Plan
from common.perf.hardware import get_hardware
from common.perf.models import MODELS
from common.results import check_result_file
from common.workload.hits import BLOCK_TOKENS
from common.workload.table2 import TABLE2
from compose.fabric import parse_shape
from loadgen.conduct import errors, stdout_console
from loadgen.experiments import jobs
from loadgen.experiments.options import (
    AppendScale,
    Burstiness,
    GenerationScale,
    Out,
    RealSessions,
    Seed,
    Show,
    SloTpot,
    SloTtft,
    Systems,
    ToolTime,
    one_of,
    positive,
)
from loadgen.experiments.setting import versions
from loadgen.measures.turns import Slo
from loadgen.plan.rules import Asked, check_memory, check_nodes
from loadgen.progress import ProgressMode
from loadgen.report.tables import print_ratios, print_runs
from loadgen.report.text import write_result
from loadgen.simulator import Cluster, Scenario, offline, online, simulate
from loadgen.simulator.incidents import parse_incidents
from loadgen.simulator.roles import AdaptiveRoles
from loadgen.studies.like import print_pairs, read_live, result_of, simulate_like
from loadgen.systems import BOUND_AS, SYSTEMS
from loadgen.workload.load import Offline
from loadgen.workload.source import Source, chosen

OnProgress = Callable[[float], None]
#: Between two lines of progress for a parent process, of all that is done.
LINE_SHARE = 0.01


def register(app: typer.Typer) -> None:
    app.command("simulate")(command)


def command(
    cluster: Annotated[str, typer.Option(help="Nodes: xPyD for x prefill and y decode nodes")] = "2P4D",
    gpus: Annotated[int | None, typer.Option(help="GPUs in use of each node", show_default="all of them")] = None,
    model: Annotated[str, typer.Option(help=", ".join(MODELS))] = "ds-660b",
    buffer: Annotated[
        str | None, typer.Option(help="Staging DRAM of a node, e.g. 80GB", show_default="the model's profile")
    ] = None,
    workload: Annotated[str | None, typer.Option(help="Of the paper's sets: 32k, 48k, 64k", show_default="64k")] = None,
    sessions: RealSessions = None,
    gaps: ToolTime = "off",
    system: Systems = None,
    agents: Annotated[int | None, typer.Option(help="Offline: agents that start at once")] = None,
    trajectories: Annotated[int | None, typer.Option(help="Offline: played in all", show_default="one each")] = None,
    aps: Annotated[float | None, typer.Option(help="Online: agents that arrive per second")] = None,
    duration: Annotated[float | None, typer.Option(help="Online: seconds during which agents arrive")] = None,
    cv: Burstiness = 1.0,
    turns: Annotated[
        int | None, typer.Option(min=1, help="Windows of so many turns", show_default="whole trajectories")
    ] = None,
    append_scale: AppendScale = 1.0,
    generation_scale: GenerationScale = 1.0,
    slo_ttft: SloTtft = 4.0,
    slo_tpot: SloTpot = 0.05,
    incident: Annotated[
        list[str] | None,
        typer.Option(help="KIND:WHERE@FROM[-UNTIL][:AMOUNT], e.g. fail:d1@60, slow:p0@60-120:2, foreign:*@0:20e9"),
    ] = None,
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="Nodes change their role as the load asks for it (loadgen adapt)")
    ] = False,
    switch_s: Annotated[
        float | None,
        typer.Option(help="--adaptive: seconds from an empty node to the other role", show_default="weights' reload"),
    ] = None,
    like: Annotated[
        Path | None, typer.Option(help="A result of live runs: simulate these, and compare", dir_okay=False)
    ] = None,
    seed: Seed = 0,
    out: Out = None,
    progress: Show = ProgressMode.AUTO,
) -> None:
    """A cluster of any size on a virtual clock, driven by the live scheduling policy and compute quota."""
    with errors():
        check_result_file(out)
        if like is not None:
            _refuse_with_like(
                cluster, agents, aps, duration, turns, trajectories, workload, sessions, incident, adaptive or None
            )
            _like(like, system, out, progress)
            return
        nodes = _cluster(cluster, gpus, model, buffer)
        source = chosen(_set(workload), sessions, gaps, append_scale, generation_scale)
        named = [one_of("--system", name, SYSTEMS) for name in dict.fromkeys(system or ["dualpath"])]
        slo = Slo(slo_ttft, slo_tpot)
        _check(nodes, source, slo, agents, trajectories, aps, duration, turns)
        incidents = parse_incidents(incident or [])
        if switch_s is not None and not adaptive:
            raise ConfigError("--switch-s is of roles that change: add --adaptive, or leave it out")

        def scenario(name: str) -> Scenario:
            roles = AdaptiveRoles(switch_s) if adaptive else None  # one for each run
            common: dict[str, Any] = {"seed": seed, "slo": slo, "incidents": incidents, "roles": roles}
            if aps is not None and duration is not None:
                return online(nodes, name, source, aps, duration, turns, cv, **common)
            return offline(nodes, name, source, agents or 0, trajectories, turns, **common)

        runs, early = _simulated(named, scenario, progress)
        if runs:
            _tell({**({"ended_early": early} if early else {}), **_result(scenario(named[0]), source, runs)}, out)
        if early:
            raise KeyboardInterrupt


def _simulated(
    systems: list[str], scenario: Callable[[str], Scenario], progress: ProgressMode
) -> tuple[list[dict[str, Any]], str]:
    """Runs of each, and why there are not more."""
    runs = []
    try:
        with shown(progress) as start:
            for name in systems:
                job = scenario(name)
                runs.append(_run(job, simulate(job, start(f"{job.cluster.name} {name}"))))
    except KeyboardInterrupt:
        return runs, "interrupted"
    return runs, ""


def _run(job: Scenario, told: dict[str, Any]) -> dict[str, Any]:
    """With what a live run says of where it belongs."""
    nodes, load = job.cluster, job.load
    plan = Plan(
        nodes.model, nodes.hardware, nodes.prefill_nodes, nodes.decode_nodes, job.mean_turn, nodes.engines * nodes.gpus
    )
    place: dict[str, Any] = {"system": job.system, "repeat": 0, "placement": "simulated"}
    if isinstance(load, Offline):
        place["agents"] = load.agents
        bounds = plan.describe(load.agents, max(round(told["offered"] / load.agents), 1))
    else:
        place["aps"] = len(load.arrivals) / load.arrivals[-1].at
        bounds = plan.describe()
    return {
        **place,
        "model": nodes.model.name,
        "nodes": nodes.name,
        "bound_as": BOUND_AS[job.system],
        "bounds": bounds,
        **told,
    }


def _result(job: Scenario, source: Source, runs: list[dict[str, Any]]) -> dict[str, Any]:
    nodes = job.cluster
    scaling = nodes.scaling
    thresholds = scaling.thresholds(job.mean_turn.hit, job.mean_turn.miss)
    place = {
        "mal": source.max_length(nodes.limit),
        "append_scale": source.append_scale,
        "generation_scale": source.generation_scale,
    }
    runs = [{**run, **place} for run in runs]
    return {
        "kind": "simulate",
        "config": {**asdict(nodes), "workload": asdict(source), "seed": job.seed, "overheads": asdict(job.overheads)},
        "seed": job.seed,
        "mean_turn": asdict(job.mean_turn),
        "workload": job.origin,
        "hits": "given by the client",
        "scale": f"simulated at full size on a virtual clock: {nodes.engines * nodes.gpus} of a node's"
        f" {nodes.hardware.gpus} GPUs",
        "thresholds": {**asdict(thresholds), "alpha": thresholds.alpha * nodes.engines},
        "incidents": [incident.describe() for incident in job.incidents],
        "versions": versions(),
        "runs": runs,
        "ratios": jobs.ratios(runs) if all("agents" in run for run in runs) else {},
    }


def _like(path: Path, systems: list[str] | None, out: Path | None, progress: ProgressMode) -> None:
    live = read_live(path)
    if systems:
        names = sorted({run["system"] for run in live["runs"]})
        wanted = {one_of("--system", name, names) for name in systems}
        live = {**live, "runs": [run for run in live["runs"] if run["system"] in wanted]}
    with shown(progress) as start:
        done = start(f"like {path.name}")
        pairs = simulate_like(live, lambda pairs: done(pairs / len(live["runs"])))
    print_pairs(pairs, stdout_console())
    if out is not None:
        write_result(result_of(pairs, live, path.name), out)


def _tell(result: dict[str, Any], out: Path | None) -> None:
    console = stdout_console()
    print_runs(result, console)
    if result["ratios"]:
        print_ratios(result, console)
    for run in result["runs"]:
        cost = run["simulator"]
        share = "" if cost["policy_share"] is None else f", {100 * cost['policy_share']:.0f} % of it the policy"
        console.print(
            f"{run['system']}: {run['turns']:,} turns, {cost['events']:,} events in {cost['cpu_s']:.1f} s of CPU time"
            f" ({cost['cpu_us_a_turn']:.0f} us a turn{share}), {cost['peak_memory_bytes'] / 2**30:.2f} GiB; the"
            f" scheduler needs {cost['policy_cores'] or 0:.3f} cores",
            highlight=False,
        )
    if out is not None:
        write_result(result, out)


# -- input --


def _cluster(text: str, gpus: int | None, model: str, buffer: str | None) -> Cluster:
    hardware = get_hardware("h800")
    in_use = hardware.gpus if gpus is None else gpus
    if not 1 <= in_use <= hardware.gpus:
        nearest = min(max(in_use, 1), hardware.gpus)
        raise ConfigError(f"--gpus {in_use}: a node has {hardware.gpus}: the nearest is {nearest}")
    counted = re.fullmatch(r"(\d+)[Pp](\d+)[Dd]", text)
    if counted and not all(int(nodes) for nodes in counted.groups()):
        prefill, decode = (max(int(nodes), 1) for nodes in counted.groups())
        raise ConfigError(
            f"--cluster {text}: it takes a node of each role at least: the nearest is {prefill}P{decode}D"
        )
    prefill, decode = parse_shape(text)
    profile = MODELS[one_of("--model", model, MODELS)]
    if buffer is not None:
        try:
            profile = replace(profile, dram_bytes=TypeAdapter(Size).validate_python(buffer))
        except ValidationError:
            raise ConfigError(f"--buffer {buffer!r} is not a size above 0: write, say, 80GB") from None
    return Cluster(prefill, decode, profile, hardware, engines=in_use)


def _set(workload: str | None) -> str | None:
    return None if workload is None else one_of("--workload", workload.upper(), TABLE2)


def _check(
    nodes: Cluster,
    source: Source,
    slo: Slo,
    agents: int | None,
    trajectories: int | None,
    aps: float | None,
    duration: float | None,
    turns: int | None,
) -> None:
    """ConfigError for options that contradict each other, or a cluster that cannot serve this."""
    if (agents is None) == (aps is None):
        raise ConfigError("give --agents N for a job, or --aps A and --duration S for a stream of agents; one of them")
    if (aps is None) != (duration is None):
        raise ConfigError(
            "--aps and --duration go together: a stream has a rate and an end, as in --aps 0.4 --duration 1800"
        )
    if trajectories is not None and agents is None:
        raise ConfigError("--trajectories is of a job: give --agents too, or leave it out")
    if agents is not None and agents < 1:
        raise ConfigError(f"--agents {agents} must be above 0: the nearest is 1")
    if trajectories is not None and agents is not None and trajectories < agents:
        raise ConfigError(
            f"--trajectories {trajectories}: each of {agents} agents plays one at least: the nearest is {agents}"
        )
    for value in (aps, duration):
        if value is not None:
            positive(value)
    shape = (nodes.prefill_nodes, nodes.decode_nodes)
    wanted = Asked(nodes.model, nodes.hardware, source, aps or 1.0, "dualpath", slo, shape)
    _check_buffer(nodes, source.max_length(nodes.model.max_context_tokens) if not source.sessions else BLOCK_TOKENS)
    if not source.sessions:
        check_memory(wanted)
    check_nodes(wanted, "--cluster")


def _check_buffer(nodes: Cluster, longest: int) -> None:
    """The staging buffer of an engine holds the longest context."""
    model, gpus = nodes.model, nodes.hardware.gpus
    need = longest * model.kv_bytes_per_token
    if model.dram_bytes / gpus < need:
        raise ConfigError(
            f"--buffer {model.dram_bytes / 1e9:g}GB: a context of {longest:,} tokens has {need / 1e9:.2f} GB of KV, and"
            f" a GPU's share of that is {model.dram_bytes / gpus / 1e9:.2f} GB: the nearest is"
            f" --buffer {math.ceil(need * gpus / 1e9)}GB"
        )


def _refuse_with_like(*others: object) -> None:
    """--like says all of it."""
    cluster, *given = others
    if cluster != "2P4D" or any(value is not None for value in given):
        raise ConfigError(
            "--like takes cluster, load and seed from the live result: leave other options than --system out"
        )


# -- progress --


@contextmanager
def shown(mode: ProgressMode) -> Iterator[Callable[[str], OnProgress]]:
    """For each of several runs, by title: whom to tell the share that is done. On stderr."""
    if mode is ProgressMode.JSON:
        yield _lines
    elif mode is ProgressMode.AUTO and sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:

            def start(title: str) -> OnProgress:
                task = bar.add_task(title, total=1.0)
                return lambda share: bar.update(task, completed=share)

            yield start
    else:
        yield lambda title: lambda share: None


def _lines(title: str) -> OnProgress:
    told = -1.0

    def line(share: float) -> None:
        nonlocal told
        if share - told >= LINE_SHARE or share >= 1.0:
            told = share
            print(json.dumps({"run": title, "share": round(share, 4)}), file=sys.stderr, flush=True)

    return line
