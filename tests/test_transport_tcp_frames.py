"""The frames of the tcp transport: how transfers are cut into them, and what is no frame."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from common.transport.tcp_frames import (
    FRAME_BYTES,
    HEADER_BYTES,
    MAX_RUNS,
    Cursor,
    FrameError,
    Header,
    split_frames,
    unpack_table,
)
from tests.transport_support import MIB, noise


@settings(deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 100), st.integers(1, 3 * MIB)), min_size=1, max_size=40),
    small=st.integers(0, 2000),
)
def test_frames_keep_the_limits_and_every_byte(lengths: list[int], small: int) -> None:
    lengths = lengths + [3] * small
    offsets = np.cumsum([0, *lengths[:-1]])
    runs = np.stack([offsets, offsets + 7, lengths], axis=1)
    frames = list(split_frames(runs))
    assert all(len(part) <= MAX_RUNS and 0 < part[:, 2].sum() <= FRAME_BYTES for part in frames)
    pieces = np.concatenate(frames)
    assert pieces[:, 2].min() > 0
    assert np.array_equal(np.cumsum(pieces[:, 2])[:-1], pieces[1:, 0])
    assert np.array_equal(pieces[:, 0] + 7, pieces[:, 1]) and pieces[:, 2].sum() == sum(lengths)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=30), data=st.data())
def test_a_cursor_walks_every_byte_in_order(lengths: list[int], data: st.DataObject) -> None:
    memory = memoryview(bytearray(noise(300)))
    offsets = [index * 10 for index in range(len(lengths))]
    cursor, walked = Cursor(offsets, lengths), b""
    while cursor.remaining:
        views = cursor.slices(memory, data.draw(st.integers(1, 5)))
        ahead = b"".join(views)
        assert ahead
        step = data.draw(st.integers(1, len(ahead)))
        walked += ahead[:step]
        cursor.advance(step)
    assert walked == b"".join(memory[offset : offset + length] for offset, length in zip(offsets, lengths, strict=True))


@settings(deadline=None)
@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_random_bytes_are_no_header(raw: bytes) -> None:
    with pytest.raises(FrameError):
        Header.unpack(memoryview(raw))


def test_a_table_must_add_up() -> None:
    raw = struct.pack("<QQQQ", 0, 5, 9, 5)
    header = Header(1, bytes(16), 0, 2, 10, xxh3_64_intdigest(raw))
    assert Header.unpack(memoryview(header.pack())) == header
    assert unpack_table(memoryview(raw), header) == ((0, 9), (5, 5))
