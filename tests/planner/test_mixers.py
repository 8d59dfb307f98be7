"""Mixers other than plain attention: what they keep, and what a step of them costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.mixers import STATE_BYTES, RecurrentState
from headrace.model_spec import LayerSpec
from headrace.parameters import linear, total
from headrace.planner.catalogue import find_model
from headrace.planner.chips import find_chip
from headrace.planner.cost import StepCost, StepWork
from headrace.planner.memory_map import MemoryMap
from headrace.planner.shapes import ModelShape
from tests.planner.planner_cases import Parallel, deployment, mapped, step_cost

PARTS = [
    *linear("linear_attn.qkv_proj", 3 * 32 * 128, 4096, "heads"),
    *linear("linear_attn.o_proj", 4096, 32 * 128, "heads"),
]
STATE = RecurrentState(4096, 32, 128, 128, tuple(PARTS), taps=3)
ATTENTION = find_model("llama-3.1-8b")
LLAMA = ATTENTION.spec.layers[0]


def with_layers(*layers: LayerSpec) -> ModelShape:
    return replace(ATTENTION, spec=replace(ATTENTION.spec, layers=layers))


HYBRID = with_layers(*[replace(LLAMA, mixer=STATE)] * 24, *[LLAMA] * 8)


def cost(shape: ModelShape, work: StepWork) -> StepCost:
    return step_cost(replace(deployment(), shape=shape), work)


def state_bytes(memory: MemoryMap) -> int:
    """of a sequence's recurrent states"""
    return sum(group.block_bytes for group in memory.layout.groups if group.is_state)


def test_a_state_has_one_size_however_long_a_sequence_is() -> None:
    found = mapped(HYBRID, find_chip("h200"), Parallel())
    state = 24 * (32 * 128 * 128 + 3 * 3 * 32 * 128) * STATE_BYTES
    assert state_bytes(found) == state
    assert found.kv_bytes_per_token == 8 * 2 * 8 * 128 * 2
    states, tokens = found.layout.groups
    assert (tokens.block_bytes, states.block_bytes) == (16 * 32768, state)
    halves = mapped(HYBRID, find_chip("h200"), Parallel(tp=2))
    assert (state_bytes(halves), halves.kv_bytes_per_token) == (state // 2, 8 * 8 * 128 * 2)
    assert state_bytes(mapped(ATTENTION, find_chip("h200"), Parallel())) == 0


def test_a_state_alone_fits_any_length() -> None:
    shape = with_layers(*[replace(LLAMA, mixer=STATE)] * 32)
    found = mapped(shape, find_chip("h200"), Parallel(), max_model_len=1 << 24)
    assert found.fits
    assert found.kv_tokens // (1 << 24) == found.kv_pool // state_bytes(found)


def test_weights_of_a_state_are_those_that_its_description_lists() -> None:
    group, _ = HYBRID.groups
    assert total(group.mixer.parameters) == total(STATE.parameters) == 4 * 4096 * 4096
    one, two = (mapped(HYBRID, find_chip("h200"), Parallel(tp=tp)).weights["attention"] for tp in (1, 2))
    assert one == 2 * (24 * 4 * 4096**2 + 8 * total(LLAMA.mixer.parameters)) == 2 * two


def test_a_decode_reads_and_writes_its_state_whatever_came_before() -> None:
    short, long = (cost(HYBRID, StepWork(64, context)).parts["kv"] for context in (100, 100_000))
    plain = [cost(ATTENTION, StepWork(64, context)).parts["kv"] for context in (100, 100_000)]
    assert long - short == pytest.approx((plain[1] - plain[0]) / 4)
    bandwidth = find_chip("h200").memory_bandwidth
    assert short - plain[0] / 4 >= 64 * 2 * 24 * STATE.state_values * STATE_BYTES / bandwidth


def test_a_prompt_costs_a_state_the_same_for_each_token() -> None:
    shape = with_layers(*[replace(LLAMA, mixer=STATE)] * 32)
    near, far = (cost(shape, StepWork(0, 0, 2048, context, 1)) for context in (1024, 100_000))
    assert near == far
    without = replace(LLAMA, mixer=replace(STATE, v_head_dim=1))
    assert near.parts["flops"] > cost(with_layers(*[without] * 32), StepWork(0, 0, 2048, 1024, 1)).parts["flops"]


def test_attention_to_what_comes_later_too_caches_nothing_and_counts_its_pairs() -> None:
    encoder = with_layers(*[replace(LLAMA, mixer=replace(LLAMA.mixer, causal=False))] * 32)
    assert mapped(encoder, find_chip("h200"), Parallel()).kv_bytes_per_token == 0
    work = StepWork(0, 0, 2048, 2048, 1)
    assert cost(encoder, work).parts["flops"] == cost(ATTENTION, work).parts["flops"]
