"""A front end with everything behind it played by the test: a scheduler and an engine that say what a script says."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from common.blocks.hashing import prefix_keys
from common.config import Config, dump_config, load_config
from common.errors import DualPathError, ErrorCode
from common.faults import Faults
from common.messages import (
    Accepted,
    Cancel,
    Capacity,
    Done,
    Finished,
    Heartbeat,
    Leave,
    Member,
    MemberJoined,
    MemberLeft,
    PrefillStarted,
    Register,
    Registered,
    RequestFailed,
    Submit,
    Token,
    Tokens,
)
from common.metrics import Metrics
from common.rpc import Node, Peer
from common.types import FinishReason, Logprobs, Request, Role
from services.frontend.service import Frontend

BOS, EOS, STOP = 0, 1, 2
NUM_SPECIAL = 3
VOCAB_SIZE = 300
MODEL_LIMIT = 512
ENGINE_LIMIT = 256
CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message['role'] == 'martian' %}{{ raise_exception('unknown role ' + message['role']) }}{% endif %}
{{ bos_token + message['role'] }}: {{ message['content'] }}
{% endfor %}
{% if tools %}tools: {{ tools | tojson }}
{% endif %}
{% if add_generation_prompt %}{{ bos_token }}assistant:{% endif %}"""
"""Written so that trim_blocks and lstrip_blocks matter."""


