"""The commands of `dualpath` that talk to people. Results go to stdout, progress and errors to stderr.

What only one command needs it imports itself: the others start without.
"""

from __future__ import annotations

import asyncio
import json
import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from common.config import Config, load_config
from common.config_layers import parse_settings
from common.errors import ConfigError
from common.results import check_result_file
from common.rundir import RunDirectory
from common.workload.scaling import DEMO, Selection
from common.workload.sessions import PACKAGED
from services.launcher import demo, operate, plan, provision, qos
from services.launcher.cluster import Cluster, with_model, with_profile
from services.launcher.console import ConfigFile, Settings, errors, execute, results, say
from services.launcher.doctor.command import doctor
from services.launcher.models import get_model

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serve a model to agents: prefill and decode engines that both read the KV-cache in storage.",
)


class Transport(StrEnum):
    """What moves KV; auto is shm between processes of one host."""

    AUTO = "auto"
    SHM = "shm"
    TCP = "tcp"
    VERBS = "verbs"


ModelOption = Annotated[
    str,
    typer.Option(
        "--model", help="Model directory or hub id", metavar="DIR_OR_ID", show_default="a small one, fetched once"
    ),
]


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=errors)


@app.command("up")
def up_command(
    prefill: Annotated[int, typer.Option(min=1, help="Prefill engines")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode engines")] = 1,
    model: ModelOption = "",
    config: ConfigFile = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Of the HTTP endpoint; 0: any free one")] = None,
    settings: Settings = None,
) -> None:
    """Keep a cluster up on this host, with an OpenAI-compatible endpoint."""
    execute(_up(prefill, decode, model, config, {"frontend.port": port}, settings or []))


async def _up(
    prefill: int, decode: int, spec: str, file: Path | None, flags: dict[str, object], settings: list[str]
) -> int:
    config = load_config(file, {**flags, **parse_settings(settings)})
    with RunDirectory() as run, _progress() as progress:
        served = await _served(config, spec, progress)
        async with Cluster(served, prefill, decode, run, progress) as cluster:
            progress.stop()
            name = served.model.name or served.model.profile
            say(f"{name} at {cluster.url}/v1 ({prefill} prefill, {decode} decode); Ctrl-C ends it")
            say(f"scheduler {cluster.config.scheduler.control}")
            say(f"blocks {cluster.config.storage.path}")
            say(f"logs {run.path}")
            try:
                return await _watch(cluster, run)
            except asyncio.CancelledError:
                say("stopping")
                return 0


async def _served(config: Config, spec: str, progress: Progress) -> Config:
    """config with the model that --model or else it names, on this machine, or with its profile."""
    if not config.model.profile:
        return with_model(config, await get_model(spec or config.model.path, progress))
    if spec:
        raise ConfigError(f"--model and model.profile {config.model.profile!r} are both set: serve one of them")
    return with_profile(config)


async def _watch(cluster: Cluster, run: RunDirectory) -> int:
    """Report processes that end by themselves; the rest goes on. Returns when none is left."""
    while cluster.alive:
        name, status = await cluster.death()
        say(f"{name} ended with status {status}: see {run.keep() / name}.log")
    return 1


@app.command("demo")
def demo_command(
    model: ModelOption = "",
    sessions: Annotated[
        Path, typer.Option(help="Agent sessions (JSON lines)", metavar="FILE", show_default="those of the package")
    ] = PACKAGED,
    out: Annotated[
        Path | None, typer.Option(help="Write the results here, as JSON", metavar="FILE", dir_okay=False, writable=True)
    ] = None,
    agents: Annotated[int, typer.Option(min=1, help="Sessions that are played at a time")] = 2,
    max_sessions: Annotated[int, typer.Option(min=1, help="Use the first N sessions")] = DEMO.max_sessions or 1,
    max_turns: Annotated[int, typer.Option(min=1, help="Use the first N turns of each")] = DEMO.max_turns or 1,
    max_context: Annotated[int, typer.Option(min=2, help="Divide lengths to fit N tokens")] = DEMO.max_context or 2,
    transport: Annotated[Transport, typer.Option(help="Of KV between processes")] = Transport.AUTO,
) -> None:
    """Replay real agent sessions on a real model, with PE-side reads only and then over both read paths."""
    selection = Selection(max_sessions=max_sessions, max_turns=max_turns, max_context=max_context)
    execute(_demo(model, demo.Input(sessions, selection, agents), transport, out))


async def _demo(spec: str, replayed: demo.Input, transport: str, out: Path | None) -> int:
    from services.launcher.rdma import rdma_settings

    check_result_file(out)
    with RunDirectory() as run, _progress() as progress:
        config = load_config(
            overrides={
                "network.transport": transport,
                "scheduler.control": "tcp://127.0.0.1:*",
                "frontend.port": 0,
                **(rdma_settings(run.path) if transport == Transport.VERBS else {}),
            }
        )
        if config.model.profile:
            raise ConfigError(
                f"model.profile {config.model.profile!r} computes no tokens that could be checked: "
                "the demo needs a model"
            )
        model = await get_model(spec or config.model.path, progress)
        report = await demo.run_demo(config, model, replayed, run, progress)
        if not demo.passed(report):
            say(f"the logs are in {run.keep()}")
    results.print(demo.table(report))
    for line in demo.findings(report):
        results.print(line, markup=False, highlight=False, soft_wrap=True)
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if demo.passed(report) else 1


def _finite(value: float) -> float:
    """The bounds of an option let nan through in earlier versions of typer."""
    if not math.isfinite(value):
        raise typer.BadParameter("must be a number")
    return value


@app.command("profile")
def profile_command(
    out: Annotated[
        Path, typer.Option(help="Write the profile here: perf.predictor", metavar="FILE", dir_okay=False, writable=True)
    ],
    model: ModelOption = "",
    config: ConfigFile = None,
    max_context: Annotated[int, typer.Option(min=64, help="Longest context to measure, in tokens")] = 4096,
    repeats: Annotated[int, typer.Option(min=1, help="Measure each point so often; the least counts")] = 5,
    hit_ratio: Annotated[float, typer.Option(min=0, max=1, callback=_finite, help="Of prompt tokens, for beta")] = 0.95,
) -> None:
    """Measure a model on this machine: a predictor of its attention time, and alpha, beta and quota for a cluster."""
    execute(_profile(model, config, (max_context, repeats, hit_ratio), out))


async def _profile(spec: str, file: Path | None, workload: tuple[int, int, float], out: Path) -> int:
    from services.launcher import profile

    check_result_file(out)
    config = load_config(file)
    if config.model.profile:
        raise ConfigError(f"model.profile {config.model.profile!r} is a prediction: there is no model to measure")
    with _progress() as progress:
        model = await get_model(spec or config.model.path, progress)
        profiled = await profile.run_profile(with_model(config, model), profile.Workload(*workload), progress)
    profiled.save(out)
    results.print(profile.profile_table(profiled))
    for line in profile.findings(profiled):
        results.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


@app.command("plan")
def plan_command(
    model: Annotated[str, typer.Option(help="ds-660b, ds-27b or qwen-32b")] = "ds-660b",
    workload: Annotated[str, typer.Option(help="Trajectories like those of the paper's set 32k, 48k or 64k")] = "64k",
    aps: Annotated[float, typer.Option(help="Agents that start a second")] = 0.4,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of a node, each with a compute NIC")] = 8,
    cnic: Annotated[str, typer.Option(help="Rate of a compute NIC", metavar="RATE")] = "400gbit",
    snic: Annotated[str, typer.Option(help="Rate of a node's storage NIC", metavar="RATE")] = "400gbit",
    dram: Annotated[str, typer.Option(help="Rate of a node's memory", metavar="RATE")] = "500GB/s",
    hardware: Annotated[str, typer.Option(help="GPUs: h800 or h100")] = "h800",
    system: Annotated[str, typer.Option(help="As of `loadgen compare`")] = "dualpath",
    nodes: Annotated[str | None, typer.Option(help="Only this shape, say 2P4D, instead of a search")] = None,
    slo_ttft: Annotated[float, typer.Option(help="Objective for mean TTFT, in seconds")] = 4.0,
    slo_tpot: Annotated[float, typer.Option(help="Objective for mean TPOT, in seconds")] = 0.05,
    seed: Annotated[int, typer.Option(help="Decides arrivals and trajectories")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Write the plan here, as JSON", metavar="FILE", dir_okay=False, writable=True)
    ] = None,
) -> None:
    """How many nodes of each role a load needs: by formulas, and by a search over short simulations."""
    asked = {
        "model": model,
        "workload": workload,
        "aps": aps,
        "gpus-per-node": gpus_per_node,
        "cnic": cnic,
        "snic": snic,
        "dram": dram,
        "hardware": hardware,
        "system": system,
        "nodes": nodes,
        "slo-ttft": slo_ttft,
        "slo-tpot": slo_tpot,
        "seed": seed,
    }
    execute(_plan([f"--{name}={value}" for name, value in asked.items() if value is not None], out))


async def _plan(arguments: list[str], out: Path | None) -> int:
    check_result_file(out)
    with _progress() as progress:
        told = await plan.run_plan(arguments, progress)
    results.print(plan.plan_table(told))
    for line in plan.findings(told):
        results.print(line, markup=False, highlight=False, soft_wrap=True)
    if out is not None:
        out.write_text(json.dumps(told, indent=1) + "\n")
    return 0 if told["best"] else 1


app.add_typer(operate.app)
app.add_typer(provision.app)
app.add_typer(qos.app, name="qos")
app.command("doctor")(doctor)


@app.command("serve", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def serve_command(context: typer.Context) -> None:
    """Run one process of a cluster: serve ROLE --config FILE [--name NAME]."""
    from services import serve

    raise typer.Exit(serve.main(context.args))
