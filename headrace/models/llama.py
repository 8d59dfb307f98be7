"""The Llama family and those shaped like it: Mistral, Qwen2, Qwen3; with sparse layers Mixtral, Qwen2-MoE, Qwen3-MoE.

What sets them apart (biases, QK norm, sliding windows, experts) stands in each layer's description. Names of attributes
are those of the checkpoint, but for fused layers, which know their parts' names.
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
        """hidden, residual [num_tokens, hidden_size]; hidden, the output of the layer before, is yet to be added."""
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, angles, metadata, kv_cache)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class LlamaModel(Layer):
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
    def __init__(self, config: ModelConfig, spec: ModelSpec, context: LayerContext) -> None:
        super().__init__()
        self.model = LlamaModel(config, spec, context)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, context.mesh.tp, context.dtype, tied_to)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attn_metadata: AttentionMetadata, kv_caches: list[Tensor]
    ) -> Tensor:
        """input_ids, positions [num_tokens]; one cache a layer -> [num_tokens, hidden_size], after the last norm."""
        return self.model(input_ids, positions, attn_metadata, kv_caches)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size] in the model's dtype, the whole vocabulary on every rank."""
        return self.lm_head(hidden)
