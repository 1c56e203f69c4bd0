"""A model's chat template: messages to prompt text, rendered as transformers renders it (jinja2, sandboxed)."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import ConfigError
from services.frontend.tool_parser import BEGIN

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """A compiled template, with the names of the special tokens that it may use. calls_in_tags: whether it has the
    model write tool calls as services.frontend.tool_parser reads them."""

    def __init__(self, source: str, special_tokens: dict[str, str], with_tools: str | None = None) -> None:
        """with_tools: a source of its own for chats with tools. ConfigError for what is not a template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            self._with_tools = environment.from_string(with_tools) if with_tools else self._template
        except TemplateError as error:
            raise ConfigError(f"the model's chat template cannot be read: {error}") from None
        self._special_tokens = special_tokens
        used = with_tools or source
        self.calls_in_tags = BEGIN in used and "<function=" not in used  # which is another format in the same tags

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        """The prompt up to where the assistant's answer begins. ValueError, with the template's own words, if it
        refuses the messages."""
        template = self._with_tools if tools else self._template
        try:
            return template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except (TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            raise ValueError(str(error)) from None


def read_chat_template(model: Path) -> ChatTemplate | None:
    """The template of a model directory, or None if it has none. ConfigError for one that cannot be read."""
    config = _read_json(model / "tokenizer_config.json")
    special_tokens = _read_json(model / "special_tokens_map.json") | config
    file = model / "chat_template.jinja"
    source, with_tools = file.read_text() if file.is_file() else config.get("chat_template"), None
    if isinstance(source, list):  # several, by name
        by_name = {entry["name"]: entry["template"] for entry in source}
        source, with_tools = by_name.get("default"), by_name.get("tool_use")
    if source is None:
        return None
    named = {name: _token_text(special_tokens[name]) for name in SPECIAL_TOKENS if special_tokens.get(name) is not None}
    return ChatTemplate(source, named, with_tools)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    return content


def _token_text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


class _GenerationTag(Extension):
    """{% generation %} marks the assistant's words for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter: nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
