"""Arrivals and prompt text: decided by a seed or a name alone."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.workload.arrivals import poisson_arrivals
from common.workload.text import SIGNATURE_TOKENS, TokenText, corpus


def test_arrivals_repeat_with_the_seed_only() -> None:
    times = poisson_arrivals(5.0, 100.0, seed=7)
    assert times == poisson_arrivals(5.0, 100.0, seed=7)
    assert times != poisson_arrivals(5.0, 100.0, seed=8)
    assert times == sorted(times)
    assert times[-1] < 100.0
    assert poisson_arrivals(5.0, 0.0, seed=7) == []


def test_gaps_are_exponential_and_not_clipped() -> None:
    times = poisson_arrivals(20.0, 1000.0, seed=1)
    gaps = sorted(later - earlier for earlier, later in zip([0.0, *times], times, strict=False))
    n = len(gaps)
    assert abs(n - 20_000) < 4 * math.sqrt(20_000)
    assert max(gaps) > 7 / 20, "of 20,000 exponential gaps the longest is about 10 means long"
    distance = max(abs((i + 1) / n - (1 - math.exp(-20.0 * gap))) for i, gap in enumerate(gaps))
    assert distance < 1.63 / math.sqrt(n), "Kolmogorov-Smirnov at 1 %"


@pytest.mark.parametrize(("rate", "duration"), [(0.0, 1.0), (-1.0, 1.0), (1.0, -1.0)])
def test_no_such_process(rate: float, duration: float) -> None:
    with pytest.raises(ValueError, match="not a Poisson process"):
        poisson_arrivals(rate, duration, seed=0)


@given(st.lists(st.integers(0, 40), max_size=20))
def test_a_stream_is_the_same_however_it_is_taken(counts: list[int]) -> None:
    text = TokenText(range(100, 130))
    pieces = text.stream("a")
    whole = text.stream("a").take(sum(counts))
    assert [token for count in counts for token in pieces.take(count)] == whole
    for i in range(SIGNATURE_TOKENS, len(whole) - 1):
        assert (whole[i + 1] - 100) == (whole[i] - 100 + 1) % 30, "the text goes round"


def test_trajectories_do_not_share_prefixes() -> None:
    words = corpus().split()
    numbers = {word: i for i, word in enumerate(dict.fromkeys(words))}
    text = TokenText([numbers[word] for word in words])
    first_blocks = {tuple(text.stream(f"trace_{i:04}").take(64)) for i in range(5000)}
    assert len(first_blocks) == 5000
    assert len({block[:SIGNATURE_TOKENS] for block in first_blocks}) == 5000


def test_a_repeating_text_is_not_shared_either() -> None:
    text = TokenText([1, 2, 3, 4] * 1000)
    assert text.stream("a").take(64) != text.stream("b").take(64)


def test_empty_text_is_refused() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        TokenText([])


def test_corpus_is_real_text() -> None:
    text = corpus()
    assert len(text) > 200_000
    assert "The \"try\" statement" in text or "try" in text


def test_workload_is_pure() -> None:
    program = (
        "import sys, common.workload.arrivals, common.workload.scaling, common.workload.sessions, common.workload.text;"
        "print([name for name in ('asyncio', 'zmq', 'torch', 'httpx', 'services') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"
