"""The Llama family and those shaped like it: Mistral, Qwen2, Qwen3; with sparse layers Mixtral, Qwen2-MoE, Qwen3-MoE.

What sets them apart (biases, QK norm, sliding windows, experts) stands as data in registry.py. Names of attributes are
those of the checkpoint, but for fused layers, which know their parts' names.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from torch import Tensor, nn

from headrace.attention.metadata import AttentionMetadata
from headrace.attention.spec import AttentionSpec
from headrace.kernels.norm import HalfNormed
from headrace.layers.attention import Angles, Attention
from headrace.layers.context import LayerContext
from headrace.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from headrace.layers.layer import Layer
from headrace.layers.mlp import GatedMLP
from headrace.layers.moe import SparseMoE
from headrace.layers.moe_spec import MoeSpec
from headrace.layers.norm import RMSNorm
from headrace.layers.rotary import rope_table
from headrace.model_config import ModelConfig
from headrace.models.registry import ModelEntry


def _said(quirk: bool | None, otherwise: bool) -> bool:
    return otherwise if quirk is None else quirk


class LlamaDecoderLayer(Layer):
    def __init__(
        self,
        config: ModelConfig,
        entry: ModelEntry,
        spec: AttentionSpec,
        experts: MoeSpec | None,
        context: LayerContext,
    ) -> None:
        """`experts`: None where the layer is dense."""
        super().__init__()
        sizes = (config.hidden_size, config.rms_norm_eps, context.kernels, context.dtype)
        self.input_layernorm = RMSNorm(*sizes)
        self.self_attn = Attention(
            config,
            spec,
            context,
            qkv_bias=_said(entry.qkv_bias, config.attention_bias),
            o_bias=_said(entry.o_bias, config.attention_bias),
            qk_norm=entry.qk_norm,
            norm=self.input_layernorm,
        )
        self.post_attention_layernorm = RMSNorm(*sizes)
        if experts is not None:
            self.mlp: Layer = SparseMoE(config.hidden_size, experts, context, self.post_attention_layernorm)
        else:
            mlp_bias = _said(entry.mlp_bias, config.mlp_bias)
            norm = self.post_attention_layernorm
            self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, mlp_bias, context, norm)
            self.self_attn.o_proj.next_norm = (norm,)

    def forward(self, x: Tensor | HalfNormed, angles: Angles, metadata: AttentionMetadata, kv_cache: Tensor) -> Any:
        """x [num_tokens, hidden_size] -> the same, in place. Norms are their neighbours' affair."""
        x = self.self_attn(x, angles, metadata, kv_cache)
        return self.mlp(x, x)


class LlamaModel(Layer):
    def __init__(self, config: ModelConfig, entry: ModelEntry, context: LayerContext) -> None:
        super().__init__()
        specs = [dataclasses.replace(context.spec, sliding_window=window) for window in entry.windows(config)]
        self.cos_sin = rope_table(config, context.device)
        self.step_angles = context.kernels.step_angles
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, context.mesh.tp, context.dtype
        )
        moe = entry.moe(config) if entry.moe else None
        experts = [moe if sparse else None for sparse in moe.sparse] if moe else [None] * len(specs)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, entry, spec, moe, context) for spec, moe in zip(specs, experts, strict=True)
        )
        for layer, following in itertools.pairwise(self.layers):
            if isinstance(layer.mlp, GatedMLP):
                layer.mlp.down_proj.next_norm = (following.input_layernorm,)
            elif isinstance(layer.mlp, SparseMoE):
                layer.mlp.next_norm = (following.input_layernorm,)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context.kernels, context.dtype)

    def forward(
        self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, kv_caches: list[Tensor]
    ) -> Tensor:
        x = self.embed_tokens(input_ids)
        angles = self.step_angles(self.cos_sin, positions)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x = layer(x, angles, metadata, kv_cache)
        return self.norm(x)


class LlamaForCausalLM(Layer):
    def __init__(self, config: ModelConfig, entry: ModelEntry, context: LayerContext) -> None:
        super().__init__()
        self.model = LlamaModel(config, entry, context)
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
