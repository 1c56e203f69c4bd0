"""A cluster in containers, as compose/compose.yaml has it, in a project of its own; skipped where there is no engine.

tests/containers/run starts an engine where there is none. BASE names the base image if not python:3.11-slim-bookworm,
IMAGE one of the project's that is ready, and is then not built.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import httpx
import pytest

REPOSITORY = Path(__file__).parent.parent
COMPOSE_FILE = REPOSITORY / "compose" / "compose.yaml"
PROJECT = "dualpathtest"
IMAGE = os.environ.get("IMAGE", "dualpath-test")
BASE = os.environ.get("BASE", "python:3.11-slim-bookworm")
PROFILE = "qwen-32b"
VOCABULARY, PROMPT_TOKENS = range(3, 512), 200
WAIT_S = 400.0  # for what takes seconds on idle cores
BUILD_S, COMMAND_S, PULL_S = 900.0, 240.0, 60.0
#: What goes into an image (.dockerignore), and is put together with the wheels of this machine.
CONTEXT = ("pyproject.toml", "README.md", ".dockerignore", "common", "services", "loadgen", "compose")
#: Settings of pip that mean the same in a container.
PIP_SETTINGS = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST")


def docker(*arguments: str, timeout: float = COMMAND_S, check: bool = True) -> str:
    """What a command of docker prints. AssertionError, with all that it says, if it fails."""
    return _output(["docker", *arguments], timeout, check)


def _output(command: list[str], timeout: float, check: bool = True, **environment: str) -> str:
    # docker-compose 1 is a Python program with a package `compose` of its own
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, env={**inherited, **environment}
    )
    assert not (check and done.returncode), f"{' '.join(command)}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


@cache
def lacking() -> str:
    """Why no containers can be run here, as one line; empty if they can."""
    if shutil.which("docker") is None:
        return "no docker command: tests/containers/run says what it needs"
    try:
        docker("version", timeout=20)
    except (AssertionError, subprocess.TimeoutExpired):
        return "no Docker engine answers: tests/containers/run starts one"
    if not compose_command():
        return "neither docker compose nor docker-compose is there"
    try:
        docker("image", "inspect", BASE)
    except AssertionError:
        try:
            docker("pull", "--quiet", BASE, timeout=PULL_S)
        except (AssertionError, subprocess.TimeoutExpired):
            return f"the base image {BASE} is not there, and no registry gives it: tests/containers/run makes one"
    return ""


@cache
def compose_command() -> tuple[str, ...]:
    for command in (("docker", "compose"), ("docker-compose",)):
        if shutil.which(command[0]):
            try:
                _output([*command, "version"], COMMAND_S)
            except AssertionError:
                continue
            return command
    return ()


def build_image(directory: Path, target: str = "runtime", tag: str = IMAGE) -> None:
    """Build the image as a user does, but with the network, the pip settings and the wheels of this machine."""
    context = directory / "context"
    if not context.exists():
        for name in CONTEXT:
            source = REPOSITORY / name
            if source.is_dir():
                shutil.copytree(source, context / name, ignore=shutil.ignore_patterns("__pycache__", "*.whl"))
            else:
                context.mkdir(exist_ok=True)
                shutil.copy(source, context / name)
        for wheel in _torch_wheels():
            shutil.copy(wheel, context / "compose" / "wheels")
    arguments = {"BASE": BASE, **{name: value for name, value in os.environ.items() if name in PIP_SETTINGS}}
    if _torch_wheels():
        arguments["TORCH_INDEX"] = ""
    given = [f"--build-arg={name}={value}" for name, value in arguments.items()]
    docker(
        "build", "--network=host", "--target", target, "-t", tag, *given,
        "-f", str(context / "compose" / "Dockerfile"), str(context),
        timeout=BUILD_S,
    )  # fmt: skip


def _torch_wheels() -> list[Path]:
    """Builds of torch that lie on this machine, where pip finds them: no index gives one of these versions for less."""
    places = [Path(place) for place in os.environ.get("PIP_FIND_LINKS", "").split()]
    return [wheel for place in places if place.is_dir() for wheel in place.glob("torch-*.whl")]


class Composed:
    """The cluster of compose.yaml, serving a model directory, or else the profile. A context: it goes at the end.

    variables: those of compose.yaml.
    """

    def __init__(self, directory: Path, model: Path | None = None) -> None:
        models = directory / "models"
        models.mkdir()
        models.chmod(0o777)  # the containers' user writes there, and reads the weights
        config = COMPOSE_FILE.with_name("dualpath.toml").read_text()
        if model is None:
            config += f'[model]\nprofile = "{PROFILE}"\n'
        else:
            shutil.copytree(model, models / "tiny")
            for file in (models / "tiny").iterdir():
                file.chmod(0o644)
        (directory / "dualpath.toml").write_text(config)
        self.results = directory / "results"
        self.results.mkdir()
        self.results.chmod(0o777)
        self.variables = {
            "IMAGE": IMAGE,
            "CONFIG": str(directory / "dualpath.toml"),
            "MODELS": str(models),
            "MODEL": "/models/tiny",
            "PUBLISH": "127.0.0.1:",
            "RESULTS": str(self.results),
            "COMPOSE_PROJECT_NAME": PROJECT,
        }

    def __enter__(self) -> Composed:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def compose(self, *arguments: str, timeout: float = COMMAND_S) -> str:
        command = [*compose_command(), "-f", str(COMPOSE_FILE), *arguments]
        return _output(command, timeout, **self.variables)

    def up(self, **scale: int) -> None:
        """Start, or bring to so many containers of each service."""
        counts = [f"--scale={service}={count}" for service, count in scale.items()]
        try:
            self.compose("up", "-d", "--no-build", *counts)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def down(self) -> None:
        self.compose("--profile", "loadgen", "down", "--volumes", "--timeout", "20", timeout=120)

    def containers(self, service: str) -> list[str]:
        """Ids of those that run, the oldest first."""
        return docker(
            "ps", "-q", "--no-trunc", "--filter", f"label=com.docker.compose.project={PROJECT}",
            "--filter", f"label=com.docker.compose.service={service}",
        ).split()[::-1]  # fmt: skip

    def inspect(self, container: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(docker("inspect", container))[0]
        return found

    def network(self, name: str) -> str:
        return f"{PROJECT}_{name}"

    @cached_property
    def url(self) -> str:
        """Of the front end, as it is published."""
        return f"http://{self.compose('port', 'frontend', '8000').strip()}"

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail", "40")

    def members(self) -> dict[str, int]:
        """How many processes of each role the scheduler has; nobody, if it does not answer."""
        told = docker("exec", self.containers("scheduler")[0], "python3", "-c", _MEMBERS, check=False)
        counts: dict[str, int] = json.loads(told or "{}")
        return counts


_MEMBERS = """
import asyncio, json
from collections import Counter
from pathlib import Path
from common.config import load_config
from services.launcher.status import get_status
status = asyncio.run(get_status(load_config(Path("/etc/dualpath/dualpath.toml"))))
print(json.dumps(Counter(row.member.role for row in status.members)))
"""


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for it. AssertionError names it if it does not come about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.5)


def need_containers() -> None:
    """Skip, saying why, unless containers can be run here."""
    if reason := lacking():
        pytest.skip(reason)


def need_image(directories: pytest.TempPathFactory) -> None:
    """need_containers(), and the image: built once a session."""
    need_containers()
    if "IMAGE" not in os.environ and not _built:
        build_image(directories.mktemp("image"))
        _built.append(IMAGE)


_built: list[str] = []


def in_container(container: str, *command: str) -> str:
    """What a command prints there."""
    return docker("exec", container, *command)


def prompt(seed: int) -> list[int]:
    """Of PROMPT_TOKENS tokens."""
    return random.Random(seed).choices(VOCABULARY, k=PROMPT_TOKENS)


def complete(url: str, prompt: list[int], max_tokens: int, timeout: float = 60.0) -> list[int]:
    """A greedy completion of token ids. httpx.HTTPError, or AssertionError with the answer, if it fails."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=timeout, trust_env=False)
    assert answer.status_code == 200, f"{answer.status_code}: {answer.text}"
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens
