"""Formats chosen by chat template and family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.parsers import families
from headrace.parsers.families import choose
from headrace.parsers.table import REASONING_FORMATS, TOOL_FORMATS
from tests.published import tokenizer_folder

HERMES = 'Return a json object:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
DEEPSEEK = "<｜tool▁calls▁begin｜>"
THINK = "{% if '</think>' in content %}{% endif %}"


@pytest.mark.parametrize(
    ("family", "template", "expected"),
    [
        ("llama", "{{ bos }}{% for message in messages %}{{ message.content }}{% endfor %}", (None, None)),
        ("qwen2", HERMES, ("hermes", None)),
        ("qwen3", HERMES + THINK + "enable_thinking", ("hermes", "qwen3")),
        ("qwen3_moe", "<tool_call>\n<function=example>\n<parameter=a>", ("qwen3_coder", None)),
        ("deepseek_v3", DEEPSEEK + "```json" + THINK, ("deepseek_v3", "deepseek_v3")),
        ("deepseek_v3", DEEPSEEK + "```json" + THINK + "<｜Assistant｜><think>", ("deepseek_v3", "deepseek_r1")),
        ("deepseek_v3", DEEPSEEK + "{% if thinking %}<think>{% else %}</think>", ("deepseek_v31", "deepseek_v3")),
        ("kimi_k2", "<|tool_calls_section_begin|>" + THINK, ("kimi_k2", "kimi_k2")),
        ("glm4_moe", "<tool_call>{function-name}\n<arg_key>" + THINK, ("glm45", "glm45")),
        ("glm4_moe", "<tool_call>{function-name}<arg_key>" + THINK, ("glm47", "glm45")),
        ("minimax_m2", "<minimax:tool_call>" + THINK, ("minimax_m2", "minimax_m2")),
        ("minimax_m3", "]<]minimax[>[<tool_call><mm:think></mm:think>", ("minimax_m3", "minimax_m3")),
        ("hy_v3", "<tool_calls><tool_call>{name}<tool_sep><arg_key>" + THINK, ("hy_v3", "hy_v3")),
        ("minicpm", '<function name="f"><param name="a">x</param></function>', ("minicpm5", None)),
        ("mistral", "[TOOL_CALLS][THINK]", ("mistral", "mistral")),
        ("granitemoehybrid", HERMES, ("granite4", None)),
        ("ernie4_5_moe", HERMES + THINK, ("ernie45", "ernie45")),
        (
            "llama",
            '<|start_header_id|> {"name": function name, "parameters": {}} <|python_tag|>',
            ("llama3_json", None),
        ),
        ("gpt_oss", "<|start|>assistant<|channel|>analysis<|message|>", ("openai", "openai_gptoss")),
        ("llama", THINK, (None, "qwen3")),
    ],
)
def test_a_template_says_which_formats(family: str, template: str, expected: tuple[str | None, str | None]) -> None:
    assert choose(family, template) == expected


def test_every_choice_is_in_the_tables() -> None:
    tools = {name for _, name in families.TOOL_MARKS} | set(families.TOOLS_OF_FAMILY.values())
    reasoning = {name for _, name in families.REASONING_MARKS} | set(families.THINKERS.values()) | {"qwen3"}
    assert tools <= TOOL_FORMATS.keys()
    assert reasoning <= REASONING_FORMATS.keys()


def test_the_templates_of_real_models() -> None:
    qwen = json.loads((tokenizer_folder("qwen3") / "tokenizer_config.json").read_text())["chat_template"]
    assert choose("qwen3", qwen) == ("hermes", "qwen3")
    assert choose("gpt_oss", (tokenizer_folder("gpt-oss") / "chat_template.jinja").read_text()) == (
        "openai",
        "openai_gptoss",
    )
    phi = json.loads((tokenizer_folder("phi3-mini") / "tokenizer_config.json").read_text())["chat_template"]
    assert choose("phi3", phi) == (None, None)


def test_the_docs_name_every_parser() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tools_and_reasoning.md").read_text()
    tools, _, reasoning = page.partition("## Parsers")[2].partition("`--reasoning-parser` |")
    for table, text in ((TOOL_FORMATS, tools), (REASONING_FORMATS, reasoning)):
        missing = [name for name in table if f"`{name}`" not in text]
        assert not missing
