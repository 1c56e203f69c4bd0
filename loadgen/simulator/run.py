"""One run: the live policy between simulated agents and simulated engines.

What the live scheduler does with messages (services.scheduler.service) is done here with calls: events go to
Policy.handle(), and what it answers is carried out at once.
"""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time
from typing import Any

from common.errors import ErrorCode
from common.types import ReadPath, RequestKey, Role
from common.workload.hits import BLOCK_TOKENS
from loadgen.simulator.agents import Agents
from loadgen.simulator.clock import Clock
from loadgen.simulator.constants import constants
from loadgen.simulator.decode import DecodeEngine
from loadgen.simulator.layerwise import Layerwise
from loadgen.simulator.lockstep import PrefillGroup
from loadgen.simulator.machines import Engine, Group, Node
from loadgen.simulator.prefill import PrefillEngine
from loadgen.simulator.records import Records
from loadgen.simulator.request import Request
from loadgen.simulator.resident import Resident
from loadgen.simulator.samples import Sampler
from loadgen.simulator.scenario import Scenario
from loadgen.simulator.world import World
from services.scheduler.policy import (
    CancelOn,
    EngineDraining,
    EngineJoined,
    EngineLeft,
    Event,
    Fail,
    Fetched,
    KvHandedOver,
    Load,
    Policy,
    PrefillEnded,
    RequestArrived,
    RequestEnded,
    RequestErred,
    Start,
)

#: Of so many calls of the policy one is timed.
TIMED = 32
#: Of so many turns one is worth a word of progress.
TOLD = 256


