"""Builds models that pool: a family's layers, and in place of the head over the vocabulary one that gives a text's
vector, or its numbers for labels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.attention.metadata import AttentionMetadata
from headrace.errors import UnsupportedModelError
from headrace.kernels.table import KernelTable
from headrace.layers.context import LayerContext
from headrace.layers.embedding import ParallelLMHead
from headrace.layers.layer import Layer, empty_parameter
from headrace.layers.norm import make_norm
from headrace.model_config import ModelConfig
from headrace.model_spec import ModelSpec
from headrace.models.llama import LlamaModel
from headrace.pooling import HeadLayer

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "relu": F.relu,
}


class Projection(Layer):
    """Computes one linear behind pooling, whole on every rank and in float32: there are few rows, and what follows
    compares them."""

    def __init__(self, layer: HeadLayer) -> None:
        super().__init__()
        self.weight = empty_parameter(layer.outputs, layer.inputs, dtype=torch.float32)
        self.bias = empty_parameter(layer.outputs, dtype=torch.float32) if layer.bias else None
        self.activate = ACTIVATIONS[layer.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for x [n, inputs] float32: [n, outputs] float32."""
        return self.activate(F.linear(x, self.weight, self.bias))


class PooledModel(Layer):
    """Computes hidden states as the family does, and what a text gets of the one that stands for it."""

    def __init__(self, config: ModelConfig, spec: ModelSpec, context: LayerContext) -> None:
        super().__init__()
        assert config.pooling is not None
        self.pooling = config.pooling
        self.model = LlamaModel(config, spec, context)
        self.head: list[str] = []
        """names of the layers behind pooling, in order"""
        for layer in self.pooling.head:
            self._add(layer.name, Projection(layer))
            if layer.norm is not None:
                self._add(f"{layer.name.removesuffix('_dense')}_norm", _norm(layer, context.kernels))
        self.lm_head: ParallelLMHead | None = None
        if self.pooling.token_pair is not None:
            if not spec.has_head:
                raise UnsupportedModelError(f"{spec.architecture} has no head whose logits could score a text")
            tied_to = self.model.embed_tokens if spec.tied_embeddings else None
            sizes = (spec.vocab_size, spec.hidden_size, context.mesh.tp, context.dtype)
            self.lm_head = ParallelLMHead(*sizes, tied_to, spec.logit_cap, spec.logit_scale, spec.head_bias)

    def _add(self, name: str, layer: nn.Module) -> None:
        self.add_module(name, layer)
        self.head.append(name)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attn_metadata: AttentionMetadata, kv_caches: list[Tensor]
    ) -> Tensor:
        """Map input_ids, positions [num_tokens] to hidden states # [num_tokens, hidden_size], with one cache a
        layer."""
        return self.model(input_ids, positions, attn_metadata, kv_caches)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map pooled hidden states [n, hidden_size] to vectors or numbers for labels # [n, width] float32, on every
        rank the same."""
        if self.lm_head is not None:
            assert self.pooling.token_pair is not None
            less, likely = self.pooling.token_pair
            logits = self.lm_head(hidden.to(self.model.embed_tokens.weight.dtype)).float()
            return logits[:, likely, None] - logits[:, less, None]
        x = hidden.float()
        for name in self.head:
            layer = getattr(self, name)
            x = layer(x) if isinstance(layer, Projection) else layer(x)[0]
        return x


def _norm(layer: HeadLayer, kernels: KernelTable) -> Layer:
    assert layer.norm is not None
    return make_norm(layer.norm, layer.outputs, kernels, torch.float32)
