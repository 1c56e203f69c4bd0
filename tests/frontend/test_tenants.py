"""API keys: who may call, what a tenant's salt does to block keys, its own bounds, and files that are wrong."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from common.blocks.hashing import prefix_keys, salted
from common.errors import ConfigError
from services.frontend.tenants import EVERYBODY, load_tenants
from tests.frontend_harness import Attempt, Served, expect_error, expected_keys, serve

KEY_A, KEY_B, KEY_C = "sk-of-a", "sk-of-b", "sk-of-c"
FILE = f"""\
[a]
keys = ["{KEY_A}"]
[b]
keys = ["sha256:{hashlib.sha256(KEY_B.encode()).hexdigest()}", "sk-also-of-b"]
salt = "pepper"
[c]
keys = ["{KEY_C}"]
max_pending = 2
"""
PROMPT = [7] * 130


@pytest.fixture
async def served(model: Path, tmp_path: Path) -> AsyncIterator[Served]:
    (tmp_path / "keys.toml").write_text(FILE)
    async with serve(model, frontend__api_keys=str(tmp_path / "keys.toml")) as served:
        yield served


async def ask(served: Served, key: str | None, path: str = "/v1/completions", **body: object) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    return await served.http.post(path, json={"prompt": PROMPT, "max_tokens": 1, **body}, headers=headers)


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer sk-of-x", f"Basic {KEY_A}", KEY_A])
async def test_a_wrong_key_is_refused_everywhere(served: Served, authorization: str | None) -> None:
    headers = {"Authorization": authorization} if authorization is not None else {}
    posts = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
    answers = [await served.http.post(path, json={}, headers={**headers, "X-Request-Id": "mine"}) for path in posts]
    answers += [await served.http.get(path, headers=headers) for path in ("/v1/models", "/v1/models/tiny")]
    for answer in answers:
        expect_error(answer, None, "API key", status=401)
        assert answer.headers["www-authenticate"] == "Bearer" and answer.json()["error"]["code"] == "invalid_api_key"
    assert {answer.headers["x-request-id"] for answer in answers[:4]} == {"mine"}
    for path, status in (("/health", 200), ("/live", 200), ("/ready", 200), ("/metrics", 404)):
        assert (await served.http.get(path)).status_code == status
    assert served.cluster.requests == [] and len(served.frontend.requests) == 0


async def test_the_same_prompt_has_other_keys_for_another_tenant(served: Served) -> None:
    served.says("x")
    for key in (KEY_A, KEY_B, "sk-also-of-b", KEY_A):
        assert (await ask(served, key)).status_code == 200
    a, b, also_b, again = served.cluster.requests
    assert a.keys == again.keys and b.keys == also_b.keys
    assert not set(a.block_keys) & set(b.block_keys)
    shared = expected_keys(served.frontend, a)
    assert shared not in (a.keys, b.keys)
    manifest = served.frontend.model.manifest
    for request, salt in ((a, b"a"), (b, b"pepper")):
        assert request.salt == salt
        assert request.keys == prefix_keys(salted(manifest.namespace, salt), request.prompt, 64)


async def test_a_tenant_with_as_many_requests_as_it_may_have_leaves_the_others_alone(served: Served) -> None:
    async def silent(attempt: Attempt) -> None:
        """It takes its time."""

    served.cluster.script = silent
    headers = {"Authorization": f"Bearer {KEY_C}"}
    body = {"prompt": PROMPT, "max_tokens": 9, "n": 2, "stream": True}
    waiting = served.http.build_request("POST", "/v1/completions", json=body, headers=headers)
    task = asyncio.create_task(served.http.send(waiting))
    await served.cluster.until(lambda: len(served.cluster.requests) == 2)
    refused = await ask(served, KEY_C)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    served.says("x")
    assert (await ask(served, KEY_A)).status_code == 200
    task.cancel()
    await served.cluster.until(lambda: len(served.cluster.cancelled) == 2)
    await served.ended()
    assert (await ask(served, KEY_C)).status_code == 200


async def test_keys_are_in_no_answer_and_no_log(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.says("x")
    texts = [(await ask(served, key)).text for key in (KEY_A, "sk-wrong")]
    texts.append((await ask(served, KEY_A, model="other")).text)
    texts += capsys.readouterr()
    assert not any(KEY_A in text or "sk-wrong" in text for text in texts)


def test_without_a_file_everybody_is_one_tenant() -> None:
    tenants = load_tenants("")
    assert tenants.find(None) is tenants.find("Bearer anything") is EVERYBODY
    assert salted(b"n" * 32, EVERYBODY.salt) == b"n" * 32


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[a]", "a.keys: Field required"),
        ("[a]\nkeys = []", "a.keys"),
        ('[a]\nkeys = "sk-secret"', "a.keys: Input should be a valid list"),
        ('[a]\nkeys = [""]', "a.keys.0 is no key"),
        ('[a]\nkeys = ["sk", "sha256:xyz"]', "a.keys.1 is no key"),
        ('[a]\nkeys = ["sk-secret"]\n[b]\nkeys = ["sk-secret"]', "b.keys.0 is somebody's already"),
        ('[a]\nkeys = ["sk"]\nmax_pending = -1', "a.max_pending"),
        ('[a]\nkeys = ["sk"]\nlimit = 1', "a.limit"),
        ("", "no tenant"),
        ("[a", "is not TOML"),
    ],
)
def test_a_file_that_is_wrong_is_one_clear_line_without_a_key(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "keys.toml").write_text(content)
    with pytest.raises(ConfigError) as error:
        load_tenants(str(tmp_path / "keys.toml"))
    assert words in str(error.value) and "\n" not in str(error.value) and "secret" not in str(error.value)


def test_a_file_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*No such file"):
        load_tenants(str(tmp_path / "none.toml"))
