"""Blocks and a directory store to put them in, for the storage tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import blake2b
from pathlib import Path

import xxhash

from common.blocks.geometry import attention_geometry
from common.metrics import Metrics
from common.model import Manifest
from common.storage.directory import DirectoryStore

GEOMETRY = attention_geometry(num_layers=2, block_size=64, kv_heads=2, head_dim=16, dtype="float32")
MANIFEST = Manifest(1, "weights", GEOMETRY)
SIZE = GEOMETRY.full_block_bytes


def key_of(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=32).digest()


def payload_of(name: str) -> bytes:
    pattern = key_of(name)
    return (pattern * (SIZE // len(pattern) + 1))[:SIZE]


@asynccontextmanager
async def opened(
    root: Path, manifest: Manifest = MANIFEST, metrics: Metrics | None = None, verify: bool = True
) -> AsyncIterator[DirectoryStore]:
    store = DirectoryStore(root, manifest, metrics or Metrics(), verify=verify, concurrency=4)
    try:
        await store.open()
        yield store
    finally:
        await store.close()


async def put(store: DirectoryStore, name: str) -> bool:
    payload = payload_of(name)
    return await store.write(key_of(name), memoryview(payload), xxhash.xxh3_64_intdigest(payload))


async def get(store: DirectoryStore, name: str) -> bytes | None:
    into = memoryview(bytearray(SIZE))
    return bytes(into) if (await store.read([key_of(name)], [into]))[0] else None


def file_of(root: Path, name: str) -> Path:
    key = key_of(name).hex()
    return root / "blocks" / key[:2] / key


def quarantined(metrics: Metrics) -> dict[str, float]:
    prefix = "storage_blocks_quarantined_total{reason="
    return {
        name.removeprefix(prefix).rstrip("}"): value
        for name, value in metrics.snapshot().items()
        if name.startswith(prefix)
    }


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())
