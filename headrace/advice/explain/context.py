"""Computes the longest context that vLLM allows: from config.json, and from what a command line changes of it.

Whether they fit into memory is another matter, and so is how well a model answers beyond what it was trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.advice.explain.command_line import CommandLine
from headrace.advice.explain.json_keys import update
from headrace.advice.explain.setting import object_of
from headrace.errors import ConfigError, HeadraceError
from headrace.planner.catalogue import find_config

UNSTRETCHED = ("default", "llama3", "longrope", "mrope", "su")
"""Kinds of rotary scaling whose factor vLLM does not apply: max_position_embeddings has it already."""
OVERRIDES = ("--hf-overrides", "--rope-scaling", "--rope-theta")


def config_of(model: str) -> dict[str, Any]:
    """Return a model's config.json; it is empty where nothing is known of the model."""
    try:
        return find_config(model).config
    except (HeadraceError, OSError, ValueError):
        return {}


def changes_of(line: CommandLine) -> dict[str, Any]:
    """Return what the line changes of config.json, as --hf-overrides would; what cannot be read is left out."""
    changes: dict[str, Any] = {}
    for key in OVERRIDES:
        setting = line.find(key)
        if setting is None or setting.is_unexpanded:
            continue
        try:
            given = object_of(setting) if key != "--rope-theta" else {"rope_theta": float(setting.value)}
        except (ConfigError, ValueError):
            continue
        update(changes, given if key == "--hf-overrides" else {"rope_parameters": given})
    return changes


def context_of(config: Mapping[str, Any], changes: Mapping[str, Any], own: int) -> int:
    """Return the context in tokens; `own` is the `max_position_embeddings` of config.json."""
    changed = {**changes, **_object(changes.get("text_config"))}
    length = changed.get("max_position_embeddings")
    length = length if type(length) is int and length > 0 else own
    rope = _object(changed.get("rope_parameters")) or _object(changed.get("rope_scaling"))
    if rope:
        return _stretched(rope, length)
    text = {**config, **_object(config.get("text_config"))}
    rope = _object(text.get("rope_parameters")) or _object(text.get("rope_scaling"))
    return max(length, _stretched(rope, length)) if _kind(rope) == "yarn" and length == own else length


def rope_theta(config: Mapping[str, Any], changes: Mapping[str, Any]) -> float | None:
    """Return the rotary base that the changes set, else that of config.json; None: neither has one."""
    for place in (changes, config):
        text = {**place, **_object(place.get("text_config"))}
        theta = _object(text.get("rope_parameters")).get("rope_theta", text.get("rope_theta"))
        if isinstance(theta, int | float):
            return theta
    return None


def _stretched(rope: Mapping[str, Any], length: int) -> int:
    factor, original, kind = rope.get("factor"), rope.get("original_max_position_embeddings"), _kind(rope)
    if kind in UNSTRETCHED or not isinstance(factor, int | float):
        return length
    start = original if isinstance(original, int) and kind in ("", "yarn") else length
    return int(start * factor)


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "")


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
