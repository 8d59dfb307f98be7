"""Makes the cases on which every kernel of the table is compared with its reference, where no model names any.

Their sizes are in kernel_sweeps.json: small and odd ones for Triton's interpreter (tests/kernels/interpreted), large
ones for a GPU (check_kernels.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.kernels import cases
from headrace.kernels.activation import GATES
from headrace.kernels.adapters import AdapterWeights
from headrace.kernels.cases import EPS, ROUNDED, Case, Cases, Inputs, Kernel, as_chosen, relative_error
from headrace.kernels.coded import CodedWeight
from headrace.kernels.fp8 import NarrowWeight, Rounding, quantize_per_token_reference, quantize_reference
from headrace.kernels.gated_delta import DeltaHeads, DeltaWeights, Places
from headrace.kernels.moe import Experts, fused_moe_reference
from headrace.kernels.moe_route import Scoring
from headrace.kernels.norm import HalfNormed, Unsummed, half_norm_reference
from headrace.kernels.table import REFERENCE_KERNELS, TRITON_KERNELS
from headrace.kernels.tiled import tile

EXACTLY_FP8 = {"cpu": 1e-6, "cuda": 5e-3}
"""of values that were the same before; scales may differ in their last bit, since a GPU divides in its own way, and one
of some hundreds of values may then be a step away"""
EXPERTS = {torch.bfloat16: 1.2e-2, torch.float16: 1.6e-3, torch.float32: 4e-6}
"""beside a reference in float32"""


def _normed(of_kernel: Callable[[Inputs, int, Tensor], Cases], make: Inputs, rows: int, hidden: int) -> Cases:
    """By a weight of the same type as the numbers, and by one in float32."""
    for weight in (make.random(hidden), make.random(hidden).float() * 1.001):
        yield from of_kernel(make, rows, weight)


def _layer_normed(make: Inputs, rows: int, hidden: int) -> Cases:
    weight, bias = make.random(hidden), make.random(hidden)
    for held in ((weight, bias), (weight, None), (None, None)):
        yield from cases.layer_norm(make, rows, hidden, *held)


def _qk_normed(make: Inputs, rows: int, heads: tuple[int, int], dim: int) -> Cases:
    """Each head, about its mean and not, and all heads as one vector, also by weights in float32, which round once."""
    weight = make.random(sum(heads), dim)
    for centered, wide in ((True, False), (False, False), (False, True)):
        for each in (weight, weight.float()):
            yield from cases.qk_norm(make, rows, each, heads, EPS, centered, wide)


def _activated(make: Inputs, rows: int, width: int) -> Cases:
    for activation, gated in (*product(GATES, (True, False)), ("xielu", False)):
        yield from cases.gate_and_mul(make, rows, width, activation, gated=gated)


def _of_adapters(
    of_kernel: Callable[[Inputs, int, AdapterWeights], Cases], make: Inputs, rows: int, sizes: tuple[int, ...],
    inputs: int, rank: int,
) -> Cases:  # fmt: skip
    return of_kernel(make, rows, cases.made_up_adapters(make, sizes, inputs, rank))


def _normed_fp8(make: Inputs, rows: int, hidden: int) -> Cases:
    return cases.rms_norm(make, rows, make.random(hidden), EPS, Rounding(make.fp8))


def _activated_fp8(make: Inputs, rows: int, width: int) -> Cases:
    for gated in (True, False):
        yield from cases.gate_and_mul(make, rows, width, "silu", Rounding(make.fp8), gated=gated)


def _quantized(make: Inputs, rows: int, width: int) -> Cases:
    """Quantizing inside norm and activation gives what it would after them; inputs are slices of wider tensors."""
    weight, delta, kernels = make.random(width), make.random(rows, width), TRITON_KERNELS
    x = make.random(rows, 2 * width)
    half = x[:, width:]
    for to in _roundings(make):
        yield from cases.quantize(make, rows, width, to)
        for plain, fused in (
            (half, kernels.quantize(half, to)),
            (kernels.rms_norm(half, weight, EPS), kernels.rms_norm_quantized(half, weight, EPS, to)),
            (
                kernels.rms_norm(half + delta, weight, EPS),
                kernels.rms_norm_quantized(Unsummed(half.clone(), delta), weight, EPS, to),
            ),
            (kernels.gate_and_mul(x), kernels.gate_and_mul_quantized(x, to)),
        ):
            yield Case(partial(_given, fused), EXACTLY_FP8[make.device.type], partial(_plainly, plain, to))


def _roundings(make: Inputs) -> tuple[Rounding, ...]:
    """Return every way to round activations."""
    coarse, uneven = (torch.tensor(pair, device=make.device) for pair in ((0.013, 0.0), (0.011, -31.0)))
    return (
        Rounding(make.fp8),
        Rounding(make.fp8, group=32),
        Rounding(make.fp8, given=coarse),
        Rounding(make.fp8, bound=torch.tensor([1.5], device=make.device)),
        Rounding(torch.int8),
        Rounding(torch.int8, zeros=True),
        Rounding(torch.int8, given=coarse),
        Rounding(torch.int8, given=uneven, zeros=True),
    )


def _given(value: Any, kernel: Kernel) -> Any:
    return value


def _plainly(x: Tensor, to: Rounding, reference: Kernel) -> Any:
    return reference(x, to)


def _fp8_linears(make: Inputs, rows: int, outputs: int, inputs: int) -> Cases:
    weight = quantize_per_token_reference(make.random(outputs, inputs), make.fp8)
    for bias, scales in product((None, make.random(outputs)), (outputs, 1)):
        yield from cases.fp8_linear(make, rows, weight.values, weight.scales[:scales, 0].contiguous(), bias)


def _narrow_linears(make: Inputs, rows: int, outputs: int, inputs: int) -> Cases:
    """fp8 with a scale an output and with scales of blocks; int8 around zero and not."""
    plain, bias = make.random(outputs, inputs), make.random(outputs)
    for dtype, zeros in ((make.fp8, False), (torch.int8, False), (torch.int8, True)):
        values, scales, *_ = quantize_reference(plain, Rounding(dtype))
        sums = values.sum(1, dtype=torch.int32).float() if zeros else None
        weight = NarrowWeight(values, scales[:, 0].contiguous(), sums=sums)
        yield from cases.narrow_linear(make, rows, weight, Rounding(dtype, zeros=zeros), bias)
    for height, group in ((16, 32), (128, 128)):
        values, _, *_ = quantize_reference(plain, Rounding(make.fp8))
        scales = make.uniform(-(-outputs // height), -(-inputs // group)) + 0.1
        weight = NarrowWeight(values, scales, height, group)
        yield from cases.narrow_linear(make, rows, weight, Rounding(make.fp8, group), None)


def _rope_table(make: Inputs, positions: int, rotary_dim: int) -> Tensor:
    angles = make.uniform(positions, rotary_dim // 2) * 6.28
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _rotations(make: Inputs, heads: int, kv_heads: int, dim: int, rotary_dim: int, norm: bool, blocks: int) -> Cases:
    weights = (make.random(dim), make.random(dim)) if norm else (None, None)
    table, arena = _rope_table(make, 4096, rotary_dim), make.random(blocks, 3, 2, 4, kv_heads, dim)
    for cache in (make.random(2, blocks, 4, kv_heads, dim), arena[:, 1].transpose(0, 1)):
        tokens = cases.new_tokens(make, (heads, kv_heads, kv_heads), dim, 4096, cache, norms=weights)
        bound = (1 + norm) * ROUNDED[make.dtype]
        yield from cases.rotary_and_cache((table, tokens.positions), tokens, bound)
        of_q, of_k = (None if weight is None else weight.float() * 1.001 for weight in weights)
        pairs = replace(tokens, norms=(of_q, of_k), interleaved=True, temperature=make.uniform(len(tokens.q)) + 1)
        pairs = replace(pairs, q_weight=make.uniform(dim) + 0.5)
        yield from cases.rotary_and_cache((table, tokens.positions), pairs, bound)
    scale, cache = torch.tensor([0.02, 0.015], device=make.device), make.random(2, blocks, 4, kv_heads, dim)
    beyond = cases.new_tokens(
        make, (heads, kv_heads, kv_heads), dim, 4096, cache.to(make.fp8), norms=weights, kv_scale=scale
    )
    assert beyond.v is not None
    beyond.v[0], beyond.v[1] = 3e4, -6e4  # what the cache's type cannot hold becomes its largest
    yield from cases.rotary_and_cache((table, beyond.positions), beyond, cases.ROUNDED_FP8)


def _latents(make: Inputs, heads: int, nope: int, rope: int, latent: int, blocks: int) -> Cases:
    """In caches of a layer's own and in an arena, of 16 bits and of fp8."""
    table, arena = _rope_table(make, 4096, rope), make.random(blocks, 3, 1, 4, 1, rope + latent)
    scale, view = torch.tensor([0.02, 7.0], device=make.device), arena[:, 1].transpose(0, 1)
    for cache, kv_scale in (
        (make.random(1, blocks, 4, 1, rope + latent), None),
        (view, None),
        (view.to(make.fp8), scale),
    ):
        for interleaved in (False, True):
            weight = make.random(latent)
            bound = 2 * ROUNDED[make.dtype] if kv_scale is None else cases.ROUNDED_FP8
            yield from cases.latent_rotary_and_cache(
                make, heads, nope, weight.float() * 1.001 if interleaved else weight, EPS, partial(_pair, table), 4096,
                cache, bound, kv_scale, interleaved, interleaved,
            )  # fmt: skip


