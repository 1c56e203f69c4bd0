"""What the front end knows of the served model."""

from __future__ import annotations

import json
from dataclasses import dataclass

from common.config import ModelConfig
from common.errors import ConfigError
from common.model import Manifest, ModelDirectory, read_configured_model
from services.frontend.chat_template import ChatTemplate, read_chat_template
from services.frontend.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as clients see it. max_context_tokens: the model's own limit, or the configured one if that is less."""

    name: str
    manifest: Manifest
    max_context_tokens: int
    vocab_size: int
    eos_ids: frozenset[int]
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None


def load_model(config: ModelConfig) -> ServedModel:
    """Read all of it from the model directory. ConfigError, in one line, for what is missing or broken. Blocks."""
    directory = read_configured_model(config)
    limit = directory.max_context_tokens
    return ServedModel(
        name=config.name or directory.path.resolve().name,
        manifest=directory.manifest,
        max_context_tokens=min(limit, config.max_context_tokens or limit),
        vocab_size=directory.vocab_size,
        eos_ids=_eos_ids(directory),
        tokenizer=Tokenizer(directory.path / "tokenizer.json"),
        chat_template=read_chat_template(directory.path),
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
