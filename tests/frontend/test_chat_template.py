"""Chat templates render as transformers renders them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from common.errors import ConfigError
from services.frontend.chat_template import ChatTemplate, read_chat_template
from tests.frontend_harness import CHAT_TEMPLATE

MESSAGES = [
    {"role": "system", "content": "Be brief & <b>kind</b>."},
    {"role": "user", "content": "Grüße, 😀"},
    {"role": "assistant", "content": "Hallo"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "äöü <x>", "parameters": {"type": "object"}}}]
LOOPS = """
{%- for message in messages -%}
    {%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}
    {% generation %}{{ message.content | trim }}{% endgeneration %}
    {%- if loop.last %}{% break %}{% endif %}
{%- endfor %}
{{ {'b': 1, 'a': ['ä', none]} | tojson(indent=2) }}
  {% if eos_token is defined %}
[{{ eos_token }}]
  {% endif %}
"""


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, LOOPS])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_renders_as_transformers_does(source: str, tools: list[dict[str, Any]] | None) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    arguments: dict[str, Any] = {"tools": tools, "chat_template": source, "add_generation_prompt": True, **special}
    expected: str = render_jinja_template([MESSAGES], **arguments)[0][0]
    assert ChatTemplate(source, special).render(MESSAGES, tools) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system here') }}",
        "{{ messages[9].content }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 + 'a' }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_what_a_template_refuses_is_a_value_error(source: str) -> None:
    with pytest.raises(ValueError):
        ChatTemplate(source, {}).render(MESSAGES)


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    assert read_chat_template(tmp_path) is None
    named = [{"name": "tool_use", "template": "tool"}, {"name": "default", "template": "{{ bos_token }}named"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    template = read_chat_template(tmp_path)
    assert template is not None and template.render(MESSAGES) == "<s>named"
    assert template.render(MESSAGES, TOOLS) == "tool" and not template.calls_in_tags
    (tmp_path / "chat_template.jinja").write_text("file")
    template = read_chat_template(tmp_path)
    assert template is not None and template.render(MESSAGES) == "file"


def test_a_broken_template_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match="chat template"):
        read_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        read_chat_template(tmp_path)
