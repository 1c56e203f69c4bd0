"""The OpenAPI document, and schemathesis against it: no answer that it does not describe, no failure of the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.frontend_harness import Attempt, Served, encode, serve, write_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
EXAMPLES = 60


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async def script(attempt: Attempt) -> None:
        await attempt.output(encode("fine 😀")[: attempt.request.sampling.max_tokens])

    async with serve(write_model(tmp_path_factory.mktemp("frontend") / "tiny")) as served:
        served.cluster.script = script
        yield served


async def test_the_document_has_every_route(served: Served) -> None:
    document = (await served.http.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    assert {(path, method) for path, item in document["paths"].items() for method in item} == {
        ("/v1/completions", "post"),
        ("/v1/chat/completions", "post"),
        ("/tokenize", "post"),
        ("/detokenize", "post"),
        ("/v1/models", "get"),
        ("/v1/models/{name}", "get"),
        ("/health", "get"),
    }
    asked = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"prompt", "n", "echo", "logprobs", "logit_bias", "stop", "seed", "temperature", "top_p"} <= set(asked)
    assert {"top_k", "min_tokens", "max_tokens", "max_completion_tokens", "stream", "ignore_eos"} <= set(asked)


def _conforms(url: str) -> int:
    """Call every route with generated bodies, right and wrong; raises at the first answer that breaks the contract."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    relevant = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
        checks.negative_data_rejection,
    ]
    calls = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        modes = (
            list(schemathesis.GenerationMode) if operation.method == "post" else [schemathesis.GenerationMode.POSITIVE]
        )
        for mode in modes:

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(
                max_examples=EXAMPLES,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            def conforms(case: Any) -> None:
                nonlocal calls
                calls += 1
                case.call_and_validate(checks=relevant, timeout=20)

            conforms()
    return calls


@pytest.mark.openapi
async def test_schemathesis(served: Served) -> None:
    pytest.importorskip("schemathesis")
    calls = await asyncio.to_thread(_conforms, served.frontend.url)
    print(f"\n{calls} calls")
    assert calls >= 6 * EXAMPLES
    await served.ended()
    assert served.frontend.failure is None
