"""A step's cost: bounds of physics, directions in which it must go, every model on every chip."""

from __future__ import annotations

import math
import random
from dataclasses import fields, replace

import pytest

from headrace.planner.catalogue import catalogue
from headrace.planner.chips import CHIPS, find_chip
from headrace.planner.collectives import Links
from headrace.planner.constants import EFFICIENCIES, Efficiency, find_efficiency, find_fitted
from headrace.planner.cost import StepModel, StepWork, distinct_experts, step_model
from headrace.planner.parallel import Parallel
from tests.planner.planner_cases import deployment, step_cost

DECODE = StepWork(32, 1000)
PREFILL = StepWork(0, 0.0, 2048, 1024, 1)
MIXED = StepWork(64, 500, 1024, 512, 2)


@pytest.mark.parametrize("engine", ["headrace", "vllm"])
@pytest.mark.parametrize("chip", sorted(CHIPS))
@pytest.mark.parametrize("model", sorted(catalogue()))
def test_every_model_on_every_chip_costs_something_finite(model: str, chip: str, engine: str) -> None:
    for parallel in (Parallel(), Parallel(tp=8), Parallel(tp=8, pp=2), Parallel(dp=8, ep=True, dp_attention=True)):
        where = deployment(model, chip, parallel, engine=engine)
        for work in (DECODE, PREFILL, MIXED, StepWork(1, 1), StepWork(0, 0.0, 1, 1, 1)):
            cost = step_cost(where, work)
            assert 0 < cost.seconds < 1000
            assert all(math.isfinite(seconds) and seconds >= 0 for seconds in cost.parts.values())
            assert cost.seconds >= max(cost.parts.values()) * 0.999
            assert cost.seconds <= sum(cost.parts.values()) * 1.001
            assert cost.bound in cost.parts


def test_a_lone_decode_reads_all_weights_no_faster_than_the_data_sheet_allows() -> None:
    where = deployment()
    shape = where.shape
    read = 2 * (shape.total_weights - shape.embedding_weights) / where.chip.memory_bandwidth
    cost = step_cost(where, StepWork(1, 100))
    assert read < cost.seconds < 1.6 * read
    assert cost.bound == "weights"


def test_a_long_prompt_is_bound_by_operations() -> None:
    where = deployment()
    cost = step_cost(where, StepWork(0, 0.0, 8192, 4096, 1))
    operations = 2 * where.shape.active_weights * 8192
    assert cost.bound == "flops"
    assert cost.seconds > operations / where.chip.flops["bf16"]


@pytest.mark.parametrize("work", [DECODE, PREFILL, MIXED])
@pytest.mark.parametrize("model", ["llama-3.1-70b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-120b"])
def test_more_work_takes_longer(model: str, work: StepWork) -> None:
    cost = step_model(deployment(model, parallel=Parallel(tp=8)))
    before = cost.seconds(work)
    assert cost.seconds(replace(work, decodes=work.decodes + 8, decode_context=work.decode_context or 100)) > before
    assert cost.seconds(replace(work, prefill_tokens=work.prefill_tokens + 512, prompts=work.prompts + 1)) > before
    if work.decodes:
        longer = cost.seconds(replace(work, decode_context=work.decode_context + 5000))
        assert longer > before


@pytest.mark.parametrize("field", ["bandwidth", "kv_bandwidth", "gemm", "attention", "link", "overlap"])
def test_a_higher_share_is_faster(field: str) -> None:
    where = deployment("llama-3.1-70b", parallel=Parallel(tp=8))
    constants = find_efficiency(where.chip, where.engine)
    better = replace(constants, **{field: getattr(constants, field) * 1.1})
    assert StepModel(where, better).seconds(MIXED) < StepModel(where, constants).seconds(MIXED)


@pytest.mark.parametrize("field", ["kernel", "launch", "sequence", "collective"])
def test_a_longer_fixed_time_is_slower(field: str) -> None:
    where = deployment("llama-3.1-70b", parallel=Parallel(tp=8))
    constants = find_efficiency(where.chip, where.engine)
    worse = replace(constants, **{field: getattr(constants, field) * 1.5})
    assert StepModel(where, worse).seconds(MIXED) > StepModel(where, constants).seconds(MIXED)


def test_more_gpus_read_less_and_talk_more() -> None:
    one, eight = (step_cost(deployment("llama-3.1-70b", parallel=Parallel(tp=tp)), DECODE) for tp in (1, 8))
    assert eight.seconds < one.seconds
    assert eight.parts["weights"] == pytest.approx(one.parts["weights"] / 8, rel=0.01)
    assert eight.parts["kv"] == pytest.approx(one.parts["kv"] / 8)
    assert one.parts["links"] == 0 < eight.parts["links"]


