"""Full Blocks in a block directory, for the gateway and for what it is held against: where they are, what they hold."""

from __future__ import annotations

import hashlib
from pathlib import Path

import xxhash

from common.config import Config, load_config
from common.metrics import Metrics
from common.model import read_configured_model
from common.storage.claim import BLOCKS
from common.storage.directory import DirectoryStore
from loadgen.bench.pieces import FULL_BLOCK, Layout


def key(block: int) -> bytes:
    return hashlib.blake2b(block.to_bytes(8, "little"), digest_size=32).digest()


def path(root: Path, block: int) -> Path:
    """The block's file."""
    name = key(block).hex()
    return root / BLOCKS / name[:2] / name


def config(root: Path, transport: str) -> Config:
    """Of a gateway whose Full Blocks are FULL_BLOCK bytes: those of DeepSeek V3.2."""
    settings = {
        "scheduler.control": "tcp://127.0.0.1:*",
        "storage.path": str(root),
        "network.transport": transport,
        "model.profile": "ds-660b",
        "perf.moved_layers": 61,
        "perf.row_bytes": FULL_BLOCK // 61 // 64,
    }
    return load_config(None, settings)


async def fill(root: Path, layout: Layout) -> None:
    """Store the source region's pieces as blocks 0, 1, ...; ConfigError if they are no Full Blocks."""
    manifest = read_configured_model(config(root, "tcp")).manifest
    store = DirectoryStore(root, manifest, Metrics())
    await store.open()
    content = layout.content()
    for block in range(layout.count):
        payload = content[block * layout.size : (block + 1) * layout.size].data
        await store.write(key(block), payload, xxhash.xxh3_64_intdigest(payload))
    await store.close()


def places(layout: Layout) -> list[int]:
    """The target offset of each block, in order."""
    return [target for _, target, _ in sorted(layout.runs().tolist())]
