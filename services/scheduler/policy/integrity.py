"""Every counter of the policy, made anew from the requests that it knows. For tests; slow."""

from __future__ import annotations

from collections.abc import Iterable

from common.types import Role
from services.scheduler.policy.decode_side import with_room
from services.scheduler.policy.policy import Policy
from services.scheduler.policy.state import ArrivalQueue, DecodeEngine, Engine, Request


def check_integrity(policy: Policy) -> None:
    """AssertionError if a counter is not what all requests together make it."""
    requests = policy.requests
    assert policy.num_waiting == sum(request.read_path is None for request in requests.values())
    for request in requests.values():
        _check_places(policy, request)
    for queue in (policy.prefill.queue, policy.decode.queue, *(group.queue for group in policy.decode.groups.values())):
        _check_queue(queue)
    for engine in policy.engines.values():
        _check_engine(engine, requests.values())
    for node in policy.nodes.values():
        assert node.engines == [engine for engine in policy.engines.values() if engine.node is node]
        assert node.read_q == sum(engine.read_q for engine in node.engines)
    _check_classes(policy)
    _check_groups(policy)


def _check_places(policy: Policy, request: Request) -> None:
    """On each side a request is in one queue, or on one engine that is there, or has ended."""
    started = request.read_path is not None
    assert (request.prefill is None) == (request.prefill_ended or request in set(policy.prefill.queue.values()))
    queue = policy.decode.queue if request.group is None else request.group.queue
    assert (request.decode is None) == (request in set(queue.values()))
    assert started == ((request.prefill is not None or request.prefill_ended) and request.decode is not None)
    for engine in (request.prefill, request.decode):
        assert engine is None or policy.engines[engine.name] is engine
    assert request.decode is None or request.decode.group is request.group


def _check_queue(queue: ArrivalQueue) -> None:
    arrivals = [request.arrival for request in queue.values()]
    assert arrivals == list(queue) == sorted(set(arrivals))
    assert queue.tokens == sum(request.num_tokens for request in queue.values())


def _check_engine(engine: Engine, requests: Iterable[Request]) -> None:
    held = [request for request in requests if engine in (request.prefill, request.decode)]
    assert sorted(engine.requests) == sorted(request.key for request in held)
    assert engine.assigned_seq == len(held) <= engine.seq
    assert engine.assigned_tok == sum(request.num_tokens for request in held) <= engine.tok
    blocks = sum(request.pe_blocks for request in held)
    if isinstance(engine, DecodeEngine):
        staged = [request for request in held if not request.handed_over]
        blocks = sum(request.num_blocks for request in staged)
        assert engine.pending_tokens == sum(request.num_tokens for request in staged)
    assert engine.free_blocks == engine.buffer_blocks - blocks >= 0


def _check_classes(policy: Policy) -> None:
    engines = [engine for engine in policy.engines.values() if engine.role is Role.PREFILL and engine.open]
    short = {engine for engine in engines if engine.node.read_q <= policy.config.alpha}
    for ranking, members in ((policy.prefill.short, short), (policy.prefill.long, set(engines) - short)):
        assert ranking.keys == {engine: (engine.tok, engine.turn) for engine in members}
        assert ranking.least() is min(members, key=lambda engine: (engine.tok, engine.turn), default=None)


def _check_groups(policy: Policy) -> None:
    engines = [engine for engine in policy.engines.values() if isinstance(engine, DecodeEngine)]
    groups = policy.decode.groups
    assert set(groups) == {engine.group.name for engine in engines}
    for group in groups.values():
        members = [engine for engine in engines if engine.group is group]
        assert group.members == len(members)
        assert set(group.engines) == {engine for engine in members if engine.open}
        assert group.tok == sum(engine.tok for engine in group.engines)
        assert group.engines or not group.queue
        if group.refused is not None:  # nobody but those that have got more room since could take it
            assert group.refused in set(group.queue.values())
            refused, group.refused = group.refused, None
            assert set(with_room(group, refused)) <= set(group.roomier)
            group.refused = refused
    ranked = {group: (group.tok + group.queue.tokens, group.turn) for group in groups.values() if group.engines}
    assert policy.decode.ranking.keys == ranked
