"""Keys of blocks: digest(namespace; parent key; the block's tokens) (spec §3: the trie is implied by the keys).

The namespace digest covers everything that the KV bytes depend on besides the tokens (common.model.Manifest). Two
prompts share a key exactly when they share the namespace and every token up to the block's end.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

from common.types import KEY_BYTES, TOKEN_BYTES


def salted(namespace: bytes, salt: bytes) -> bytes:
    """The namespace of one tenant's blocks; without a salt the one that is shared. No key is in two of them."""
    return blake2b(salt, digest_size=KEY_BYTES, key=namespace, person=b"tenant").digest() if salt else namespace


def block_key(namespace: bytes, parent: bytes, packed: bytes | memoryview) -> bytes:
    """The key of one block. parent is b"" for the first block; packed holds the block's token ids."""
    digest = blake2b(namespace, digest_size=KEY_BYTES)
    digest.update(parent)
    digest.update(packed)
    return digest.digest()


def prefix_keys(namespace: bytes, packed: bytes, block_size: int, parent: bytes = b"") -> bytes:
    """Keys of the full blocks of a packed token sequence, concatenated; the partial tail has none."""
    return b"".join(_chain(namespace, packed, block_size, parent))


def _chain(namespace: bytes, packed: bytes, block_size: int, parent: bytes) -> Iterator[bytes]:
    view = memoryview(packed)
    step = block_size * TOKEN_BYTES
    for start in range(0, len(view) - step + 1, step):
        parent = block_key(namespace, parent, view[start : start + step])
        yield parent