def test_kv_heads_are_not_split_further_than_there_are() -> None:
    """Qwen3-30B-A3B has 4; a latent has none to split."""
    four, eight = (step_cost(deployment("qwen3-30b-a3b", parallel=Parallel(tp=tp)), DECODE) for tp in (4, 8))
    assert eight.parts["kv"] == pytest.approx(four.parts["kv"])
    alone, split = (step_cost(deployment("deepseek-v3", parallel=Parallel(tp=tp)), DECODE) for tp in (1, 8))
    assert split.parts["kv"] == pytest.approx(alone.parts["kv"])


def test_attention_of_its_own_requests_reads_a_latent_once() -> None:
    split = step_cost(deployment("deepseek-v3", parallel=Parallel(tp=8)), StepWork(512, 4000))
    own = step_cost(deployment("deepseek-v3", parallel=Parallel(dp=8, ep=True, dp_attention=True)), StepWork(512, 4000))
    assert own.parts["kv"] == pytest.approx(split.parts["kv"] / 8)
    assert own.seconds < split.seconds
    lone = StepWork(1, 4000)
    few = [step_cost(deployment("deepseek-v3", parallel=p), lone).seconds for p in
           (Parallel(tp=8), Parallel(dp=8, ep=True, dp_attention=True))]  # fmt: skip
    assert few[0] < few[1]


def test_replicas_share_the_requests_and_nothing_else() -> None:
    one = step_cost(deployment(), DECODE)
    eight = step_cost(deployment(parallel=Parallel(dp=8)), replace(DECODE, decodes=8 * 32))
    assert eight.seconds == pytest.approx(one.seconds)
    alone = step_cost(deployment(parallel=Parallel(dp=8)), StepWork(0, 0.0, 512, 256, 1))
    assert alone.seconds == pytest.approx(step_cost(deployment(), StepWork(0, 0.0, 512, 256, 1)).seconds)


def test_stages_help_many_requests_and_not_one() -> None:
    flat, staged = (step_model(deployment("llama-3.1-70b", parallel=p)) for p in (Parallel(tp=4), Parallel(tp=4, pp=2)))
    assert staged.seconds(StepWork(1, 500)) >= flat.seconds(StepWork(1, 500))
    assert staged.seconds(StepWork(1024, 500)) < flat.seconds(StepWork(1024, 500))


def test_a_network_is_slower_than_a_node() -> None:
    inside = step_cost(deployment("llama-3.1-405b", "mi300x", Parallel(tp=8), "fp8"), DECODE)
    outside = step_cost(deployment("llama-3.1-405b", "mi300x", Parallel(tp=16), "fp8"), DECODE)
    assert outside.parts["links"] > inside.parts["links"]


def test_a_window_bounds_what_a_decode_reads() -> None:
    """Every other layer of gpt-oss sees 128 keys."""
    cost = step_model(deployment("gpt-oss-120b"))
    near, far = (cost.cost(StepWork(64, context)).parts["kv"] for context in (128, 12800))
    assert 40 * near < far < 60 * near


def test_distinct_experts_are_those_of_chance() -> None:
    draw = random.Random(0)
    for experts, chosen, tokens in ((128, 8, 8), (256, 8, 40), (8, 2, 3)):
        counts = [len({e for _ in range(tokens) for e in draw.sample(range(experts), chosen)}) for _ in range(300)]
        assert distinct_experts(experts, chosen, tokens) == pytest.approx(sum(counts) / 300, rel=0.03)
    assert distinct_experts(0, 0, 10) == 0


def test_experts_are_read_as_they_are_chosen() -> None:
    cost = step_model(deployment("qwen3-30b-a3b"))
    weights = [cost.cost(StepWork(batch, 100)).parts["weights"] for batch in (1, 8, 32, 128, 1024)]
    assert weights == sorted(weights)
    assert weights[1] > 3 * weights[0]
    assert weights[4] == pytest.approx(weights[3], rel=0.01)


def test_whole_experts_weigh_most_on_the_busiest_gpu() -> None:
    slices, whole = (
        step_cost(deployment("deepseek-v3", parallel=Parallel(tp=8, ep=ep)), StepWork(4, 500)).parts["weights"]
        for ep in (False, True)
    )
    assert slices < whole < 3 * slices


