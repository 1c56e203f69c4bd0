"""Block file headers: whatever was packed comes back, and no damage goes unnoticed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.storage.format import HEADER_BYTES, VERSION, BadBlock, BlockHeader, pack_header, parse_header

sizes = st.integers(0, 2**32 - 1)
headers = st.builds(
    BlockHeader,
    namespace=st.binary(min_size=32, max_size=32),
    key=st.binary(min_size=32, max_size=32),
    num_layers=sizes,
    block_size=sizes,
    row_bytes=sizes,
    payload_bytes=st.integers(0, 2**64 - 1),
    checksum=st.integers(0, 2**64 - 1),
)


@given(headers)
def test_parse_inverts_pack(header: BlockHeader) -> None:
    raw = pack_header(header)
    assert len(raw) == HEADER_BYTES
    assert parse_header(raw) == header


@given(headers, st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_any_changed_byte_is_noticed(header: BlockHeader, position: int, flip: int) -> None:
    raw = bytearray(pack_header(header))
    raw[position] ^= flip
    with pytest.raises(BadBlock):
        parse_header(bytes(raw))


@given(headers, st.integers(0, HEADER_BYTES - 1))
def test_a_short_header_is_noticed(header: BlockHeader, length: int) -> None:
    with pytest.raises(BadBlock, match="header of"):
        parse_header(pack_header(header)[:length])


@given(st.binary(max_size=200))
def test_garbage_is_no_block(start: bytes) -> None:
    with pytest.raises(BadBlock):
        parse_header(start.ljust(HEADER_BYTES, b"\0"))


@given(headers)
def test_another_version_is_refused_by_name(header: BlockHeader) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.storage.format.VERSION", VERSION + 1)
        raw = pack_header(header)
    with pytest.raises(BadBlock, match=f"version {VERSION + 1}, not {VERSION}"):
        parse_header(raw)


@pytest.mark.parametrize("name", ["namespace", "key", "num_layers", "block_size", "row_bytes", "payload_bytes"])
def test_expect_names_what_differs(name: str) -> None:
    values: dict[str, object] = {
        "namespace": b"n" * 32,
        "key": b"k" * 32,
        "num_layers": 2,
        "block_size": 64,
        "row_bytes": 16,
        "payload_bytes": 2048,
        "checksum": 7,
    }
    header = BlockHeader(**values)  # type: ignore[arg-type]
    other = {**values, name: b"x" * 32 if isinstance(values[name], bytes) else 1}
    with pytest.raises(BadBlock, match=name):
        header.expect(BlockHeader(**other))  # type: ignore[arg-type]
    header.expect(BlockHeader(**{**values, "checksum": 8}))  # type: ignore[arg-type]
