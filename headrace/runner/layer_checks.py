"""Checks what layers do by other means than the kernel table: attention's backend, its fused decode, linears.

These checks come after those of kernel_checks.py, so that norms and activations are right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.attention.triton_attn import TritonAttention
from headrace.errors import ConfigError
from headrace.kernels._triton import DEVICE_FAMILY
from headrace.kernels.activation import GATES
from headrace.kernels.attention import paged_attention_reference
from headrace.kernels.attention_config import AttentionPlan, by_copy_engine, plan_attention
from headrace.kernels.cases import made_up_adapters, relative_error, written
from headrace.kernels.decode import decode_attention_reference
from headrace.kernels.fp8 import Quantized, Rounding, quantize_reference
from headrace.kernels.gemm_config import BUCKETS
from headrace.kernels.norm import HalfNormed, summed
from headrace.kernels.table import REFERENCE_KERNELS
from headrace.layers.adapters import Seat
from headrace.layers.attention import Attention
from headrace.layers.linear import Linear, RowParallelLinear
from headrace.layers.mlp import GatedMLP
from headrace.quantization.scheme import GemmTable
from headrace.quantization.unquantized import unquantized
from headrace.runner.kernel_checks import TOKENS, WIDE, Subject, cache_bound, cache_scale
from headrace.runner.latent_checks import latent_checks
from headrace.runner.made_up_cache import LONGEST, filled_cache, longest_sequence
from headrace.runner.self_check import Check

W8A8 = {False: 6e-2, True: 0.12}
"""Bounds of products over fp8 activations against plain ones; True: of gate times up, which may be in fp8 again"""
ROWS_AT_ONCE = 1 << 25
"""Elements of a weight that are widened to float32 at a time"""
EPS = 1e-6
"""For a norm that the next layer finishes, with an epsilon of its own"""


DECODES = (1, 4, 8, 16, 32, 64, 128, 256)
"""Requests of a step, so that keys are split into as many parts as serving does and nothing is compiled later"""


def layer_checks(subject: Subject) -> Iterator[Check]:
    """Yield the checks of attention and linears."""
    layers = subject.attention_layers()
    for layer in layers:
        if layer.decode is not None:
            yield from (_decode_check(subject, layer, requests) for requests in DECODES)
    if isinstance(subject.backend, TritonAttention):
        for layer in layers:
            if subject.backend.prefills_by_copy_engine(layer.spec, subject.dtype, subject.shape.dtype):
                yield _prompt_check(subject, layer, subject.backend)
    if subject.device.type != "cpu" or subject.backend.name != "TORCH_SDPA":  # it is the reference of a CPU
        yield from (_attention_check(subject, layer) for layer in layers)
    yield from latent_checks(subject)
    yield from _linear_checks(subject)
    yield from _fp8_checks(subject)


def _decode_check(subject: Subject, layer: Attention, requests: int) -> Check:
    bound = cache_bound(subject, WIDE)

    def error() -> float:  # after a demotion there is nothing left to check
        return 0.0 if layer.decode is None else _decode_error(subject, layer, requests)

    def demote() -> str:
        subject.drop_fused_decode()
        return "separate kernels"

    return Check("decode_attention", error, bound, demote)


def _decode_error(subject: Subject, layer: Attention, requests: int) -> float:
    """Compare one step of `requests` decodes, the last of which is padding if there are several."""
    longest = longest_sequence(subject)
    lengths = [longest, *((37 * i) % min(200, longest) + 1 for i in range(1, requests))]
    if requests > 1:
        lengths[-1] = 0
    cache, metadata = filled_cache(subject, layer.spec, [1] * requests, lengths)
    norms = layer.head_weights()
    q, k, v = subject.inputs.random(requests, sum(layer.heads), layer.spec.head_dim).split(layer.heads, dim=1)
    spec, sinks = layer.spec, _sinks(subject, layer)
    table, temperature = subject.rope(layer), subject.temperature(layer, requests)
    angles = None if table is None else subject.kernels.step_angles(table, metadata.positions)[0]
    scale, other = cache_scale(subject), cache.clone()
    assert layer.decode is not None
    out = layer.decode(
        q, k, v, angles, cache, metadata, spec, *norms, layer.eps, scale, temperature=temperature,
        q_weight=layer.q_weight, **sinks,
    )  # fmt: skip
    expected = decode_attention_reference(
        q, k, v, table, other, metadata.sequences(-1), spec.scale, spec.sliding_window, *norms, layer.eps, scale,
        sinks.get("sinks"), spec.chunked, spec.soft_cap, spec.interleaved, temperature, layer.q_weight,
    )  # fmt: skip
    slots = metadata.slot_mappings[-1]
    return relative_error((out, *written(cache, slots)), (expected, *written(other, slots)))


def _sinks(subject: Subject, layer: Attention) -> dict[str, Tensor]:
    """Return made-up sinks in place of the layer's, if it has any: of all sizes up to that of LONGEST keys together,
    so that they show whatever the number of keys."""
    if layer.sinks is None:
        return {}
    return {"sinks": subject.inputs.uniform(*layer.sinks.shape).mul_(math.log(LONGEST)).to(layer.sinks.dtype)}


def _prompt_check(subject: Subject, layer: Attention, backend: TritonAttention) -> Check:
    """Check the kernel for long prompts on short ones."""

    def error() -> float:
        longest, spec = longest_sequence(subject), layer.spec
        counts, lengths = [min(200, longest), 40, 3], [longest, 40, 2 * subject.shape.block_size]
        size = min(2, subject.shape.dtype.itemsize)
        plan = plan_attention(
            3, sum(counts), 0, longest, spec.num_heads, spec.num_kv_heads, spec.head_dim, size, DEVICE_FAMILY, num_sms=1
        )
        group = spec.num_heads // spec.num_kv_heads
        plan = by_copy_engine(plan, 3, sum(counts), max(lengths), spec.head_dim, group, size)
        return _attention_error(subject, layer, counts, lengths, plan)

    def demote() -> str:
        backend.copy_engine = False
        backend.unpacked.clear()
        return "the kernel of short ones"

    return Check("prefill_attention", error, cache_bound(subject, WIDE), demote)


def _attention_check(subject: Subject, layer: Attention) -> Check:
    def error() -> float:
        block = subject.shape.block_size
        longest = longest_sequence(subject)
        mixed = ([1, 1, 24, 40], [longest, 3, min(longest, 24 + 2 * block + 1), 40])
        decodes = ([1] * 4, [1, longest, 17, 2 * block])
        prompts = ([longest] * 2, [longest] * 2)  # enough tiles that keys are not split
        return max(_attention_error(subject, layer, *case) for case in (mixed, decodes, prompts))

    def demote() -> str:
        raise ConfigError(
            f"attention backend {subject.backend.name} disagrees with its reference on this model and device: "
            f"it must not serve; choose another --attention-backend"
        )

    return Check(f"attention backend {subject.backend.name}", error, cache_bound(subject, WIDE), demote)


def _attention_error(
    subject: Subject, layer: Attention, counts: list[int], lengths: list[int], plan: AttentionPlan | None = None
) -> float:
    cache, metadata = filled_cache(subject, layer.spec, counts, lengths)
    spec, scale = layer.spec, cache_scale(subject)
    q = subject.inputs.random(sum(counts), layer.heads[0], spec.head_dim)
    if plan is not None and isinstance(subject.backend, TritonAttention):
        metadata.plan[spec] = subject.backend.launches(plan, metadata, spec, q)
    sinks = _sinks(subject, layer)
    later = {name: tensor.clone() for name, tensor in sinks.items()}
    out = layer.attend(q, cache, metadata, spec, scale, **sinks)
    again = layer.attend(q.clone(), cache.clone(), metadata, spec, scale, **later)  # as a later layer of the step
    expected = paged_attention_reference(
        q, cache, metadata.sequences(-1), spec.scale, spec.sliding_window, scale, None, sinks.get("sinks"),
        spec.chunked, spec.soft_cap,
    )  # fmt: skip
    return relative_error((out, again), (expected, expected))


def _linear_checks(subject: Subject) -> Iterator[Check]:
    """Check our own kernels for few tokens, size by size and bucket by bucket; the vendor's library replaces them."""
    by_table: dict[int, tuple[str, GemmTable, list[Linear]]] = {}
    for layer in subject.ends(Linear, _launch_key):
        table = _table(layer)
        if table is not None:
            name = f"linear_{layer.spec.out_features}x{layer.spec.in_features}"
            by_table.setdefault(id(table), (name, table, []))[2].append(layer)
    for name, table, layers in by_table.values():
        for low, bucket in zip((0, *BUCKETS), BUCKETS, strict=False):
            tokens = next(count for count in (*TOKENS, bucket) if low < count <= bucket)
            # also where the library is used: ranks measure their tables apart, and must run the same checks
            error = partial(_linear_error, subject, layers, tokens, table)
            demote = partial(_by_library, table, low, bucket)
            yield Check(f"{name}_up_to_{bucket}_tokens", error, WIDE[subject.dtype], demote)


