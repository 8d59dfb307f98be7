"""What tuning measured is taken where it was measured, where no flag says otherwise, and nowhere else."""

from __future__ import annotations

import dataclasses
import errno
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace import __version__
from headrace.config import EngineConfig
from headrace.model_config import ModelConfig
from headrace.planner.decisions import decide_before_load
from headrace.planner.profile import BASE, Measured, Profile, find_profile, machine_name, measured_here, write_profile
from headrace.planner.record import Decision
from tests.planner.test_decisions import MODEL as DECIDED

MODEL = ModelConfig.from_dict({**DECIDED.raw, "torch_dtype": "bfloat16"})
OTHER = ModelConfig.from_dict({**MODEL.raw, "num_hidden_layers": 6})
HERE = "NVIDIA H200"
PROFILE = Profile(
    model="a model",
    machine=HERE,
    device="cuda",
    base={name: getattr(EngineConfig(), name) for name in BASE},
    objective="interactive",
    workload={"input_len": 1024, "output_len": 128, "concurrency": None, "request_rate": 16.0},
    when="2026-01-31",
    gained="ITL p99",
    settings={
        "max_num_batched_tokens": Measured(16384, 8192, 1.06),
        "max_num_seqs": Measured(512, 1024, 1.03),
        "cudagraph_mode": Measured("PIECEWISE", "FULL_AND_PIECEWISE", 1.1),
        "kv_cache_dtype": Measured("bfloat16", "fp8_e4m3", 1.2),
        "attention_backend": Measured("TORCH_SDPA", "TRITON_ATTN", 1.04),
        "speculative_config": Measured({"method": "ngram"}, "off", 1.3),
    },
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr("headrace.planner.profile.machine_name", lambda: HERE)


def decide(**given: Any) -> tuple[EngineConfig, dict[str, Decision]]:
    config = EngineConfig(**given)
    resolved, decisions = decide_before_load(config, MODEL, "cuda", measured=measured_here(config, MODEL, "cuda"))
    return resolved, {decision.field: decision for decision in decisions}


def test_measured_settings_are_taken_with_their_reason() -> None:
    write_profile(PROFILE, MODEL)
    config, decisions = decide()
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (16384, 512)
    assert config.attention_backend == "TORCH_SDPA"
    assert config.speculative_config == {"method": "ngram"}
    budget = decisions["max_num_batched_tokens"]
    assert budget.source == "measured"
    assert budget.reason == "tuned on 2026-01-31 for 1024/128: +6.0% over 8192, in ITL p99"
    assert budget.runner_up == "8192"
    assert decisions["dtype"].source == "derived"


def test_graphs_are_measured_settings_too() -> None:
    only = {"cudagraph_mode": PROFILE.settings["cudagraph_mode"]}
    write_profile(dataclasses.replace(PROFILE, settings=only), MODEL)
    config, decisions = decide()
    assert config.compilation_config["cudagraph_mode"] == "PIECEWISE"
    assert decisions["cudagraph_mode"].source == "measured"
    config, decisions = decide(compilation_config={"cudagraph_mode": "FULL"})
    assert config.compilation_config["cudagraph_mode"] == "FULL"
    assert decisions["cudagraph_mode"].source == "user"
    assert decide(enforce_eager=True)[0].compilation_config["cudagraph_mode"] == "NONE"


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"max_num_batched_tokens": 4096}, {"max_num_batched_tokens"}),
        ({"max_num_batched_tokens": 256}, {"max_num_batched_tokens", "max_num_seqs"}),
        ({"max_num_seqs": 64}, {"max_num_seqs"}),
        ({"max_num_seqs": 20000}, {"max_num_seqs", "max_num_batched_tokens"}),
        ({"enable_chunked_prefill": False}, {"max_num_batched_tokens"}),
        ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype", "attention_backend"}),
        ({"attention_backend": "TRITON_ATTN"}, {"attention_backend"}),
    ],
)
def test_flags_win_and_what_does_not_go_with_them_is_left(given: dict[str, Any], left: set[str]) -> None:
    write_profile(PROFILE, MODEL)
    config, decisions = decide(**given)
    for name, value in given.items():
        assert getattr(config, name) == value
    measured = {name for name, decision in decisions.items() if decision.source == "measured"}
    assert PROFILE.settings.keys() - {"cudagraph_mode"} - measured == left


