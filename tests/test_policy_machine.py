"""Whatever happens in whatever order, the scheduler's decisions keep their promises (hypothesis)."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
    Load,
    Policy,
    PolicyConfig,
    PrefillEnded,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    RequestErred,
    Start,
    check_integrity,
)
from services.scheduler.policy.ranking import Ranking
from services.scheduler.policy.record import Step, replay

ALPHA, BETA, MAX_WAITING = 300, 800, 12
SIDES = ["pe_only", "de_only", "round_robin", "shorter_queue", "split"]
NAMES = ["p0", "p1", "p2", "d0", "d1", "d2", "d3"]
PICK = st.integers(0, 1 << 16)


class Machine(RuleBasedStateMachine):
    """Plays engines and clients, well-behaved or not, and keeps its own account of what it was told."""

    @initialize(side=st.sampled_from(SIDES))
    def start(self, side):
        self.policy = Policy(PolicyConfig(side, ALPHA, BETA, MAX_WAITING, 64))
        self.steps: list[Step] = []
        self.engines: dict[str, EngineJoined] = {}  # live, by incarnation
        self.takes: set[str] = set()  # have fetched and do not drain
        self.draining: set[str] = set()
        self.free: dict[str, int] = {}  # last reported, less what was handed over since
        self.arrived: dict[tuple[str, int], RequestArrived] = {}
        self.started: dict[tuple[str, int], Start] = {}  # and not ended
        self.prefilled: set[tuple[str, int]] = set()
        self.handed: set[tuple[str, int]] = set()
        self.known: set[tuple[str, int]] = set()  # arrived, and neither ended nor refused
        self.count = 0
        for node, name in enumerate(["p0", "p1", "d0", "d1"]):
            self.bring(name, node % 3, node % 2, 16)
        self.report([Load(name, 0, 0, 0, 0.0, 1300) for name in self.engines])

    # -- what happens --

    def tell(self, event, told=""):
        before = {key: (request.prefill, request.decode) for key, request in self.policy.requests.items()}
        actions = self.policy.handle(event, float(len(self.steps)))
        self.steps.append(Step(float(len(self.steps)), event, actions))
        for action in actions:
            assert action.key in self.known
            if isinstance(action, Start):
                self.check_start(action)
            elif isinstance(action, CancelOn):
                start = self.started[action.key]
                assert action.engine in (start.prefill, start.decode) and action.engine != told
                assert action.engine in self.engines
            else:
                self.forget(action.key)
        self.check_order(before)
        return actions

    def check_start(self, start):
        assert start.key not in self.started, "started twice"
        assert {start.prefill, start.decode} <= self.takes
        event = self.arrived[start.key]
        assert start.pe_tokens % 64 == 0
        match start.read_path:
            case ReadPath.PE:
                assert start.pe_tokens == event.hit_tokens
            case ReadPath.DE:
                assert start.pe_tokens == 0
            case ReadPath.SPLIT:
                assert 0 < start.pe_tokens < event.hit_tokens
        self.started[start.key] = start

    def check_order(self, before):
        """Who got an engine in this step had arrived before all who still wait for one in the same queue."""
        requests = self.policy.requests.values()
        given = [r.arrival for r in requests if r.prefill and not (before.get(r.key) or (None,))[0]]
        assert max(given, default=-1) < min(list(self.policy.prefill.queue) or [1 << 60])
        for group in self.policy.decode.groups.values():
            given = [
                r.arrival
                for r in requests
                if r.group is group and r.decode and not (before.get(r.key) or (None, None))[1]
            ]
            assert max(given, default=-1) < min(list(group.queue) or [1 << 60])

    def forget(self, key):
        self.known.discard(key)
        for place in (self.prefilled, self.handed):
            place.discard(key)
        self.started.pop(key, None)

    @precondition(lambda self: self.absent())
    @rule(pick=PICK, node=st.integers(0, 2), group=st.integers(0, 1), buffer=st.integers(1, 16), fetches=st.booleans())
    def join(self, pick, node, group, buffer, fetches):
        """A new engine, or a new incarnation of one that is gone."""
        absent = self.absent()
        name = self.bring(absent[pick % len(absent)], node, group, buffer)
        if fetches:
            self.report([Load(name, 0, 0, 0, 0.0, 1300)])

    def absent(self):
        return [name for name in NAMES if not any(engine.startswith(name) for engine in self.engines)]

    def bring(self, name, node, group, buffer):
        self.count += 1
        role = Role.PREFILL if name.startswith("p") else Role.DECODE
        event = EngineJoined(f"{name}.{self.count}", role, f"n{node}", f"g{group}", buffer, 64 * buffer + 200)
        self.engines[event.engine] = event
        self.tell(event)
        self.tell(event)  # a repeated registration changes nothing
        return event.engine

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def fetch(self, data):
        names = data.draw(st.lists(st.sampled_from([*self.engines, "stranger"]), min_size=1, max_size=4, unique=True))
        loads = [
            Load(name, data.draw(st.integers(0, 4)), data.draw(st.integers(0, 2 * BETA)),
                 data.draw(st.integers(0, 2 * ALPHA)), float(data.draw(st.integers(0, 3))),
                 data.draw(st.integers(0, 1300)))
            for name in names
        ]  # fmt: skip
        self.report(loads)

    def report(self, loads):
        self.free |= {load.engine: load.free_device_tokens for load in loads}
        self.takes |= {load.engine for load in loads if load.engine in self.engines} - self.draining
        return self.tell(Fetched(tuple(loads)))

    @rule(prompts=st.lists(st.tuples(st.integers(1, 700), st.floats(0, 1)), min_size=1, max_size=3))
    def arrive(self, prompts):
        for tokens, hit in prompts:
            self.count += 1
            key = (f"r{self.count}", self.count % 2)
            blocks = int((tokens - 1) // 64 * hit)
            event = self.arrived[key] = RequestArrived(key, tokens, 64 * blocks, -(-tokens // 64))
            self.known.add(key)
            self.tell(event)

    @precondition(lambda self: self.started)
    @rule(pick=PICK, kind=st.sampled_from([PrefillEnded, KvHandedOver, RequestEnded]))
    def progress(self, pick, kind):
        """Also repeated, and in an order that messages may take but engines do not."""
        key = list(self.started)[pick % len(self.started)]
        if kind is RequestEnded:
            self.forget(key)
        elif kind is PrefillEnded:
            self.prefilled.add(key)
        elif key not in self.handed:
            self.handed.add(key)
            self.free[self.started[key].decode] -= self.arrived[key].num_tokens  # taken until a report says otherwise
        self.tell(kind(key))

    @precondition(lambda self: len(self.known) > 3)
    @rule(pick=PICK)
    def cancel(self, pick):
        key = sorted(self.known)[pick % len(self.known)]
        actions = self.tell(RequestCancelled(key))
        told = {action.engine for action in actions if isinstance(action, CancelOn) and action.key == key}
        start = self.started.get(key)
        assert told == (set() if start is None else {start.decode} | ({start.prefill} - self.ended_prefill(key)))
        self.forget(key)

    def ended_prefill(self, key):
        return {self.started[key].prefill} if key in self.prefilled else set()

    @precondition(lambda self: len(self.started) > 2)
    @rule(pick=PICK, on_prefill=st.booleans())
    def err(self, pick, on_prefill):
        key = list(self.started)[pick % len(self.started)]
        engine = self.started[key].prefill if on_prefill else self.started[key].decode
        actions = self.tell(RequestErred(key, engine, ErrorCode.TRANSFER_FAILED, "x"), told=engine)
        assert [a.code for a in actions if isinstance(a, Fail) and a.key == key] == [ErrorCode.TRANSFER_FAILED]

    @precondition(lambda self: len(self.engines) > 3)
    @rule(pick=PICK)
    def drain(self, pick):
        name = list(self.engines)[pick % len(self.engines)]
        self.draining.add(name)
        self.takes.discard(name)
        self.tell(EngineDraining(name))

    @precondition(lambda self: len(self.engines) > 3)
    @rule(pick=PICK)
    def leave(self, pick):
        name = list(self.engines)[pick % len(self.engines)]
        del self.engines[name]
        self.takes.discard(name)
        on_it = {
            key
            for key, start in self.started.items()
            if start.decode == name or (start.prefill == name and key not in self.prefilled)
        }
        actions = self.tell(EngineLeft(name))
        lost = {a.key for a in actions if isinstance(a, Fail) and a.code is ErrorCode.ENGINE_LOST}
        assert lost == on_it

    @rule(kind=st.sampled_from([PrefillEnded, KvHandedOver, RequestEnded, RequestCancelled]))
    def stranger(self, kind):
        assert self.tell(kind(("never seen", 0))) == []

    # -- what holds --

    @invariant()
    def counters_are_right(self):
        check_integrity(self.policy)
        assert set(self.policy.requests) == self.known
        assert self.policy.num_running == len(self.started)
        assert self.policy.num_waiting <= MAX_WAITING

    @invariant()
    def memory_is_never_promised_twice(self):
        blocks = dict.fromkeys(self.engines, 0)
        for key, start in self.started.items():
            if key not in self.handed:
                blocks[start.decode] += self.arrived[key].num_blocks
            if key not in self.prefilled and start.read_path is not ReadPath.DE:
                whole = start.read_path is ReadPath.PE
                blocks[start.prefill] += self.arrived[key].num_blocks if whole else start.pe_tokens // 64
        for name, engine in self.engines.items():
            assert blocks[name] <= engine.buffer_blocks
            if engine.role is Role.DECODE and name in self.takes:
                held = self.policy.engines[name]
                assert held.free_tokens == self.free[name] - held.pending_tokens

    @invariant()
    def no_engine_over_beta_has_got_work(self):
        """All but the last request that it was given were there when it was given that one."""
        for name, engine in self.policy.engines.items():
            if self.engines[name].role is Role.PREFILL:
                earlier = list(engine.requests.values())[:-1]
                assert sum(request.num_tokens for request in earlier) <= BETA

    def teardown(self):
        if hasattr(self, "policy"):
            self.all_end_well()
            assert replay(self.policy.config, self.steps) == []

    def all_end_well(self):
        """Given engines that work, every waiting request starts (nobody starves), and nothing remains at the end."""
        for name in list(self.engines):
            del self.engines[name]
            self.takes.discard(name)
            self.tell(EngineLeft(name))
        for name in ("p9", "d9"):
            self.bring(name, 0, 0, 17)
        while self.known:
            waiting = self.policy.num_waiting
            self.report([Load(name, 0, 0, 0, 0.0, 1300) for name in self.engines])
            assert self.policy.num_waiting < waiting or self.started
            for key in list(self.started):
                for kind in (PrefillEnded, KvHandedOver, RequestEnded):
                    if kind is RequestEnded:
                        self.forget(key)
                    self.tell(kind(key))
        self.report([Load(name, 0, 0, 0, 0.0, 1300) for name in self.engines])
        for engine in self.policy.engines.values():
            assert (engine.seq, engine.tok, engine.read_q) == (0, 0, 0)
            assert engine.free_blocks == engine.buffer_blocks
        assert (self.policy.num_waiting, self.policy.num_running) == (0, 0)
        assert all(node.read_q == 0 for node in self.policy.nodes.values())


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


class RankingMachine(RuleBasedStateMachine):
    """A ranking against a dictionary."""

    def __init__(self):
        super().__init__()
        self.ranking: Ranking[str] = Ranking()
        self.model: dict[str, tuple[int, int]] = {}
        self.ties = 0

    @rule(item=st.sampled_from("abcdefgh"), key=st.integers(0, 9), times=st.sampled_from([1, 100]))
    def place(self, item, key, times):
        for _ in range(times):  # many outdated entries
            self.ties += 1
            self.ranking.place(item, key, self.ties)
        self.model[item] = (key, self.ties)

    @rule(item=st.sampled_from("abcdefgh"))
    def remove(self, item):
        self.ranking.remove(item)
        self.model.pop(item, None)

    @invariant()
    def the_least_is_right(self):
        assert self.ranking.least() == min(self.model, key=self.model.__getitem__, default=None)
        vowels = [item for item in self.model if item in "ae"]
        assert self.ranking.least_of(lambda item: item in "ae") == min(vowels, key=self.model.__getitem__, default=None)
        assert self.ranking.keys == self.model


TestRanking = RankingMachine.TestCase
TestRanking.settings = settings(max_examples=50, deadline=None)
