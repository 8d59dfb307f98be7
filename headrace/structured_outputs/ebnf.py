"""Turns grammars in GBNF (llama.cpp) and EBNF (xgrammar, SGLang, vLLM) into Lark, as llguidance takes it.

The two are one language here: `NAME ::= ALTERNATIVES`, beginning at `root`. A rule that refers to itself, directly or
not, stays a rule; every other becomes a terminal, which is matched as one regular expression.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from headrace.errors import RequestError, quoted
from headrace.structured_outputs.limits import MAX_DEPTH, MAX_LINES, MAX_REPEAT, check_text

_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)|(?P<literal>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<chars>\[(?:[^\]\\]|\\.)*\])
    |(?P<define>::=)|(?P<name>[\w-]+)|(?P<repeat>\{\s*[0-9]*\s*(?:,\s*[0-9]*\s*)?\}|[*+?])|(?P<mark>[|().])""",
    re.DOTALL | re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "0": "\0"}
_COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


def is_ebnf(text: str) -> bool:
    """Return whether a grammar defines its rules with `::=`, rather than with Lark's colon."""
    try:
        return any(token.kind == "define" for token in _tokens(text, "grammar"))
    except RequestError:  # Lark has regular expressions and directives, which are no tokens of EBNF
        return re.search(r"(?m)^\s*\??[\w-]+\s*::=", text) is not None


def lark_of_ebnf(text: str, path: str) -> str:
    """Return a grammar in EBNF as Lark. Raises RequestError, naming `path`, for one that is not valid."""
    return _Converter(text, path).lark()


def _tokens(text: str, path: str) -> Iterator[_Token]:
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _wrong(text, at, path, "is not EBNF")
        at = match.end()
        if match.lastgroup != "space":
            yield _Token(match.lastgroup or "", match[0], match.start())


def _wrong(text: str, at: int, path: str, why: str) -> RequestError:
    line = text.count("\n", 0, at) + 1
    return RequestError(f"{path}, line {line}: {quoted(text[at : at + 40])} {why}", path.partition(".")[0])


