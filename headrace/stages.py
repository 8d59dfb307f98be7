"""Divides a model's layers among pipeline stages, and says which tensors of a checkpoint a stage holds.

The first stage has the embedding, the last one the norm behind all layers and the head. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.errors import ConfigError
from headrace.mixers import LatentAttention
from headrace.model_spec import LayerSpec, ModelSpec

_OF_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")
_OF_END = re.compile(r"(?:model\.)?(embed_tokens|embeddings|norm|lm_head)\.")


@dataclass(frozen=True)
class Stage:
    """Names the layers that one pipeline stage holds."""

    number: int = 0
    partition: tuple[int, ...] = ()
    """layers of each stage; empty: one stage holds all"""

    @property
    def is_first(self) -> bool:
        """True if tokens come in here, and not hidden states."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """True if tokens are sampled here."""
        return self.number == max(0, len(self.partition) - 1)

    @property
    def is_only(self) -> bool:
        """True if this stage holds all layers."""
        return not self.partition

    @property
    def first(self) -> int:
        """The number of its first layer."""
        return sum(self.partition[: self.number])

    @property
    def layers(self) -> slice:
        """Its layers among all of the model's."""
        return slice(None) if self.is_only else slice(self.first, self.first + self.partition[self.number])

    def of(self, spec: ModelSpec) -> ModelSpec:
        """Return the description of what this stage holds of a model."""
        return replace(
            spec,
            layers=spec.layers[self.layers],
            first_layer=self.first,
            has_embedding=self.is_first,
            text_embedding=spec.text_embedding if self.is_first else None,
            has_end=self.is_last,
        )

    def holds(self, name: str, tied: bool) -> bool:
        """Return whether a checkpoint's tensor is one of this stage's; `tied`: the embedding serves as the head too. A
        name that belongs to no layer nor end is every stage's."""
        if self.is_only:
            return True
        if layer := _OF_LAYER.match(name):
            return self.first <= int(layer[1]) < self.first + self.partition[self.number]
        end = _OF_END.match(name)
        if end is None:
            return True
        if end[1] in ("norm", "lm_head"):
            return self.is_last
        return self.is_first or (self.is_last and tied and end[1] == "embed_tokens")


WHOLE = Stage()
"""The stage of a model that is not divided"""


def parse_partition(text: str, num_stages: int) -> tuple[int, ...]:
    """Return the layers of each stage, given as `18,14`. Raises ConfigError."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts) or len(parts) != num_stages:
        raise ConfigError(
            f"pp_layer_partition must be {num_stages} numbers of layers above 0, one for each stage of "
            f"pipeline_parallel_size {num_stages}, with commas between them; got {text!r}"
        )
    return tuple(int(part) for part in parts)


def check_partition(partition: Sequence[int], layers: Sequence[LayerSpec]) -> None:
    """Raise ConfigError if stages do not hold each of `layers` once, or if one needs what another has chosen."""
    shown = ",".join(map(str, partition))
    if sum(partition) != len(layers):
        raise ConfigError(
            f"pp_layer_partition must add up to the model's {len(layers)} layers, got {shown}, which are "
            f"{sum(partition)}"
        )
    first = 0
    for count in partition[:-1]:
        first += count
        if not _may_begin(layers[first]):
            raise ConfigError(
                f"pp_layer_partition {shown} begins a stage with layer {first}, which reads the keys that an index of "
                "a layer before it chooses; a stage must begin with a layer that has an index of its own"
            )


def divide_layers(layers: Sequence[LayerSpec], head_weights: int, num_stages: int) -> tuple[int, ...]:
    """Return how many layers each stage holds, so that the stage with the most weights has as few as possible.

    `head_weights` are those of the head, which every step of the last stage reads; of the embedding it reads a row a
    token. Among equal divisions it is the one whose stages differ least. Raises ConfigError where there are more stages
    than layers with which one may begin.
    """
    weights = [layer.weights for layer in layers]
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    begins = [index for index, layer in enumerate(layers) if index == 0 or _may_begin(layer)]
    # best[end]: (largest stage, sum of squares, layers of each stage) of the layers before `end`, in so many stages
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for stage in range(num_stages):
        last = stage == num_stages - 1
        found: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for end in [len(layers)] if last else begins:
            for begin, (largest, squares, parts) in best.items():
                if begin >= end:
                    continue
                size = sums[end] - sums[begin] + (head_weights if last else 0)
                made = max(largest, size), squares + size * size, (*parts, end - begin)
                found[end] = min(made, found.get(end, made))
        best = found
    if len(layers) not in best:
        raise ConfigError(
            f"pipeline_parallel_size must be at most {len(begins)}, got {num_stages}: the model has {len(begins)} "
            "layers with which a stage may begin"
        )
    return best[len(layers)][2]


def _may_begin(layer: LayerSpec) -> bool:
    """Return False for a layer that reads the keys which an earlier layer's index chose."""
    mixer = layer.mixer
    return not (isinstance(mixer, LatentAttention) and mixer.sparse_top_k and not mixer.index_heads)
