"""Serves weights as they are in the checkpoint (float16, bfloat16, float32): a `weight` and perhaps a `bias` a part."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from headrace.kernels.matmul import matmul, matmul_slices
from headrace.kernels.table import KernelTable
from headrace.quantization import gpu_linear
from headrace.quantization.cpu_linear import Choice, choose_all, hold_plain, spare_memory
from headrace.quantization.formats import PLAIN, WeightFormat
from headrace.quantization.scheme import (
    Compute,
    FusedOps,
    GemmTable,
    HeldExperts,
    LinearSpec,
    Multiply,
    Part,
    Product,
    Scheme,
    Slot,
    Weights,
)


class PlainLayout:
    """Keeps `weight` [out, in] and `bias` [out], each part of the checkpoint in its rows."""

    def create_weights(self, spec: LinearSpec, device: torch.device, experts: tuple[int, ...] = ()) -> Weights:
        weight = torch.empty(*experts, spec.out_features, spec.in_features, dtype=spec.dtype, device=device)
        used = max(part.offset + _length(part.rows) for part in spec.parts)
        weight[..., used:, :].zero_()
        return {"weight": weight, **empty_bias(spec, device, experts)}

    def slots(self, spec: LinearSpec, weights: Weights) -> Iterator[tuple[Part, str, Slot]]:
        for part in spec.parts:
            yield part, "weight", Slot(part.shape, (part.rows, part.columns), weights["weight"][rows_of(part)])
            yield from bias_slot(spec, part, weights)

    def dequantize(self, spec: LinearSpec, weights: Weights) -> Weights:
        return weights


class PlainProduct(Product):
    """Multiplies by weights of the activations' own type, in whichever way is fastest on the device."""

    sums_slices = True

    def __init__(self) -> None:
        self.choices: dict[tuple[int, int, torch.dtype], Choice] = {}
        """on a CPU: (out, in, dtype) -> how such weights are stored"""
        self.tables: dict[gpu_linear.Size, GemmTable] = {}
        """on a GPU: size -> the kernels for few tokens"""

    def prepare(self, specs: list[LinearSpec], device: torch.device, kernels: KernelTable | None = None) -> None:
        if all(spec.batch_invariant for spec in specs):  # nothing to choose
            return
        if device.type == "cpu":
            self.choices = choose_all(specs, spare_bytes=spare_memory())
        else:
            self.tables = gpu_linear.plan_all(specs, device)

    def table(self, spec: LinearSpec) -> GemmTable | None:
        return self.tables.get((spec.dtype.itemsize, spec.out_features, spec.in_features))

    def finalize(self, spec: LinearSpec, weights: Weights, fused: FusedOps) -> Compute:
        table = self.table(spec)
        if table is None:
            return fused.wrap(self.multiply(spec, weights))
        weight, bias = weights["weight"], weights.get("bias")
        return gpu_linear.by_table(weight, bias, table, fused, gpu_linear.by_library(weight, bias, fused))

    def experts(self, spec: LinearSpec, weights: Weights) -> HeldExperts:
        return HeldExperts(weights["weight"])

    def multiply(self, spec: LinearSpec, weights: Weights) -> Multiply:
        """Return the product with `weights`, without our kernels for few tokens and with nothing fused."""
        weight, bias = weights["weight"], weights.get("bias")
        if spec.slices:
            return matmul_slices(weight, spec.slices)
        if spec.batch_invariant and weight.device.type != "cpu":  # a CPU runs tokens one at a time
            outputs = sum(part.shape[0] for part in spec.parts)
            return lambda x: matmul(x, weight, bias, outputs)
        choice = self.choices.get((spec.out_features, spec.in_features, spec.dtype))
        return hold_plain(weight, bias) if choice is None else choice.hold(weight, bias)


def unquantized(format: WeightFormat = PLAIN) -> Scheme:
    """Return a new scheme for unquantized weights."""
    return Scheme(format, PlainLayout(), PlainProduct())


def empty_bias(spec: LinearSpec, device: torch.device, experts: tuple[int, ...] = ()) -> Weights:
    """Allocate the bias, zeros, if this rank adds one; `experts` as in Layout.create_weights."""
    if not (spec.bias and spec.adds_bias):
        return {}
    return {"bias": torch.zeros(*experts, spec.out_features, dtype=spec.dtype, device=device)}


def bias_slot(spec: LinearSpec, part: Part, weights: Weights) -> Iterator[tuple[Part, str, Slot]]:
    """Yield where the bias of `part` goes, if it has one."""
    if spec.bias:
        bias = weights["bias"][rows_of(part)] if spec.adds_bias else None
        yield part, "bias", Slot(part.shape[:1], (part.rows,), bias)


def rows_of(part: Part) -> slice:
    """Return the rows of our weight that `part` fills."""
    return slice(part.offset, part.offset + _length(part.rows))


def _length(rows: slice) -> int:
    return int(rows.stop) - int(rows.start)
