"""What the controller of roles sees of the policy's state."""

from __future__ import annotations

import pytest

from common.types import Role
from services.scheduler.policy import (
    EngineDraining,
    EngineLeft,
    KvHandedOver,
    PrefillEnded,
    RoleController,
    RolesConfig,
    observe,
)
from tests.policy_support import arrive, fetch, join, load, make_policy, ready


def seen(policy):
    return {node.name: node for node in observe(policy).nodes}


def test_idle_nodes_of_one_role_each():
    nodes = seen(ready(make_policy(), "p0", "d0", buffer=50, device=1000))
    assert [(n.role, n.used, n.promised, n.in_hand) for n in nodes.values()] == [
        (Role.PREFILL, 0.0, 0.0, 0),
        (Role.DECODE, 0.0, 0.0, 0),
    ]
    assert [(n.buffer_blocks, n.device_tokens) for n in nodes.values()] == [(50, 0), (50, 1000)]


def test_a_prefill_engine_is_busy_unless_all_that_it_has_is_still_being_read():
    policy = ready(make_policy("de_only"), "p0", "p1", "d0")
    for index in range(3):
        arrive(policy, f"r{index}", 200, 128)
    used = {name: node.used for name, node in seen(policy).items()}
    assert used["p0"] == used["p1"] == 0.0  # nothing is read yet
    fetch(policy, load("d0", read_q=192))  # half of all hit tokens
    nodes = seen(policy)
    assert sorted((nodes["p0"].used, nodes["p1"].used)) == [0.5, 0.75]  # one request, two requests
    assert sorted((nodes["p0"].in_hand, nodes["p1"].in_hand)) == [1, 2] and nodes["d0"].in_hand == 3
    fetch(policy, load("d0", read_q=0))
    assert [seen(policy)[name].used for name in ("p0", "p1")] == [1.0, 1.0]
    policy.handle(PrefillEnded(("r0", 0)), 1.0)
    policy.handle(PrefillEnded(("r1", 0)), 1.0)
    assert sum(seen(policy)[name].used for name in ("p0", "p1")) == 1.0


def test_reads_that_only_prefill_nodes_do_are_work_of_theirs():
    policy = ready(make_policy("pe_only"), "p0", "d0")
    arrive(policy, "a", 200, 128)
    assert seen(policy)["p0"].used == 1.0


def test_what_waits_for_a_decode_engine_does_not_keep_a_prefill_engine_busy():
    policy = ready(make_policy(), "p0", "d0", device=300)
    fetch(policy, load("d0", free=100))
    arrive(policy, "a", 200)
    assert policy.num_waiting == 1
    assert seen(policy)["p0"].used == 0.0 and seen(policy)["p0"].in_hand == 0


def test_decode_memory_that_is_held_and_that_is_promised():
    """1,000 tokens of memory; requests of 200: where 100 are left, on average, no more fits."""
    policy = ready(make_policy(), "p0", "d0", device=1000)
    arrive(policy, "a", 200), arrive(policy, "b", 200)
    assert (seen(policy)["d0"].used, seen(policy)["d0"].promised) == (0.0, pytest.approx(400 / 900))
    policy.handle(KvHandedOver(("a", 0)), 1.0)
    fetch(policy, load("d0", seq=2, tok=400, free=800))
    assert seen(policy)["d0"].used == pytest.approx(200 / 900)
    assert seen(policy)["d0"].promised == pytest.approx(200 / 900)
    fetch(policy, load("d0", seq=2, tok=400, free=0))
    assert seen(policy)["d0"].used == 1.0


def test_staging_buffer_is_in_use_until_the_request_is_handed_over():
    """20 blocks of buffer; requests of 256 tokens take 4, and where 2 are left no more fits."""
    policy = ready(make_policy(), "p0", "d0", buffer=20, device=9000)
    for name in "ab":
        arrive(policy, name, 256)
    assert seen(policy)["d0"].staged == pytest.approx(8 / 18)
    policy.handle(KvHandedOver(("a", 0)), 1.0)
    assert seen(policy)["d0"].staged == pytest.approx(4 / 18)


def test_nodes_that_do_not_serve_in_one_role_are_not_seen():
    policy = make_policy()
    join(policy, "p0", "mixed"), join(policy, "d0", "mixed"), join(policy, "p1", "late"), join(policy, "d1", "ok")
    join(policy, "d2", "half"), join(policy, "d3", "half")
    fetch(policy, *(load(name) for name in ("p0", "d0", "d1", "d2")))
    assert set(seen(policy)) == {"ok"}
    fetch(policy, load("p1"), load("d3"))
    assert set(seen(policy)) == {"late", "ok", "half"}
    policy.handle(EngineDraining("d2"), 1.0)
    assert set(seen(policy)) == {"late", "ok"}


def test_looking_and_deciding_leave_the_policy_as_it_is():
    def played(looks):
        policy = ready(make_policy(beta=300, alpha=100), "p0", "p1", "d0", "d1", device=2000)
        controller, actions = RoleController(RolesConfig(1.0)), []
        for index in range(60):
            actions += arrive(policy, f"r{index}", 100 + index, 64)
            if index % 3 == 0:
                for kind in (PrefillEnded, KvHandedOver):
                    actions += policy.handle(kind((f"r{index // 2}", 0)), 1.0)
            if index == 40:
                actions += policy.handle(EngineLeft("p1"), 1.0)
            if looks:
                controller.decide(observe(policy), float(index))
        return actions

    assert played(True) == played(False)
