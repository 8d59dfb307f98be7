"""What is said of a whole line: memory is counted as engines spread a model, and plans stand their own examination."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.advice.explain.explain import explain
from headrace.advice.explain.findings import Finding
from headrace.planner.chips import find_chip
from headrace.planner.plan import make_plan
from headrace.planner.plan_request import PlanRequest
from tests.sampled import sampled


def memory(text: str, gpu: str) -> Finding:
    (whole,) = explain(text, find_chip(gpu))
    (found,) = [found for found in whole.findings if found.title == "memory"]
    return found


MODELS = ["llama-3.1-8b", "llama-3.1-70b", "llama-4-scout", "llama-4-maverick", "mixtral-8x7b", "mixtral-8x22b",
          "qwen3-235b-a22b", "deepseek-r1", "deepseek-v3.2", "gpt-oss-120b", "gemma-3-27b"]  # fmt: skip


WISHES = [
    {"gpu": gpu, "num_gpus": count, "objective": objective, "engine": engine}
    for gpu, count in (("h200", 8), ("mi300x", 8), ("mi300x", 1))
    for objective in ("latency", "throughput")
    for engine in ("headrace", "vllm")
]


@sampled(("model", "wish"), MODELS, WISHES)
def test_planned_lines_fit(model: str, wish: dict[str, Any]) -> None:
    plan, gpu = make_plan(PlanRequest(model=model, **wish)), wish["gpu"]
    if not plan.feasible:
        return
    line = plan.command.line
    for whole in explain(line, find_chip(gpu)):
        wrong = [found.text for found in whole.findings if found.verdict == "wrong"]
        wrong += [answer.why for answer in whole.answers if answer.verdict == "wrong"]
        assert not wrong, line


R1, LLAMA70 = "vllm serve deepseek-ai/DeepSeek-R1", "meta-llama/Llama-3.1-70B"
COUNTED = [
    # line, gpu, verdict, part of what is said
    # Data-parallel ranks of a mixture share its experts (627 GiB in all); replicas of a dense model hold it whole.
    (f"{R1} --data-parallel-size 8", "h200", "fine", "weights on each of 8 NVIDIA H200"),
    (f"{R1} --data-parallel-size 8 --enable-expert-parallel", "h200", "fine", "weights on each of 8 NVIDIA H200"),
    (f"vllm serve {LLAMA70} --data-parallel-size 8", "h100", "wrong", ""),
    # headrace shortens the context where no length is given.
    (f"headrace serve {LLAMA70}", "mi300x", "fine", "to which the context is cut from 131,072"),
    (f"headrace serve {LLAMA70} --max-model-len 131072", "mi300x", "wrong", ""),
    (f"headrace serve {LLAMA70}", "h100", "wrong", ""),
    (f"vllm serve {LLAMA70}", "mi300x", "wrong", ""),
    ("vllm serve Qwen/Qwen3-32B", "h100", "wrong", "61.0 GiB"),
    ("vllm serve Qwen/Qwen3-32B --dtype float32", "h100", "wrong", "122 GiB"),
]


@pytest.mark.parametrize(("text", "gpu", "verdict", "part"), COUNTED)
def test_memory_is_counted_as_engines_spread_a_model(text: str, gpu: str, verdict: str, part: str) -> None:
    found = memory(text, gpu)
    assert (found.verdict, part in found.text, "627 GiB" in found.text) == (verdict, True, False), found.text


def test_more_gpus_are_advised_as_the_ranks_share_the_experts() -> None:
    """Two ranks with four GPUs each hold what one rank with eight does."""
    found = memory(f"{R1} --data-parallel-size 2 --max-model-len 8192", "h200")
    assert (found.verdict, found.add) == ("wrong", "--tensor-parallel-size 4")


def test_a_shorter_context_that_is_advised_fits() -> None:
    """Also where windows make a sequence's cache grow in two slopes."""
    line = "vllm serve meta-llama/Llama-4-Scout-17B-16E-Instruct -tp 8"
    found = memory(line, "h100")
    assert (found.verdict, "--max-model-len" in found.add) == ("wrong", True)
    assert memory(f"{line} {found.add}", "h100").verdict == "fine"


@pytest.mark.parametrize(
    "flags",
    [
        "--hf-overrides.rope_parameters.rope_type=yarn --hf-overrides.rope_parameters.factor=4.0",
        "--hf-overrides '{\"max_position_embeddings\": 131072}'",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1",
    ],
)
def test_a_longer_context_than_the_models_may_be_allowed(flags: str) -> None:
    """Memory is counted for it; what becomes of the answers is left open, or costs something."""
    variable, flag = (flags, "") if "=1" in flags else ("", flags)
    line = f"{variable} vllm serve Qwen/Qwen3-8B {flag} --max-model-len 131072"
    (whole,) = explain(line, find_chip("h200"))
    assert whole.answers[-1].verdict == ("costs" if variable else "depends")
    assert "sequences of 131,072" in whole.findings[0].text
    assert whole.better["vllm"].endswith("--max-model-len 131072")
    assert "headrace" not in whole.better
    (bare,) = explain("vllm serve Qwen/Qwen3-8B --max-model-len 131072", find_chip("h200"))
    assert bare.answers[-1].verdict == "wrong"
    assert bare.better["vllm"] == "vllm serve Qwen/Qwen3-8B --max-model-len 40960"


def test_no_line_for_flags_that_vllm_takes_no_longer() -> None:
    (whole,) = explain("vllm serve Qwen/Qwen3-8B --rope-scaling '{\"factor\": 2.0}' --rope-theta 1000000")
    assert [found.verdict for found in whole.answers] == ["wrong", "wrong"]
    assert "use --hf-overrides" in whole.answers[0].why
    assert whole.better == {}
