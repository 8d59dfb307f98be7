"""Defines what a setting is: a field that also tells command line, docs and checks all that they need to know of it."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from headrace.errors import ConfigError


def knob(
    default: Any,
    help: str,
    *,
    choices: tuple[Any, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    short: str | None = None,
    aliases: tuple[str, ...] = (),
    group: str = "engine",
) -> Any:
    """Return a dataclass field with everything that the command line, the docs and the checks need to know about it.
    `short` is an alias with one dash ("-tp"), `aliases` are further names ("--dataset"). On the command line, a field
    of type `dict` is given as JSON."""
    metadata = {
        "help": help,
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
        "short": short,
        "aliases": aliases,
        "group": group,
    }
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _plain_type(annotation: Any) -> tuple[type, bool]:
    """Return the plain type of an annotation, and whether it may be None: (int, True) for `int | None`."""
    optional = False
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        arms = [arm for arm in typing.get_args(annotation) if arm is not type(None)]
        optional = len(arms) < len(typing.get_args(annotation))
        annotation = arms[0]
    return typing.get_origin(annotation) or annotation, optional


@functools.cache
def knob_types(config_class: type) -> Mapping[str, tuple[type, bool]]:
    """Return field name -> (plain type, whether it may be None). Cached, as a plan checks a hundred configurations."""
    return {name: _plain_type(hint) for name, hint in typing.get_type_hints(config_class).items()}


def knob_problem(meta: Mapping[str, Any], kind: type, optional: bool, value: Any) -> str | None:
    """Return what is wrong with a value and what is accepted ("must be at least 1, got 0"), or None if it is right."""
    if value is None and optional:
        return None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 1e300 else math.inf
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return f"must be of type {kind.__name__}, got {value!r}"
    if meta["choices"] is not None and value not in meta["choices"]:
        return f"must be one of {', '.join(map(str, meta['choices']))}; got {value!r}"
    if meta["minimum"] is not None and not value >= meta["minimum"]:
        return f"must be at least {meta['minimum']}, got {value!r}"
    if meta["maximum"] is not None and not value <= meta["maximum"]:
        return f"must be at most {meta['maximum']}, got {value!r}"
    return None


def check_knobs(config: Any) -> None:
    """Check each field against its metadata. Raises ConfigError naming field, value and what is accepted."""
    config_class: type = type(config)
    kinds = knob_types(config_class)
    for field in dataclasses.fields(config):
        problem = knob_problem(field.metadata, *kinds[field.name], getattr(config, field.name))
        if problem is not None:
            raise ConfigError(f"{field.name} {problem}")
