"""Turns grammars in GBNF (llama.cpp) and EBNF (xgrammar, SGLang, vLLM) into Lark, as llguidance takes it.

The two are one language here: `NAME ::= ALTERNATIVES`, beginning at `root`. A rule that refers to itself, directly or
not, stays a rule; every other becomes a terminal, which is matched as one regular expression. llguidance's own
converter takes neither `\\-` in a class, nor an alternative on a line of its own, nor text between single quotes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from headrace.errors import RequestError, quoted
from headrace.structured_outputs.limits import MAX_DEPTH, MAX_LINES, MAX_REPEAT, check_text

_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)|(?P<literal>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<chars>\[(?:[^\]\\]|\\.)*\])
    |(?P<rule>[\w-]+\s*::=)|(?P<name>[\w-]+)|(?P<repeat>\{\s*[0-9]*\s*(?:,\s*[0-9]*\s*)?\}|[*+?])|(?P<mark>[|().])""",
    re.DOTALL | re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "0": "\0"}
_COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_RULE = "\0"
"""Begins a piece of a body that names a rule."""


def is_ebnf(text: str) -> bool:
    """Return whether a grammar defines its rules with `::=`, rather than with Lark's colon."""
    return re.search(r"(?m)^\s*\??[\w-]+\s*::=", text) is not None


def lark_of_ebnf(text: str, path: str) -> str:
    """Return a grammar in EBNF as Lark. Raises RequestError, naming `path`, for one that is not valid."""
    check_text(text, path)
    bodies: dict[str, _Body] = {}
    body = _Body(path)
    for token in _tokens(text, path):
        if token.lastgroup == "rule":
            body.close()
            name = token[0].removesuffix("::=").rstrip()
            if name in bodies:
                raise _wrong(token, path, "is defined twice")
            body = bodies[name] = _Body(path)
            if len(bodies) > MAX_LINES:
                raise _wrong(token, path, f"is one rule too many; {MAX_LINES} are taken")
        elif not bodies:
            raise _wrong(token, path, "should begin a rule: NAME ::= ...")
        else:
            body.add(token)
    body.close()
    root = "root" if "root" in bodies else "start"
    if root not in bodies:
        raise RequestError(f"{path} has no rule `root`, where it would begin", path.partition(".")[0])
    for one in bodies.values():
        for used, token in one.uses.items():
            if used not in bodies:
                raise _wrong(token, path, f"uses {used!r}, which is used and not defined")
    looping = {*bodies}
    while free := {name for name in looping if looping.isdisjoint(bodies[name].uses)}:
        looping -= free
    names = {name: f"{'r' if name in looping else 'R'}{index}" for index, name in enumerate(bodies)}
    lines = [
        f"{names[name]}: {' '.join(names[one[1:]] if one.startswith(_RULE) else one for one in body.pieces)}"
        for name, body in bodies.items()
    ]
    return "\n".join([*lines, f"start: {names[root]}"]) + "\n"


def _tokens(text: str, path: str) -> Iterator[re.Match[str]]:
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _wrong_at(text, at, path, "is not EBNF")
        at = match.end()
        if match.lastgroup != "space":
            yield match


def _wrong(token: re.Match[str], path: str, why: str) -> RequestError:
    return _wrong_at(token.string, token.start(), path, why)


def _wrong_at(text: str, at: int, path: str, why: str) -> RequestError:
    line = text.count("\n", 0, at) + 1
    return RequestError(f"{path}, line {line}: {quoted(text[at : at + 40])} {why}", path.partition(".")[0])


class _Body:
    """Writes what a rule stands for in Lark, token after token."""

    def __init__(self, path: str) -> None:
        self.pieces: list[str] = []
        self.uses: dict[str, re.Match[str]] = {}
        """The rules it refers to, and where it first does."""
        self._path = path
        self._groups: list[tuple[int, re.Match[str]]] = []
        """Where the groups that are open begin in `pieces`, and in the text."""
        self._item: int | None = None
        """Where the item in `pieces` begins that a count would apply to."""

    def add(self, token: re.Match[str]) -> None:
        """Take the next token of the rule."""
        text, kind = token[0], token.lastgroup
        if kind == "repeat":
            self._repeat(token)
        elif text == "(" and kind == "mark":
            self._groups.append((len(self.pieces), token))
            if len(self._groups) > MAX_DEPTH:
                raise _wrong(token, self._path, f"is nested more than {MAX_DEPTH} deep")
            self.pieces.append("(")
            self._item = None
        elif text in ("|", ")") and kind == "mark":
            self._end_alternative()
            if text == ")" and not self._groups:
                raise _wrong(token, self._path, "is not expected here")
            self._item = self._groups.pop()[0] if text == ")" else None
            self.pieces.append(text)
        else:
            self._item = len(self.pieces)
            self.pieces.append(self._atom(token))

    def close(self) -> None:
        """End the rule."""
        if self._groups:
            raise _wrong(self._groups[-1][1], self._path, "is not closed")
        self._end_alternative()

    def _end_alternative(self) -> None:
        if not self.pieces or self.pieces[-1] in ("(", "|"):
            self.pieces.append('""')

    def _atom(self, token: re.Match[str]) -> str:
        match token.lastgroup:
            case "literal":
                return json.dumps("".join(char for char, _ in self._unescaped(token)))
            case "chars":
                return self._class(token)
            case "name":
                self.uses.setdefault(token[0], token)
                return _RULE + token[0]
        return "/(?s:.)/"

    def _repeat(self, token: re.Match[str]) -> None:
        if self._item is None:
            raise _wrong(token, self._path, "is not expected here")
        least, most = _COUNTS.get(token[0]) or self._counts(token)
        item = self.pieces[self._item :]
        # Lark takes no {0}
        self.pieces[self._item :] = (
            ['""'] if most == 0 else ["(", *item, f"){{{least},{'' if most is None else most}}}"]
        )

    def _counts(self, token: re.Match[str]) -> tuple[int, int | None]:
        low, comma, high = token[0][1:-1].replace(" ", "").partition(",")
        least = int(low or 0) if len(low) < 9 else MAX_REPEAT + 1
        most = (int(high) if len(high) < 9 else MAX_REPEAT + 1) if high else None if comma else least
        if max(least, most or 0) > MAX_REPEAT or (most is not None and most < least) or not (low or high):
            raise _wrong(token, self._path, f"must be at least one count, in order, up to {MAX_REPEAT}")
        return least, most

    def _unescaped(self, token: re.Match[str]) -> Iterator[tuple[str, bool]]:
        """Yield the characters between quotes or brackets, each with whether it was escaped."""
        for match in _ESCAPE.finditer(token[0][1:-1]):
            code = match[1] or match[2] or match[3]
            if code is not None:
                if int(code, 16) > 0x10FFFF or 0xD800 <= int(code, 16) < 0xE000:
                    raise _wrong(token, self._path, "has an escape that is no character")
                yield chr(int(code, 16)), True
            elif match[4] is not None:
                yield _CONTROLS.get(match[4], match[4]), True
            else:
                yield match[5], False

    def _class(self, token: re.Match[str]) -> str:
        characters = [*self._unescaped(token)]
        negated = bool(characters) and characters[0] == ("^", False)
        found = "".join(
            "-"
            if char == "-" and not escaped and 0 < index < len(characters) - 1 - negated
            else f"\\u{{{ord(char):x}}}"
            for index, (char, escaped) in enumerate(characters[negated:])
        )
        if not found:
            raise _wrong(token, self._path, "matches no character")
        return f"/[{'^' if negated else ''}{found}]/"
