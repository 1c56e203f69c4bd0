"""One generating call: what its sequences are, their output as it comes, and its usage."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

from common.messages import Token
from common.types import FinishReason, pack_tokens
from services.frontend.client_request import Asked, ClientRequest
from services.frontend.detokenize import NoText, OutputText
from services.frontend.errors import ApiError
from services.frontend.limits import check_prompt, check_sequences, check_token_ids, resolve_sampling
from services.frontend.model import ServedModel
from services.frontend.schema import GenerationRequest
from services.frontend.updates import Sink, Update, Usage

SEEDS = 2**63


class Generation:
    """The sequences of one call: n for each prompt, in the order of the answer's choices. next_update() until ended;
    close() in any case."""

    def __init__(self, requests: Sequence[ClientRequest], n: int) -> None:
        self._requests = requests
        self._n = n
        self._num_ended = 0
        self._arrived: asyncio.Queue[tuple[int, Update | Exception]] = asyncio.Queue(len(requests))
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def ended(self) -> bool:
        return self._num_ended == len(self._requests)

    @property
    def usage(self) -> Usage:
        """Each prompt counts once, with what the first of its sequences found in storage."""
        if len(self._requests) == 1:
            return self._requests[0].usage
        first = [request.usage for request in self._requests[:: self._n]]
        completion = sum(request.usage.completion for request in self._requests)
        return Usage(sum(one.prompt for one in first), completion, sum(one.cached for one in first), None)

    def straight(self, sink: Sink) -> None:
        """As ClientRequest.straight(), where there is one sequence: the updates of several go one way, in order."""
        if len(self._requests) == 1:
            self._requests[0].straight(sink)

    async def next_update(self) -> tuple[int, Update]:
        """Which sequence, and what it says next. DualPathError if one has failed for good: then all have."""
        if len(self._requests) == 1:
            index, update = 0, await self._requests[0].next_update()
        else:
            if not self._tasks:
                forwards = (self._forward(index, request) for index, request in enumerate(self._requests))
                self._tasks = [asyncio.create_task(forward) for forward in forwards]
            index, news = await self._arrived.get()
            if isinstance(news, Exception):
                try:
                    raise news
                finally:
                    del news  # its traceback and this frame would keep each other, and the prompt
            update = news
        self._num_ended += update.finish_reason is not None
        return index, update

    async def whole(self) -> list[Update]:
        """Everything that each sequence says, as one update."""
        tokens: list[list[Token]] = [[] for _ in self._requests]
        texts: list[list[str]] = [[] for _ in self._requests]
        reasons: list[FinishReason | None] = [None] * len(self._requests)
        while not self.ended:
            index, update = await self.next_update()
            tokens[index] += update.tokens
            texts[index].append(update.text)
            reasons[index] = update.finish_reason
        return [Update(*parts) for parts in zip(tokens, map("".join, texts), reasons, strict=True)]

    def close(self) -> None:
        """Nobody waits for updates any more."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        while not self._arrived.empty():
            self._arrived.get_nowait()

    async def _forward(self, index: int, request: ClientRequest) -> None:
        try:
            while True:
                update = await request.next_update()
                await self._arrived.put((index, update))
                if update.finish_reason is not None:
                    return
        except Exception as error:  # whoever waits for updates is to learn of it
            await self._arrived.put((index, error))


def asked(
    body: GenerationRequest,
    field: str,
    prompts: Sequence[Sequence[int]],
    model: ServedModel,
    limit: int,
    default_max_tokens: int | None,
    salt: bytes,
    hit_tokens: int | None = None,
) -> list[Asked]:
    """The sequences that are asked for, all of them possible: choice i of a prompt has the seed of the call plus i, so
    that each could be had by itself. limit: tokens of a context. ApiError, about this field or another, for what is
    not."""
    n = body.n or 1
    check_sequences(len(prompts), n)
    if body.alternatives is not None and model.tokenizer is None:
        raise ApiError(f"logprobs: {model.name!r} is a profiled model, which computes no logits", "logprobs")
    sequences: list[Asked] = []
    for prompt in prompts:
        check_prompt(field, len(prompt), limit)
        check_token_ids(field, prompt, model.vocab_size)
        sequences += _of_prompt(body, prompt, n, model, limit, default_max_tokens, salt, hit_tokens)
    return sequences


def _of_prompt(
    body: GenerationRequest,
    prompt: Sequence[int],
    n: int,
    model: ServedModel,
    limit: int,
    default_max_tokens: int | None,
    salt: bytes,
    hit_tokens: int | None,
) -> Iterator[Asked]:
    sampling = resolve_sampling(body, len(prompt), limit, model.vocab_size, default_max_tokens)
    packed = pack_tokens(prompt)
    for number in range(n):
        pieces = NoText() if model.tokenizer is None else model.tokenizer.detokenizer(prompt)
        text = OutputText(pieces, body.stop, sampling.min_tokens)
        seeded = replace(sampling, seed=(sampling.seed + number) % SEEDS)
        yield Asked(packed, seeded, text, hit_tokens, salt)
