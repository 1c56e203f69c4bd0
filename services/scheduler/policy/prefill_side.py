"""Which prefill engine a request goes to (spec §7): one queue, strictly FIFO, two classes of engines.

    C2 = {e: read_q(node(e)) <= alpha, tok_e <= beta}     C3 = {e: read_q(node(e)) > alpha, tok_e <= beta}

The head of the queue goes to the engine of C2 with the least tok_e, else to that of C3, else it waits. Since a fetch
stays open, the engines of all groups stand in the classes together: while the queue waits they are all over beta, so a
fetch brings only its own group's into play.
"""

from __future__ import annotations

from collections.abc import Iterator

from common.types import Role
from services.scheduler.policy.events import Load
from services.scheduler.policy.ranking import Ranking
from services.scheduler.policy.state import ArrivalQueue, Engine, PolicyConfig, Request, Turns


class PrefillSide:
    """Owns the prefill side's queue, and its engines' counters. engines: those that do not drain."""

    role = Role.PREFILL

    def __init__(self, config: PolicyConfig, turns: Turns) -> None:
        self.engines: dict[str, Engine] = {}
        self.queue = ArrivalQueue()
        self.short: Ranking[Engine] = Ranking()  # open engines by tok, on nodes with short read queues
        self.long: Ranking[Engine] = Ranking()  # on the others
        self._alpha, self._beta = config.alpha, config.beta
        # where every read is on this side, its staging buffer is reserved with the assignment already
        self._reads_here = config.read_side == "pe_only"
        self._turns = turns
        self.retry = False  # something has changed since the head of the queue found no engine

    # -- engines --

    def join(self, engine: Engine) -> None:
        self.engines[engine.name] = engine

    def report(self, engine: Engine, load: Load) -> None:
        engine.report(load.seq, load.tok)
        engine.open = engine.name in self.engines
        self._rank(engine)

    def close(self, engine: Engine) -> None:
        """It takes no more work: it drains or has left. Its requests that have not started wait again."""
        self.engines.pop(engine.name, None)
        engine.open = False
        self.short.remove(engine)
        self.long.remove(engine)
        for request in [request for request in engine.requests.values() if request.read_path is None]:
            self.release(request)
            self.enqueue(request)

    def count_read(self, engine: Engine, tokens: int) -> None:
        """So many hit tokens more (or less) are to be read by this engine, which may be of either role."""
        node = engine.node
        was_short = node.read_q <= self._alpha
        engine.read_q += tokens
        node.read_q += tokens
        if (node.read_q <= self._alpha) is not was_short:
            for neighbour in node.engines:
                if neighbour.role is Role.PREFILL:
                    (self.short if was_short else self.long).remove(neighbour)
                    self._rank(neighbour)

    def _rank(self, engine: Engine) -> None:
        """Its load has changed, or it has taken its turn."""
        if engine.open:
            ranking = self.short if engine.node.read_q <= self._alpha else self.long
            ranking.place(engine, engine.tok, engine.turn)
            self.retry = True

    # -- requests --

    @property
    def waiting(self) -> Iterator[Request]:
        return iter(self.queue.values())

    def can_hold(self, request: Request) -> bool:
        """Some engine could take the request if it were idle."""
        for engine in self.engines.values():
            if not self._reads_here or request.num_blocks <= engine.buffer_blocks:
                return True
        return False

    def enqueue(self, request: Request) -> None:
        if self.queue.add(request):
            self.retry = True

    def reserve(self, request: Request, blocks: int) -> None:
        """Staging buffer on its engine, where (a part of) it is read (spec §4)."""
        assert request.prefill is not None
        request.prefill.free_blocks -= blocks - request.pe_blocks
        request.pe_blocks = blocks

    def release(self, request: Request) -> None:
        """It has ended here, well or badly, or leaves the queue."""
        engine = request.prefill
        if engine is not None:
            engine.free_blocks += request.pe_blocks
            request.pe_blocks = 0
            engine.release(request)
            request.prefill = None
            self._rank(engine)
        elif not request.prefill_ended:
            self.queue.remove(request)
            self.retry = True  # another one may be the head now

    def assign(self) -> Request | None:
        """The head of the queue, now on its engine; None if it must wait. Only while there is something to retry.

        Starting the request changes the classes for the next one.
        """
        request = self.queue.head
        engine = self._choose(request)
        if engine is None:
            self.retry = False
            return None
        self.queue.remove(request)
        request.prefill = engine
        engine.take(request)
        engine.turn = next(self._turns)
        self._rank(engine)
        if self._reads_here:
            self.reserve(request, request.num_blocks)
        return request

    def _choose(self, request: Request) -> Engine | None:
        for ranking in (self.short, self.long):
            engine = ranking.least()
            if engine is None or engine.tok > self._beta:
                continue
            if self._reads_here and not self._takes(engine, request):
                engine = ranking.least_of(lambda other: self._takes(other, request))
            if engine is not None:
                return engine
        return None

    def _takes(self, engine: Engine, request: Request) -> bool:
        """It has staging buffer for the whole prompt, and is not over beta."""
        return request.num_blocks <= engine.free_blocks and engine.tok <= self._beta
