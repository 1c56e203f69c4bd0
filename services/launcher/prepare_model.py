"""Heavy work on a model in a process of its own, so that it can be stopped at any moment and takes its memory along.

    python -m services.launcher.prepare_model resolve DIR_OR_HUB_ID      -> {"path": ..., "digest": ...}
    python -m services.launcher.prepare_model convert GGUF_FILE OUT_DIR  -> {"path": ..., "digest": ...}
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from common.errors import ConfigError
from common.model import checked_digest

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


def resolve(spec: str) -> Path:
    """The directory of a model given as a directory or as a hub id; the hub's files are fetched into its own cache."""
    path = Path(spec).expanduser()
    if path.is_dir() or not HUB_ID.fullmatch(spec):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(spec, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        cause = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"no directory {spec}, and the model hub does not give it ({cause}): give a model directory with --model"
        ) from None


def convert(gguf: Path, out: Path) -> Path:
    """A GGUF checkpoint as a float32 model directory in the usual format."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
    AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    ).save_pretrained(out)
    return out


def main(command: str, *arguments: str) -> int:
    try:
        path = resolve(*arguments) if command == "resolve" else convert(*map(Path, arguments))
        print(json.dumps({"path": str(path.resolve()), "digest": checked_digest(path)}), flush=True)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
