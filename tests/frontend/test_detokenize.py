"""Text from tokens: exact, no character cut, no part of a stop string shown, however the tokens arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from services.frontend.detokenize import (
    MAX_HELD_TOKENS,
    REPLACEMENT,
    ByteDetokenizer,
    Detokenizer,
    OutputText,
    Pieces,
    StopStrings,
)
from services.frontend.tokenizer import Tokenizer as ServedTokenizer
from tests.frontend_harness import EOS, NUM_SPECIAL, byte_tokenizer, encode

TOKENIZER = byte_tokenizer()
Start = Callable[[Sequence[int]], Pieces]


def decode(tokens: Sequence[int]) -> str:
    return TOKENIZER.decode(list(tokens))


def raw(data: bytes) -> list[int]:
    """The tokens of any bytes, valid UTF-8 or not: the alphabet is in the order of the byte-level code points."""
    table = {}
    extra = 0
    for byte in range(256):
        visible = 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255
        table[byte] = chr(byte) if visible else chr(256 + extra)
        extra += not visible
    return [TOKENIZER.token_to_id(table[byte]) or 0 for byte in data]


def by_decoding(context: Sequence[int] = ()) -> Pieces:
    return Detokenizer(decode, context)


def by_bytes(context: Sequence[int] = ()) -> Pieces:
    return ByteDetokenizer(lambda token: BYTES.get(token, b""), context)


BYTES = {raw(bytes([byte]))[0]: bytes([byte]) for byte in range(256)}
both = pytest.mark.parametrize("start", [by_decoding, by_bytes])


def pieces(start: Start, tokens: list[int], context: Sequence[int] = ()) -> list[str]:
    detokenizer = start(context)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


@both
def test_a_character_is_shown_when_its_last_byte_is_there(start: Start) -> None:
    assert pieces(start, encode("aé😀b")) == ["a", "", "é", "", "", "", "😀", "b", ""]


@both
@given(data=st.binary(max_size=60))
def test_any_bytes_join_up_to_what_decoding_all_at_once_gives(start: Start, data: bytes) -> None:
    tokens = raw(data)
    assert decode(tokens) == data.decode("utf-8", "replace")
    assert "".join(pieces(start, tokens)) == decode(tokens)


@both
@given(garbage=st.integers(0, 12), text=st.text(alphabet="😀é€a", min_size=1, max_size=4))
def test_garbage_is_not_held_for_ever_and_hides_no_character_after_it(start: Start, garbage: int, text: str) -> None:
    shown = pieces(start, raw(b"\x80" * garbage + text.encode()))
    assert "".join(shown) == REPLACEMENT * garbage + text


@both
def test_garbage_is_released_as_it_grows(start: Start) -> None:
    shown = pieces(start, raw(b"\xff" * 40))
    waiting = longest = 0
    for piece in shown:
        waiting = 0 if piece else waiting + 1
        longest = max(longest, waiting)
    assert longest <= MAX_HELD_TOKENS


@both
def test_a_character_that_the_prompt_began_is_completed(start: Start) -> None:
    prompt, output = raw("€".encode()[:2]), raw("€".encode()[2:])
    assert "".join(pieces(start, output, context=prompt)) == "€"


@both
def test_special_tokens_are_no_text(start: Start) -> None:
    assert "".join(pieces(start, [*encode("ab"), EOS, *encode("c")])) == "abc"


def test_the_space_between_prompt_and_output_stays() -> None:
    """Metaspace decoders drop the space in front of the first token: the context is there to be the first one."""
    words = Tokenizer(models.WordLevel({"▁the": 0, "▁cat": 1, "▁sat": 2}, unk_token="▁the"))
    words.decoder = decoders.Metaspace()
    detokenizer = Detokenizer(lambda tokens: str(words.decode(tokens)), [0])
    assert [detokenizer.push(1), detokenizer.push(2)] == [" cat", " sat"]


@pytest.mark.parametrize(
    ("stops", "text", "shown", "hit"),
    [
        (["END"], "some END more", "some ", True),
        (["END"], "some EN", "some EN", False),
        (["END"], "some EXD", "some EXD", False),
        (["aab"], "aaab", "a", True),
        (["abab"], "abaabab", "aba", True),
        (["abcd", "bc"], "xabcd", "xa", True),
        (["bcd", "abcd"], "xabcd", "x", True),
        (["z"], "", "", False),
        ([], "all of it", "all of it", False),
        (["😀!"], "hi 😀!x", "hi ", True),
    ],
)
def test_stop_strings_cut_alike_however_the_text_arrives(stops: list[str], text: str, shown: str, hit: bool) -> None:
    for size in range(1, len(text) + 1):
        matcher = StopStrings(stops)
        released = ""
        for start in range(0, len(text), size):
            released += matcher.push(text[start : start + size])
            assert shown.startswith(released), "a part of a stop string was shown"
            if matcher.hit:
                break
        if not matcher.hit:
            released += matcher.finish()
        assert (released, matcher.hit) == (shown, hit)


@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.text(alphabet="ab", max_size=5), max_size=8),
)
def test_stop_strings_in_pieces_equal_character_by_character(stops: list[str], parts: list[str]) -> None:
    def run(chunks: list[str]) -> tuple[str, bool]:
        matcher = StopStrings(stops)
        released = ""
        for chunk in chunks:
            released += matcher.push(chunk)
            if matcher.hit:
                return released, True
        return released + matcher.finish(), False

    whole = "".join(parts)
    assert run(parts) == run(list(whole)) == run([whole])
    first_end = min((whole.find(stop) + len(stop) for stop in stops if stop in whole), default=None)
    assert run(parts)[1] == (first_end is not None)


def test_held_text_is_short() -> None:
    """What does not look like a stop string is shown at once."""
    matcher = StopStrings(["END"])
    assert [matcher.push(part) for part in ("some", " E", "N", "T")] == ["some", " ", "", "ENT"]


def test_stop_strings_do_not_count_among_the_first_min_tokens() -> None:
    text = OutputText(Detokenizer(decode), ["ab"], min_tokens=3)
    assert "".join(text.push(token) for token in encode("abab")) == "abab"
    assert not text.stopped
    assert [text.push(token) for token in encode("ab")] == ["", ""]
    assert text.stopped


def test_a_stop_string_that_the_last_held_bytes_complete() -> None:
    text = OutputText(Detokenizer(decode), [REPLACEMENT])
    assert text.push(raw(b"\xe2")[0]) == ""
    assert text.finish() == ""
    assert text.stopped


def test_the_harness_knows_every_byte() -> None:
    assert sorted(raw(bytes(range(256)))) == list(range(NUM_SPECIAL, NUM_SPECIAL + 256))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedTokenizer:
    """Byte-level, with added tokens of all kinds: characters that stand for no byte, or for another one than theirs."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<tool>", "<｜end▁of｜>", "né", "Ġx", "a b")])
    tokenizer.add_special_tokens([AddedToken("<｜hidden｜>", special=True)])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return ServedTokenizer(path)


@given(tokens=st.lists(st.one_of(st.integers(0, 264), st.integers(259, 264)), max_size=12))
def test_any_tokens_of_a_served_vocabulary_join_up_to_what_decoding_gives(
    served: ServedTokenizer, tokens: list[int]
) -> None:
    detokenizer = served.detokenizer([])
    assert isinstance(detokenizer, ByteDetokenizer)
    assert "".join([*map(detokenizer.push, tokens), detokenizer.finish()]) == served.decode(tokens)