@pytest.mark.parametrize("objective", ["interactive", "throughput"])
def test_a_measured_cache_that_rounds_is_taken_for_throughput_alone(objective: str) -> None:
    lossy = {"kv_cache_dtype": Measured("fp8", "bfloat16", 1.2)}
    write_profile(dataclasses.replace(PROFILE, objective=objective, settings=lossy), MODEL)
    config, decisions = decide(objective=objective)
    taken = objective == "throughput"
    assert config.kv_cache_dtype == ("fp8_e4m3" if taken else "bfloat16")
    assert decisions["kv_cache_dtype"].source == ("measured" if taken else "derived")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 1, not 2"),
        ({"quantization": "fp8"}, "quantization None, not fp8"),
        ({"objective": "throughput"}, "objective interactive, not throughput"),
        ({"expected_input_len": 4096}, "expected_input_len 1024, not 4096"),
    ],
)
def test_a_profile_of_something_else_is_not_used(
    given: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_profile(PROFILE, MODEL)
    caplog.set_level(logging.INFO)
    assert measured_here(EngineConfig(**given), MODEL, "cuda") == {}
    assert said in caplog.text


def test_only_this_model_on_this_machine_and_only_if_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    write_profile(PROFILE, MODEL)
    assert measured_here(EngineConfig(), OTHER, "cuda") == {}
    assert measured_here(EngineConfig(), MODEL, "cpu") == {}
    assert measured_here(EngineConfig(use_profile=False), MODEL, "cuda") == {}
    assert measured_here(EngineConfig(expected_input_len=1024), MODEL, "cuda")
    monkeypatch.setattr("headrace.planner.profile.machine_name", lambda: "NVIDIA H100")
    assert measured_here(EngineConfig(), MODEL, "cuda") == {}


def test_without_any_profile_of_the_model_the_machine_is_not_looked_at() -> None:
    write_profile(PROFILE, OTHER)

    def look() -> str:
        raise AssertionError("looked at")

    assert find_profile(MODEL, look) is None


WHOLE = msgspec.json.encode(PROFILE).decode()


@pytest.mark.parametrize(
    "text",
    [None, "", "{", '{"model": 3}', "\x00", WHOLE.replace('"input_len":1024,', ""),
     WHOLE.replace('"value":512', '"value":[512]'), WHOLE.replace(f'"version":"{__version__}"', '"version":"0.0.1"')],
)  # fmt: skip
def test_a_profile_that_cannot_be_used_is_ignored_with_a_log_line(
    text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Unreadable, of another version, or a folder."""
    caplog.set_level(logging.INFO)
    path = write_profile(PROFILE, MODEL)
    if text is None:
        path.unlink()
        path.mkdir()
    else:
        path.write_text(text)
    assert measured_here(EngineConfig(), MODEL, "cuda") == {}
    assert f"profile {path} ignored" in caplog.text
    assert ("it is of headrace 0.0.1" in caplog.text) == ("0.0.1" in (text or ""))


def test_a_setting_of_the_wrong_type_is_left() -> None:
    settings = {name: Measured("many", 8192, 1.1) for name in ("max_num_seqs", "max_num_batched_tokens")}
    write_profile(dataclasses.replace(PROFILE, settings=settings), MODEL)
    assert measured_here(EngineConfig(max_num_seqs=4), MODEL, "cuda") == {}
    assert measured_here(EngineConfig(max_num_batched_tokens=64), MODEL, "cuda") == {}


def test_a_cache_folder_that_cannot_be_read_is_ignored_with_a_log_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profiles").touch()
    assert measured_here(EngineConfig(), MODEL, "cuda") == {}
    assert f"profiles in {tmp_path}/profiles ignored: Not a directory" in caplog.text

    def refuse(folder: Path) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr("os.listdir", refuse)
    monkeypatch.setattr("os.scandir", refuse)
    assert measured_here(EngineConfig(), MODEL, "cuda") == {}
    assert f"profiles in {tmp_path}/profiles ignored: Permission denied" in caplog.text


def test_a_profile_that_cannot_be_written_leaves_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_profile(PROFILE, MODEL)
    before, write = path.read_bytes(), Path.write_bytes

    def fill_up(self: Path, data: bytes) -> int:
        write(self, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill_up)
    with pytest.raises(OSError, match="No space left"):
        write_profile(dataclasses.replace(PROFILE, settings={}), MODEL)
    assert path.read_bytes() == before
    assert [*path.parent.iterdir()] == [path]


def test_a_machine_without_gpus_is_named_by_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.planner.profile.read_gpus", list)
    assert machine_name().endswith("cores")
    monkeypatch.setattr("headrace.planner.profile.read_gpus", lambda: [(HERE, 1), (HERE, 1)])
    assert machine_name() == HERE
