"""Implements Llama and the families shaped like it: Mistral, Qwen2 and Qwen3, and with experts Mixtral, Qwen2-MoE and
Qwen3-MoE.

What sets them apart (biases, QK norm, sliding windows, experts) is in each layer's description. Attributes are named
as in the checkpoint, except fused layers, which know the names of their parts.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from headrace import model_spec as spec_of
from headrace.attention.metadata import AttentionMetadata
from headrace.attention.spec import AttentionSpec
from headrace.layers.attention import Angles, Attention
from headrace.layers.context import LayerContext
from headrace.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from headrace.layers.layer import Layer
from headrace.layers.mlp import GatedMLP
from headrace.layers.moe import SparseMoE
from headrace.layers.norm import RMSNorm
from headrace.layers.rotary import rope_table
from headrace.model_config import ModelConfig
from headrace.model_spec import LayerSpec, ModelSpec


class LlamaDecoderLayer(Layer):
    """Computes one layer: attention, then a feed-forward, each behind a norm."""

    def __init__(
        self,
        config: ModelConfig,
        layer: LayerSpec,
        spec: AttentionSpec | None,
        context: LayerContext,
    ) -> None:
        super().__init__()
        sizes = (config.hidden_size, config.rms_norm_eps, context.kernels, context.dtype)
        self.input_layernorm = RMSNorm(*sizes)
        assert isinstance(layer.mixer, spec_of.Attention)
        assert spec is not None
        self.self_attn = Attention(layer.mixer, spec, context, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(*sizes)
        block = layer.feed_forward
        if isinstance(block, spec_of.Experts):
            self.mlp: Layer = SparseMoE(block, context)
        else:
            self.mlp = GatedMLP(block.hidden_size, block.intermediate_size, block.bias, context)

    def forward(
        self, hidden: Any, residual: Tensor | None, angles: Angles, metadata: AttentionMetadata, kv_cache: Tensor
    ) -> tuple[Any, Tensor]:
        """Return hidden and residual # [num_tokens, hidden_size]; hidden is this layer's output, which the next norm
        adds to the residual."""
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, angles, metadata, kv_cache)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class LlamaModel(Layer):
    """Computes hidden states: embedding, layers, last norm."""

    def __init__(self, config: ModelConfig, spec: ModelSpec, context: LayerContext) -> None:
        super().__init__()
        self.cos_sin = rope_table(config, context.device)
        self.step_angles = context.kernels.step_angles
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, context.mesh.tp, context.dtype
        )
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, layer, attention, context)
            for layer, attention in zip(spec.layers, context.specs, strict=True)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context.kernels, context.dtype)

    def forward(
        self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, kv_caches: list[Tensor]
    ) -> Tensor:
        hidden, residual = self.embed_tokens(input_ids), None
        angles = self.step_angles(self.cos_sin, positions)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            hidden, residual = layer(hidden, residual, angles, metadata, kv_cache)
        return self.norm(hidden, residual)[0]


class LlamaForCausalLM(Layer):
    """Adds the head to the model."""

    def __init__(self, config: ModelConfig, spec: ModelSpec, context: LayerContext) -> None:
        super().__init__()
        self.model = LlamaModel(config, spec, context)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, context.mesh.tp, context.dtype, tied_to)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attn_metadata: AttentionMetadata, kv_caches: list[Tensor]
    ) -> Tensor:
        """Map input_ids, positions [num_tokens] to hidden states # [num_tokens, hidden_size], after the last norm, with
        one cache a layer."""
        return self.model(input_ids, positions, attn_metadata, kv_caches)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states [n, hidden_size] to logits # [n, vocab_size] in the model's dtype, on every rank the
        same."""
        return self.lm_head(hidden)
