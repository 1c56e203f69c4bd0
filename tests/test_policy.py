"""The life of requests and engines in the scheduler's decisions, without sockets."""

from __future__ import annotations

from common.errors import ErrorCode
from common.types import ReadPath
from services.scheduler.policy import (
    CancelOn,
    EngineDraining,
    EngineLeft,
    Fail,
    KvHandedOver,
    PrefillEnded,
    RequestCancelled,
    RequestEnded,
    RequestErred,
    check_integrity,
)
from tests.policy_support import arrive, fails, fetch, join, load, make_policy, ready, starts


def test_starts_at_once_when_both_sides_have_fetched():
    started = starts(arrive(ready(make_policy(), "p", "d"), "a"))
    assert (started["a"].prefill, started["a"].decode) == ("p", "d")


def test_waits_for_a_fetch_and_keeps_arrival_order():
    policy = make_policy("pe_only")
    join(policy, "p"), join(policy, "d")
    fetch(policy, load("d"))
    assert arrive(policy, "a") == [] and arrive(policy, "b") == []
    assert list(starts(fetch(policy, load("p")))) == ["a", "b"]


def test_prefill_over_beta_gets_nothing_until_it_has_less():
    policy = ready(make_policy(beta=100), "p", "d")
    assert starts(arrive(policy, "a", 128))  # 0 <= beta: may overshoot once
    assert arrive(policy, "b", 10) == []
    assert list(starts(policy.handle(PrefillEnded(("a", 0)), 1.0))) == ["b"]
    fetch(policy, load("p", tok=101))
    assert arrive(policy, "c", 10) == []
    assert list(starts(fetch(policy, load("p", tok=100)))) == ["c"]


def test_a_report_that_has_not_heard_of_an_assignment_does_not_undo_it():
    policy = ready(make_policy(beta=100), "p", "d")
    arrive(policy, "a", 128)
    arrive(policy, "b", 10)
    assert fetch(policy, load("p", seq=0, tok=0)) == []  # sent before "a" came to the engine
    check_integrity(policy)


def test_a_repeated_arrival_changes_nothing():
    policy = ready(make_policy(), "p", "d")
    assert starts(arrive(policy, "a"))
    assert arrive(policy, "a") == [] and policy.num_running == 1
    check_integrity(policy)


def test_idle_engines_take_turns():
    policy = ready(make_policy(), "p0", "p1", "d0", "d1")
    seen = []
    for name in "abcd":
        seen.append(starts(arrive(policy, name))[name])
        policy.handle(PrefillEnded((name, 0)), 0.0)
        policy.handle(RequestEnded((name, 0)), 0.0)
    assert [start.prefill for start in seen] == ["p0", "p1", "p0", "p1"]
    assert [start.decode for start in seen] == ["d0", "d1", "d0", "d1"]


def test_decode_buffer_bounds_assignment_until_handover():
    policy = ready(make_policy(), "p", "d", buffer=4)
    assert starts(arrive(policy, "a", 200))  # 4 blocks
    assert arrive(policy, "b", 64) == []
    assert list(starts(policy.handle(KvHandedOver(("a", 0)), 1.0))) == ["b"]


def test_decode_device_memory_counts_what_is_assigned_but_not_handed_over():
    policy = ready(make_policy(), "p", "d", device=300)
    assert starts(arrive(policy, "a", 200))
    assert arrive(policy, "b", 128) == []
    assert fetch(policy, load("d", 1, 200, free=300)) == []  # "a" has not taken its pages yet
    assert policy.handle(KvHandedOver(("a", 0)), 2.0) == []  # now it has, and no report has said so yet
    assert fetch(policy, load("d", 1, 200, free=100)) == []
    assert list(starts(fetch(policy, load("d", free=300)))) == ["b"]


def test_a_prompt_leaves_room_for_a_token_in_device_memory():
    policy = ready(make_policy(), "p", "d", device=300)
    fetch(policy, load("d", free=200))
    assert arrive(policy, "a", 200) == []
    assert starts(fetch(policy, load("d", free=201)))


def test_no_engines_and_full_queue_are_refused():
    policy = make_policy(max_waiting=1)
    assert arrive(policy, "a") == [Fail(("a", 0), ErrorCode.NO_ENGINES, "no live prefill engine")]
    join(policy, "p"), join(policy, "d")
    assert arrive(policy, "b") == []
    assert fails(arrive(policy, "c"))["c"].code is ErrorCode.OVERLOADED


def test_what_no_engine_could_ever_hold_is_refused():
    policy = ready(make_policy(), "p", "d", buffer=4, device=300)
    assert fails(arrive(policy, "a", 300))["a"].code is ErrorCode.NO_ENGINES
    assert starts(arrive(policy, "b", 256))


def test_when_the_last_engine_leaves_that_could_hold_a_waiting_request_it_is_refused():
    policy = make_policy()
    join(policy, "p"), join(policy, "d0", buffer=64), join(policy, "d1", buffer=4)
    fetch(policy, load("d0"), load("d1"))
    arrive(policy, "big", 1000), arrive(policy, "small", 64)
    actions = policy.handle(EngineLeft("d0"), 1.0)
    assert list(fails(actions)) == ["big"]
    assert list(starts(fetch(policy, load("p")))) == ["small"]


def test_prefill_buffer_bounds_reads_on_its_side():
    policy = ready(make_policy("pe_only"), "d0", "d1", "d2", buffer=64)
    join(policy, "p", buffer=4), fetch(policy, load("p"))
    assert starts(arrive(policy, "a", 200))
    assert arrive(policy, "b", 64) == []
    assert list(starts(policy.handle(PrefillEnded(("a", 0)), 1.0))) == ["b"]


