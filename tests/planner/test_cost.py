"""A step's cost: bounds of physics, directions in which it must go, every model on every chip."""

from __future__ import annotations

import json
import math
import random
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from headrace.planner.catalogue import catalogue
from headrace.planner.chips import CHIPS, find_chip
from headrace.planner.collectives import MEASURED, Links
from headrace.planner.constants import EFFICIENCIES, Efficiency, find_efficiency, find_fitted
from headrace.planner.cost import StepModel, StepWork, distinct_experts, step_model
from headrace.planner.parallel import Parallel
from tests.planner.planner_cases import deployment, step_cost
from tests.sampled import sampled

DECODE = StepWork(32, 1000)
PREFILL = StepWork(0, 0.0, 2048, 1024, 1)
MIXED = StepWork(64, 500, 1024, 512, 2)


@sampled(("model", "chip", "engine"), sorted(catalogue()), sorted(CHIPS), ["headrace", "vllm"])
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
    where = deployment("llama-3.1-70b", "b200", parallel=Parallel(tp=8))
    constants = find_efficiency(where.chip, where.engine)
    better = replace(constants, **{field: getattr(constants, field) * 1.1})
    assert StepModel(where, better).seconds(MIXED) < StepModel(where, constants).seconds(MIXED)


@pytest.mark.parametrize("field", ["kernel", "launch", "sequence", "collective"])
def test_a_longer_fixed_time_is_slower(field: str) -> None:
    where = deployment("llama-3.1-70b", "b200", parallel=Parallel(tp=8))
    constants = find_efficiency(where.chip, where.engine)
    worse = replace(constants, **{field: getattr(constants, field) * 1.5})
    assert StepModel(where, worse).seconds(MIXED) > StepModel(where, constants).seconds(MIXED)


def tp(size: int, **more: Any) -> Parallel:
    return Parallel(tp=size, **more)


OWN = Parallel(dp=8, ep=True, dp_attention=True)
LONE, FOUR, CROWD, ONE_PROMPT = StepWork(1, 4000), StepWork(4, 500), StepWork(512, 4000), StepWork(0, 0.0, 512, 256, 1)
FEW, MANY = StepWork(1, 500), StepWork(1024, 500)
SAME = (0.999999, 1.000001)
COMPARED: list[tuple[str, str, dict[str, Any], dict[str, Any], StepWork, StepWork, float, float]] = [
    # model, part ("": seconds), two deployments, their work, least and most that the second is of the first
    ("llama-3.1-70b", "", {}, {"parallel": tp(8)}, DECODE, DECODE, 0, 1),
    ("llama-3.1-70b", "weights", {}, {"parallel": tp(8)}, DECODE, DECODE, 0.99 / 8, 1.01 / 8),
    ("llama-3.1-70b", "kv", {"parallel": tp(8)}, {}, DECODE, DECODE, 7.99999, 8.00001),
    # KV heads are not split further than there are: Qwen3-30B-A3B has 4, a latent has none to split.
    ("qwen3-30b-a3b", "kv", {"parallel": tp(4)}, {"parallel": tp(8)}, DECODE, DECODE, *SAME),
    ("deepseek-v3", "kv", {}, {"parallel": tp(8)}, DECODE, DECODE, *SAME),
    # Attention of its own requests reads a latent once, and waits where there are few.
    ("deepseek-v3", "kv", {"parallel": OWN}, {"parallel": tp(8)}, CROWD, CROWD, 7.999, 8.001),
    ("deepseek-v3", "", {"parallel": OWN}, {"parallel": tp(8)}, CROWD, CROWD, 1, 100),
    ("deepseek-v3", "", {"parallel": tp(8)}, {"parallel": OWN}, LONE, LONE, 1, 100),
    # Replicas share the requests and nothing else.
    ("llama-3.1-8b", "", {}, {"parallel": Parallel(dp=8)}, DECODE, replace(DECODE, decodes=8 * 32), *SAME),
    ("llama-3.1-8b", "", {}, {"parallel": Parallel(dp=8)}, ONE_PROMPT, ONE_PROMPT, *SAME),
    # Stages help many requests and not one.
    ("llama-3.1-70b", "", {"parallel": tp(4)}, {"parallel": tp(4, pp=2)}, FEW, FEW, 1, 100),
    ("llama-3.1-70b", "", {"parallel": tp(4)}, {"parallel": tp(4, pp=2)}, MANY, MANY, 0, 1),
    # A network is slower than a node.
    ("llama-3.1-405b", "links", {"chip": "mi300x", "parallel": tp(8), "weight_format": "fp8"},
     {"chip": "mi300x", "parallel": tp(16), "weight_format": "fp8"}, DECODE, DECODE, 1, 100),
    # Every other layer of gpt-oss sees 128 keys.
    ("gpt-oss-120b", "kv", {}, {}, StepWork(64, 128), StepWork(64, 12800), 40, 60),
    # Experts are read as they are chosen; whole ones weigh most on the busiest GPU.
    ("qwen3-30b-a3b", "weights", {}, {}, StepWork(1, 100), StepWork(8, 100), 3, 8),
    ("qwen3-30b-a3b", "weights", {}, {}, StepWork(8, 100), StepWork(32, 100), 1, 4),
    ("qwen3-30b-a3b", "weights", {}, {}, StepWork(128, 100), StepWork(1024, 100), 0.99, 1.01),
    ("deepseek-v3", "weights", {"parallel": tp(8)}, {"parallel": tp(8, ep=True)}, FOUR, FOUR, 1, 3),
    # Fewer bits are faster to read.
    *(("llama-3.1-8b", "", {"weight_format": wide}, {"weight_format": narrow}, LONE, LONE, 0, 1)
      for wide, narrow in (("bf16", "fp8"), ("fp8", "int4"), ("bf16", "mxfp4"))),
    # vLLM captures decode steps of up to 512 requests: what is in no graph is started by the host.
    ("qwen3-30b-a3b", "host", {"engine": "vllm"}, {"engine": "vllm"}, StepWork(512, 200), StepWork(513, 200), 1.5, 100),
]  # fmt: skip


