"""Directory block store: what is not as it was stored, is set aside and is a miss."""

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from common.metrics import Metrics
from common.storage.format import HEADER_BYTES
from tests.storage_support import SIZE, file_of, get, key_of, names, opened, payload_of, put, quarantined


def flip(position: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[position] ^= 1
        path.write_bytes(raw)

    return damage


def truncate(length: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, length)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def link(path: Path) -> None:
    """A symbolic link to a perfectly good copy is still not followed."""
    path.rename(path.with_name("copy"))
    path.symlink_to(path.with_name("copy"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def subdirectory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def other_block(path: Path) -> None:
    """The good file of another block under this one's name."""
    other = file_of(path.parents[2], "other")
    path.write_bytes(other.read_bytes())


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "magic": (flip(0), "header"),
    "version": (flip(8), "header"),
    "namespace": (flip(12), "header"),
    "key": (flip(44), "header"),
    "geometry": (flip(76), "header"),
    "payload length": (flip(88), "header"),
    "payload checksum": (flip(96), "header"),
    "header padding": (flip(2000), "header"),
    "header checksum": (flip(HEADER_BYTES - 1), "header"),
    "first payload byte": (flip(HEADER_BYTES), "checksum"),
    "middle payload byte": (flip(HEADER_BYTES + SIZE // 2), "checksum"),
    "last payload byte": (flip(HEADER_BYTES + SIZE - 1), "checksum"),
    "empty": (truncate(0), "size"),
    "inside the header": (truncate(100), "size"),
    "header only": (truncate(HEADER_BYTES), "size"),
    "half a payload": (truncate(HEADER_BYTES + SIZE // 2), "size"),
    "one byte short": (truncate(HEADER_BYTES + SIZE - 1), "size"),
    "one byte long": (append, "size"),
    "symbolic link": (link, "ELOOP"),
    "pipe": (pipe, "size"),
    "directory": (subdirectory, "size"),
    "another block": (other_block, "foreign"),
}


@pytest.mark.parametrize("name", DAMAGES)
async def test_a_damaged_block_is_a_miss_set_aside_and_counted(tmp_path: Path, name: str) -> None:
    damage, reason = DAMAGES[name]
    metrics = Metrics()
    async with opened(tmp_path, metrics=metrics) as store:
        await put(store, "block")
        await put(store, "other")
        damage(file_of(tmp_path, "block"))
        assert await get(store, "block") is None
        assert quarantined(metrics) == {reason: 1}
        assert metrics.snapshot()["storage_misses_total"] == 1
        assert names(tmp_path / "quarantine") == [key_of("block").hex()]
        assert await store.exists([key_of("block"), key_of("other")]) == [False, True]
        # the rest is fine, the store goes on, and the block can be stored again
        assert await get(store, "other") == payload_of("other")
        assert await get(store, "block") is None
        assert quarantined(metrics) == {reason: 1}
        assert await put(store, "block")
        assert await get(store, "block") == payload_of("block")


async def test_bad_blocks_of_a_batch_do_not_touch_the_others(tmp_path: Path) -> None:
    metrics = Metrics()
    async with opened(tmp_path, metrics=metrics) as store:
        stored = [f"b{i}" for i in range(6)]
        for name in stored:
            await put(store, name)
        flip(HEADER_BYTES)(file_of(tmp_path, "b1"))
        truncate(100)(file_of(tmp_path, "b4"))
        wanted = [*stored[:3], "absent", *stored[3:]]
        into = [memoryview(bytearray(SIZE)) for _ in wanted]
        found = await store.read([key_of(name) for name in wanted], into)
        assert found == [True, False, True, False, True, False, True]
        assert all(view == payload_of(name) for name, view, ok in zip(wanted, into, found, strict=True) if ok)
        assert quarantined(metrics) == {"checksum": 1, "size": 1}
        assert metrics.snapshot()["storage_misses_total"] == 3
        assert metrics.snapshot()["block_store_read_bytes_total"] == 4 * SIZE
        assert await store.read([], []) == []


@pytest.mark.parametrize("most", [1000, HEADER_BYTES, HEADER_BYTES + 77, HEADER_BYTES + SIZE - 1])
async def test_reads_that_the_kernel_cuts_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """They go on where they were."""
    metrics = Metrics()
    real_preadv = os.preadv

    def short(fd: int, buffers: list[bytearray | memoryview], offset: int) -> int:
        whole = bytearray(most)
        got = real_preadv(fd, [whole], offset)
        rest = memoryview(whole)[:got]
        for buffer in buffers:
            part = min(len(rest), len(buffer))
            buffer[:part] = rest[:part]
            rest = rest[part:]
        return got - len(rest)

    async with opened(tmp_path, metrics=metrics) as store:
        await put(store, "block")
        monkeypatch.setattr(os, "preadv", short)
        assert await get(store, "block") == payload_of("block")
    assert quarantined(metrics) == {}


async def test_a_file_that_shrinks_while_it_is_read_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    real_preadv = os.preadv

    def shrink(fd: int, buffers: list[memoryview], offset: int) -> int:
        truncate(HEADER_BYTES + 10)(file_of(tmp_path, "block"))
        return real_preadv(fd, buffers, offset)

    async with opened(tmp_path, metrics=metrics) as store:
        await put(store, "block")
        monkeypatch.setattr(os, "preadv", shrink)
        assert await get(store, "block") is None
    assert quarantined(metrics) == {"short": 1}


async def test_a_file_of_the_wrong_size_is_not_offered_as_a_hit(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await put(store, "block")
        truncate(HEADER_BYTES)(file_of(tmp_path, "block"))
        assert await store.exists([key_of("block")]) == [False]
        assert await put(store, "block")
        assert await store.exists([key_of("block")]) == [True]


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
async def test_an_unreadable_file_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    metrics = Metrics()
    async with opened(tmp_path, metrics=metrics) as store:
        await put(store, "block")

        def refuse(path: str, flags: int) -> int:
            raise OSError(code, os.strerror(code), path)

        monkeypatch.setattr(store, "_open_block", refuse)
        assert await get(store, "block") is None
        assert quarantined(metrics) == {errno.errorcode[code]: 1}
        assert not file_of(tmp_path, "block").exists()


async def test_trouble_of_our_own_does_not_condemn_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    async with opened(tmp_path, metrics=metrics) as store:
        await put(store, "block")

        def too_many_files(path: str, flags: int) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        with monkeypatch.context() as patch:
            patch.setattr(store, "_open_block", too_many_files)
            assert await get(store, "block") is None
        assert quarantined(metrics) == {}
        assert await get(store, "block") == payload_of("block")


async def test_many_readers_of_a_damaged_block_count_it_once(tmp_path: Path) -> None:
    metrics = Metrics()
    async with opened(tmp_path, metrics=metrics) as store:
        await put(store, "block")
        flip(HEADER_BYTES + 5)(file_of(tmp_path, "block"))
        assert await asyncio.gather(*(get(store, "block") for _ in range(8))) == [None] * 8
        assert quarantined(metrics) == {"checksum": 1}


async def test_without_verification_a_damaged_payload_comes_as_it_is(tmp_path: Path) -> None:
    metrics = Metrics()
    async with opened(tmp_path, metrics=metrics, verify=False) as store:
        await put(store, "block")
        flip(HEADER_BYTES + 5)(file_of(tmp_path, "block"))
        content = await get(store, "block")
        assert content is not None and content != payload_of("block")
        assert content[5] ^ 1 == payload_of("block")[5]
        # its header still has to be right
        flip(44)(file_of(tmp_path, "block"))
        assert await get(store, "block") is None
        assert quarantined(metrics) == {"header": 1}
