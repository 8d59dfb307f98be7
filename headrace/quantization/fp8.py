"""Serves weights and activations of 8 bits (W8A8) as products of narrow numbers: fp8 made of 16- and 32-bit checkpoints
as they load, and fp8 and int8 that checkpoints hold (stored.py).

Made at load, weights are e4m3 with a scale a tensor of the checkpoint (`fp8`) or a scale an output (`ptpc_fp8`), and
activations have a scale a token, computed in every step.

A CPU has no such arithmetic worth using: there weights and activations are rounded to 8 bits and back, which gives a
GPU's results (but that a GPU does not round a lone token's activations), and is no faster. Scales of weights that are
made at load are those of a rank's slice. So are scales of activations on a GPU; on a CPU they are those of the whole
row, whatever the number of ranks. Experts are stored in the same way; kernels/moe.py computes with them. Where the
checkpoint brings a scale of activations for each expert, the largest counts, as in vLLM.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.kernels._triton import fp8_dtype
from headrace.kernels.coded import CodedWeight
from headrace.kernels.fp8 import NarrowWeight, Quantized, Rounding
from headrace.kernels.table import KernelTable, select_kernels
from headrace.kernels.tiled import tile, why_not_tiled
from headrace.quantization import gpu_linear
from headrace.quantization.formats import WeightFormat
from headrace.quantization.scheme import (
    Compute,
    FusedOps,
    GemmTable,
    HeldExperts,
    LinearSpec,
    Multiply,
    Product,
    Scheme,
    Weights,
)
from headrace.quantization.stored import StoredLayout, of_e4m3fn
from headrace.quantization.unquantized import PlainProduct


class RoundingProduct(Product):
    """Rounds activations to 8 bits as the layout says, multiplies narrow numbers, and multiplies the sums by both
    scales."""

    def __init__(self, layout: StoredLayout) -> None:
        self.layout = layout
        self.plain = PlainProduct()
        """multiplies what is widened, on a CPU after rounding"""
        self.tables: dict[gpu_linear.Size, GemmTable] = {}
        self.widened_for: Counter[str] = Counter()
        """why weights could not stay in 8 bits on a GPU -> how many"""

    def prepare(self, specs: list[LinearSpec], device: torch.device, kernels: KernelTable | None = None) -> None:
        """Choose the kernels. Raises ConfigError on a GPU without fp8, unless the checkpoint is in fp8."""
        self.emulates = device.type == "cpu"
        self.kernels = kernels or select_kernels(device.type)
        self.fp8 = fp8_dtype(device)
        self.why_plain = "" if self.emulates else self._why_plain(device)
        if self.emulates or self.why_plain:
            self.plain.prepare(specs, device)
        elif not all(spec.batch_invariant for spec in specs):
            held = [spec for spec in specs if not self._is_plain(spec)]
            self.tables = gpu_linear.plan_all(held, device, self.planned_rounding)

    def _why_plain(self, device: torch.device) -> str:
        """Say why weights are widened at load on this GPU; "" if they are not."""
        if not self.layout.rounds:
            return "activations are not quantized"
        if self.layout.numbers == "int8":
            return ""
        if not torch.version.hip and torch.cuda.get_device_capability(device) < (8, 9):
            name = torch.cuda.get_device_name(device)
            if self.layout.made_at_load:
                raise ConfigError(
                    f"quantization to fp8 needs a GPU of compute capability 8.9 or above, which {name} is not"
                )
            return f"{name} has no fp8 arithmetic, which needs compute capability 8.9 or above"
        return ""

    def refusal(self, spec: LinearSpec) -> str:
        return _odd_sizes(spec) if self.layout.made_at_load else ""

    def rounding(self, spec: LinearSpec, weights: Weights) -> Rounding | None:
        return None if self._is_plain(spec) else self.layout.rounding(spec, weights)

    def table(self, spec: LinearSpec) -> GemmTable | None:
        if self._is_plain(spec):
            return self.plain.table(spec)
        return self.tables.get(gpu_linear.size_of(spec, self.planned_rounding(spec)))

    def planned_rounding(self, spec: LinearSpec) -> Rounding:
        """Return how activations are rounded, but for what the speed of products does not depend on."""
        if self.layout.numbers == "int8":
            return Rounding(torch.int8)
        return Rounding(self.fp8, self.layout.held_block(spec)[1])

    def finalize(self, spec: LinearSpec, weights: Weights, fused: FusedOps) -> Compute:
        if self._is_plain(spec):
            if not self.emulates:
                self.widened_for[self.why_plain or "a rank's inputs begin within a group, or groups are small"] += 1
            wide = self.layout.dequantize(spec, weights)
            weights.clear()
            weights.update(wide)
            return self.plain.finalize(spec, wide, fused)
        to = self.layout.rounding(spec, weights)
        multiply, table, plain = self._multiply(spec, weights), self.table(spec), partial(self.kernels.quantize, to=to)
        quantize = self._quantize(fused, to)  # which norms in the same pass
        together = replace(fused, norm_weight=None).wrap(lambda x: multiply(_quantized(x, quantize)))
        apart = fused.wrap(lambda x: multiply(_quantized(x, plain)))

        def many(x: Any, residual: Tensor | None) -> Any:
            return (apart if fused.apart else together)(x, residual)

        if table is None:
            return many
        narrow, bias = self.narrow_weight(spec, weights), weights.get("bias")
        return gpu_linear.by_table(narrow, bias, table, fused, many, quantize, spec.dtype)

    def widened(self, spec: LinearSpec, weights: Weights) -> Weights:
        return weights if self._is_plain(spec) else self.layout.dequantize(spec, weights)

    def experts(self, spec: LinearSpec, weights: Weights) -> HeldExperts:
        """Return what kernels/moe.py takes; of int8 and of blocks on a GPU a TiledWeight, gated if it has gate and up,
        whose activations are not rounded; a CPU rounds them beside a weight that is widened."""
        held = self.layout.numbers != "fp8" and not self.emulates and spec.dtype.itemsize == 2
        if held and self.layout.whole_groups(spec):
            packed = self._packed(spec, weights)
            why = why_not_tiled(packed)
            if not why:
                return HeldExperts(tile(packed, spec.dtype, gated=len(spec.parts) > 1))
            self.widened_for[why] += 1
            return HeldExperts(self.layout.dequantize(spec, weights)["weight"])
        if self.why_plain or self.layout.numbers != "fp8" or not self.layout.rounds:
            rounding = self.layout.rounding(spec, weights) if self.emulates and self.layout.rounds else None
            if not self.emulates:
                self.widened_for[self.why_plain or "experts have no kernels for them"] += 1
            return HeldExperts(self.layout.dequantize(spec, weights)["weight"], rounding=rounding)
        return HeldExperts(weights["weight"], weights["weight_scale"], self.layout.rounding(spec, weights))

    def _packed(self, spec: LinearSpec, weights: Weights) -> CodedWeight:
        """Return experts in int8, or in fp8 with a scale a block, row by row."""
        codes, scales = weights["weight"].view(torch.uint8), weights["weight_scale"]
        if self.layout.numbers == "int8":
            return CodedWeight(codes ^ 128, scales[..., None], bits=8, group_size=spec.in_features)
        rows, size = self.layout.held_block(spec)
        of_outputs = scales.repeat_interleave(rows, -2)[:, : spec.out_features] / of_e4m3fn(weights["weight"].dtype)
        return CodedWeight(codes, of_outputs, bits=8, values="e4m3", group_size=size)

    def notes(self) -> list[str]:
        return [f"{count} weights in 8 bits are widened at load: {why}" for why, count in self.widened_for.items()]

    def _is_plain(self, spec: LinearSpec) -> bool:
        """Tell whether the linear's weights are widened at load, and its activations are not rounded."""
        if not self.layout.rounds or self.why_plain:
            return True
        return not self.emulates and not self.layout.whole_groups(spec)

    def _quantize(self, fused: FusedOps, to: Rounding) -> Callable[[Any], Quantized]:
        """Return the function that quantizes the input, and norms it in the same pass if that is fused."""
        norm = fused.norm(partial(self.kernels.rms_norm_quantized, to=to))
        return norm or partial(self.kernels.quantize, to=to)

    def _multiply(self, spec: LinearSpec, weights: Weights) -> Multiply:
        dtype = spec.dtype
        if self.emulates:
            multiply = self.plain.multiply(spec, self.layout.dequantize(spec, weights))
            return lambda x: multiply(x.dequantize(dtype))
        narrow, bias = self.narrow_weight(spec, weights), weights.get("bias")
        if gpu_linear.has_library(narrow):
            linear = self.kernels.fp8_linear
            return lambda x: linear(x, narrow.values, narrow.scales, bias, dtype)
        narrow_linear = self.kernels.narrow_linear
        return lambda x: narrow_linear(x, narrow, bias, dtype)

    def narrow_weight(self, spec: LinearSpec, weights: Weights) -> NarrowWeight:
        """Return the weight as kernels take it."""
        values, zeros = weights["weight"], self.layout.rounding(spec, weights).zeros
        sums = values.sum(1, dtype=torch.int32).float() if zeros else None
        return NarrowWeight(values, weights["weight_scale"], *self.layout.held_block(spec), sums)


def _quantized(x: Any, quantize: Callable[[Any], Quantized]) -> Quantized:
    return x if isinstance(x, Quantized) else quantize(x)


def _odd_sizes(spec: LinearSpec) -> str:
    """Say which sizes the matrix units cannot take; "" if they can take both."""
    sizes = {"inputs": spec.in_features, "outputs": spec.out_features}
    multiple = gpu_linear.MULTIPLE
    odd = [f"{size} {name}" for name, size in sizes.items() if size % multiple]
    return f"{' and '.join(odd)}, not a multiple of {multiple}" if odd else ""


def stored(
    format: WeightFormat,
    numbers: Literal["fp8", "int8"],
    scale: str,
    scale_name: str = "weight_scale",
    activations: str = "token",
    **more: Any,
) -> Scheme:
    """Return a new scheme for weights in e4m3 or int8, with the fields of a StoredLayout."""
    dtype = torch.int8 if numbers == "int8" else torch.float8_e4m3fn
    layout = StoredLayout(dtype, scale, scale_name, activations, **more)
    return Scheme(format, layout, RoundingProduct(layout))
