"""What is said of a whole line: memory is counted as engines spread a model, and plans stand their own examination."""

from __future__ import annotations

import pytest

from headrace.advice.explain.explain import explain
from headrace.advice.explain.findings import Finding
from headrace.planner.chips import find_chip
from headrace.planner.plan import make_plan
from headrace.planner.plan_request import PlanRequest


def memory(text: str, gpu: str) -> Finding:
    (whole,) = explain(text, find_chip(gpu))
    (found,) = [found for found in whole.findings if found.title == "memory"]
    return found


MODELS = ["llama-3.1-8b", "llama-3.1-70b", "llama-4-scout", "llama-4-maverick", "mixtral-8x7b", "mixtral-8x22b",
          "qwen3-235b-a22b", "deepseek-r1", "deepseek-v3.2", "gpt-oss-120b", "gemma-3-27b"]  # fmt: skip


@pytest.mark.parametrize("engine", ["headrace", "vllm"])
@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize(("gpu", "count"), [("h200", 8), ("mi300x", 8), ("mi300x", 1)])
@pytest.mark.parametrize("model", MODELS)
def test_planned_lines_fit(model: str, gpu: str, count: int, objective: str, engine: str) -> None:
    plan = make_plan(PlanRequest(model=model, gpu=gpu, num_gpus=count, objective=objective, engine=engine))
    for command in plan.commands:
        for line in command.lines:
            for whole in explain(line, find_chip(gpu)):
                wrong = [found.text for found in whole.findings if found.verdict == "wrong"]
                wrong += [answer.why for answer in whole.answers if answer.verdict == "wrong"]
                assert not wrong, line


def test_data_parallel_ranks_of_a_mixture_share_its_experts() -> None:
    line = "vllm serve deepseek-ai/DeepSeek-R1 --data-parallel-size 8"
    for text in (line, f"{line} --enable-expert-parallel"):
        found = memory(text, "h200")
        assert found.verdict == "fine"
        assert "weights on each of 8 NVIDIA H200" in found.text
        assert "627 GiB" not in found.text


def test_replicas_of_a_dense_model_hold_it_whole() -> None:
    assert memory("vllm serve meta-llama/Llama-3.1-70B --data-parallel-size 8", "h100").verdict == "wrong"


def test_headrace_shortens_the_context_where_no_length_is_given() -> None:
    line = "headrace serve meta-llama/Llama-3.1-70B"
    found = memory(line, "mi300x")
    assert found.verdict == "fine"
    assert "to which the context is cut from 131,072" in found.text
    assert memory(f"{line} --max-model-len 131072", "mi300x").verdict == "wrong"
    assert memory(line, "h100").verdict == "wrong"
    assert memory(line.replace("headrace", "vllm"), "mi300x").verdict == "wrong"


def test_more_gpus_are_advised_as_the_ranks_share_the_experts() -> None:
    """Two ranks with four GPUs each hold what one rank with eight does."""
    found = memory("vllm serve deepseek-ai/DeepSeek-R1 --data-parallel-size 2 --max-model-len 8192", "h200")
    assert (found.verdict, found.add) == ("wrong", "--tensor-parallel-size 4")


def test_a_shorter_context_that_is_advised_fits() -> None:
    """Also where windows make a sequence's cache grow in two slopes."""
    line = "vllm serve meta-llama/Llama-4-Scout-17B-16E-Instruct -tp 8"
    found = memory(line, "h100")
    assert found.verdict == "wrong"
    assert "--max-model-len" in found.add
    assert memory(f"{line} {found.add}", "h100").verdict == "fine"


def test_float32_weighs_twice_as_much() -> None:
    assert "61.0 GiB" in memory("vllm serve Qwen/Qwen3-32B", "h100").text
    assert "122 GiB" in memory("vllm serve Qwen/Qwen3-32B --dtype float32", "h100").text
