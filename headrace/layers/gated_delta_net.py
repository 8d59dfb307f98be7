"""Defines a gated delta-net (arXiv 2412.06464): project, convolve over the latest tokens, update the state and read it,
norm and gate, project back."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace import mixers
from headrace.attention.metadata import AttentionMetadata
from headrace.kernels.gated_delta import DeltaHeads, DeltaWeights, Places
from headrace.kernels.paged import Sequences
from headrace.layers.context import LayerContext
from headrace.layers.layer import Layer, empty_parameter, whole_slot
from headrace.layers.linear import MergedColumnParallelLinear, RowParallelLinear, divide
from headrace.layers.pending import Pending
from headrace.layers.stacked import InOne
from headrace.quantization.scheme import Slot


def places_of(key_heads: int, group: int, key_dim: int, value_dim: int, by_key_head: bool) -> Places:
    """Return where a rank's projections put q, k, v, z and b, a: each key head's side by side, or each kind's."""
    values = group * value_dim
    if by_key_head:
        apart = 2 * (key_dim + values)
        return Places(0, key_dim, 2 * key_dim, 2 * key_dim + values, apart, apart, 0, group, 2 * group)
    keys, all_values = key_heads * key_dim, key_heads * values
    return Places(0, keys, 2 * keys, 2 * keys + all_values, key_dim, values, 0, key_heads * group, group)


class ProjectionIn(MergedColumnParallelLinear):
    """Computes queries, keys, values and gates, of which a checkpoint may hold the first three in one."""

    def names_in_files(self, path: str) -> dict[str, InOne]:
        parts = [part.path(path) for part in self.spec.parts]
        return {f"{path[:-1]}": InOne(tuple(parts[:3]))} if len(parts) > 1 else {}

    def read_as(self, path: str, linears: Collection[str]) -> None:
        if len(self.spec.parts) > 1:
            own, (*mixed, gate) = self.spec, self.spec.parts
            self.spec = replace(own, parts=tuple(mixed))
            super().read_as(path[:-1], linears)
            self.spec = replace(own, parts=(*self.spec.parts, gate))


class GatedDeltaNet(Layer):
    """Computes the layer on one rank, which has some of the key heads and the value heads that share them."""

    opaque = ("_mix",)

    def __init__(self, mixer: mixers.RecurrentState, context: LayerContext, index: int) -> None:
        """Build the layer that `mixer` describes, the model's layer number `index`."""
        super().__init__()
        group, dtype, kernels, hidden = context.mesh.tp, context.dtype, context.kernels, mixer.hidden_size
        key_heads, value_heads = divide(mixer.key_heads, group, "linear_num_key_heads"), mixer.num_heads // group.size
        key_dim, value_dim = mixer.head_dim, mixer.v_head_dim
        places = places_of(key_heads, value_heads // key_heads, key_dim, value_dim, mixer.by_key_head)
        self.heads = DeltaHeads(key_heads, value_heads, key_dim, value_dim, mixer.taps, places, context.kept_states)
        keys, values = mixer.key_heads * key_dim, mixer.num_heads * value_dim
        if mixer.by_key_head:
            wide, narrow = {"in_proj_qkvz": 2 * (keys + values)}, {"in_proj_ba": 2 * mixer.num_heads}
        else:
            wide = {"in_proj_q": keys, "in_proj_k": keys, "in_proj_v": values, "in_proj_z": values}
            narrow = {"in_proj_b": mixer.num_heads, "in_proj_a": mixer.num_heads}
        self.in_proj_qkvz = ProjectionIn(hidden, wide, group, dtype, bias=False)
        self.in_proj_ba = MergedColumnParallelLinear(hidden, narrow, group, dtype, bias=False)
        self.out_proj = RowParallelLinear(values, hidden, group, dtype, bias=False)
        self.conv = empty_parameter(self.heads.channels, mixer.taps, dtype=dtype)
        self.a_log = empty_parameter(value_heads, dtype=torch.float32)
        self.dt_bias = empty_parameter(value_heads, dtype=torch.float32)
        self.norm = empty_parameter(value_dim, dtype=dtype)
        self.eps = mixer.eps
        self.rank, self.sizes = group.rank, (keys, keys, values)
        self.group = context.groups.get(index, 0)
        self.in_turn = context.batch_invariant
        self.step, self.scan = kernels.gated_delta_step, kernels.gated_delta_scan

    def slots(self, path: str) -> dict[str, Slot]:
        heads, rank = self.heads, self.rank
        own = slice(rank * heads.value_heads, (rank + 1) * heads.value_heads)
        of_all = (sum(self.sizes), 1, heads.taps)
        store = partial(_store_channels, self)
        conv = Slot(of_all, tuple(map(slice, of_all)), self.conv, store=store, dtype=self.conv.dtype)
        found = {f"{path}.conv1d.weight": conv, f"{path}.norm.weight": whole_slot(self.norm)}
        for name, tensor in (("A_log", self.a_log), ("dt_bias", self.dt_bias)):
            found[f"{path}.{name}"] = Slot((len(tensor) * (sum(self.sizes) // heads.channels),), (own,), tensor)
        return found

    def finalize(self) -> None:
        super().finalize()
        self.held = DeltaWeights(self.conv, self.a_log, self.dt_bias, self.norm, self.eps)

    def forward(self, x: Any, angles: Any, metadata: AttentionMetadata, states: Tensor) -> Tensor | Pending:
        """Return the layer's output for x [num_tokens, hidden_size], of the same shape; update the requests' states #
        [num_blocks, numbers] float32."""
        projected, gates = self.in_proj_qkvz(x), self.in_proj_ba(x)
        if metadata.cut is None:
            mixed = self._mix(projected, states, metadata, gates)
        else:
            shape = (self.heads.value_heads * self.heads.value_dim,)
            mixed = metadata.cut(self._mix, projected, states, metadata, gates, shape=shape)
        return self.out_proj(mixed)

    def _mix(
        self, projected: Tensor, states: Tensor, metadata: AttentionMetadata, gates: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """Return # [num_tokens, value heads * value]. Whatever depends on which request a token belongs to is in here:
        a graph in pieces runs this method eagerly."""
        sequences, decodes = metadata.sequences(self.group), metadata.num_decodes
        if metadata.max_query_len == 1:
            decodes = metadata.num_reqs
        layer = (projected, gates, self.heads, self.held, states)
        if self.in_turn or 1 < metadata.max_query_len <= self.heads.slots:  # all but each request's first are guesses
            return self.scan(*layer, sequences, 0, out, True)
        if out is None:
            out = projected.new_empty((len(projected), self.heads.value_heads * self.heads.value_dim))
        if decodes:
            self.step(*layer, first_requests(sequences, decodes), out)
        if decodes < metadata.num_reqs:
            self.scan(*layer, sequences, decodes, out)
        return out


def first_requests(sequences: Sequences, count: int) -> Sequences:
    """Return the first `count` requests alone."""
    table, rows, starts, lengths = sequences
    return Sequences(table, rows[:count], starts[: count + 1], lengths[:count])


def _store_channels(layer: GatedDeltaNet, values: Tensor) -> None:
    """Keep this rank's channels of the whole convolution's weight # [channels, 1, taps]."""
    ranks = sum(layer.sizes) // layer.heads.channels
    own = [part.chunk(ranks)[layer.rank] for part in values.squeeze(1).split(layer.sizes)]
    layer.conv.copy_(torch.cat(own))