def test_a_full_prefill_buffer_sends_the_read_to_the_other_side():
    policy = ready(make_policy("round_robin"), "p", "d0", "d1", "d2", buffer=4)
    paths = [starts(arrive(policy, name, 200))[name].read_path for name in "abc"]
    assert paths == [ReadPath.PE, ReadPath.DE, ReadPath.DE]


def test_draining_engine_gets_nothing_new():
    policy = ready(make_policy(), "p", "d0", "d1")
    policy.handle(EngineDraining("d0"), 0.0)
    fetch(policy, load("d0"))  # a late report does not open it again
    assert {starts(arrive(policy, name))[name].decode for name in "abc"} == {"d1"}


def test_what_a_draining_engine_has_not_been_told_of_goes_elsewhere_in_its_old_place():
    policy = make_policy()
    join(policy, "p"), join(policy, "d0"), join(policy, "d1")
    fetch(policy, load("d0"))
    for name in "abc":
        arrive(policy, name)  # assigned to d0, and waiting for a prefill engine
    policy.handle(EngineDraining("d0"), 1.0)
    fetch(policy, load("d1"))
    started = starts(fetch(policy, load("p")))
    assert list(started) == ["a", "b", "c"] and {start.decode for start in started.values()} == {"d1"}
    check_integrity(policy)


def test_lost_decode_engine_fails_its_requests_and_tells_the_prefill_side():
    policy = ready(make_policy(), "p", "d")
    arrive(policy, "a")
    actions = policy.handle(EngineLeft("d"), 1.0)
    assert actions == [CancelOn(("a", 0), "p"), Fail(("a", 0), ErrorCode.ENGINE_LOST, "engine d is gone")]
    assert policy.num_running == 0


def test_lost_prefill_engine_spares_requests_that_it_has_handed_on():
    policy = ready(make_policy(), "p", "d")
    arrive(policy, "a"), arrive(policy, "b")
    policy.handle(PrefillEnded(("a", 0)), 1.0)
    assert list(fails(policy.handle(EngineLeft("p"), 2.0))) == ["b"]
    assert policy.num_running == 1


def test_waiting_requests_of_a_lost_prefill_engine_go_before_later_ones():
    policy = make_policy(beta=200)
    join(policy, "p0"), join(policy, "p1"), join(policy, "d")
    fetch(policy, load("p0"))
    for name in "abc":
        arrive(policy, name, 150)  # a and b on p0, c over beta
    assert [request.key[0] for request in policy.prefill.queue.values()] == ["c"]
    policy.handle(EngineLeft("p0"), 1.0)
    assert [request.key[0] for request in policy.prefill.queue.values()] == ["a", "b", "c"]
    fetch(policy, load("d")), fetch(policy, load("p1"))
    assert [request.key[0] for request in policy.prefill.queue.values()] == ["c"]


def test_requests_wait_for_a_whole_role_to_come_back():
    policy = ready(make_policy(), "p")
    join(policy, "d")
    arrive(policy, "a")
    policy.handle(EngineLeft("d"), 1.0)
    assert policy.num_waiting == 1
    assert fails(arrive(policy, "b"))["b"].code is ErrorCode.NO_ENGINES
    join(policy, "d.2", node="d")
    assert starts(fetch(policy, load("d.2")))["a"].decode == "d.2"
    check_integrity(policy)


def test_failed_request_is_cancelled_on_the_other_engine_only():
    policy = ready(make_policy(), "p", "d")
    arrive(policy, "a")
    actions = policy.handle(RequestErred(("a", 0), "p", ErrorCode.TRANSFER_FAILED, "x"), 1.0)
    assert actions == [CancelOn(("a", 0), "d"), Fail(("a", 0), ErrorCode.TRANSFER_FAILED, "x")]


def test_cancelled_in_every_state():
    """Waiting: nobody is told. Started: both engines, but not one that has ended its part."""
    policy = make_policy(max_waiting=1)
    join(policy, "p"), join(policy, "d")
    arrive(policy, "a")
    assert policy.handle(RequestCancelled(("a", 0)), 1.0) == []
    assert arrive(policy, "b") == [] and policy.num_waiting == 1
    fetch(policy, load("p"))
    assert policy.handle(RequestCancelled(("b", 0)), 1.0) == []  # it had a prefill engine, which did not know it
    fetch(policy, load("d"))
    for name, ended, told in (("c", [], ["p", "d"]), ("d", [PrefillEnded, KvHandedOver], ["d"])):
        assert starts(arrive(policy, name))
        for kind in ended:
            policy.handle(kind((name, 0)), 1.0)
        cancels = policy.handle(RequestCancelled((name, 0)), 1.0)
        assert cancels == [CancelOn((name, 0), engine) for engine in told]
        assert policy.handle(RequestCancelled((name, 0)), 1.0) == []
    check_integrity(policy)
    assert not policy.requests


def test_a_cancelled_head_lets_the_next_one_pass_on_the_prefill_side():
    policy = ready(make_policy("pe_only"), "p", buffer=4)
    ready(policy, "d", buffer=64)
    arrive(policy, "a", 128)  # 2 blocks of 4
    assert arrive(policy, "b", 192) == arrive(policy, "c", 64) == []
    assert list(starts(policy.handle(RequestCancelled(("b", 0)), 1.0))) == ["c"]


def test_a_cancelled_head_lets_the_next_one_pass_on_the_decode_side():
    policy = ready(make_policy(), "p", "d", buffer=4)
    arrive(policy, "a", 200)
    assert arrive(policy, "b", 256) == arrive(policy, "c", 64) == []
    policy.handle(KvHandedOver(("a", 0)), 1.0)  # b
    assert list(starts(policy.handle(RequestCancelled(("b", 0)), 1.0))) == ["c"]
