"""Builds policies and events for tests: engines and requests are named by strings."""

from __future__ import annotations

from common.types import Role
from services.scheduler.policy import (
    Action,
    EngineJoined,
    Fail,
    Fetched,
    Load,
    Policy,
    PolicyConfig,
    RequestArrived,
    Start,
)

BLOCK = 64
NO_LIMIT = 1 << 40


def make_policy(read_side="shorter_queue", alpha=NO_LIMIT, beta=NO_LIMIT, max_waiting=1000) -> Policy:
    return Policy(PolicyConfig(read_side, alpha, beta, max_waiting, BLOCK))


def join(
    policy: Policy, engine: str, node: str = "", group: str = "", buffer=NO_LIMIT, device=NO_LIMIT
) -> list[Action]:
    """p... is a prefill engine, any other one a decode engine. Alone on its node and in its group by default."""
    role = Role.PREFILL if engine.startswith("p") else Role.DECODE
    return policy.handle(EngineJoined(engine, role, node or engine, group or engine, buffer, device), 0.0)


def load(engine: str, seq=0, tok=0, read_q=0, rate=0.0, free=NO_LIMIT) -> Load:
    return Load(engine, seq, tok, read_q, rate, free)


def fetch(policy: Policy, *loads: Load) -> list[Action]:
    return policy.handle(Fetched(loads), 0.0)


def ready(policy: Policy, *engines: str, buffer=NO_LIMIT, device=NO_LIMIT) -> Policy:
    """These engines have joined and fetched, idle."""
    for engine in engines:
        join(policy, engine, buffer=buffer, device=device)
        fetch(policy, load(engine, free=device))
    return policy


def arrive(policy: Policy, name: str, tokens: int = 128, hit: int = 0) -> list[Action]:
    return policy.handle(RequestArrived((name, 0), tokens, hit, -(-tokens // BLOCK)), 0.0)


def starts(actions: list[Action]) -> dict[str, Start]:
    """By request, in order."""
    return {action.key[0]: action for action in actions if isinstance(action, Start)}


def fails(actions: list[Action]) -> dict[str, Fail]:
    return {action.key[0]: action for action in actions if isinstance(action, Fail)}
