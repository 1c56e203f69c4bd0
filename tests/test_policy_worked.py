"""The scheduler's choices, worked by hand from spec §7 (and §12 for split reads): the arithmetic stands beside each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.types import ReadPath
from services.scheduler.policy import EngineLeft, KvHandedOver
from tests.policy_support import arrive, fetch, join, load, make_policy, ready, starts


def test_prefill_classes():
    """alpha 1000, beta 5000.

    engine   tok    read_q(node)   class
    pa      4000       900         C2
    pb      1000      1001         C3 (queue over alpha)
    pc      5001         0         C1 (over beta)
    pd      4500      1000         C2 (at alpha)

    r1  800: C2 = {pa 4000, pd 4500} -> pa 4800
    r2  600: C2 = {pa 4800, pd 4500} -> pd 5100, now C1
    r3  300: C2 = {pa 4800}          -> pa 5100, now C1
    r4  700: C2 = {}, C3 = {pb 1000} -> pb 1700
    r5 4000: C3 = {pb 1700}          -> pb 5700, now C1
    r6  100: all in C1: stop
    """
    policy = ready(make_policy(alpha=1000, beta=5000), "d")
    for engine in ("pa", "pb", "pc", "pd"):
        join(policy, engine, group="g")
    for name, tokens in (("r1", 800), ("r2", 600), ("r3", 300), ("r4", 700), ("r5", 4000), ("r6", 100)):
        assert not starts(arrive(policy, name, tokens))
    loads = (load("pa", 9, 4000, 900), load("pb", 1, 1000, 1001), load("pc", 1, 5001, 0), load("pd", 1, 4500, 1000))
    started = starts(fetch(policy, *loads))
    assert [(name, start.prefill) for name, start in started.items()] == [
        ("r1", "pa"), ("r2", "pd"), ("r3", "pa"), ("r4", "pb"), ("r5", "pb"),
    ]  # fmt: skip
    assert policy.num_waiting == 1


def test_prefill_classes_change_with_each_assignment():
    """alpha 1000. r1 goes to p1 (0 < 3000) and leaves 1088 tokens to read on its node: p1 is in C3 now. So r2 goes to
    p2, the only one of C2, though p1 has fewer tokens (1100 < 3000). p1 reports that it has read 88: r3 goes to p1."""
    policy = ready(make_policy("pe_only", alpha=1000), "d")
    join(policy, "p1"), join(policy, "p2")
    arrive(policy, "r1", 1100, 1088), arrive(policy, "r2", 100, 64)
    started = starts(fetch(policy, load("p1"), load("p2", 5, 3000)))
    assert (started["r1"].prefill, started["r2"].prefill) == ("p1", "p2")
    fetch(policy, load("p1", 1, 1100, 1000))
    assert starts(arrive(policy, "r3", 100, 64))["r3"].prefill == "p1"


def test_a_nodes_read_queue_is_the_sum_over_its_engines():
    """alpha 1000: 600 on p1 and 500 on p2, of one node, is over it; 600 on p3's own node is not, whatever its tok."""
    policy = ready(make_policy(alpha=1000), "d")
    join(policy, "p1", node="n"), join(policy, "p2", node="n"), join(policy, "p3")
    fetch(policy, load("p1", 1, 10, 600), load("p2", 1, 10, 500), load("p3", 1, 900, 600))
    assert starts(arrive(policy, "r1"))["r1"].prefill == "p3"
    policy.handle(EngineLeft("p2"), 1.0)  # the other's 600 remain
    assert starts(arrive(policy, "r2"))["r2"].prefill == "p1"


def test_decode_groups():
    """Phase 1. Group A has 1000 + 500 = 1500 tokens, B 2000.

    r1 300 -> A 1800, r2 400 -> A 2200, r3 100 -> B 2100, r4 50 -> B 2150
    """
    policy = ready(make_policy(), "p")
    for engine, group in (("a0", "A"), ("a1", "A"), ("b0", "B"), ("b1", "B")):
        join(policy, engine, group=group)
    fetch(policy, load("a0", 1, 1000), load("a1", 1, 500))
    fetch(policy, load("b0", 1, 2000), load("b1"))
    chosen = [
        starts(arrive(policy, name, n))[name].decode for name, n in (("r1", 300), ("r2", 400), ("r3", 100), ("r4", 50))
    ]
    assert [engine[0] for engine in chosen] == ["a", "a", "b", "b"]


