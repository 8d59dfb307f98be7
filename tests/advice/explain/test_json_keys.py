"""Keys of one flag become one JSON object, and nothing of it is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.advice.explain.command_line import parse_command

WHOLE: list[tuple[str, str, dict[str, Any]]] = [
    (
        "--speculative-config.method=eagle3 -n 1 --speculative-config.model X --speculative-config.num_tokens=2",
        "--speculative-config",
        {"method": "eagle3", "model": "X", "num_tokens": 2},
    ),
    (
        "--compilation-config.cudagraph_mode FULL -cc.pass_config.enable_fusion true",
        "--compilation-config",
        {"cudagraph_mode": "FULL", "pass_config": {"enable_fusion": True}},
    ),
    (
        '--compilation-config \'{"a": {"b": 1, "c": 2}}\' --compilation-config.a.b 3',
        "--compilation-config",
        {"a": {"b": 3, "c": 2}},
    ),
    ("--hf-overrides.rope_parameters.factor=4.0", "--hf-overrides", {"rope_parameters": {"factor": 4.0}}),
    ("--compilation-config.a+ 1,2 --compilation-config.a+=3", "--compilation-config", {"a": ["1", "2", "3"]}),
    ("--structured-outputs-config.backend xgrammar", "--structured-outputs-config", {"backend": "xgrammar"}),
]


@pytest.mark.parametrize(("flags", "key", "expected"), WHOLE, ids=[row[0] for row in WHOLE])
def test_keys_are_put_together(flags: str, key: str, expected: dict[str, Any]) -> None:
    found = [setting for setting in parse_command(f"vllm serve m {flags}").settings if setting.key == key]
    assert len(found) == 1
    assert json.loads(found[0].value) == expected
    assert list(found[0].words) == [found[0].value]


def test_keys_stay_apart_where_the_shell_fills_one_in() -> None:
    """`2` in quotes would be another value than 2."""
    line = parse_command(
        "vllm serve m --speculative-config.method=eagle3 --speculative-config.num_speculative_tokens $N"
    )
    assert [(setting.key, setting.value) for setting in line.settings] == [
        ("--speculative-config.method", "eagle3"),
        ("--speculative-config.num_speculative_tokens", "$N"),
    ]
    assert all(setting.is_unexpanded for setting in line.settings)


def test_whole_objects_alone_stay_as_they_are() -> None:
    line = parse_command("vllm serve m --compilation-config '{\"a\":1}' --compilation-config '{\"b\":2}' --made.up 1")
    assert [setting.value for setting in line.settings] == ['{"a":1}', '{"b":2}', "1"]