@pytest.mark.parametrize("row", COMPARED, ids=lambda row: f"{row[0]} {row[1]}")
def test_costs_go_where_they_must(row: tuple[Any, ...]) -> None:
    model, part, one, other, work, others, least, most = row
    costs = [step_cost(deployment(model, **where), done) for where, done in ((one, work), (other, others))]
    first, second = (cost.parts[part] if part else cost.seconds for cost in costs)
    assert least * first < second < most * first


def test_one_gpu_sends_nothing() -> None:
    one, eight = (step_cost(deployment("llama-3.1-70b", parallel=tp(size)), DECODE) for size in (1, 8))
    assert one.parts["links"] == 0 < eight.parts["links"]


def test_distinct_experts_are_those_of_chance() -> None:
    draw = random.Random(0)
    for experts, chosen, tokens in ((128, 8, 8), (256, 8, 40), (8, 2, 3)):
        counts = [len({e for _ in range(tokens) for e in draw.sample(range(experts), chosen)}) for _ in range(300)]
        assert distinct_experts(experts, chosen, tokens) == pytest.approx(sum(counts) / 300, rel=0.03)
    assert distinct_experts(0, 0, 10) == 0


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


def test_constants_are_few_and_said_where_from() -> None:
    assert len(fields(Efficiency)) < 12
    assert EFFICIENCIES.keys() <= CHIPS.keys()
    assert {engine for engines in EFFICIENCIES.values() for engine in engines} == {"headrace", "vllm"}
    for fitted in (fitted for engines in EFFICIENCIES.values() for fitted in engines.values()):
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
    switch = Links(find_chip("h200"), "vllm", 0.7, 12e-6)
    assert switch.all_reduce(1e6, 1) == 0
    assert switch.all_reduce(0, 8) == pytest.approx(12e-6)
    assert switch.all_reduce(0, 2) == pytest.approx(6e-6)
    assert switch.all_reduce(1e9, 8) == pytest.approx(12e-6 + 2 * 7 / 8 * 1e9 / (0.7 * 450e9))
    direct = Links(find_chip("mi300x"), "vllm", 0.7, 12e-6)
    whole = direct.all_reduce(1e9, 8) - 12e-6
    assert whole == pytest.approx(2 * 7 / 8 * 1e9 / (0.7 * 448e9))
    assert direct.all_reduce(1e9, 2) > whole, "two GPUs have one of the seven links between them"
    assert switch.all_reduce(1e9, 16) > switch.all_reduce(1e9, 8)
    assert switch.gather_and_scatter(0, 8) > switch.all_reduce(0, 8)
    assert switch.send(1e6, other_node=True) > switch.send(1e6, other_node=False)


def test_collectives_are_those_that_were_measured() -> None:
    found, links = MEASURED["headrace"]["NVLink 4"], Links(find_chip("h100"), "headrace", 0.7, 12e-6)
    results = json.loads((Path(__file__).parents[2] / "bench/results/two-gpus.json").read_text())["collectives"]
    names = {"sum": "all_reduce", "library": "all_reduce-nccl", "send": "send"}
    for name, points in found.microseconds.items():
        for size, microseconds in points:
            assert microseconds == results[names[name]][str(int(size) // 16384)]
            assert found.read(name, size) == pytest.approx(1e-6 * microseconds)
    assert links.all_reduce(524288, 2) == pytest.approx(1e-6 * results["all_reduce"]["32"])
    assert links.all_reduce(2**28, 2) == pytest.approx(1e-6 * (465.3 + (465.3 - 138.3) * 4 / 3))
    assert links.all_reduce(1, 2) < links.all_reduce(1, 4) < links.all_reduce(1, 8) == pytest.approx(2 * 2.278e-6)
    assert links.send(1, other_node=False) == pytest.approx(49.81e-6)
    rows = [links.gather_and_scatter(2 * tokens * 16384, 2) for tokens in (2048, 8192)]
    assert rows == pytest.approx([1e-6 * results["exchange"][tokens] for tokens in ("2048", "8192")], rel=0.05)
