"""Implements Llama and the families shaped like it.

What sets them apart (norms and where they are, rotation, biases, windows, activations, experts) is in each layer's
description. Attributes are named as in the checkpoint, except fused layers, which know the names of their parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headrace import feed_forwards, mixers
from headrace.attention.metadata import AttentionMetadata
from headrace.attention.spec import AttentionSpec
from headrace.layers.attention import Attention
from headrace.layers.context import LayerContext
from headrace.layers.embedding import EmbeddingSum, ParallelLMHead, VocabParallelEmbedding
from headrace.layers.gated_delta_net import GatedDeltaNet
from headrace.layers.latent_attention import LatentAttention
from headrace.layers.layer import Layer
from headrace.layers.mlp import GatedMLP, PlainMLP
from headrace.layers.moe import SparseMoE
from headrace.layers.norm import Scale, Sum, make_norm
from headrace.layers.rotary import NO_ANGLES, Angles, Rotary
from headrace.model_config import ModelConfig
from headrace.model_spec import LayerSpec, ModelSpec


class LlamaDecoderLayer(Layer):
    """Computes one layer: attention, then a feed-forward, with norms before or behind them; or both at once."""

    def __init__(self, index: int, layer: LayerSpec, spec: AttentionSpec | None, context: LayerContext) -> None:
        super().__init__()
        norms, block = layer.norms, layer.feed_forward
        for name, norm in norms.named.items():
            self.add_module(name, make_norm(norm, layer.mixer.hidden_size, context.kernels, context.dtype))
        self.sum = Sum()
        """in place of a norm that there is not"""
        self.before_mixer, self.before_block = norms.before_mixer or "sum", norms.before_block or "sum"
        self.after_mixer, self.after_block, self.parallel = norms.after_mixer, norms.after_block, norms.parallel
        self.of_sums, self.scaled, self.of_each = norms.of_sums, layer.scaled, norms.of_each
        if layer.scaled:
            self.layer_scalar = Scale(layer.mixer.hidden_size, context.kernels, context.dtype)
        self.mixer = "self_attn"
        if isinstance(layer.mixer, mixers.RecurrentState):
            self.mixer = "linear_attn"
            self.linear_attn = GatedDeltaNet(layer.mixer, context, index)
        elif isinstance(layer.mixer, mixers.LatentAttention):
            assert spec is not None
            self.self_attn: Layer = LatentAttention(layer.mixer, spec, context)
        else:
            assert spec is not None
            self.self_attn = Attention(layer.mixer, spec, context)
        self.block = block.block
        if isinstance(block, feed_forwards.Experts):
            feed_forward: Layer = SparseMoE(block, context)
            if self.of_each:
                self.beside = block.shared.block
                self.add_module(self.beside, GatedMLP(block.shared, context))
        else:
            feed_forward = GatedMLP(block, context) if block.gated else PlainMLP(block, context)
        self.add_module(self.block, feed_forward)

    def forward(
        self, hidden: Any, residual: Tensor | None, angles: Angles, metadata: AttentionMetadata, kv_cache: Tensor,
        tapped: Sequence[Tensor] = (),
    ) -> tuple[Any, Tensor | None]:  # fmt: skip
        """Return hidden and residual # [num_tokens, hidden_size]; hidden is this layer's output, which the next norm
        adds to the residual. None: hidden is the sum. `tapped` get the sum that the layer reads."""
        x, residual = getattr(self, self.before_mixer)(hidden, residual)
        return self.mixed(x, residual, angles, metadata, kv_cache, tapped)

    def mixed(
        self, x: Any, residual: Tensor, angles: Angles, metadata: AttentionMetadata, kv_cache: Tensor,
        tapped: Sequence[Tensor] = (),
    ) -> tuple[Any, Tensor | None]:  # fmt: skip
        """Return what `forward` does, given x, what the mixer reads."""
        hidden = getattr(self, self.mixer)(x, angles, metadata, kv_cache)
        for place in tapped:  # not before: what the mixer reads may make the sum
            place.copy_(residual)
        if self.after_mixer:
            hidden, _ = getattr(self, self.after_mixer)(hidden)
        if not self.parallel:
            x, residual = getattr(self, self.before_block)(hidden, residual)
        elif self.before_block != "sum":
            x, _ = getattr(self, self.before_block)(residual)
        if self.of_sums:
            return getattr(self, self.after_block)(getattr(self, self.block)(x), x)[0], None
        out = self._of_both(x, residual) if self.of_each else getattr(self, self.block)(x)
        if self.after_block:
            out, _ = getattr(self, self.after_block)(out)
        if self.parallel:  # last, for the sum is written over what `before_block` norms
            _, residual = self.sum(hidden, residual)
        return (self.layer_scalar(self.sum(out, residual)[1]), None) if self.scaled else (out, residual)

    def _of_both(self, x: Any, residual: Tensor) -> Tensor:
        """Return the sum of what shared experts make of x and experts of the residual, each normed."""
        first, second = self.of_each
        shared, _ = getattr(self, first)(getattr(self, self.beside)(x))  # first, for it may be what makes the residual
        routed, _ = getattr(self, second)(getattr(self, self.block)(residual))
        return self.sum(routed, shared)[1]


class LlamaModel(Layer):
    """Computes hidden states: embedding, layers, last norm; or what of this one pipeline stage does."""

    def __init__(self, config: ModelConfig, spec: ModelSpec, context: LayerContext) -> None:
        super().__init__()
        group, dtype = context.mesh.tp, context.dtype
        self.rotaries = nn.ModuleList(Rotary(turns, spec.max_position_embeddings, context) for turns in spec.turns)
        every = [*spec.turns, None]
        self.turned_by = [every.index(layer.mixer.turns) for layer in spec.layers]
        """which of the rotaries turns each layer; their number: none"""
        scale = spec.embedding_scale
        if spec.rounds_embedding_scale:
            scale = float(torch.tensor(scale, dtype=dtype))
        self.embeds = spec.has_embedding
        if spec.has_embedding or (spec.has_end and spec.tied_embeddings):
            self.embed_tokens = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, group, dtype, scale)
        added = spec.text_embedding
        self.embeddings = None if added is None else EmbeddingSum(added, spec, context)
        self.layers = nn.ModuleList()
        for index, (layer, attention) in enumerate(zip(spec.layers, context.specs, strict=True)):
            self.layers.add_module(str(spec.first_layer + index), LlamaDecoderLayer(index, layer, attention, context))
        self.norm: Layer = Sum()
        if spec.has_end and not spec.ends_normed:
            self.norm = make_norm(spec.norm, spec.hidden_size, context.kernels, dtype)
        self.taps = spec.taps
        """layers whose inputs go to `AttentionMetadata.tapped`, side by side; their number: the last one's output"""

    def forward(
        self, inputs: Tensor, positions: Tensor, metadata: AttentionMetadata, kv_caches: list[Tensor]
    ) -> Tensor:
        residual = None
        if self.embeddings is not None:
            ids, types = self.embeddings.split(inputs)
            hidden = self.embeddings(self.embed_tokens(ids), types, positions)
        else:
            hidden = self.embed_tokens(inputs) if self.embeds else inputs
        angles = [*(rotary(positions) for rotary in self.rotaries), NO_ANGLES]
        tapped: list[list[Tensor]] = [[] for _ in range(len(self.layers) + 1)]
        if metadata.tapped is not None:
            for tap, place in zip(self.taps, metadata.tapped.chunk(len(self.taps), dim=1), strict=True):
                tapped[tap].append(place)
        for index, (layer, turned_by, kv_cache) in enumerate(zip(self.layers, self.turned_by, kv_caches, strict=True)):
            hidden, residual = layer(hidden, residual, angles[turned_by], metadata, kv_cache, tapped[index])
        normed, total = self.norm(hidden, residual)
        for place in tapped[-1]:
            place.copy_(total)
        return normed


class LlamaForCausalLM(Layer):
    """Adds the head to the model."""

    in_stages = True

    def __init__(self, config: ModelConfig, spec: ModelSpec, context: LayerContext) -> None:
        super().__init__()
        self.model = LlamaModel(config, spec, context)
        if spec.has_end:
            tied_to = self.model.embed_tokens if spec.tied_embeddings else None
            sizes = (spec.vocab_size, spec.hidden_size, context.mesh.tp, context.dtype)
            self.lm_head = ParallelLMHead(*sizes, tied_to, spec.logit_cap, spec.logit_scale, spec.head_bias)

    def forward(
        self, inputs: Tensor, positions: Tensor, attn_metadata: AttentionMetadata, kv_caches: list[Tensor]
    ) -> Tensor:
        """Map inputs, positions [num_tokens] to hidden states # [num_tokens, hidden_size], with one cache a layer.
        Inputs are token ids, on pipeline stages behind the first the hidden states of the one before; what comes out
        of the last stage is normed."""
        return self.model(inputs, positions, attn_metadata, kv_caches)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states [n, hidden_size] to logits # [n, vocab_size] in the model's dtype, on every rank the
        same."""
        return self.lm_head(hidden)
