"""What a start takes: nothing is imported that is not needed, and an engine answers while it imports what is."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from common.children import Child, child_command, child_input, read_address
from common.config import load_config
from common.types import Role
from tests.models import tiny_model

REPOSITORY = Path(__file__).parent.parent
COMPUTE = {"torch", "transformers", "safetensors", "huggingface_hub", "matplotlib", "scipy", "pandas"}
OTLP = {"opentelemetry"}
COMMANDS = {"typer", "rich"}
NUMPY = {"numpy"}
CONTROL = {"zmq", "structlog", "prometheus_client", "uvloop"}


@pytest.mark.parametrize(
    ("module", "unneeded"),
    [
        ("services.launcher.commands", COMPUTE | OTLP | NUMPY | CONTROL),
        ("services.serve", COMPUTE | OTLP | COMMANDS | NUMPY),
        ("services.scheduler.service", COMPUTE | OTLP | COMMANDS | NUMPY),
        ("services.frontend.service", COMPUTE | OTLP | COMMANDS | NUMPY),
        ("services.storage_gateway.service", COMPUTE | OTLP | COMMANDS),
        ("services.traffic_manager.service", COMPUTE | OTLP | COMMANDS),
        ("services.prefill.service", COMPUTE | OTLP | COMMANDS),
        ("services.decode.service", COMPUTE | OTLP | COMMANDS),
    ],
)
def test_imports(module: str, unneeded: set[str]) -> None:
    script = f"import sys, {module}; sys.exit(', '.join({unneeded} & set(sys.modules)) or None)"
    subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=True, timeout=60)


def test_an_engine_answers_while_it_imports_its_back_end(tmp_path: Path) -> None:
    """In a process of its own: here it is imported already."""
    script = f"""
import asyncio, sys
from common.config import load_config
from services.engine.service import open_backend
config = load_config(None, {{"model.path": {str(tiny_model(tmp_path))!r}, "prefill.device_memory": "1MiB"}})

async def main():
    opening = asyncio.create_task(open_backend(config, config.prefill, "x"))
    turns = 0
    while not opening.done():
        await asyncio.sleep(0.01)
        turns += 1
    await opening.result().close()
    assert "torch" in sys.modules
    return turns

sys.exit(asyncio.run(main()) < 20)
"""
    subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=True, timeout=120)


async def test_a_process_may_open_as_many_files_as_its_hard_limit_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = min(512, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
    try:
        settings = load_config(None, {"scheduler.control": "tcp://127.0.0.1:*"})
        child = Child("scheduler", child_command(Role.SCHEDULER, "scheduler"), first_line=child_input(settings))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        await read_address(child, 60)
        assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        child.kill()
