"""The routes: OpenAI's completions, chat completions and models; vLLM's tokenize and detokenize; the pages of every
process, since load generators and balancers look for them here. Where keys are asked for, /metrics is not one of them:
it tells of everybody's load."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from common.errors import DualPathError, ErrorCode
from common.health import Page
from common.pages import LIVE, METRICS, READY, Subject, pages
from services.frontend.client_request import Asked
from services.frontend.errors import HANDLERS, REQUEST_ID, ApiError
from services.frontend.generation import asked
from services.frontend.limits import (
    DEFAULT_COMPLETION_TOKENS,
    check_hit_tokens,
    check_model,
    check_prompt,
    check_token_ids,
)
from services.frontend.model import ServedModel
from services.frontend.openapi import describe
from services.frontend.outlet import OUTLET
from services.frontend.requests import Call, Requests
from services.frontend.responses import Answer, ChatAnswer, ChatChoice, Choice, CompletionAnswer, CompletionChoice
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
from services.frontend.tenants import Tenants
from services.frontend.tokenizer import Tokenizer
from services.frontend.tool_calls import with_parsed_arguments
from services.frontend.tool_parser import ToolParser

MAX_BODY_BYTES = 32 << 20
#: To parse a longer one takes the event loop for milliseconds, and so do the checks of what is in it: others have a
#: turn in between.
LONG_BODY_BYTES = 256 << 10
#: What we take over of a client's X-Request-Id.
CLIENT_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Cluster(Subject, Protocol):
    """What the routes need of the front end."""

    model: ServedModel
    requests: Requests
    tenants: Tenants
    draining: bool

    @property
    def context_limit(self) -> int:
        """Tokens of prompt and output together that every engine can hold."""


def build_app(cluster: Cluster) -> Starlette:
    """The ASGI application. Unknown paths and methods, too, are answered in the OpenAI error form."""
    api = _Api(cluster)

    def post(path: str, handler: Handler) -> Route:
        return Route(path, _Admitted(cluster, handler), methods=["POST"])

    routes = [
        post("/v1/completions", api.completions),
        post("/v1/chat/completions", api.chat_completions),
        post("/tokenize", api.tokenize),
        post("/detokenize", api.detokenize),
        Route("/v1/models", api.models, methods=["GET"]),
        Route("/v1/models/{name:path}", api.model, methods=["GET"]),
        Route("/openapi.json", api.openapi, methods=["GET"]),
        Route("/health", api.health, methods=["GET"]),
    ]
    public = [LIVE, READY] if cluster.tenants.need_keys else [LIVE, READY, METRICS]
    routes += [Route(path, _served(page), methods=["GET"]) for path, page in pages(cluster).items() if path in public]
    app = Starlette(routes=routes, exception_handlers=HANDLERS)
    app.router.redirect_slashes = False
    return app


Handler = Callable[[Request, Call], Awaitable[Response]]


def _served(page: Page) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        answer = await page()
        return Response(answer.body, answer.status, media_type=answer.media_type)

    return serve


class _Admitted:
    """A route whose request has a place among those in hand until its response is sent, or its client is gone."""

    def __init__(self, cluster: Cluster, handler: Handler) -> None:
        self._cluster = cluster
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        asked_id = request.headers.get("x-request-id", "")
        if not CLIENT_REQUEST_ID.fullmatch(asked_id):
            asked_id = ""
        scope[REQUEST_ID] = asked_id
        if self._cluster.draining:
            raise DualPathError(ErrorCode.DRAINING, "this front end is shutting down")
        tenant = self._cluster.tenants.find(request.headers.get("authorization"))
        call = self._cluster.requests.admit(asked_id, tenant)
        scope[REQUEST_ID] = asked_id or call.request_id
        try:
            response = await self._handler(request, call)
            response.headers["X-Request-Id"] = scope[REQUEST_ID]
            await response(scope, receive, send)
        finally:
            call.close()


class _Api:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._model = cluster.model
        self._created = int(time.time())

    async def completions(self, request: Request, call: Call) -> Response:
        body = await _read(request, CompletionRequest)
        check_model(body.model, self._model.name)
        prompts = [await self._prompt(prompt) for prompt in body.prompt]
        if body.hit_tokens is not None:
            check_hit_tokens(body.hit_tokens, [len(prompt) for prompt in prompts])
        if body.echo and body.alternatives is not None:
            raise ApiError("echo: the prompt's log probabilities are not computed; ask for echo or logprobs", "echo")
        model, limit, salt = self._model, self._cluster.context_limit, call.tenant.salt
        sequences = asked(body, "prompt", prompts, model, limit, DEFAULT_COMPLETION_TOKENS, salt, body.hit_tokens)
        echoes = [self._tokenizer("echo").decode(prompt) if body.echo else "" for prompt in prompts]
        choices: list[Choice] = [
            CompletionChoice(index, body, self._token_bytes, echoes[index // (body.n or 1)])
            for index in range(len(sequences))
        ]
        answer = CompletionAnswer(body, call.request_id, int(time.time()), model.name, choices)
        return await self._generate(request, call, body, sequences, answer)

    async def chat_completions(self, request: Request, call: Call) -> Response:
        body = await _read(request, ChatRequest)
        check_model(body.model, self._model.name)
        if body.top_logprobs and not body.logprobs:
            raise ApiError("top_logprobs: only allowed where logprobs is true", "top_logprobs")
        tokenizer = self._tokenizer("messages")
        if self._model.chat_template is None:
            raise ApiError(f"messages: the model {self._model.name!r} has no chat template", "messages")
        try:
            messages = [with_parsed_arguments(message.model_dump(exclude_unset=True)) for message in body.messages]
            text = self._model.chat_template.render(messages, body.tools)
        except ValueError as error:
            raise ApiError(f"messages: the chat template refuses them: {error}", "messages") from None
        # the template has written every special token that the model wants
        prompt = await tokenizer.encode(text, add_special_tokens=False, check=self._fits("messages"))
        model, limit = self._model, self._cluster.context_limit
        sequences = asked(body, "messages", [prompt], model, limit, None, call.tenant.salt)
        wanted = body.tools and body.tool_choice != "none" and self._model.chat_template.calls_in_tags
        choices: list[Choice] = [
            ChatChoice(index, body, self._token_bytes, call.request_id, ToolParser() if wanted else None)
            for index in range(len(sequences))
        ]
        answer = ChatAnswer(body, call.request_id, int(time.time()), model.name, choices)
        return await self._generate(request, call, body, sequences, answer)

    async def tokenize(self, request: Request, call: Call) -> Response:
        body = await _read(request, TokenizeRequest)
        check_model(body.model, self._model.name)
        tokens = await self._tokenizer("prompt").encode(body.prompt, body.add_special_tokens)
        limit = self._cluster.context_limit
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": limit})

    async def detokenize(self, request: Request, call: Call) -> Response:
        body = await _read(request, DetokenizeRequest)
        check_model(body.model, self._model.name)
        tokenizer = self._tokenizer("tokens")
        check_token_ids("tokens", body.tokens, self._model.vocab_size)
        return JSONResponse({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})

    async def models(self, request: Request) -> Response:
        self._cluster.tenants.find(request.headers.get("authorization"))
        return JSONResponse({"object": "list", "data": [self._model_body()]})

    async def model(self, request: Request) -> Response:
        self._cluster.tenants.find(request.headers.get("authorization"))
        check_model(request.path_params["name"], self._model.name)
        return JSONResponse(self._model_body())

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(describe(self._model.name))

    async def health(self, request: Request) -> Response:
        if (error := self._cluster.not_ready()) is not None:
            raise error
        return JSONResponse({"status": "ok"})

    def _model_body(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "dualpath",
            "max_model_len": self._cluster.context_limit,
        }

    def _tokenizer(self, field: str) -> Tokenizer:
        """ApiError, about this field, if the model has none."""
        if self._model.tokenizer is None:
            message = (
                f"{field}: {self._model.name!r} is a profiled model without a tokenizer; it takes a prompt of token "
                "ids at /v1/completions and gives token ids back (return_token_ids)"
            )
            raise ApiError(message, field)
        return self._model.tokenizer

    def _token_bytes(self, token: int) -> bytes:
        return self._tokenizer("logprobs").token_bytes(token)

    async def _prompt(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return await self._tokenizer("prompt").encode(prompt, add_special_tokens=True, check=self._fits("prompt"))
        return prompt

    def _fits(self, field: str) -> Callable[[int], None]:
        """The check of a prompt's length, for a text of which that is not known yet."""
        limit = self._cluster.context_limit
        return lambda num_tokens: check_prompt(field, num_tokens, limit)

    async def _generate(
        self, request: Request, call: Call, body: GenerationRequest, sequences: Sequence[Asked], answer: Answer
    ) -> Response:
        if body.stop:
            self._tokenizer("stop")
        generation = call.start(sequences, body.n or 1)
        if not body.stream:
            updates = await unless_gone(request.receive, generation.whole())
            return JSONResponse(answer.whole(updates, generation.usage))
        # a request that fails before its first token still gets a proper status
        first = await unless_gone(request.receive, generation.next_update())
        return EventStream(generation, first, answer, call.request_id, request.scope.get(OUTLET))


async def _read(request: Request, schema: type[Body]) -> Body:
    """The body, parsed. ApiError if it is wrong or larger than we take."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(f"the body is limited to {MAX_BODY_BYTES} bytes", status=413)
    parsed = parse(schema, bytes(body))
    if len(body) > LONG_BODY_BYTES:
        await asyncio.sleep(0)
    return parsed
