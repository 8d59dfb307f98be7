"""Defines what a user may ask the form of an answer to be. Field names and meanings are vLLM's.

Here is checked only that the fields make sense together; what is in them is checked where it becomes a grammar
(structured_outputs/).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.errors import RequestError, quoted

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Fields of which exactly one is given."""
NO_MATTER = ("backend", "_backend", "backend_was_auto", "_backend_was_auto", "disable_fallback", "enable_in_reasoning")
"""Fields of vLLM's that choose a library, of which there is one here."""


class StructuredOutputsParams(msgspec.Struct, frozen=True, omit_defaults=True, repr_omit_defaults=True):
    """Says what an answer must be: exactly one of the first six fields is given. Raises RequestError otherwise."""

    json: str | dict[str, Any] | None = None
    """A JSON schema, as text or as an object."""
    regex: str | None = None
    """A regular expression that the whole answer matches."""
    choice: list[str] | None = None
    """Texts of which the answer is one."""
    grammar: str | None = None
    """A grammar in Lark (start rule `start`), or in GBNF or EBNF (start rule `root`)."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """A structural tag, in either of its forms, as text or as an object."""
    disable_any_whitespace: bool = False
    """JSON has no whitespace outside of strings."""
    disable_additional_properties: bool = False
    """Objects whose schema names properties have no others, unless it allows them."""
    whitespace_pattern: str | None = None
    """A regular expression for the whitespace between the tokens of JSON."""
    choices: Any = None
    """A misspelling of `choice`, which is refused with a hint."""

    def __post_init__(self) -> None:
        if self.choices is not None:
            raise RequestError("structured_outputs has no field choices; the field is `choice`", "structured_outputs")
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = f"got {' and '.join(given)}" if given else "got none"
            raise RequestError(
                f"structured_outputs needs exactly one of {', '.join(CONSTRAINTS)}; {found}", "structured_outputs"
            )
        for name, kinds, wanted in (
            ("json", (str, dict, bool), "a JSON schema (an object, or its text)"),
            ("regex", (str,), "a text"),
            ("grammar", (str,), "a text"),
            ("json_object", (bool,), "true or false"),
            ("structural_tag", (str, dict), "an object, or its text"),
            ("whitespace_pattern", (str,), "a text"),
            ("choice", (list, tuple), "a list of texts"),
            ("disable_any_whitespace", (bool,), "true or false"),
            ("disable_additional_properties", (bool,), "true or false"),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                raise RequestError(
                    f"structured_outputs.{name} must be {wanted}, got {quoted(value)}", "structured_outputs"
                )

    @classmethod
    def of(cls, value: object, name: str = "structured_outputs") -> StructuredOutputsParams:
        """Return the parameters in a request's field `name`: a dictionary of these fields, which may be null."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise RequestError(f"{name} must be an object, got {quoted(value)}", name)
        given = {key: item for key, item in value.items() if item is not None and key not in NO_MATTER}
        unknown = given.keys() - set(cls.__struct_fields__)
        if unknown:
            known = ", ".join(field for field in cls.__struct_fields__ if field != "choices")
            raise RequestError(f"{name} has no field {quoted(min(unknown, key=str))}; its fields are {known}", name)
        return cls(**given)
