"""Weights as they are in the checkpoint: float16, bfloat16 or float32, one `weight` and perhaps one `bias` a part."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headrace.kernels.matmul import matmul
from headrace.kernels.table import KernelTable
from headrace.quantization import gpu_linear
from headrace.quantization.cpu_linear import Choice, choose_all, hold_plain, spare_memory
from headrace.quantization.formats import PLAIN
from headrace.quantization.scheme import Around, Compute, LinearSpec, Multiply, Part, Scheme, Slot, Table, Weights


class PlainLayout:
    def create_weights(self, spec: LinearSpec, device: torch.device, experts: tuple[int, ...] = ()) -> Weights:
        weight = torch.empty(*experts, spec.out_features, spec.in_features, dtype=spec.dtype, device=device)
        used = max(part.offset + _length(part.rows) for part in spec.parts)
        weight[..., used:, :].zero_()
        return {"weight": weight, **empty_bias(spec, device)}

    def slots(self, spec: LinearSpec, weights: Weights) -> Iterator[tuple[Part, str, Slot]]:
        for part in spec.parts:
            rows = rows_of(part)
            yield part, "weight", Slot(part.shape, (part.rows, part.columns), weights["weight"][rows])
            yield from bias_slot(spec, part, weights)

    def dequantize(self, spec: LinearSpec, weights: Weights) -> Weights:
        return weights


class PlainProduct:
    def __init__(self) -> None:
        self.choices: dict[tuple[int, int, torch.dtype], Choice] = {}
        self.plans: dict[gpu_linear.Size, gpu_linear.Table] = {}

    def prepare(self, specs: list[LinearSpec], device: torch.device, kernels: KernelTable | None = None) -> None:
        if all(spec.batch_invariant for spec in specs):  # nothing to choose
            return
        if device.type == "cpu":
            self.choices = choose_all(specs, spare_bytes=spare_memory())
        else:
            self.plans = gpu_linear.plan_all(specs, device)

    def refusal(self, spec: LinearSpec) -> str:
        return ""

    def input_dtype(self, spec: LinearSpec) -> torch.dtype | None:
        return None

    def table(self, spec: LinearSpec) -> Table | None:
        return self.plans.get((spec.dtype.itemsize, spec.out_features, spec.in_features))

    def finalize(self, spec: LinearSpec, weights: Weights, around: Around) -> Compute:
        table = self.table(spec)
        if table is not None:
            return gpu_linear.hold(weights["weight"], weights.get("bias"), table, around)
        return around.wrap(self._multiply(spec, weights))

    def experts(self, spec: LinearSpec, weights: Weights) -> tuple[Tensor, Tensor | None]:
        return weights["weight"], None

    def _multiply(self, spec: LinearSpec, weights: Weights) -> Multiply:
        weight, bias = weights["weight"], weights.get("bias")
        if spec.batch_invariant and weight.device.type != "cpu":  # a CPU runs tokens one at a time
            return lambda x: matmul(x, weight, bias)
        choice = self.choices.get((spec.out_features, spec.in_features, spec.dtype))
        if choice is None:
            return hold_plain(weight, bias)
        return choice.hold(weight, bias)


def unquantized() -> Scheme:
    return Scheme(PLAIN, PlainLayout(), PlainProduct())


def empty_bias(spec: LinearSpec, device: torch.device) -> Weights:
    if not (spec.bias and spec.adds_bias):
        return {}
    return {"bias": torch.zeros(spec.out_features, dtype=spec.dtype, device=device)}


def bias_slot(spec: LinearSpec, part: Part, weights: Weights) -> Iterator[tuple[Part, str, Slot]]:
    if spec.bias:
        bias = weights["bias"][rows_of(part)] if spec.adds_bias else None
        yield part, "bias", Slot(part.shape[:1], (part.rows,), bias)


def rows_of(part: Part) -> slice:
    """of our weight"""
    return slice(part.offset, part.offset + _length(part.rows))


def _length(rows: slice) -> int:
    return int(rows.stop) - int(rows.start)
