"""The scheduler's decisions, without sockets: a test driver plays the engines."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ErrorCode
from common.types import ReadPath, Role
from services.scheduler.policy import (
    CancelOn,
    EngineDraining,
    EngineJoined,
    EngineLeft,
    Fail,
    Fetched,
    KvHandedOver,
    Policy,
    PolicyConfig,
    PrefillEnded,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    RequestErred,
    Start,
)
from services.scheduler.policy.read_path import choose_read_path


def make_policy(read_side="shorter_queue", beta=10_000, max_waiting=100, prefill=1, decode=2, buffer=64, device=4096):
    policy = Policy(PolicyConfig(read_side, beta, max_waiting))
    for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        for index in range(count):
            name = f"{role.value}-{index}"
            policy.handle(EngineJoined(name, role, name, buffer, device), 0.0)
            policy.handle(Fetched(name, 0, 0, 0, device), 0.0)
    return policy


def arrive(policy, name, tokens=128, hit=64):
    return policy.handle(RequestArrived((name, 0), tokens, hit, -(-tokens // 64)), 0.0)


def test_starts_at_once_when_both_sides_have_fetched():
    (start,) = arrive(make_policy(), "a")
    assert isinstance(start, Start)
    assert (start.prefill, start.key) == ("prefill-0", ("a", 0))


def test_waits_for_a_fetch_and_keeps_arrival_order():
    policy = Policy(PolicyConfig("pe_only", 10_000, 100))
    policy.handle(EngineJoined("p", Role.PREFILL, "n0", 64, 0), 0.0)
    policy.handle(EngineJoined("d", Role.DECODE, "n1", 64, 4096), 0.0)
    policy.handle(Fetched("d", 0, 0, 0, 4096), 0.0)
    assert arrive(policy, "a") == [] and arrive(policy, "b") == []
    assert [action.key[0] for action in policy.handle(Fetched("p", 0, 0, 0, 0), 1.0)] == ["a", "b"]


def test_prefill_over_beta_gets_nothing_until_it_reports_less():
    policy = make_policy(beta=100)
    assert len(arrive(policy, "a", tokens=128)) == 1  # 0 <= beta: may overshoot once
    assert arrive(policy, "b", tokens=10) == []
    (start,) = policy.handle(Fetched("prefill-0", 0, 0, 0, 0), 1.0)
    assert start.key == ("b", 0)


def test_least_loaded_engines_are_chosen():
    policy = make_policy(prefill=2, decode=2)
    chosen = [arrive(policy, name)[0] for name in "abcd"]
    assert {start.prefill for start in chosen[:2]} == {"prefill-0", "prefill-1"}
    assert sorted(start.decode for start in chosen) == ["decode-0", "decode-0", "decode-1", "decode-1"]


def test_decode_buffer_bounds_assignment_until_handover():
    policy = make_policy(decode=1, buffer=4)
    assert len(arrive(policy, "a", tokens=200)) == 1  # 4 blocks
    assert arrive(policy, "b", tokens=64) == []
    assert [action.key for action in policy.handle(KvHandedOver(("a", 0)), 1.0)] == [("b", 0)]


def test_decode_device_memory_counts_what_is_assigned_but_not_handed_over():
    policy = make_policy(decode=1, device=300)
    assert len(arrive(policy, "a", tokens=200)) == 1
    assert arrive(policy, "b", tokens=128) == []
    policy.handle(Fetched("decode-0", 1, 200, 0, 300), 1.0)  # the report does not know of "a" yet
    assert policy.num_waiting == 1
    policy.handle(KvHandedOver(("a", 0)), 2.0)
    assert policy.num_waiting == 0


def test_no_engines_and_full_queue_are_refused():
    policy = Policy(PolicyConfig("pe_only", 10, 1))
    assert arrive(policy, "a") == [Fail(("a", 0), ErrorCode.NO_ENGINES, "no live prefill engine")]
    policy.handle(EngineJoined("p", Role.PREFILL, "n0", 64, 0), 0.0)
    policy.handle(EngineJoined("d", Role.DECODE, "n1", 64, 4096), 0.0)
    assert arrive(policy, "b") == []
    (fail,) = arrive(policy, "c")
    assert isinstance(fail, Fail) and fail.code is ErrorCode.OVERLOADED


def test_prefill_buffer_bounds_reads_on_its_side():
    policy = make_policy(read_side="pe_only", buffer=4, prefill=1, decode=3)
    assert len(arrive(policy, "a", tokens=200)) == 1  # 4 blocks
    assert arrive(policy, "b", tokens=64) == []
    assert [action.key for action in policy.handle(PrefillEnded(("a", 0)), 1.0)] == [("b", 0)]


def test_a_full_prefill_buffer_sends_the_read_to_the_other_side():
    policy = make_policy(read_side="round_robin", buffer=4, prefill=1, decode=3)
    paths = [arrive(policy, name, tokens=200)[0].read_path for name in "abc"]
    assert paths == [ReadPath.PE, ReadPath.DE, ReadPath.DE]


def test_draining_engine_gets_nothing_new():
    policy = make_policy(decode=2)
    policy.handle(EngineDraining("decode-0"), 0.0)
    assert {arrive(policy, name)[0].decode for name in "abc"} == {"decode-1"}


def test_lost_decode_engine_fails_its_requests_and_tells_the_prefill_side():
    policy = make_policy(decode=1)
    arrive(policy, "a")
    actions = policy.handle(EngineLeft("decode-0"), 1.0)
    assert CancelOn(("a", 0), "prefill-0") in actions
    assert any(isinstance(action, Fail) and action.code is ErrorCode.ENGINE_LOST for action in actions)
    assert policy.num_running == 0


def test_lost_prefill_engine_spares_requests_that_it_has_handed_on():
    policy = make_policy(decode=1)
    arrive(policy, "a"), arrive(policy, "b")
    policy.handle(PrefillEnded(("a", 0)), 1.0)
    actions = policy.handle(EngineLeft("prefill-0"), 2.0)
    assert [action.key[0] for action in actions if isinstance(action, Fail)] == ["b"]
    assert policy.num_running == 1


def test_failed_request_is_cancelled_on_the_other_engine_only():
    policy = make_policy(decode=1)
    arrive(policy, "a")
    actions = policy.handle(RequestErred(("a", 0), "prefill-0", ErrorCode.TRANSFER_FAILED, "x"), 1.0)
    assert actions == [CancelOn(("a", 0), "decode-0"), Fail(("a", 0), ErrorCode.TRANSFER_FAILED, "x")]


def test_cancelled_while_waiting_frees_the_place():
    policy = Policy(PolicyConfig("pe_only", 10, 1))
    policy.handle(EngineJoined("p", Role.PREFILL, "n0", 64, 0), 0.0)
    policy.handle(EngineJoined("d", Role.DECODE, "n1", 64, 4096), 0.0)
    arrive(policy, "a")
    assert policy.handle(RequestCancelled(("a", 0)), 1.0) == []
    assert arrive(policy, "b") == [] and policy.num_waiting == 1


def test_read_sides():
    assert choose_read_path("pe_only", 9, 0, 9, 0, 1) is ReadPath.PE
    assert choose_read_path("de_only", 0, 9, 0, 9, 0) is ReadPath.DE
    assert [choose_read_path("round_robin", 0, 0, 0, 0, turn) for turn in (0, 1)] == [ReadPath.PE, ReadPath.DE]
    assert choose_read_path("shorter_queue", 10, 5, 0, 100, 0) is ReadPath.DE
    assert choose_read_path("shorter_queue", 5, 5, 100, 50, 0) is ReadPath.DE  # a tie goes to who has read less


def test_shorter_queue_counts_what_it_has_assigned_since_the_report():
    policy = make_policy(decode=1)
    paths = [arrive(policy, str(index), tokens=128, hit=64)[0].read_path for index in range(4)]
    assert paths.count(ReadPath.PE) == paths.count(ReadPath.DE) == 2


EVENTS = st.one_of(
    st.builds(RequestArrived, st.tuples(st.sampled_from("abcdef"), st.integers(0, 2)), st.integers(1, 500),
              st.just(0), st.integers(1, 8)),
    st.builds(Fetched, st.sampled_from(["p0", "p1", "d0", "d1"]), st.integers(0, 3), st.integers(0, 900),
              st.integers(0, 99), st.integers(0, 2000)),
    *[st.builds(kind, st.tuples(st.sampled_from("abcdef"), st.integers(0, 2)))
      for kind in (PrefillEnded, KvHandedOver, RequestEnded, RequestCancelled)],
    st.builds(EngineLeft, st.sampled_from(["p0", "p1", "d0", "d1"])),
    st.sampled_from([EngineJoined("p0", Role.PREFILL, "n0", 16, 0), EngineJoined("d0", Role.DECODE, "n1", 16, 2000),
                     EngineJoined("d1", Role.DECODE, "n2", 16, 2000)]),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(EVENTS, max_size=60))
def test_any_history_starts_each_request_at_most_once_and_replays_alike(events):
    """No start after an end, no start on an engine that is not there; the same events give the same actions."""
    runs = []
    for _ in range(2):
        policy = Policy(PolicyConfig("shorter_queue", 800, 20))
        live, engines, log = set(), set(), []
        for now, event in enumerate(events):
            if isinstance(event, RequestArrived) and event.key in live:
                continue  # the service never repeats a key
            if isinstance(event, EngineJoined):
                if event.engine in engines:
                    continue
                engines.add(event.engine)
            if isinstance(event, RequestArrived):
                live.add(event.key)
            actions = policy.handle(event, float(now))
            if isinstance(event, EngineLeft):
                engines.discard(event.engine)
            if isinstance(event, RequestEnded | RequestCancelled):
                live.discard(event.key)
            started = [action.key for action in actions if isinstance(action, Start)]
            assert len(set(started)) == len(started)
            for action in actions:
                if isinstance(action, Start):
                    assert action.key in live and {action.prefill, action.decode} <= engines
                if isinstance(action, Fail):
                    live.discard(action.key)
            log.append(actions)
        runs.append(log)
    assert runs[0] == runs[1]
