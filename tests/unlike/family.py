"""A made-up family in which no two layers need be alike: description and modules, as a real one has them.

Full attention; a window with sinks; chunks without positions and with parallel branches; latents, of queries too; a
recurrent state; dense layers and experts behind a sigmoid's router; norms before and after; a soft cap on logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headrace import mixers
from headrace.feed_forwards import DenseMLP, ExpertNames, Experts
from headrace.layer_parts import Norms
from headrace.layers.attention import Attention
from headrace.layers.context import LayerContext
from headrace.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from headrace.layers.latent_attention import LatentAttention
from headrace.layers.layer import Layer
from headrace.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from headrace.layers.mlp import GatedMLP
from headrace.layers.moe import SparseMoE
from headrace.layers.norm import RMSNorm
from headrace.layers.rotary import NO_ANGLES, Rotary
from headrace.model_config import Fields, ModelConfig
from headrace.model_spec import LayerSpec, ModelSpec
from headrace.models.dense_families import PARALLEL, SANDWICH
from headrace.models.descriptions import Described
from headrace.models.entry import ModelEntry
from headrace.parameters import linear

ARCHITECTURE = "UnlikeForCausalLM"
SOFT_CAP, EPS = 3.0, 1e-6
CONFIG: dict[str, Any] = {
    "architectures": [ARCHITECTURE],
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "mixers": ["full", "window", "chunk", "latent", "state", "window", "latent of queries", "state"],
}


def mixer(kind: str, hidden: int) -> mixers.Mixer:
    if kind == "full":
        return mixers.Attention(hidden, 8, 4, 64)
    if kind == "window":
        return mixers.Attention(hidden, 4, 2, 96, window=32, sinks=True)
    if kind == "chunk":
        return mixers.Attention(hidden, 4, 2, 32, window=24, chunked=True, rope=None)
    if kind == "state":
        sizes = {"q_proj": 4 * 16, "k_proj": 4 * 16, "v_proj": 4 * 24, "decay_proj": 4}
        found = [p for name, size in sizes.items() for p in linear(f"self_attn.{name}", size, hidden, "heads")]
        return mixers.RecurrentState(hidden, 4, 16, 24, (*found, *linear("self_attn.o_proj", hidden, 4 * 24, "heads")))
    return mixers.LatentAttention(hidden, 4, 80, 16, 32, 24, q_rank=48 if kind == "latent of queries" else None)


def describe(c: Fields) -> Described:
    hidden = c.integer("hidden_size")
    dense = DenseMLP(hidden, c.integer("intermediate_size"))
    experts = Experts(
        hidden, num_experts=6, experts_per_token=2, expert_intermediate_size=32, sigmoid=True, selection_bias=True,
        scaling=2.5, intermediate_size=32, names=ExpertNames(shared="shared_experts"),
    )  # fmt: skip
    norms = {"window": SANDWICH, "chunk": PARALLEL}
    return Described(
        tuple(
            LayerSpec(mixer(kind, hidden), experts if kind in ("window", "latent") else dense, norms.get(kind, Norms()))
            for kind in c.texts("mixers")
        )
    )


class GatedState(Layer):
    """S = decay * S + k v^T, and each head gives q S: one matrix a head and request, in fp32."""

    opaque = ("_recur",)

    def __init__(self, mixer: mixers.RecurrentState, context: LayerContext, index: int) -> None:
        super().__init__()
        group, hidden, heads = context.mesh.tp, mixer.hidden_size, mixer.num_heads
        keys, values = heads * mixer.head_dim, heads * mixer.v_head_dim
        parts = {"q_proj": keys, "k_proj": keys, "v_proj": values, "decay_proj": heads}
        self.in_proj = MergedColumnParallelLinear(hidden, parts, group, context.dtype, bias=False)
        self.o_proj = RowParallelLinear(values, hidden, group, context.dtype, bias=False)
        self.sizes = [size // group.size for size in parts.values()]
        self.shape = (heads // group.size, mixer.head_dim, mixer.v_head_dim)
        self.group = context.groups[index]

    def forward(self, x: Any, angles: Any, metadata: Any, states: Any) -> Any:
        return self.o_proj(self._recur(self.in_proj(x), metadata, states))

    def _recur(self, projected: Tensor, metadata: Any, states: Tensor) -> Tensor:
        """`states` # [num_blocks, numbers of a state] float32"""
        heads, keys, values = self.shape
        q, k, v, decay = projected.float().split(self.sizes, dim=1)
        q, k, v = q.view(-1, heads, keys), k.view(-1, heads, keys), v.view(-1, heads, values)
        out, decay, starts = torch.zeros_like(v), decay.sigmoid(), metadata.query_start_loc.tolist()
        for row, first, end in zip(metadata.rows.tolist(), starts, starts[1:], strict=False):
            if first == end:
                continue
            kept = states[int(metadata.block_tables[self.group][row, 0])].view(self.shape)
            if metadata.positions[first] == 0:
                kept.zero_()
            for token in range(first, end):
                kept.mul_(decay[token, :, None, None]).add_(k[token, :, :, None] * v[token, :, None, :])
                out[token] = (q[token, :, :, None] * kept).sum(1) / keys
        return out.flatten(1).to(projected.dtype)


