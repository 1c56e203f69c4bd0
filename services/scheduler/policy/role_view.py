"""How busy each side is, read from the policy's state: all that a decision about roles rests on (spec §12). Pure.

How much of a prefill node is in use is the chance that an engine has something to compute: all but one in phi^k, if it
has k started requests, of whose hit tokens the share phi is not read yet. So a cluster that waits for storage does not
look as if it lacked prefill nodes, unless reads are theirs alone (pe_only): then a node brings its storage NIC as well.

Of a decode node it is device memory, up to where the next request does not fit: a step takes hardly longer for more
sequences, so an engine that has room is not short of anything. What is promised to requests that are not handed over
is told apart: where prefill is what they wait for, it is no sign that decode nodes are lacking.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from common.types import Role
from services.scheduler.policy.policy import Policy
from services.scheduler.policy.state import DecodeEngine, Engine, Node


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """A node that serves in one role with all of its engines.

    used: 0 to 1, of what it can do; promised: likewise, to requests that are not here yet (decode). in_hand: requests
    that it would have to finish first. buffer_blocks, device_tokens: of its largest engine.
    """

    name: str
    role: Role
    used: float
    promised: float
    in_hand: int
    buffer_blocks: int
    device_tokens: int


@dataclass(frozen=True, slots=True)
class View:
    """Nodes that serve; one with engines of both roles, or one that drains or has not fetched, is not among them.
    started: requests ever started on their prefill engines."""

    nodes: tuple[NodeLoad, ...]
    started: int

    def of(self, role: Role) -> list[NodeLoad]:
        return [node for node in self.nodes if node.role is role]


def observe(policy: Policy) -> View:
    """Looks at every engine, and at what it has in hand."""
    unread = 0.0 if policy.config.read_side == "pe_only" else _unread_share(policy)
    length = _mean_length(policy)
    nodes = []
    for node in policy.nodes.values():
        engines = node.engines
        role = engines[0].role
        if all(engine.open and engine.role is role for engine in engines):
            used, promised = _decode_use(engines, length) if role is Role.DECODE else (_busy(engines, unread), 0.0)
            nodes.append(_load(node, role, used, promised))
    started = sum(engine.started for engine in policy.prefill.engines.values())
    return View(tuple(nodes), started)


def _load(node: Node, role: Role, used: float, promised: float) -> NodeLoad:
    return NodeLoad(
        node.name,
        role,
        used,
        promised,
        sum(engine.assigned_seq for engine in node.engines),
        max(engine.buffer_blocks for engine in node.engines),
        max(engine.device_tokens for engine in node.engines if isinstance(engine, DecodeEngine))
        if role is Role.DECODE
        else 0,
    )


def _started(engine: Engine) -> int:
    return sum(request.read_path is not None for request in engine.requests.values())


def _unread_share(policy: Policy) -> float:
    """Of the hit tokens of requests that are being prefilled, those that no side has read yet."""
    hit = sum(
        request.hit_tokens
        for engine in policy.prefill.engines.values()
        for request in engine.requests.values()
        if request.read_path is not None
    )
    unread = sum(node.read_q for node in policy.nodes.values())
    return min(unread / hit, 1.0) if hit else 0.0


def _mean_length(policy: Policy) -> float:
    """Of the requests that decode engines have in hand, in tokens."""
    engines = policy.decode.engines.values()
    requests = sum(engine.assigned_seq for engine in engines)
    return sum(engine.assigned_tok for engine in engines) / requests if requests else 0.0


def _busy(engines: Iterable[Engine], unread: float) -> float:
    shares = [1.0 - unread**started if (started := _started(engine)) else 0.0 for engine in engines]
    return sum(shares) / len(shares)


def _decode_use(engines: Iterable[Engine], length: float) -> tuple[float, float]:
    """On average half a request's room is left where no more fits."""
    used = promised = room = 0.0
    for engine in engines:
        assert isinstance(engine, DecodeEngine)
        room += max(engine.device_tokens - length / 2, 1.0)
        used += engine.device_tokens - engine.free_tokens - engine.pending_tokens
        promised += engine.pending_tokens
    return min(max(used, 0.0) / room, 1.0), min(promised / room, 1.0)
