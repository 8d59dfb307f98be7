"""Defines what the registry holds of a family, and why a config.json cannot be served by it. It imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.model_config import Fields, ModelConfig
from headrace.model_spec import ModelSpec
from headrace.models import descriptions
from headrace.models.descriptions import Describe
from headrace.pooling import HeadLayer, PoolingKind

Classifier = Callable[[Fields, int], tuple[HeadLayer, ...]]
"""Describes what follows pooling, given the number of labels"""


def scores(c: Fields, num_labels: int) -> tuple[HeadLayer, ...]:
    """Describe the head of a decoder that classifies: one linear."""
    return (HeadLayer("score", c.integer("hidden_size"), num_labels, bias=False),)


def no_positions(c: Fields) -> int:
    """Return 0: a model's first token has position 0."""
    return 0


@dataclass(frozen=True)
class ModelEntry:
    """Describes one architecture."""

    architecture: str
    describe: Describe
    module: str = ""
    """empty: the family has no modules yet, so that it can be planned but not served"""
    class_name: str = ""
    needs: tuple[str, ...] = ()
    """fields that config.json must have, because the family's default for them is not the usual one"""
    defaults: dict[str, Any] = field(default_factory=dict)
    """values of fields that config.json may leave out"""
    layer_kinds: tuple[str, ...] = ("full_attention", "sliding_attention")
    """what `layer_types` may say"""
    has_head: bool = True
    """False: there is no head over the vocabulary, since the model does not generate"""
    pools_by: PoolingKind = "last"
    """which hidden state stands for a text, where no file says it"""
    classifier: Classifier = scores
    """what follows pooling in a model that classifies"""
    segments: bool = False
    """the two texts of a pair have embeddings of their own"""
    taken_positions: Callable[[Fields], int] = no_positions
    """how many of `max_position_embeddings` no token has"""

    def spec(self, fields: Fields) -> ModelSpec:
        """Describe the model of `fields`, those of the text part of a config.json. Raises UnsupportedModelError for a
        field that is missing or has no valid value."""
        for name in self.needs:
            if fields.values.get(name) is None:
                raise fields.refusal(name, "given")
        fields = replace(fields, values={**self.defaults, **fields.values})
        described = self.describe(fields)
        return ModelSpec(
            architecture=self.architecture,
            hidden_size=fields.integer("hidden_size"),
            vocab_size=fields.integer("vocab_size"),
            max_position_embeddings=fields.integer("max_position_embeddings", 2048),
            layers=described.layers,
            tied_embeddings=fields.flag("tie_word_embeddings"),
            has_head=self.has_head,
            **{name: getattr(described, name) for name in OF_MODEL},
        )

    def reasons(self, config: ModelConfig) -> list[str]:
        """Return why this model cannot be served: field, value and what is accepted; empty: it can. Raises
        UnsupportedModelError for a field that has no valid value."""
        own = [f"`{name}` is missing" for name in self.needs if config.raw.get(name) is None]
        spec = None if own else self.spec(config.fields)
        if spec is not None and spec.is_moe and not config.fields.flag("qkv_bias", True):
            own = ["`qkv_bias` is False; accepted: true"]
        descriptions.layer_types(config.fields, self.layer_kinds)
        directions = [] if spec is None else _direction_reasons(config, spec)
        return [*own, *_shape_reasons(config), *_feature_reasons(config), *directions]


OF_MODEL = (
    "vision_weights", "head", "norm", "ends_normed", "text_embedding", "embedding_scale", "rounds_embedding_scale",
    "head_bias", "logit_scale", "logit_cap", "names", "transposed",
)  # fmt: skip
"""Fields of Described that are those of ModelSpec"""


def _shape_reasons(config: ModelConfig) -> list[str]:
    reasons = []
    if config.num_heads % config.num_kv_heads:
        reasons.append(
            f"`num_key_value_heads` is {config.num_kv_heads}; must divide num_attention_heads ({config.num_heads})"
        )
    if config.head_dim % 2:
        reasons.append(f"`head_dim` is {config.head_dim}; must be even")
    return reasons


def _feature_reasons(config: ModelConfig) -> list[str]:
    reasons = []
    if config.dtype not in ("float16", "bfloat16", "float32"):
        reasons.append(f"`dtype` is {config.dtype!r}; accepted: float16, bfloat16, float32")
    return reasons


def _direction_reasons(config: ModelConfig, spec: ModelSpec) -> list[str]:
    """Return why attention to later tokens, if config.json asks for it, cannot be had."""
    fields = config.fields.values
    ways = {"use_bidirectional_attention": (True, "all"), "is_causal": (False,)}
    name = next((name for name, values in ways.items() if fields.get(name) in values), None)
    if name is None:
        return []
    if all(layer.mixer.causal for layer in spec.layers):
        return [f"`{name}` is {fields[name]!r}; accepted for this family: {name == 'is_causal'}"]
    if config.pooling is None:
        return [f"`{name}` is {fields[name]!r}; it makes vectors (--runner pooling), and generates no text"]
    return []