def test_a_decode_group_that_opens_gets_a_share_of_what_waits():
    """Group A waits for memory with 300, 400, 100. When B opens: B 300 (0 = 0, and it has waited longer for its turn),
    A 400, B 400."""
    policy = ready(make_policy(), "p")
    join(policy, "a"), join(policy, "b")
    fetch(policy, load("a", free=0))
    for name, tokens in (("r1", 300), ("r2", 400), ("r3", 100)):
        assert not starts(arrive(policy, name, tokens))
    assert list(starts(fetch(policy, load("b")))) == ["r1", "r3"]
    assert list(starts(fetch(policy, load("a")))) == ["r2"]


def decode_group(*engines: str):
    """One group whose engines have fetched without free memory: requests queue there."""
    policy = ready(make_policy(), "p")
    for engine in engines:
        join(policy, engine, group="g")
    fetch(policy, *(load(engine, free=0) for engine in engines))
    return policy


def test_inside_a_decode_group():
    """Phase 2. d1: seq 1, tok 1000, free 600. d2: seq 3, tok 100, free 1950. d3: seq 0, tok 2500, free 1000.
    Queue: 500, 400, 900, 700, 900.

    Free 3550 in all, so R is the whole queue: 3400. Z = 1.05 * (3400 + 3600) / 3 = 2450.
    r1 500: d1 1500 and d2 600 within Z, d3 3000 not; least seq: d1 (seq 2, tok 1500, free 100)
    r2 400: room on d2, d3; d2 500 within Z                  -> d2 (seq 4, tok 500, free 1550)
    r3 900: room on d2, d3 (1000); d2 1400 within Z          -> d2 (seq 5, tok 1400, free 650)
    r4 700: room on d3 only, 3200 is over Z; least tok of the rest -> d3 (free 300)
    r5 900: no room anywhere: the fetch ends
    """
    policy = decode_group("d1", "d2", "d3")
    for name, tokens in (("r1", 500), ("r2", 400), ("r3", 900), ("r4", 700), ("r5", 900)):
        assert not starts(arrive(policy, name, tokens))
    started = starts(
        fetch(policy, load("d1", 1, 1000, free=600), load("d2", 3, 100, free=1950), load("d3", 0, 2500, free=1000))
    )
    assert [(name, start.decode) for name, start in started.items()] == [
        ("r1", "d1"), ("r2", "d2"), ("r3", "d2"), ("r4", "d3"),
    ]  # fmt: skip


def test_the_threshold_counts_only_requests_that_fit_all_the_free_memory():
    """d1: seq 0, tok 700, free 600. d2: seq 5, tok 0, free 600. Queue: 500, 400, 900.

    Free 1200 in all: R = {500, 400}. Z = 1.05 * (900 + 700) / 2 = 840: r1 would make 1200 of d1, so it goes to d2 in
    spite of its seq. (With the 900 in R, Z would be 1312.5, and d1 the one with the least seq.)
    r2 400: room on d1 only (d2 has 100 left), 1100 over Z -> d1. r3: no room.
    """
    policy = decode_group("d1", "d2")
    for name, tokens in (("r1", 500), ("r2", 400), ("r3", 900)):
        arrive(policy, name, tokens)
    started = starts(fetch(policy, load("d1", 0, 700, free=600), load("d2", 5, 0, free=600)))
    assert [(name, start.decode) for name, start in started.items()] == [("r1", "d2"), ("r2", "d1")]


def test_over_the_threshold_the_least_tokens_decide():
    """d1: seq 0, tok 3000. d2: seq 9, tok 2000. r1 of 4000: Z = 1.05 * (4000 + 5000) / 2 = 4725; 7000 and 6000 are both
    over it -> d2."""
    policy = decode_group("d1", "d2")
    arrive(policy, "r1", 4000)
    assert starts(fetch(policy, load("d1", 0, 3000), load("d2", 9, 2000)))["r1"].decode == "d2"


def test_a_large_request_at_the_head_is_not_overtaken():
    """950 tokens free, 500 of them promised to first. big (900) waits, and so do those behind it, which would fit.
    When first is handed over it holds its 500, until the report of 950 after its end: big. 50 are left: small (64)
    waits, and other (32) behind it. A report of 970 leaves 70: small, then 6: other waits.
    """
    policy = decode_group("d1")
    fetch(policy, load("d1", free=950))
    assert starts(arrive(policy, "first", 500))
    for name, tokens in (("big", 900), ("small", 64), ("other", 32)):
        assert not starts(arrive(policy, name, tokens))
    assert not starts(policy.handle(KvHandedOver(("first", 0)), 1.0))
    assert list(starts(fetch(policy, load("d1", free=950)))) == ["big"]
    assert list(starts(fetch(policy, load("d1", free=970)))) == ["small"]


