"""What is loaded to start: processes take their time to import what they do not need, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
