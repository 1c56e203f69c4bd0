"""Log probabilities: both forms, whole and streamed, once for each token whatever happens on the way (A23)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from common.errors import ErrorCode
from common.types import FinishReason
from services.frontend.tokenizer import Tokenizer as ServedTokenizer
from tests.frontend_harness import EOS, Attempt, Served, byte_tokenizer, encode, events_of

TEXT = "aé😀b"


def joined(events: list[Any]) -> dict[str, list[Any]]:
    """The lists of a streamed completion's chunks, each behind the other."""
    lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for event in events[:-1]:
        choice = event["choices"][0]
        assert (choice["logprobs"] is None) == (choice["token_ids"] == []), "as many entries as tokens, in each chunk"
        for name, values in (choice["logprobs"] or {}).items():
            assert len(values) == len(choice["token_ids"])
            lists[name] += values
    return lists


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion(served: Served, stream: bool) -> None:
    """One entry a token, also for the parts of a character and for the end token; offsets are in characters."""
    served.says(TEXT, FinishReason.STOP, end=[EOS])
    options: dict[str, Any] = {"logprobs": 2, "return_token_ids": True}
    if stream:
        logprobs = joined(await served.stream(**options))
    else:
        logprobs = (await served.complete(**options)).json()["choices"][0]["logprobs"]
    parts = ["bytes:\\xc3", "bytes:\\xa9", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80"]
    assert logprobs["tokens"] == ["a", *parts, "b", "</s>"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3, 4]
    assert logprobs["token_logprobs"] == [-index - 0.5 for index in range(9)]
    assert logprobs["top_logprobs"][3] == {"z": -3.0, "y": -3.125, "bytes:\\xf0": -3.5}
    assert served.cluster.requests[0].sampling.logprobs == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat(served: Served, stream: bool) -> None:
    served.says("é")
    options = {"logprobs": True, "top_logprobs": 1, "stream": stream}
    response = await served.chat(**options)
    if stream:
        choices = [event["choices"][0] for event in events_of(response.text)[:-1]]
        assert choices[-1]["logprobs"] is None, "the last chunk has no token"
        content = [entry for choice in choices[:-1] for entry in choice["logprobs"]["content"]]
    else:
        content = response.json()["choices"][0]["logprobs"]["content"]
    first, second = content
    top = {"token": "z", "logprob": 0.0, "bytes": [122]}
    assert first == {"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3], "top_logprobs": [top]}
    assert second["bytes"] == [0xA9] and second["logprob"] == -1.5


async def test_none_unless_asked_for(served: Served) -> None:
    served.says("ab")
    for body in ({}, {"logprobs": None}):
        assert (await served.complete(**body)).json()["choices"][0]["logprobs"] is None
    assert (await served.chat(logprobs=False)).json()["choices"][0]["logprobs"] is None
    assert {request.sampling.logprobs for request in served.cluster.requests} == {None}
    alone = (await served.complete(logprobs=0)).json()["choices"][0]["logprobs"]
    assert alone["top_logprobs"] == [{"a": -0.5}, {"b": -1.5}], "of 0 alternatives there is still the token itself"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_lost_attempt_repeats_and_loses_none(served: Served, stream: bool) -> None:
    """Tokens twice, out of order, and from two attempts: every index has its own entry, once."""
    ids = encode(TEXT)

    async def script(attempt: Attempt) -> None:
        done = attempt.request.num_generated
        if attempt.request.attempt == 0:
            attempt.tokens(ids[1:3], index=1)
            attempt.tokens(ids[:2], index=0)
            attempt.tokens(ids[5:6], index=5)  # its attempt is lost before what is missing in front of it comes
            await asyncio.sleep(0.05)
            attempt.failed(ErrorCode.ENGINE_LOST)
        else:
            await attempt.output(ids[done:])

    served.cluster.script = script
    options: dict[str, Any] = {"logprobs": 0, "return_token_ids": True}
    if stream:
        logprobs = joined(await served.stream(**options))
    else:
        logprobs = (await served.complete(**options)).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-index - 0.5 for index in range(len(ids))]
    assert served.cluster.requests[1].num_generated == 3


async def test_tokens_of_a_stop_string_have_entries(served: Served) -> None:
    """As many as the usage counts, though their text is not shown."""
    served.says("some END more")
    body = (await served.complete(stop="END", logprobs=0)).json()
    assert body["choices"][0]["text"] == "some "
    assert len(body["choices"][0]["logprobs"]["tokens"]) == body["usage"]["completion_tokens"] == 8


def test_bytes_of_tokens_of_a_byte_level_vocabulary(model: Path) -> None:
    tokenizer = ServedTokenizer(model / "tokenizer.json")
    assert [tokenizer.token_bytes(token) for token in encode("a é\n")] == [b"a", b" ", b"\xc3", b"\xa9", b"\n"]
    assert tokenizer.token_bytes(EOS) == b"</s>" and tokenizer.token_bytes(299) == b""
    assert sorted(tokenizer.token_bytes(token) for token in range(3, 259)) == [bytes([byte]) for byte in range(256)]
    assert byte_tokenizer().get_vocab_size() == 259


def test_bytes_of_tokens_of_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    pieces = ["<unk>", "▁the", "é", "<0xC3>", "<0xA9>", "▁"]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    replace = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    served = ServedTokenizer(tmp_path / "tokenizer.json")
    assert [served.token_bytes(token) for token in range(1, 6)] == [b" the", "é".encode(), b"\xc3", b"\xa9", b" "]
