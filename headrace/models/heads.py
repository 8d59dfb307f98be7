"""Implements heads: one layer that guesses the next token from a hidden state of the model and the token behind it.

What sets them apart (EAGLE, EAGLE-3, layers for further tokens of DeepSeek and others) is in their description. They
share the model's embedding, and its head of logits unless they have one of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.attention.metadata import AttentionMetadata
from headrace.errors import CheckpointError
from headrace.layers.context import LayerContext
from headrace.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from headrace.layers.layer import Layer
from headrace.layers.linear import Linear, column_spec
from headrace.layers.norm import Sum, make_norm
from headrace.layers.rotary import NO_ANGLES, Angles, Rotary
from headrace.model_spec import HeadSpec
from headrace.models.llama import LlamaDecoderLayer
from headrace.quantization.scheme import Slot


class TokenMap(Layer):
    """Holds d2t: by how much the id of each token of a head's own vocabulary is below that of the model's token which
    it stands for."""

    def __init__(self, size: int, of_model: int) -> None:
        super().__init__()
        self.size, self.of_model = size, of_model

    def create_weights(self, device: torch.device) -> None:
        self.offsets = torch.zeros(self.size, dtype=torch.int64, device=device)

    def slots(self, path: str) -> dict[str, Slot]:
        size = self.size
        whole = size == self.of_model  # then each token stands for itself unless the checkpoint says otherwise
        return {path: Slot((size,), (slice(0, size),), self.offsets, whole, stored=("I64", "I32"), dummy=0)}

    def finalize(self) -> None:
        super().finalize()
        self.tokens = torch.arange(self.size, device=self.offsets.device) + self.offsets
        known = ((self.tokens >= 0) & (self.tokens < self.of_model)).all()
        if not known or len(self.tokens.unique()) < len(self.tokens):
            raise CheckpointError(
                f"its tokens stand for ids from {int(self.tokens.min())} to {int(self.tokens.max())}; accepted: "
                f"different ones of the model's {self.of_model}"
            )

    def forward(self, logits: Tensor) -> Tensor:
        """Return logits # [n, of_model] from those of the head's own tokens; all others are -inf."""
        whole = logits.new_full((logits.shape[0], self.of_model), -torch.inf)
        return whole.index_copy_(1, self.tokens, logits)


class DraftHead(Layer):
    """Computes a head beside its model, whose embedding it shares."""

    def __init__(self, spec: HeadSpec, model: Any, vocab_size: int, context: LayerContext, biased: bool) -> None:
        """Build the head of `model`, which knows `vocab_size` tokens. `biased`: the linear that joins has a bias."""
        super().__init__()
        kernels, dtype, hidden = context.kernels, context.dtype, spec.hidden_size
        embedding = next(one for one in model.modules() if isinstance(one, VocabParallelEmbedding))
        self.shared = embedding, model.compute_logits
        """in a tuple, so that they do not become children"""
        self.taps, self.joins, self.hands_on_normed = spec.taps, spec.joins, spec.hands_on_normed
        self.reads = (len(spec.taps) or 1) * hidden
        """numbers of the model's hidden states, for each token"""
        turns = spec.layer.mixer.turns
        self.rotary = None if turns is None else Rotary(turns, spec.max_position_embeddings, context)
        parts = [(None, hidden, hidden, 0)]
        self.fc = Linear(column_spec(spec.joined * hidden, parts, dtype, biased))
        self.embed_norm, self.hidden_norm, self.norm = (
            Sum() if norm is None else make_norm(norm, hidden, kernels, dtype)
            for norm in (spec.input_norm, spec.input_norm, spec.last_norm)
        )
        self.layer = LlamaDecoderLayer(0, spec.layer, context.specs[0], context)
        self.lm_head = self.d2t = None
        if spec.vocab_size:
            self.lm_head = ParallelLMHead(spec.vocab_size, hidden, context.mesh.tp, dtype)
            self.d2t = TokenMap(spec.vocab_size, vocab_size)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        kv_caches: list[Any],
        hidden: Tensor,
        of_model: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Return two things # [num_tokens, hidden_size]: what logits are computed from, and the hidden states for the
        next guesses.

        `input_ids` [num_tokens] are the tokens behind those that `hidden` is of: the model's hidden states, or of its
        `taps` # [num_tokens, taps * hidden_size]; not `of_model`: those that the head has returned.
        """
        x, residual, angles = self._joined(input_ids, positions, hidden, of_model)
        out, residual = self.layer.mixed(x, residual, angles, metadata, kv_caches[0])
        normed, total = self.norm(out, residual)
        return normed, normed if self.hands_on_normed else total

    def fill(
        self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, kv_caches: list[Any], hidden: Tensor
    ) -> None:
        """Write to the cache what `forward` does of the model's hidden states, and leave out attention, where a layer
        can, and the feed-forward."""
        metadata.only_caches = True
        x, _, angles = self._joined(input_ids, positions, hidden, of_model=True)
        getattr(self.layer, self.layer.mixer)(x, angles, metadata, kv_caches[0])

    def _joined(self, input_ids: Tensor, positions: Tensor, hidden: Tensor, of_model: bool) -> tuple[Any, Any, Angles]:
        """Return what the layer's mixer reads, the residual, and the angles by which it turns."""
        if self.taps and of_model:
            hidden = self.fc(hidden)
        embedded = self.shared[0](input_ids)
        pair = self.embed_norm(embedded)[0], self.hidden_norm(hidden)[0]
        joined = torch.cat(pair[::-1] if self.joins == "hidden_first" else pair, dim=-1)
        angles = NO_ANGLES if self.rotary is None else self.rotary(positions)
        if self.joins == "in_attention":
            return joined, hidden, angles
        return *getattr(self.layer, self.layer.before_mixer)(self.fc(joined), None), angles

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map what `forward` returns first # [n, hidden_size] to logits # [n, vocab_size] of the model's tokens."""
        if self.lm_head is None or self.d2t is None:
            logits: Tensor = self.shared[1](hidden)
            return logits
        return self.d2t(self.lm_head(hidden))
