"""How fast the chip could be at best: bytes over measured bandwidth, operations over measured rates. Pure.

A step's floor: the larger of its weights' bytes and its linears' operations, then its attention after them, since
one layer's attention needs that layer's linears. What overlaps the two may go below it.
"""

from __future__ import annotations

from dataclasses import dataclass

from h200_parts.models import Cost

MIN_EXPERT_SHARE = 0.9
"""of the uniform expectation: a row of a mixture of experts that reads fewer distinct ones does not count"""


@dataclass(frozen=True)
class Ceilings:
    """What this chip gave in this run."""

    copy: float
    """bytes/s, read and written"""
    read: float
    """bytes/s"""
    bf16: float
    """operations/s of a matrix product"""
    fp8: float


def distinct_experts(num_experts: int, experts_per_token: int, num_tokens: int) -> float:
    """Expected number of experts that `num_tokens` tokens choose, each uniformly."""
    return num_experts * (1 - (1 - experts_per_token / num_experts) ** num_tokens) if num_experts else 0.0


def enough_experts(cost: Cost, num_tokens: int, found: float) -> bool:
    return found >= MIN_EXPERT_SHARE * distinct_experts(cost.num_experts, cost.experts_per_token, num_tokens)


def weight_bytes(cost: Cost, num_tokens: int) -> float:
    """Bytes of weights that a step of `num_tokens` tokens reads."""
    return cost.always_bytes + cost.expert_bytes * distinct_experts(
        cost.num_experts, cost.experts_per_token, num_tokens
    )


def linear_seconds(cost: Cost, ceilings: Ceilings, num_tokens: int, num_samples: int) -> float:
    """All linears of one step, `num_samples` tokens of which meet the output layer."""
    rate = ceilings.fp8 if cost.fp8 else ceilings.bf16
    compute = num_tokens * cost.layer_flops / rate + num_samples * cost.head_flops / ceilings.bf16
    return max(weight_bytes(cost, num_tokens) / ceilings.read, compute)


def decode_floor(cost: Cost, ceilings: Ceilings, batch: float, context: float) -> float:
    """Seconds of a decode step of `batch` requests of `context` tokens each."""
    tokens = max(1, round(batch))
    return linear_seconds(cost, ceilings, tokens, tokens) + batch * context * cost.kv_bytes / ceilings.read


def prefill_floor(cost: Cost, ceilings: Ceilings, batch: int, length: int) -> float:
    """Seconds from `batch` prompts of `length` tokens to a token of each, in one step."""
    pairs = batch * length * (length + 1) / 2
    return linear_seconds(cost, ceilings, batch * length, batch) + pairs * cost.pair_flops / ceilings.bf16


def run_floor(
    cost: Cost, ceilings: Ceilings, prompts: int, input_len: int, output_len: int, kv_tokens: float = float("inf")
) -> float:
    """Seconds of a whole run of equal requests, of which as many run together as `kv_tokens` hold."""
    together = min(prompts, kv_tokens / (input_len + output_len))
    waves = prompts / together
    steps = sum(decode_floor(cost, ceilings, together, input_len + step) for step in range(1, output_len))
    return waves * (prefill_floor(cost, ceilings, round(together), input_len) + steps)
