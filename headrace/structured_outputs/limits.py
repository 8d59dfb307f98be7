"""Bounds on what a client may send as a constraint. Within them, making a grammar takes a fraction of a second."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
from llguidance import LLParserLimits

from headrace.errors import RequestError, quoted

MAX_CHARS = 2**15
"""Characters of a grammar, or of any other text that is not named below."""
MAX_REGEX_CHARS = 2**13
"""Characters of a regular expression, and of a line of Lark: the time grows with their square."""
MAX_LINES = 1_500
"""Lines of Lark, and rules of a grammar: llguidance's stack grows with rules that use rules."""
MAX_SCHEMA_CHARS = 2**19
"""Characters of a JSON schema, and of all choices together."""
MAX_CHOICES = 10_000
"""Texts in `choice`, and values of an `enum`."""
MAX_NODES = 20_000
"""Schemas within a schema, before and after it is rewritten."""
MAX_ONE_OF = 128
"""Options of a `oneOf`, unless each of them names its values: every two are compared."""
MAX_RESOLVED = 3_000
"""References that are followed to tell schemas apart: what lies behind them is compared again and again."""
MAX_WAYS = 256
"""Ways in which a keyword is written out."""
MAX_PROPERTIES = 1_000
"""Properties of one object: the time grows with their square."""
MAX_LEVELS = 200
"""Schemas within schemas after rewriting."""
MAX_STACK = 1_000
"""The same, where what a reference refers to counts as within: llguidance's stack grows with it, and ends at 1,500."""
MAX_DEPTH = 96
"""Nesting, as of braces and brackets in JSON; llguidance's own reader takes 128."""
MAX_BOUND = 2**62
"""Bounds of numbers: llguidance fails at those of 64 bits."""
MAX_INTEGER = int(sys.float_info.max)
"""The largest integer in a schema."""
MAX_FORMATS = 1_000
"""Formats in a structural tag."""
MAX_REPEAT = 2**20
"""Repetitions in a regex or grammar, and lengths in a schema."""


def _limits(initial_lexer_fuel: int) -> LLParserLimits:
    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=initial_lexer_fuel,
        step_lexer_fuel=200_000,  # some 15 ms
        step_max_items=50_000,  # some 3 ms
        max_lexer_states=50_000,  # of one to two kilobytes
        max_grammar_size=500_000,
        verbose_errors=False,
    )


LIMITS = _limits(3_000_000)
"""What a grammar may take to compile, to make one mask, and of its lexer in all answers, which share it."""
LIMITS_OF_CHECK = _limits(1_000_000)
"""The same where a grammar is checked before it is used: what passes here, some 0.5 s at most, does so there."""
SPACE = r"[ \t]{1,8}|\r?\n[ \t]{0,8}"
"""White space where an answer may have any: up to eight blanks, or the end of a line and up to eight blanks. It has an
end, so that an answer has one too: models that may write white space for ever now and then do."""
GAP = r"[ \t]{1,8}|[ \t]{0,2}(\r?\n){1,2}[ \t]{0,8}"
"""The same around the markup of calls and behind reasoning, where families write two ends of lines too."""


def check_text(value: object, path: str, most: int = MAX_CHARS) -> str:
    """Return a value that is text of at most so many characters, which UTF-8 can represent. Raises RequestError for
    others."""
    field = path.partition(".")[0]
    if not isinstance(value, str):
        raise RequestError(f"{path} must be a text, got {quoted(value)}", field)
    if len(value) > most:
        raise RequestError(f"{path} has {len(value)} characters; at most {most} are taken", field)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{path} has half a surrogate pair, which UTF-8 cannot represent", field) from None
    return value


def decoded(value: object, path: str) -> object:
    """Return JSON that may have come as its text. Raises RequestError for a text that is none, or is too long."""
    if not isinstance(value, str):
        return value
    check_text(value, path, MAX_SCHEMA_CHARS)
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"{path} is not JSON: {error}", path.partition(".")[0]) from None


def check_size(schema: Mapping[str, Any], path: str) -> None:
    """Refuse a schema that is too deep or too long, or holds what JSON cannot."""
    field = path.partition(".")[0]
    waiting: list[tuple[Any, int]] = [(schema, 0)]
    count = 0
    while waiting:
        value, depth = waiting.pop()
        count += 1
        if depth > MAX_DEPTH:
            raise RequestError(f"{path} is nested more than {MAX_DEPTH} deep", field)
        if count > MAX_SCHEMA_CHARS // 4:
            raise RequestError(f"{path} has more than {MAX_SCHEMA_CHARS // 4} values", field)
        if isinstance(value, dict):
            waiting += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list | tuple):
            waiting += [(item, depth + 1) for item in value]
        elif isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise RequestError(f"{path} holds {quoted(value)}, which is further from 0 than any float", field)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError) as error:
        raise RequestError(f"{path} is not JSON in UTF-8: {error}", field) from None
    check_text(text, path, MAX_SCHEMA_CHARS)