def _launch_key(layer: Linear) -> tuple[object, ...]:
    """Return all that a linear's launches depend on."""
    return layer.spec.in_features, layer.spec.out_features, layer.fused.activation is None, type(layer), layer.scheme


def _table(layer: Linear) -> GemmTable | None:
    """Return which kernel serves how many tokens, for all linears of the size; None: no kernel of ours."""
    return layer.scheme.product.table(layer.spec) if layer.weights and layer.applied else None


def _by_library(table: GemmTable, low: int, bucket: int) -> str:
    table[low + 1 : bucket + 1] = [None] * (bucket - low)
    return "the vendor's library"


def _linear_error(subject: Subject, layers: list[Linear], tokens: int, table: GemmTable) -> float:
    """Compare the layers themselves with plain products of the same weights in float32, also with made-up adapters
    where there may be some; 0 where `table` leaves the products to the library. The input of a linear that rounds it is
    rounded already, hence normed too."""
    worst, config = 0.0, table[tokens]
    for layer in layers if config is not None else ():
        x: Any = subject.inputs.random(tokens, layer.spec.in_features)
        if layer.rounding is not None and config is not None and config.block_m > 1:
            x = quantize_reference(x, layer.rounding)
        worst = max(worst, _error_of(subject, layer, x))
        if tokens > 1 and isinstance(seat := layer.fused.addend, Seat):  # one token is computed as several are
            with _adapted(subject, seat, tokens):
                worst = max(worst, _error_of(subject, layer, x))
    return worst


