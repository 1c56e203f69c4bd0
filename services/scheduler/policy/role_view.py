"""How busy each side is, read from the policy's state: all that a decision about roles rests on (spec §12). Pure.

How much of a prefill node is in use is the chance that an engine has something to compute: all but one in phi^k, if it
has k started requests, of whose hit tokens the share phi is not read yet. So a cluster that waits for storage does not
look as if it lacked prefill nodes, unless reads are theirs alone (pe_only): then a node brings its storage NIC as well.

Of a decode node it is device memory, up to where the next request does not fit: a step takes hardly longer for more
sequences, so an engine that has room is not short of anything. Told apart are memory that is promised to requests which
are not handed over, and staging buffer, which these have from their start: where prefill is what they wait for, neither
is a sign that decode nodes are lacking.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.types import Role
from services.scheduler.policy.policy import Policy
from services.scheduler.policy.state import DecodeEngine, Engine, Node


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """A node that serves in one role with all of its engines.

    used: 0 to 1, of what it can do. Of a decode node likewise: promised, to requests that are not here yet, and staged,
    of its staging buffer. in_hand: requests that have started here and would have to end first. buffer_blocks,
    device_tokens: of its largest engine.
    """

    name: str
    role: Role
    used: float
    promised: float
    staged: float
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
    request = _mean_request(policy)
    nodes = []
    for node in policy.nodes.values():
        if all(engine.open and engine.role is Role.PREFILL for engine in node.engines):
            nodes.append(_prefill_load(node, unread))
        elif all(engine.open and engine.role is Role.DECODE for engine in node.engines):
            nodes.append(_decode_load(node, *request))
    started = sum(engine.started for engine in policy.prefill.engines.values())
    return View(tuple(nodes), started)


def _prefill_load(node: Node, unread: float) -> NodeLoad:
    used = 0.0
    for engine in node.engines:
        if started := _started(engine):
            used += 1.0 - unread**started
    return NodeLoad(
        node.name, Role.PREFILL, used / len(node.engines), 0.0, 0.0, _in_hand(node), _largest_buffer(node), 0
    )


def _decode_load(node: Node, tokens: float, blocks: float) -> NodeLoad:
    """tokens, blocks: of a request, on average. Half of that is left where no more fits."""
    engines = [engine for engine in node.engines if isinstance(engine, DecodeEngine)]
    device_tokens = sum(engine.device_tokens for engine in engines)
    held = sum(engine.device_tokens - engine.free_tokens - engine.pending_tokens for engine in engines)
    room = max(device_tokens - len(engines) * tokens / 2, 1.0)
    buffers = sum(engine.buffer_blocks for engine in engines)
    staged = sum(engine.buffer_blocks - engine.free_blocks for engine in engines)
    return NodeLoad(
        node.name,
        Role.DECODE,
        min(max(held, 0) / room, 1.0),
        min(sum(engine.pending_tokens for engine in engines) / room, 1.0),
        min(staged / max(buffers - len(engines) * blocks / 2, 1.0), 1.0),
        _in_hand(node),
        _largest_buffer(node),
        max(engine.device_tokens for engine in engines),
    )


def _in_hand(node: Node) -> int:
    return sum(_started(engine) for engine in node.engines)


def _largest_buffer(node: Node) -> int:
    return max(engine.buffer_blocks for engine in node.engines)


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


def _mean_request(policy: Policy) -> tuple[float, float]:
    """Tokens and blocks of a request that a decode engine has in hand."""
    engines = policy.decode.engines.values()
    requests = sum(engine.assigned_seq for engine in engines)
    tokens = sum(engine.assigned_tok for engine in engines) / max(requests, 1)
    return tokens, tokens / policy.config.block_size
