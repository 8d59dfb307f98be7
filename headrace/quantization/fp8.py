"""fp8 W8A8 out of 16- and 32-bit checkpoints, quantized as they load: weights in e4m3 with a scale a tensor of the
checkpoint (`fp8`) or a scale an output (`ptpc_fp8`), activations with a scale a token, found in every step.

A CPU has no fp8 arithmetic worth using: there weights and activations are rounded to fp8 and back, so that results are
those of a GPU (which leaves the activations of a lone token as they are), and nothing is faster. Scales are this rank's
own: it knows its slice alone. Experts are held alike; kernels/moe.py applies them.
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
from headrace.kernels.norm import HalfNormed, Unsummed, whole
from headrace.kernels.table import KernelTable, select_kernels
from headrace.quantization import gpu_linear
from headrace.quantization.cpu_linear import Choice, choose_all, hold_plain, spare_memory
from headrace.quantization.formats import FORMATS
from headrace.quantization.scheme import Around, Compute, LinearSpec, Multiply, Part, Scheme, Slot, Table, Weights
from headrace.quantization.unquantized import bias_slot, empty_bias, rows_of

MULTIPLE = 16
"""Matrix units take inputs and outputs by so many."""
AT_ONCE = 1 << 22
"""weights that are quantized in one go, of which there are a few float32 copies meanwhile"""


class RoundedLayout:
    """A plain checkpoint, of which fp8 and a scale an output are kept: `weight`, `weight_scale` [out] fp32."""

    def __init__(self, per_channel: bool) -> None:
        """`per_channel`: each output has a scale of its own, not that of its tensor of the checkpoint."""
        self.per_channel = per_channel

    def create_weights(self, spec: LinearSpec, device: torch.device, experts: tuple[int, ...] = ()) -> Weights:
        shape = (*experts, spec.out_features)
        return {
            "weight": torch.empty(*shape, spec.in_features, dtype=fp8_dtype(device), device=device),
            "weight_scale": torch.empty(shape, dtype=torch.float32, device=device),
            **empty_bias(spec, device),
        }

    def slots(self, spec: LinearSpec, weights: Weights) -> Iterator[tuple[Part, str, Slot]]:
        for part in spec.parts:
            weight, scales = (weights[name][rows_of(part)] for name in ("weight", "weight_scale"))
            store = partial(self._store, weight, scales, spec.dtype)
            yield part, "weight", Slot(part.shape, (part.rows, part.columns), weight, False, store, spec.dtype)
            yield from bias_slot(spec, part, weights)

    def _store(self, weight: Tensor, scales: Tensor, dtype: torch.dtype, values: Tensor) -> None:
        """values [n, k] -> weight [n, k] and scales [n]"""
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
    """Activations are rounded too; sums are multiplied with both scales."""

    def __init__(self, layout: RoundedLayout) -> None:
        self.layout = layout
        self.choices: dict[tuple[int, int, torch.dtype], Choice] = {}
        self.plans: dict[gpu_linear.Size, Table] = {}

    def prepare(self, specs: list[LinearSpec], device: torch.device, kernels: KernelTable | None = None) -> None:
        """Raises ConfigError on a GPU without fp8."""
        self.fp8, self.emulates = fp8_dtype(device), device.type == "cpu"
        self.kernels = kernels or select_kernels(device.type)
        if self.emulates:
            if not all(spec.batch_invariant for spec in specs):
                self.choices = choose_all(specs, spare_bytes=spare_memory())
        elif not torch.version.hip and torch.cuda.get_device_capability(device) < (8, 9):
            name = torch.cuda.get_device_name(device)
            raise ConfigError(
                f"quantization to fp8 needs a GPU of compute capability 8.9 or above, which {name} is not"
            )
        if not self.emulates and not all(spec.batch_invariant for spec in specs):
            self.plans = gpu_linear.plan_all(specs, device, self.fp8)

    def refusal(self, spec: LinearSpec) -> str:
        sizes = {"inputs": spec.in_features, "outputs": spec.out_features}
        odd = [f"{size} {name}" for name, size in sizes.items() if size % MULTIPLE]
        return f"{' and '.join(odd)}, not a multiple of {MULTIPLE}" if odd else ""

    def input_dtype(self, spec: LinearSpec) -> torch.dtype | None:
        return self.fp8

    def table(self, spec: LinearSpec) -> Table | None:
        return self.plans.get((1, spec.out_features, spec.in_features))

    def finalize(self, spec: LinearSpec, weights: Weights, around: Around) -> Compute:
        quantize = self._quantize(around)
        multiply = self._multiply(spec, weights)

        def quantized(x: Any) -> Tensor:
            return multiply(x if isinstance(x, Quantized) else quantize(x))

        many = replace(around, norm_weight=None).wrap(quantized)
        table = self.table(spec)
        if table is None:
            return many
        held = (weights["weight"], weights["weight_scale"], weights.get("bias"))
        return gpu_linear.hold_fp8(*held, table, around, quantize, spec.dtype, many)

    def experts(self, spec: LinearSpec, weights: Weights) -> tuple[Tensor, Tensor | None]:
        return weights["weight"], weights["weight_scale"]

    def _quantize(self, around: Around) -> Callable[[Any], Quantized]:
        """Of what comes in, normed where `around` norms; a sum not yet made is made in the same pass."""
        fp8, kernels, weight, eps = self.fp8, self.kernels, around.norm_weight, around.norm_eps
        if weight is None or around.rms_norm is None:
            return partial(kernels.quantize_per_token, fp8=fp8)

        def quantize(x: Tensor | HalfNormed | Unsummed) -> Quantized:
            delta = x.delta if isinstance(x, Unsummed) else None
            return kernels.rms_norm_quantized(whole(x), weight, eps, fp8, delta)

        return quantize

    def _multiply(self, spec: LinearSpec, weights: Weights) -> Multiply:
        if not self.emulates:
            linear, dtype = self.kernels.fp8_linear, spec.dtype
            held = (weights["weight"], weights["weight_scale"], weights.get("bias"))
            return lambda x: linear(*x, *held, dtype)
        plain, dtype = self.layout.dequantize(spec, weights), spec.dtype
        choice = self.choices.get((spec.out_features, spec.in_features, dtype))
        hold = hold_plain if choice is None else choice.hold
        multiply = hold(plain["weight"], plain.get("bias"))
        return lambda x: multiply(x.dequantize(dtype))


def fp8(per_channel: bool) -> Scheme:
    layout = RoundedLayout(per_channel)
    return Scheme(FORMATS["ptpc_fp8" if per_channel else "fp8"], layout, RoundingProduct(layout))