@contextmanager
def _adapted(subject: Subject, seat: Seat, tokens: int) -> Iterator[None]:
    """Let a linear of so many tokens have made-up adapters within the context."""
    held, inputs = seat.weights, subject.inputs
    seat.weights = made_up_adapters(inputs, held.sizes, held.a.shape[2], held.rank)
    try:
        with seat.owner.applied(inputs.integers(-1, len(seat.weights.a), tokens, dtype=torch.int32)):
            yield
    finally:
        seat.weights = held


def _error_of(subject: Subject, layer: Linear, x: Any) -> float:
    expected, residual = _reference(layer, x, _given_rounding(layer, x)), None
    if isinstance(layer, RowParallelLinear):
        residual = expected.to(subject.dtype).flip(-1).contiguous()
        expected += residual
    out = layer.compute(x, residual)
    if isinstance(out, Quantized) and (to := _output_rounding(subject, layer)) is not None and to.given is not None:
        expected = quantize_reference(expected.to(subject.dtype), to).dequantize(torch.float32)
    error = relative_error(_tensor(out, subject.dtype), expected.to(subject.dtype))
    if isinstance(out, HalfNormed) and (weight := layer.fused.next_norm) is not None:
        normed = REFERENCE_KERNELS.rms_norm(out.x, weight, EPS)
        error = max(error, relative_error(out.normed(EPS).to(subject.dtype), normed))
    half = _half_normed(subject, layer, x.shape[0])
    if half is not None:
        out, expected = layer.compute(half, None), _reference(layer, half.x)
        error = max(error, relative_error(_tensor(out, subject.dtype), expected.to(subject.dtype)))
    return error


def _tensor(out: Any, dtype: torch.dtype) -> Tensor:
    return out.dequantize(dtype) if isinstance(out, Quantized) else summed(out)


