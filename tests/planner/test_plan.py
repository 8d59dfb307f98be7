"""A plan as a whole: every decision with its reason and source, what cannot run with what can, and JSON."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.planner.catalogue import find_config
from headrace.planner.chips import find_chip
from headrace.planner.decisions import WIDE_STEP, WIDER_STEP
from headrace.planner.plan import Plan, make_plan
from headrace.planner.plan_json import to_json
from headrace.planner.plan_request import PlanRequest
from headrace.planner.record import Decision

FIELDS = [
    "num_gpus", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel",
    "enable_dp_attention", "dtype", "quantization", "kv_cache_dtype",
    "attention_backend", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "enable_chunked_prefill", "cudagraph_mode", "cudagraph_capture_sizes", "async_scheduling", "speculative_config",
    "gpu_memory_utilization",
]  # fmt: skip


def plan(model: str = "llama-3.1-8b", gpu: str = "h200", **asked: Any) -> Plan:
    return _made(model, gpu, json.dumps(asked))


@cache
def _made(model: str, gpu: str, asked: str) -> Plan:
    """Several tests look at the same plan."""
    return make_plan(PlanRequest(model=model, gpu=gpu, **json.loads(asked)))


def value(made: Plan, field: str) -> Any:
    return made.decision(field).value


def rates_told(decision: Decision, other: str) -> list[float]:
    """Of the runner-up `other`, and of what was taken: tokens held, then tokens/s"""
    held, speed = r"([\d,]+) tokens held instead of ([\d,]+)", r"([\d,]+) tok/s instead of ([\d,]+)"
    found = re.fullmatch(f"{other}; {held}, {speed}", decision.runner_up)
    return [float(number.replace(",", "")) for number in found.groups()]


def test_405b_on_eight_mi300x() -> None:
    made = plan("llama-3.1-405b", "mi300x", num_gpus=8, input_len=128, output_len=2048, concurrency=64,
                price_per_gpu_hour=4.0)  # fmt: skip
    assert made.feasible
    assert made.layout == "TP8"
    assert made.memory.fits
    assert value(made, "max_num_seqs") == 64
    assert value(made, "max_model_len") == 131072
    assert made.cost.per_hour == 32.0
    assert made.cost.per_million_output == pytest.approx(32.0 / 3600 / made.prediction.output_tok_s * 1e6)
    assert made.cost.per_million_total < made.cost.per_million_output
    assert any("have not run there" in notice for notice in made.notices)


@pytest.mark.parametrize("engine", ["headrace", "vllm"])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-120b", "deepseek-r1", "deepseek-v3.2"])
def test_every_decision_has_a_reason_and_a_source(model: str, engine: str) -> None:
    made = plan(model, num_gpus=8, engine=engine)
    fields = [decision.field for decision in made.decisions]
    assert [field for field in fields if field != "mixed_step_tokens"] == FIELDS
    assert ("mixed_step_tokens" in fields) == (engine == "headrace")
    for decision in made.decisions:
        assert decision.reason, decision
        assert decision.source in ("user", "derived", "measured"), decision
        assert "\n" not in decision.reason


PINS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "data_parallel_size": 2,
    "attention_backend": "TORCH_SDPA",
    "dtype": "float16",
    "quantization": "fp8",
    "kv_cache_dtype": "fp8_e5m2",
    "block_size": 32,
    "max_model_len": 5000,
    "max_num_seqs": 33,
    "max_num_batched_tokens": 4000,
    "enable_chunked_prefill": False,
    "async_scheduling": False,
    "gpu_memory_utilization": 0.8,
}


@pytest.mark.parametrize("field", PINS)
def test_what_is_pinned_wins_and_is_marked(field: str) -> None:
    more = {"max_num_batched_tokens": 8000, "max_model_len": 8000} if field == "enable_chunked_prefill" else {}
    made = plan(num_gpus=4, **{field: PINS[field]}, **more)
    assert made.feasible, made.problems
    decision = made.decision(field)
    assert (decision.value, decision.source) == (PINS[field], "user")


def test_graphs_follow_the_rules_of_serving() -> None:
    assert value(plan(compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY"}), "cudagraph_mode") == (
        "FULL_DECODE_ONLY"
    )
    eager = plan(enforce_eager=True)
    assert value(eager, "cudagraph_mode") == "NONE"
    assert value(eager, "cudagraph_capture_sizes") == []
    assert value(plan(gpu="cpu"), "cudagraph_mode") == "NONE"
    assert value(plan(attention_backend="TORCH_SDPA"), "cudagraph_mode") == "PIECEWISE"


@pytest.mark.parametrize(
    ("model", "gpu", "backend"),
    [
        ("deepseek-r1", "h200", "TRITON_ATTN"),
        ("deepseek-v2-lite", "cpu", "TORCH_SDPA"),
        ("gpt-oss-20b", "h200", "TRITON_ATTN"),
    ],
)
def test_the_attention_backend_is_the_one_that_serving_takes(model: str, gpu: str, backend: str) -> None:
    made = plan(model, gpu, num_gpus=8 if gpu == "h200" else 1)
    assert value(made, "attention_backend") == backend
    if gpu == "cpu":
        assert made.decision("attention_backend").runner_up == "TRITON_ATTN: runs on GPUs, not on cpu"


def test_a_model_that_headrace_cannot_serve_has_no_attention_backend(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(find_config("llama-3.1-8b").config | {"dtype": "float64"}))
    made = plan(str(tmp_path))
    assert "`dtype` is 'float64'" in made.gaps[0]
    assert made.decision("attention_backend").reason == "headrace cannot serve the model yet"


def test_gpus_that_nobody_counted_are_the_fewest_that_hold_the_model() -> None:
    small = plan("llama-3.1-8b")
    assert small.num_gpus == 1
    assert re.fullmatch(r"2, as (TP2|2 x TP1): [\d.]+ ms a token, [\d,]+ tok/s", small.decision("num_gpus").runner_up)
    large = plan("llama-3.1-405b", "mi300x")
    assert (large.num_gpus, large.decision("num_gpus").source) == (8, "derived")
    four = plan(tensor_parallel_size=4)
    assert four.num_gpus == 4
    assert any("sums over 4 GPUs (reckoned from 2 GPUs)" in notice for notice in four.notices)
    here = make_plan(PlanRequest(model="llama-3.1-8b"), (find_chip("h100"), 2))
    assert (here.chip.name, here.num_gpus, here.decision("num_gpus").source) == ("h100", 2, "measured")


def test_as_many_nodes_as_are_used() -> None:
    made = plan("llama-3.1-405b", "l40s")
    assert (made.num_gpus, made.layout) == (24, "TP8 PP3")
    assert not any("idle" in notice for notice in made.notices)


def test_where_the_cache_is_short_smaller_steps_leave_more_of_it() -> None:
    tight: Any = {"num_gpus": 1, "quantization": "fp8", "gpu_memory_utilization": 0.91}
    made = plan("llama-3.3-70b", "h100", **tight)
    budget = made.decision("max_num_batched_tokens")
    assert (budget.value, budget.runner_up) == (2048, "8192")
    fixed = plan("llama-3.3-70b", "h100", max_num_batched_tokens=8192, **tight).prediction
    assert made.prediction.output_tok_s > 1.5 * fixed.output_tok_s
    flags = {flag.name: flag.value for flag in made.command.flags}
    assert flags["--max-num-batched-tokens"] == "2048"


def test_a_plan_and_a_start_give_mixtures_the_same_steps() -> None:
    assert plan("qwen3-30b-a3b", "h200", num_gpus=1).decision("max_num_batched_tokens").value == WIDER_STEP
    assert plan("mixtral-8x7b", "h200", num_gpus=2).decision("max_num_batched_tokens").value == WIDE_STEP


def test_an_fp8_cache_is_taken_for_throughput_and_what_the_other_would_give_is_said() -> None:
    load: Any = {"input_len": 2048, "output_len": 256, "concurrency": 500, "objective": "throughput"}
    made, plain = plan("llama-3.1-8b", "h200", **load), plan("llama-3.1-8b", "h200", **load, kv_cache_dtype="bfloat16")
    decision = made.decision("kv_cache_dtype")
    assert decision.value == "fp8_e4m3"
    held, most, other, ours = rates_told(decision, "bfloat16, which rounds nothing")
    assert most > 1.9 * held
    assert ours > 1.05 * other
    assert other == pytest.approx(plain.prediction.output_tok_s, rel=0.02)
    assert "--objective throughput" in made.command.line
    assert "--kv-cache-dtype" not in made.command.line  # headrace measures first
    objective = next(flag for flag in made.command.flags if flag.name == "--objective")
    assert "an fp8 KV cache, which rounds" in objective.reason
    for changes in ({"dtype": "float32"}, {"gpu": "mi300x"}, {"gpu": "a100"}, {"engine": "vllm"}):
        terms = {"model": "llama-3.1-8b", "gpu": "h200"} | load | changes
        assert plan(terms.pop("model"), terms.pop("gpu"), **terms).decision("kv_cache_dtype").value != "fp8_e4m3"
    latents = plan("deepseek-v2-lite", "h200", num_gpus=1, **load)  # as headrace serve decides for it
    assert latents.decision("kv_cache_dtype").value == "fp8_e4m3"


@pytest.mark.parametrize("objective", ["interactive", "latency"])
def test_an_fp8_cache_is_proposed_with_what_it_would_give_and_how_to_ask_for_it(objective: str) -> None:
    shape: Any = {"input_len": 2048, "output_len": 256, "concurrency": 500, "objective": objective}
    made, other = plan("llama-3.1-8b", "h200", **shape), plan("llama-3.1-8b", "h200", **shape, kv_cache_dtype="fp8")
    decision = made.decision("kv_cache_dtype")
    assert decision.value == "bfloat16"
    asked_by = "--kv-cache-dtype fp8" + (" or --objective throughput" if objective == "interactive" else "")
    proposal = f"fp8, which rounds: twice the tokens, read in half the time, by {asked_by}"
    most, held, said, ours = rates_told(decision, proposal)
    assert most > 1.9 * held
    assert said > 1.05 * ours
    assert said == pytest.approx(other.prediction.output_tok_s, rel=0.02)
    assert other.decision("kv_cache_dtype").runner_up == ""


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (
            {"max_model_len": 512, "input_len": 1024, "output_len": 256},
            "max_model_len 512 is less than a prompt and an",
        ),
        ({"max_model_len": 1}, "max_model_len 1 is less"),
        ({"max_num_batched_tokens": 300, "enable_chunked_prefill": False}, "300 is less than max_model_len .131072"),
    ],
)
def test_what_serve_would_refuse_is_no_plan(asked: dict[str, Any], problem: str) -> None:
    made = plan("llama-3.1-8b", "h200", num_gpus=1, **asked)
    assert re.search(problem, " ".join(made.problems))


def test_float32_takes_twice_the_memory() -> None:
    wide, usual = plan("qwen3-8b", num_gpus=1, dtype="float32"), plan("qwen3-8b", num_gpus=1)
    assert wide.memory.weight_bytes == 2 * usual.memory.weight_bytes
    assert wide.memory.activations > 1.5 * usual.memory.activations
    assert wide.prediction.itl_ms > 1.5 * usual.prediction.itl_ms
    assert any("float32" in notice for notice in wide.notices)
    assert not plan("qwen3-32b", "h100", num_gpus=1, dtype="float32").feasible


def test_lengths_that_nobody_gave_go_into_the_length_that_somebody_gave() -> None:
    made = plan("llama-3.1-8b", "h200", num_gpus=1, max_model_len=512)
    assert made.feasible
    assert (made.request.input_len, made.request.output_len) == (256, 128)


def test_a_load_that_is_too_much_is_said() -> None:
    made = plan("llama-3.1-405b", "mi300x", num_gpus=8, input_len=128, output_len=2048, concurrency=1000)
    assert any("requests to their end: of 1,000 at once some are preempted" in notice for notice in made.notices)
    assert any("nothing here keeps to 50 ms a token after 2 s" in notice for notice in made.notices)
    assert not any("keeps to" in notice for notice in plan().notices)


def test_requests_that_come_at_a_rate_are_as_many_as_come_while_one_is_answered() -> None:
    assert 8 <= value(plan(request_rate=4.0), "max_num_seqs") <= 16
    made = plan(request_rate=1000.0)
    assert value(made, "max_num_seqs") > 500
    assert any("1000 requests a second come" in notice for notice in made.notices)
    assert not any("ever longer" in notice for notice in plan(request_rate=4.0).notices)


def test_the_reason_of_a_layout_follows() -> None:
    made = plan("deepseek-r1", num_gpus=8, engine="vllm", objective="throughput")
    layout = made.decision("tensor_parallel_size")
    assert layout.reason.startswith("the simplest of those that give about the most tokens")
    assert plan(num_gpus=8, objective="latency").decision("tensor_parallel_size").reason.startswith("the shortest")


def test_a_change_is_offered_once() -> None:
    changes = [entry.change for entry in plan(max_model_len=1_000_000).alternatives]
    assert len(changes) == len(set(changes))


def test_lengths_that_nobody_gave_go_into_the_context() -> None:
    made = make_plan(PlanRequest(model="demo"), (find_chip("cpu"), 1))
    assert made.feasible
    assert (made.request.input_len, made.request.output_len) == (256, 128)


def test_objectives_bring_their_own_load() -> None:
    loads = {objective: plan(objective=objective).concurrency for objective in ("latency", "interactive", "throughput")}
    assert (loads["latency"], loads["interactive"]) == (1, 32)
    assert loads["throughput"] == value(plan(objective="throughput"), "max_num_seqs")


def test_the_cache_may_be_fp8_and_weights_do_not_shrink_by_it() -> None:
    wide, narrow = plan(engine="vllm"), plan(engine="vllm", kv_cache_dtype="fp8")
    assert narrow.memory.weights == wide.memory.weights
    assert narrow.memory.kv_tokens == pytest.approx(2 * wide.memory.kv_tokens, rel=0.01)


def test_a_checkpoint_with_scales_gets_an_fp8_cache() -> None:
    made = plan("amd/Llama-3.1-70B-Instruct-FP8-KV", "mi300x", engine="vllm")
    assert value(made, "kv_cache_dtype") == "fp8_e4m3"
    assert value(made, "quantization") == "fp8"


def test_what_headrace_lacks_is_said_and_planned_for_all_the_same() -> None:
    made, gap = plan(num_gpus=8, speculative_config={"method": "medusa"}), "method 'medusa' is not served"
    assert made.feasible
    assert any(gap in entry for entry in made.gaps)
    assert any(gap in notice and "--engine vllm plans" in notice for notice in made.notices)
    assert made.command is None


@pytest.mark.parametrize("engine", ["headrace", "vllm"])
def test_a_plan_comes_with_its_engines_command(engine: str) -> None:
    assert plan(engine=engine).command.engine == engine


REFUSED = [
    ("llama-3.1-70b", "h200", {"num_gpus": 1}, "weights take 131 GiB", "quantization fp8"),
    ("llama-3.1-8b", "h200", {"tensor_parallel_size": 3, "num_gpus": 4}, "not divide by 3", "parallel_size left"),
    ("llama-3.1-8b", "h200", {"tensor_parallel_size": 4, "num_gpus": 2}, "no layout of 2 GPUs", "tensor_parallel_size"),
    ("llama-3.1-8b", "a100", {"quantization": "fp8"}, "has no fp8 units", "quantization left open"),
    ("llama-3.1-8b", "a100", {"kv_cache_dtype": "fp8"}, "has no fp8 units", "kv_cache_dtype auto"),
    ("llama-3.1-8b", "a100", {"quantization": "ptpc_fp8"}, "has no fp8 units", "quantization left open"),
    ("gpt-oss-20b", "h200", {"quantization": "fp8"}, "holds mxfp4 already", "quantization left open"),
    ("llama-3.1-8b", "h200", {"input_len": 200_000}, "more than the model's context of 131072", "input_len"),
    ("llama-3.1-8b", "h200", {"max_model_len": 200_000}, "more than the model's context", "max_model_len left open"),
    ("qwen3-32b", "h100", {"num_gpus": 1, "input_len": 32_000, "output_len": 8_000, "gpu_memory_utilization": 0.88,
                           "objective": "latency"}, "missing on each", "input_len"),
    ("llama-4-maverick", "h200", {"enable_expert_parallel": True, "num_gpus": 8}, "0.78% of the experts", "left open"),
    ("llama-3.1-8b", "h200", {"quantization": "ptpc_fp8", "engine": "vllm"}, "for AMD GPUs only", "quantization fp8"),
    # layouts that headrace does not have
    ("deepseek-r1", "h200", {"enable_dp_attention": True, "enable_expert_parallel": True, "num_gpus": 16,
                             "data_parallel_size": 16}, "on one machine yet", "left open"),
    ("qwen3-30b-a3b", "h200", {"enable_dp_attention": True, "enable_expert_parallel": False, "num_gpus": 2},
     "share whole experts alone", "left open"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "gpu", "asked", "problem", "change"),
    [
        *REFUSED,
        pytest.param(  # so many layouts, seconds of search
            "llama-3.1-405b", "h100", {"num_gpus": 8}, "weights take 95 GiB", "quantization fp8",
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_what_cannot_run_says_why_and_what_can(
    model: str, gpu: str, asked: dict[str, Any], problem: str, change: str
) -> None:
    made = plan(model, gpu, **asked)
    assert not made.feasible
    assert any(problem in said for said in made.problems), made.problems
    assert any(change in entry.change for entry in made.alternatives), [entry.change for entry in made.alternatives]
    for entry in made.alternatives:
        assert entry.plan.feasible
        assert entry.plan.memory.fits


def test_lower_precision_fewer_tokens_and_more_gpus_are_all_looked_at() -> None:
    made = plan("llama-3.3-70b", num_gpus=1, quantization="fp8", input_len=100_000, output_len=31_000,
                gpu_memory_utilization=0.6, engine="vllm")  # fmt: skip
    changes = [entry.change for entry in made.alternatives]
    assert len(changes) == 3
    assert changes[0].startswith(("kv_cache_dtype", "quantization"))
    assert changes[1].startswith("input_len")
    assert changes[2] == "num_gpus 2 (not 1)"


@pytest.mark.parametrize(
    ("model", "gpu", "asked"),
    [
        pytest.param(
            "deepseek-v3", "l40s", {"num_gpus": 24, "quantization": "int8", "gpu_memory_utilization": 0.1},
            marks=pytest.mark.slow,  # so many layouts, seconds of search
        ),
        ("demo", "h200", {"input_len": 200_000, "output_len": 3000, "tensor_parallel_size": 13}),
        ("llama-4-scout", "h200", {"num_gpus": 2, "enable_chunked_prefill": False, "data_parallel_size": 2}),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_several_changes_where_one_is_not_enough(model: str, gpu: str, asked: dict[str, Any]) -> None:
    made = plan(model, gpu, **asked)
    assert not made.feasible
    assert made.alternatives[0].plan.feasible
    assert made.alternatives[0].change.count(",") >= 1


def test_headrace_is_offered_what_it_has() -> None:
    made = plan("llama-3.1-70b", "h200", num_gpus=1)
    assert all("mxfp4" not in entry.change and "kv_cache_dtype" not in entry.change for entry in made.alternatives)
    assert made.alternatives[0].plan.command.engine == "headrace"


def test_a_folder_counts_as_the_catalogue_does(tmp_path: Path) -> None:
    from headrace.planner.catalogue import catalogue

    (tmp_path / "config.json").write_text(json.dumps(catalogue()["llama-3.1-8b"].config))
    made = plan(str(tmp_path))
    assert made.shape.total_weights == plan().shape.total_weights
    assert made.command.program[-1] == str(tmp_path)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"model": "llama-9"}, "llama-9"),
        ({"gpu": "h300"}, "h300"),
        ({"max_num_seqs": 100, "max_num_batched_tokens": 10}, "must not exceed"),
        ({"request_rate": 0.0}, "request_rate must be above 0"),
        ({"objective": "speed"}, "objective must be one of latency, interactive, throughput"),
        ({"request_rate": math.inf}, "request_rate must be at most"),
        ({"request_rate": math.nan}, "request_rate must be"),
        ({"price_per_gpu_hour": math.inf}, "price_per_gpu_hour must be at most"),
        ({"concurrency": 10**400}, "concurrency must be at most"),
        ({"tensor_parallel_size": 100_000}, "tensor_parallel_size must be at most 1024"),
        ({"tensor_parallel_size": 64, "data_parallel_size": 64}, r"at most 1024 GPUs, got 64 x 1 x 64"),
        ({"max_num_seqs": 10**6}, "max_num_seqs must be at most"),
        ({"attention_backend": "NONE"}, "attention_backend 'NONE' is unknown"),
    ],
)
def test_what_nobody_knows_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**asked)


def test_the_simulation_runs_unasked_and_in_full_when_asked() -> None:
    quick, full = plan(concurrency=8), plan(concurrency=8, simulate=True)
    assert quick.prediction.output_tok_s == pytest.approx(full.prediction.output_tok_s, rel=0.02)
    assert quick.prediction.output_tok_s == pytest.approx(quick.simulation.output_tok_s)


def test_a_rate_of_requests_is_a_load_too() -> None:
    made = plan(request_rate=4.0, input_len=512, output_len=128)
    assert made.prediction.output_tok_s == pytest.approx(512, rel=0.2)


@pytest.mark.parametrize(
    "asked", [{}, {"num_gpus": 4, "tensor_parallel_size": 3}, {"price_per_gpu_hour": 2.0}], ids=str
)
def test_json_holds_all_of_it(asked: dict[str, Any]) -> None:
    made = plan(**asked)
    data = json.loads(json.dumps(to_json(made)))
    assert data["feasible"] == made.feasible
    if not made.feasible:
        assert data["problems"]
        data = data["alternatives"][0]["plan"]
    assert data["workload"] == {
        "input_len": 1024, "output_len": 256, "concurrency": 32, "num_prompts": None, "request_rate": None,
    }  # fmt: skip
    memory = data["memory_map"]
    assert sum(memory["parts"].values()) == memory["usable"]
    assert {"field", "value", "reason", "runner_up", "source"} == set(data["decisions"][0])
    for name in ("ttft_ms", "itl_ms", "e2e_s", "output_tok_s", "total_tok_s", "max_concurrency", "kv_tokens", "bound",
                 "error_band"):  # fmt: skip
        assert name in data["prediction"]
    assert data["simulation"]["itl"]["p99"] >= data["simulation"]["itl"]["p50"]
    assert all(flag["reason"] for flag in data["command"]["flags"])
    assert (data["cost"] is not None) == ("price_per_gpu_hour" in asked)
