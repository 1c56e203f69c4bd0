"""Agents: who sends which turn when (loadgen.replay, on the virtual clock)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from common.errors import RETRYABLE, ErrorCode
from common.workload.extend import Extended
from common.workload.trajectories import Trajectory
from loadgen.simulator.clock import Clock
from loadgen.simulator.player import Library, Player
from loadgen.simulator.records import Records
from loadgen.simulator.request import Request
from loadgen.workload.load import Arrival, Load, Offline

#: Attempts at one turn (config.FrontendConfig.max_attempts).
MAX_ATTEMPTS = 3


class Agents:
    """Plays a load. offered: turns in all; attempted: sent; failed: turns that ended badly, by error code.
    last_start: when the last trajectory started; None as long as more are to start.

    arrive: told of each request that reaches the scheduler, turn_s after it was sent. slo_ttft_s: the objective. The
    clock is stopped once everything is played, or hopeless.
    """

    def __init__(
        self,
        load: Load,
        clock: Clock,
        records: Records,
        arrive: Callable[[Request], None],
        turn_s: float,
        slo_ttft_s: float,
    ) -> None:
        self._load = load
        self._clock = clock
        self._records = records
        self._arrive = arrive
        self._turn_s = turn_s
        self._slo_ttft_s = slo_ttft_s
        self._library = Library()
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
        load, clock = self._load, self._clock
        if isinstance(load, Offline):
            for _ in range(min(load.agents, len(load.trajectories))):
                self._start_next(0.0)
        else:
            for arrival in load.arrivals:
                clock.at(arrival.at, self._come, arrival)
            self.last_start = load.arrivals[-1].at
            clock.at(load.until_s, self._over)

    def _over(self, _: None) -> None:
        self._clock.stop()

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
                self._clock.stop()

    @property
    def _to_come(self) -> int:
        """Trajectories that have not started."""
        load = self._load
        return len(load.trajectories if isinstance(load, Offline) else load.arrivals) - self._next

    def _come(self, arrival: Arrival) -> None:
        self._next += 1
        self._play(arrival.name, arrival.trajectory, arrival.at)

    def _play(self, name: str, trajectory: Trajectory, due: float) -> None:
        self.playing += 1
        self._send(Player(name, self._library.lengths(trajectory), due))

    def _end(self, player: Player, completed: bool) -> None:
        self.playing -= 1
        if completed:
            self._records.trajectory(player.began, self._clock.now)
        if isinstance(self._load, Offline):
            self._start_next(self._clock.now)
        if not self.playing and not self._to_come:
            self._clock.stop()

    @staticmethod
    def under_way(requests: Iterable[Request]) -> NDArray[np.float64]:
        """[n, 2] of the turns that these are attempts at: when they were due, and their time to first token, if they
        had it."""
        players = dict.fromkeys(request.player for request in requests)
        spans = [(p.due, p.first_at - p.due if p.first_at >= 0 else np.nan) for p in players]
        return np.array(spans, dtype=np.float64).reshape(-1, 2)

    # -- turns --

    def _send(self, player: Player) -> None:
        """The turn in hand, at its time: or what is left of it, after a lost attempt."""
        index, lengths, due = player.index, player.lengths, player.due
        if not player.attempt:
            self.attempted += 1
        made = player.made
        key = (f"{player.name}/{index}", player.attempt)
        prompt = lengths.prompts[index] + made
        request = Request(key, player, prompt, lengths.hits[index], lengths.generates[index] - made, due)
        now = self._clock.now
        at = (due if due > now else now) + self._turn_s
        if at > now:
            self._clock.at(at, self._arrive, request)
        else:
            self._arrive(request)

    def first_token(self, request: Request) -> None:
        player = request.player
        if player.first_at < 0:
            player.first_at = request.first_at
            if request.first_at - player.due > self._slo_ttft_s:
                self.missed += 1
                load = self._load
                if not isinstance(load, Offline) and self.missed > load.misses:
                    self.given_up = True
                    self._clock.stop()

    def ended(self, request: Request) -> None:
        """Its last token is there."""
        player, now = request.player, self._clock.now
        index, lengths = player.index, player.lengths
        generated = lengths.generates[index]
        self._records.turn(request, player.due, player.first_at, now, generated)
        self._records.tokens(lengths.prompts[index], lengths.hits[index], generated)
        player.index = index = index + 1
        player.attempt = player.made = 0
        player.first_at = -1.0
        if index == len(lengths.prompts):
            self._end(player, completed=True)
            return
        player.due = now + lengths.thinks[index] if lengths.thinks else now
        self._send(player)

    def lost(self, request: Request, code: ErrorCode) -> None:
        """The attempt has ended badly: try again, as a front end does, or give the trajectory up."""
        player = request.player
        player.made += request.made
        player.attempt += 1
        if player.made >= player.lengths.generates[player.index]:
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
