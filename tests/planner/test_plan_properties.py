"""What holds for every plan, over a grid of models, GPUs, counts, loads and engines: it fits by its own
map, keeps to the rules of models, and follows no claim that is known to be false."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.parameters import total
from headrace.planner.catalogue import catalogue
from headrace.planner.plan import Plan, make_plan
from headrace.planner.plan_request import PlanRequest

PLACES = [("mi300x", 8), ("h200", 1), ("h200", 8), ("mi355x", 4), ("b200", 16), ("a100", 8), ("l40s", 6), ("h100", 32),
          ("mi325x", 2), ("mi350x", 3), ("cpu", 1)]  # fmt: skip
LOADS: list[tuple[str, dict[str, Any]]] = [
    ("latency", {"input_len": 128, "output_len": 2048}),
    ("interactive", {"concurrency": 64}),
    ("throughput", {"concurrency": 2048}),
    ("throughput", {}),
    ("interactive", {"input_len": 8192, "output_len": 512, "concurrency": 512}),
    ("latency", {"concurrency": 8, "quantization": "fp8"}),
    ("interactive", {"request_rate": 3.0}),
    ("throughput", {"concurrency": 256, "kv_cache_dtype": "fp8", "engine": "vllm"}),
]
CASES = [
    (model, *place, *LOADS[(number + 2 * index) % len(LOADS)], ("headrace", "vllm")[(number + index) % 2])
    for number, model in enumerate(catalogue())
    for index, place in enumerate(PLACES)
]


def chosen(number: int) -> int:
    """Return the place of the one plan of a model that is no sweep: among them are all places, loads and engines."""
    return (3 * number + number // 2) % len(PLACES)


LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_size": 3584, "num_hidden_layers": 28, "vocab_size": 32000,
         "max_position_embeddings": 32768, "head_dim": 128}  # fmt: skip
AWKWARD = {
    "28 heads of 4 KV heads": {"num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 16384},
    "an odd MLP": {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 11004},
    "3 KV heads": {"num_attention_heads": 24, "num_key_value_heads": 3, "intermediate_size": 16384},
}
"""Sizes that no model of the catalogue has, each of which one rule alone keeps from eight GPUs"""
LEAST_BYTES = {"none": 2.0, "fp8": 1.0, "ptpc_fp8": 1.0, "int8": 1.0, "mxfp4": 0.5, "int4": 0.5}
"""of a weight"""


def test_the_grid_is_large() -> None:
    assert len(CASES) >= 200
    sample = [CASES[number * len(PLACES) + chosen(number)] for number in range(len(catalogue()))]
    assert {case[0] for case in sample} == {*catalogue()}
    assert {case[1:3] for case in sample} == {*PLACES}
    assert {(case[3], *case[4]) for case in sample} == {(objective, *load) for objective, load in LOADS}
    assert {case[5] for case in sample} == {"headrace", "vllm"}


@pytest.mark.parametrize(
    ("model", "gpu", "count", "objective", "load", "engine"),
    [
        pytest.param(*case, marks=[] if place % len(PLACES) == chosen(place // len(PLACES)) else [pytest.mark.slow])
        for place, case in enumerate(CASES)
    ],
    ids=lambda value: str(value).replace(" ", "")[:30],
)
def test_a_plan(model: str, gpu: str, count: int, objective: str, load: dict[str, Any], engine: str) -> None:
    request = PlanRequest(**{"engine": engine, "model": model, "gpu": gpu, "num_gpus": count, **load})
    holds(make_plan(request.replace(objective=objective)))


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize(("objective", "load"), LOADS[:3], ids=lambda value: str(value)[:20])
def test_sizes_that_do_not_come_out_even(name: str, objective: str, load: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **AWKWARD[name]}))
    holds(make_plan(PlanRequest(model=str(tmp_path), gpu="h100", num_gpus=8, objective=objective, **load)))


def holds(made: Plan) -> None:
    if not made.feasible:
        assert made.problems
        assert made.alternatives, made.problems
        for entry in made.alternatives:
            assert entry.change
            assert entry.plan.feasible
        made = made.alternatives[0].plan
    fits_by_its_own_map(made)
    counts_everything(made)
    keeps_the_rules(made)
    follows_no_false_claim(made)
    says_why(made)


def fits_by_its_own_map(made: Plan) -> None:
    memory, request = made.memory, made.request
    assert memory.fits
    parts = memory.parts()
    assert min(parts.values()) >= 0
    assert sum(parts.values()) <= memory.usable <= memory.total
    tokens = request.prompt_len + request.answer_len
    length = value(made, "max_model_len")
    assert tokens <= length <= made.shape.spec.max_position_embeddings
    assert memory.kv_tokens >= length
    assert 1 <= value(made, "max_num_seqs") <= value(made, "max_num_batched_tokens")
    assert made.prediction.max_concurrency >= 1


def counts_everything(made: Plan) -> None:
    """The map against what the shape alone says: no weight is forgotten or shrunk, and no key of the cache."""
    memory, shape = made.memory, made.shape
    tp, pp, dp = (value(made, f"{kind}_parallel_size") for kind in ("tensor", "pipeline", "data"))
    gpus = tp * pp * (dp if value(made, "enable_dp_attention") else 1)
    linears = sum(
        group.count
        * (
            total((*group.mixer.parameters, *group.feed_forward.parameters), "linear")
            + group.feed_forward.num_experts * total(group.feed_forward.expert_parameters, "linear")
        )
        for group in shape.groups
    )
    assert memory.weight_bytes * gpus >= linears * LEAST_BYTES[value(made, "quantization")]
    width = 1 if value(made, "kv_cache_dtype").startswith("fp8") else 2
    cached = sum(
        group.count * group.mixer.cached_values / (1 if shape.is_mla else min(tp, group.mixer.num_kv_heads))
        for group in shape.groups
    )
    of_layer = max(group.mixer.cached_values for group in shape.groups)  # a stage may have a layer less than others
    assert memory.kv_bytes_per_token * pp >= (0.999 * cached - (pp > 1) * pp * of_layer) * width
    windows = any(group.mixer.window for group in shape.groups)
    assert windows or memory.kv_tokens * memory.kv_bytes_per_token <= memory.kv_pool


def value(made: Plan, field: str) -> Any:
    return made.decision(field).value


def keeps_the_rules(made: Plan) -> None:
    shape, chip = made.shape, made.chip
    tp, pp, dp = (value(made, f"{kind}_parallel_size") for kind in ("tensor", "pipeline", "data"))
    ep, shared = value(made, "enable_expert_parallel"), value(made, "enable_dp_attention")
    assert tp * pp * dp <= made.num_gpus
    assert tp <= chip.gpus_per_node
    expert_gpus = tp * dp if shared else tp
    for group in shape.groups:
        heads, kv_heads = group.mixer.num_heads, group.mixer.num_kv_heads
        assert heads % tp == 0
        if group.mixer.kind == "gqa":
            assert kv_heads % tp == 0 or tp % kv_heads == 0
        assert group.feed_forward.intermediate_size % tp == 0
        if group.feed_forward.num_experts and ep:
            assert group.feed_forward.num_experts % expert_gpus == 0
            assert group.feed_forward.experts_per_token / group.feed_forward.num_experts >= 0.01
        if group.feed_forward.num_experts and not ep:
            assert group.feed_forward.expert_intermediate_size % expert_gpus == 0
    assert shape.is_moe or not (ep or shared)
    if pp > 1 and tp * pp <= chip.gpus_per_node:
        assert not make_plan(made.request.replace(pipeline_parallel_size=1)).feasible


def follows_no_false_claim(made: Plan) -> None:
    memory, prediction, request = made.memory, made.prediction, made.request
    # A longer limit takes nothing from the cache, but headrace's rows of token and block ids, so it is the model's own
    # unless one such sequence does not fit.
    length, context = value(made, "max_model_len"), made.shape.spec.max_position_embeddings
    if length < context:
        assert made.decision("max_model_len").runner_up
        seqs = value(made, "max_num_seqs") + 1 if request.engine == "headrace" else 0
        rows = 4 * (1 + 1 / 16) * seqs * (context - length)
        assert memory.kv_tokens < context * 1.01 + rows / memory.kv_bytes_per_token
    # All sequences at their longest need not fit at once: the cache bounds them by what they hold on the way.
    assert request.max_num_seqs is None
    most = made.decision("max_num_seqs")
    by_length = not any(group.mixer.window or group.mixer.kind == "state" for group in made.shape.groups)
    if most.runner_up and by_length:  # a window or a state holds as much for a long request as for a short one
        assert (most.value + 1) * (request.prompt_len + request.answer_len / 2) > memory.kv_tokens
    # What is on by default stays on; guesses are not made where nobody knows how many are right.
    assert value(made, "enable_chunked_prefill") is True
    assert value(made, "async_scheduling") is True
    assert value(made, "speculative_config") == "off"
    # Sums are rounded nowhere unasked; code of a repository is never run.
    tensor = value(made, "tensor_parallel_size")
    said = "" if made.command is None else made.command.line
    for word in ("QUICK_REDUCE", "trust-remote-code", "no-enable-chunked-prefill", "no-async", "swap-space"):
        assert word not in said
    if made.shape.weight_format != "bf16":
        assert "--quantization" not in said
    if tensor == 1 and not value(made, "enable_dp_attention") and value(made, "pipeline_parallel_size") == 1:
        assert "NCCL" not in said
    if made.chip.vendor != "amd":
        assert "NCCL_MIN_NCHANNELS" not in said
        assert "ROCM" not in said
    # A latent cache has blocks of any size; only an index that chooses keys one by one asks for its own.
    sparse = any(group.mixer.sparse_top_k for group in made.shape.groups)
    assert value(made, "block_size") == 16 or (sparse and made.engine == "vllm")
    # The dtype of the cache shrinks no weights, and formats are those that the chip multiplies.
    form = value(made, "quantization")
    if form not in ("none", made.shape.weight_format):
        assert {"fp8": "fp8", "mxfp4": "fp4", "int8": "int8", "int4": "bf16"}[form] in made.chip.flops
    # No decode runs at the rate of large products.
    peak = max(made.chip.flops.values()) * made.num_gpus
    assert prediction.total_tok_s * 2 * made.shape.active_weights < peak
    assert value(made, "gpu_memory_utilization") == 0.9


def says_why(made: Plan) -> None:
    for decision in made.decisions:
        assert decision.reason
    if made.command is None:
        assert made.engine == "headrace"
        assert any(made.gaps[0] in notice for notice in made.notices)
    else:
        assert made.command.engine == made.engine
        assert all(flag.reason for flag in (*made.command.flags, *made.command.variables))
