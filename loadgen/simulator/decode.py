"""The decode engine (services.decode.service): continuous batches, in closed form.

A step makes one token for every running sequence. Between a join and a leave all steps take the same time, so the
number of a step and its time follow from one another, and a sequence leaves at a step that is known when it joins. A
sequence that comes in the middle of a step joins with the next one. Attention is taken at the context that a sequence
has half-way, which is exact in sum where it grows in proportion to the context.

Device memory is taken by page: the prompt's at handoff, one more whenever a block of tokens fills. As long as there is
room for all that the running sequences will ever take, nothing has to happen at those moments; else they are events,
and if no page is left the youngest sequence is preempted.
"""

from __future__ import annotations

import math
from collections import deque
from heapq import heappop, heappush
from itertools import count

from common.errors import ErrorCode
from common.types import Role
from common.workload.hits import BLOCK_TOKENS
from loadgen.simulator.machines import Engine, Group, Node
from loadgen.simulator.request import Request
from loadgen.simulator.world import World
from services.scheduler.policy import Load

#: A time that is so little past a step's end is that end, as a share of a step.
ROUNDING = 1e-6


class DecodeEngine(Engine):
    """pages: of device memory; free: not taken. running: sequences in the batch, in the order of joining."""

    role = Role.DECODE

    def __init__(self, world: World, name: str, node: Node, group: Group) -> None:
        super().__init__(world, name, node, group)
        self.pages = self.free = world.constants.decode_pages
        self.running: dict[Request, None] = {}
        self.decoded_tokens = 0
        self.preemptions = 0
        self._handoff: deque[Request] = deque()  # waits for pages
        self._held = 0  # sequences with pages
        self._growth = 0  # pages that they will still take, at most
        self._attention_s = 0.0  # of the running ones, a step
        self._joined = 0  # sum of the steps at which the running ones joined
        self._step = 0  # number of steps done by _since
        self._since = 0.0
        self._step_s = 0.0
        self._marks: list[tuple[int, int, Request]] = []  # (step, number, sequence): it leaves, or needs a page
        self._numbers = count()
        self._due = math.inf  # of the event that looks after marks
        self._tight = False  # pages are taken when they are needed

    def load(self) -> Load:
        made = len(self.running) * self._steps_done() - self._joined
        free = self.free * BLOCK_TOKENS - (0 if self._tight else made)
        rate = self.rate.tokens_per_s
        return Load(self.name, self.seq, self.tok + made, self.read_q, rate, max(free, 0), self.started)

    # -- requests in --

    def assigned(self, request: Request) -> None:
        super().assigned(request)
        self.stage(request, request.hit - request.pe_tokens)

    def deliver(self, request: Request) -> None:
        """The staging buffer holds all of its KV, and its first token is known."""
        if request.generate == 1:
            self._loaded(request)  # it has ended: it needs no pages
            return
        self._handoff.append(request)
        self._admit()

    def _admit(self) -> None:
        """One after the other: device memory is granted in the order in which requests became ready."""
        while self._handoff:
            request = self._handoff[0]
            if not request.gone:
                if self._held >= self.constants.max_running or request.blocks > self.free:
                    return
                request.pages = request.blocks
                self.free -= request.pages
                self._held += 1
                end = self.copied(request.prompt * self.constants.kv_bytes)
                if end > self.clock.now:
                    self.clock.at(end, self._loaded, request)
                else:
                    self._loaded(request)
            self._handoff.popleft()

    def _loaded(self, request: Request) -> None:
        if request.gone or not self.alive:
            self._give_back(request)
            return
        self.store(request.prompt // BLOCK_TOKENS - request.hit // BLOCK_TOKENS)
        self.control.handed_over(request)
        self.group.changed(self)
        if request.generate == 1:
            self._end(request)
        else:
            self._join(request)

    # -- the batch --

    def _steps_done(self) -> int:
        """Steps that are over by now."""
        past = self.clock.now - self._since
        return self._step + int(past / self._step_s + ROUNDING) if self.running and past > 0 else self._step

    def _to_border(self) -> None:
        """Let _since be the end of the step in hand: from there on the batch may be another one."""
        now = self.clock.now
        if not self.running:
            self._since = now
        elif now > self._since:
            steps = math.ceil((now - self._since) / self._step_s - ROUNDING)
            self._step += steps
            self._since += steps * self._step_s

    def _changed(self) -> None:
        """The batch from _since on."""
        number = len(self.running)
        if number:
            constants = self.constants
            attention = self._attention_s / min(constants.gpus, number)
            self._step_s = (attention + constants.decode_linear_s[number]) * self.slow
        self._watch()

    def _join(self, request: Request) -> None:
        self._to_border()
        self.running[request] = None
        request.decode_s = self.constants.decode_attention(request.prompt + request.generate / 2 - 1, 1)
        self._attention_s += request.decode_s
        self._joined += self._step
        request.joined = self._step
        last = self._step + request.generate - 1
        heappush(self._marks, (last, next(self._numbers), request))
        self._growth += self._pages_at(request, request.generate - 1) - request.pages
        if self._tight:
            self._mark_growth(request)
        elif self._growth > self.free:
            self._tight = True
            for other in self.running:
                self._catch_up(other)
                self._mark_growth(other)
        self._changed()
        request.second_at = self._since + self._step_s

    def _watch(self) -> None:
        """One event is due no later than the next mark; if it is early, it looks again."""
        if self._marks:
            due = self._since + (self._marks[0][0] - self._step) * self._step_s
            if due < self._due:
                self._due = due
                self.clock.at(due, self._on_due, due)

    def _on_due(self, due: float) -> None:
        if due != self._due or not self.alive:
            return
        self._due = math.inf
        marks = self._marks
        while marks and marks[0][2] not in self.running:
            heappop(marks)  # dropped meanwhile
        if not marks:
            return
        step = marks[0][0]
        if self._since + (step - self._step) * self._step_s > due + ROUNDING * self._step_s:
            self._watch()  # steps have become longer since
            return
        self._since, self._step = max(due, self._since), step
        growing = []
        while marks and marks[0][0] <= step:
            request = heappop(marks)[2]
            if request not in self.running:
                continue
            if step - request.joined >= request.generate - 1:
                self._leave(request)
                self._end(request)
            else:
                growing.append(request)
        for request in growing:  # pages of those that have left are free by now
            self._grow(request)
        self._changed()
        self._admit()

    def _leave(self, request: Request) -> None:
        """The batch goes on without it."""
        del self.running[request]
        self._attention_s -= request.decode_s
        if not self.running:
            self._attention_s = 0.0
        self._joined -= request.joined
        self._growth -= self._pages_at(request, request.generate - 1) - request.pages

    def _end(self, request: Request) -> None:
        """All of its tokens are there; its full blocks go to storage."""
        self._give_back(request)
        self.decoded_tokens += request.generate - 1
        last = request.prompt + request.generate - 1  # tokens with KV
        blocks = last // BLOCK_TOKENS - request.prompt // BLOCK_TOKENS
        if blocks and not self.constants.free:
            num_bytes = blocks * BLOCK_TOKENS * self.constants.kv_bytes
            self.copied(num_bytes)
            self.persisted += num_bytes
            self.store(blocks)
        self.left(request)
        self.control.ended(request)
        self.group.changed(self)

    def _give_back(self, request: Request) -> None:
        if request.pages:
            self.free += request.pages
            self._held -= 1
            request.pages = 0
            if self._growth <= self.free:
                self._tight = False

    def drop(self, request: Request) -> None:
        """Its pages come back with the end of the step in hand, or once it is copied."""
        super().drop(request)
        if request in self.running:
            self._to_border()
            self._leave(request)
            self._give_back(request)
            self._changed()
        self._admit()

    def die(self) -> None:
        """What each running sequence has got is what others go on from."""
        if self.alive:
            steps = self._steps_done()
            for request in self.running:
                request.made = 1 + max(steps - request.joined, 0)
        super().die()

    def set_slow(self, factor: float) -> None:
        self._to_border()
        super().set_slow(factor)
        self._changed()

    # -- pages --

    @staticmethod
    def _pages_at(request: Request, steps: int) -> int:
        """Pages that it needs for the KV that it has after so many steps."""
        return -(-(request.prompt + steps) // BLOCK_TOKENS)

    def _catch_up(self, request: Request) -> None:
        """Take the pages that it has filled while nobody looked."""
        lacking = self._pages_at(request, self._step - request.joined) - request.pages
        if lacking > 0:
            request.pages += lacking
            self.free -= lacking
            self._growth -= lacking

    def _mark_growth(self, request: Request) -> None:
        """When it needs its next page, if it does: with the step that follows a full last page."""
        steps = request.pages * BLOCK_TOKENS - request.prompt
        if steps < request.generate - 1:
            heappush(self._marks, (request.joined + steps, next(self._numbers), request))

    def _grow(self, request: Request) -> None:
        if self._pages_at(request, self._step - request.joined + 1) <= request.pages:
            return
        while not self.free and request in self.running:
            self._preempt()
        if request in self.running:
            request.pages += 1
            self.free -= 1
            self._growth -= 1
            self._mark_growth(request)

    def _preempt(self) -> None:
        """The youngest goes back to the scheduler, which tries it again."""
        victim = next(reversed(self.running))
        self.preemptions += 1
        victim.made = 1 + self._step - victim.joined
        self._leave(victim)
        self._give_back(victim)
        self.left(victim)
        self.control.erred(victim, self.name, ErrorCode.PREEMPTED)
