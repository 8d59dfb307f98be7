"""Loads what guesses tokens beside a rank's model, and makes the drafter that runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.config import EngineConfig
from headrace.kernels.table import KernelTable
from headrace.layers.context import LayerContext
from headrace.models.drafters import read_draft_config
from headrace.models.loader import load_model
from headrace.spec_decode.draft_model import ModelDrafter
from headrace.spec_decode.drafter import Drafter
from headrace.spec_decode.ngram import NgramDrafter


def load_draft(config: EngineConfig, context: LayerContext) -> Any:
    """Return the model that guesses tokens, which has the layers of `context`; None: there is none."""
    speculation, draft = config.speculation, read_draft_config(config.speculation)
    if speculation is None or draft is None:
        return None
    return load_model(
        Path(speculation.model), draft, context, config.load_format, config.seed, speculation.quantization
    )


def make_drafter(config: EngineConfig, draft: Any, context: LayerContext, kernels: KernelTable) -> Drafter | None:
    """Return what guesses tokens; None: nothing does. `draft`: what `load_draft` returned for that `context`."""
    speculation = config.speculation
    if speculation is None:
        return None
    if draft is None:
        sizes = speculation.prompt_lookup_min, speculation.prompt_lookup_max
        return NgramDrafter(speculation.num_tokens, *sizes, kernels.propose_ngram)
    known = read_draft_config(speculation)
    assert known is not None
    return ModelDrafter(draft, context.specs, speculation.num_tokens, known.max_position_embeddings, kernels)
