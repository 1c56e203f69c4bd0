"""What happened, a row a turn, in arrays: a run may have millions of turns."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from loadgen.simulator.request import Request

#: Of a turn, all in seconds. due and ended: on the run's clock. The others are lengths of time; not a number where a
#: turn has none.
TIMES = ("due", "ended")
SPANS = ("ttft", "ttst", "tpot", "scheduling", "allocation", "read", "prefill")
NONE = float("nan")


class Records:
    """Turns that have ended well, in the order of their ends, and trajectories that have ended: (due, ended)."""

    def __init__(self) -> None:
        self._times = array("d")
        self._spans = array("f")
        self._prompts = array("i")
        self._trajectories = array("d")
        self.prompt_tokens = 0
        self.hit_tokens = 0
        self.generated_tokens = 0
        self.num_turns = 0

    def turn(self, request: Request, due: float, first_at: float, ended: float, generated: int) -> None:
        """request: the attempt that ended; due, first_at: of the whole turn; generated: tokens in all."""
        ttft = first_at - due
        scheduling = request.started_at - request.arrived
        allocation = request.staged_at - request.started_at
        read = request.ready_at - request.staged_at
        if generated > 1:
            ttst = request.second_at - first_at
            tpot = (ended - first_at) / (generated - 1)
        else:
            ttst = tpot = NONE
        self._times.extend((due, ended))
        prefill = first_at - request.ready_at
        self._spans.extend((ttft, ttst, tpot, scheduling, allocation, read, prefill))
        self._prompts.append(request.prompt)
        self.num_turns += 1

    def tokens(self, prompt: int, hit: int, generated: int) -> None:
        """Of a turn."""
        self.prompt_tokens += prompt
        self.hit_tokens += hit
        self.generated_tokens += generated

    def trajectory(self, due: float, ended: float) -> None:
        self._trajectories.extend((due, ended))

    def column(self, name: str) -> NDArray[np.float64]:
        """One value a turn."""
        if name in TIMES:
            return np.frombuffer(self._times, dtype=np.float64).reshape(-1, len(TIMES))[:, TIMES.index(name)]
        spans = np.frombuffer(self._spans, dtype=np.float32).reshape(-1, len(SPANS))
        return spans[:, SPANS.index(name)].astype(np.float64)

    @property
    def prompts(self) -> NDArray[np.int32]:
        """Tokens, one value a turn."""
        return np.frombuffer(self._prompts, dtype=np.int32)

    @property
    def trajectories(self) -> NDArray[np.float64]:
        """[n, 2]: due and ended."""
        return np.frombuffer(self._trajectories, dtype=np.float64).reshape(-1, 2)
