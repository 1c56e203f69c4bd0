"""What the front end knows of the served model."""

from __future__ import annotations

import json
from dataclasses import dataclass

from common.config import Config
from common.errors import ConfigError
from common.model import Manifest, ModelDirectory, read_configured_directory, read_configured_model
from services.frontend.chat_template import ChatTemplate, read_chat_template
from services.frontend.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as clients see it. max_context_tokens: the model's own limit, or the configured one if that is less.

    tokenizer: None for a profiled model, which knows token ids but no text.
    """

    name: str
    manifest: Manifest
    max_context_tokens: int
    vocab_size: int
    eos_ids: frozenset[int]
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None


def load_model(config: Config) -> ServedModel:
    """Read all of it from the model directory, or from the profile. ConfigError, in one line, for what is missing or
    broken. Blocks."""
    model = config.model
    directory = None if model.profile else read_configured_directory(model)
    info = directory or read_configured_model(config)
    return ServedModel(
        name=model.name or (directory.path.resolve().name if directory else model.profile),
        manifest=info.manifest,
        max_context_tokens=min(info.max_context_tokens, model.max_context_tokens or info.max_context_tokens),
        vocab_size=info.vocab_size,
        eos_ids=_eos_ids(directory) if directory else frozenset(),
        tokenizer=Tokenizer(directory.path / "tokenizer.json") if directory else None,
        chat_template=read_chat_template(directory.path) if directory else None,
    )


def _eos_ids(directory: ModelDirectory) -> frozenset[int]:
    """The tokens that end a sequence: the generation configuration's, else the model configuration's."""
    file = directory.path / "generation_config.json"
    try:
        generation = json.loads(file.read_text()) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    ids = generation.get("eos_token_id")
    if ids is None:
        ids = directory.config.get("eos_token_id")
    return frozenset([ids] if isinstance(ids, int) else ids or [])
