"""Defines linear layers that are split over the ranks of a group, by outputs or by inputs.

A fused one knows the names of its parts in the checkpoint. How weights are stored and multiplied is up to the layer's
scheme (quantization/), which models/loader.py attaches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headrace import mixers
from headrace.distributed.mesh import Group
from headrace.errors import CheckpointError, ConfigError
from headrace.kernels.fp8 import Rounding
from headrace.kernels.matmul import SLICES, tree_sum
from headrace.kernels.norm import HALF_NORMED_DTYPE
from headrace.layers.layer import Layer
from headrace.layers.norm import RMSNorm
from headrace.layers.pending import Pending
from headrace.layers.stacked import InOne
from headrace.quantization.scheme import Compute, FusedOps, LinearSpec, Part, Scheme, Slot
from headrace.quantization.unquantized import unquantized


def divide(total: int, group: Group, what: str) -> int:
    """Return `total` / group size. Raises ConfigError, naming `what`, if the group does not divide it."""
    if total % group.size:
        raise ConfigError(f"tensor_parallel_size {group.size} does not divide {what} ({total})")
    return total // group.size


def column_spec(
    in_features: int, parts: Iterable[tuple[str | None, int, int, int]], dtype: torch.dtype, bias: bool = False
) -> LinearSpec:
    """Describe linears over one input, fused, of which a rank holds some outputs. Each part is (name in the checkpoint,
    outputs in all, outputs on this rank, which share of that size it holds)."""
    columns, placed, offset = slice(0, in_features), [], 0
    for name, total, local, share in parts:
        rows = slice(share * local, (share + 1) * local)
        placed.append(Part(name, (total, in_features), rows, columns, offset))
        offset += local
    return LinearSpec(in_features, offset, tuple(placed), dtype, bias)


def row_spec(
    name: str | None, in_features: int, out_features: int, group: Group, dtype: torch.dtype, bias: bool = False
) -> LinearSpec:
    """Describe a linear of which a rank holds some inputs, and rank 0 adds the bias."""
    local = divide(in_features, group, "the inputs of a linear layer")
    columns = slice(group.rank * local, (group.rank + 1) * local)
    part = Part(name, (out_features, in_features), slice(0, out_features), columns, 0)
    return LinearSpec(local, out_features, (part,), dtype, bias, group.rank == 0, over_ranks=over_ranks(group))


def over_ranks(group: Group) -> Callable[[Tensor], Tensor] | None:
    """Return what a LinearSpec says of inputs that the ranks of a group share."""
    return None if group.size == 1 else group.most


def _not_loaded(x: Any, residual: Tensor | None) -> Tensor:
    raise RuntimeError("a linear layer was called before its weights were finalized")


class Linear(Layer):
    """Computes x [num_tokens, spec.in_features] -> [num_tokens, spec.out_features], as one rank holds the weight.

    With `activation` (the kernel table's gate_and_mul), half as many outputs come out.
    """

    applied = True
    """False: others read its weight, and nothing calls it"""

    def __init__(self, spec: LinearSpec, activation: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.parts = spec.parts
        """as families name them, however a checkpoint holds them"""
        self.fused = FusedOps(activation=activation)
        """what it computes besides its product; models/fusion.py adds norms"""
        self.scheme: Scheme = unquantized()
        self.weights: dict[str, Tensor] = {}
        self.behind_experts = False
        """Its weights lie behind those of experts, whose layer allocates them."""
        self.compute: Compute = _not_loaded
        self.rounding: Rounding | None = None
        """how the input is rounded, once finalized"""

    def attach(self, scheme: Scheme) -> None:
        """Let the weight have `scheme`."""
        self.scheme = scheme

    def create_weights(self, device: torch.device) -> None:
        if not self.behind_experts:
            self.weights = self.scheme.layout.create_weights(self.spec, device)

    def slots(self, path: str) -> dict[str, Slot]:
        return {
            f"{part.path(path)}.{tensor}": slot
            for part, tensor, slot in self.scheme.layout.slots(self.spec, self.weights)
        }

    def names_in_files(self, path: str) -> dict[str, InOne]:
        """Return the name of our linear -> those of its parts, of which a checkpoint may have only the former."""
        parts = self.spec.parts
        return {path: InOne(tuple(part.path(path) for part in parts))} if len(parts) > 1 else {}

    def read_as(self, path: str, linears: Collection[str]) -> None:
        """Take the parts from where a checkpoint with these `linears` has them: all may be rows of one. To be called
        before `attach`."""
        if path not in linears or len(self.spec.parts) == 1:
            return
        total, inputs = sum(part.shape[0] for part in self.spec.parts), self.spec.parts[0].shape[1]
        placed, first = [], 0
        for part in self.spec.parts:
            rows = slice(first + part.rows.start, first + part.rows.stop)
            placed.append(replace(part, shape=(total, inputs), rows=rows))
            first += part.shape[0]
        self.spec = replace(self.spec, parts=tuple(placed))

    def quantized_names(self, path: str) -> dict[str | None, list[str]]:
        """Return the names under which a checkpoint may list the format of each part: its own, and the layer's."""
        return {part.name: [part.path(path), path] for part in self.spec.parts}

    def fuse_norm(self, norm: RMSNorm) -> None:
        """Take over `norm`: x comes in without it. To be called before `finalize`."""
        self.fused = replace(self.fused, norm_weight=norm.weight.data, norm_eps=norm.eps, rms_norm=norm.rms_norm)

    def finalize(self) -> None:
        self.rounding = self.scheme.product.rounding(self.spec, self.weights)
        self.compute = self.scheme.product.finalize(self.spec, self.weights, self.fused)
        if any(tensor.device.type == "cpu" for tensor in self.weights.values()):
            self.weights = {}  # stored in another form; on a GPU they stay, for the self-check

    def forward(self, x: Any) -> Any:
        """Return the product. x may be Quantized as `rounding` says; so is the result if the activation makes it."""
        return self.compute(x, None)


class MergedColumnParallelLinear(Linear):
    """Fuses several linears over one input; each rank computes its share of every part's outputs, part after part."""

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        group: Group,
        dtype: torch.dtype,
        bias: bool,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Take `parts`: name in the checkpoint -> number of outputs."""
        shares = [
            (name, size, divide(size, group, f"the outputs of {name}"), group.rank) for name, size in parts.items()
        ]
        super().__init__(column_spec(in_features, shares, dtype, bias), activation)


class ColumnParallelLinear(Linear):
    """Computes a share of the outputs on each rank."""

    def __init__(self, in_features: int, out_features: int, group: Group, dtype: torch.dtype, bias: bool) -> None:
        local = divide(out_features, group, "the outputs of a linear layer")
        super().__init__(column_spec(in_features, [(None, out_features, local, group.rank)], dtype, bias))


class QKVParallelLinear(Linear):
    """Fuses q_proj, k_proj and v_proj, split by heads: q's heads come first, perhaps with gates, then k's, then v's.

    Where there are fewer KV heads than ranks, neighbouring ranks hold the same one.
    """

    def __init__(self, mixer: mixers.Attention, group: Group, dtype: torch.dtype) -> None:
        beside = mixer.output_gate and not mixer.gate_linear
        width = mixer.head_dim * (1 + beside)
        heads = divide(mixer.num_heads, group, "num_attention_heads")
        kv_heads, kv_rank = split_kv_heads(mixer.num_kv_heads, group)
        q = (mixer.num_heads * width, heads * width, group.rank)
        kv = (mixer.num_kv_heads * mixer.head_dim, kv_heads * mixer.head_dim, kv_rank)
        names = ("q_proj", *([mixer.gate_linear] if mixer.gate_linear else ()), "k_proj", "v_proj")
        parts = ((name, *(kv if name in ("k_proj", "v_proj") else q)) for name in names)
        super().__init__(column_spec(mixer.inputs, parts, dtype, mixer.qkv_bias))
        self.groups = mixer.num_kv_heads if mixer.by_kv_head else 0
        """in so many groups of rows a checkpoint that has all parts in one linear has them there; 0: part after part"""
        self.in_groups = False
        self.values_are_keys = mixer.values_are_keys

    def names_in_files(self, path: str) -> dict[str, InOne]:
        found = {name: replace(one, groups=self.groups) for name, one in super().names_in_files(path).items()}
        if self.values_are_keys:
            keys, values = (part.path(path) for part in self.spec.parts[-2:])
            found[keys] = InOne((keys, values))
        return found

    def read_as(self, path: str, linears: Collection[str]) -> None:
        self.in_groups = self.groups > 0 and path in linears
        if not self.groups:
            super().read_as(path, linears)

    def slots(self, path: str) -> dict[str, Slot]:
        if not self.in_groups:
            return super().slots(path)
        return {
            f"{part.path(path)}.{tensor}": self._of_groups(part, tensor, slot)
            for part, tensor, slot in self.scheme.layout.slots(self.spec, self.weights)
        }

    def _of_groups(self, part: Part, tensor: str, slot: Slot) -> Slot:
        """Return the slot of a tensor [groups, rows of a group, ...] that has the rows of `part` in each group. Raises
        CheckpointError for a tensor that has not a row for each output, or a number for all."""
        if slot.shape == (1,):
            return slot
        if slot.shape[0] != part.shape[0]:
            raise CheckpointError(f"{tensor} is not served for queries, keys and values that are in turn in one linear")
        rows = [one.shape[0] // self.groups for one in self.spec.parts]
        before, own = sum(rows[: self.spec.parts.index(part)]), rows[self.spec.parts.index(part)]
        first, last = slot.source[0].start, slot.source[0].stop
        groups = slice(first // own, (last - 1) // own + 1)
        inner = slice(before + first % own, before + (last - 1) % own + 1)
        store, split = slot.store, (groups.stop - groups.start, -1)
        return replace(
            slot,
            shape=(self.groups, sum(rows), *slot.shape[1:]),
            source=(groups, inner, *slot.source[1:]),
            destination=None if slot.destination is None else slot.destination.unflatten(0, split),
            store=None if store is None else lambda values: store(values.flatten(0, 1)),
            shapes=(),
        )


def split_kv_heads(num_kv_heads: int, group: Group) -> tuple[int, int]:
    """Return the number of KV heads on this rank, and which share of that size they are. Raises ConfigError."""
    if num_kv_heads >= group.size:
        return divide(num_kv_heads, group, "num_key_value_heads"), group.rank
    if group.size % num_kv_heads:
        raise ConfigError(
            f"tensor_parallel_size {group.size} must divide num_key_value_heads ({num_kv_heads}) or be a multiple of it"
        )
    return 1, group.rank // (group.size // num_kv_heads)


class RowParallelLinear(Linear):
    """Takes a share of the inputs on each rank; the outputs are summed over the ranks."""

    def __init__(self, in_features: int, out_features: int, group: Group, dtype: torch.dtype, bias: bool) -> None:
        super().__init__(row_spec(None, in_features, out_features, group, dtype, bias))
        self.group = group
        self.alone = group.size == 1
        self.bias: Tensor | None = None
        """what is added to sums of slices"""
        self.pending = False
        """Its output has one reader, a norm, which calls `added_to`."""
        self.sum_is_read_once = False
        """The sum with the residual has one reader, a linear, which norms it and can also make the sum."""

    def attach(self, scheme: Scheme) -> None:
        super().attach(scheme)
        if self.spec.batch_invariant and scheme.product.sums_slices and SLICES % self.group.size == 0:
            self.spec = replace(self.spec, slices=SLICES // self.group.size, adds_bias=True)
            self.alone = False

    def finalize(self) -> None:
        if self.spec.slices:
            self.bias = self.weights.get("bias")
        super().finalize()

    def fuse_next_norm(self, norm: RMSNorm) -> None:
        """Leave `norm` of the sum with the residual to the linear that reads it. To be called before `finalize`."""
        self.sum_is_read_once = True
        if self.spec.dtype == HALF_NORMED_DTYPE:
            self.fused = replace(self.fused, next_norm=norm.weight.data)

    def forward(self, x: Any) -> Tensor | Pending:
        return Pending(self, x) if self.pending else self.computed(x)

    def computed(self, x: Any) -> Tensor:
        out: Tensor = self.compute(x, None)
        if not self.spec.slices:
            return self.group.all_reduce(out)
        total = tree_sum([*self.group.all_gather(out).unflatten(-1, (self.group.size, -1)).unbind(-2)])
        return (total if self.bias is None else total + self.bias).to(self.spec.dtype)

    def added_to(self, x: Any, residual: Tensor) -> Any:
        if self.alone:
            return self.compute(x, residual)
        if self.spec.slices:
            return Group().added(self.computed(x), residual, self.sum_is_read_once)
        return self.group.added(self.compute(x, None), residual, self.sum_is_read_once)
