"""What is known of the model and the GPUs of a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.advice.explain.case import make_case
from headrace.advice.explain.command_line import parse_command
from headrace.advice.explain.explain import explain


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlamaForCausalLM"]},
        {"architectures": ["LlamaForCausalLM"], "hidden_size": "wide", "num_hidden_layers": []},
        {"architectures": ["NobodysModel"]},
        {"architectures": 3},
        {},
        [],
    ],
)
def test_a_config_that_cannot_be_counted_is_a_model_that_nothing_is_known_of(config: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (whole,) = explain(f"vllm serve {tmp_path} -tp 2")
    assert whole.case.shape is None
    assert [found.title for found in whole.findings] == ["model"]
    assert "nothing is known of" in whole.findings[0].text


@pytest.mark.parametrize(
    ("flags", "wanted", "near"),
    [("-tp 3", 3, 2), ("-tp 8", 8, 8), ("-tp 64", 64, 8), ("-tp 7 --enable-expert-parallel", 7, 4)],
)
def test_the_next_size_that_divides(flags: str, wanted: int, near: int) -> None:
    case = make_case(parse_command(f"vllm serve meta-llama/Llama-3.1-8B {flags}"))
    assert case.tp_near(wanted) == near
