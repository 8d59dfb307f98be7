"""The command lines of a plan: what each engine is told, why, and that headrace's own parser takes its line."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.arguments import build_config
from headrace.cli.serve import build_parser
from headrace.config import EngineConfig
from headrace.hub import DEMO_FOLDER
from headrace.planner.commands import Command
from headrace.planner.plan import make_plan
from headrace.planner.plan_request import PlanRequest


def command(engine: str, model: str = "llama-3.1-8b", gpu: str = "h200", **asked: Any) -> Command:
    made = make_plan(PlanRequest(model=model, gpu=gpu, engine=engine, **asked))
    assert made.feasible, made.problems
    assert made.command is not None, made.gaps
    return made.command


def flags(found: Command) -> dict[str, str | None]:
    return {flag.name: flag.value for flag in found.flags}


def variables(found: Command) -> dict[str, str | None]:
    return {variable.name: variable.value for variable in found.variables}


PLANS: list[dict[str, Any]] = [
    {"model": "llama-3.1-8b", "gpu": "h200"},
    {"model": "llama-3.1-405b", "gpu": "mi300x", "num_gpus": 8, "quantization": "fp8"},
    {"model": "llama-3.1-70b", "gpu": "h200", "num_gpus": 8, "objective": "throughput"},
    {"model": "qwen3-30b-a3b", "gpu": "h200", "num_gpus": 4, "objective": "throughput"},
    {"model": "mixtral-8x7b", "gpu": "h100", "num_gpus": 8, "objective": "latency", "quantization": "ptpc_fp8"},
    {"model": "llama-3.1-8b", "gpu": "cpu"},
    {
        "model": "llama-3.1-8b", "gpu": "h200", "max_model_len": 9000, "max_num_seqs": 12, "dtype": "float16",
        "max_num_batched_tokens": 9000, "enable_chunked_prefill": False, "async_scheduling": False, "block_size": 32,
        "attention_backend": "TORCH_SDPA", "gpu_memory_utilization": 0.7,
        "compilation_config": {"cudagraph_mode": "NONE"},
    },
]  # fmt: skip


@pytest.mark.parametrize("asked", PLANS, ids=lambda asked: f"{asked['model']}-{len(asked)}")
def test_headrace_takes_its_own_line(asked: dict[str, Any]) -> None:
    made = make_plan(PlanRequest(**asked))
    words = shlex.split(made.command.line)
    start = words.index("headrace")
    assert words[start : start + 2] == ["headrace", "serve"]
    values = build_parser().parse(words[start + 2 :])
    config = build_config(EngineConfig, argparse_engine(values))
    assert config.tensor_parallel_size == made.decision("tensor_parallel_size").value
    assert config.objective == made.request.objective
    assert config.expected_input_len == made.request.input_len
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"):
        if name in asked:
            assert getattr(config, name) == asked[name]


def argparse_engine(values: Any) -> Any:
    for name in ("port", "host"):
        vars(values).pop(name, None)
    return values


@pytest.mark.parametrize("asked", PLANS, ids=lambda asked: f"{asked['model']}-{len(asked)}")
@pytest.mark.parametrize("plan_for", ["headrace", "vllm"])
def test_every_word_has_a_reason_and_no_line_follows_a_false_claim(asked: dict[str, Any], plan_for: str) -> None:
    asked = {name: entry for name, entry in asked.items() if name not in ("attention_backend", "quantization")}
    made = make_plan(PlanRequest(**asked, engine=plan_for))
    found = made.command
    for flag in (*found.flags, *found.variables):
        assert flag.reason
        assert flag.name not in ("--trust-remote-code", "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "--swap-space")
    given = flags(found)
    if "--no-enable-chunked-prefill" in given or "--no-async-scheduling" in given:
        assert "enable_chunked_prefill" in asked


SHUFFLED, CHANNELS, FP4 = "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "NCCL_MIN_NCHANNELS", "VLLM_ROCM_USE_AITER_FP4BMM"
SHARED = {"enable_dp_attention": True, "enable_expert_parallel": True}
MTP = {"method": "mtp", "num_speculative_tokens": 1}
LINES: list[tuple[str, str, dict[str, Any], dict[str, str | None], tuple[str, ...], str]] = [
    # model, GPU, what else is asked for vLLM, flags and variables that are there, those that are not, part of a note
    ("llama-3.1-8b", "mi300x", {"num_gpus": 1}, {"VLLM_ROCM_USE_AITER": "1", "--attention-backend": "ROCM_AITER_FA"},
     (CHANNELS,), ""),
    ("llama-3.1-405b", "mi300x", {"num_gpus": 8, "concurrency": 64}, {CHANNELS: "112", SHUFFLED: "1"}, (), ""),
    ("llama-3.1-405b", "mi300x", {"num_gpus": 8, "concurrency": 8}, {CHANNELS: "112"}, (SHUFFLED,), ""),
    ("llama-3.1-405b", "mi355x", {"num_gpus": 8}, {}, (CHANNELS,), ""),
    ("llama-3.1-70b", "h200", {"num_gpus": 8}, {}, ("--attention-backend", "VLLM_ROCM_USE_AITER", CHANNELS), ""),
    # Attention on AMD follows the model.
    ("llama-3.1-70b", "mi300x", {"num_gpus": 8}, {"--attention-backend": "ROCM_AITER_FA"}, ("--block-size", FP4), ""),
    ("gpt-oss-120b", "mi300x", {"num_gpus": 8}, {"--attention-backend": "ROCM_AITER_UNIFIED_ATTN"},
     ("--block-size", FP4), ""),
    ("deepseek-r1", "mi300x", {"num_gpus": 8}, {"--attention-backend": "ROCM_AITER_MLA", FP4: "0"},
     ("--block-size",), ""),
    ("deepseek-v3.2", "mi300x", {"num_gpus": 8},
     {"--attention-backend": "ROCM_AITER_MLA_SPARSE", "--block-size": "1", FP4: "0"}, (), ""),
    # Ranks that share experts are one server; replicas of a mixture share none, and are one each.
    ("deepseek-r1", "h200", {"num_gpus": 8, "data_parallel_size": 8, **SHARED},
     {"--data-parallel-size": "8", "--enable-expert-parallel": None}, ("--data-parallel-size-local",), ""),
    ("deepseek-r1", "h200", {"num_gpus": 16, **SHARED}, {"--data-parallel-size-local": "4"}, (), "2 nodes"),
    ("qwen3-30b-a3b", "h200", {"num_gpus": 2, "data_parallel_size": 2, "enable_dp_attention": False}, {},
     ("--data-parallel-size",), "2 servers a node"),
    # Stages beyond a node go over Ray; nodes of replicas run the same.
    ("llama-3.1-405b", "h100", {"num_gpus": 16},
     {"--pipeline-parallel-size": "2", "--distributed-executor-backend": "ray"}, ("-pp",), "Ray cluster of 2 nodes"),
    ("llama-3.1-70b", "h200", {"num_gpus": 16, "tensor_parallel_size": 8}, {}, ("--data-parallel-size",),
     "the same on each of 2 nodes"),
    # Graphs are asked for where vLLM's own end.
    ("llama-3.1-8b", "h200",
     {"num_gpus": 1, "objective": "throughput", "max_num_seqs": 800, "input_len": 128, "output_len": 128},
     {"--compilation-config": '{"max_cudagraph_capture_size": 800}'}, (), ""),
    ("llama-3.1-8b", "h200", {}, {}, ("--compilation-config",), ""),
    ("llama-3.1-8b", "h200", {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
     {"--compilation-config": '{"cudagraph_mode": "PIECEWISE"}'}, (), ""),
    # What only vLLM has may be pinned.
    ("deepseek-r1", "h200",
     {"num_gpus": 8, "tensor_parallel_size": 8, "speculative_config": MTP,
      "compilation_config": {"cudagraph_capture_sizes": [1, 2]}},
     {"--speculative-config": json.dumps(MTP),
      "--compilation-config": '{"cudagraph_capture_sizes": [1, 2]}'}, (), ""),
]  # fmt: skip


@pytest.mark.parametrize("row", LINES, ids=lambda row: f"{row[0]} {row[1]} {len(row[3])}")
def test_the_line_of_vllm(row: tuple[Any, ...]) -> None:
    model, gpu, asked, there, absent, note = row
    found = command("vllm", model, gpu, **asked)
    said = flags(found) | variables(found)
    assert {name: said.get(name, "absent") for name in there} == there
    assert not said.keys() & set(absent)
    notes = " ".join(found.notes)
    assert note in notes


def test_an_engine_over_several_machines_is_started_on_each() -> None:
    found = command("headrace", "llama-3.1-405b", "h100", num_gpus=16, tensor_parallel_size=8)
    layout = {"--tensor-parallel-size": "8", "--pipeline-parallel-size": "2", "--nnodes": "2"}
    assert {name: flags(found)[name] for name in layout} == layout
    assert "on each of 2 nodes: all but the first add --headless and --node-rank" in " ".join(found.notes)


def test_replicas_are_one_server_but_of_a_mixture_in_vllm() -> None:
    asked: dict[str, Any] = {"num_gpus": 4, "tensor_parallel_size": 2, "data_parallel_size": 2}
    for engine in ("vllm", "headrace"):
        found = command(engine, **asked)
        assert flags(found)["--data-parallel-size"] == "2"
    mixture = command("vllm", "qwen3-30b-a3b", enable_dp_attention=False, **asked)
    assert "--data-parallel-size" not in flags(mixture)
    assert mixture.notes[-1].startswith("2 servers a node, each with 2 of CUDA_VISIBLE_DEVICES")


def test_a_backend_that_is_given_is_named() -> None:
    found = command("vllm", "llama-3.1-8b", "mi300x", attention_backend="TRITON_ATTN")
    assert flags(found)["--attention-backend"] == "TRITON_ATTN"


@pytest.mark.parametrize("model", ["llama-3.1-405b-fp8", "Llama-3.1-8B-Instruct"])
@pytest.mark.parametrize("engine", ["vllm", "headrace"])
def test_another_checkpoint_of_a_model_is_not_its_plain_one(model: str, engine: str) -> None:
    if engine == "headrace" and "fp8" in model:
        return  # reads none yet
    found = command(engine, model, num_gpus=8)
    assert found.program[-1] == f"<{model}>"
    assert f"put the folder or hub id of {model} in place of <{model}>" in found.notes


def test_a_config_file_stands_for_its_folder(tmp_path: Path) -> None:
    shutil.copy(DEMO_FOLDER / "config.json", tmp_path / "config.json")
    assert command("headrace", str(tmp_path / "config.json"), "h200").program[-1] == str(tmp_path)


def test_models_are_named_as_each_engine_finds_them() -> None:
    assert command("vllm").program[-1] == "meta-llama/Llama-3.1-8B"
    assert command("vllm", "amd/Llama-3.1-8B-Instruct-FP8-KV", "mi300x").program[-1].startswith("amd/")
    other = command("vllm", quantization="int4")
    assert other.program[-1] == "<meta-llama/Llama-3.1-8B in int4>"
    assert "of a checkpoint that holds int4 in place" in other.notes[0]
    assert command("headrace", "demo").program[-1] == "demo"
    assert command("vllm", "demo").program[-1].endswith("demo_model")


def test_sequences_that_the_cache_bounds_are_told() -> None:
    found = command("headrace", "qwen3-32b", "h100", objective="throughput")
    assert "--max-num-seqs" in flags(found)
    assert "--max-num-seqs" not in flags(command("headrace"))