class _Converter:
    """Reads a grammar's rules, and writes them in Lark."""

    def __init__(self, text: str, path: str) -> None:
        self._text = check_text(text, path)
        self._path = path
        self._tokens = [*_tokens(text, path), _Token("end", "", len(text)), _Token("end", "", len(text))]
        self._at = 0
        self._uses: dict[str, dict[str, int]] = {}
        """Rule -> the rules it refers to -> where."""
        self._rule = ""

    def lark(self) -> str:
        bodies: dict[str, list[str]] = {}
        while self._peek().kind != "end":
            name = self._next()
            if name.kind != "name" or self._next().kind != "define":
                raise self._error(name, "should begin a rule: NAME ::= ...")
            self._rule = name.text
            if name.text in bodies:
                raise self._error(name, "is defined twice")
            self._uses[name.text] = {}
            bodies[name.text] = self._alternatives(0)
            if len(bodies) > MAX_LINES:
                raise self._error(name, f"is one rule too many; {MAX_LINES} are taken")
        root = "root" if "root" in bodies else "start"
        if root not in bodies:
            raise RequestError(f"{self._path} has no rule `root`, where it would begin", self._path.partition(".")[0])
        for uses in self._uses.values():
            for used, at in uses.items():
                if used not in bodies:
                    raise _wrong(self._text, at, self._path, "is used and not defined")
        looping = self._looping()
        names = {name: f"{'r' if name in looping else 'R'}{index}" for index, name in enumerate(bodies)}
        lines = [f"{names[name]}: {_named(body, names)}" for name, body in bodies.items()]
        return "\n".join([*lines, f"start: {names[root]}"]) + "\n"

    def _looping(self) -> set[str]:
        """Return the rules from which a rule can be reached that refers to itself."""
        left = {name: {*uses} for name, uses in self._uses.items()}
        users: dict[str, list[str]] = {name: [] for name in left}
        for name, uses in left.items():
            for used in uses:
                users[used].append(name)
        free = [name for name, uses in left.items() if not uses]
        while free:
            done = free.pop()
            del left[done]
            for user in users[done]:
                left[user].discard(done)
                if not left[user]:
                    free.append(user)
        return {*left}

    def _alternatives(self, depth: int) -> list[str]:
        """Return alternatives in Lark, as pieces of text; a piece that begins with "\\0" names a rule."""
        if depth > MAX_DEPTH:
            raise self._error(self._peek(), f"is nested more than {MAX_DEPTH} deep")
        pieces = self._sequence(depth)
        while self._peek().text == "|" and self._peek().kind == "mark":
            self._next()
            pieces += [" | ", *self._sequence(depth)]
        return pieces

    def _sequence(self, depth: int) -> list[str]:
        pieces: list[str] = []
        while (token := self._peek()).kind not in ("end", "define", "repeat") and token.text not in ("|", ")"):
            if token.kind == "name" and self._tokens[self._at + 1].kind == "define":
                break  # the next rule
            pieces += [*self._item(depth), " "]
        return pieces or ['""']

    def _item(self, depth: int) -> list[str]:
        token = self._next()
        if token.kind == "literal":
            found = [json.dumps(self._characters(token))]
        elif token.kind == "chars":
            found = [self._class(token)]
        elif token.kind == "name":
            self._uses[self._rule].setdefault(token.text, token.at)
            found = ["\0" + token.text]
        elif token.text == ".":
            found = ["/(?s:.)/"]
        elif token.text == "(":
            found = ["(", *self._alternatives(depth + 1), ")"]
            if self._next().text != ")":
                raise self._error(token, "is not closed")
        else:
            raise self._error(token, "is not expected here")
        while self._peek().kind == "repeat":
            least, most = self._counts(self._next())
            # Lark takes no {0}
            found = ['""'] if most == 0 else ["(", *found, f"){{{least},{'' if most is None else most}}}"]
        return found

    def _counts(self, token: _Token) -> tuple[int, int | None]:
        if token.text in _COUNTS:
            return _COUNTS[token.text]
        low, comma, high = token.text[1:-1].replace(" ", "").partition(",")
        least = int(low or 0) if len(low) < 9 else MAX_REPEAT + 1
        most = (int(high) if len(high) < 9 else MAX_REPEAT + 1) if high else None if comma else least
        if max(least, most or 0) > MAX_REPEAT or (most is not None and most < least) or not (low or high):
            raise self._error(token, f"must be at least one count, in order, up to {MAX_REPEAT}")
        return least, most

    def _characters(self, token: _Token) -> str:
        return "".join(char for char, _ in self._unescaped(token))

    def _unescaped(self, token: _Token) -> Iterator[tuple[str, bool]]:
        """Yield the characters between quotes or brackets, each with whether it was escaped."""
        for match in _ESCAPE.finditer(token.text[1:-1]):
            code = match[1] or match[2] or match[3]
            if code is not None:
                if int(code, 16) > 0x10FFFF or 0xD800 <= int(code, 16) < 0xE000:
                    raise self._error(token, "has an escape that is no character")
                yield chr(int(code, 16)), True
            elif match[4] is not None:
                yield _CONTROLS.get(match[4], match[4]), True
            else:
                yield match[5], False

    def _class(self, token: _Token) -> str:
        characters = [*self._unescaped(token)]
        negated = bool(characters) and characters[0] == ("^", False)
        found = "".join(
            "-"
            if char == "-" and not escaped and 0 < index < len(characters) - 1 - negated
            else f"\\u{{{ord(char):x}}}"
            for index, (char, escaped) in enumerate(characters[negated:])
        )
        if not found:
            raise self._error(token, "matches no character")
        return f"/[{'^' if negated else ''}{found}]/"

    def _peek(self) -> _Token:
        return self._tokens[self._at]

    def _next(self) -> _Token:
        token = self._tokens[self._at]
        self._at = min(self._at + 1, len(self._tokens) - 1)
        return token

    def _error(self, token: _Token, why: str) -> RequestError:
        return _wrong(self._text, token.at, self._path, why)


def _named(pieces: list[str], names: dict[str, str]) -> str:
    return "".join(names[piece[1:]] if piece.startswith("\0") else piece for piece in pieces)