@pytest.mark.parametrize(
    ("pe", "de", "path"),
    [
        ((100, 0.0), (50, 0.0), ReadPath.DE),
        ((50, 0.0), (100, 0.0), ReadPath.PE),
        ((50, 1.0), (100, 9.0), ReadPath.PE),  # tokens decide, not times
    ],
)
def test_the_shorter_queue_reads(pe, de, path):
    policy = ready(make_policy(), "p", "d")
    fetch(policy, load("p", read_q=pe[0], rate=pe[1]), load("d", read_q=de[0], rate=de[1]))
    start = starts(arrive(policy, "a", 200, 128))["a"]
    assert (start.read_path, start.pe_tokens) == (path, 128 if path is ReadPath.PE else 0)


def test_queues_count_what_has_been_assigned_since_the_report():
    """p reports 300, d 200. a: 128 on d -> 328. b: 64 on p -> 364. c: 64 on d -> 392. d: 64 on p."""
    policy = ready(make_policy(), "p", "d")
    fetch(policy, load("p", read_q=300), load("d", read_q=200))
    paths = [
        starts(arrive(policy, name, 200, hit))[name].read_path
        for name, hit in (("a", 128), ("b", 64), ("c", 64), ("d", 64))
    ]
    assert paths == [ReadPath.DE, ReadPath.PE, ReadPath.DE, ReadPath.PE]


def test_a_report_that_crosses_an_assignment_does_not_undo_it():
    """640 to read at p and d each by their reports. a (1,280) goes to p, of two equals: 1,920 there. p's next report
    is from before it heard of a (0 requests): 640 and the 1,280 of a. b goes to d (640). Once p has heard of a and says
    1,280: that, without a again, against d's 640 + 640 = 1,280, of which d has read less: c goes there.
    """
    policy = ready(make_policy(), "p", "d")
    fetch(policy, load("p", read_q=640), load("d", read_q=640))
    assert starts(arrive(policy, "a", 1344, 1280))["a"].read_path is ReadPath.PE
    fetch(policy, replace(load("p", read_q=640), heard=0))
    assert policy.nodes["p"].read_q == 1920
    assert starts(arrive(policy, "b", 704, 640))["b"].read_path is ReadPath.DE
    fetch(policy, replace(load("p", read_q=1280), heard=1))
    assert policy.nodes["p"].read_q == 1280
    assert starts(arrive(policy, "c", 704, 64))["c"].read_path is ReadPath.DE


def test_equal_queues_go_to_the_node_that_has_been_assigned_less():
    """Both queues are empty again at each report. 1st: 0 = 0 -> p, as good as d. 2nd: d (0 < 640). 3rd, 4th: d (64,
    then 128, < 640)."""
    policy = ready(make_policy(), "p", "d")
    paths = []
    for name, hit in (("a", 640), ("b", 64), ("c", 64), ("d", 64)):
        fetch(policy, load("p"), load("d"))
        paths.append(starts(arrive(policy, name, 700, hit))[name].read_path)
    assert paths == [ReadPath.PE, ReadPath.DE, ReadPath.DE, ReadPath.DE]


def test_two_engines_of_one_node_take_turns():
    policy = make_policy()
    join(policy, "p", node="n"), join(policy, "d", node="n")
    fetch(policy, load("p"), load("d"))
    paths = [starts(arrive(policy, name, 200, 128))[name].read_path for name in "abcd"]
    assert paths == [ReadPath.PE, ReadPath.DE, ReadPath.PE, ReadPath.DE]


@pytest.mark.parametrize(("side", "path"), [("pe_only", ReadPath.PE), ("de_only", ReadPath.DE)])
def test_one_side_only(side, path):
    policy = ready(make_policy(side), "p", "d")
    fetch(policy, load("p", read_q=500), load("d", read_q=500))
    assert {starts(arrive(policy, name, 200, 128))[name].read_path for name in "ab"} == {path}


def test_round_robin():
    policy = ready(make_policy("round_robin"), "p", "d")
    fetch(policy, load("p", read_q=500))
    paths = [starts(arrive(policy, name, 200, 128))[name].read_path for name in "abc"]
    assert paths == [ReadPath.PE, ReadPath.DE, ReadPath.PE]


