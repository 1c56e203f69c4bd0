"""What most tests of the front end are about: one, and a model directory for it, with everything else played."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.frontend_harness import Served, serve, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nobody may change it."""
    return write_model(tmp_path_factory.mktemp("frontend") / "tiny")


@pytest.fixture
async def served(model: Path) -> AsyncIterator[Served]:
    async with serve(model) as served:
        yield served
