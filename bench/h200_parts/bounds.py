"""Computes how fast the chip could be at best: bytes over measured bandwidth, operations over measured rates.

The lower bound of a step is the larger of reading its weights and computing its linears, plus its attention, since one
layer's attention needs that layer's linears. A step that overlaps the two may be faster than this bound.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from headrace.mixers import STATE_BYTES, Attention, Mixer
from headrace.model_spec import ModelSpec
from headrace.parameters import total
from headrace.planner.cost import distinct_experts
from headrace.quantization.formats import WeightFormat

KV_BYTES = 2
"""bytes of a cached value"""
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
    mixers: tuple[tuple[Mixer, int], ...]
    """what layers cache and read, and how many layers do so"""
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
            mixers=tuple(Counter(layer.mixer for layer in spec.layers).items()),
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


def keys_seen(mixer: Mixer, context: int) -> int:
    """Return the keys that the last of `context` tokens sees: all, those of its window, or those of its own chunk."""
    if mixer.window is None:
        return context
    in_chunks = isinstance(mixer, Attention) and mixer.chunked
    return (context - 1) % mixer.window + 1 if in_chunks else min(context, mixer.window)


def decode_attention(cost: Cost, ceilings: Ceilings, batch: float, context: float) -> float:
    """Return the seconds in which decodes read and multiply what the layers have cached of `context` tokens each. A
    recurrent state is read and written; an index scores all keys where it chooses."""
    seconds = 0.0
    for mixer, count in cost.mixers:
        keys = keys_seen(mixer, round(context))
        chosen = min(keys, mixer.sparse_top_k or keys)
        scored = keys if chosen < keys else 0
        moved = KV_BYTES * (chosen * (mixer.cached_values - mixer.index_dim) + scored * mixer.index_dim)
        moved += 2 * STATE_BYTES * mixer.state_values
        work = chosen * mixer.decode_flops_per_pair + scored * mixer.index_flops_per_pair + mixer.flops_per_token
        seconds += count * batch * max(moved / ceilings.read, work / ceilings.bf16)
    return seconds


def prompt_attention(cost: Cost, ceilings: Ceilings, batch: float, length: int) -> float:
    """Return the seconds in which prompts of `length` tokens each attend to themselves."""
    work = 0
    for mixer, count in cost.mixers:
        most = mixer.sparse_top_k or length
        seen = [keys_seen(mixer, position) for position in range(1, length + 1)]
        pairs, scored = sum(min(keys, most) for keys in seen), sum(seen) if most < length else 0
        each = pairs * mixer.flops_per_pair + scored * mixer.index_flops_per_pair + length * mixer.flops_per_token
        work += count * each
    return batch * work / ceilings.bf16


def decode_floor(cost: Cost, ceilings: Ceilings, batch: float, context: float) -> float:
    """Return the seconds of a decode step of `batch` requests of `context` tokens each."""
    tokens = max(1, round(batch))
    return linear_seconds(cost, ceilings, tokens, tokens) + decode_attention(cost, ceilings, batch, context)


def prefill_floor(cost: Cost, ceilings: Ceilings, batch: int, length: int) -> float:
    """Return the seconds from `batch` prompts of `length` tokens to a token of each, in one step."""
    return linear_seconds(cost, ceilings, batch * length, batch) + prompt_attention(cost, ceilings, batch, length)


def run_floor(
    cost: Cost, ceilings: Ceilings, prompts: int, input_len: int, output_len: int, kv_tokens: float = float("inf")
) -> float:
    """Return the seconds of a run of equal requests, of which as many run together as fit into `kv_tokens`."""
    together = min(prompts, kv_tokens / (input_len + output_len))
    waves = prompts / together
    steps = sum(decode_floor(cost, ceilings, together, input_len + step) for step in range(1, output_len))
    return waves * (prefill_floor(cost, ceilings, round(together), input_len) + steps)
