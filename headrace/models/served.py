"""Finds what serves a config.json: its entry of the registry, its description, and what its layers need of attention.

It imports no torch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from headrace.attention.spec import AttentionSpec
from headrace.cache_groups import cache_layout
from headrace.config import EngineConfig
from headrace.errors import ConfigError, UnsupportedModelError
from headrace.mixers import Attention, LatentAttention, Mixer
from headrace.model_config import OTHER_PARTS, Fields, ModelConfig, read_object
from headrace.model_spec import LayerSpec, ModelSpec
from headrace.models.entry import ModelEntry
from headrace.models.poolers import BARE, CAUSAL, longest_text, read_pooling, read_sentences, runner_of
from headrace.models.refusals import REFUSED, nearest
from headrace.models.registry import SERVED, find_entry, served_entry
from headrace.quantization.table import resolve_format


def read_served_config(folder: Path, asked: EngineConfig | None = None) -> ModelConfig:
    """Read the config of a model's folder, if its architecture is served. `asked`: what the user says of it; None:
    nothing.

    The architecture is checked first, since other families have other fields, and an error about a missing field would
    mislead. Raises UnsupportedModelError, ModelNotFoundError where a file is missing or cannot be read, and ConfigError
    where the model cannot do what is asked for.
    """
    asked = asked or EngineConfig()
    raw = {**read_object(folder / "config.json"), **asked.hf_overrides}
    names = Fields(raw, "config.json").texts("architectures")
    entry = served_entry(names[0]) if names else None
    if entry is None:
        if names:
            raise _not_served(names[0], raw)
        return ModelConfig.from_folder(folder)
    sentences = read_sentences(folder)
    runner, convert = runner_of(asked, names[0], sentences)
    overrides = dict(asked.hf_overrides)
    if convert == "embed" and names[0].endswith(CAUSAL):
        entry = find_entry(names[0].removesuffix(CAUSAL) + BARE) or entry
        overrides["architectures"] = [entry.architecture]
    config = ModelConfig.from_folder(folder, entry.defaults, overrides)
    if runner == "generate":
        return config
    fields = replace(config.fields, values={**config.raw, "architectures": names})
    pooling = read_pooling(
        asked, folder, fields, convert, sentences, entry.pools_by, entry.classifier, _has_segments(entry, fields)
    )
    positions = config.max_position_embeddings - entry.taken_positions(fields)
    added = entry.spec(config.fields).text_embedding
    longest, said_by = longest_text(folder, positions, added is not None and added.positions > 0, sentences)
    return replace(config, pooling=pooling, max_position_embeddings=longest, length_field=said_by)


def _has_segments(entry: ModelEntry, fields: Fields) -> bool:
    return entry.segments and fields.integer("type_vocab_size", 2, minimum=0) > 1


def _not_served(architecture: str, raw: dict[str, Any]) -> UnsupportedModelError:
    kind = ""
    if "vision_config" in raw:
        kind = "a vision-language model, which is "
    elif any(name in raw for name in OTHER_PARTS):
        kind = "a model of more than text, which is "
    known = find_entry(architecture) is not None
    why = " (`headrace plan` can plan it)" if known else REFUSED.get(architecture, "") or nearest(raw, SERVED)
    return UnsupportedModelError(
        f"architecture {architecture!r:.80} is {kind}not served yet{why}; served: {', '.join(SERVED)}"
    )


def resolve(config: ModelConfig) -> ModelEntry:
    """Return the entry that serves `config`. Raises UnsupportedModelError naming what is accepted instead, if its
    architecture, one of its features or its weight format is not served."""
    entry = served_entry(config.architecture)
    if entry is None:
        raise _not_served(config.architecture, config.raw)
    reasons = entry.reasons(config)
    if reasons:
        raise UnsupportedModelError(f"config.json of {config.architecture}: {'; '.join(reasons)}")
    resolve_format(config)
    return entry


def describe(config: ModelConfig) -> ModelSpec:
    """Describe a model that can be served. Raises UnsupportedModelError where it cannot."""
    return resolve(config).spec(config.fields)


def attention_specs(
    config: ModelConfig,
    *,
    tp_size: int,
    block_size: int,
    dtype: str,
    device_type: str,
    batch_invariant: bool = False,
    kv_cache_dtype: str = "auto",
    behind: tuple[LayerSpec, ...] = (),
) -> tuple[AttentionSpec | None, ...]:
    """Return what each layer needs of attention on one of `tp_size` ranks; None: the layer has no attention. Layers
    that guess tokens come `behind` the model's own.

    Raises UnsupportedModelError, and ConfigError where `tp_size` does not divide the heads.
    """

    @cache
    def on_a_rank(mixer: Mixer) -> AttentionSpec | None:
        if not isinstance(mixer, Attention | LatentAttention):
            return None
        heads, kv_heads, latent = mixer.num_heads, mixer.num_kv_heads, isinstance(mixer, LatentAttention)
        if heads % tp_size:
            raise ConfigError(f"tensor_parallel_size {tp_size} does not divide num_attention_heads ({heads})")
        if not latent and kv_heads % tp_size and tp_size % kv_heads:
            raise ConfigError(
                f"tensor_parallel_size {tp_size} must divide num_key_value_heads ({kv_heads}) or be a multiple of it"
            )
        spec = AttentionSpec(
            num_heads=heads // tp_size,
            num_kv_heads=max(1, kv_heads // tp_size),
            head_dim=mixer.latent_values if isinstance(mixer, LatentAttention) else mixer.head_dim,
            scale=mixer.scale or mixer.head_dim**-0.5,
            block_size=block_size,
            dtype=dtype,
            sliding_window=mixer.window,
            device_type=device_type,
            batch_invariant=batch_invariant,
            kv_cache_dtype=kv_cache_dtype,
        )
        if isinstance(mixer, LatentAttention):
            turned, top_k, keys = mixer.rope.interleaved, mixer.sparse_top_k, mixer.index_dim
            return replace(
                spec, latent_dim=mixer.latent_dim, interleaved=turned, sparse_top_k=top_k, index_dim=keys
            )  # fmt: skip
        own = {name: getattr(mixer, name) for name in ("causal", "chunked", "sinks", "soft_cap")}
        return replace(spec, interleaved=mixer.rope is not None and mixer.rope.interleaved, **own)

    described = describe(config)
    described = replace(described, layers=(*described.layers, *behind))
    specs = [on_a_rank(layer.mixer) for layer in described.layers]
    groups = cache_layout(described, tp_size, 1, block_size).group_of
    return tuple(
        spec if spec is None or spec.group == groups.get(layer, 0) else replace(spec, group=groups[layer])
        for layer, spec in enumerate(specs)
    )
