"""Computes how fast the chip could be at best: bytes over measured bandwidth, operations over measured rates.

The lower bound of a step is the larger of reading its weights and computing its linears, plus its attention, since one
layer's attention needs that layer's linears. A step that overlaps the two may be faster than this bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.model_spec import ModelSpec
from headrace.parameters import total
from headrace.planner.cost import distinct_experts
from headrace.quantization.formats import WeightFormat

MIN_EXPERT_SHARE = 0.9
"""A row of a mixture of experts is invalid where it reads fewer distinct experts than this share of what uniformly
chosen ones would be."""


@dataclass(frozen=True)
class Ceilings:
    """Holds the best rates that this chip reached in this run."""

    copy: float
    """bytes/s, read and written"""
    read: float
    """bytes/s"""
    bf16: float
    """operations/s of a matrix product"""
    fp8: float


@dataclass(frozen=True)
class Cost:
    """Counts the bytes and operations of a decoder's layers together. Head, router and KV cache are always 16-bit."""

    always_bytes: int
    """weights that every step reads, whatever the batch"""
    expert_bytes: int
    """weights of one expert in every layer; 0 without experts"""
    num_experts: int
    experts_per_token: int
    layer_flops: int
    """of one token through all linears but the output layer"""
    head_flops: int
    """of one token through the output layer"""
    pair_flops: int
    """of one query and one key"""
    kv_bytes: int
    """KV cache of one token"""
    fp8: bool
    """The linears multiply by the units for 8 bits."""

    @classmethod
    def of(cls, spec: ModelSpec, dense: WeightFormat, experts: WeightFormat) -> Cost:
        """Count a model whose linears and whose experts are in these formats."""
        blocks = [layer.feed_forward for layer in spec.layers]
        routers = sum(total(block.parameters, "router") for block in blocks)
        linears = sum(total(layer.mixer.parameters) + total(layer.feed_forward.parameters) for layer in spec.layers)
        linears -= routers
        expert = sum(layer.expert_weights for layer in spec.layers)
        head, chosen = spec.hidden_size * spec.vocab_size, max(block.experts_per_token for block in blocks)
        return cls(
            always_bytes=round(linears * dense.bytes_per_weight + 2 * (routers + head)),
            expert_bytes=round(expert * experts.bytes_per_weight),
            num_experts=max(block.num_experts for block in blocks),
            experts_per_token=chosen,
            layer_flops=2 * (linears + routers + chosen * expert),
            head_flops=2 * head,
            pair_flops=sum(layer.mixer.flops_per_pair for layer in spec.layers),
            kv_bytes=2 * sum(layer.mixer.cached_values for layer in spec.layers),
            fp8=dense.units in ("fp8", "int8"),
        )


def enough_experts(cost: Cost, num_tokens: int, measured: float) -> bool:
    """Tell whether a step of `num_tokens` tokens read about as many distinct experts as uniform choices would."""
    return measured >= MIN_EXPERT_SHARE * distinct_experts(cost.num_experts, cost.experts_per_token, num_tokens)


def weight_bytes(cost: Cost, num_tokens: int) -> float:
    """Return the bytes of weights that a step of `num_tokens` tokens reads."""
    experts = distinct_experts(cost.num_experts, cost.experts_per_token, num_tokens)
    return cost.always_bytes + cost.expert_bytes * experts


def linear_seconds(cost: Cost, ceilings: Ceilings, num_tokens: int, num_samples: int) -> float:
    """Return the seconds of all linears of one step, `num_samples` of whose tokens go through the output layer."""
    rate = ceilings.fp8 if cost.fp8 else ceilings.bf16
    compute = num_tokens * cost.layer_flops / rate + num_samples * cost.head_flops / ceilings.bf16
    return max(weight_bytes(cost, num_tokens) / ceilings.read, compute)


def decode_floor(cost: Cost, ceilings: Ceilings, batch: float, context: float) -> float:
    """Return the seconds of a decode step of `batch` requests of `context` tokens each."""
    tokens = max(1, round(batch))
    return linear_seconds(cost, ceilings, tokens, tokens) + batch * context * cost.kv_bytes / ceilings.read


def prefill_floor(cost: Cost, ceilings: Ceilings, batch: int, length: int) -> float:
    """Return the seconds from `batch` prompts of `length` tokens to a token of each, in one step."""
    pairs = batch * length * (length + 1) / 2
    return linear_seconds(cost, ceilings, batch * length, batch) + pairs * cost.pair_flops / ceilings.bf16


def run_floor(
    cost: Cost, ceilings: Ceilings, prompts: int, input_len: int, output_len: int, kv_tokens: float = float("inf")
) -> float:
    """Return the seconds of a run of equal requests, of which as many run together as fit into `kv_tokens`."""
    together = min(prompts, kv_tokens / (input_len + output_len))
    waves = prompts / together
    steps = sum(decode_floor(cost, ceilings, together, input_len + step) for step in range(1, output_len))
    return waves * (prefill_floor(cost, ceilings, round(together), input_len) + steps)
