"""Puts flags that are given key by key (`--flag.a.b 1`) together into the one JSON object that they mean."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headrace.advice.explain.setting import Setting
from headrace.advice.explain.shell_words import is_unexpanded


def merged(settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings with one for all the keys of a flag, where the first of them stood.

    Keys stay apart where the shell is yet to expand one, or where the flag is also given something that is no object.
    """
    keys = [replace(setting, name=_flag(setting)).key for setting in settings]
    apart = {key for setting, key in zip(settings, keys, strict=True) if setting.path and setting.known}
    whole = {key: _whole([s for s, other in zip(settings, keys, strict=True) if other == key]) for key in apart}
    result: list[Setting] = []
    for setting, key in zip(settings, keys, strict=True):
        chosen = whole.get(key) or setting
        if not any(chosen is other for other in result):
            result.append(chosen)
    return result


def _whole(group: list[Setting]) -> Setting | None:
    values: dict[str, Any] = {}
    for setting in group:
        given = _object(setting)
        if given is None or any(map(is_unexpanded, setting.words)):
            return None
        update(values, given)
    text = json.dumps(values)
    return replace(group[0], name=_flag(group[0]), value=text, words=(text,))


def _flag(setting: Setting) -> str:
    return setting.name.removesuffix(f".{setting.path}") if setting.path and setting.known else setting.name


def _object(setting: Setting) -> dict[str, Any] | None:
    """`a.b` and `1` -> `{"a": {"b": 1}}`; None: no object."""
    try:
        value = json.loads(setting.value)
    except ValueError:
        value = setting.value
    path = setting.path.replace("-", "_").split(".") if setting.path else []
    if path and path[-1].endswith("+"):  # items of a list, which others may follow
        value = setting.value.split(",")
    for key in reversed(path):
        value = {key: value}
    return value if isinstance(value, dict) else None


def update(target: dict[str, Any], given: dict[str, Any]) -> None:
    """Merge `given` into `target`, object by object; a key `a+` adds to the list `a`."""
    for key, value in given.items():
        held = target.get(key.removesuffix("+"))
        if key.endswith("+"):
            target[key[:-1]] = [*held, *value] if isinstance(held, list) else value
        elif isinstance(value, dict):
            target[key] = held if isinstance(held, dict) else {}
            update(target[key], value)
        else:
            target[key] = value
