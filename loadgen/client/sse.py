"""Server-sent events from bytes that may be split anywhere (WHATWG event streams; id and retry are ignored)."""

from __future__ import annotations

import re
from typing import NamedTuple

#: An event larger than this is an attack or a defect, not a token.
MAX_EVENT_BYTES = 64 << 20

_LINE_END = re.compile(rb"\r\n|\r|\n")


class Event(NamedTuple):
    """One event; name is "message" unless the server gave another. data is still bytes: UTF-8, lines joined by \\n."""

    name: str
    data: bytes


class EventParser:
    """Feed bytes as they come, get whole events. An event that the stream's end cuts off is never returned."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._data: list[bytes] = []
        self._name = ""
        self._size = 0
        self._after_cr = False

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that end in chunk. ValueError for an event over MAX_EVENT_BYTES."""
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        if not chunk:
            return []
        self._after_cr = chunk.endswith(b"\r")
        self._size += len(chunk)
        if self._size > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        first, *others = _LINE_END.split(chunk)
        self._pieces.append(first)
        events: list[Event] = []
        for line in others:
            self._line(b"".join(self._pieces), events)
            self._pieces = [line]
        return events

    def _line(self, line: bytes, events: list[Event]) -> None:
        if not line:
            if self._data:
                events.append(Event(self._name or "message", b"\n".join(self._data)))
            self._data, self._name, self._size = [], "", 0
            return
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
