"""The demo: the same agent sessions through two systems, and every turn checked against plain transformers.

Each system is a fresh cluster with an empty block directory. They run one after the other, then the check runs alone,
so that nothing shares the cores with what is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.config import Config
from common.errors import ConfigError
from common.rundir import RunDirectory
from common.workload.scaling import Selection, fit
from common.workload.sessions import read_sessions
from services.launcher.cluster import Cluster, with_model
from services.launcher.models import Model
from services.launcher.tools import ToolError, last_json, run_tool

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from rich.table import Table

#: What is compared, in this order: scheduler.read_side of each system.
SYSTEMS = {"pe-only": "pe_only", "dualpath": "shorter_queue"}
PREFILL, DECODE = 1, 2
#: Keys of loadgen's result that go into a system's.
COUNTS = ("turns", "failed", "prompt_tokens", "hit_tokens", "computed_tokens", "generated_tokens")
TIMES = ("ttft_ms", "ttst_ms", "tpot_ms", "itl_ms", "jct_s")


@dataclass(frozen=True, slots=True)
class Input:
    """What is replayed: sessions of this file, fitted (common.workload.scaling), so many at a time."""

    sessions: Path
    selection: Selection
    agents: int


async def run_demo(
    config: Config, model: Model, replayed: Input, run: RunDirectory, progress: Progress
) -> dict[str, Any]:
    """{"results": [one a system], "mismatches": [...], "facts": {...}}: what --out writes.

    ConfigError if the sessions cannot be used or something that was started has failed.
    """
    fit(read_sessions(replayed.sessions).trajectories, replayed.selection, None)
    config = with_model(config, model)
    replays = {system: await _replay(system, config, replayed, run, progress) for system in SYSTEMS}
    mismatches = await _check(config, run, progress)
    wrong = Counter(mismatch["system"] for mismatch in mismatches)
    facts = {
        "model": model.name,
        "model_digest": model.digest,
        "dtype": config.model.dtype,
        "engines": f"{PREFILL} prefill, {DECODE} decode",
        "transport": config.network.transport,
        "cores": len(os.sched_getaffinity(0)),
        "agents": replayed.agents,
        "sessions": replayed.sessions.name,
        "scaling": next(replay["scaling"] for replay in replays.values()),
    }
    results = [
        {
            "system": system,
            **{key: replay[key] for key in COUNTS},
            "turns_equal": replay["turns"] - wrong[system],
            "read_bytes": replay["read_bytes"],
            **{key: replay[key] for key in TIMES},
        }
        for system, replay in replays.items()
    ]
    return {"results": results, "mismatches": mismatches, "facts": facts}


async def _replay(
    system: str, config: Config, replayed: Input, run: RunDirectory, progress: Progress
) -> dict[str, Any]:
    """One system, from an empty block directory to its end: loadgen's result, with read_bytes."""
    from services.launcher.status import get_status, read_bytes

    scheduler = config.scheduler.model_copy(update={"read_side": SYSTEMS[system]})
    storage = config.storage.model_copy(update={"path": str(run.path / f"{system}.blocks")})
    config = config.model_copy(update={"scheduler": scheduler, "storage": storage})
    out = run.path / f"{system}.json"
    async with Cluster(config, PREFILL, DECODE, run, progress, f"{system}: processes") as cluster:
        selection = replayed.selection
        replay = _run_shown(
            progress.add_task(f"{system}: turns", total=None),
            progress,
            run,
            "loadgen",
            "replay",
            f"--url={cluster.url}",
            f"--sessions={replayed.sessions.absolute()}",
            f"--agents={replayed.agents}",
            f"--max-sessions={selection.max_sessions}",
            f"--max-turns={selection.max_turns}",
            f"--max-context={selection.max_context}",
            f"--out={out}",
            f"--transcript={_transcript(run, system)}",
            "--progress=json",
        )
        await cluster.during(replay)
        await asyncio.sleep(2 * config.timeouts.heartbeat_s)  # counters travel with heartbeats
        nodes = read_bytes(await get_status(cluster.config))
    return {**json.loads(out.read_text()), "read_bytes": nodes}


