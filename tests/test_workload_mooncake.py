"""The reader of Mooncake traces: exactly all rows once, in order, or the lines that cannot be (cases E17, E18)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.workload.mooncake import TraceText, parse_trace, read_trace
from common.workload.trajectories import Turn


def row(at: Any, prompt: Any, ids: Any, generate: Any = 5) -> str:
    return json.dumps({"timestamp": at, "input_length": prompt, "output_length": generate, "hash_ids": ids})


def prompts(lines: list[str], vocabulary: int = 1000) -> list[list[int]]:
    requests = parse_trace(lines, "test")
    text = TraceText(requests, vocabulary)
    return [text.stream(r.trajectory.name).take(r.trajectory.turns[0].prompt) for r in requests]


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_e18_all_rows_in_order_once() -> None:
    requests = parse_trace([row(10 * (i // 3), 600 + i % 400, [2 * i, 2 * i + 1], i + 1) for i in range(1000)], "test")
    assert [r.trajectory.turns for r in requests] == [(Turn(0, 600 + i % 400, i + 1),) for i in range(1000)]
    assert [r.at_s for r in requests] == [(i // 3) / 100 for i in range(1000)]
    assert len({r.trajectory.name for r in requests}) == 1000


def test_e17_a_partial_last_block_shares_what_it_has() -> None:
    """655 tokens in 2 blocks; then all of it and more; then the same ids, shorter."""
    lines = [row(0, 655, [7, 8]), row(1, 1200, [7, 8, 9]), row(2, 600, [7, 8]), row(3, 600, [8, 7])]
    assert [r.shared for r in parse_trace(lines, "test")] == [0, 655, 600, 0]
    first, second, third, _ = prompts(lines)
    assert [len(first), len(second), len(third)] == [655, 1200, 600]
    assert second[:655] == first
    assert third == second[:600]
    # At the 64-token grain of storage: 10 blocks of 655 tokens, 9 of 600.
    assert [first[i * 64 : i * 64 + 64] == second[i * 64 : i * 64 + 64] for i in range(10)] == [True] * 10


def test_a_short_block_ends_what_is_shared() -> None:
    """After 100 of 512 tokens nothing can be shared, though the next id is known too."""
    lines = [row(0, 1024, [1, 2]), row(0, 512 + 100, [1, 3]), row(0, 1536, [1, 3, 4])]
    assert [r.shared for r in parse_trace(lines, "test")] == [0, 512, 612]


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(1, 512)), max_size=12))
def test_shared_is_the_longest_common_prefix_of_the_tokens(rows: list[tuple[list[int], int]]) -> None:
    lines = [row(0, 512 * (len(ids) - 1) + last, ids) for ids, last in rows]
    if not lines:
        return
    texts = prompts(lines, vocabulary=1 << 32)
    for index, request in enumerate(parse_trace(lines, "test")):
        assert request.shared == max((common(texts[index], earlier) for earlier in texts[:index]), default=0)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        (row(9, 655, [1, 2, 3]), "3 hash_ids, but 655 tokens are 2 blocks of 512"),
        (row(9, 655, [1]), "1 hash_ids, but 655 tokens are 2 blocks of 512"),
        (row(9, 1, ["1"]), "hash_ids must be"),
        (row(9, 1, None), "hash_ids must be"),
        (row(9, 1, [True]), "hash_ids must be"),
        (row(9, 0, []), "input_length must be"),
        (row(9, 1.5, [1]), "input_length must be"),
        (row(9, 1, [1], 0), "output_length must be"),
        (row(-1, 1, [1]), "timestamp must be whole milliseconds"),
        (row(0.25, 1, [1]), "is it in seconds?"),
        (row(4, 1, [1]), "timestamp 4 is before 5, that of an earlier row"),
        (row(None, 1, [1]), "has no timestamp, others do"),
        ('{"input_length": 1, "output_length": 1, "hash_ids": [1]}', "has no timestamp, others do"),
    ],
)
def test_bad_row_is_refused_with_line_and_reason(bad: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_trace([row(5, 1, [1]), "", bad, row(5, 1, [1])], "file.jsonl")
    assert "file.jsonl: 1 bad rows: line 3: " in str(error.value)
    assert reason in str(error.value)


def test_every_bad_row_is_named() -> None:
    with pytest.raises(ConfigError, match=r"8 bad rows: line 2: .*; line 6: .*; and 3 more"):
        parse_trace([row(0, 1, [1]), *["nothing"] * 8], "f")


def test_a_trace_without_times_starts_at_once() -> None:
    assert [r.at_s for r in parse_trace([row(None, 1, [1]), row(None, 1, [2])], "test")] == [0.0, 0.0]
    with pytest.raises(ConfigError, match="line 2: has a timestamp, others do not"):
        parse_trace([row(None, 1, [1]), row(3, 1, [2])], "test")


def test_a_prompt_ends_with_its_last_block() -> None:
    requests = parse_trace([row(0, 600, [1, 2])], "test")
    stream = TraceText(requests, 10).stream("request-0")
    whole = [token for count in (1, 511, 0, 88) for token in stream.take(count)]
    assert whole == prompts([row(0, 600, [1, 2])], 10)[0]
    with pytest.raises(IndexError):
        stream.take(1000)
    with pytest.raises(KeyError):
        TraceText(requests, 10).stream("request-1")


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(row(1500, 3, [4]) + "\n")
    assert [r.at_s for r in read_trace(path)] == [1.5]
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none")
    path.write_text("\n")
    with pytest.raises(ConfigError, match="holds no request"):
        read_trace(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_trace(path)
