"""A request in a decode engine: its tokens, its pages, and the keys of its blocks. Pure.

    staged --first token and rows here--> ready --pages--> running --last token--> finished
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.blocks.geometry import BlockGeometry
from common.blocks.hashing import block_key, salted
from common.messages import Assign
from common.types import FinishReason, Request, RequestKey, pack_tokens


@dataclass(slots=True, eq=False)
class Sequence:
    """due: when it is given up. tokens: prompt and output so far. num_computed: leading tokens whose KV is in pages (or
    in the buffer, staged). parent: key of the last full block. finish: set with the last token. since: when it became
    ready, and then when it was handed over."""

    assign: Assign
    due: float
    tokens: list[int] = field(init=False)
    num_computed: int = field(init=False)
    parent: bytes = field(init=False)
    cached_tokens: int = 0
    pages: list[int] = field(default_factory=list)
    delivered: bool = False
    has_first_token: bool = False
    dropped: bool = False
    since: float = 0.0
    finish: FinishReason | None = None

    def __post_init__(self) -> None:
        self.tokens = self.request.tokens
        self.num_computed = len(self.tokens)
        keys = self.request.block_keys
        self.parent = keys[-1] if keys else b""

    @property
    def request(self) -> Request:
        return self.assign.request

    @property
    def key(self) -> RequestKey:
        return (self.request.request_id, self.request.attempt)

    @property
    def num_generated(self) -> int:
        """Output tokens, those of earlier attempts included."""
        return len(self.tokens) - self.request.num_tokens + self.request.num_generated

    @property
    def ready(self) -> bool:
        """Both the KV and the first token are here."""
        return self.delivered and self.has_first_token

    def needs_page(self, block_size: int) -> bool:
        """The next token's KV has no place yet."""
        return self.num_computed == len(self.pages) * block_size

    def computed_one(self, geometry: BlockGeometry, namespace: bytes) -> tuple[int, bytes] | None:
        """One more token's KV is in its page. If that fills a block: its page and key. namespace: of the model."""
        self.num_computed += 1
        size = geometry.block_size
        if self.num_computed % size:
            return None
        block = pack_tokens(self.tokens[self.num_computed - size : self.num_computed])
        self.parent = block_key(salted(namespace, self.request.salt), self.parent, block)
        return self.pages[self.num_computed // size - 1], self.parent
