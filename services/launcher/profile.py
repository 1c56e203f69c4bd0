"""`dualpath profile`: measure a model on this machine, fit predictors, derive alpha and beta (spec §8, §10)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import xxhash

from common.config import Config, dump_config
from common.errors import ConfigError
from common.metrics import Metrics
from common.model import Manifest, read_configured_directory
from common.perf.fit import ATTENTION_TERMS, LINEAR_TERMS, Point, fit_with_error, held_out
from common.perf.predictor import Identity, Profile
from common.perf.thresholds import thresholds
from common.storage.claim import BLOCKS
from common.storage.directory import DirectoryStore
from common.types import KEY_BYTES
from services.launcher.tools import last_json, run_tool

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

READ_BYTES, MOST_BLOCKS = 128 << 20, 256


@dataclass(frozen=True, slots=True)
class Workload:
    """What is profiled for. hit_ratio: hit tokens in all prompt tokens, of a turn with max_context tokens."""

    max_context: int = 4096
    repeats: int = 5
    hit_ratio: float = 0.95


async def run_profile(config: Config, workload: Workload, progress: Progress) -> Profile:
    """Measure the configured model directory. ConfigError if it cannot be served or the store not written."""
    manifest = (await asyncio.to_thread(read_configured_directory, config.model)).manifest
    measured = await _run_forwards(config, workload, progress)
    task = progress.add_task("reading blocks", total=None)
    read_bytes_per_s = await measure_read_rate(config, manifest)
    progress.update(task, total=1, completed=1)
    return make_profile(config, manifest, workload, measured, read_bytes_per_s)


async def _run_forwards(config: Config, workload: Workload, progress: Progress) -> dict[str, Any]:
    task = progress.add_task("running forwards", total=None)

    def on_line(line: str) -> None:
        if match := re.fullmatch(r"(\d+)/(\d+)\s*", line):
            progress.update(task, completed=int(match[1]), total=int(match[2]))

    arguments = (dump_config(config), str(workload.max_context), str(workload.repeats))
    output = await run_tool("services.engine.torch_backend.profile_run", *arguments, on_line=on_line)
    measured: dict[str, Any] = json.loads(last_json(output))
    return measured


def make_profile(
    config: Config, manifest: Manifest, workload: Workload, measured: dict[str, Any], read_bytes_per_s: float
) -> Profile:
    """Fit what was measured. ConfigError if that is too little."""
    try:
        attention = fit_with_error(attention_points(measured), ATTENTION_TERMS)
        linear = fit_with_error(_points(measured, "linear_s"), LINEAR_TERMS)
    except ValueError as error:
        raise ConfigError(f"nothing to predict from: {error}: raise --max-context or device_memory") from None
    context = measured["max_context"]
    miss = max(1, round((1 - workload.hit_ratio) * context))
    turn_s = attention.predictor.seconds(context - miss, miss) + linear.predictor.seconds(context - miss, miss)
    return Profile(
        identity=Identity(
            manifest.model_digest, config.model.device, manifest.geometry.parts[0].dtype, config.prefill.threads
        ),
        attention=attention,
        linear=linear,
        thresholds=thresholds(read_bytes_per_s / manifest.geometry.bytes_per_token, context / turn_s),
        measured={
            **measured,
            "hit_ratio": workload.hit_ratio,
            "prefill_tokens_per_s": context / turn_s,
            "read_bytes_per_s": read_bytes_per_s,
        },
    )


def attention_points(measured: dict[str, Any]) -> list[Point]:
    return _points(measured, "attention_s")


def _points(measured: dict[str, Any], part: str) -> list[Point]:
    return [Point(point["cached"], point["new"], point[part]) for point in measured["prefill"]]


async def measure_read_rate(config: Config, manifest: Manifest) -> float:
    """Bytes a second at which Full Blocks come from the file system of storage.path, through the paced SNIC if it is
    one. The blocks are written for it, put on disk and dropped from the page cache. ConfigError if they cannot be."""
    size = manifest.geometry.full_block_bytes
    count = min(MOST_BLOCKS, max(config.storage.concurrency, READ_BYTES // size))
    parent = Path(config.storage.path).absolute().parent
    try:
        await asyncio.to_thread(parent.mkdir, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="dualpath-profile-", dir=parent) as directory:
            seconds = await _read_all(Path(directory), config, manifest, count)
    except OSError as error:
        raise ConfigError(f"storage.path: cannot write blocks to read in {parent}: {error.strerror}") from None
    rate = count * size / seconds
    return min(rate, config.network.snic_rate) if config.network.snic_rate else rate


async def _read_all(directory: Path, config: Config, manifest: Manifest, count: int) -> float:
    """Seconds to read count blocks, storage.concurrency at a time."""
    concurrency = config.storage.concurrency
    store = DirectoryStore(directory, manifest, Metrics(), verify=config.storage.verify, concurrency=concurrency)
    await store.open()
    try:
        payload = memoryview(secrets.token_bytes(manifest.geometry.full_block_bytes))
        checksum = xxhash.xxh3_64_intdigest(payload)
        keys = [secrets.token_bytes(KEY_BYTES) for _ in range(count)]
        for key in keys:
            if not await store.write(key, payload, checksum):
                raise ConfigError(f"storage.path: blocks cannot be written beside {directory.parent}")
        await asyncio.to_thread(_drop_cached, directory / BLOCKS)
        waiting = iter(keys)

        async def reader() -> None:
            into = memoryview(bytearray(payload.nbytes))
            for key in waiting:
                if not all(await store.read([key], [into])):
                    raise ConfigError(f"storage.path: blocks in {directory.parent} cannot be read back")

        started = perf_counter()
        await asyncio.gather(*(reader() for _ in range(concurrency)))
        return perf_counter() - started
    finally:
        await store.close()


def _drop_cached(blocks: Path) -> None:
    """Let the files' bytes come from their disk, as far as the file system can tell."""
    for path in blocks.glob("*/*"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def profile_table(profile: Profile) -> Table:
    """One row a prefill point: measured attention, what a fit without this point predicts, and the rest's time."""
    from rich.table import Table

    points = attention_points(profile.measured)
    table = Table(title="attention of a prefill, all layers", title_justify="left")
    for name in ("cached", "new", "measured ms", "predicted ms", "error", "all else ms"):
        table.add_column(name, justify="right")
    for point, predicted_s, measured in zip(
        points, held_out(points, ATTENTION_TERMS), profile.measured["prefill"], strict=True
    ):
        table.add_row(
            f"{point.cached:,}",
            f"{point.new:,}",
            f"{1e3 * point.seconds:,.2f}",
            f"{1e3 * predicted_s:,.2f}",
            f"{100 * (predicted_s / point.seconds - 1):+.0f} %",
            f"{1e3 * measured['linear_s']:,.2f}",
        )
    return table


def findings(profile: Profile) -> list[str]:
    """What was found, and what to put into a configuration."""
    lines = []
    for name, fitted in (("attention", profile.attention), ("all else", profile.linear)):
        error = fitted.error
        lines.append(
            f"{name}: error of the prediction on points that it had not seen: median {100 * error.median:.1f} %, "
            f"p95 {100 * error.p95:.1f} % ({error.points} points)"
        )
    measured = profile.measured
    for step in measured["decode"]:
        lines.append(
            f"decode: {1e3 * step['step_s']:,.1f} ms a step of {step['sequences']} sequences "
            f"of {step['context']:,} tokens"
        )
    lines.append(
        f"prefill: {measured['prefill_tokens_per_s']:,.0f} prompt tokens/s at {100 * measured['hit_ratio']:g} % hits; "
        f"storage: {measured['read_bytes_per_s'] / 1e6:,.0f} MB/s"
    )
    derived = profile.thresholds
    lines.append(
        f"scheduler.alpha = {derived.alpha}, scheduler.beta = {derived.beta}, prefill.quota_s = {derived.quota_s}"
    )
    return lines
