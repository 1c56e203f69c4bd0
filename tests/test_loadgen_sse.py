"""Case E08: events are the same however the bytes are split."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.client import sse
from loadgen.client.sse import Event, EventParser

STREAM = (
    ': a comment\r\ndata: {"text":"größe 🙂"}\r\n\r\n'
    'data:{"text":" leading space kept"}\n\n'
    "data:  spaces \r\ndata:second line\r\n\r\n"
    "data: one\rdata: two\r\revent: error\ndata: x\nid: 3\nretry: 5\n\n"
    ":\n\n\n"
    "data: [DONE]\n\ndata: cut off"
).encode()

EVENTS = [
    Event("message", '{"text":"größe 🙂"}'.encode()),
    Event("message", b'{"text":" leading space kept"}'),
    Event("message", b" spaces \nsecond line"),
    Event("message", b"one\ntwo"),
    Event("error", b"x"),
    Event("message", b"[DONE]"),
]


def split(stream: bytes, cuts: list[int]) -> list[Event]:
    parser = EventParser()
    edges = [0, *sorted(cuts), len(stream)]
    return [e for a, b in pairwise(edges) for e in parser.feed(stream[a:b])]


def test_unsplit() -> None:
    assert split(STREAM, []) == EVENTS


def test_one_byte_at_a_time() -> None:
    assert split(STREAM, list(range(1, len(STREAM)))) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_split_anywhere(cuts: list[int]) -> None:
    assert split(STREAM, cuts) == EVENTS


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])), max_size=8),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.data(),
)
def test_any_text_comes_through(texts: list[str], end: str, data: st.DataObject) -> None:
    payloads = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    stream = "".join(f"data: {payload}{end}{end}" for payload in payloads).encode()
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=20))
    assert [json.loads(event.data)["text"] for event in split(stream, cuts)] == texts


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=10))
def test_garbage_never_breaks_the_parser_and_splits_do_not_matter(stream: bytes, cuts: list[int]) -> None:
    assert split(stream, [min(cut, len(stream)) for cut in cuts]) == split(stream, [])


def test_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1000)
    parser = EventParser()
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        for _ in range(11):
            parser.feed(b"data: " + b"x" * 94)
    assert split(b"data: 1\n\n" * 500, list(range(0, 4500, 50))) == [Event("message", b"1")] * 500
