"""Copies of runs: the same bytes whatever way they take, and how long that takes beside one step a run."""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from common.transport import copying
from common.transport.copying import PIECE_BYTES, RECORD_BYTES, RECORDS_BYTES, copy_runs
from tests.transport_support import MIB, noise


def as_runs(*runs: tuple[int, int, int]) -> NDArray[np.int64]:
    return np.array(runs, dtype=np.int64).reshape(-1, 3)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, NDArray[np.int64]]:
    """A size of both memories, and runs of few lengths or many, at any offset; apart from one another in the target."""
    kinds = draw(st.lists(st.integers(1, 3000) | st.just(RECORD_BYTES) | st.just(RECORD_BYTES + 1), max_size=3))
    lengths = [length for length in kinds for _ in range(draw(st.integers(1, 60)))]
    lengths += draw(st.lists(st.integers(1, 200), max_size=20))
    lengths = draw(st.permutations(lengths))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    targets, at = [], 0
    for length in lengths:
        at += int(rng.integers(0, 9))
        targets.append(at)
        at += length
    size = at + draw(st.integers(0, 20))
    runs = [(int(rng.integers(0, size - n + 1)), to, n) for to, n in zip(targets, lengths, strict=True)]
    return size, as_runs(*draw(st.permutations(runs)))


@settings(deadline=None)
@given(layouts())
def test_every_run_arrives_and_nothing_else_is_touched(layout: tuple[int, NDArray[np.int64]]) -> None:
    size, runs = layout
    source, target = noise(size), noise(size, 1)
    expected = target.copy()
    for begin, to, length in runs.tolist():
        expected[to : to + length] = source[begin : begin + length]
    assert copy_runs(source.data, target.data, runs)
    assert np.array_equal(target, expected)
    assert np.array_equal(source, noise(size))


@pytest.mark.parametrize("length", [512, RECORD_BYTES, 41 << 10])
def test_a_stopped_copy_writes_at_most_a_piece_more(length: int) -> None:
    count = 8 * MIB // length
    source, target = noise(8 * MIB), np.zeros(8 * MIB, np.uint8)
    offsets = np.arange(count) * length
    answers = iter([True, False])
    runs = np.stack([offsets, offsets, np.full(count, length)], axis=1)
    assert not copy_runs(source.data, target.data, runs, lambda: next(answers))
    written = np.flatnonzero(target)
    limit = RECORDS_BYTES if length <= RECORD_BYTES else PIECE_BYTES
    assert limit - length <= written[-1] < limit
    assert np.array_equal(target[: written[-1] + 1], source[: written[-1] + 1])


def test_stopped_before_it_begins() -> None:
    source, target = noise(100), np.zeros(100, np.uint8)
    assert not copy_runs(source.data, target.data, as_runs((0, 0, 100)), lambda: False)
    assert not target.any()


def test_no_runs() -> None:
    assert copy_runs(noise(10).data, memoryview(bytearray(10)), as_runs())


@pytest.mark.benchmarks
@pytest.mark.parametrize("length", [512, 2 << 10, 4 << 10, 8 << 10, 41 << 10])
def test_speed_of_many_runs_of_one_length(length: int, capsys: pytest.CaptureFixture[str]) -> None:
    """4,096 runs of a random order, as copied and as one step a run, interleaved."""
    rng, count = np.random.default_rng(0), 4096
    source, target = noise(count * length), np.zeros(count * length, np.uint8)
    runs = np.stack([rng.permutation(count) * length, rng.permutation(count) * length, np.full(count, length)], axis=1)
    ratios = []
    for _ in range(15):
        begun = time.perf_counter()
        copy_runs(source.data, target.data, runs)
        between = time.perf_counter()
        copying._copy_singly(source, target, runs, lambda: True)
        ratios.append((time.perf_counter() - between) / (between - begun))
    with capsys.disabled():
        print(
            f"\n{count} runs of {length} bytes: {statistics.median(ratios):.2f} times as fast as one step a run"
            f" (from {min(ratios):.2f} to {max(ratios):.2f})"
        )