def _pair(table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return table, positions


def _layers_of_experts(
    make: Inputs, tokens: int, count: int, top_k: int, hidden: int, width: int, shared: bool
) -> Cases:
    """Experts are added to a residual, with half of the next norm; batch-invariant, a token alone gets the same."""
    x, residual, extra = (make.random(tokens, hidden) for _ in range(3))
    experts = Experts(
        make.random(hidden), EPS, make.random(count + shared, hidden) * hidden**-0.5,
        make.random(count, 2 * width, hidden) * hidden**-0.5, make.random(count, hidden, width) * width**-0.5,
        top_k, not shared, scoring=Scoring(top_k == 1), scales_input=top_k == 1,
    )  # fmt: skip
    weights = {name: getattr(experts, name).float() for name in ("norm_weight", "router", "w13", "w2")}
    wide = replace(experts, **weights), extra.float() if shared else None, residual.float().clone()
    right_ones: Any = fused_moe_reference(x.float(), *wide)
    expected, chosen = right_ones
    next_norm, invariant = make.random(hidden), replace(experts, invariant=True)
    one = slice(tokens // 2, tokens // 2 + 1)
    most = 1.0 if tokens <= 16 else 0.5 if make.dtype.itemsize == 2 else 0.01

    def run(kernel: Kernel) -> Any:
        out, ids = kernel(x, replace(experts, next_norm=next_norm), extra if shared else None, residual.clone())
        half_error = 0.0
        if isinstance(out, HalfNormed):
            again = half_norm_reference(out.x, next_norm)
            sums = [half.squares.sum(1) for half in (out, again)]
            half_error, out = relative_error((out.scaled, sums[0]), (again.scaled, sums[1])), out.x
        together, others = kernel(x, invariant, extra if shared else None, residual.clone())
        alone = kernel(x[one], invariant, extra[one] if shared else None, residual[one].clone())[0]
        right = half_error < EPS, torch.equal(together[one], alone)
        both = ((out, ids), (together, others))
        return *(as_chosen(sums, expected, found, chosen, most) for sums, found in both), make.ints(*right)

    rounded = expected.to(make.dtype)
    yield Case(run, EXPERTS[make.dtype], lambda reference: (rounded, rounded, make.ints(1, 1)))
    of_own = {"router": experts.router[:count], "router_norm": make.random(hidden), "activation": "gelu_tanh"}
    factored = replace(experts, **of_own, scoring=Scoring(factors=make.uniform(count)), scales_input=False)
    yield from cases.fused_moe(make, tokens, factored, False)
    if hidden >= 64:  # smaller ones in fp8 are the interpreter's own
        yield from _experts_in_fp8(make, tokens, experts)


def _experts_in_fp8(make: Inputs, tokens: int, plain: Experts) -> Cases:
    held: dict[str, Any] = {"router": plain.router[: plain.num_experts], "renormalize": True}
    weights: dict[str, Any] = {"w13": plain.w13, "w2": plain.w2}
    for name, weight in weights.items():
        values, scales, *_ = quantize_per_token_reference(weight.flatten(0, 1), make.fp8)
        held |= {name: values.view(weight.shape), f"{name}_scale": scales.view(weight.shape[:2])}
    for case in cases.fused_moe(make, tokens, replace(plain, **held), False):
        yield case._replace(bound=EXPERTS[make.dtype] + cases.ROUNDED_FP8)


def _tiled(make: Inputs, bits: int, n: int, k: int, group_size: int) -> Cases:
    """Weights of integers with zeros, and of 4-bit floats."""
    groups, codes = -(-k // group_size), make.integers(0, 1 << bits, n, k).byte()
    zeros = make.integers(0, 1 << bits, n, groups).byte()
    integers = CodedWeight(
        codes, make.uniform(n, groups).half(), zeros, make.uniform(n), bits=bits, group_size=group_size
    )
    yield from cases.widen_tiled(make, tile(integers, make.dtype, gated=n % 2 == 0))
    e8m0, e4m3 = make.integers(110, 140, n, groups).byte(), make.uniform(n, groups).to(torch.float8_e4m3fn)
    for scales in (e8m0, e4m3) if bits == 4 else ():
        floats = CodedWeight(codes, scales, bits=4, values="e2m1", group_size=group_size)
        yield from cases.widen_tiled(make, tile(floats, make.dtype))


def _recurrent(
    make: Inputs, key_heads: int, value_heads: int, key_dim: int, value_dim: int, counts: Sequence[int],
    known: Sequence[int], *scan: Any,
) -> Cases:  # fmt: skip
    """Layers whose projections lie key head by key head, as in Qwen3-Next, or part by part, as in Qwen3.5."""
    group = value_heads // key_heads
    keys, values, apart = key_heads * key_dim, value_heads * value_dim, 2 * key_dim + 2 * group * value_dim
    by_head = Places(0, key_dim, 2 * key_dim, 2 * key_dim + group * value_dim, apart, apart, 0, group, 2 * group)
    by_part = Places(0, keys, 2 * keys, 2 * keys + values, key_dim, group * value_dim, 0, value_heads, group)
    for places, taps, slots in ((by_head, 4, 1), (by_part, 3, 3)):
        heads = DeltaHeads(key_heads, value_heads, key_dim, value_dim, taps, places, slots)
        weights = DeltaWeights(
            make.random(heads.channels, taps) * 0.5, make.uniform(value_heads) * 2 - 2, make.uniform(value_heads),
            make.random(value_dim), EPS,
        )  # fmt: skip
        yield from cases.gated_delta(make, heads, weights, counts, known, *scan)


class Sweep(NamedTuple):
    """Holds the cases of one kernel, and the sizes that they are made of."""

    cases: Callable[..., Cases]
    small: Sequence[tuple[Any, ...]]
    large: Sequence[tuple[Any, ...]]


def _angles(make: Inputs, rotary_dim: int) -> Cases:
    tokens = cases.new_tokens(make, (2, 1, 1), rotary_dim, 64, make.random(2, 4, 4, 1, rotary_dim))
    return cases.step_angles(_rope_table(make, 64, rotary_dim), tokens, ROUNDED[make.dtype])


def _sizes(given: Any) -> Any:
    """JSON's lists as tuples."""
    return tuple(map(_sizes, given)) if isinstance(given, list) else given


_CASES: dict[str, Callable[..., Cases]] = {
    "rms_norm": partial(_normed, cases.rms_norm),
    "rms_norm_quantized": _normed_fp8,
    "layer_norm": _layer_normed,
    "add_up": partial(_normed, cases.add_up),
    "qk_norm": _qk_normed,
    "gate_and_mul": _activated,
    "gate_and_mul_quantized": _activated_fp8,
    "shrink_adapters": partial(_of_adapters, cases.shrink_adapters),
    "expand_adapters": partial(_of_adapters, cases.expand_adapters),
    "quantize": _quantized,
    "fp8_linear": _fp8_linears,
    "narrow_linear": _narrow_linears,
    "step_angles": _angles,
    "rotary_and_cache": _rotations,
    "latent_rotary_and_cache": _latents,
    "fused_moe": _layers_of_experts,
    "gated_delta_step": _recurrent,
    "gated_delta_scan": _recurrent,
    "widen_tiled": _tiled,
}
"""of kernels whose cases need more than cases.py makes of sizes"""
SWEEPS = {
    name: Sweep(_CASES.get(name) or getattr(cases, name), _sizes(sizes["small"]), _sizes(sizes["large"]))
    for name, sizes in json.loads(Path(__file__).with_suffix(".json").read_text()).items()
}
"""by kernel of the table"""


def swept(name: str, make: Inputs, size: tuple[Any, ...]) -> Iterator[tuple[float, float]]:
    """Yield (error, bound) of each case of one size."""
    kernel, reference = getattr(TRITON_KERNELS, name), getattr(REFERENCE_KERNELS, name)
    for case in SWEEPS[name].cases(make, *size):
        yield case.error(kernel, reference), case.bound
