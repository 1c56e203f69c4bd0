"""One run: ask the server for its model, fit the sessions to it, tokenize the text, play, measure."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.clock import monotonic
from common.workload.scaling import Selection, Workload, fit
from common.workload.sessions import read_sessions
from common.workload.text import TokenText, corpus
from loadgen.client.endpoint import Client, Completion, ensure_descriptors
from loadgen.client.prompt import History
from loadgen.measures.turns import RunLog, Slo, TurnRecord, measure, rows
from loadgen.progress import ProgressMode, progress
from loadgen.replay.agent import Agent
from loadgen.replay.transcript import Transcript


@dataclass(frozen=True, slots=True)
class Options:
    """What both modes need to know. sessions: a file of them. think: keep their think times."""

    url: str
    sessions: Path
    selection: Selection
    slo: Slo
    think: bool = False
    transcript: Path | None = None
    progress: ProgressMode = ProgressMode.AUTO


@dataclass(frozen=True, slots=True)
class Plan:
    """A mode, decided. settings: what it is, for the result. offered: turns to be sent. connections: at most so many
    at once. play: drives the agent through all of it."""

    settings: dict[str, Any]
    offered: int
    connections: int
    play: Callable[[Agent], Coroutine[Any, Any, None]]


async def run(options: Options, plan_for: Callable[[Workload], Plan]) -> dict[str, Any]:
    """The result of one run, ready for JSON. SIGINT or SIGTERM ends it at once, with what was measured until then.

    ConfigError if it cannot start.
    """
    sessions = await asyncio.to_thread(read_sessions, options.sessions)
    async with AsyncExitStack() as files:
        transcript = await files.enter_async_context(Transcript(options.transcript)) if options.transcript else None
        async with Client(options.url) as client:
            served = await client.model()
            workload = fit(sessions.trajectories, options.selection, served.limit)
            plan = plan_for(workload)
            ensure_descriptors(plan.connections)
            text = TokenText(await client.tokenize(corpus()))
            show = files.enter_context(progress(options.progress, plan.offered))

            def observe(record: TurnRecord, prompt: History, answer: Completion) -> None:
                show(record)
                if transcript is not None:
                    transcript.add(record, prompt, answer)

            log = RunLog(plan.offered, started=monotonic())
            await _until_signalled(plan.play(Agent(client, served.name, text, log, options.think, observe)), log)
    return {
        **plan.settings,
        "url": client.url,
        "model": served.name,
        "think": options.think,
        **measure(log, options.slo),
        "scaling": workload.describe(),
        "sessions": {
            "file": str(options.sessions),
            "source": sessions.header.get("source"),
            "in_file": len(sessions.trajectories),
            "duplicates_dropped": sessions.duplicates,
            "contexts_clipped": sessions.clipped,
            "generations_raised": sessions.raised,
        },
        "records": rows(log),
    }


async def _until_signalled(work: Coroutine[Any, Any, None], log: RunLog) -> None:
    """Run work to its end, or until a signal; then the log says that it was interrupted."""
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        if not task.cancelled():
            raise
        log.interrupted = True
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    log.ended = monotonic()
    if log.last_start is None:
        log.last_start = log.ended
