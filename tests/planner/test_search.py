"""Layouts: what rules forbid, how limits come about, and what is ranked first."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from headrace.planner import deployment as deployment_module
from headrace.planner import memory_map as memory_map_module
from headrace.planner import search as search_module
from headrace.planner import weights
from headrace.planner.catalogue import CheckpointConfig, catalogue, find_model
from headrace.planner.chips import find_chip
from headrace.planner.layouts import layouts, name_of, reasons
from headrace.planner.parallel import Parallel
from headrace.planner.plan_request import PlanRequest
from headrace.planner.scenario import Scenario
from headrace.planner.search import Candidate, SearchResult, evaluate, score, search
from headrace.planner.shapes import shape_of

H200 = find_chip("h200")
DENSE, SPARSE, LATENT, ULTRA = (find_model(name) for name in ("llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3",
                                                              "llama-4-maverick"))  # fmt: skip


def scenario(shape: Any = DENSE, num_gpus: int = 8, *, chip: Any = H200, **asked: Any) -> Scenario:
    asked = {"engine": "vllm", "kv_cache_dtype": "bfloat16", **asked}
    request = PlanRequest(model=shape.name, gpu=chip.name, **asked).filled(shape.spec.max_position_embeddings)
    return Scenario(request, shape, CheckpointConfig(shape.name, {}, ""), chip, num_gpus)


def candidate(scenario: Scenario, **parallel: Any) -> Candidate:
    found = evaluate(scenario, Parallel(**parallel))
    assert isinstance(found, Candidate)
    return found


@pytest.mark.parametrize(
    ("parallel", "name"),
    [
        (Parallel(), "TP1"),
        (Parallel(tp=8), "TP8"),
        (Parallel(tp=2, dp=4), "4 x TP2"),
        (Parallel(tp=8, pp=2), "TP8 PP2"),
        (Parallel(tp=8, ep=True), "TP8, EP8"),
        (Parallel(dp=8, dp_attention=True), "DP8 attention, TP8 experts"),
        (Parallel(tp=2, dp=4, ep=True, dp_attention=True), "DP4 x TP2 attention, EP8 experts"),
    ],
)
def test_a_layout_has_a_name(parallel: Parallel, name: str) -> None:
    assert name_of(parallel) == name


def test_layouts_use_all_gpus_or_as_many_as_come_out_even() -> None:
    assert {name_of(parallel) for parallel in layouts(6, DENSE) if parallel.pp == 1} == {
        "6 x TP1", "3 x TP2", "2 x TP3", "TP4", "TP5", "TP6",
    }  # fmt: skip
    assert all(parallel.gpus <= 6 for parallel in layouts(6, SPARSE))
    assert all(parallel.dp <= 2 for parallel in layouts(8, SPARSE, most_ranks=2))
    assert not any(parallel.ep or parallel.dp_attention for parallel in layouts(8, DENSE))


@pytest.mark.parametrize(
    ("shape", "parallel", "reason"),
    [
        (DENSE, Parallel(tp=3), "32 attention heads do not divide by 3"),
        (DENSE, Parallel(tp=16), "leaves the node of 8"),
        (DENSE, Parallel(tp=5), "8 KV heads neither divide by 5 nor go into it"),
        (DENSE, Parallel(tp=2, ep=True), "a dense model has no experts"),
        (DENSE, Parallel(pp=33), "33 stages for 32 layers"),
        (LATENT, Parallel(tp=6, pp=2), "do not come out even on nodes of 8"),
        (SPARSE, Parallel(dp=3, dp_attention=True, ep=True), "128 experts do not divide by 3"),
        (ULTRA, Parallel(tp=8, ep=True), "uses 0.78% of the experts"),
        (LATENT, Parallel(dp=16, dp_attention=True), "summed over the network"),
    ],
)
def test_rules_of_models(shape: Any, parallel: Parallel, reason: str) -> None:
    assert any(reason in found for found in reasons(parallel, shape, H200))


def test_ranks_begin_with_a_group_of_inputs_that_share_a_scale() -> None:
    """Qwen2.5-72B's down projection has 29568 inputs, 231 groups of 128: no two ranks can share them. Blocks of fp8 may
    be cut: they are widened then."""
    config = {
        **catalogue()["llama-3.1-70b"].config, "intermediate_size": 29568, "architectures": ["Qwen2ForCausalLM"]
    }  # fmt: skip
    awq = shape_of({**config, "quantization_config": {"quant_method": "awq", "bits": 4}}, "awq")
    (why,) = reasons(Parallel(tp=8), awq, H200)
    assert why == "29568 inputs of mlp.down_proj.weight in groups of 128 do not divide by 8"
    assert reasons(Parallel(), awq, H200) == []
    finer = {"quant_method": "awq", "bits": 4, "group_size": 32}
    assert reasons(Parallel(tp=4), shape_of({**config, "quantization_config": finer}, "awq"), H200) == []
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert reasons(Parallel(tp=8), shape_of({**config, "quantization_config": blocks}, "fp8"), H200) == []
    experts = SPARSE.in_format("int4")  # 768 inputs
    assert reasons(Parallel(tp=8), experts, H200) == ["experts of 768 have 6 groups of 128 inputs, fewer than 8 GPUs"]
    assert reasons(Parallel(tp=8, ep=True), experts, H200) == reasons(Parallel(tp=4), experts, H200) == []


@pytest.mark.parametrize(
    ("shape", "parallel"),
    [
        (DENSE, Parallel(tp=8)),
        (SPARSE, Parallel(tp=4, dp=2)),
        (SPARSE, Parallel(tp=8, ep=True)),
        (LATENT, Parallel(dp=8, dp_attention=True, ep=True)),
        (LATENT, Parallel(dp=16, dp_attention=True, ep=True)),
        (ULTRA, Parallel(dp=8, dp_attention=True)),
        (DENSE, Parallel(tp=8, pp=2)),
    ],
)
def test_what_no_rule_forbids(shape: Any, parallel: Parallel) -> None:
    assert reasons(parallel, shape, H200) == []


def test_more_kv_heads_than_ranks_or_fewer_both_split() -> None:
    few = find_model("qwen3-235b-a22b")
    assert {group.mixer.num_kv_heads for group in few.groups} == {4}
    assert not any("KV heads" in why for why in reasons(Parallel(tp=8), few, H200))


def test_the_fewest_waits_win_at_one_request_and_replicas_at_many() -> None:
    assert search(scenario(find_model("llama-3.1-70b"), 8, objective="latency")).best.parallel.tp == 8
    many = search(scenario(DENSE, 8, objective="throughput", concurrency=2048)).best.parallel
    assert (many.tp, many.replicas) == (1, 8)


def test_no_more_ranks_than_requests() -> None:
    assert search(scenario(DENSE, 8, objective="throughput", concurrency=2)).best.parallel.dp <= 2


def test_pins_are_kept() -> None:
    found = search(scenario(DENSE, 8, tensor_parallel_size=2))
    assert {entry.parallel.tp for entry in found.ranked} == {2}
    found = search(scenario(SPARSE, 8, enable_expert_parallel=True))
    assert found.ranked
    assert all(entry.parallel.ep for entry in found.ranked)
    found = search(scenario(SPARSE, 8, enable_dp_attention=False, data_parallel_size=2))
    assert {(entry.parallel.dp, entry.parallel.dp_attention) for entry in found.ranked} == {(2, False)}


def test_stages_only_where_nothing_else_fits() -> None:
    large = find_model("llama-3.1-405b")
    assert search(scenario(large, 8)).best.parallel.pp == 1
    small = search(scenario(large, 16, chip=find_chip("h100"))).best.parallel
    assert (small.tp, small.pp) == (8, 2)
    pinned = search(scenario(DENSE, 4, pipeline_parallel_size=2)).best.parallel
    assert pinned.pp == 2


def test_a_latent_cache_is_not_copied_for_many_requests() -> None:
    for objective in ("latency", "interactive", "throughput"):
        best = search(scenario(LATENT, 8, objective=objective, concurrency=512)).best
        assert best.parallel.dp_attention, objective
        assert best.parallel.tp == 1, objective


def test_headrace_gets_layouts_that_it_has() -> None:
    found = search(scenario(SPARSE, 8, engine="headrace", objective="throughput", concurrency=512))
    assert {entry.parallel.ep for entry in found.ranked if entry.parallel.dp_attention} == {True}
    assert any(entry.parallel.ep and not entry.parallel.dp_attention for entry in found.ranked)
    assert any("share whole experts alone" in why for why in found.passed_over.values())


def test_nothing_fits_says_what_is_nearest() -> None:
    found = search(scenario(find_model("llama-3.1-405b"), 4))
    assert not found.ranked
    assert found.too_large[0].startswith(("TP4", "TP1 PP4", "TP2 PP2"))
    assert "GiB on each GPU" in found.too_large[0]
    tight = search(scenario(find_model("llama-3.1-70b"), 1, gpu_memory_utilization=0.99, max_model_len=131072))
    assert "missing on each GPU for one sequence of 131072 tokens" in tight.too_large[0]


@pytest.fixture(name="mapped")
def _mapped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layouts whose memory a search maps, as often as it does."""
    names: list[str] = []

    def memory_map(deployment: Any, **limits: Any) -> Any:
        names.append(name_of(deployment.parallel))
        return memory_map_module.memory_map(deployment, **limits)

    monkeypatch.setattr(search_module, "memory_map", memory_map)
    return names


