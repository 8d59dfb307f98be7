"""Defines self-attention over the paged KV cache: project, rotate and cache, attend, project back."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace import mixers
from headrace.attention.metadata import AttentionMetadata
from headrace.attention.spec import AttentionSpec
from headrace.errors import CheckpointError
from headrace.kernels.rotary import rotated
from headrace.layers.context import LayerContext
from headrace.layers.layer import Layer, empty_parameter
from headrace.layers.linear import QKVParallelLinear, RowParallelLinear, split_kv_heads
from headrace.layers.norm import weight_slot
from headrace.layers.pending import Pending
from headrace.layers.rotary import Angles
from headrace.quantization.scheme import FLOATS, Slot

NOT_READ = (
    "q_scale", "attn.q_scale", "q_proj.q_scale", "q_proj.output_scale", "prob_scale", "prob_output_scale",
    "k_zero_point", "v_zero_point", "q_proj.output_zero_point", "k_proj.output_zero_point", "v_proj.output_zero_point",
)  # fmt: skip
"""scales of queries and probabilities, which are not quantized here, and zero points, which fp8 does not have"""
KV_SCALE_NAMES = {
    "k_proj.k_scale": (0, 1),
    "v_proj.v_scale": (1, 2),
    "k_proj.output_scale": (0, 1),
    "v_proj.output_scale": (1, 2),
    "qkv_proj.k_scale": (0, 1),
    "qkv_proj.v_scale": (1, 2),
    "attn.k_scale": (0, 1),
    "attn.v_scale": (1, 2),
    "k_scale": (0, 1),
    "v_scale": (1, 2),
    "kv_scale": (0, 2),
    **dict.fromkeys(NOT_READ, (0, 0)),
}
"""names of an fp8 cache's scales in checkpoints, next to the layer's weights -> which of (K, V) they are for"""
KV_BIAS_NAMES = ("k_proj.k_bias", "v_proj.v_bias")
"""what ModelOpt's affine caches take from K and V before they divide by the scale"""
OTHER_TYPES = ("I8", "U8", "I32", "I64", "F8_E4M3")
"""further types of what is not read"""


def _take_scale(name: str, place: Tensor, values: Tensor) -> None:
    """Write a checkpoint's scale to `place`; of scales a head, which the cache does not have, the largest. Raises
    CheckpointError for one that is not positive and finite."""
    if not bool(((values > 0) & values.isfinite()).all()):
        raise CheckpointError(f"tensor {name!r} must be positive and finite, got {values.flatten().tolist()}")
    place.fill_(values.float().max())