TOOLS_TEMPLATE = """\
{%- if tools %}[tools]
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call them as <tool_call>
{"name": <name>, "arguments": <object>}
</tool_call>
{% endif %}
{%- for message in messages %}
[{{ message.role }}]{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""


def byte_tokenizer() -> Tokenizer:
    """Byte-level: BOS, EOS and a stop token, then one token a byte; a BOS goes in front of a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<s>", "</s>", "<stop>"]
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate([*special, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.enable_truncation(16)  # as some published files have it; a server must not obey
    return tokenizer


def write_model(path: Path) -> Path:
    """A model directory that a front end can serve; its weights are a name only."""
    path.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 16,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MODEL_LIMIT,
        "eos_token_id": EOS,
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(b"none")
    byte_tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"}))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return path


def write_tools_model(path: Path, limit: int) -> Path:
    """The same with a context of so many tokens and a template that has the model call tools, as Qwen's does."""
    write_model(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": limit}))
    (path / "chat_template.jinja").write_text(TOOLS_TEMPLATE)
    return path


class Attempt:
    """One submitted attempt, and what its engine can say to the front end."""

    def __init__(self, cluster: FakeCluster, request: Request, scheduler: Peer) -> None:
        self.request = request
        self._cluster = cluster
        self._scheduler = scheduler
        self.link = cluster.engine.link(request.reply_to)

    def started(self, cached: int, *parts_s: float) -> None:
        """parts_s: the times for scheduling, allocation and read; default: none taken."""
        key = (self.request.request_id, self.request.attempt)
        self.link.send(PrefillStarted(*key, cached, self.request.num_tokens - cached, *(parts_s or (0.0, 0.0, 0.0))))

    def tokens(self, ids: list[int], index: int | None = None, attempt: int | None = None) -> None:
        """All in one message, indexes from index (default: where this attempt goes on)."""
        first = self.request.num_generated if index is None else index
        number = self.request.attempt if attempt is None else attempt
        key = (self.request.request_id, number)
        self.link.send(Tokens([Token(*key, at, token, self._logprobs(at)) for at, token in enumerate(ids, first)]))

    def _logprobs(self, index: int) -> Logprobs | None:
        count = self.request.sampling.logprobs
        return None if count is None else scripted_logprobs(index, count)

    def finished(self, num_tokens: int, reason: FinishReason = FinishReason.LENGTH) -> None:
        self.link.send(Finished(self.request.request_id, self.request.attempt, reason, num_tokens))

    def failed(self, code: ErrorCode, detail: str = "as the script says") -> None:
        self._scheduler.send(RequestFailed(self.request.request_id, self.request.attempt, code, detail))

    async def output(self, ids: list[int], reason: FinishReason = FinishReason.LENGTH) -> None:
        """Every token in a message of its own, then the end."""
        for i, token in enumerate(ids):
            self.tokens([token], self.request.num_generated + i)
            await asyncio.sleep(0)
        self.finished(self.request.num_generated + len(ids), reason)


Script = Callable[[Attempt], Awaitable[None]]


def scripted_logprobs(index: int, count: int) -> Logprobs:
    """Those of the token at an output index, told apart by their values; z, y, x ... are the likeliest."""
    [last] = encode("z")
    return Logprobs(-index - 0.5, tuple((last - rank, -index - rank / 8) for rank in range(count)))


class FakeCluster:
    """Scheduler and engine. script: what happens to each attempt; refusal: how Submit is refused, if it is.
    engine_limit: tokens of a context that the decode engine holds. idle: cleared, the scheduler does not answer one
    that is about to leave."""

    def __init__(self, engine_limit: int = ENGINE_LIMIT) -> None:
        self._engine_limit = engine_limit
        self.metrics = Metrics()
        self.scheduler = Node("scheduler", Config().security, self.metrics, Faults([], "scheduler"))
        self.engine = Node("engine", Config().security, self.metrics, Faults([], "engine"))
        self.script: Script | None = None
        self.refusal: DualPathError | None = None
        self.idle = asyncio.Event()
        self.idle.set()
        self.requests: list[Request] = []
        self.cancelled: list[tuple[str, int]] = []
        self.registered: list[Member] = []
        self.members = [self._member(Role.PREFILL), self._member(Role.DECODE)]
        self._frontends: list[Peer] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._news = asyncio.Condition()

    def _member(self, role: Role) -> Member:
        capacity = Capacity(self._engine_limit, 64, 4096)
        return Member(role, role.value, f"{role.value}.1", "tcp://127.0.0.1:1", "node", 1, capacity=capacity)

    async def start(self) -> None:
        await self.scheduler.bind("tcp://127.0.0.1:*")
        self.scheduler.on(Register, self._on_register)
        self.scheduler.on(Heartbeat, lambda msg, peer: Done())
        self.scheduler.on(Leave, self._on_leave)
        self.scheduler.on(Submit, self._on_submit)
        self.scheduler.on(Cancel, self._on_cancel)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.scheduler.close()
        await self.engine.close()

    def joined(self, member: Member) -> None:
        for peer in self._frontends:
            peer.send(MemberJoined(member))

    def left(self, member: Member) -> None:
        for peer in self._frontends:
            peer.send(MemberLeft(member.incarnation, member.name, "as the test says"))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for something that messages bring about; TimeoutError after 5 s."""
        async with asyncio.timeout(5), self._news:
            await self._news.wait_for(condition)

    def _on_register(self, msg: Register, peer: Peer) -> Registered:
        self.registered.append(msg.member)
        self._frontends.append(peer)
        return Registered(0.05, self.members)

    async def _on_leave(self, msg: Leave, peer: Peer) -> Done | None:
        if msg.final:
            return None
        await self.idle.wait()
        return Done()

    async def _on_submit(self, msg: Submit, peer: Peer) -> Accepted:
        await self._note(lambda: self.requests.append(msg.request))
        if self.refusal is not None:
            raise self.refusal
        assert self.script is not None, "the test expects that nothing is dispatched"
        task = asyncio.create_task(self._play(self.script, Attempt(self, msg.request, peer)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return Accepted()

    async def _play(self, script: Script, attempt: Attempt) -> None:
        await script(attempt)

    async def _on_cancel(self, msg: Cancel, peer: Peer) -> None:
        await self._note(lambda: self.cancelled.append((msg.request_id, msg.attempt)))

    async def _note(self, change: Callable[[], None]) -> None:
        async with self._news:
            change()
            self._news.notify_all()


class Served:
    """A running front end, a client of its real port, and what is behind it."""

    def __init__(self, frontend: Frontend, cluster: FakeCluster, http: httpx.AsyncClient) -> None:
        self.frontend = frontend
        self.cluster = cluster
        self.http = http

    def says(self, text: str, reason: FinishReason = FinishReason.LENGTH, end: list[int] | None = None) -> list[int]:
        """The engine says this, byte by byte, to every attempt. Returns the tokens."""
        ids = encode(text) + (end or [])
        self.cluster.script = lambda attempt: attempt.output(ids, reason)
        return ids

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 64, **body})

    async def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hello"}]
        return await self.http.post("/v1/chat/completions", json={"messages": messages, **body})

    async def stream(self, **body: Any) -> list[Any]:
        """The events of a streamed completion; the last one of a good stream is "[DONE]"."""
        response = await self.complete(stream=True, **body)
        assert response.status_code == 200, response.text
        return events_of(response.text)

    async def ended(self) -> None:
        """Returns once no request is in hand: a client has its answer a moment earlier."""
        async with asyncio.timeout(5):
            while len(self.frontend.requests):
                await asyncio.sleep(0.01)

    def metric(self, name: str) -> float:
        return self.frontend.metrics.snapshot().get(name, 0.0)


def encode(text: str) -> list[int]:
    """The tokens of a text, without BOS."""
    tokenizer = byte_tokenizer()
    tokenizer.no_truncation()
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def events_of(body: str) -> list[Any]:
    """The events of a stream: JSON objects, and "[DONE]"."""
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def text_of(events: list[Any]) -> str:
    return "".join(choice["text"] for event in events if event != "[DONE]" for choice in event.get("choices", []))


def expect_error(response: httpx.Response, param: str | None, *words: str, status: int = 400) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert error["param"] == param
    for word in words:
        assert word in error["message"], error["message"]


def expected_keys(frontend: Frontend, request: Request) -> bytes:
    manifest = frontend.model.manifest
    return prefix_keys(manifest.namespace, request.prompt, manifest.geometry.block_size)


CHILD = """
import os, sys
from common.config import read_dumped_config
from common.process import run_service
from services.frontend.service import Frontend
config = read_dumped_config(sys.argv[1])
# not 1 itself: it is closed then, and a connection that gets its number is one that libuv never closes
sys.exit(run_service(lambda: Frontend(config, "frontend"), config.log, ready_fd=os.dup(1)))
"""


@asynccontextmanager
async def front_end_process(config: Config) -> AsyncIterator[tuple[str, psutil.Process]]:
    """A front end as a process of its own: its URL, and the process."""
    command = [sys.executable, "-c", CHILD, dump_config(config)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        url = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))["url"]
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def serve(model: Path | None, engine_limit: int = ENGINE_LIMIT, **overrides: Any) -> AsyncIterator[Served]:
    """A front end on any port. overrides: configuration, dots written as double underscores. model None: theirs."""
    cluster = FakeCluster(engine_limit)
    await cluster.start()
    settings = {
        "model.path": str(model or ""),
        "model.name": "tiny",
        "frontend.port": 0,
        "scheduler.control": cluster.scheduler.endpoint,
        "timeouts.call_s": 0.3,
        "timeouts.request_s": 20.0,
        "timeouts.drain_s": 1.0,
        **{name.replace("__", "."): value for name, value in overrides.items()},
    }
    frontend = Frontend(load_config(overrides=settings), "frontend")
    try:
        await frontend.start()
        async with httpx.AsyncClient(base_url=frontend.url, timeout=10) as http:
            yield Served(frontend, cluster, http)
    finally:
        await frontend.stop(drain=False)
        await cluster.close()
