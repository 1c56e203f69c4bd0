"""Through HTTP and a real cluster: what plain transformers in one process gives, by the same rule of sampling.

Tokens, log probabilities, stops, usage and choices; also where an engine dies in between and the request goes on.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch

from common.finish import finish_reason
from common.types import Sampling
from services.engine.torch_backend.reference import Reference
from services.engine.torch_backend.sampler import sample
from services.frontend.tokenizer import Tokenizer
from tests.cluster import Cluster, random_prompt
from tests.frontend_harness import events_of
from tests.models import EOS_ID, tiny_model
from tests.test_frontend_cluster import serve

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer(model / "tokenizer.json")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    """One cluster for all; its requests read on both sides in turns."""
    blocks = tmp_path_factory.mktemp("blocks")
    async with serve(model, blocks, scheduler__read_side="round_robin", decode=2) as (_, http):
        yield http


def run_alone(reference: Reference, prompt: Sequence[int], sampling: Sampling) -> tuple[list[int], list[torch.Tensor]]:
    """What one process gives: its tokens, and the log probabilities at each, [vocab]."""
    tokens = list(prompt)
    rows = []
    for index in range(sampling.max_tokens):
        logits = reference.logits(tokens)[-1]
        rows.append(logits.log_softmax(dim=-1))
        [sampled] = sample(logits[None].clone(), [(sampling, index)], {EOS_ID})
        tokens.append(sampled.token)
        if finish_reason(sampled.token, index + 1, sampling, {EOS_ID}) is not None:
            break
    return tokens[len(prompt) :], rows


Choice = dict[str, Any]


async def ask(http: httpx.AsyncClient, prompt: object, stream: bool, **options: Any) -> tuple[list[Choice], Any]:
    """Choices, and usage; a stream's joined up."""
    body = {"prompt": prompt, "return_token_ids": True, "stream": stream, **options}
    if stream:
        body["stream_options"] = {"include_usage": True}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    if not stream:
        answer = response.json()
        return answer["choices"], answer["usage"]
    *chunks, last, done = events_of(response.text)
    assert done == "[DONE]", last
    return join(chunks), last["usage"]


def join(chunks: Sequence[dict[str, Any]]) -> list[Choice]:
    choices: dict[int, Choice] = {}
    for chunk in chunks:
        [piece] = chunk["choices"]
        index = piece["index"]
        whole = choices.setdefault(index, {"index": index, "text": "", "logprobs": None, "token_ids": []})
        whole["text"] += piece["text"]
        whole["token_ids"] += piece["token_ids"]
        whole["finish_reason"] = piece["finish_reason"]
        if piece["logprobs"] is not None:
            whole["logprobs"] = whole["logprobs"] or {name: [] for name in piece["logprobs"]}
            for name, values in piece["logprobs"].items():
                whole["logprobs"][name] += values
    return [choices[index] for index in sorted(choices)]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(http: httpx.AsyncClient, reference: Reference, tokenizer: Tokenizer, stream: bool) -> None:
    """A23: 8 entries for 8 tokens, the first one, which the prefill engine samples, as good as the others."""
    prompt = random_prompt(10, 150)
    expected, rows = run_alone(reference, prompt, Sampling(8, ignore_eos=True))
    [choice], usage = await ask(http, prompt, stream, max_tokens=8, temperature=0, ignore_eos=True, logprobs=5)
    assert choice["token_ids"] == expected and usage["completion_tokens"] == 8
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {8}
    for index, row in enumerate(rows):
        assert logprobs["token_logprobs"][index] == pytest.approx(float(row[expected[index]]), abs=1e-3)
        top = sorted(logprobs["top_logprobs"][index].values(), reverse=True)
        assert top == pytest.approx(row.topk(5).values.tolist(), abs=1e-3)
        assert tokenizer.token_bytes(expected[index]).decode(errors="replace") in (logprobs["tokens"][index], "\ufffd")


SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "min_tokens": 6, "logit_bias": {"77": 3.5, "78": -100}}


@pytest.mark.parametrize("stream", [False, True])
async def test_seeds_and_choices(http: httpx.AsyncClient, reference: Reference, stream: bool) -> None:
    """Each choice is what its own seed gives alone, on whichever engines it ran."""
    prompt = random_prompt(11, 130)
    bias = ((77, 3.5), (78, -100.0))
    choices, usage = await ask(http, prompt, stream, max_tokens=12, n=3, seed=41, logprobs=0, **SAMPLED)
    for index, choice in enumerate(choices):
        sampling = Sampling(12, 0.9, 0.95, 40, 41 + index, min_tokens=6, logit_bias=bias)
        expected, rows = run_alone(reference, prompt, sampling)
        assert choice["token_ids"] == expected
        values = [float(row[token]) for row, token in zip(rows, expected, strict=True)]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(values, abs=1e-3)
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3
    assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)
    assert usage["prompt_tokens"] == 130
    [alone], _ = await ask(http, prompt, stream, max_tokens=12, seed=42, **SAMPLED)
    assert alone["token_ids"] == choices[1]["token_ids"]


async def test_greedy_choices_of_several_prompts(http: httpx.AsyncClient, reference: Reference) -> None:
    prompts = [random_prompt(seed, length) for seed, length in ((12, 63), (13, 64), (14, 129))]
    choices, usage = await ask(http, prompts, False, max_tokens=5, n=2, temperature=0, ignore_eos=True)
    expected = [reference.greedy(prompt, 5) for prompt in prompts for _ in range(2)]
    assert [choice["token_ids"] for choice in choices] == expected
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (63 + 64 + 129, 30)


@pytest.mark.parametrize("max_tokens", [1, 2, 64])
async def test_usage(http: httpx.AsyncClient, reference: Reference, max_tokens: int) -> None:
    """A22: over HTTP, streamed and not, with and without hits; the end token is counted."""
    prompt = random_prompt(15, 100)
    expected, _ = run_alone(reference, prompt, Sampling(max_tokens))
    for stream in (False, True):
        [choice], usage = await ask(http, prompt, stream, max_tokens=max_tokens, temperature=0)
        assert choice["token_ids"] == expected
        assert usage["completion_tokens"] == len(expected) and usage["prompt_tokens"] == 100
        assert usage["total_tokens"] == 100 + len(expected)


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings(http: httpx.AsyncClient, reference: Reference, tokenizer: Tokenizer, stream: bool) -> None:
    """A36: cut in front of a string that begins in one token and ends in another; nothing of it is shown."""
    prompt = random_prompt(16, 90)
    tokens = reference.greedy(prompt, 40)
    pieces = [tokenizer.decode([token]) for token in tokens]
    text = tokenizer.decode(tokens)
    for at in range(8, 36):
        stop = "".join(pieces[at : at + 3])[1:-1]
        if len(pieces[at]) > 1 and "\ufffd" not in stop and len(stop) >= 2 and text.count(stop) == 1:
            break
    else:
        pytest.fail("no three tokens make a stop string")
    asked = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    [choice], usage = await ask(http, prompt, stream, stop=[stop, "never said"], **asked)
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")
    counted = next(count for count in range(41) if stop in tokenizer.decode(tokens[:count]))
    assert usage["completion_tokens"] == counted
    near = stop + "\x00"
    [choice], usage = await ask(http, prompt, stream, stop=near, **asked)
    assert (choice["text"], choice["finish_reason"], usage["completion_tokens"]) == (text, "length", 40)