async def _check(config: Config, run: RunDirectory, progress: Progress) -> list[dict[str, Any]]:
    """The turns, of all systems, whose tokens are not the reference's: its mismatches, with "system"."""
    merged = run.path / "transcript.jsonl"
    with merged.open("w") as file:
        for system in SYSTEMS:
            for line in _transcript(run, system).read_text().splitlines():
                row = json.loads(line)
                file.write(json.dumps({**row, "session": f"{system}/{row['session']}"}) + "\n")
    output = await _run_shown(
        progress.add_task("checking against transformers", total=None),
        progress,
        run,
        "services.engine.torch_backend.reference",
        f"--model={config.model.path}",
        f"--dtype={config.model.dtype}",
        f"--transcript={merged}",
        "--progress=json",
    )
    mismatches = []
    for mismatch in json.loads(last_json(output))["mismatches"]:
        system, _, session = mismatch["session"].partition("/")
        mismatches.append({**mismatch, "system": system, "session": session})
    return mismatches


async def _run_shown(
    task: TaskID, progress: Progress, run: RunDirectory, module: str, *arguments: str
) -> list[str]:
    """run_tool() with its progress lines shown as they come. If it fails the run's directory is kept."""

    def show(line: str) -> None:
        if not line.startswith("{"):
            return
        row = json.loads(line)
        for done, total in (("done", "total"), ("forward", "forwards")):
            if done in row:
                progress.update(task, completed=row[done], total=row[total])

    try:
        return await run_tool(module, *arguments, on_line=show)
    except ToolError as error:
        raise ConfigError(f"{module}: {error}; the logs are in {run.keep()}") from None


def _transcript(run: RunDirectory, system: str) -> Path:
    return run.path / f"{system}.transcript.jsonl"


def passed(report: dict[str, Any]) -> bool:
    """Whether every turn of every system ended and has the reference's tokens."""
    return all(row["turns"] == row["turns_equal"] and not row["failed"] for row in report["results"])


def table(report: dict[str, Any]) -> Table:
    """One column a system."""
    from rich.table import Table

    facts = report["facts"]
    shown = Table(title=f"{facts['model']}, {facts['engines']}, {facts['cores']} cores", title_justify="left")
    shown.add_column("system")
    results = report["results"]
    for row in results:
        shown.add_column(row["system"], justify="right")

    def add(title: str, cells: Iterable[str]) -> None:
        shown.add_row(title, *cells)

    add("turns", (f"{row['turns']}" for row in results))
    add("turns equal to transformers", (f"{row['turns_equal']}" for row in results))
    add("hit tokens", (f"{row['hit_tokens']:,}" for row in results))
    add("computed tokens", (f"{row['computed_tokens']:,}" for row in results))
    for node in results[0]["read_bytes"]:
        add(f"read by {node}, MB", (f"{row['read_bytes'][node] / 1e6:,.1f}" for row in results))
    for name in ("ttft", "ttst", "tpot"):
        for quantile in ("p50", "p99"):
            add(f"{name.upper()} {quantile}, ms", (_number(row[f"{name}_ms"][quantile]) for row in results))
    add("mean trajectory JCT, s", (_number(row["jct_s"]["mean"]) for row in results))
    return shown


def findings(report: dict[str, Any]) -> list[str]:
    """What the table does not say: what was replayed, and each turn that is not as it should be."""
    facts, scaling = report["facts"], report["facts"]["scaling"]
    lines = [
        f"replayed: {facts['sessions']}, {scaling['sessions']} sessions, {facts['agents']} at a time",
        f"lengths: divided by {', '.join(str(k) for k in scaling['factors'].values())}, "
        f"so that no context is longer than {scaling['max_context']} tokens",
        f"transport: {facts['transport']}; dtype: {facts['dtype']}; reads: storage side of each node",
    ]
    lines += [f"{row['system']}: {row['failed']} turns FAILED" for row in report["results"] if row["failed"]]
    lines += [
        f"NOT EQUAL: {m['system']}, session {m['session']}, turn {m['turn']}, output token {m['index']}: "
        f"{m['got']} instead of {m['expected']} (logits differ by {m['gap']:.2g})"
        for m in report["mismatches"]
    ]
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
