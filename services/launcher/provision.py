"""The commands of `dualpath` that put in place what processes on several hosts share: keys, a model."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, TextColumn

from common.errors import ConfigError
from services.launcher.console import errors, execute, results, say
from services.launcher.models import get_model

app = typer.Typer()


@app.command("keys")
def keys_command(
    directory: Annotated[Path, typer.Argument(help="security.curve_dir of every process", metavar="DIR")],
) -> None:
    """Make a cluster's CURVE keys, unless they are there."""
    execute(_keys(directory))


async def _keys(directory: Path) -> int:
    import zmq.auth

    from common.rpc import read_key_pair

    if os.path.exists(directory / "cluster.key_secret"):
        read_key_pair(str(directory))
        say(f"the keys in {directory} are kept")
        return 0
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as made:
            zmq.auth.create_certificates(made, "cluster")
            for name in ("cluster.key", "cluster.key_secret"):  # the secret last: with it all is there
                os.chmod(Path(made) / name, 0o600)
                os.replace(Path(made) / name, directory / name)
    except OSError as error:
        raise ConfigError(f"cannot write keys to {directory}: {error.strerror}") from None
    say(f"made {directory / 'cluster.key_secret'}: keep it secret, and the same on every host of the cluster")
    return 0


@app.command("fetch")
def fetch_command(
    model: Annotated[
        str,
        typer.Option(
            "--model", help="Model directory or hub id", metavar="DIR_OR_ID", show_default="a small one, fetched once"
        ),
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(help="Write the section [model] of a configuration here", metavar="FILE", dir_okay=False),
    ] = None,
) -> None:
    """Put a model onto this machine, and print the configuration that names it."""
    execute(_fetch(model, out))


async def _fetch(spec: str, out: Path | None) -> int:
    with Progress(TextColumn("{task.description}"), console=errors) as progress:
        model = await get_model(spec, progress)
    fields = {"path": str(model.path), "name": model.name, "digest": model.digest}
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items()]
    section = "\n".join(["[model]", *lines, ""])
    if out is None:
        results.print(section, end="", markup=False, highlight=False, soft_wrap=True)
        return 0
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=out.parent, delete=False) as file:
            file.write(section)
        os.chmod(file.name, 0o644)
        os.replace(file.name, out)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from None
    return 0
