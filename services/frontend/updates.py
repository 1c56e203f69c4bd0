"""What a client learns of its request: output as it comes, and the usage. Plain values; tuples, since they are made for
every token."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from common.messages import Token
from common.types import FinishReason


class Update(NamedTuple):
    """What the client learns next. The text may lag behind the tokens; with a finish reason it has caught up."""

    tokens: list[Token]
    text: str
    finish_reason: FinishReason | None

    @property
    def token_ids(self) -> list[int]:
        return [token.token for token in self.tokens]


class Sink(NamedTuple):
    """Who takes updates at once. free(): False while one would have to wait."""

    free: Callable[[], bool]
    take: Callable[[Update], None]


class Timing(NamedTuple):
    """The parts of the time from the first attempt's submission to the first token here (spec §10), in seconds.

    prefill_s is what the other three, as the engines report them, leave of it: a lost attempt's time is in there too.
    """

    scheduling_s: float
    allocation_s: float
    read_s: float
    prefill_s: float


class Usage(NamedTuple):
    """Tokens as the client is told them. cached: what the first attempt found in storage. timing: None before the first
    token, and where no engine reported."""

    prompt: int
    completion: int
    cached: int
    timing: Timing | None
