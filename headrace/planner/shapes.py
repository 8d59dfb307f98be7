"""A model as the planner weighs it: its description, and in which format the checkpoint holds which part of it.

Pure arithmetic on published fields: no weights are looked at. Knows nothing of families, of GPUs, nor of how layers are
spread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from headrace.errors import ConfigError, UnsupportedModelError
from headrace.graph_sizes import most_in_pieces
from headrace.model_config import Fields
from headrace.model_spec import FeedForward, LayerSpec, Mixer, ModelSpec, total
from headrace.models.registry import DESCRIBED, find_entry
from headrace.quantization.checkpoint_format import PARTS, holds_kv_scales, read_format
from headrace.quantization.formats import PLAIN, WeightFormat, find_format


@dataclass(frozen=True)
class LayerGroup:
    """Layers that are alike, wherever they stand, and how many parameters of which kind one of them has."""

    count: int
    layer: LayerSpec

    @property
    def mixer(self) -> Mixer:
        return self.layer.mixer

    @property
    def feed_forward(self) -> FeedForward:
        return self.layer.feed_forward

    @cached_property
    def mixer_weights(self) -> int:
        return total(self.mixer.parameters)

    @cached_property
    def dense_weights(self) -> int:
        """dense feed-forward, or shared experts"""
        return total(self.feed_forward.parameters, "linear", "plain")

    @cached_property
    def router_weights(self) -> int:
        return total(self.feed_forward.parameters, "router")

    @cached_property
    def expert_weights(self) -> int:
        """of one expert"""
        return total(self.feed_forward.expert_parameters)


@dataclass(frozen=True)
class ModelShape:
    name: str
    spec: ModelSpec
    dtype: str
    """bfloat16, float16 or float32: of activations, and of weights without a format"""
    weight_format: str
    """as the checkpoint holds the linears: bf16 (the dtype as it is), fp8, mxfp4, int4, int8"""
    source: str
    """where config.json comes from"""
    format_parts: tuple[str, ...] = PARTS
    """what the checkpoint holds in `weight_format`; the rest is in `dtype`"""
    exact_format: WeightFormat | None = None
    """`weight_format` with the scales that config.json tells of; None: as usual"""
    plain_bytes: int = 2
    """of a number that is in no format, as it will be held: 4 in float32"""
    fp8_kv_cache: bool = False
    """the checkpoint brings scales for an fp8 cache"""

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        return tuple(LayerGroup(count, layer) for layer, count in self.spec.groups)

    @property
    def num_layers(self) -> int:
        return len(self.spec.layers)

    @property
    def embedding_weights(self) -> int:
        return self.spec.hidden_size * self.spec.vocab_size

    @property
    def head_weights(self) -> int:
        """0: the embedding serves as head"""
        return 0 if self.spec.tied_embeddings else self.embedding_weights

    @property
    def final_weights(self) -> int:
        """the last norm"""
        return self.spec.hidden_size

    @property
    def extra_weights(self) -> int:
        """not read by a step of text: vision encoder, layers that predict further tokens"""
        return self.spec.vision_weights + self.spec.draft_weights

    @property
    def total_weights(self) -> int:
        layers = sum(group.count * group.layer.weights for group in self.groups)
        return layers + self.embedding_weights + self.head_weights + self.final_weights + self.extra_weights

    @property
    def active_weights(self) -> int:
        """Parameters that one token reads: one row of the embedding, the chosen experts, the head."""
        layers = sum(group.count * group.layer.active_weights for group in self.groups)
        return layers + self.spec.hidden_size + self.embedding_weights + self.final_weights

    @property
    def is_moe(self) -> bool:
        return self.spec.is_moe

    @property
    def is_mla(self) -> bool:
        return any(group.mixer.kind == "mla" for group in self.groups)

    @property
    def num_experts(self) -> int:
        return max(group.feed_forward.num_experts for group in self.groups)

    @property
    def num_heads(self) -> int:
        return max(group.mixer.num_heads for group in self.groups)

    @property
    def num_kv_heads(self) -> int:
        return max(group.mixer.num_kv_heads for group in self.groups)

    @property
    def intermediate_size(self) -> int:
        """of the widest dense MLP or shared experts; 0 where there are none"""
        return max(group.feed_forward.intermediate_size for group in self.groups)

    @property
    def kv_values_per_token(self) -> int:
        """Numbers cached for a token in all layers together, windows not counted."""
        return sum(group.count * group.mixer.cached_values for group in self.groups)

    @property
    def quantizable(self) -> int:
        """Parameters that a weight format may apply to: linears of mixers, feed-forwards and experts; not router,
        norms, biases, embedding and head."""
        return sum(
            group.count
            * (
                total(group.mixer.parameters, "linear")
                + total(group.feed_forward.parameters, "linear")
                + group.feed_forward.num_experts * total(group.feed_forward.expert_parameters, "linear")
            )
            for group in self.groups
        )

    def parts_in(self, weight_format: str) -> tuple[str, ...]:
        """The parts that are held in `weight_format` when it is asked for: as the checkpoint has it, else all."""
        return self.format_parts if weight_format == self.weight_format else PARTS

    def multiplied_weights(self, weight_format: str) -> float:
        """What a token is multiplied with in all layers, as models/size.py counts it in the loaded model."""
        narrow, share = self.parts_in(weight_format), find_format(weight_format).launched_as
        attention, dense, experts = (share if part in narrow else 1.0 for part in PARTS)
        return sum(
            group.count
            * (
                attention * group.mixer_weights
                + dense * group.dense_weights
                + group.router_weights
                + experts * group.feed_forward.experts_per_token * group.expert_weights
            )
            for group in self.groups
        )

    def most_in_pieces(self, weight_format: str, tp: int) -> int:
        """Tokens of the largest step with prompts in it that headrace captures in pieces."""
        return most_in_pieces(self.multiplied_weights(weight_format) / self.num_layers / tp)

    def held_in(self, dtype: str) -> ModelShape:
        """The model with what is in no format in `dtype`."""
        return replace(self, plain_bytes=4) if dtype in ("float32", "float") else self

    def format_of(self, weight_format: str) -> WeightFormat:
        """As weights of this model are held in it."""
        if weight_format == PLAIN.name:
            return replace(PLAIN, bits=8 * self.plain_bytes)
        own = self.exact_format if weight_format == self.weight_format else None
        return own or find_format(weight_format)

    def bytes_per_weight(self, weight_format: str) -> float:
        """of a weight held in `weight_format`, scales included"""
        return self.format_of(weight_format).bytes_per_weight


Config = dict[str, Any]


def shape_of(config: Config, name: str, source: str = "") -> ModelShape:
    """Count a raw config.json. Raises ConfigError where no family here knows its architecture, a field is missing or
    none of its kind, or the weight format is none of ours."""
    try:
        return _counted(Fields(config, f"config.json of {name}"), name, source or name)
    except UnsupportedModelError as error:
        raise ConfigError(str(error)) from None


def _counted(config: Fields, name: str, source: str) -> ModelShape:
    architecture = next(iter(config.texts("architectures")), "none")
    text = replace(config, where=f"{config.where} ({architecture})")
    text = text.changed(text.object("text_config").values)
    entry = find_entry(architecture)
    if entry is None:
        known = ", ".join(sorted(DESCRIBED))
        raise ConfigError(f"architecture {architecture!r} of {name} is not one that can be counted; known: {known}")
    spec = entry.spec(text)
    quantization = text.object("quantization_config").values
    held = read_format(quantization)
    return ModelShape(
        name=name,
        spec=spec,
        dtype=text.text("dtype", text.text("torch_dtype", "bfloat16")).removeprefix("torch."),
        weight_format=held.default.name,
        source=source,
        format_parts=held.parts(len(spec.layers)),
        exact_format=held.default,
        fp8_kv_cache=holds_kv_scales(quantization),
    )


def in_format(shape: ModelShape, weight_format: str, fp8_kv_cache: bool = False) -> ModelShape:
    """The same model in a checkpoint that holds all its linears in `weight_format`."""
    return replace(shape, weight_format=weight_format, format_parts=PARTS, exact_format=None, fp8_kv_cache=fp8_kv_cache)
