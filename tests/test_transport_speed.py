"""Write bandwidth as a ratio to a plain copy of the same bytes, interleaved in one run. Asserts nothing about time."""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest

from common.transport.base import Batch, Intent, make_runs
from tests.transport_peer import running_peer
from tests.transport_support import MIB, end, noise, run

SIZE = 48 * MIB
ROUNDS = 15


@pytest.mark.benchmarks
@pytest.mark.parametrize("run_bytes", [512, 4 << 10, 96 << 10, SIZE], ids=lambda size: f"runs of {size} bytes")
@pytest.mark.parametrize("kind", ["shm", "tcp", "local"])
def test_bandwidth(kind: str, run_bytes: int, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> list[float]:
        transport = "shm" if kind == "local" else kind
        with running_peer(transport, SIZE) as peer:
            async with end(transport) as writer:
                source, memory = writer.region(SIZE, noise(SIZE))
                target = writer.region(SIZE)[0] if kind == "local" else peer.region
                order = np.random.default_rng(0).permutation(SIZE // run_bytes)
                runs = make_runs(order * run_bytes, np.arange(len(order)) * run_bytes, run_bytes)
                plain = np.zeros(SIZE, np.uint8)
                ratios = []
                for _ in range(ROUNDS):
                    begun = time.perf_counter()
                    np.copyto(plain, memory.view)
                    copied = time.perf_counter()
                    await writer.transport.write(Batch(source, target, runs), Intent.KV_LOAD)
                    ratios.append((copied - begun) / (time.perf_counter() - copied))
                assert writer.counted("transport_bytes", intent="kv_load", transport=kind) == ROUNDS * SIZE
                return ratios

    ratios = run("uvloop", scenario())
    with capsys.disabled():
        print(
            f"\n{kind}, runs of {run_bytes} bytes: bandwidth / numpy copy = {statistics.median(ratios):.2f}"
            f" (median of {ROUNDS}, from {min(ratios):.2f} to {max(ratios):.2f})"
        )
