"""The routes: OpenAI's completions, chat completions and models; vLLM's tokenize and detokenize; health."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from common.errors import DualPathError
from services.frontend.detokenize import OutputText, no_text
from services.frontend.errors import HANDLERS, ApiError
from services.frontend.limits import (
    DEFAULT_COMPLETION_TOKENS,
    check_hit_tokens,
    check_model,
    check_prompt,
    check_token_ids,
    resolve_sampling,
)
from services.frontend.model import ServedModel
from services.frontend.requests import ClientRequest, Requests
from services.frontend.responses import Answer, ChatAnswer, CompletionAnswer
from services.frontend.schema import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    parse,
)
from services.frontend.stream import EventStream, unless_gone
from services.frontend.tokenizer import Tokenizer
from services.frontend.updates import Update

MAX_BODY_BYTES = 32 << 20
#: What we take over of a client's X-Request-Id.
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
#: Tokens of the prompt's end that the text of the output may depend on.
CONTEXT_TOKENS = 6


class Cluster(Protocol):
    """What the routes need of the front end."""

    model: ServedModel
    requests: Requests

    @property
    def context_limit(self) -> int:
        """Tokens of prompt and output together that every engine can hold."""

    def not_ready(self) -> DualPathError | None:
        """Why no request can be served now, or None."""


def build_app(cluster: Cluster) -> Starlette:
    """The ASGI application. Unknown paths and methods, too, are answered in the OpenAI error form."""
    api = _Api(cluster)
    routes = [
        Route("/v1/completions", _Admitted(cluster.requests, api.completions), methods=["POST"]),
        Route("/v1/chat/completions", _Admitted(cluster.requests, api.chat_completions), methods=["POST"]),
        Route("/tokenize", _Admitted(cluster.requests, api.tokenize), methods=["POST"]),
        Route("/detokenize", _Admitted(cluster.requests, api.detokenize), methods=["POST"]),
        Route("/v1/models", api.models, methods=["GET"]),
        Route("/health", api.health, methods=["GET"]),
    ]
    app = Starlette(routes=routes, exception_handlers=HANDLERS)
    app.router.redirect_slashes = False
    return app


class _Admitted:
    """A route whose request has a place among those in hand until its response is sent, or its client is gone."""

    def __init__(self, requests: Requests, handler: Callable[[Request, ClientRequest], Awaitable[Response]]) -> None:
        self._requests = requests
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        asked_id = request.headers.get("x-request-id", "")
        if not REQUEST_ID.fullmatch(asked_id):
            asked_id = ""
        client = self._requests.admit(asked_id)
        try:
            response = await self._handler(request, client)
            response.headers["X-Request-Id"] = asked_id or client.request_id
            await response(scope, receive, send)
        finally:
            client.close()


class _Api:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._model = cluster.model
        self._created = int(time.time())

    async def completions(self, request: Request, client: ClientRequest) -> Response:
        body = await _read(request, CompletionRequest)
        check_model(body.model, self._model.name)
        if isinstance(body.prompt, str):
            prompt = await self._tokenizer("prompt").encode(body.prompt, add_special_tokens=True)
        else:
            prompt = body.prompt
        check_hit_tokens(body.hit_tokens, len(prompt))
        self._start(client, body, "prompt", prompt, DEFAULT_COMPLETION_TOKENS, body.hit_tokens)
        return await self._answer(request, client, body, CompletionAnswer)

    async def chat_completions(self, request: Request, client: ClientRequest) -> Response:
        body = await _read(request, ChatRequest)
        check_model(body.model, self._model.name)
        tokenizer = self._tokenizer("messages")
        if self._model.chat_template is None:
            raise ApiError(f"messages: the model {self._model.name!r} has no chat template", "messages")
        try:
            messages = [message.model_dump(exclude_unset=True) for message in body.messages]
            text = self._model.chat_template.render(messages, body.tools)
        except ValueError as error:
            raise ApiError(f"messages: the chat template refuses them: {error}", "messages") from None
        # the template has written every special token that the model wants
        prompt = await tokenizer.encode(text, add_special_tokens=False)
        self._start(client, body, "messages", prompt, None)
        return await self._answer(request, client, body, ChatAnswer)

    async def tokenize(self, request: Request, client: ClientRequest) -> Response:
        body = await _read(request, TokenizeRequest)
        check_model(body.model, self._model.name)
        tokens = await self._tokenizer("prompt").encode(body.prompt, body.add_special_tokens)
        limit = self._cluster.context_limit
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": limit})

    async def detokenize(self, request: Request, client: ClientRequest) -> Response:
        body = await _read(request, DetokenizeRequest)
        check_model(body.model, self._model.name)
        tokenizer = self._tokenizer("tokens")
        check_token_ids("tokens", body.tokens, self._model.vocab_size)
        return JSONResponse({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})

    async def models(self, request: Request) -> Response:
        model = {
            "id": self._model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "dualpath",
            "max_model_len": self._cluster.context_limit,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, request: Request) -> Response:
        if (error := self._cluster.not_ready()) is not None:
            raise error
        return JSONResponse({"status": "ok"})

    def _tokenizer(self, field: str) -> Tokenizer:
        """ApiError, about this field, if the model has none."""
        if self._model.tokenizer is None:
            message = (
                f"{field}: {self._model.name!r} is a profiled model without a tokenizer; it takes a prompt of token "
                "ids at /v1/completions and gives token ids back (return_token_ids)"
            )
            raise ApiError(message, field)
        return self._model.tokenizer

    def _start(
        self,
        client: ClientRequest,
        body: GenerationRequest,
        field: str,
        prompt: list[int],
        max_tokens: int | None,
        hit_tokens: int | None = None,
    ) -> None:
        """Check what is asked for against the limits, and hand it to the request's life."""
        limit, vocab_size = self._cluster.context_limit, self._model.vocab_size
        check_prompt(field, prompt, limit)
        check_token_ids(field, prompt, vocab_size)
        sampling = resolve_sampling(body, len(prompt), limit, vocab_size, max_tokens)
        if body.stop:
            self._tokenizer("stop")
        decode = no_text if self._model.tokenizer is None else self._model.tokenizer.decode
        text = OutputText(decode, prompt[-CONTEXT_TOKENS:], body.stop, sampling.min_tokens)
        client.start(prompt, sampling, text, hit_tokens)

    async def _answer(
        self, request: Request, client: ClientRequest, body: GenerationRequest, form: type[Answer]
    ) -> Response:
        answer = form.to(body, client.request_id, int(time.time()), self._model.name)
        if not body.stream:
            update = await unless_gone(request.receive, _whole_output(client))
            return JSONResponse(answer.whole(update, client.usage))
        # a request that fails before its first token still gets a proper status
        first = await unless_gone(request.receive, client.next_update())
        return EventStream(client, first, answer)


async def _read(request: Request, schema: type[Body]) -> Body:
    """The body, parsed. ApiError if it is wrong or larger than we take."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(f"the body is limited to {MAX_BODY_BYTES} bytes", status=413)
    return parse(schema, bytes(body))


async def _whole_output(client: ClientRequest) -> Update:
    """Everything as one update."""
    token_ids: list[int] = []
    text: list[str] = []
    while True:
        update = await client.next_update()
        token_ids += update.token_ids
        text.append(update.text)
        if update.finish_reason is not None:
            return Update(token_ids, "".join(text), update.finish_reason)