class HeadNorm(Layer):
    """Holds the weight by which the norms of all heads of queries or of keys multiply: the kernels that rotate them
    apply it."""

    def __init__(self, mixer: mixers.Attention, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = mixer.norm
        dtype = torch.float32 if mixer.norm.float32 else dtype
        made = empty_parameter if mixer.norm.weight else torch.ones
        self.weight: Tensor = made(mixer.head_dim, dtype=dtype)

    def create_weights(self, device: torch.device) -> None:
        super().create_weights(device)
        if not self.norm.weight:
            self.weight = torch.ones_like(self.weight, device=device)

    def slots(self, path: str) -> dict[str, Slot]:
        return {f"{path}.weight": weight_slot(self.weight, self.norm.plus_one)} if self.norm.weight else {}


class QKNorm(Layer):
    """Computes norms of queries and keys as projected: of each head by its own weights, or of all heads, of all ranks,
    as one vector."""

    opaque = ("forward",)

    def __init__(self, mixer: mixers.Attention, spec: AttentionSpec, context: LayerContext) -> None:
        super().__init__()
        group, self.norm, self.wide = context.mesh.tp, mixer.norm, mixer.qk_norm == "wide"
        self.heads = spec.num_heads, spec.num_kv_heads
        self.all_heads = mixer.num_heads, mixer.num_kv_heads
        self.shares = group.rank, split_kv_heads(mixer.num_kv_heads, group)[1]
        dtype = torch.float32 if mixer.norm.float32 else context.dtype
        self.weight = empty_parameter(sum(self.heads), spec.head_dim, dtype=dtype)
        self.squares, self.normed = context.kernels.qk_squares, context.kernels.qk_norm
        self.all_reduce, self.ranks = group.all_reduce, group.size

    def slots(self, path: str) -> dict[str, Slot]:
        found, first, dim = {}, 0, self.weight.shape[1]
        places = zip(("q_norm", "k_norm"), self.heads, self.all_heads, self.shares, strict=True)
        for name, heads, of_all, share in places:
            mine, unit = self.weight[first : first + heads], dim if self.wide else 1
            rows = slice(share * heads * unit, (share + 1) * heads * unit)
            shape = (of_all * dim,) if self.wide else (of_all, dim)
            slot = Slot(shape, (rows,) if self.wide else (rows, slice(0, dim)), mine.view(-1) if self.wide else mine)
            found[f"{path.rpartition('.')[0]}.{name}.weight"] = slot
            first += heads
        return found

    def forward(self, qkv: Tensor) -> Tensor:
        """Change the queries and keys of qkv # [num_tokens, heads, head_dim] to their norms, and return it."""
        squares = None
        if self.wide:
            squares = self.squares(qkv, self.heads)
            squares = squares if self.ranks == 1 else self.all_reduce(squares)
        centered = self.norm.kind == "layer"
        return self.normed(qkv, self.weight, self.heads, self.norm.eps, centered, squares, self.ranks)


class ValueNorm(Layer):
    """Computes RMS norms of each head's values."""

    opaque = ("forward",)

    def __init__(self, mixer: mixers.Attention, spec: AttentionSpec, context: LayerContext) -> None:
        super().__init__()
        self.heads, self.eps, self.normed = (spec.num_kv_heads, 0), mixer.norm.eps, context.kernels.qk_norm
        self.weight = torch.ones(spec.num_kv_heads, spec.head_dim, dtype=context.dtype, device=context.device)

    def forward(self, qkv: Tensor) -> Tensor:
        """Change the values of qkv # [num_tokens, heads, head_dim] to their norms, and return it."""
        self.normed(qkv[:, -self.heads[0] :], self.weight, self.heads, self.eps, False, None, 1)
        return qkv


class Attention(Layer):
    """Computes one layer's attention on one rank."""

    opaque = ("_rotate_and_attend", "_clipped", "_gated")

    def __init__(
        self,
        mixer: mixers.Attention,
        spec: AttentionSpec,
        context: LayerContext,
    ) -> None:
        """Build the layer that `mixer` describes; this rank has the heads that `spec` says."""
        super().__init__()
        group, dtype, hidden, dim = context.mesh.tp, context.dtype, mixer.hidden_size, mixer.head_dim
        self.output_gate = mixer.output_gate
        heads = spec.num_heads
        self.queries = slice(0, 2 * heads, 2) if mixer.output_gate and not mixer.gate_linear else slice(0, heads)
        """where queries are among them and their gates, and"""
        self.gates = slice(heads, 2 * heads) if mixer.gate_linear else slice(1, 2 * heads, 2)
        self.qkv_proj = QKVParallelLinear(mixer, group, dtype)
        self.o_proj = RowParallelLinear(mixer.num_heads * dim, hidden, group, dtype, mixer.o_bias)
        self.q_norm = HeadNorm(mixer, dtype) if mixer.qk_norm == "head" else None
        self.k_norm = HeadNorm(mixer, dtype) if mixer.qk_norm == "head" else None
        self.qk_norm = QKNorm(mixer, spec, context) if mixer.qk_norm in ("heads", "wide") else None
        self.v_norm = ValueNorm(mixer, spec, context) if mixer.v_norm else None
        self.norm_last = mixer.norm_last
        self.q_weight: Tensor | None = None
        """[head_dim] float32: what rotated queries are multiplied by; constant once loading is over"""
        self.clip, self.turns = mixer.clip, mixer.turns
        self.sinks: Tensor | None = None
        if mixer.sinks:
            self.sinks = empty_parameter(spec.num_heads, dtype=dtype)
            first = context.mesh.tp.rank * spec.num_heads
            self.sink_slot = (mixer.num_heads,), (slice(first, first + spec.num_heads),)
        self.eps = mixer.norm.eps
        self.spec = spec
        self.scaled_heads = mixer.num_kv_heads, mixer.num_heads
        """those of K and V, and those of queries, on all ranks: a checkpoint may have a scale for each"""
        self.heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.projected = [spec.num_heads * (1 + mixer.output_gate), spec.num_kv_heads, spec.num_kv_heads]
        """the same with the queries' gates"""
        self.clip_by, self.gate_heads = context.kernels.clip, context.kernels.gate_heads
        self.rotary_and_cache = context.kernels.rotary_and_cache
        self.attend = context.backend.forward
        self.decode = None if spec.batch_invariant else getattr(context.backend, "decode", None)
        """the backend's, if it has one; it adds up in another order than prompts do"""
        self.kv_scale: Tensor | None = None
        """[2] float32: what K and V in an fp8 cache are multiplied by; constant once loading is over"""
        self.kv_bias = False
        """Whether the checkpoint's scales are for K and V less a bias, which the cache does not have"""

    def create_weights(self, device: torch.device) -> None:
        super().create_weights(device)
        if self.spec.quantized_cache:
            self.kv_scale = torch.full((2,), math.nan, device=device)  # NaN: the checkpoint brings none

    def slots(self, path: str) -> dict[str, Slot]:
        found = super().slots(path)
        for name, (first, last) in KV_SCALE_NAMES.items():
            place = None if self.kv_scale is None or first == last else self.kv_scale[first:last]
            store = None if place is None else partial(_take_scale, f"{path}.{name}", place)
            types: tuple[str, ...] = (*FLOATS, *OTHER_TYPES) if name in NOT_READ else FLOATS
            heads: tuple[int, ...] = self.scaled_heads if name in NOT_READ else self.scaled_heads[:1]
            shapes = tuple(shape for count in heads for shape in ((count,), (count, 1), (count, 1, 1)))
            found[f"{path}.{name}"] = Slot((1,), (slice(0, 1),), place, True, store, stored=types, shapes=shapes)
        shape = (1, self.scaled_heads[0], 1, self.spec.head_dim)
        for name in KV_BIAS_NAMES:
            whole = tuple(slice(0, size) for size in shape)
            found[f"{path}.{name}"] = Slot(shape, whole, self.kv_scale, True, self._take_bias, torch.float32)
        if self.sinks is not None:
            found[f"{path}.sinks"] = Slot(*self.sink_slot, self.sinks)
        return found

    def _take_bias(self, values: Tensor) -> None:
        self.kv_bias |= bool(values.any())

    def finalize(self) -> None:
        super().finalize()
        if self.norm_last:
            self._weight_queries()
        if self.sinks is not None:
            self.attend = partial(self.attend, sinks=self.sinks)
            if self.decode is not None:
                self.decode = partial(self.decode, sinks=self.sinks)

    def _weight_queries(self) -> None:
        """Let queries bear the weights of both norms, which multiply what is rotated: scores are the same if rotated
        keys, which have kept their length, are cached without. A checkpoint's scale is for keys with their weights."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        self.q_weight = self.q_norm.weight.float() * self.k_norm.weight.float()
        for norm in (self.q_norm, self.k_norm):
            norm.weight.data.fill_(1.0)
        if self.kv_scale is not None:
            self.kv_scale[0] = math.nan

    def forward(self, x: Any, angles: Angles, metadata: AttentionMetadata, kv_cache: Tensor) -> Tensor | Pending:
        """Return attention's output for x [num_tokens, hidden_size], of the same shape; write K and V to `kv_cache`."""
        qkv = self.qkv_proj(x)
        if self.clip is not None:
            qkv = self._clipped(qkv, self.clip)
        qkv = qkv.view(x.shape[0], -1, self.spec.head_dim)
        if self.qk_norm is not None:
            qkv = self.qk_norm(qkv)
        if self.v_norm is not None:
            qkv = self.v_norm(qkv)
        if metadata.cut is None:
            attended = self._rotate_and_attend(qkv, kv_cache, metadata, angles)
        else:
            shape = (self.spec.num_heads, self.spec.head_dim)
            attended = metadata.cut(self._rotate_and_attend, qkv, kv_cache, metadata, angles, shape=shape)
        if self.output_gate:
            attended = self._gated(attended, qkv)
        return self.o_proj(attended.view(x.shape[0], -1))

    def _clipped(self, qkv: Tensor, limit: float) -> Tensor:
        return self.clip_by(qkv, limit)

    def _gated(self, attended: Tensor, qkv: Tensor) -> Tensor:
        return self.gate_heads(attended, qkv[:, self.gates])

    def head_weights(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the weights of the norms of each head of queries and of keys, if there are such norms."""
        if self.q_norm is None or self.k_norm is None:
            return None, None
        return self.q_norm.weight, self.k_norm.weight

    def _rotate_and_attend(
        self, qkv: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, angles: Angles, out: Tensor | None = None
    ) -> Tensor:
        """Attend to qkv # [num_tokens, heads, head_dim] as projected, where gates may be among the queries; return #
        [num_tokens, num_heads, head_dim]. Whatever depends on which request a token belongs to is in here: a graph in
        pieces runs this method eagerly."""
        q, k, v = qkv.split_with_sizes(self.projected, dim=1)  # `split` goes through Python first
        q = q[:, self.queries]
        norms = self.head_weights()
        cos_sin, positions, temperature = angles
        scale = self.kv_scale
        if not self.spec.causal:
            q, k = rotated(q, k, cos_sin, positions, *norms, self.eps, self.spec.interleaved)
            return self.attend(q, k, v, metadata, self.spec, out)
        if metadata.max_query_len == 1 and self.decode is not None and not metadata.only_caches:
            return self.decode(
                q, k, v, cos_sin, kv_cache, metadata, self.spec, *norms, self.eps, scale, out, temperature=temperature,
                q_weight=self.q_weight,
            )  # fmt: skip
        slots = metadata.slot_mappings[self.spec.group]
        q = self.rotary_and_cache(
            q, k, v, cos_sin, positions, kv_cache, slots, *norms, self.eps, scale, self.spec.interleaved, temperature,
            self.q_weight,
        )  # fmt: skip
        if metadata.only_caches:
            return q
        return self.attend(q, kv_cache, metadata, self.spec, scale, out)
