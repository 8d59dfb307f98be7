"""The context of a model as vLLM takes it, with what a command line changes of its config.json."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from headrace.advice.explain.command_line import parse_command
from headrace.advice.explain.context import changes_of, context_of, rope_theta
from headrace.advice.explain.explain import Explanation, explain
from headrace.planner.chips import find_chip

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
KEY_BY_KEY = " ".join(f"--hf-overrides.rope_parameters.{key}={value}" for key, value in YARN.items())
QWEN = "Qwen/Qwen3-8B"


def explained(text: str, gpu: str = "h200") -> Explanation:
    (only,) = explain(text, find_chip(gpu))
    return only


@pytest.mark.parametrize(
    ("config", "changes", "expected"),
    [
        ({}, {}, 40960),
        ({}, {"rope_parameters": YARN}, 131072),
        ({}, {"rope_scaling": YARN}, 131072),
        ({}, {"rope_parameters": {"factor": 4.0, "original_max_position_embeddings": 32768}}, 131072),
        ({}, {"text_config": {"rope_parameters": YARN}}, 131072),
        ({}, {"rope_parameters": {"rope_type": "linear", "factor": 2}}, 81920),
        ({}, {"rope_parameters": {"type": "dynamic", "factor": 2, "original_max_position_embeddings": 5}}, 81920),
        ({}, {"rope_parameters": {**YARN, "rope_type": "llama3"}}, 40960),
        ({}, {"max_position_embeddings": 65536}, 65536),
        ({}, {"max_position_embeddings": 65536, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}, 131072),
        ({}, {"max_position_embeddings": 100, "rope_parameters": YARN}, 131072),
        ({}, {"max_position_embeddings": "long", "rope_parameters": {"factor": "x"}}, 40960),
        ({"rope_scaling": YARN}, {}, 131072),
        ({"rope_scaling": YARN}, {"max_position_embeddings": 8192}, 8192),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, {}, 40960),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 4096}}, {}, 40960),
    ],
)
def test_context(config: dict[str, Any], changes: dict[str, Any], expected: int) -> None:
    assert context_of(config, changes, 40960) == expected


def test_changes_of_a_line() -> None:
    line = parse_command(
        "vllm serve m --hf-overrides.a.b 1 --rope-scaling '{\"factor\": 2.0}' --rope-theta 1000000 --hf-overrides.a.c x"
    )
    assert changes_of(line) == {"a": {"b": 1, "c": "x"}, "rope_parameters": {"factor": 2.0, "rope_theta": 1000000.0}}
    assert changes_of(parse_command("vllm serve m --hf-overrides $X --rope-scaling [1] --rope-theta much")) == {}


def test_theta() -> None:
    assert rope_theta({"rope_theta": 5.0}, {}) == 5.0
    assert rope_theta({"rope_theta": 5.0}, {"rope_parameters": {"rope_theta": 6}}) == 6
    assert rope_theta({"text_config": {"rope_parameters": {"rope_theta": 7}}}, {}) == 7
    assert rope_theta({}, {}) is None


@pytest.mark.parametrize(
    "flags",
    [
        f"--hf-overrides '{json.dumps({'rope_parameters': YARN})}'",
        KEY_BY_KEY,
        "--hf-overrides '{\"max_position_embeddings\": 131072}'",
        f"--rope-scaling '{json.dumps(YARN)}'",
    ],
)
def test_long_contexts_are_not_wrong(flags: str) -> None:
    whole = explained(f"vllm serve {QWEN} {flags} --max-model-len 131072")
    assert whole.answers[-1].verdict == "fine"
    assert "sequences of 131,072" in whole.findings[0].text
    longer = explained(f"vllm serve {QWEN} {flags} --max-model-len 131073").answers[-1]
    assert (longer.verdict, "ends at 131,072" in longer.why) == ("wrong", True)


def test_headrace_has_no_line_for_a_changed_config() -> None:
    line = f"vllm serve {QWEN} --hf-overrides '{json.dumps({'rope_parameters': YARN})}' --max-model-len 131072"
    assert explained(line).better == {"vllm": line}
    assert (
        "headrace" not in explained(f"VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve {QWEN} --max-model-len 99999").better
    )


def test_flags_that_vllm_takes_no_longer_are_said_anew() -> None:
    line = f"vllm serve {QWEN} --rope-scaling '{json.dumps(YARN)}' --rope-theta 1000000 --hf-overrides.a 1"
    whole = explained(line)
    assert [found.verdict for found in whole.answers] == ["wrong", "wrong", "fine"]
    assert "use --hf-overrides" in whole.answers[0].why
    words = shlex.split(whole.better["vllm"])
    assert words[:4] == ["vllm", "serve", QWEN, "--hf-overrides"]
    assert json.loads(words[4]) == {"a": 1, "rope_parameters": {**YARN, "rope_theta": 1000000.0}}


def test_without_the_models_theta_they_cannot_be(tmp_path: Path) -> None:
    """Another context without it would be another model."""
    flags = f"--rope-scaling '{json.dumps(YARN)}'"
    assert explained(f"vllm serve {QWEN} {flags}").better == {}
    (tmp_path / "config.json").write_text(json.dumps({"rope_theta": 5000000.0}))
    better = explained(f"vllm serve {tmp_path} {flags}").better["vllm"]
    assert json.loads(shlex.split(better)[4]) == {"rope_parameters": {**YARN, "rope_theta": 5000000.0}}


def test_a_longer_context_than_the_models_may_be_allowed() -> None:
    whole = explained(f"VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve {QWEN} --max-model-len 131072")
    assert whole.answers[-1].verdict == "costs"
    assert "sequences of 131,072" in whole.findings[0].text
    assert whole.better["vllm"].endswith("--max-model-len 131072")
