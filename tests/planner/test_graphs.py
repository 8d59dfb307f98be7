"""The graph mode: what was asked for in whatever spelling, stepped down to what device and backend have."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config import GRAPH_MODES, EngineConfig
from headrace.errors import ConfigError
from headrace.model_config import ModelConfig
from headrace.planner.decisions import decide_before_load
from headrace.planner.graphs import decide_graphs
from tests.planner.test_decisions import MODEL


def mode(given: dict[str, Any], full_graphs: str = "any", device: str = "cuda", **more: Any) -> str:
    config = EngineConfig(compilation_config=given, **more)
    settled, decisions = decide_graphs(config, device, "A_BACKEND", full_graphs)
    assert decisions[0].value == settled["cudagraph_mode"]
    assert decisions[0].reason
    return settled["cudagraph_mode"]


@pytest.mark.parametrize("name", GRAPH_MODES)
def test_every_mode_is_had_where_everything_is_supported(name: str) -> None:
    assert mode({"cudagraph_mode": name}) == name
    assert mode({"cudagraph_mode": name.lower()}) == name


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "FULL_AND_PIECEWISE"),
        ({"use_cudagraph": False}, "NONE"),
        ({"use_cudagraph": True}, "PIECEWISE"),
        ({"full_cuda_graph": True}, "FULL"),
        ({"full_cuda_graph": True, "use_cudagraph": True}, "FULL"),
        ({"full_cuda_graph": False}, "FULL_AND_PIECEWISE"),
        ({"use_cudagraph": False, "cudagraph_mode": "FULL"}, "FULL"),
        ({"cudagraph_mode": 0}, "NONE"),
        ({"cudagraph_mode": 1}, "PIECEWISE"),
        ({"cudagraph_mode": 2}, "FULL"),
        ({"cudagraph_mode": [2, 0]}, "FULL_DECODE_ONLY"),
        ({"cudagraph_mode": [2, 1]}, "FULL_AND_PIECEWISE"),
    ],
)
def test_spellings(given: dict[str, Any], expected: str) -> None:
    assert mode(given) == expected


@pytest.mark.parametrize(
    ("asked", "full_graphs", "expected"),
    [
        ("FULL", "decode", "FULL_AND_PIECEWISE"),
        ("FULL", "none", "PIECEWISE"),
        ("FULL_DECODE_ONLY", "decode", "FULL_DECODE_ONLY"),
        ("FULL_DECODE_ONLY", "none", "PIECEWISE"),
        ("FULL_AND_PIECEWISE", "none", "PIECEWISE"),
        ("PIECEWISE", "none", "PIECEWISE"),
        ("NONE", "none", "NONE"),
    ],
)
def test_what_a_backend_lacks_steps_down_and_says_so(asked: str, full_graphs: str, expected: str) -> None:
    config = EngineConfig(compilation_config={"cudagraph_mode": asked})
    settled, decisions = decide_graphs(config, "cuda", "A_BACKEND", full_graphs)
    assert settled["cudagraph_mode"] == expected
    if expected != asked:
        assert "A_BACKEND allows" in decisions[0].reason
        assert decisions[0].runner_up == asked


def test_no_graphs_without_a_gpu_or_when_eager_is_enforced() -> None:
    assert mode({"cudagraph_mode": "FULL"}, device="cpu") == "NONE"
    assert mode({"cudagraph_mode": "FULL"}, enforce_eager=True) == "NONE"
    assert mode({}, enforce_eager=True) == "NONE"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cudagraph_mode": "SOME"}, r"cudagraph_mode must be one of NONE, .*; got 'SOME'"),
        ({"cudagraph_mode": 7}, r"cudagraph_mode must be one of NONE, .*; got 7"),
        ({"cudagraph_mode": True}, r"cudagraph_mode must be one of NONE, .*; got True"),
        ({"use_cudagraph": "yes"}, r"use_cudagraph must be true or false, got 'yes'"),
        ({"cudagraph_capture_sizes": [0, 1]}, r"cudagraph_capture_sizes must be a list of positive integers"),
        ({"cudagraph_capture_sizes": []}, r"cudagraph_capture_sizes must be a list of positive integers"),
        ({"max_cudagraph_capture_size": 0}, r"max_cudagraph_capture_size must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mode(given)


def test_sizes_are_sorted_and_other_settings_named_as_ignored() -> None:
    given = {"cudagraph_capture_sizes": [8, 2, 8], "level": 3}
    settled, decisions = decide_graphs(EngineConfig(compilation_config=given), "cuda", "A_BACKEND", "any")
    assert settled["cudagraph_capture_sizes"] == [2, 8]
    assert [d.field for d in decisions] == ["cudagraph_mode", "compilation_config.level"]


def test_the_backend_is_the_one_that_the_ranks_will_choose() -> None:
    def decided(**given: Any) -> str:
        config, _ = decide_before_load(EngineConfig(**given), MODEL, "cuda")
        return str(config.compilation_config["cudagraph_mode"])

    assert decided() == "FULL_AND_PIECEWISE"
    assert decided(attention_backend="TORCH_SDPA") == "PIECEWISE"
    assert decide_before_load(EngineConfig(), MODEL, "cpu")[0].compilation_config["cudagraph_mode"] == "NONE"


def test_wide_heads_leave_the_backend_that_can_be_inside_a_graph() -> None:
    wide = ModelConfig.from_dict({**MODEL.raw, "head_dim": 512})
    config, decisions = decide_before_load(EngineConfig(), wide, "cuda")
    assert config.compilation_config["cudagraph_mode"] == "PIECEWISE"
    assert any("TORCH_SDPA allows" in d.reason for d in decisions)
