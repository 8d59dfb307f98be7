"""Loads what guesses tokens beside a rank's model, and makes the drafter that runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.config import EngineConfig
from headrace.kernels.table import KernelTable
from headrace.layers.context import LayerContext
from headrace.model_config import ModelConfig
from headrace.model_spec import HeadSpec, ModelSpec
from headrace.models.drafters import read_draft_config
from headrace.models.heads import DraftHead
from headrace.models.loader import load_head, load_model
from headrace.spec_decode.draft_model import ModelDrafter
from headrace.spec_decode.drafter import Drafter
from headrace.spec_decode.head import HeadDrafter
from headrace.spec_decode.ngram import NgramDrafter


def load_draft(
    config: EngineConfig,
    draft: ModelSpec | HeadSpec | None,
    context: LayerContext,
    model: Any,
    model_config: ModelConfig,
    folder: Path,
) -> Any:
    """Return what `draft` describes, whose layers are those of `context`; None: there is none. `model`: that of
    `folder`, which verifies."""
    speculation = config.speculation
    if speculation is None or draft is None:
        return None
    how = config.load_format, config.seed
    if isinstance(draft, HeadSpec) and draft.in_model:
        held = Path(speculation.model) if speculation.model else folder
        settings = model_config.vocab_size, context, *how, config.quantization
        return load_head(held, model_config, draft, model, *settings)
    held, own = Path(speculation.model), read_draft_config(speculation)
    assert own is not None
    if isinstance(draft, HeadSpec):
        return load_head(held, own, draft, model, model_config.vocab_size, context, *how, speculation.quantization)
    return load_model(held, own, context, *how, speculation.quantization)


def make_drafter(config: EngineConfig, draft: Any, context: LayerContext, kernels: KernelTable) -> Drafter | None:
    """Return what guesses tokens; None: nothing does. `draft`: what `load_draft` returned for that `context`."""
    speculation = config.speculation
    if speculation is None:
        return None
    if draft is None:
        sizes = speculation.prompt_lookup_min, speculation.prompt_lookup_max
        return NgramDrafter(speculation.num_tokens, *sizes, kernels.propose_ngram)
    if isinstance(draft, DraftHead):
        return HeadDrafter(draft, context.specs, speculation.num_tokens, context.dtype, kernels)
    known = read_draft_config(speculation)
    assert known is not None
    return ModelDrafter(draft, context.specs, speculation.num_tokens, known.max_position_embeddings, kernels)
