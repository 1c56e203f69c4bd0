"""The front end as a process: start, what stops it from starting, drain, failures inside it, size."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.config import load_config
from common.errors import ConfigError, DualPathError, ErrorCode
from common.types import Role
from services.frontend.service import Frontend
from tests.frontend_harness import Served, encode, expect_error, serve, text_of, write_model


async def test_a_defect_is_a_500_without_details(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> str:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(type(served.frontend.model.tokenizer), "encode", broken)
    response = await served.complete()
    expect_error(response, None, "internal error", status=500)
    assert "secret" not in response.text
    await served.ended()


async def test_an_empty_text_is_refused_where_no_bos_is_added(model: Path, tmp_path: Path) -> None:
    bare = write_model(tmp_path / "bare")
    tokenizer = json.loads((bare / "tokenizer.json").read_text())
    (bare / "tokenizer.json").write_text(json.dumps({**tokenizer, "post_processor": None}))
    (bare / "chat_template.jinja").unlink()
    async with serve(bare) as served:
        expect_error(await served.complete(prompt=""), "prompt", "at least 1 token, got 0")
        expect_error(await served.chat(), "messages", "no chat template")
        assert served.cluster.requests == []


async def test_the_manifest_is_registered(served: Served) -> None:
    [member] = served.cluster.registered
    assert member.role is Role.FRONTEND and member.manifest == served.frontend.model.manifest
    assert served.frontend.url.startswith("http://127.0.0.1:") and not served.frontend.url.endswith(":0")


async def test_a_port_in_use_is_one_clear_line(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = load_config(overrides={"model.path": str(model), "frontend.port": port})
        frontend = Frontend(config, "frontend")
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}: [^\n]*in use[^\n]*$"):
            await frontend.start()
        await frontend.stop(drain=False)


@pytest.mark.parametrize("missing", ["tokenizer.json", "model.safetensors", "config.json"])
async def test_an_incomplete_model_is_one_clear_line(tmp_path: Path, missing: str) -> None:
    broken = write_model(tmp_path / "broken")
    (broken / missing).unlink()
    config = load_config(overrides={"model.path": str(broken), "frontend.port": 0})
    frontend = Frontend(config, "frontend")
    with pytest.raises(ConfigError, match=r"^[^\n]+$"):
        await frontend.start()
    await frontend.stop(drain=False)


async def test_a_tokenizer_that_is_none_is_one_clear_line(tmp_path: Path) -> None:
    broken = write_model(tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{}")
    frontend = Frontend(load_config(overrides={"model.path": str(broken), "frontend.port": 0}), "frontend")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer"):
        await frontend.start()
    await frontend.stop(drain=False)


async def test_draining_finishes_what_is_in_hand_and_takes_nothing_new(model: Path) -> None:
    async with serve(model, timeouts__drain_s=30.0) as served:
        go_on = asyncio.Event()

        async def script(attempt: Any) -> None:
            attempt.tokens(encode("a"))
            await go_on.wait()
            attempt.tokens(encode("b"), index=1)
            attempt.finished(2)

        served.cluster.script = script
        served.cluster.idle.clear()
        running = asyncio.create_task(served.stream())
        await served.cluster.until(lambda: len(served.cluster.requests) == 1)
        stopping = asyncio.create_task(served.frontend.stop())
        while (response := await served.http.get("/health")).status_code == 200:
            await asyncio.sleep(0.01)
        expect_error(response, None, "shutting down", status=503)
        refused = await served.complete()
        expect_error(refused, None, "shutting down", status=503)
        assert "retry-after" in refused.headers
        go_on.set()
        events = await running
        assert text_of(events) == "ab" and events[-1] == "[DONE]"
        await stopping
        with pytest.raises(httpx.ConnectError):
            await served.http.get("/health")


async def test_a_drain_that_takes_too_long_ends_with_an_error_event(model: Path) -> None:
    async with serve(model, timeouts__drain_s=0.1) as served:

        async def script(attempt: Any) -> None:
            attempt.tokens(encode("a"))

        served.cluster.script = script
        running = asyncio.create_task(served.stream())
        await served.cluster.until(lambda: len(served.cluster.requests) == 1)
        await asyncio.sleep(0.05)
        await served.frontend.stop()
        events = await running
        assert events[-1]["error"]["message"] == "this front end has shut down"
        await served.cluster.until(lambda: len(served.cluster.cancelled) == 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_drain_that_takes_too_long_tells_who_waits_to_be_submitted_again(model: Path, stream: bool) -> None:
    """Between two attempts nobody waits for news of one."""
    async with serve(model, timeouts__drain_s=0.1) as served:
        served.cluster.refusal = DualPathError(ErrorCode.DRAINING, "says the scheduler")
        running = asyncio.create_task(served.complete(stream=stream))
        await served.cluster.until(lambda: len(served.cluster.requests) == 1)
        await served.frontend.stop()
        expect_error(await running, None, "this front end has shut down", status=504)


async def test_a_drain_that_takes_too_long_tells_who_waits_for_a_scheduler(model: Path) -> None:
    async with serve(model, timeouts__drain_s=0.1) as served:

        async def script(attempt: Any) -> None:
            served.frontend._enrolment.held.clear()  # type: ignore[union-attr]
            attempt.failed(ErrorCode.ENGINE_LOST)

        served.cluster.script = script
        running = asyncio.create_task(served.complete(stream=True))
        await served.cluster.until(lambda: len(served.cluster.requests) == 1)
        async with asyncio.timeout(5):
            while not served.metric("retries_total{code=engine_lost}"):
                await asyncio.sleep(0.01)
        await served.frontend.stop()
        expect_error(await running, None, "this front end has shut down", status=504)


async def test_refusals_of_the_scheduler_have_their_status(served: Served) -> None:
    for code, status in ((ErrorCode.OVERLOADED, 503), (ErrorCode.NO_ENGINES, 503), (ErrorCode.BAD_REQUEST, 400)):
        served.cluster.refusal = DualPathError(code, "says the scheduler")
        for stream in (False, True):
            response = await served.complete(stream=stream)
            expect_error(response, None, "says the scheduler", status=status)
            assert response.json()["error"]["code"] == code.value
            assert ("retry-after" in response.headers) == (status == 503)
    assert len(served.cluster.requests) == 6
    assert served.cluster.cancelled == []


def test_the_process_imports_neither_torch_nor_transformers_nor_numpy() -> None:
    code = "import sys, services.frontend.service; print([m for m in sys.argv[1:] if m in sys.modules])"
    names = ["torch", "transformers", "numpy", "typer", "huggingface_hub", "fastapi"]
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
