"""Describes the layers of what guesses tokens, which cache, attention backend and planner count with the model's.

Imports no torch.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from headrace.attention.spec import AttentionSpec
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.mixers import Attention
from headrace.model_config import Fields, ModelConfig
from headrace.model_spec import HeadSpec, ModelSpec
from headrace.models.registry import served_entry
from headrace.models.served import attention_specs, describe, read_served_config
from headrace.speculation import DRAFT_MODEL, EAGLE, EAGLE3, MTP, NGRAM, Speculation

NAMES = (("model.", ""), ("midlayer.", "layers.0."))
"""(part of a tensor's name in a head's files, what it is here)"""
TAPS = "eagle_aux_hidden_state_layer_ids"


def read_draft_config(speculation: Speculation | None) -> ModelConfig | None:
    """Read the config of a draft model or of a head, whose folder must be here; None: the model brings what guesses,
    or nothing is read."""
    if speculation is None or speculation.method in (NGRAM, MTP):
        return None
    folder = Path(speculation.model)
    return read_served_config(folder) if speculation.method == DRAFT_MODEL else ModelConfig.from_folder(folder)


def describe_draft(speculation: Speculation | None, model: ModelConfig) -> ModelSpec | HeadSpec | None:
    """Describe the layers that guess tokens for `model`; None: there are none. Raises ConfigError, or
    UnsupportedModelError, where they cannot."""
    if speculation is None or speculation.method == NGRAM:
        return None
    if speculation.method == MTP:
        return _own_head(model)
    config = read_draft_config(speculation)
    assert config is not None
    if speculation.method in (EAGLE, EAGLE3):
        return _head(speculation, config, model)
    if config.vocab_size != model.vocab_size:
        raise ConfigError(
            f"speculative_config.model {speculation.model!r} has a vocabulary of {config.vocab_size} tokens; accepted: "
            f"that of the model, which has {model.vocab_size}, so that both mean the same by a token"
        )
    spec = describe(config)
    if any(layer.mixer.kind == "state" for layer in spec.layers):
        raise ConfigError(
            f"speculative_config.model {speculation.model!r} has layers with a recurrent state, which cannot take back "
            "what was guessed wrong; accepted: models of attention alone"
        )
    return spec


def start_specs(config: EngineConfig, model: ModelConfig, device_type: str) -> tuple[AttentionSpec | None, ...]:
    """Return what each layer of a start needs of attention on one rank: those of the model, then those that guess.
    Raises as `describe_draft` and `attention_specs` do."""
    draft = describe_draft(config.speculation, model)
    return attention_specs(
        model,
        tp_size=config.tensor_parallel_size,
        block_size=config.block_size,
        dtype=config.dtype,
        device_type=device_type,
        batch_invariant=config.batch_invariant,
        kv_cache_dtype=config.kv_cache_dtype,
        behind=() if draft is None else draft.layers,
    )


def _own_head(model: ModelConfig) -> HeadSpec:
    """Describe the first layer for further tokens of a model's own checkpoint."""
    spec = describe(model)
    if spec.head is None:
        raise ConfigError(
            f"speculative_config.method {MTP!r}: the config.json of this {model.architecture} mentions no layers for "
            "further tokens (num_nextn_predict_layers); accepted: a model that has them, or another method"
        )
    return replace(spec.head, names=spec.names)


def _head(speculation: Speculation, config: ModelConfig, model: ModelConfig) -> HeadSpec:
    """Describe a head of EAGLE or EAGLE-3, as their authors and SpecForge write them."""
    c, hidden = config.fields, config.hidden_size
    fits = (hidden, c.integer("target_hidden_size", hidden), config.vocab_size)
    if fits != (model.hidden_size, model.hidden_size, model.vocab_size):
        raise ConfigError(
            f"speculative_config.model {speculation.model!r} is a head of {hidden} numbers for hidden states of "
            f"{fits[1]} and a vocabulary of {config.vocab_size} tokens; accepted: one that fits the model, which has "
            f"hidden states of {model.hidden_size} numbers and {model.vocab_size} tokens"
        )
    if config.num_layers != 1:
        raise c.refusal("num_hidden_layers", "1 in a head")
    architecture = re.sub("eagle3?", "", config.architecture, flags=re.IGNORECASE)
    entry = served_entry(architecture)
    spec = None if entry is None else entry.spec(Fields({**entry.defaults, **c.values}, c.where))
    mixer = None if spec is None else spec.layers[0].mixer
    if spec is None or not isinstance(mixer, Attention) or spec.layers[0].feed_forward.num_experts:
        raise ConfigError(
            f"speculative_config.model {speculation.model!r} has the architecture {config.architecture!r:.80}; "
            "accepted: that of a dense family, such as LlamaForCausalLM or LlamaForCausalLMEagle3"
        )
    norms = replace(spec.layers[0].norms, before_mixer="")
    layer = replace(spec.layers[0], norms=norms)
    positions = model.max_position_embeddings
    if speculation.method == EAGLE:
        return HeadSpec(
            layer, positions, paths=(("layer", "layers.0"),), shared=("embed_tokens.", "lm_head."), names=NAMES
        )
    if c.flag("norm_before_residual"):
        raise c.refusal("norm_before_residual", "false")
    parts = {"layer": "", "embed_norm": ".input_layernorm", "hidden_norm": ".hidden_norm"}
    return HeadSpec(
        replace(layer, mixer=replace(mixer, input_size=2 * hidden)),
        positions,
        joins="in_attention",
        taps=_taps(c, model),
        vocab_size=c.integer("draft_vocab_size", config.vocab_size, maximum=config.vocab_size),
        input_norm=norms.norm,
        last_norm=spec.norm,
        paths=tuple((part, f"layers.0{name}") for part, name in parts.items()),
        shared=("embed_tokens.", "t2d"),
        names=NAMES,
    )


def _taps(c: Fields, model: ModelConfig) -> tuple[int, ...]:
    """Return the layers of the model whose inputs a head of EAGLE-3 reads. Some name them, others, within
    `eagle_config`, the layers in front of them; the paper's are the third, the middle and the last but two."""
    of_head, count = c.object("eagle_config"), model.num_layers
    if not of_head.flag("use_aux_hidden_state", True):
        raise of_head.refusal("use_aux_hidden_state", "true")
    in_front = [layer + 1 for layer in of_head.integers(TAPS)]
    taps = c.integers(TAPS) or in_front or [2, count // 2, count - 3]
    if not all(1 <= layer <= count for layer in taps):
        raise ConfigError(
            f"speculative_config.model is a head that reads the inputs of layers {taps}; accepted: layers 1 to {count} "
            f"of {model.architecture}"
        )
    return tuple(taps)