class Simulation:
    """clock, policy, records, agents; nodes, engines and groups by name. at(time, handler, argument) is clock.at(). To
    engines it is the Control of their World.

    What may happen beside the load (scenario.Happening) is done with add_node(), join(), drain(), fail(), an engine's
    `slow` and a node's set_rate() and read(..., kind=FOREIGN).
    """

    def __init__(self, scenario: Scenario, on_progress: Callable[[float], None] = lambda done: None) -> None:
        cluster = scenario.cluster
        self.scenario = scenario
        self.clock = Clock()
        self.at = self.clock.at
        self.constants = constants(scenario)
        self.policy = Policy(self.constants.policy)
        self.nodes: dict[str, Node] = {}
        self.engines: dict[str, Engine] = {}
        self.groups: dict[str, Group] = {}
        self.requests: dict[RequestKey, Request] = {}
        self.records = Records()
        self.agents = Agents(
            scenario.load, self.clock, self.records, self.arrive, self.constants.turn_s, scenario.slo.ttft_s
        )
        self.sampler = Sampler(self.clock, self.nodes, self.groups)
        self.failed_requests = 0
        self.ended_at = 0.0
        self._world = World(self.clock, self.constants, self)
        self._on_progress = on_progress
        self._calls = 0
        self._timed_s = 0.0
        self._run: dict[type[Any], Callable[[Any], None]] = {
            Start: self._start,
            CancelOn: self._cancel_on,
            Fail: self._fail,
        }
        for role, count, size in (
            (Role.PREFILL, cluster.prefill_nodes, cluster.prefill_nodes_together),
            (Role.DECODE, cluster.decode_nodes, cluster.decode_nodes_together),
        ):
            for index in range(count):
                letter = role.value[0]
                self.add_node(f"{letter}{index}", role, f"{role.value}{index // size}")

    # -- the cluster --

    def add_node(self, name: str, role: Role, group: str) -> Node:
        """A node with all of its engines, which take work from their first report on, now."""
        cluster = self.scenario.cluster
        node = self.nodes[name] = Node(name, role, self.clock, cluster.snic_rate)
        for index in range(cluster.engines):
            self.join(name if cluster.engines == 1 else f"{name}.{index}", node, role, group)
        return node

    def join(self, name: str, node: Node, role: Role, group: str) -> Engine:
        """An engine on a node, in a group that may be new."""
        engine = self._prefill(name, node, group) if role is Role.PREFILL else self._decode(name, node, group)
        self.engines[name] = engine
        constants = self.constants
        if role is Role.DECODE:
            device = constants.decode_pages * BLOCK_TOKENS
        else:
            device = constants.prefill_memory // constants.row_bytes
        self.tell(EngineJoined(name, role, node.name, group, constants.buffer_blocks[role], device))
        engine.group.changed(engine)
        return engine

    def _prefill(self, name: str, node: Node, group: str) -> PrefillEngine:
        its = self.groups.get(group)
        if its is None:
            its = self.groups[group] = PrefillGroup(self._world, group)
        assert isinstance(its, PrefillGroup)
        kind = Layerwise if self.constants.system.layerwise else Resident
        return kind(self._world, name, node, its)

    def _decode(self, name: str, node: Node, group: str) -> DecodeEngine:
        its = self.groups.get(group)
        if its is None:
            its = self.groups[group] = Group(self._world, group, Role.DECODE)
        return DecodeEngine(self._world, name, node, its)

    def drain(self, engine: Engine) -> None:
        """It finishes what it has and takes nothing new; `engine.seq` says how much is left."""
        engine.open = False
        self.tell(EngineDraining(engine.name))

    def leave(self, engine: Engine) -> None:
        """It is gone, and with it what it had: those requests are tried again elsewhere."""
        engine.die()
        engine.open = False
        del self.engines[engine.name]
        engine.node.engines.remove(engine)
        engine.group.engines.remove(engine)
        if isinstance(engine, PrefillEngine):
            engine.group.forget(engine)
        self.tell(EngineLeft(engine.name))

    # -- the scheduler --

    def tell(self, event: Event) -> None:
        """Let the policy decide, and do what it says."""
        self._calls += 1
        if self._calls % TIMED:
            actions = self.policy.handle(event, self.clock.now)
        else:
            begun = thread_time()
            actions = self.policy.handle(event, self.clock.now)
            self._timed_s += thread_time() - begun
        run = self._run
        for action in actions:
            run[type(action)](action)

    @property
    def policy_s(self) -> float:
        """CPU seconds that the policy has taken, estimated."""
        return self._timed_s * TIMED

    def _start(self, action: Start) -> None:
        request = self.requests[action.key]
        prefill, decode = self.engines[action.prefill], self.engines[action.decode]
        assert isinstance(prefill, PrefillEngine) and isinstance(decode, DecodeEngine)
        request.prefill, request.decode = prefill, decode
        request.pe_tokens = action.pe_tokens
        request.own_rows = request.prompt if action.read_path is ReadPath.PE else action.pe_tokens
        request.started_at = request.staged_at = self.clock.now
        request.reads = 1  # until both sides are told
        decode.assigned(request)
        prefill.assigned(request)
        self.buffered(request)

    def _cancel_on(self, action: CancelOn) -> None:
        engine = self.engines.get(action.engine)
        request = self.requests[action.key]
        request.gone = True
        if engine is not None:
            engine.drop(request)

    def _fail(self, action: Fail) -> None:
        request = self.requests.pop(action.key)
        request.gone = True
        self.failed_requests += 1
        if not request.made and request.first_at >= 0:
            request.made = 1
        self.agents.lost(request, action.code)

    # -- the life of a request --

    def arrive(self, request: Request) -> None:
        """A turn reaches the scheduler, with the length that its client knows to be in storage."""
        request.arrived = self.clock.now
        self.requests[request.key] = request
        self.tell(RequestArrived(request.key, request.prompt, request.hit, request.blocks))

    def fetched(self, loads: tuple[Load, ...]) -> None:
        """A group's leader asks for work."""
        self.tell(Fetched(loads))

    def buffered(self, request: Request) -> None:
        """One of those whose read it waits for is done."""
        request.reads -= 1
        if not request.reads and not request.gone:
            request.is_ready(self.clock.now)
            request.prefill.ready(request)

    def first_token(self, request: Request) -> None:
        request.first_at = self.clock.now
        self.agents.first_token(request)

    def prefill_ended(self, request: Request) -> None:
        self.tell(PrefillEnded(request.key))

    def handed_over(self, request: Request) -> None:
        self.tell(KvHandedOver(request.key))

    def ended(self, request: Request) -> None:
        request.gone = True
        del self.requests[request.key]
        self.tell(RequestEnded(request.key))
        self.agents.ended(request)
        if self.records.num_turns % TOLD == 0:
            self._on_progress(self.records.num_turns / self.agents.offered)

    def erred(self, request: Request, engine: str, code: ErrorCode) -> None:
        """An engine cannot go on with it, and has let go of it."""
        request.gone = True
        self.tell(RequestErred(request.key, engine, code, ""))

    # -- the run --

    def play(self) -> None:
        """From the start to the end. RuntimeError if it comes to a stand before: a defect."""
        self.sampler.start()
        self.agents.start()
        for happening in (*self.scenario.incidents, *([self.scenario.roles] if self.scenario.roles else ())):
            happening.start(self)
        self.clock.run()
        self.ended_at = self.clock.now
        if self.agents.playing and not self.clock.stopped:
            raise RuntimeError(f"nothing happens any more at {self.ended_at:g} s, and {len(self.requests)} turns wait")
        self.sampler.sample()
