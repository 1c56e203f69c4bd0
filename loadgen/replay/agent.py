"""An agent plays one trajectory: its turns in order, each with the history that the turns before really produced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from common.clock import monotonic
from common.workload.hits import hits
from common.workload.text import Text
from common.workload.trajectories import Trajectory, Turn
from loadgen.client.endpoint import Client, Completion
from loadgen.client.prompt import History
from loadgen.measures.turns import RunLog, TrajectoryRecord, TurnRecord

Observer = Callable[[TurnRecord, History, Completion], None]
"""Told of every turn that ended, with its prompt, which changes afterwards. Must not block: the next turn waits."""


@dataclass(slots=True)
class Agent:
    """Plays trajectories against one model and logs what happens. think: keep the think times between turns.
    know_hits: tell the server how much of each prompt earlier turns have stored (the paper's replay)."""

    client: Client
    model: str
    text: Text
    log: RunLog
    think: bool
    observe: Observer
    know_hits: bool = False

    async def play(self, trajectory: Trajectory, intended: float, name: str | None = None) -> None:
        """Play all turns; the first is due at `intended`, each other one when the one before has ended (and thought).
        Its prefix, if it has one, is in storage already.

        name: what this run of the trajectory is called, its own name by default; it also decides the text. A failed
        turn ends the trajectory: what would follow has no history.
        """
        name = name or trajectory.name
        stream = self.text.stream(name)
        history = History(stream.take(trajectory.prefix))
        known = hits(trajectory) if self.know_hits else [None] * len(trajectory.turns)
        due = intended
        for index, turn in enumerate(trajectory.turns):
            if index and self.think:
                due += turn.think_s
            await sleep_until(due)
            history.cut(turn.context)
            history.extend(stream.take(turn.append))
            self.log.attempted += 1
            answer = Completion(started=monotonic())

            try:
                await self.client.complete(self.model, history, turn.generate, known[index], answer)
            except asyncio.CancelledError:
                answer.ended = monotonic()
                self.log.cut.append(_record(name, index, due, turn, len(history), answer))
                raise
            record = _record(name, index, due, turn, len(history), answer)
            self.log.turns.append(record)
            self.observe(record, history, answer)
            if answer.failure is not None:
                self.log.trajectories.append(TrajectoryRecord(name, intended, answer.ended, completed=False))
                return
            history.extend(answer.tokens)
            due = answer.ended
        self.log.trajectories.append(TrajectoryRecord(name, intended, answer.times[-1], completed=True))


def _record(name: str, index: int, due: float, turn: Turn, prompt_tokens: int, answer: Completion) -> TurnRecord:
    return TurnRecord(
        session=name,
        turn=index,
        intended=due,
        started=answer.started,
        ended=answer.ended,
        prompt_tokens=prompt_tokens,
        requested=turn.generate,
        times=answer.times,
        parts=answer.parts,
        cached_tokens=answer.cached_tokens,
        failure=answer.failure,
        detail=answer.detail,
        violations=violations(answer, prompt_tokens, turn.generate),
    )


def violations(answer: Completion, prompt_tokens: int, requested: int) -> list[str]:
    """What a completion that ended well got wrong: its length, or the counts in its usage (cases E20, E21)."""
    if answer.failure is not None:
        return []
    wrong: list[str] = []
    generated = len(answer.tokens)
    if generated != requested:
        wrong.append(f"generated {generated} tokens instead of {requested}")
    if answer.completion_tokens not in (None, generated):
        wrong.append(f"usage counts {answer.completion_tokens} generated tokens, {generated} arrived")
    if answer.prompt_tokens not in (None, prompt_tokens):
        wrong.append(f"usage counts {answer.prompt_tokens} prompt tokens, {prompt_tokens} were sent")
    return wrong


async def sleep_until(due: float) -> None:
    """Return at the monotonic time due, never before it."""
    while (left := due - monotonic()) > 0:
        await asyncio.sleep(left)
