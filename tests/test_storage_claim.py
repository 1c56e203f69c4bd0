"""What a directory store refuses at its start, and what it leaves alone."""

import asyncio
import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.blocks.geometry import attention_geometry
from common.errors import ConfigError
from common.metrics import Metrics
from common.model import Manifest
from tests.storage_support import GEOMETRY, MANIFEST, file_of, get, names, opened, payload_of, put, quarantined


async def refusal(root: Path, manifest: Manifest = MANIFEST) -> str:
    with pytest.raises(ConfigError) as caught:
        async with opened(root, manifest):
            pass
    message = str(caught.value)
    assert "\n" not in message and str(root) in message
    return message


async def test_a_regular_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("hello")
    assert "is not a directory" in await refusal(path)
    assert "is not a directory" in await refusal(path / "below")
    assert path.read_text() == "hello"


@pytest.mark.parametrize("path", ["/proc/self", "/proc/nowhere", "/sys/kernel"])
async def test_a_directory_that_cannot_be_written_is_refused(path: str) -> None:
    assert "is not writable" in await refusal(Path(path))


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (replace(MANIFEST, model_digest="other weights"), "model_digest"),
        (replace(MANIFEST, format_version=2), "format_version"),
        (replace(MANIFEST, geometry=replace(GEOMETRY, num_layers=3)), "num_layers"),
        (replace(MANIFEST, geometry=replace(GEOMETRY, block_size=32)), "block_size"),
        (replace(MANIFEST, geometry=attention_geometry(2, 64, 4, 16, "bfloat16")), "parts"),
    ],
)
async def test_a_directory_of_another_model_is_refused_by_the_field(
    tmp_path: Path, other: Manifest, field: str
) -> None:
    async with opened(tmp_path) as store:
        await put(store, "block")
    before = (tmp_path / "manifest.json").read_bytes()
    message = await refusal(tmp_path, other)
    assert "another model" in message and field in message
    assert (tmp_path / "manifest.json").read_bytes() == before
    async with opened(tmp_path) as store:
        assert await get(store, "block") == payload_of("block")


async def test_a_block_of_another_namespace_is_never_read(tmp_path: Path) -> None:
    """Even if its file gets into the directory under the right name."""
    metrics = Metrics()
    async with opened(tmp_path / "a") as store:
        await put(store, "block")
    async with opened(tmp_path / "b", replace(MANIFEST, model_digest="other"), metrics, verify=False) as store:
        await put(store, "block")
        file_of(tmp_path / "b", "block").write_bytes(file_of(tmp_path / "a", "block").read_bytes())
        assert await get(store, "block") is None
    assert quarantined(metrics) == {"foreign": 1}


async def test_first_users_at_once_agree_on_one_manifest(tmp_path: Path) -> None:
    manifests = [replace(MANIFEST, model_digest=f"weights {i}") for i in range(8)]

    async def use(manifest: Manifest) -> bool:
        try:
            async with opened(tmp_path, manifest):
                return True
        except ConfigError as error:
            assert "another model" in str(error)
            return False

    accepted = await asyncio.gather(*(use(manifest) for manifest in manifests))
    assert sum(accepted) == 1
    stored = json.loads((tmp_path / "manifest.json").read_text())
    assert stored["model_digest"] == manifests[accepted.index(True)].model_digest
    assert names(tmp_path) == ["blocks", "manifest.json", "quarantine", "tmp"]


@pytest.mark.parametrize("text", ["", "{}", '{"format_version": 1', '{"format_version": 1, "model_digest": "x"}', "[]"])
async def test_a_broken_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    assert "manifest.json is not a manifest" in await refusal(tmp_path)


async def test_a_directory_in_other_use_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "precious").write_text("data")
    assert "neither empty nor a block store" in await refusal(tmp_path)
    assert names(tmp_path) == ["tmp"]
    assert (tmp_path / "tmp" / "precious").read_text() == "data"


async def test_a_new_file_system_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / ".snapshot").mkdir()
    async with opened(tmp_path) as store:
        assert await put(store, "block")


@pytest.mark.parametrize("name", ["blocks", "tmp", "quarantine", "blocks/ab"])
async def test_links_in_the_place_of_directories_are_refused(tmp_path: Path, name: str) -> None:
    root, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    elsewhere.mkdir()
    async with opened(root):
        pass
    if (root / name).exists():
        (root / name).rmdir()
    (root / name).symlink_to(elsewhere)
    assert "not a directory" in await refusal(root)


async def test_leftovers_of_dead_writers_go_and_drafts_of_live_ones_stay(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await put(store, "block")
    for i in range(3):
        (tmp_path / "tmp" / f"dead{i}").write_bytes(b"half a block")
    live = tmp_path / "tmp" / "live"
    with live.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        async with opened(tmp_path) as store:
            assert names(tmp_path / "tmp") == ["live"]
            assert await get(store, "block") == payload_of("block")


async def test_start_lists_no_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path) as store:
        for i in range(20):
            await put(store, f"b{i}")
    listed: list[str] = []
    for name in ("scandir", "listdir"):

        def spy(path: str | Path = ".", real: Callable[..., Any] = getattr(os, name)) -> Any:
            listed.append(str(path))
            return real(path)

        monkeypatch.setattr(os, name, spy)
    async with opened(tmp_path):
        pass
    assert sorted(listed) == [str(tmp_path / "blocks"), str(tmp_path / "tmp")]
