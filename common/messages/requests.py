"""A request between front end, scheduler and engines, and from prefill to decode engine."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ErrorCode
from common.messages.membership import Member
from common.types import FinishReason, Logprobs, ReadPath, Request
from common.wire import message

# ---- front end <-> scheduler ---------------------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class Submit:
    """front end -> scheduler, call: answered by Accepted, or an error (overloaded, no engines, bad request)."""

    request: Request


@message
@dataclass(frozen=True, slots=True)
class Accepted:
    pass


@message
@dataclass(frozen=True, slots=True)
class Cancel:
    """front end -> scheduler; scheduler -> engines: stop this attempt and release all it holds."""

    request_id: str
    attempt: int


@message
@dataclass(frozen=True, slots=True)
class RequestFailed:
    """engine -> scheduler -> front end: this attempt has ended badly; nothing more of it will come."""

    request_id: str
    attempt: int
    code: ErrorCode
    detail: str


# ---- engines <-> scheduler -----------------------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One engine's report (spec §7).

    seq: requests assigned and unfinished. tok: their total tokens. read_q: hit tokens of its requests not yet buffered.
    free_device_tokens: device memory not taken (decode engines). read_rate: hit tokens a second that its side reads
    while it has any to read, as measured; 0 where that is not known yet. heard: the number of the last Assign that it
    knows of.
    """

    incarnation: str
    seq: int
    tok: int
    read_q: int
    free_device_tokens: int
    read_rate: float
    heard: int


@message
@dataclass(frozen=True, slots=True)
class ReportLoad:
    """engine -> the leader of its group: to go with the leader's next fetch."""

    load: EngineLoad


@message
@dataclass(frozen=True, slots=True)
class Fetch:
    """leader engine -> scheduler: its group is ready for work, with the load of each engine (spec §7). A report holds
    until the engine's next one."""

    loads: list[EngineLoad]


@message
@dataclass(frozen=True, slots=True)
class Assign:
    """scheduler -> both engines of a request: where it runs, and which side reads its first hit_blocks blocks.

    pe_blocks: so many of them, from the first one on, are read on the prefill side (PE path: all, DE path: none); the
    others on the decode side. waited_s: from its arrival to this assignment. number: of this assignment, among all to
    the same engine, from 1 on.
    """

    request: Request
    prefill: Member
    decode: Member
    read_path: ReadPath
    hit_blocks: int
    pe_blocks: int
    waited_s: float
    number: int


@message
@dataclass(frozen=True, slots=True)
class RequestDone:
    """decode engine -> scheduler: finished; everything has been released."""

    request_id: str
    attempt: int


@message
@dataclass(frozen=True, slots=True)
class PrefillDone:
    """prefill engine -> scheduler: its part is done and it holds nothing of the request any more."""

    request_id: str
    attempt: int


@message
@dataclass(frozen=True, slots=True)
class HandedOver:
    """decode engine -> scheduler: the KV is in device memory and the staging buffer is free."""

    request_id: str
    attempt: int


# ---- engines -> front end ------------------------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. index counts from the request's first output token, over all attempts. logprobs: None where
    the request asks for none."""

    request_id: str
    attempt: int
    index: int
    token: int
    logprobs: Logprobs | None = None


@message
@dataclass(frozen=True, slots=True)
class Tokens:
    """engine -> front end: the tokens of one step."""

    tokens: list[Token]


@message
@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """prefill engine -> front end: what was found and what is computed, in tokens; and the parts of TTFT before the
    prefill (spec §10): until both engines were assigned, until the first byte was read, until the last hit block was
    buffered."""

    request_id: str
    attempt: int
    cached_tokens: int
    computed_tokens: int
    scheduling_s: float
    allocation_s: float
    read_s: float


@message
@dataclass(frozen=True, slots=True)
class Finished:
    """decode engine -> front end, after the last token and once the request's blocks are announced to storage."""

    request_id: str
    attempt: int
    reason: FinishReason
    num_tokens: int


# ---- prefill engine -> decode engine -------------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class FirstToken:
    """The token that the prefill engine sampled; finish is set if it already ends the request."""

    request_id: str
    attempt: int
    token: int
    cached_tokens: int
    finish: FinishReason | None


# ---- engines of a group --------------------------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class Meet:
    """profiled engine -> the leader of its group, call: it has a forward of so many tokens, whose attention takes so
    long. Answered by Met when the round begins (services.engine.lockstep)."""

    incarnation: str
    attention_s: float
    tokens: int


@message
@dataclass(frozen=True, slots=True)
class Met:
    """The forward takes this long, for everybody in the round."""

    seconds: float


@message
@dataclass(frozen=True, slots=True)
class Part:
    """profiled engine -> the leader of its group: its forward is computed; more: it has another one."""

    incarnation: str
    more: bool
