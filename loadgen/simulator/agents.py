"""Agents: who sends which turn when (loadgen.agent, loadgen.replay and loadgen.online, on the virtual clock)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from common.errors import RETRYABLE, ErrorCode
from common.workload.extend import Extended
from common.workload.hits import hits
from common.workload.trajectories import Trajectory
from loadgen.load import Arrival, Load, Offline
from loadgen.simulator.request import Request

if TYPE_CHECKING:
    from loadgen.simulator.run import Simulation

#: Attempts at one turn (config.FrontendConfig.max_attempts).
MAX_ATTEMPTS = 3


class Player:
    """An agent in the middle of a trajectory. due: when its first turn, or the turn in hand, was to be sent; made:
    tokens that attempts at this turn have made so far; first_at: the first of them."""

    __slots__ = (
        "attempt",
        "began",
        "due",
        "first_at",
        "generates",
        "hits",
        "index",
        "made",
        "name",
        "prompts",
        "thinks",
    )

    def __init__(self, name: str, trajectory: Trajectory, due: float) -> None:
        turns = trajectory.turns
        self.name = name
        self.prompts = array("i", [turn.prompt for turn in turns])
        self.hits = array("i", hits(trajectory))
        self.generates = array("i", [turn.generate for turn in turns])
        self.thinks = [turn.think_s for turn in turns] if any(turn.think_s for turn in turns) else None
        self.index = 0
        self.began = self.due = due
        self.attempt = 0
        self.made = 0
        self.first_at = -1.0


class Agents:
    """Plays a load. offered: turns in all; attempted: sent; failed: turns that ended badly, by error code.
    last_start: when the last trajectory started; None as long as more are to start."""

    def __init__(self, run: Simulation, load: Load) -> None:
        self._run = run
        self._load = load
        self._next = 0  # the trajectory that starts next
        self.offered = num_turns(self._trajectories)
        self.attempted = 0
        self.playing = 0
        self.failed: dict[str, int] = {}
        self.missed = 0  # turns that have missed the objective for TTFT
        self.last_start: float | None = None
        self.given_up = False

    @property
    def _trajectories(self) -> Sequence[Trajectory]:
        load = self._load
        return load.trajectories if isinstance(load, Offline) else [arrival.trajectory for arrival in load.arrivals]

    def start(self) -> None:
        load, clock = self._load, self._run.clock
        if isinstance(load, Offline):
            for _ in range(min(load.agents, len(load.trajectories))):
                self._start_next(0.0)
        else:
            for arrival in load.arrivals:
                clock.at(arrival.at, self._arrive, arrival)
            self.last_start = load.arrivals[-1].at
            clock.at(load.until_s, self._over)

    def _over(self, _: None) -> None:
        self._run.clock.stop()

    # -- trajectories --

    def _start_next(self, due: float) -> None:
        load = self._load
        assert isinstance(load, Offline)
        if self._next >= len(load.trajectories):
            return
        trajectory = load.trajectories[self._next]
        self._next += 1
        self._play(trajectory.name, trajectory, due)
        if self._next == len(load.trajectories):
            self.last_start = due
            if not load.whole:
                self._run.clock.stop()

    @property
    def _to_come(self) -> int:
        """Trajectories that have not started."""
        load = self._load
        return len(load.trajectories if isinstance(load, Offline) else load.arrivals) - self._next

    def _arrive(self, arrival: Arrival) -> None:
        self._next += 1
        self._play(arrival.name, arrival.trajectory, arrival.at)

    def _play(self, name: str, trajectory: Trajectory, due: float) -> None:
        self.playing += 1
        self._send(Player(name, trajectory, due))

    def _end(self, player: Player, completed: bool) -> None:
        self.playing -= 1
        if completed:
            self._run.records.trajectory(player.began, self._run.clock.now)
        if isinstance(self._load, Offline):
            self._start_next(self._run.clock.now)
        if not self.playing and not self._to_come:
            self._run.clock.stop()

    def under_way(self) -> NDArray[np.float64]:
        """[n, 2] of the turns that were due and have not ended: when, and their time to first token, if they had it."""
        players = {request.player for request in self._run.requests.values()}
        spans = [(p.due, p.first_at - p.due if p.first_at >= 0 else np.nan) for p in players]
        return np.array(spans, dtype=np.float64).reshape(-1, 2)

    # -- turns --

    def _send(self, player: Player) -> None:
        """The turn in hand, at its time: or what is left of it, after a lost attempt."""
        run, index = self._run, player.index
        if not player.attempt:
            self.attempted += 1
        made = player.made
        key = (f"{player.name}/{index}", player.attempt)
        prompt = player.prompts[index] + made
        request = Request(key, player, prompt, player.hits[index], player.generates[index] - made, player.due)
        now = run.clock.now
        due = max(now, player.due) + run.overheads.turn_s
        if due > now:
            run.clock.at(due, run.arrive, request)
        else:
            run.arrive(request)

    def first_token(self, request: Request) -> None:
        player = request.player
        if player.first_at < 0:
            player.first_at = request.first_at
            if request.first_at - player.due > self._run.slo_ttft_s:
                self.missed += 1
                load = self._load
                if not isinstance(load, Offline) and self.missed > load.misses:
                    self.given_up = True
                    self._run.clock.stop()

    def ended(self, request: Request) -> None:
        """Its last token is there."""
        player, now = request.player, self._run.clock.now
        index = player.index
        records = self._run.records
        generated = player.generates[index]
        records.turn(request, player.due, player.first_at, now, generated)
        records.prompt_tokens += player.prompts[index]
        records.hit_tokens += player.hits[index]
        records.generated_tokens += generated
        self._run.progress()
        player.index = index = index + 1
        player.attempt = player.made = 0
        player.first_at = -1.0
        if index == len(player.prompts):
            self._end(player, completed=True)
            return
        player.due = now + player.thinks[index] if player.thinks else now
        self._send(player)

    def lost(self, request: Request, code: ErrorCode) -> None:
        """The attempt has ended badly: try again, as a front end does, or give the trajectory up."""
        player = request.player
        player.made += request.made
        player.attempt += 1
        if player.made >= player.generates[player.index]:
            self.ended(request)
        elif code in RETRYABLE and player.attempt < MAX_ATTEMPTS:
            self._send(player)
        else:
            self.failed[code.value] = self.failed.get(code.value, 0) + 1
            self._end(player, completed=False)


def num_turns(trajectories: Sequence[Trajectory]) -> int:
    """Of all of them."""
    if isinstance(trajectories, Extended):
        return trajectories.num_turns
    return sum(len(trajectory.turns) for trajectory in trajectories)
