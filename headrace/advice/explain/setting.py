"""Represents one flag or environment variable of a command line, as it was given."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from headrace.advice.explain.shell_words import is_unexpanded
from headrace.advice.flags.table import FALSE, TRUE, Known, hides, shown, shown_value
from headrace.errors import ConfigError


@dataclass(frozen=True)
class Setting:
    """Holds a flag or variable with its value."""

    name: str
    """With dashes for underscores, and without a negation."""
    value: str
    """`true` or `false` for switches."""
    known: Known | None
    """None: nothing of that name is known."""
    is_variable: bool = False
    words: tuple[str, ...] = ()
    """The value's words, with marks around what the shell is to expand (shell_words.py); empty: none was given."""

    @property
    def key(self) -> str:
        """The name that all its other spellings share; one key of a JSON object has its own."""
        if self.known is None or self.is_variable or self.path:
            return self.name
        if self.known.becomes and "." not in self.known.becomes:
            return self.known.becomes
        return self.known.name if self.known.fate == "ours" or not self.name.startswith("--") else self.name

    @property
    def path(self) -> str:
        """The part `a.b` of `--flag.a.b`."""
        return "" if self.is_variable else self.name.partition(".")[2]

    @property
    def is_unexpanded(self) -> bool:
        """The value is unknown until the shell expands it; for a container's flags that makes no difference."""
        if self.known is not None and self.known.scope == "docker":
            return False
        return any(map(is_unexpanded, self.words)) or bool(self.path and self.known)

    @property
    def is_secret(self) -> bool:
        return hides(self.name, self.value, self.known)

    @property
    def shown_value(self) -> str:
        return shown_value(self.name, self.value, self.known)

    @property
    def on(self) -> bool:
        return self.value.lower() in TRUE

    @property
    def off(self) -> bool:
        return self.value.lower() in FALSE

    def __str__(self) -> str:
        return shown(self.name, self.value, self.known)


def object_of(setting: Setting) -> dict[str, Any]:
    """Return the JSON object that a setting is given. Raises ConfigError where it is none."""
    try:
        value = json.loads(setting.value)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{setting.name} must be a JSON object, got {setting.value!r}")
    return value
