"""Which parsers a server has: by the model's family and chat template, or by flags; the start says which and why."""

from __future__ import annotations

import pytest

from headrace.config import EngineConfig, ServerConfig
from headrace.engine.tokenizer import Tokenizer
from headrace.errors import ConfigError
from headrace.server.output_formats import choose_formats
from headrace.server.run import run_server
from tests.server.fake_engine import byte_level_tokenizer, make_tokenizer

WRITES_HERMES = "{{ messages[-1].content }}{% if tools %}<tool_call></tool_call>{% endif %}<think></think>"


def names(tokenizer: Tokenizer | None, **flags: str) -> tuple[str | None, str | None]:
    found = choose_formats(ServerConfig(**flags), "qwen3", tokenizer)  # type: ignore[arg-type]
    return found.tool and found.tool.name, found.reasoning and found.reasoning.name


def test_family_and_template_choose() -> None:
    tokenizer = make_tokenizer(WRITES_HERMES)
    assert names(tokenizer) == ("hermes", "qwen3")
    assert names(byte_level_tokenizer()) == (None, None)
    line = choose_formats(ServerConfig(), "qwen3", tokenizer).line
    assert line.startswith("tool calls: hermes (from family and chat template; --tool-call-parser overrides)")
    assert "reasoning: qwen3" in line


def test_flags_win() -> None:
    tokenizer = make_tokenizer(WRITES_HERMES)
    flags = {"tool_call_parser": "mistral", "reasoning_parser": "deepseek-r1"}
    assert names(tokenizer, **flags) == ("mistral", "deepseek_r1")
    assert names(byte_level_tokenizer(), **flags) == ("mistral", "deepseek_r1")
    assert names(tokenizer, tool_call_parser="none", reasoning_parser="none") == (None, None)
    line = choose_formats(ServerConfig(tool_call_parser="none"), "qwen3", tokenizer).line
    assert "not parsed (--tool-call-parser none)" in line


def test_without_a_tokenizer_nothing_is_parsed() -> None:
    assert names(None, tool_call_parser="hermes") == (None, None)


@pytest.mark.parametrize("flag", ["tool_call_parser", "reasoning_parser"])
def test_a_wrong_name_ends_the_start_before_anything_is_loaded(flag: str) -> None:
    config = ServerConfig(port=0, **{flag: "no_such"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{flag} must be one of auto, none, .*deepseek.*; got 'no_such'"):
        run_server(EngineConfig(model="/no/such/model"), config)


def test_special_tokens_of_the_markup_are_kept_for_the_parsers() -> None:
    special = ("<tool_call>", "</think>", "<|other|>", "[TOOL_CALLS]")
    tokenizer = make_tokenizer(WRITES_HERMES, special)
    kept = choose_formats(ServerConfig(), "qwen3", tokenizer).kept
    assert {tokenizer.backend.id_to_token(i) for i in kept} == {"<tool_call>", "</think>"}
