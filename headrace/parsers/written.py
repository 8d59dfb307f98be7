"""Says how each model family writes its tool calls, for the grammars of calls.

A parser takes all that a model may write; `written` in formats.json is the one way in which its family's chat template
writes it. Of these strings, white space is optional (and may be any other white space) in the grammar, except before a
letter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace.parsers.table import ROWS


class Pattern(NamedTuple):
    """Stands for a part of a call that the model makes up, such as the number in Kimi's ids."""

    regex: str


class Maybe(NamedTuple):
    """Stands for a part of a call that may be left out."""

    parts: tuple[str | Pattern, ...]


Markup = str | tuple[str | Pattern | Maybe, ...]
"""Text, or text with parts that the model makes up."""


@dataclass(frozen=True)
class Json:
    """The arguments are a JSON object."""


@dataclass(frozen=True)
class Tagged:
    """Each argument has a tag; strings are written as they are, other values as JSON."""

    before: str
    """What stands before the key; a string that holds it would be read as two."""
    middle: str
    """What stands between the key and a string."""
    after: str
    """What stands behind a value; `{key}` in it is the key again."""
    middle_json: str | None = None
    """What stands between the key and a value that is not a string, where it tells the two apart."""


@dataclass(frozen=True)
class Literals:
    """Arguments are written as `key=value`, in a syntax of their own for objects, lists and strings."""

    equals: str
    quote: str | None = None
    """What stands on both sides of a string, which has no escapes; None: strings and all else as in Python."""


@dataclass(frozen=True)
class Written:
    """Describes one way of writing calls: `begin`, calls joined by `between`, `end`."""

    before: Markup = '{"name": "'
    middle: Markup = '", "arguments": '
    after: Markup = "}"
    arguments: Json | Tagged | Literals = Json()
    begin: Markup = ""
    between: Markup = ""
    end: Markup = ""
    single: bool = False
    """A turn has one call at most."""
    mark: str = ""
    """May stand before the calls."""
    needs: tuple[str, ...] = ()
    """Special tokens without which the model writes calls as `instead` says."""
    instead: Written | None = None
    """Another way, for a tokenizer without these tokens; of answers in channels, another one that models use too."""


def _markup(value: Any) -> Any:
    """Markup, or a part of it, as formats.json has it."""
    if isinstance(value, list):
        return tuple(map(_markup, value))
    if isinstance(value, dict):
        return Pattern(value["pattern"]) if "pattern" in value else Maybe(_markup(value["maybe"]))
    return value


def _written(row: dict[str, Any]) -> Written:
    """One way of writing calls; `each` is what stands around each call's object."""
    made = {
        name: _markup(value) for name, value in row.items() if name not in ("each", "tagged", "literals", "instead")
    }
    if "each" in row:
        made |= {"before": row["each"][0] + Written.before, "after": Written.after + row["each"][1]}
    for name, kind in (("tagged", Tagged), ("literals", Literals)):
        made |= {"arguments": kind(**row[name])} if name in row else {}
    return Written(**made, instead=_written(row["instead"]) if "instead" in row else None)


WRITTEN: dict[str, Written] = {row["name"]: _written(row["written"]) for row in ROWS["tools"] if "written" in row}
"""By the name of the format."""
