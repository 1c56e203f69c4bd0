"""Reader of Mooncake traces: JSON lines of {"timestamp", "input_length", "output_length", "hash_ids"}.

Each row is one request that arrives on its own. timestamp: milliseconds; hash_ids: one id for every 512 tokens of the
prompt, the last block may be partial. Prompts that begin with the same ids share these tokens, a block with the same id
at two lengths the shorter one's; at the 64-token grain of storage, whole blocks of 64 of that. A trace is replayed as
it is: every row once, in order. What cannot be is refused with the line's number: a row whose ids do not cover its
prompt, times on some rows only, times that go back, or fractions of a millisecond (most likely these are seconds). A
trace without any times starts all at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.workload.rows import BadRow, json_object, read_rows, refuse
from common.workload.text import IdText
from common.workload.trajectories import Trajectory, Turn

TRACE_BLOCK_TOKENS = 512

@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One row. at_s: after the trace's time 0. trajectory: a single turn. shared: prompt tokens that it has in common
    with an earlier row, the most with any one; what of it hits depends on what is stored by then."""

    at_s: float
    trajectory: Trajectory
    hash_ids: tuple[int, ...]
    shared: int


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a file. ConfigError if it cannot be read, holds no request, or has bad rows (line numbers and reasons)."""
    return read_rows(path, "trace", "give an existing file", parse_trace)


def parse_trace(lines: Iterable[str], source: str) -> list[TraceRequest]:
    """All rows in order, each once; source names them in errors. Every bad row is found before any is refused."""
    requests: list[TraceRequest] = []
    seen = _Prefixes()
    bad: list[str] = []
    timed: bool | None = None
    latest = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            at_ms, prompt, generate, ids = _row(line)
            if timed is None:
                timed = at_ms is not None
            if timed != (at_ms is not None):
                raise BadRow("has no timestamp, others do" if timed else "has a timestamp, others do not")
            if at_ms is not None and at_ms < latest:
                raise BadRow(f"timestamp {at_ms} is before {latest}, that of an earlier row: sort the trace")
        except BadRow as reason:
            bad.append(f"line {number}: {reason}")
            continue
        latest = at_ms or 0
        trajectory = Trajectory(f"request-{len(requests)}", (Turn(0, prompt, generate),))
        requests.append(TraceRequest(latest / 1000, trajectory, ids, seen.add(ids, prompt)))
    refuse("trace", source, bad)
    if not requests:
        raise ConfigError(f"trace {source} holds no request")
    return requests


class TraceText:
    """The prompts of a trace as token ids below vocabulary: each block's tokens are decided by its hash id, so that
    prompts share exactly what the trace says. Streams are called by the names of the requests' trajectories."""

    def __init__(self, requests: Sequence[TraceRequest], vocabulary: int) -> None:
        self._ids = {request.trajectory.name: request.hash_ids for request in requests}
        self._text = IdText(vocabulary)

    def stream(self, name: str) -> TraceStream:
        """The prompt of the request whose trajectory is called name. KeyError if there is none."""
        return TraceStream(self._text, self._ids[name])


class TraceStream:
    """The tokens of one prompt, in order."""

    def __init__(self, text: IdText, ids: Sequence[int]) -> None:
        self._text = text
        self._ids = ids
        self._position = 0

    def take(self, count: int) -> list[int]:
        """The next count tokens. IndexError past the last block."""
        taken: list[int] = []
        while len(taken) < count:
            index, start = divmod(self._position, TRACE_BLOCK_TOKENS)
            stop = min(TRACE_BLOCK_TOKENS, start + count - len(taken))
            taken += self._text.tokens(f"block-{self._ids[index]}", start, stop).tolist()
            self._position += stop - start
        return taken


class _Prefixes:
    """Prompts so far, as chains of blocks."""

    def __init__(self) -> None:
        self._lengths: dict[tuple[int, int], int] = {}  # (chain before, id) -> most tokens seen of that block
        self._chains: dict[tuple[int, int], int] = {}   # (chain before, id) -> chain, numbered; 0 is the empty one

    def add(self, ids: Sequence[int], prompt: int) -> int:
        """The longest prefix that this prompt shares with one before it, in tokens; then it counts as seen."""
        shared = chain = 0
        whole = True
        for index, hash_id in enumerate(ids):
            block = (chain, hash_id)
            size = min(TRACE_BLOCK_TOKENS, prompt - index * TRACE_BLOCK_TOKENS)
            seen = self._lengths.get(block, 0)
            if whole:
                shared += min(size, seen)
                whole = seen == TRACE_BLOCK_TOKENS
            self._lengths[block] = max(size, seen)
            chain = self._chains.setdefault(block, len(self._chains) + 1)
        return shared


def _row(line: str) -> tuple[int | None, int, int, tuple[int, ...]]:
    """Timestamp in ms, prompt, generation, ids."""
    row = json_object(line)
    at_ms = row.get("timestamp")
    if at_ms is not None and (type(at_ms) is not int or at_ms < 0):
        raise BadRow(f"timestamp must be whole milliseconds of at least 0, not {at_ms!r}: is it in seconds?")
    prompt, generate = _length(row, "input_length"), _length(row, "output_length")
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or not all(type(hash_id) is int for hash_id in ids):
        raise BadRow("hash_ids must be a list of whole numbers")
    blocks = -(-prompt // TRACE_BLOCK_TOKENS)
    if len(ids) != blocks:
        raise BadRow(f"{len(ids)} hash_ids, but {prompt} tokens are {blocks} blocks of {TRACE_BLOCK_TOKENS}")
    return at_ms, prompt, generate, tuple(ids)


def _length(row: dict[str, Any], key: str) -> int:
    length = row.get(key)
    if type(length) is not int or length < 1:
        raise BadRow(f"{key} must be a whole number of at least 1, not {length!r}")
    return length