async def test_what_goes_on_elsewhere_is_the_same(model: Path, tmp_path: Path) -> None:
    """A26: the decode engine dies after some tokens; no token, log probability or choice is repeated, lost or other."""
    prompt = random_prompt(17, 100)
    options = {"max_tokens": 60, "n": 2, "seed": 5, "temperature": 0.8, "ignore_eos": True, "logprobs": 1}
    async with serve(model, tmp_path, decode=2) as (cluster, http):
        undisturbed, _ = await ask(http, prompt, True, **options)
        chunks = []
        body = {"prompt": prompt, "stream": True, "return_token_ids": True, **options}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunks.append(json.loads(line.removeprefix("data: ")))
                assert "error" not in chunks[-1], chunks[-1]
                if len(chunks) == 30:
                    await _kill_a_busy_one(cluster)
        disturbed = join(chunks)
        assert [choice["token_ids"] for choice in disturbed] == [choice["token_ids"] for choice in undisturbed]
        assert [choice["text"] for choice in disturbed] == [choice["text"] for choice in undisturbed]
        for one, other in zip(disturbed, undisturbed, strict=True):
            assert one["logprobs"]["tokens"] == other["logprobs"]["tokens"]
            assert one["logprobs"]["text_offset"] == other["logprobs"]["text_offset"]
            assert one["logprobs"]["token_logprobs"] == pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-3)


async def _kill_a_busy_one(cluster: Cluster) -> None:
    busy = max(("decode-0", "decode-1"), key=lambda name: cluster.engines[name].load()[0])
    await cluster.engines.pop(busy).stop(drain=False)
    await cluster.traffic_managers.pop(busy).stop(drain=False)


async def test_tenants_do_not_hit_one_anothers_blocks(model: Path, reference: Reference, tmp_path: Path) -> None:
    """F09: the same prompt is cold for the other tenant, and a tenant hits what it has had generated, too."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[a]\nkeys = ["sk-a"]\n[b]\nkeys = ["sk-b"]\n')
    prompt = random_prompt(18, 200)
    output = reference.greedy(prompt, 70)
    async with serve(model, tmp_path / "blocks", frontend__api_keys=str(keys)) as (cluster, http):

        async def cached(key: str, prompt: list[int], max_tokens: int) -> int:
            body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
            body, headers = {**body, "return_token_ids": True}, {"Authorization": f"Bearer {key}"}
            answer = (await http.post("/v1/completions", json=body, headers=headers)).json()
            assert answer["choices"][0]["token_ids"] == reference.greedy(prompt, max_tokens)
            hits: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return hits

        assert await cached("sk-a", prompt, 70) == 0
        await cluster.quiet()
        assert await cached("sk-b", prompt, 1) == 0
        await cluster.quiet()
        assert [await cached(key, prompt, 1) for key in ("sk-a", "sk-b")] == [192, 192]
        longer = [*prompt, *output]
        assert await cached("sk-a", longer, 1) == 256
        assert await cached("sk-b", longer, 1) == 192


async def test_many_at_once_are_each_their_own(http: httpx.AsyncClient, reference: Reference) -> None:
    """Rows of one batch with different wishes do not mix."""
    prompts = [random_prompt(seed, 70 + seed) for seed in range(20, 26)]
    wishes: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logit_bias": {"9": 100}},
        {"temperature": 0.7, "seed": 3, "logprobs": 2},
        {"temperature": 1.2, "seed": 4, "top_k": 5},
        {"temperature": 0, "min_tokens": 10, "logprobs": 0},
        {"temperature": 0.5, "seed": 9, "top_p": 0.5},
    ]
    calls = (ask(http, prompt, True, max_tokens=10, **wish) for prompt, wish in zip(prompts, wishes, strict=True))
    for prompt, wish, ([choice], _) in zip(prompts, wishes, await asyncio.gather(*calls), strict=True):
        given = {key: wish[key] for key in ("temperature", "seed", "top_k", "top_p", "min_tokens") if key in wish}
        bias = tuple((int(token), float(value)) for token, value in wish.get("logit_bias", {}).items())
        expected, _ = run_alone(reference, prompt, Sampling(10, logit_bias=bias, **given))
        assert choice["token_ids"] == expected, wish
        assert (choice["logprobs"] is not None) == ("logprobs" in wish)
