"""What is installed, and the model that is to be served."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from common.config import Config, ModelConfig
from common.errors import ConfigError
from common.model import read_configured_model, read_model_directory
from services.launcher.doctor.check import Check, Level, judged

DISTRIBUTION = "dualpath"
#: Named in any case: what they are changes tokens and speed.
NAMED = ("torch", "transformers")
DEVICE_SCRIPT = "import sys, torch; torch.zeros(1, device=sys.argv[1]); print(torch.__version__)"
DEVICE_S = 120.0


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def judge_packages(requirements: Iterable[str], version_of: Callable[[str], str | None]) -> Check:
    """requirements: of this distribution, in their usual notation; those of extras are left aside."""
    wanted = [Requirement(text) for text in requirements]
    unmet = []
    for requirement in wanted:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = version_of(requirement.name)
        if found is None:
            unmet.append(f"{requirement} (not installed)")
        elif not requirement.specifier.contains(found, prereleases=True):
            unmet.append(f"{requirement} (found {found})")
    named = ", ".join(f"{name} {version_of(name) or 'missing'}" for name in NAMED)
    told = f"python {platform.python_version()}, {named}"
    missing = ", ".join(unmet)
    return judged(
        "packages",
        told + (f"; unmet: {missing}" if unmet else ""),
        (bool(unmet), Level.FAIL, "pip install " + " ".join(f"'{one.partition(' (')[0]}'" for one in unmet)),
    )


def check_packages() -> Check:
    try:
        wanted = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return Check("packages", Level.WARN, f"{DISTRIBUTION} runs from its sources", "pip install -e .")
    return judge_packages(wanted, installed)


def check_model(config: Config) -> Check:
    """Without its weights' digest, which takes as long as reading them."""
    model = config.model
    try:
        if model.profile:
            read_configured_model(config)
            return Check("model", Level.OK, f"profile {model.profile}: its compute is only timed")
        if not model.path:
            return Check("model", Level.OK, "model.path is not set: `dualpath up` fetches a small one, once")
        if not Path(model.path).exists() and "/" in model.path and not model.path.startswith((".", "/")):
            return Check("model", Level.OK, f"{model.path} is fetched from the hub when a cluster starts")
        found = read_model_directory(Path(model.path), model.dtype, model.block_size, digest="unread")
    except ConfigError as error:
        return Check("model", Level.FAIL, str(error), "set model.path to a directory by save_pretrained()")
    weights = sum(file.stat().st_size for file in found.path.glob("*.safetensors"))
    return Check("model", Level.OK, f"{model.path}: {found.architecture}, {weights / 1e9:.2f} GB of weights")


def try_device(device: str) -> str:
    """Why torch cannot use it, in its words; empty if it can. In a process of its own: it takes seconds."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", DEVICE_SCRIPT, device], capture_output=True, text=True, timeout=DEVICE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {DEVICE_S:g} s"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]


def judge_device(model: ModelConfig, failure: str) -> Check:
    return judged(
        "device",
        f"model.device {model.device}: {failure or 'torch can use it'}",
        (bool(failure), Level.FAIL, "set model.device to cpu, or install the driver and a build of torch for it"),
    )


def check_software(config: Config) -> Iterator[Check]:
    yield check_packages()
    yield check_model(config)
    if config.model.device != "cpu" and not config.model.profile:
        yield judge_device(config.model, try_device(config.model.device))
