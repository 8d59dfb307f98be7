"""Counts a model's parameters by its description, and says in which format each part of its weights is held.

Everything follows from config.json; no weights are read. Knows no GPU, and not how layers are spread over several.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from headrace.errors import ConfigError, UnsupportedModelError
from headrace.feed_forwards import FeedForward
from headrace.graph_sizes import most_in_pieces
from headrace.mixers import Mixer
from headrace.model_config import Fields, is_more_than_text, quantization_of, text_part
from headrace.model_spec import LayerSpec, ModelSpec
from headrace.models.names import text_module
from headrace.models.registry import DESCRIBED, find_entry
from headrace.parameters import total
from headrace.quantization.checkpoint_format import holds_kv_scales, read_format
from headrace.quantization.checkpoint_integers import HEAD
from headrace.quantization.formats import MADE_AT_LOAD, PLAIN, WeightFormat, find_format
from headrace.quantization.linear_rules import PARTS


@dataclass(frozen=True)
class LayerGroup:
    """Counts the layers of a model that are equal to each other."""

    count: int
    layer: LayerSpec

    @property
    def mixer(self) -> Mixer:
        return self.layer.mixer

    @property
    def feed_forward(self) -> FeedForward:
        return self.layer.feed_forward


@dataclass(frozen=True)
class ModelShape:
    """Holds a model's sizes, and how its checkpoint (or a plan for it) holds the weights."""

    name: str
    spec: ModelSpec = field(hash=False)
    """left out of the hash, which is taken for each step model that is looked up, and of all layers takes 0.1 ms"""
    dtype: str
    """bfloat16, float16 or float32: of activations, and of weights without a format"""
    source: str
    """where config.json comes from"""
    held: WeightFormat = PLAIN
    """of most linears, with the scales that config.json tells of"""
    held_parts: tuple[WeightFormat, ...] = (PLAIN,) * len(PARTS)
    """of the linears in each of PARTS; all other weights are in `dtype`"""
    held_head: WeightFormat = PLAIN
    """of the head, where it is not the embedding"""
    plain_bytes: int = 2
    """bytes of a number without a format: 4 in float32"""
    fp8_kv_cache: bool = False
    """whether the checkpoint brings scales for an fp8 cache"""

    @property
    def weight_format(self) -> str:
        """Name of the format of most linears; bf16 stands for the dtype, whichever it is."""
        return self.held.name

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
        """Parameters of the head; 0 where the embedding serves as head, or there is none."""
        return 0 if self.spec.tied_embeddings or not self.spec.has_head else self.embedding_weights

    @property
    def final_weights(self) -> int:
        """Parameters of the last norm."""
        return total(self.spec.norm_parameters)

    @property
    def extra_weights(self) -> int:
        """Parameters that no step of text reads: the vision encoder, and layers that predict further tokens."""
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

    def part_format(self, part: str, weight_format: str) -> WeightFormat:
        """Return the format of the linears of one of PARTS when `weight_format` is asked for."""
        if weight_format != self.weight_format or self.held == PLAIN:
            return self.format_of(weight_format)
        held = self.held_parts[PARTS.index(part)]
        return self.format_of(PLAIN.name) if held == PLAIN else held

    def head_format(self, weight_format: str) -> WeightFormat:
        """Return the format of the head when `weight_format` is asked for: unquantized but in a checkpoint that holds
        it otherwise."""
        own = weight_format == self.weight_format and self.held_head != PLAIN
        return self.held_head if own else self.format_of(PLAIN.name)

    def multiplied_weights(self, weight_format: str, tp: int = 1) -> float:
        """Count the weights that a token is multiplied with in all layers on one of `tp` ranks, as models/loader.py
        does."""
        attention, dense, experts = (self.part_format(part, weight_format).launched_as for part in PARTS)
        weights = 0.0
        for layer, count in self.spec.groups:
            shares, block = rank_shares(layer.mixer, tp), layer.feed_forward
            weights += count * attention * sum(one.size * shares[one.split] for one in layer.mixer.parameters)
            shared = dense * total(block.parameters, "linear", "plain") + total(block.parameters, "router")
            weights += count * (shared + experts * block.experts_per_token * layer.expert_weights) / tp
        return weights

    def most_in_pieces(self, weight_format: str, tp: int) -> int:
        """Return the tokens of the largest step with prompts that headrace captures piecewise."""
        return most_in_pieces(self.multiplied_weights(weight_format, tp) / self.num_layers)

    def held_in(self, dtype: str) -> ModelShape:
        """Return the model with everything that is in no format in `dtype`."""
        return replace(self, plain_bytes=4) if dtype in ("float32", "float") else self

    def in_format(self, weight_format: str, fp8_kv_cache: bool = False) -> ModelShape:
        """Return the same model in a checkpoint that holds all linears in `weight_format`."""
        held = find_format(weight_format)
        return replace(self, held=held, held_parts=(held,) * len(PARTS), held_head=PLAIN, fp8_kv_cache=fp8_kv_cache)

    def format_for(self, wanted: str | None) -> str:
        """Return the format of the linears where `wanted` is asked for: the checkpoint's, where that is None, or where
        both are of the kind that is made at load."""
        if wanted is None or (find_format(wanted).made_at_load and self.held.name in MADE_AT_LOAD):
            return self.weight_format
        return wanted

    def converted(self, wanted: str | None) -> ModelShape:
        """Return the model as an engine holds it where `wanted` is asked for."""
        weight_format = self.format_for(wanted)
        return self if weight_format == self.weight_format else self.in_format(weight_format)

    def format_of(self, weight_format: str) -> WeightFormat:
        """Describe `weight_format` as this model's weights are held in it."""
        if weight_format == PLAIN.name:
            return replace(PLAIN, bits=8 * self.plain_bytes)
        return self.held if weight_format == self.weight_format else find_format(weight_format)

    def bytes_per_weight(self, weight_format: str) -> float:
        """Return the bytes of a weight in `weight_format`, scales included."""
        return self.format_of(weight_format).bytes_per_weight


def _stored(format: WeightFormat) -> WeightFormat:
    """Return a format as a checkpoint holds it, which rounds nothing at load."""
    return replace(format, made_at_load=False)


def rank_shares(mixer: Mixer, tp: int) -> dict[str, float]:
    """Return the share of a mixer's parameters that one of `tp` ranks holds, by how they are split."""
    heads = math.ceil(mixer.num_heads / tp) / mixer.num_heads
    return {"heads": heads, "kv_heads": mixer.cache_share(tp), "width": 1 / tp, "whole": 1.0}


def expert_share(spec: ModelSpec) -> float:
    """Return the share of a layer's experts that a token uses, in the sparsest layer; 1 for a dense model."""
    sparse = [layer.feed_forward for layer, _ in spec.groups if layer.feed_forward.num_experts]
    return min((block.experts_per_token / block.num_experts for block in sparse), default=1.0)


def shape_of(config: dict[str, Any], name: str, source: str = "") -> ModelShape:
    """Count the model of a raw config.json.

    Raises ConfigError where its architecture is not described here, a field is missing or malformed, or the weight
    format is unknown.
    """
    try:
        fields = Fields(config, f"config.json of {name}")
        architecture = next(iter(fields.texts("architectures")), "none")
        text = text_part(replace(fields, where=f"{fields.where} ({architecture})"))
        entry = find_entry(architecture)
        if entry is None:
            known = ", ".join(sorted(DESCRIBED))
            raise ConfigError(f"architecture {architecture!r} of {name} is not one that can be counted; known: {known}")
        spec, quantization = entry.spec(text), quantization_of(text)
        more_than_text = is_more_than_text(config)
        checkpoint = read_format(quantization).called(lambda one: text_module(one, more_than_text, spec.names))
        parts = checkpoint.parts(len(spec.layers))
        return ModelShape(
            name=name,
            spec=spec,
            dtype=text.text("dtype", text.text("torch_dtype", "bfloat16")).removeprefix("torch."),
            source=source or name,
            held=_stored(checkpoint.main.format),
            held_parts=tuple(_stored(parts.get(part, PLAIN)) for part in PARTS),
            held_head=PLAIN if spec.tied_embeddings else checkpoint.format_for(HEAD).format,
            fp8_kv_cache=holds_kv_scales(quantization),
        )
    except UnsupportedModelError as error:
        raise ConfigError(str(error)) from None
