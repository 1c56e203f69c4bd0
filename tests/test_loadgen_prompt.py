"""A history of token ids and its JSON."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from loadgen.client.prompt import History

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=5)
STEPS = st.lists(st.one_of(TOKENS, st.integers(0, 12)), max_size=8)


@given(TOKENS, STEPS)
def test_json_is_that_of_the_tokens(start: list[int], steps: list[list[int] | int]) -> None:
    history, tokens = History(start), list(start)
    for step in steps:
        if isinstance(step, int):
            history.cut(step)
            tokens = tokens[:step]
        else:
            history.extend(step)
            tokens += step
        assert json.loads(history.json()) == tokens
    assert (history.tolist(), len(history)) == (tokens, len(tokens))
