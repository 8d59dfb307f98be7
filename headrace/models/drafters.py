"""Describes the layers of what guesses tokens, which cache, attention backend and planner count with the model's.

Imports no torch.
"""

from __future__ import annotations

from pathlib import Path

from headrace.errors import ConfigError
from headrace.model_config import ModelConfig
from headrace.model_spec import ModelSpec
from headrace.models.registry import describe, read_served_config
from headrace.speculation import DRAFT_MODEL, Speculation


def read_draft_config(speculation: Speculation | None) -> ModelConfig | None:
    """Read the config of a draft model, whose folder must be here; None: what guesses is no model of its own."""
    if speculation is None or speculation.method != DRAFT_MODEL:
        return None
    return read_served_config(Path(speculation.model))


def describe_draft(speculation: Speculation | None, model: ModelConfig) -> ModelSpec | None:
    """Describe the layers that guess tokens for `model`; None: there are none. Raises ConfigError, or
    UnsupportedModelError, where they cannot."""
    config = read_draft_config(speculation)
    if speculation is None or config is None:
        return None
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
