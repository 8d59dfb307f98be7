"""Serves fp8 (W8A8) made of 16- and 32-bit checkpoints as they load: weights in e4m3 with a scale a tensor of the
checkpoint (`fp8`) or a scale an output (`ptpc_fp8`); activations with a scale a token, computed in every step.

A CPU has no fp8 arithmetic worth using: there weights and activations are rounded to fp8 and back, which gives a GPU's
results (but that a GPU does not round a lone token's activations), and is no faster. A rank knows its own slice alone,
and so scales are its own. Experts are stored in the same way; kernels/moe.py computes with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.kernels._triton import fp8_dtype
from headrace.kernels.fp8 import Quantized, quantize_per_token_reference
from headrace.kernels.table import KernelTable, select_kernels
from headrace.quantization import gpu_linear
from headrace.quantization.formats import WeightFormat
from headrace.quantization.scheme import Compute, FusedOps, GemmTable, LinearSpec, Multiply, Part, Scheme, Slot, Weights
from headrace.quantization.unquantized import PlainProduct, bias_slot, empty_bias, rows_of

MULTIPLE = 16
"""Numbers of inputs and of outputs must be multiples of this, for the matrix units."""
AT_ONCE = 1 << 22
"""weights that are quantized at a time, since each takes a few float32 copies meanwhile"""


class RoundedLayout:
    """Rounds an unquantized checkpoint while it loads; keeps `weight` [out, in] fp8 and `weight_scale` [out] fp32."""

    def __init__(self, per_channel: bool) -> None:
        """Take a scale an output if `per_channel`, else one a tensor of the checkpoint, repeated for its outputs."""
        self.per_channel = per_channel

    def create_weights(self, spec: LinearSpec, device: torch.device, experts: tuple[int, ...] = ()) -> Weights:
        shape = (*experts, spec.out_features)
        return {
            "weight": torch.empty(*shape, spec.in_features, dtype=fp8_dtype(device), device=device),
            "weight_scale": torch.empty(shape, dtype=torch.float32, device=device),
            **empty_bias(spec, device, experts),
        }

    def slots(self, spec: LinearSpec, weights: Weights) -> Iterator[tuple[Part, str, Slot]]:
        for part in spec.parts:
            weight, scales = (weights[name][rows_of(part)] for name in ("weight", "weight_scale"))
            store = partial(self._store, weight, scales, spec.dtype)
            yield part, "weight", Slot(part.shape, (part.rows, part.columns), weight, False, store, spec.dtype)
            yield from bias_slot(spec, part, weights)

    def _store(self, weight: Tensor, scales: Tensor, dtype: torch.dtype, values: Tensor) -> None:
        """Quantize values [n, k] into weight [n, k] and scales [n]."""
        values = values.to(dtype).to(weight.device)
        largest = None if self.per_channel else torch.linalg.vector_norm(values, float("inf"))
        step = max(1, AT_ONCE // values.shape[1])
        for start in range(0, values.shape[0], step):
            rows = slice(start, start + step)
            quantized = quantize_per_token_reference(values[rows], weight.dtype, largest)
            weight[rows] = quantized.values
            scales[rows] = quantized.scales[:, 0]

    def dequantize(self, spec: LinearSpec, weights: Weights) -> Weights:
        narrow, scales = weights["weight"].flatten(0, -2), weights["weight_scale"].flatten()
        weight = torch.empty(narrow.shape, dtype=spec.dtype, device=narrow.device)
        step = max(1, AT_ONCE // narrow.shape[1])
        for start in range(0, len(narrow), step):
            rows = slice(start, start + step)
            weight[rows] = narrow[rows].float() * scales[rows, None]
        plain = {**weights, "weight": weight.view(weights["weight"].shape)}
        del plain["weight_scale"]
        return plain


class RoundingProduct:
    """Rounds activations to fp8 with a scale a token, multiplies fp8 by fp8, and multiplies the sums by both scales."""

    def __init__(self, layout: RoundedLayout) -> None:
        self.layout = layout
        self.plain = PlainProduct()
        """multiplies what is rounded and widened again, on a CPU"""
        self.tables: dict[gpu_linear.Size, GemmTable] = {}

    def prepare(self, specs: list[LinearSpec], device: torch.device, kernels: KernelTable | None = None) -> None:
        """Choose the kernels. Raises ConfigError on a GPU without fp8."""
        self.fp8, self.emulates = fp8_dtype(device), device.type == "cpu"
        self.kernels = kernels or select_kernels(device.type)
        if self.emulates:
            self.plain.prepare(specs, device)
            return
        if not torch.version.hip and torch.cuda.get_device_capability(device) < (8, 9):
            name = torch.cuda.get_device_name(device)
            raise ConfigError(
                f"quantization to fp8 needs a GPU of compute capability 8.9 or above, which {name} is not"
            )
        if not all(spec.batch_invariant for spec in specs):
            self.tables = gpu_linear.plan_all(specs, device, self.fp8)

    def refusal(self, spec: LinearSpec) -> str:
        sizes = {"inputs": spec.in_features, "outputs": spec.out_features}
        odd = [f"{size} {name}" for name, size in sizes.items() if size % MULTIPLE]
        return f"{' and '.join(odd)}, not a multiple of {MULTIPLE}" if odd else ""

    def input_dtype(self, spec: LinearSpec) -> torch.dtype | None:
        return self.fp8

    def table(self, spec: LinearSpec) -> GemmTable | None:
        return self.tables.get((1, spec.out_features, spec.in_features))

    def finalize(self, spec: LinearSpec, weights: Weights, fused: FusedOps) -> Compute:
        quantize, multiply, table = self._quantize(fused), self._multiply(spec, weights), self.table(spec)

        def rounding(x: Any) -> Tensor:
            return multiply(x if isinstance(x, Quantized) else quantize(x))

        many = replace(fused, norm_weight=None).wrap(rounding)  # which norms while it quantizes
        if table is None:
            return many
        held = (weights["weight"], weights["weight_scale"], weights.get("bias"))
        return gpu_linear.by_table(*held, table, fused, many, quantize, spec.dtype)

    def widened(self, spec: LinearSpec, weights: Weights) -> Weights:
        return self.layout.dequantize(spec, weights)

    def experts(self, spec: LinearSpec, weights: Weights) -> tuple[Tensor, Tensor | None]:
        return weights["weight"], weights["weight_scale"]

    def _quantize(self, fused: FusedOps) -> Callable[[Any], Quantized]:
        """Return the function that quantizes the input, and norms it in the same pass if that is fused."""
        norm = fused.norm(partial(self.kernels.rms_norm_quantized, fp8=self.fp8))
        return norm or partial(self.kernels.quantize_per_token, fp8=self.fp8)

    def _multiply(self, spec: LinearSpec, weights: Weights) -> Multiply:
        dtype = spec.dtype
        if self.emulates:
            multiply = self.plain.multiply(spec, self.layout.dequantize(spec, weights))
            return lambda x: multiply(x.dequantize(dtype))
        linear, held = self.kernels.fp8_linear, (weights["weight"], weights["weight_scale"], weights.get("bias"))
        return lambda x: linear(*x, *held, dtype)


def fp8(format: WeightFormat, per_channel: bool) -> Scheme:
    """Return a new scheme for weights with a scale an output if `per_channel`, else a scale a tensor."""
    layout = RoundedLayout(per_channel)
    return Scheme(format, layout, RoundingProduct(layout))
