"""Decides whether a start guesses tokens ahead, and says why."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.model_config import ModelConfig
from headrace.model_spec import HeadSpec
from headrace.models.drafters import describe_draft, read_draft_config
from headrace.planner.catalogue import find_model
from headrace.planner.plan_request import PlanRequest
from headrace.planner.record import Decision
from headrace.planner.shapes import ModelShape, shape_of
from headrace.speculation import DRAFT_MODEL, NGRAM, Speculation

FIELD = "speculative_config"


def decide_speculation(
    config: EngineConfig, model: ModelConfig, device_type: str
) -> tuple[dict[str, Any], list[Decision]]:
    """Return the `speculative_config` that holds, and a decision where the user gave one. Raises ConfigError where it
    cannot be served."""
    given, speculation = config.speculative_config, config.speculation
    if speculation is None:
        return {}, []
    describe_draft(speculation, model)
    shown = json.dumps(given)
    if config.batch_invariant and device_type == "cpu":
        why = "batch_invariant computes every token alone on a CPU, so that guesses would only cost"
        return {}, [Decision(FIELD, "off", why, shown)]
    return given, [Decision(FIELD, shown, "given", source="user")]


def draft_shape(speculation: Speculation | None, model: ModelConfig, dtype: str) -> ModelShape | None:
    """Count the layers that guess tokens for `model`, held in `dtype`; None: there are none."""
    spec = describe_draft(speculation, model)
    if speculation is None or spec is None:
        return None
    config = read_draft_config(speculation)
    if isinstance(spec, HeadSpec):  # embedding and head are the model's
        shape = shape_of(model.raw, speculation.method).held_in(dtype)
        return replace(
            shape, spec=replace(shape.spec, layers=spec.layers, head=spec, has_embedding=False, has_end=False)
        )
    assert config is not None
    shape = shape_of(config.raw, speculation.model)
    wanted = PlanRequest(model=speculation.model, quantization=speculation.quantization)
    return shape.converted(wanted.weight_format(shape.weight_format)).held_in(dtype)


def plan_draft(given: dict[str, Any], model: ModelShape, dtype: str) -> tuple[Speculation | None, ModelShape | None]:
    """Return what a plan's `speculative_config` asks for, and what guesses beside `model`, if that is a model of its
    own: a head, and layers that a model brings, are taken for one more layer of it. (None, None): it is off, or nothing
    that is known here."""
    try:
        speculation = Speculation.of(given)
        if speculation is None or speculation.method == NGRAM:
            return speculation, None
        if speculation.method == DRAFT_MODEL:
            return speculation, find_model(speculation.model).held_in(dtype)
    except ConfigError:
        return None, None
    return speculation, replace(model, spec=replace(model.spec, layers=model.spec.layers[-1:]))


def speculation_gaps(given: dict[str, Any]) -> list[str]:
    """Return why a `speculative_config` is not served; empty: it is."""
    try:
        Speculation.of(given)
    except ConfigError as error:
        return [str(error)]
    return []
