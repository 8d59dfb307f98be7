"""Defines the token embedding and the head that computes logits, both split over the ranks by vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.distributed.mesh import Group
from headrace.layer_parts import TextEmbedding
from headrace.layers.context import LayerContext
from headrace.layers.layer import Layer, empty_parameter
from headrace.layers.linear import Linear
from headrace.layers.norm import make_norm
from headrace.model_spec import ModelSpec
from headrace.quantization.scheme import LinearSpec, Part, Slot

VOCAB_ALIGNMENT = 64
"""The rows on a rank are a multiple of this, for the matrix units; those beyond the vocabulary are zeros."""


def vocab_share(vocab_size: int, group: Group) -> tuple[int, slice]:
    """Return two things: how many rows each rank holds, and which rows of the vocabulary this rank's are."""
    step = VOCAB_ALIGNMENT * group.size
    local = (vocab_size + step - 1) // step * VOCAB_ALIGNMENT
    return local, slice(min(group.rank * local, vocab_size), min((group.rank + 1) * local, vocab_size))


class VocabParallelEmbedding(Layer):
    """Computes input_ids [num_tokens] -> [num_tokens, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int, group: Group, dtype: torch.dtype, scale: float = 1.0) -> None:
        """Build the embedding; `scale`: what its rows are multiplied by."""
        super().__init__()
        self.scale = scale
        local, self.rows = vocab_share(vocab_size, group)
        self.shape = (vocab_size, hidden_size)
        self.weight = empty_parameter(local, hidden_size, dtype=dtype)
        self.alone = group.size == 1
        self.first = group.rank * local
        self.all_reduce = group.all_reduce
        self.seat: Any = None
        """layers/adapters.py: what adapters add to its rows"""

    def create_weights(self, device: torch.device) -> None:
        super().create_weights(device)
        self.weight[self.rows.stop - self.rows.start :].zero_()

    def slots(self, path: str) -> dict[str, Slot]:
        mine = self.weight[: self.rows.stop - self.rows.start]
        return {f"{path}.weight": Slot(self.shape, (self.rows, slice(0, self.shape[1])), mine)}

    def forward(self, input_ids: Tensor) -> Tensor:
        embedded = self._embedded(input_ids)
        return embedded if self.scale == 1.0 else embedded.mul_(self.scale)

    def _embedded(self, input_ids: Tensor) -> Tensor:
        if self.alone:
            return self._looked_up(input_ids)
        local = input_ids - self.first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        embedded = self._looked_up(local.masked_fill(elsewhere, 0))
        return self.all_reduce(embedded.masked_fill_(elsewhere.unsqueeze(-1), 0))

    def _looked_up(self, local: Tensor) -> Tensor:
        embedded = F.embedding(local, self.weight)
        if self.seat is not None and self.seat.wanted:
            self.seat.add_rows(local, embedded)
        return embedded


class EmbeddingSum(Layer):
    """Computes what encoders and older decoders begin with: embeddings of tokens, of their positions, and of the text
    of a pair that they are in, summed and perhaps normed."""

    def __init__(self, added: TextEmbedding, spec: ModelSpec, context: LayerContext) -> None:
        super().__init__()
        size, self.vocab_size, self.first = spec.hidden_size, spec.vocab_size, added.first_position
        self.positions = empty_parameter(added.positions, size, dtype=context.dtype) if added.positions else None
        self.types = empty_parameter(added.types, size, dtype=context.dtype) if added.types else None
        self.norm = None if added.norm is None else make_norm(added.norm, size, context.kernels, context.dtype)

    def split(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and the text of a pair that each is in # [num_tokens]; ids of a second one come with vocab_size
        added."""
        types = (input_ids >= self.vocab_size).to(input_ids.dtype)
        return input_ids - types * self.vocab_size, types

    def forward(self, words: Tensor, types: Tensor, positions: Tensor) -> Tensor:
        """Return the sum, or its norm, for words # [num_tokens, hidden_size]."""
        if self.types is not None:
            words = words + F.embedding(types, self.types)
        if self.positions is not None:
            words = words + F.embedding(positions + self.first, self.positions)
        return words if self.norm is None else self.norm(words)[0]


class ParallelLMHead(Linear):
    """Computes hidden [n, hidden_size] -> logits [n, vocab_size], of the whole vocabulary on every rank."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        group: Group,
        dtype: torch.dtype,
        tied_to: VocabParallelEmbedding | None = None,
        soft_cap: float | None = None,
        scale: float = 1.0,
        bias: bool = False,
    ) -> None:
        """Build the head; `tied_to`: with that embedding's weights; logits are multiplied by `scale`, then held within
        +-soft_cap. `bias`: each token has one, which only a head with weights of its own can have."""
        local, rows = vocab_share(vocab_size, group)
        part = Part(None, (vocab_size, hidden_size), rows, slice(0, hidden_size), 0)
        super().__init__(LinearSpec(hidden_size, local, (part,), dtype, bias))
        self.vocab_size = vocab_size
        self.soft_cap, self.scale = soft_cap, scale
        self.all_gather = group.all_gather
        # in a tuple, so that it does not become a child
        self.tied_to: tuple[VocabParallelEmbedding | None] = (tied_to,)

    def untie(self) -> None:
        """Give the head weights of its own, which a quantized checkpoint may bring though its config.json says tied."""
        self.tied_to = (None,)

    def create_weights(self, device: torch.device) -> None:
        if self.tied_to[0] is None:
            super().create_weights(device)

    def slots(self, path: str) -> dict[str, Slot]:
        return super().slots(path) if self.tied_to[0] is None else {}

    def finalize(self) -> None:
        if self.tied_to[0] is not None:
            self.weights = {"weight": self.tied_to[0].weight.data}
        super().finalize()

    def forward(self, x: Tensor) -> Tensor:
        logits = self.all_gather(self.compute(x, None))[..., : self.vocab_size]
        if self.soft_cap is not None:
            return logits.mul_(self.scale / self.soft_cap).tanh_().mul_(self.soft_cap)
        return logits if self.scale == 1.0 else logits.mul_(self.scale)
