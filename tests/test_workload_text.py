"""Prompt text: decided by a name alone."""

from __future__ import annotations

import subprocess
import sys
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.types import pack_tokens
from common.workload.text import SIGNATURE_TOKENS, IdText, TokenText, corpus


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


@given(st.lists(st.integers(0, 300), max_size=12), st.integers(0, 5000))
def test_ids_are_the_same_however_they_are_taken(counts: list[int], start: int) -> None:
    text = IdText(129_280)
    stream = text.stream("64K-0-007@12")
    taken = [token for count in counts for token in stream.take(count)]
    assert taken == text.tokens("64K-0-007@12", 0, sum(counts)).tolist()
    part = text.tokens("64K-0-007@12", start, start + 70)
    assert part.tolist() == text.tokens("64K-0-007@12", 0, start + 70).tolist()[start:]
    assert part.tobytes() == pack_tokens(part.tolist())


def test_ids_are_those_of_splitmix64() -> None:
    """By whole numbers of Python, so that no machine and no numpy makes other prefixes than the stored ones."""
    seed = int.from_bytes(blake2b(b"a", digest_size=8).digest(), "little")
    mask = (1 << 64) - 1

    def expected(position: int) -> int:
        x = (seed + position * 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return (x ^ (x >> 31)) % 1000

    assert IdText(1000).tokens("a", 0, 500).tolist() == [expected(i) for i in range(500)]


def test_ids_are_even_below_the_vocabulary_and_not_shared() -> None:
    ids = IdText(100).tokens("a", 0, 100_000)
    counts = [int((ids == token).sum()) for token in range(100)]
    assert sum(counts) == 100_000
    chi_square = sum((count - 1000) ** 2 / 1000 for count in counts)
    assert chi_square < 148.2, "99 degrees of freedom at 0.1 %"
    blocks = {tuple(IdText(100).stream(f"{i}").take(64)) for i in range(2000)}
    assert len(blocks) == 2000


@pytest.mark.parametrize("vocabulary", [0, -1, (1 << 32) + 1])
def test_no_such_vocabulary(vocabulary: int) -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        IdText(vocabulary)


def test_workload_is_pure() -> None:
    program = (
        "import importlib, pkgutil, sys, common.workload;"
        "[importlib.import_module(m.name) for m in pkgutil.iter_modules(common.workload.__path__, 'common.workload.')];"
        "assert 'common.workload.windows' in sys.modules;"
        "print([name for name in ('asyncio', 'zmq', 'torch', 'httpx', 'services') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"
