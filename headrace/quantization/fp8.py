"""fp8 W8A8 out of 16- and 32-bit checkpoints, quantized as they load: weights in e4m3 with a scale a tensor of the
checkpoint (`fp8`) or a scale an output (`ptpc_fp8`), activations with a scale a token, found in every step.

A CPU has no fp8 arithmetic worth using: there weights and activations are rounded to fp8 and back, so that results are
those of a GPU (which leaves the activations of a lone token as they are), and nothing is faster. Scales are this rank's
own: it knows its slice alone.
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
from headrace.quantization.scheme import Around, Compute, LinearSpec, Part, Product, Slot

MULTIPLE = 16
"""Matrix units take inputs and outputs by so many."""
AT_ONCE = 1 << 22
"""weights that are quantized in one go, of which there are a few float32 copies meanwhile"""


class Fp8:
    def __init__(self, per_channel: bool) -> None:
        """`per_channel`: a scale for each output, not for each tensor of the checkpoint."""
        self.per_channel = per_channel
        self.choices: dict[tuple[int, int, torch.dtype], Choice] = {}
        self.plans: dict[gpu_linear.Size, gpu_linear.Table] = {}

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

    def create_weights(self, spec: LinearSpec, device: torch.device) -> dict[str, Tensor]:
        held_as = spec.dtype if self.emulates else self.fp8
        weights = {"weight": torch.empty(spec.out_features, spec.in_features, dtype=held_as, device=device)}
        if not self.emulates:
            weights["weight_scale"] = torch.empty(spec.out_features, dtype=torch.float32, device=device)
        if spec.bias and spec.adds_bias:
            weights["bias"] = torch.zeros(spec.out_features, dtype=spec.dtype, device=device)
        return weights

    def slots(self, spec: LinearSpec, weights: dict[str, Tensor]) -> Iterator[tuple[Part, str, Slot]]:
        for part in spec.parts:
            rows = slice(part.offset, part.offset + part.rows.stop - part.rows.start)
            mine = {name: tensor[rows] for name, tensor in weights.items()}
            store = partial(self._store, mine["weight"], mine.get("weight_scale"), spec.dtype)
            yield part, "weight", Slot(part.shape, (part.rows, part.columns), mine["weight"], False, store, spec.dtype)
            if spec.bias:
                yield part, "bias", Slot(part.shape[:1], (part.rows,), mine.get("bias"))

    def _store(self, weight: Tensor, scales: Tensor | None, dtype: torch.dtype, values: Tensor) -> None:
        """values [n, k] -> weight [n, k] and scales [n]; without scales the weight takes what they stand for."""
        values = values.to(dtype).to(weight.device)
        largest = None if self.per_channel else torch.linalg.vector_norm(values, float("inf"))
        step = max(1, AT_ONCE // values.shape[1])
        for start in range(0, values.shape[0], step):
            rows = slice(start, start + step)
            quantized = quantize_per_token_reference(values[rows], self.fp8, largest)
            if scales is None:
                weight[rows] = quantized.dequantize(dtype)
            else:
                weight[rows] = quantized.values
                scales[rows] = quantized.scales[:, 0]

    def finalize(self, spec: LinearSpec, weights: dict[str, Tensor], around: Around) -> Compute:
        quantize = self._quantize(around)
        product = self._product(spec, weights)

        def quantized(x: Any) -> Tensor:
            return product(x if isinstance(x, Quantized) else quantize(x))

        many = replace(around, norm_weight=None).wrap(quantized)
        plan = self.plans.get((1, spec.out_features, spec.in_features))
        if plan is None:
            return many
        held = (weights["weight"], weights["weight_scale"], weights.get("bias"))
        return gpu_linear.hold_fp8(*held, plan, around, quantize, spec.dtype, many)

    def _quantize(self, around: Around) -> Callable[[Any], Quantized]:
        """Of what comes in, normed where `around` norms; a sum not yet made is made in the same pass."""
        fp8, kernels, weight, eps = self.fp8, self.kernels, around.norm_weight, around.norm_eps
        if weight is None or around.rms_norm is None:
            return partial(kernels.quantize_per_token, fp8=fp8)

        def quantize(x: Tensor | HalfNormed | Unsummed) -> Quantized:
            delta = x.delta if isinstance(x, Unsummed) else None
            return kernels.rms_norm_quantized(whole(x), weight, eps, fp8, delta)

        return quantize

    def _product(self, spec: LinearSpec, weights: dict[str, Tensor]) -> Product:
        weight, scales, bias, dtype = weights["weight"], weights.get("weight_scale"), weights.get("bias"), spec.dtype
        if scales is not None:
            linear = self.kernels.fp8_linear
            return lambda x: linear(*x, weight, scales, bias, dtype)
        choice = self.choices.get((spec.out_features, spec.in_features, dtype))
        held = hold_plain(weight, bias) if choice is None else choice.hold(weight, bias)
        return lambda x: held(x.dequantize(dtype))
