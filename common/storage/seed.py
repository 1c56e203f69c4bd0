"""Blocks that nobody computed: files of zeros under the keys of given prompts, for experiments on reading."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import xxhash

from common.model import Manifest
from common.storage.claim import BLOCKS, claim_directory
from common.storage.format import HEADER_BYTES, BlockHeader, pack_header
from common.types import split_keys


def seed_directory(root: Path, manifest: Manifest, prompts: Iterable[bytes]) -> int:
    """Make root a block directory of this manifest that holds the blocks of every prompt; returns their number.

    prompts: each the concatenated keys of its blocks. The payloads are holes, which take no space. ConfigError if root
    cannot be used.
    """
    claim_directory(root, manifest)
    geometry = manifest.geometry
    size = geometry.full_block_bytes
    checksum = xxhash.xxh3_64_intdigest(bytes(size))
    for first in range(256):
        (root / BLOCKS / f"{first:02x}").mkdir(exist_ok=True)
    count = 0
    for keys in prompts:
        for key in split_keys(keys):
            header = BlockHeader(
                manifest.namespace,
                key,
                geometry.num_layers,
                geometry.block_size,
                geometry.row_bytes,
                size,
                checksum,
            )
            name = key.hex()
            fd = os.open(root / BLOCKS / name[:2] / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.write(fd, pack_header(header))
                os.truncate(fd, HEADER_BYTES + size)
            finally:
                os.close(fd)
            count += 1
    return count


def link_directory(source: Path, target: Path) -> None:
    """Make target a block directory with the same blocks as source, on the same file system, that share their bytes.
    What is stored into one is not in the other."""
    (target / BLOCKS).mkdir(parents=True)
    os.link(source / "manifest.json", target / "manifest.json")
    for directory in os.scandir(source / BLOCKS):
        own = target / BLOCKS / directory.name
        own.mkdir()
        for block in os.scandir(directory.path):
            os.link(block.path, own / block.name)