@pytest.mark.parametrize(("wide", "narrow"), [("bf16", "fp8"), ("fp8", "int4"), ("bf16", "mxfp4")])
def test_fewer_bits_are_faster_to_read(wide: str, narrow: str) -> None:
    costs = [step_cost(deployment(weight_format=name), StepWork(1, 100)).seconds for name in (wide, narrow)]
    assert costs[1] < costs[0]


def test_a_format_without_units_multiplies_in_16_bits() -> None:
    """An A100 has none for fp8, a B200 has them for 4 bits, and a MI300X for 8. headrace has no products of 4 bits."""
    prompt = StepWork(0, 0.0, 8192, 4096, 1)

    def flops(chip: str, weight_format: str, engine: str = "headrace") -> float:
        return step_cost(deployment(chip=chip, weight_format=weight_format, engine=engine), prompt).parts["flops"]

    assert flops("a100", "fp8") == pytest.approx(flops("a100", "bf16"))
    assert flops("mi300x", "mxfp4") == pytest.approx(flops("mi300x", "bf16"))
    assert flops("mi300x", "fp8") < 0.65 * flops("mi300x", "bf16")
    assert flops("b200", "mxfp4", "vllm") < 0.75 * flops("b200", "fp8", "vllm")
    assert flops("b200", "mxfp4") == pytest.approx(flops("b200", "bf16"))


def test_many_tokens_are_multiplied_by_weights_that_are_widened_first() -> None:
    """Up to 128 tokens kernels widen tiles on the way, at half the rate; beyond, a whole weight is written and read."""

    def part(weight_format: str, tokens: int, name: str) -> float:
        return step_cost(deployment(weight_format=weight_format), StepWork(tokens, 1)).parts[name]

    assert part("int4", 128, "weights") < 0.6 * part("bf16", 128, "weights")
    assert part("int4", 129, "weights") > 2 * part("bf16", 129, "weights")
    assert part("int4", 128, "flops") > 1.8 * part("bf16", 128, "flops")
    assert part("int4", 129, "flops") == pytest.approx(part("bf16", 129, "flops"))


def test_what_is_in_no_graph_is_started_by_the_host() -> None:
    """vLLM captures decode steps of up to 512 requests."""
    cost = step_model(deployment("qwen3-30b-a3b", engine="vllm"))
    inside, outside = (cost.cost(StepWork(batch, 200)).parts["host"] for batch in (512, 513))
    assert outside > 1.5 * inside


def test_constants_are_few_and_said_where_from() -> None:
    assert len(fields(Efficiency)) < 12
    for (chip, engine), fitted in EFFICIENCIES.items():
        assert chip in CHIPS
        assert engine in ("headrace", "vllm")
        assert len(fitted.origin) > 20
        assert 0 < fitted.band < 1
        for name in ("bandwidth", "kv_bandwidth", "gemm", "attention", "link"):
            assert 0 < getattr(fitted.constants, name) < 1


def test_other_chips_take_the_nearest_constants_with_a_wider_band() -> None:
    for chip, like in (("mi325x", "mi300x"), ("mi355x", "mi300x"), ("h100", "h200"), ("b200", "h200")):
        own, other = find_fitted(find_chip(like), "vllm"), find_fitted(find_chip(chip), "vllm")
        assert other.constants == own.constants
        assert other.band >= own.band
        assert find_chip(like).title in other.origin
    assert find_fitted(find_chip("mi355x"), "vllm").band > find_fitted(find_chip("mi300x"), "vllm").band


def test_collectives_cost_a_start_and_their_bytes() -> None:
    switch = Links(find_chip("h200"), 0.7, 12e-6)
    assert switch.all_reduce(1e6, 1) == 0
    assert switch.all_reduce(0, 8) == pytest.approx(12e-6)
    assert switch.all_reduce(0, 2) == pytest.approx(6e-6)
    assert switch.all_reduce(1e9, 8) == pytest.approx(12e-6 + 2 * 7 / 8 * 1e9 / (0.7 * 450e9))
    direct = Links(find_chip("mi300x"), 0.7, 12e-6)
    whole = direct.all_reduce(1e9, 8) - 12e-6
    assert whole == pytest.approx(2 * 7 / 8 * 1e9 / (0.7 * 448e9))
    assert direct.all_reduce(1e9, 2) > whole, "two GPUs have one of the seven links between them"
    assert switch.all_reduce(1e9, 16) > switch.all_reduce(1e9, 8)
    assert switch.gather_and_scatter(0, 8) > switch.all_reduce(0, 8)
    assert switch.exchange(1e9, 8) < switch.all_reduce(1e9, 8)
    assert switch.send(1e6, other_node=True) > switch.send(1e6, other_node=False)
