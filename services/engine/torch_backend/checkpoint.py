"""The weights of a model directory, by name: mapped from their files where nothing about them has to change.

On a CPU a tensor in the checkpoint's own dtype stays in the page cache, where the engines of a host share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.errors import ConfigError

Shape = tuple[int, ...]


def read_weights(
    path: Path, shapes: Mapping[str, Shape], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """The weights that shapes names, from all *.safetensors of the directory. ConfigError if one is missing, has
    another shape, or cannot be read."""
    found: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in shapes.keys() & set(tensors.keys()):
                    found[name] = tensors.get_tensor(name).to(device, dtype)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"model directory {path} does not load: {str(error).splitlines()[0]}") from error
    if missing := sorted(shapes.keys() - found.keys()):
        raise ConfigError(f"model directory {path} lacks {len(missing)} weights, the first is {missing[0]}")
    for name, shape in shapes.items():
        if found[name].shape != shape:
            raise ConfigError(
                f"model directory {path}: {name} is {list(found[name].shape)}, by config.json it is {list(shape)}"
            )
    return found