class Block(Layer):
    def __init__(self, config: ModelConfig, layer: LayerSpec, index: int, context: LayerContext) -> None:
        super().__init__()
        for name in layer.norms.named:
            self.add_module(name, RMSNorm(config.hidden_size, EPS, context.kernels, context.dtype))
        self.num_norms = len(layer.norms.named)
        mixer, spec, block = layer.mixer, context.specs[index], layer.feed_forward
        if isinstance(mixer, mixers.RecurrentState):
            self.self_attn: Layer = GatedState(mixer, context, index)
        else:
            assert spec is not None
            latent = isinstance(mixer, mixers.LatentAttention)
            self.self_attn = (LatentAttention if latent else Attention)(mixer, spec, context)
        self.turns = mixer.turns
        if isinstance(block, Experts):
            self.mlp: Layer = SparseMoE(block, context)
        else:
            self.mlp = GatedMLP(block, context)

    def forward(self, hidden: Any, residual: Any, angles: Any, metadata: Any, cache: Any) -> tuple[Any, Any]:
        hidden, residual = self.input_layernorm(hidden, residual)
        if self.num_norms == 1:  # parallel branches
            return self.self_attn(hidden, angles, metadata, cache) + self.mlp(hidden), residual
        hidden = self.self_attn(hidden, angles, metadata, cache)
        if self.num_norms == 2:
            hidden, residual = self.post_attention_layernorm(hidden, residual)
            return self.mlp(hidden), residual
        hidden, _ = self.post_attention_layernorm(hidden)
        hidden, residual = self.pre_feedforward_layernorm(hidden, residual)
        return self.post_feedforward_layernorm(self.mlp(hidden))[0], residual


class UnlikeForCausalLM(Layer):
    def __init__(self, config: ModelConfig, spec: ModelSpec, context: LayerContext) -> None:
        super().__init__()
        sizes = (config.vocab_size, config.hidden_size, context.mesh.tp, context.dtype)
        self.embed_tokens, self.lm_head = VocabParallelEmbedding(*sizes), ParallelLMHead(*sizes, soft_cap=SOFT_CAP)
        self.layers = nn.ModuleList(Block(config, layer, index, context) for index, layer in enumerate(spec.layers))
        self.norm = RMSNorm(config.hidden_size, EPS, context.kernels, context.dtype)
        self.rotaries = nn.ModuleList(Rotary(turns, spec.max_position_embeddings, context) for turns in spec.turns)

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: Any, kv_caches: list[Any]) -> Tensor:
        hidden, residual = self.embed_tokens(input_ids), None
        angles = {None: NO_ANGLES, **{rotary.turns: rotary(positions) for rotary in self.rotaries}}
        for layer, cache in zip(self.layers, kv_caches, strict=True):
            hidden, residual = layer(hidden, residual, angles[layer.turns], metadata, cache)
        return self.norm(hidden, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)


ENTRY = ModelEntry(ARCHITECTURE, describe, __name__, UnlikeForCausalLM.__name__)
