"""Every None becomes a value with a reason; what a user gives wins or fails with what would work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from headrace.cache_groups import same_layout
from headrace.config import OBJECTIVES, EngineConfig
from headrace.errors import ConfigError, OutOfMemoryError
from headrace.model_config import ModelConfig
from headrace.planner.decisions import decide_before_load, decide_mixed_step, decide_num_pages
from headrace.planner.record import Decision
from headrace.step import WorkerFacts

MODEL = ModelConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "torch_dtype": "float32",
    }
)


OnGpus = Callable[..., None]


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> OnGpus:
    """Makes up the GPUs of this machine, by name."""

    def pretend(*names: str) -> None:
        monkeypatch.setattr("headrace.planner.fp8_cache.read_gpus", lambda: [(name, 150 << 30) for name in names])

    return pretend


def facts(available: int, device: str = "cuda") -> WorkerFacts:
    return WorkerFacts(device, "a device", 10**9, available, same_layout(16, 1000), 0, "ANY")


def test_every_derived_field_is_settled_and_explained() -> None:
    config, decisions = decide_before_load(EngineConfig(), MODEL, "cpu")
    assert config.device == "cpu"
    assert config.dtype == "float32"
    assert config.max_model_len == 512
    assert None not in (config.max_num_seqs, config.max_num_batched_tokens, config.cpu_threads)
    assert all(decision.reason for decision in decisions)
    assert {decision.source for decision in decisions} == {"derived"}


def test_a_given_value_wins_and_is_marked() -> None:
    config, decisions = decide_before_load(EngineConfig(max_model_len=100, dtype="half"), MODEL, "cpu")
    assert (config.max_model_len, config.dtype) == (100, "float16")
    assert {d.field for d in decisions if d.source == "user"} == {"max_model_len", "dtype"}


@pytest.mark.parametrize(
    ("gpus", "given", "settled"),
    [
        (["NVIDIA H200"], {}, "bfloat16"),
        (["NVIDIA H200"], {"objective": "interactive"}, "bfloat16"),
        (["NVIDIA H200"], {"objective": "latency"}, "bfloat16"),
        (["NVIDIA H200"] * 2, {"objective": "throughput"}, "fp8_e4m3"),
        (["NVIDIA H200"], {"objective": "throughput", "dtype": "float32"}, "float32"),
        (["NVIDIA H200"], {"objective": "throughput", "kv_cache_dtype": "bfloat16"}, "bfloat16"),
        (["NVIDIA H200"], {"objective": "throughput", "batch_invariant": True}, "bfloat16"),
        (["NVIDIA H200", "NVIDIA A100"], {"objective": "throughput"}, "bfloat16"),
        (["AMD Instinct MI300X"], {"objective": "throughput"}, "bfloat16"),
        (["a GPU that nobody knows"], {"objective": "throughput"}, "bfloat16"),
        ([], {"objective": "throughput"}, "bfloat16"),
    ],
)
def test_the_kv_cache_is_rounded_for_throughput_alone(
    gpus: list[str], given: dict[str, Any], settled: str, on_gpus: OnGpus
) -> None:
    on_gpus(*gpus)
    config, decisions = decide_before_load(EngineConfig(**given), MODEL, "cuda")
    assert config.kv_cache_dtype == settled
    reason = next(d for d in decisions if d.field == "kv_cache_dtype").reason
    assert ("--objective throughput takes it" in reason) == (settled == "fp8_e4m3")


@pytest.mark.parametrize(
    ("gpu", "given", "named"),
    [
        ("NVIDIA H200", {}, True),
        ("NVIDIA H200", {"objective": "latency"}, False),
        ("NVIDIA H200", {"dtype": "float32"}, False),
        ("NVIDIA A100", {}, False),
    ],
)
def test_a_default_start_names_in_one_line_what_rounding_the_cache_would_give(
    gpu: str, given: dict[str, Any], named: bool, on_gpus: OnGpus
) -> None:
    on_gpus(gpu)
    _, decisions = decide_before_load(EngineConfig(**given), MODEL, "cuda")
    lines = [str(decision) for decision in decisions if "fp8" in str(decision)]
    said = (
        "kv_cache_dtype = bfloat16: the model's, so the cache rounds nothing (instead of fp8, which rounds: twice the "
        "tokens, read in half the time, by --kv-cache-dtype fp8 or --objective throughput)"
    )
    assert lines == [said] * named


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_cpu_never_rounds_the_cache(objective: str, on_gpus: OnGpus) -> None:
    on_gpus("NVIDIA H200")
    config, decisions = decide_before_load(EngineConfig(objective=objective), MODEL, "cpu")
    assert config.kv_cache_dtype == "float32"
    assert not any("fp8" in str(decision) for decision in decisions)


def test_float32_checkpoints_run_in_bfloat16_on_a_gpu_unless_told() -> None:
    assert decide_before_load(EngineConfig(), MODEL, "cuda")[0].dtype == "bfloat16"
    assert decide_before_load(EngineConfig(dtype="float32"), MODEL, "cuda")[0].dtype == "float32"


@pytest.mark.parametrize(
    ("given", "quantization", "settled", "source"),
    [
        ("auto", None, "float32", "derived"),
        ("auto", {"kv_cache_scheme": {"type": "float", "num_bits": 8}}, "fp8_e4m3", "derived"),
        ("auto", {"kv_cache_scheme": {"type": "int", "num_bits": 8}}, "float32", "derived"),
        ("bfloat16", {"kv_cache_scheme": {"type": "float", "num_bits": 8}}, "bfloat16", "user"),
        ("fp8", None, "fp8_e4m3", "user"),
        ("fp8_e5m2", None, "fp8_e5m2", "user"),
    ],
)
def test_the_kv_cache_is_the_models_or_the_checkpoints_or_the_users(
    given: str, quantization: dict | None, settled: str, source: str
) -> None:
    alone = (
        None if quantization is None else {"quant_method": "compressed-tensors", "config_groups": {}, **quantization}
    )
    model = dataclasses.replace(MODEL, quantization=alone)
    config, decisions = decide_before_load(EngineConfig(kv_cache_dtype=given), model, "cpu")
    assert config.kv_cache_dtype == settled
    assert next(d for d in decisions if d.field == "kv_cache_dtype").source == source


@pytest.mark.parametrize("asked", [None, "gptq", "compressed-tensors"])
def test_a_checkpoint_keeps_its_format_whatever_word_is_used_for_it(asked: str | None) -> None:
    weights = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    model = dataclasses.replace(MODEL, quantization=quantization)
    config, decisions = decide_before_load(EngineConfig(quantization=asked), model, "cpu")
    assert config.quantization is None
    (decision,) = [one for one in decisions if one.field == "quantization"]
    assert (decision.value[:4], decision.reason) == ("int4", "the checkpoint's (compressed-tensors)")
    with pytest.raises(ConfigError, match="does not go with batch_invariant on a GPU"):
        decide_before_load(EngineConfig(quantization=asked, batch_invariant=True), model, "cuda")


def test_the_attention_backend_is_a_decision() -> None:
    def of(**given: object) -> Decision:
        decisions = decide_before_load(EngineConfig(**given), MODEL, "cpu")[1]
        return next(decision for decision in decisions if decision.field == "attention_backend")

    derived = of()
    assert (derived.value, derived.source) == ("TORCH_SDPA", "derived")
    assert derived.runner_up == "TRITON_ATTN: runs on GPUs, not on cpu"
    assert of(attention_backend="TORCH_SDPA").source == "user"


def test_a_small_token_budget_bounds_the_sequences() -> None:
    config, _ = decide_before_load(EngineConfig(max_num_batched_tokens=16), MODEL, "cpu")
    assert config.max_num_seqs == 16


@pytest.mark.parametrize(("expected", "seqs"), [(1, 8), (8, 8), (9, 16), (64, 64), (65, 128), (5000, 1024)])
def test_what_is_expected_bounds_the_sequences(expected: int, seqs: int) -> None:
    config, decisions = decide_before_load(EngineConfig(expected_concurrency=expected), MODEL, "cuda")
    assert config.max_num_seqs == seqs
    assert str(expected) in next(d for d in decisions if d.field == "max_num_seqs").reason


@pytest.mark.parametrize(("top_k", "device", "budget"), [(8, "cuda", 16384), (16, "cuda", 8192), (8, "cpu", 2048)])
def test_experts_that_see_few_tokens_raise_the_token_budget(top_k: int, device: str, budget: int) -> None:
    experts = {"num_experts": 128, "num_experts_per_tok": top_k, "moe_intermediate_size": 768}
    raw = {**MODEL.raw, "architectures": ["Qwen3MoeForCausalLM"], **experts}
    config, _ = decide_before_load(EngineConfig(), ModelConfig.from_dict(raw), device)
    assert config.max_num_batched_tokens == budget


GUESSES = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(("guesses", "tokens", "each"), [({}, 5000, "a token"), (GUESSES, 20_000, "4 tokens")])
def test_many_sequences_raise_the_token_budget(guesses: dict[str, object], tokens: int, each: str) -> None:
    config, decisions = decide_before_load(EngineConfig(max_num_seqs=5000, speculative_config=guesses), MODEL, "cpu")
    assert config.max_num_batched_tokens == tokens
    (reason,) = [decision.reason for decision in decisions if decision.field == "max_num_batched_tokens"]
    assert reason == f"every running request gets {each} in every step"
    _, decisions = decide_before_load(EngineConfig(max_num_seqs=2048), MODEL, "cpu")
    assert "bounds a step on CPU" in [decision.reason for decision in decisions], "which has room for them anyway"


def test_sequences_with_guesses_may_fill_a_step_and_no_more() -> None:
    given = {"speculative_config": GUESSES, "max_num_batched_tokens": 64}
    assert decide_before_load(EngineConfig(max_num_seqs=16, **given), MODEL, "cpu")[0].max_num_seqs == 16
    with pytest.raises(ConfigError, match=r"max_num_seqs \(17\) must be at most 16: .* gets 4 tokens"):
        decide_before_load(EngineConfig(max_num_seqs=17, **given), MODEL, "cpu")


def test_without_chunked_prefill_a_whole_prompt_fits_into_a_step() -> None:
    long = ModelConfig.from_dict({**MODEL.raw, "max_position_embeddings": 40_000})
    config, _ = decide_before_load(EngineConfig(enable_chunked_prefill=False), long, "cpu")
    assert config.max_num_batched_tokens == 40_000
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens .*40000.* got 100"):
        decide_before_load(EngineConfig(enable_chunked_prefill=False, max_num_batched_tokens=100), long, "cpu")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_model_len": 513}, r"max_model_len must be at most 512 .* got 513"),
        ({"tensor_parallel_size": 3}, r"tensor_parallel_size must divide .* 8 attention heads, got 3"),
    ],
)
def test_impossible_values_name_field_value_and_limit(given: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decide_before_load(EngineConfig(**given), MODEL, "cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batch_invariance_is_said_to_cost(device: str) -> None:
    _, decisions = decide_before_load(EngineConfig(batch_invariant=True, tensor_parallel_size=2), MODEL, device)
    (decision,) = [d for d in decisions if d.field == "batch_invariant"]
    assert (decision.value, decision.source) == (True, "user")
    assert not [d for d in decide_before_load(EngineConfig(), MODEL, device)[1] if d.field == "batch_invariant"]


def test_batch_invariance_needs_sums_whose_order_is_known() -> None:
    """Four ranks sum eight slices in one tree; nothing does so for experts."""
    config = EngineConfig(batch_invariant=True, tensor_parallel_size=4)
    decide_before_load(config, MODEL, "cuda")
    decide_before_load(config, MODEL, "cpu")
    raw = {**MODEL.raw, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
    experts = ModelConfig.from_dict(raw)
    with pytest.raises(ConfigError, match="batch_invariant needs tensor_parallel_size 1 or 2 for this model, got 4"):
        decide_before_load(config, experts, "cuda")


def resolved(**given: object) -> EngineConfig:
    return decide_before_load(EngineConfig(**given), MODEL, "cuda")[0]


def test_blocks_fill_what_the_tightest_rank_has() -> None:
    count, decisions = decide_num_pages(resolved(), [facts(50_000), facts(40_000)])
    assert count == 40
    assert decisions[0].source == "measured"


def test_no_more_blocks_than_can_ever_be_used() -> None:
    count, _ = decide_num_pages(resolved(max_num_seqs=2), [facts(10**9)])
    assert count == 2 * 2 * 512 // 16


def test_on_cpu_only_a_share_of_memory_is_taken() -> None:
    config = decide_before_load(EngineConfig(max_num_seqs=1024), MODEL, "cpu")[0]
    assert decide_num_pages(config, [facts(4_000_000, "cpu")])[0] == 1000
    config = decide_before_load(EngineConfig(cpu_kv_cache_gib=0.001), MODEL, "cpu")[0]
    assert decide_num_pages(config, [facts(10**9, "cpu")])[0] == int(0.001 * 2**30) // 1000


def test_too_little_memory_says_what_would_fit() -> None:
    with pytest.raises(OutOfMemoryError, match=r"room for 160 tokens.*--max-model-len to 160"):
        decide_num_pages(resolved(), [facts(10_000)])


@pytest.mark.parametrize(
    ("device", "said"),
    [("cuda", r"2.00 GiB are missing.*--gpu-memory-utilization \(it is 0.9\)"), ("cpu", "raise --cpu-kv-cache-gib or")],
)
def test_no_room_at_all_says_how_much_is_missing_and_what_gives_more(device: str, said: str) -> None:
    with pytest.raises(OutOfMemoryError, match=said):
        decide_num_pages(resolved(), [facts(50_000, device), facts(-(2 << 30), device)])


def test_an_override_is_taken_as_it_is() -> None:
    count, decisions = decide_num_pages(resolved(num_gpu_blocks_override=7), [facts(0)])
    assert count == 7
    assert decisions[0].source == "user"


def timed(*times: tuple[int, float]) -> WorkerFacts:
    return WorkerFacts("cuda", "a device", 10**9, 10**9, same_layout(16, 1000), 0, "ANY", step_times=list(times))


def test_a_step_with_decodes_is_the_smallest_that_prefills_at_nearly_full_rate() -> None:
    rank = timed((128, 7.0), (256, 7.1), (384, 9.8), (512, 12.9), (2048, 50.0))
    size, (decision,) = decide_mixed_step(resolved(), [rank])
    assert (size, decision.value, decision.source) == (384, 384, "measured")
    assert str(decision) == (
        "mixed_step_tokens = 384: decodes wait for the whole step; 384 tokens in 9.8 ms reach 96% of the best prefill "
        "rate (2048 tokens in 50.0 ms) (instead of 256 tokens in 7.1 ms: 88%)"
    )
    slow_rank = timed((128, 7.0), (256, 7.1), (384, 11.0), (512, 12.9), (2048, 50.0))
    assert decide_mixed_step(resolved(), [rank, slow_rank])[0] == 512
    assert decide_mixed_step(resolved(max_num_batched_tokens=256, max_num_seqs=8), [rank])[0] == 256


@pytest.mark.parametrize(("objective", "size"), [("latency", 256), ("interactive", 384), ("throughput", 512)])
def test_an_objective_moves_how_much_of_the_prefill_rate_decodes_pay_for(objective: str, size: int) -> None:
    rank = timed((128, 7.0), (256, 7.1), (384, 9.8), (512, 12.4), (2048, 50.0))
    assert decide_mixed_step(resolved(objective=objective), [rank])[0] == size


def test_where_size_costs_nothing_the_largest_measured_step_is_taken() -> None:
    size, (decision,) = decide_mixed_step(resolved(), [timed((128, 2.0), (2048, 2.1))])
    assert size == 2048
    assert "128 tokens in 2.0 ms: 7%" in decision.runner_up
    assert decide_mixed_step(resolved(), [timed((128, 1.0), (256, 2.0))])[1][0].runner_up == ""


def test_steps_stay_whole_where_nothing_was_measured_or_prompts_are_not_cut() -> None:
    assert decide_mixed_step(resolved(), [facts(0)]) == (None, [])
    assert decide_mixed_step(resolved(max_num_batched_tokens=64), [timed((128, 1.0))]) == (None, [])
    assert decide_mixed_step(resolved(enable_chunked_prefill=False), [timed((128, 1.0))]) == (None, [])


def test_nobody_is_spared_where_answers_are_handed_over_whole() -> None:
    size, (decision,) = decide_mixed_step(resolved(), [timed((128, 2.0), (2048, 2.1))], streamed=False)
    assert size is decision.value is None
    assert "nobody waits" in decision.reason
