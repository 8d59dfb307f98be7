"""Linear layers, split over the ranks of a group by rows or by columns; fused ones know the names of their parts.

Which memory and arithmetic stand behind a linear is its scheme's affair (quantization/), attached from outside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headrace.distributed.mesh import Group
from headrace.errors import ConfigError
from headrace.kernels.norm import HALF_NORMED_DTYPE, Unsummed
from headrace.layers.layer import Layer
from headrace.layers.norm import RMSNorm
from headrace.layers.pending import Pending
from headrace.quantization.scheme import Around, Compute, LinearSpec, Part, Scheme, Slot
from headrace.quantization.unquantized import unquantized


def divide(total: int, group: Group, what: str) -> int:
    """`total` / group size; raises ConfigError naming `what` if that leaves a rest."""
    if total % group.size:
        raise ConfigError(f"tensor_parallel_size {group.size} does not divide {what} ({total})")
    return total // group.size


def _not_loaded(x: Any, residual: Tensor | None) -> Tensor:
    raise RuntimeError("a linear layer was called before its weights were finalized")


class Linear(Layer):
    """x [num_tokens, spec.in_features] -> [num_tokens, spec.out_features], as one rank holds it.

    With `activation` (silu_and_mul of the kernel table), half as many outputs come out.
    """

    def __init__(self, spec: LinearSpec, activation: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.around = Around(activation=activation)
        """what it computes beside its product; models/fusion.py adds norms"""
        self.scheme: Scheme = unquantized()
        self.weights: dict[str, Tensor] = {}
        self.compute: Compute = _not_loaded

    def create_weights(self, device: torch.device) -> None:
        self.weights = self.scheme.layout.create_weights(self.spec, device)

    def slots(self, path: str) -> dict[str, Slot]:
        return {
            f"{part.path(path)}.{tensor}": slot
            for part, tensor, slot in self.scheme.layout.slots(self.spec, self.weights)
        }

    def quantized_names(self, path: str) -> list[list[str]]:
        """By what names a checkpoint may say in which format each part is: its own, and that of all parts together."""
        return [[part.path(path), path] for part in self.spec.parts]

    def norms_with(self, norm: RMSNorm) -> None:
        """From now on, before `finalize`: x is normed here."""
        self.around = replace(self.around, norm_weight=norm.weight.data, norm_eps=norm.eps, rms_norm=norm.rms_norm)

    def finalize(self) -> None:
        if self.around.addend is None:
            self.compute = self.scheme.product.finalize(self.spec, self.weights, self.around)
        else:  # no format makes it in its own pass
            bare = self.scheme.product.finalize(self.spec, self.weights, Around())
            self.compute = self.around.wrap(lambda x: bare(x, None))
        if any(tensor.device.type == "cpu" for tensor in self.weights.values()):
            self.weights = {}  # held in another form; on a GPU as they are, and kept for who checks what is computed

    def forward(self, x: Any) -> Any:
        """x may be Quantized as the product's `input_dtype` says; so is the result if the activation gives it so."""
        return self.compute(x, None)


class MergedColumnParallelLinear(Linear):
    """Several linears over one input, as one; each rank computes its share of every part's outputs, part after part."""

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        group: Group,
        dtype: torch.dtype,
        bias: bool,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`parts`: checkpoint name -> its number of outputs."""
        columns = slice(0, in_features)
        placed: list[Part] = []
        offset = 0
        for name, size in parts.items():
            local = divide(size, group, f"the outputs of {name}")
            rows = slice(group.rank * local, (group.rank + 1) * local)
            placed.append(Part(name, (size, in_features), rows, columns, offset))
            offset += local
        super().__init__(LinearSpec(in_features, offset, tuple(placed), dtype, bias), activation)


class ColumnParallelLinear(Linear):
    """Each rank computes a share of the outputs."""

    def __init__(self, in_features: int, out_features: int, group: Group, dtype: torch.dtype, bias: bool) -> None:
        local = divide(out_features, group, "the outputs of a linear layer")
        rows = slice(group.rank * local, (group.rank + 1) * local)
        part = Part(None, (out_features, in_features), rows, slice(0, in_features), 0)
        super().__init__(LinearSpec(in_features, local, (part,), dtype, bias))


class QKVParallelLinear(Linear):
    """q_proj, k_proj and v_proj as one, split by heads: q's heads, then k's, then v's.

    Where there are fewer KV heads than ranks, neighbouring ranks hold the same one.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        group: Group,
        dtype: torch.dtype,
        bias: bool,
    ) -> None:
        heads = divide(num_heads, group, "num_attention_heads")
        kv_heads, kv_rank = split_kv_heads(num_kv_heads, group)
        columns = slice(0, hidden_size)
        parts: list[Part] = []
        offset = 0
        for name, total, local, rank in (
            ("q_proj", num_heads, heads, group.rank),
            ("k_proj", num_kv_heads, kv_heads, kv_rank),
            ("v_proj", num_kv_heads, kv_heads, kv_rank),
        ):
            size = local * head_dim
            rows = slice(rank * size, (rank + 1) * size)
            parts.append(Part(name, (total * head_dim, hidden_size), rows, columns, offset))
            offset += size
        super().__init__(LinearSpec(hidden_size, offset, tuple(parts), dtype, bias))


def split_kv_heads(num_kv_heads: int, group: Group) -> tuple[int, int]:
    """-> (KV heads on this rank, which share of them it holds)."""
    if num_kv_heads >= group.size:
        return divide(num_kv_heads, group, "num_key_value_heads"), group.rank
    if group.size % num_kv_heads:
        raise ConfigError(
            f"tensor_parallel_size {group.size} must divide num_key_value_heads ({num_kv_heads}) or be a multiple of it"
        )
    return 1, group.rank // (group.size // num_kv_heads)


class RowParallelLinear(Linear):
    """Each rank takes a share of the inputs; the outputs are summed over the ranks."""

    def __init__(self, in_features: int, out_features: int, group: Group, dtype: torch.dtype, bias: bool) -> None:
        local = divide(in_features, group, "the inputs of a linear layer")
        columns = slice(group.rank * local, (group.rank + 1) * local)
        part = Part(None, (out_features, in_features), slice(0, out_features), columns, 0)
        super().__init__(LinearSpec(local, out_features, (part,), dtype, bias, adds_bias=group.rank == 0))
        self.all_reduce = group.all_reduce
        self.alone = group.size == 1
        self.pending = False
        """its output has one reader, a norm, which has it computed"""
        self.sum_is_read_once = False
        """by a linear that norms it and makes the sum in the same pass"""

    def hands_to(self, norm: RMSNorm) -> None:
        """From now on, before `finalize`: the sum goes through `norm` next, in the pass of the linear that reads it."""
        self.sum_is_read_once = True
        if self.spec.dtype == HALF_NORMED_DTYPE:
            self.around = replace(self.around, next_norm=norm.weight.data)

    def forward(self, x: Any) -> Tensor | Pending:
        return Pending(self, x) if self.pending else self.computed(x)

    def computed(self, x: Any) -> Tensor:
        return self.all_reduce(self.compute(x, None))

    def added_to(self, x: Any, residual: Tensor) -> Any:
        if self.alone:
            return self.compute(x, residual)
        out = self.computed(x)
        return Unsummed(residual, out) if self.sum_is_read_once else residual.add_(out)