def test_weights_are_counted_once_whatever_limits_a_layout_is_tried_with(
    mapped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []

    def layer_bytes(shape: Any, group: Any, parallel: Parallel, *held: Any) -> dict[str, float]:
        counted.append((group, parallel))
        return weights.layer_bytes(shape, group, parallel, *held)

    monkeypatch.setattr(deployment_module, "layer_bytes", layer_bytes)
    asked = {"engine": "headrace", "objective": "throughput", "input_len": 8192, "concurrency": 2048}
    found = search(scenario(LATENT, **asked))
    assert mapped.count(found.best.name) > 2  # the cache is short, so smaller steps are tried
    assert len(counted) == len(set(counted)) == len(LATENT.groups) * len(set(mapped))


def test_no_smaller_step_is_tried_where_weights_alone_are_too_large(mapped: list[str]) -> None:
    found = search(scenario(LATENT, chip=find_chip("l40s"), engine="headrace"))
    assert not found.ranked
    assert all("weights take" in why for why in found.too_large)
    assert len(mapped) == len(set(mapped)) == len(found.too_large) > 8


def test_the_longest_sequence_is_what_the_cache_holds() -> None:
    tight = candidate(scenario(find_model("qwen3-32b"), 1, chip=find_chip("h100")))
    assert tight.max_model_len <= tight.memory.kv_tokens
    assert tight.max_model_len < 40960
    assert tight.memory.fits
    assert candidate(scenario(DENSE, 1)).max_model_len == 131072
    assert candidate(scenario(DENSE, 1, max_model_len=4096)).max_model_len == 4096


def test_sequences_are_bounded_by_what_is_expected_and_by_the_cache() -> None:
    assert candidate(scenario(DENSE, 1, concurrency=50)).limits.max_num_seqs == 64
    assert candidate(scenario(DENSE, 8, concurrency=400), tp=1, dp=8).limits.max_num_seqs == 64
    full = candidate(scenario(DENSE, 1, objective="throughput", input_len=8192, output_len=1024))
    seqs = full.decisions["max_num_seqs"]
    assert seqs.value < 1024
    assert "cache holds" in seqs.reason
    assert full.workload.concurrency == seqs.value
    given = candidate(scenario(DENSE, 1, max_num_seqs=7, concurrency=50)).decisions["max_num_seqs"]
    assert (given.value, given.source) == (7, "user")


def test_vllm_gets_a_budget_that_decodes_can_wait_for() -> None:
    budgets = {
        objective: candidate(scenario(DENSE, 1, objective=objective)).limits.max_num_batched_tokens
        for objective in ("latency", "interactive", "throughput")
    }
    assert budgets["latency"] <= budgets["interactive"] <= budgets["throughput"]
    assert budgets["throughput"] >= 8192
    assert candidate(scenario(DENSE, 1, max_num_batched_tokens=3000)).limits.max_num_batched_tokens == 3000
    whole = candidate(scenario(DENSE, 1, enable_chunked_prefill=False, max_model_len=20_000)).limits
    assert whole.max_num_batched_tokens == 20_000


def test_headrace_cuts_prompts_for_decodes_and_keeps_its_budget() -> None:
    found = candidate(scenario(DENSE, 1, engine="headrace"))
    assert found.limits.max_num_batched_tokens == 8192
    assert found.limits.mixed_step_tokens == found.decisions["mixed_step_tokens"].value
    assert found.limits.mixed_step_tokens in search_module.MIXED_SIZES
    assert "mixed_step_tokens" not in candidate(scenario(DENSE, 1)).decisions


def test_what_left_a_window_is_room_for_more() -> None:
    """Half of gpt-oss-120b's layers see 128 keys; requests here are as long as the usual ones, or longer."""
    usual = candidate(scenario(find_model("gpt-oss-120b"), 1, engine="headrace"))
    layout = usual.memory.layout
    assert usual.limits.kv_tokens == usual.memory.tokens_in(scenario(find_model("gpt-oss-120b"), 1).tokens)
    assert usual.limits.kv_tokens > 1.5 * usual.memory.kv_pool / layout.bytes_per_token


def test_objectives_score_what_they_say() -> None:
    one = candidate(scenario(DENSE, 1, concurrency=1)).prediction
    slow = dataclasses.replace(one, e2e_s=one.e2e_s * 2, output_tok_s=one.output_tok_s * 3, itl_ms=80.0)
    assert score("latency", one) > score("latency", slow)
    assert score("throughput", slow) > score("throughput", one)
    assert score("interactive", one) > 0 > score("interactive", slow)
    late = dataclasses.replace(one, ttft_ms=9000.0)
    assert score("interactive", late) < score("interactive", slow)


def test_of_about_equal_layouts_the_simplest_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    same = candidate(scenario(DENSE, 1)).prediction
    monkeypatch.setattr(search_module, "predict", lambda *args: same)
    assert search(scenario(SPARSE, 8, objective="throughput", concurrency=64)).best.parallel == Parallel(1, 1, 8)


def test_an_empty_search_has_no_best() -> None:
    with pytest.raises(IndexError):
        _ = SearchResult([]).best
