"""What a front end weighs: one process, a vocabulary of a real model's size, a little traffic. Prints."""

from __future__ import annotations

import asyncio
import json
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from common.config import load_config
from tests.frontend_harness import FakeCluster, front_end_process, write_model

VOCAB_SIZE = 49_152


def large_tokenizer() -> Tokenizer:
    """Byte-level BPE: all bytes, then pairs, triples and quadruples of letters, each with its merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [product(ascii_lowercase, repeat=length) for length in (2, 3, 4)]
    words = ("".join(word) for length in letters for word in length)
    merged = list(islice(words, VOCAB_SIZE - len(alphabet)))
    merges = [(word[:-1], word[-1]) for word in merged]
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate([*alphabet, *merged])}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.benchmarks
async def test_size(tmp_path: Path) -> None:
    model = write_model(tmp_path / "large")
    large_tokenizer().save(str(model / "tokenizer.json"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": VOCAB_SIZE}))
    cluster = FakeCluster()
    await cluster.start()

    async def script(attempt: Any) -> None:
        await attempt.output(list(range(1000, 1064)))

    cluster.script = script
    settings = {"model.path": str(model), "frontend.port": 0, "scheduler.control": cluster.scheduler.endpoint}
    try:
        async with front_end_process(load_config(overrides=settings)) as (url, process):
            print(f"\nfront end ready: {process.memory_info().rss / 1e6:.1f} MB")
            async with httpx.AsyncClient(base_url=url, timeout=30) as http:
                body = {"prompt": "some words " * 8, "max_tokens": 64, "stream": True}
                for _ in range(8):
                    calls = (http.post("/v1/completions", json=body) for _ in range(8))
                    assert all(response.status_code == 200 for response in await asyncio.gather(*calls))
            print(f"front end after 64 requests, 8 at a time: {process.memory_info().rss / 1e6:.1f} MB")
    finally:
        await cluster.close()
