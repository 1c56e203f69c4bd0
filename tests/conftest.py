"""Settings that must be there before any test module imports torch, and the model that most tests serve."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from services.engine.torch_backend.reference import Reference

# Engines and a reference share few cores here: idle compute threads must sleep, not spin (services.serve does the same)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# nor is an example slow because of what it does: others have the cores, too
settings.register_profile("shared cores", deadline=None)
settings.load_profile("shared cores")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny one. A module that needs another one has a fixture of this name itself."""
    from tests.models import tiny_model

    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    """The module's model, in one process."""
    from services.engine.torch_backend.reference import Reference

    return Reference(model)
