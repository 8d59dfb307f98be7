"""Every knob checks itself; the environment gives values that flags override."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from headrace.config import EngineConfig, ServerConfig
from headrace.environment import cache_folder, calm_libraries, child_environment, knobs_from_environment
from headrace.errors import ConfigError
from headrace.knobs import check_knobs, knob, knob_types


def test_defaults_are_valid_and_frozen() -> None:
    config = EngineConfig()
    assert (config.model, config.block_size, config.max_num_seqs) == ("demo", 16, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 1  # type: ignore[misc]
    assert config.replace(block_size=1).block_size == 1
    assert EngineConfig().compilation_config is not EngineConfig().compilation_config


@pytest.mark.parametrize("config_class", [EngineConfig, ServerConfig])
def test_every_field_is_documented(config_class: type) -> None:
    for field in dataclasses.fields(config_class):
        assert field.metadata["help"].endswith((".", ")")), field.name


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_model_len": 0}, "max_model_len must be at least 1, got 0"),
        ({"max_model_len": "8"}, "max_model_len must be of type int, got '8'"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size must be of type int, got True"),
        ({"dtype": "int4"}, "dtype must be one of auto, half, .*; got 'int4'"),
        ({"block_size": 17}, "block_size must be one of 1, 16, 32, 64; got 17"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be at most 1.0, got 1.5"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization must be at least 0.01, got nan"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, r"max_num_seqs \(9\) must not exceed"),
        ({"model": None}, "model must be of type str, got None"),
    ],
)
def test_bad_values_name_field_value_and_what_is_accepted(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**values)


def test_an_integer_is_a_number() -> None:
    assert EngineConfig(gpu_memory_utilization=1).gpu_memory_utilization == 1


def test_plain_types() -> None:
    kinds = knob_types(EngineConfig)
    assert kinds["max_model_len"] == (int, True)
    assert kinds["served_model_name"] == (list, False)
    assert kinds["compilation_config"] == (dict, False)


def test_environment_gives_values_by_type() -> None:
    environ = {"VLLM_CPU_KVCACHE_SPACE": "2.5", "VLLM_API_KEY": "secret", "HOME": "/root"}
    assert knobs_from_environment(EngineConfig, environ) == {"cpu_kv_cache_gib": 2.5}
    assert knobs_from_environment(ServerConfig, environ) == {"api_key": ["secret"]}
    assert knobs_from_environment(EngineConfig, {"VLLM_CPU_KVCACHE_SPACE": ""}) == {}
    assert knobs_from_environment(ServerConfig, {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "5"}) == {"timeout_keep_alive": 5}
    assert knobs_from_environment(EngineConfig, {"VLLM_BATCH_INVARIANT": "1"}) == {"batch_invariant": True}
    assert knobs_from_environment(EngineConfig, {"VLLM_BATCH_INVARIANT": "0"}) == {"batch_invariant": False}


def test_bad_environment_names_the_variable() -> None:
    with pytest.raises(ConfigError, match="environment variable VLLM_CPU_KVCACHE_SPACE must be of type float, got 'x'"):
        knobs_from_environment(EngineConfig, {"VLLM_CPU_KVCACHE_SPACE": "x"})
    with pytest.raises(ConfigError, match="environment variable VLLM_BATCH_INVARIANT must be of type bool, got 'on'"):
        knobs_from_environment(EngineConfig, {"VLLM_BATCH_INVARIANT": "on"})


def test_a_config_class_of_ones_own() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options:
        size: int = knob(1, "Size.", minimum=1, aliases=("--length",))

    check_knobs(Options(size=2))
    with pytest.raises(ConfigError, match="size must be at least 1"):
        check_knobs(Options(size=0))


def test_a_user_without_a_home_has_a_cache_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert cache_folder({}) == Path(tempfile.gettempdir(), f"headrace-{os.getuid()}")
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/headrace")
    assert cache_folder({"HEADRACE_CACHE": "/y"}) == Path("/y")


def test_cpu_libraries_are_told_what_the_user_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's own default keeps a thousand compiled products, and memory grows with every new number of tokens."""
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "made to be restored afterwards")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    calm_libraries()
    inherited = child_environment()
    assert inherited["GOMP_SPINCOUNT"] == "7"
    assert int(inherited["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) <= 32


SPREAD = {"nnodes": 2, "tensor_parallel_size": 4, "master_addr": "10.0.0.1"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"node_rank": 2}, r"node_rank must be less than nnodes \(2\), got 2"),
        ({"tensor_parallel_size": 3}, r"nnodes \(2\) must divide tensor_parallel_size x pipeline_parallel_size \(3\)"),
        ({"master_addr": None}, "nnodes above 1 needs master_addr"),
        ({"data_parallel_size": 2}, "give data_parallel_address, and nnodes 1"),
    ],
)
def test_machines_that_do_not_add_up_are_refused(changed: dict[str, Any], message: str) -> None:
    assert EngineConfig(**SPREAD, pipeline_parallel_size=2).ranks_per_node == 4
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{**SPREAD, **changed})