@pytest.mark.parametrize(
    ("pe", "de", "path", "tokens"),
    [
        # equal rates: 1000 + x = 200 + 3200 - x: x = 1200, 18.75 blocks
        ((1000, 5.0), (200, 5.0), ReadPath.SPLIT, 19 * 64),
        # (1000 + x) / 3 = 3400 - x: x = 2300, 35.9 blocks
        ((1000, 3.0), (200, 1.0), ReadPath.SPLIT, 36 * 64),
        # one rate not known: as if equal
        ((1000, 3.0), (200, 0.0), ReadPath.SPLIT, 19 * 64),
        # x = (200 + 3200 - 9000) / 2 < 0
        ((9000, 1.0), (200, 1.0), ReadPath.DE, 0),
        # x = (9000 + 3200) / 2 > 3200
        ((0, 1.0), (9000, 1.0), ReadPath.PE, 3200),
        # x = (3200 - 3140) / 2 = 30, 0.47 blocks
        ((3140, 1.0), (0, 1.0), ReadPath.DE, 0),
    ],
)
def test_a_split_read_ends_on_both_sides_together(pe, de, path, tokens):
    """A prompt of 3300 tokens, 3200 (50 blocks) of them in storage."""
    policy = ready(make_policy("split"), "p", "d")
    fetch(policy, load("p", read_q=pe[0], rate=pe[1]), load("d", read_q=de[0], rate=de[1]))
    start = starts(arrive(policy, "a", 3300, 3200))["a"]
    assert (start.read_path, start.pe_tokens) == (path, tokens)
    assert policy.nodes["p"].read_q == pe[0] + tokens
    assert policy.nodes["d"].read_q == de[0] + 3200 - tokens


def test_a_rate_is_known_until_another_one_is_measured():
    """As above, (1000 + x) / 3 = 3400 - x; in between the nodes have had nothing to read."""
    policy = ready(make_policy("split"), "p", "d")
    fetch(policy, load("p", rate=3.0), load("d", rate=1.0))
    fetch(policy, load("p", read_q=1000), load("d", read_q=200))
    assert starts(arrive(policy, "a", 3300, 3200))["a"].pe_tokens == 36 * 64


def test_a_nodes_rate_is_the_sum_over_its_engines():
    """p1 reads 1 token a second and p2 2, on one node, with p3 whose rate is not known: 3 for their 1000 tokens. As
    above, (1000 + x) / 3 = 3400 - x; the 2304 tokens are p1's, the other 896 d's.

    Without p2, p1 alone reads 600 + 2304 tokens: 2904 + x = 200 + 896 + 3200 - x: x = 696, 10.9 blocks.
    """
    policy = ready(make_policy("split"), "d")
    join(policy, "p1", node="n"), join(policy, "p2", node="n"), join(policy, "p3", node="n")
    fetch(policy, load("d", read_q=200, rate=1.0))
    fetch(policy, load("p1", 1, 10, 600, 1.0), load("p3", 1, 30), load("p2", 1, 20, 400, 2.0))
    first = starts(arrive(policy, "a", 3300, 3200))["a"]
    assert (first.prefill, first.pe_tokens) == ("p1", 36 * 64)
    policy.handle(EngineLeft("p2"), 0.0), policy.handle(EngineLeft("p3"), 0.0)
    second = starts(arrive(policy, "b", 3300, 3200))["b"]
    assert (second.prefill, second.pe_tokens) == ("p1", 11 * 64)


@pytest.mark.parametrize(
    ("buffer", "queue", "path", "blocks"),
    [
        (52, 9000, ReadPath.PE, 50),  # the whole prompt takes 52 blocks
        (51, 9000, ReadPath.SPLIT, 49),  # all hits would fit, but not the prompt: one block is left to the other side
        (10, 0, ReadPath.SPLIT, 10),  # 25 wanted
        (0, 0, ReadPath.DE, 0),
    ],
)
def test_a_split_read_takes_what_fits_the_prefill_buffer(buffer, queue, path, blocks):
    policy = ready(make_policy("split"), "d")
    join(policy, "p", buffer=buffer)
    fetch(policy, load("p", rate=1.0), load("d", read_q=queue, rate=1.0))
    start = starts(arrive(policy, "a", 3300, 3200))["a"]
    assert (start.read_path, start.pe_tokens) == (path, blocks * 64)
    assert policy.engines["p"].free_blocks == buffer - (52 if path is ReadPath.PE else blocks)


def test_a_node_is_not_split_with_itself():
    policy = make_policy("split")
    join(policy, "p", node="n"), join(policy, "d", node="n")
    fetch(policy, load("p"), load("d"))
    assert starts(arrive(policy, "a", 3300, 3200))["a"].read_path is ReadPath.PE