def _half_normed(subject: Subject, layer: Linear, tokens: int) -> HalfNormed | None:
    """Return what the linear before the norm of `layer` hands to it, if it leaves the norm for `layer` to finish."""
    weight, table = layer.fused.norm_weight, _table(layer)
    config = table[tokens] if table is not None and tokens < len(table) else None
    if config is None or (config.block_m > 1 and layer.rounding is not None):
        return None  # it norms with a kernel of its own, which also quantizes
    for before in subject.layers(RowParallelLinear):
        left = before.fused.next_norm
        if weight is not None and left is not None and left.data_ptr() == weight.data_ptr():
            sizes = before.spec.in_features, before.spec.out_features
            out = before.compute(*(subject.inputs.random(tokens, size) for size in sizes))
            return out if isinstance(out, HalfNormed) else None
    return None


def _given_rounding(layer: Linear, x: Any) -> Rounding | None:
    """Return how the layer rounds plain x if its scales are static: what they make of made-up numbers, which may be far
    smaller or larger than a model's, is not for a kernel to answer for."""
    table = _table(layer)
    config = table[x.shape[0]] if table is not None and x.shape[0] < len(table) else None
    if isinstance(x, Quantized) or layer.rounding is None or (config is not None and config.block_m == 1):
        return None
    return layer.rounding if layer.rounding.given is not None else None


def _output_rounding(subject: Subject, layer: Linear) -> Rounding | None:
    """Return how the layer's outputs are rounded for the one that reads them."""
    readers = [mlp.down_proj for mlp in subject.layers(GatedMLP) if mlp.gate_up_proj is layer]
    return readers[0].rounding if readers else None


def _reference(layer: Linear, x: Any, to: Rounding | None = None) -> Tensor:
    """Return the layer's output in plain float32 # [num_tokens, outputs], its (normed) input rounded as `to` says."""
    fused = layer.fused
    if isinstance(x, Quantized):
        x = x.dequantize(torch.float32)
    elif fused.norm_weight is not None:
        x = REFERENCE_KERNELS.rms_norm(x, fused.norm_weight, fused.norm_eps)
    if to is not None:
        x = quantize_reference(x, to).dequantize(torch.float32)
    plain, wide = layer.scheme.product.widened(replace(layer.spec, dtype=torch.float32), layer.weights), x.float()
    weight = plain["weight"]
    step = max(1, ROWS_AT_ONCE // weight.shape[1])
    out = torch.cat([F.linear(wide, rows.float()) for rows in weight.split(step)], dim=1)
    if (bias := plain.get("bias")) is not None:
        out += bias.float()
    if isinstance(seat := fused.addend, Seat) and seat.wanted:
        slots = seat.slots
        h = REFERENCE_KERNELS.shrink_adapters(wide, slots, seat.weights)
        REFERENCE_KERNELS.expand_adapters(out, h, slots, seat.weights)
    if layer.fused.activation is not None:
        gate, up = out.chunk(2, dim=-1)
        out = GATES[layer.fused.gate](gate) * up
    return out


def _fp8_checks(subject: Subject) -> Iterator[Check]:
    """Check what fp8 does to activations, size by size."""
    for layer, _ in subject.rounding_linears():
        if layer.weights:
            name = f"fp8_linear_{layer.spec.out_features}x{layer.spec.in_features}"
            demote = partial(_without_fp8, subject, layer)
            error = partial(_fp8_error, subject, layer)
            yield Check(name, error, W8A8[layer.fused.activation is not None], demote)


def _fp8_error(subject: Subject, layer: Linear) -> float:
    inputs = (subject.inputs.random(tokens, layer.spec.in_features) for tokens in (1, 100, 200))
    return max(_error_of(subject, layer, x) for x in inputs)


def _without_fp8(subject: Subject, wrong: Linear) -> str:
    """Compute all linears of the size with the same weights, widened, over plain activations."""
    plain, rounding = unquantized(), wrong.scheme
    for layer in subject.layers(Linear):
        same = (layer.spec.out_features, layer.spec.in_features) == (wrong.spec.out_features, wrong.spec.in_features)
        if same and layer.scheme is rounding:
            layer.weights, layer.scheme = rounding.product.widened(layer.spec, layer.weights), plain
            layer.rounding = None
            compute = plain.product.finalize(layer.spec, layer.weights, layer.fused)
            layer.compute = _of_plain_inputs(compute, subject.dtype)
    return "linears over plain activations"


def _of_plain_inputs(compute: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    def plainly(x: Any, residual: Tensor | None) -> Any:
        return compute(x.dequantize(dtype) if isinstance(x, Quantized) else x, residual)

    return plainly
