"""Blocks that were made up are blocks like any other; a linked directory is one of its own."""

from __future__ import annotations

from pathlib import Path

from common.blocks.geometry import BlockGeometry, RowPart
from common.metrics import Metrics
from common.model import Manifest
from common.storage.directory import DirectoryStore
from common.storage.seed import link_directory, seed_directory
from common.types import KEY_BYTES

MANIFEST = Manifest(1, "test", BlockGeometry(2, 64, (RowPart("kv", 1, 16, "uint8"),)))
SIZE = MANIFEST.geometry.full_block_bytes
KEYS = [bytes([index]) * KEY_BYTES for index in range(4)]


async def opened(path: Path) -> DirectoryStore:
    store = DirectoryStore(path, MANIFEST, Metrics(), verify=True)
    await store.open()
    return store


async def test_seeded_blocks_are_read_and_verified(tmp_path: Path) -> None:
    assert seed_directory(tmp_path / "seed", MANIFEST, [KEYS[0] + KEYS[1], KEYS[2]]) == 3
    store = await opened(tmp_path / "seed")
    assert await store.exists(KEYS) == [True, True, True, False]
    into = memoryview(bytearray(b"x" * SIZE))
    assert await store.read([KEYS[1]], [into]) == [True]
    assert bytes(into) == bytes(SIZE)
    await store.close()


async def test_what_is_stored_into_a_linked_directory_stays_there(tmp_path: Path) -> None:
    seed_directory(tmp_path / "seed", MANIFEST, [KEYS[0]])
    link_directory(tmp_path / "seed", tmp_path / "own")
    seed, own = await opened(tmp_path / "seed"), await opened(tmp_path / "own")
    payload = memoryview(b"y" * SIZE)
    assert await own.write(KEYS[3], payload, checksum=0)
    assert await own.exists(KEYS) == [True, False, False, True]
    assert await seed.exists(KEYS) == [True, False, False, False]
    await seed.close()
    await own.close()
