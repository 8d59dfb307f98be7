"""Reads a pattern into a tree, and writes one with `^` and `$` anywhere as one that has them only around the whole."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from headrace.structured_outputs.limits import MAX_REGEX_CHARS

MAX_GROUPS = 64
"""Groups within groups."""


class Unreadable(Exception):
    """Tells of a pattern that has what is not read here, or would become too long."""


@dataclass(frozen=True)
class Chars:
    """Matches one character, as its pattern says."""

    pattern: str


@dataclass(frozen=True)
class Anchor:
    """Matches where the whole text begins or ends."""

    begins: bool


@dataclass(frozen=True)
class Row:
    """Matches its parts, one after the other."""

    parts: tuple[Tree, ...]


@dataclass(frozen=True)
class Choice:
    """Matches any of its parts."""

    parts: tuple[Tree, ...]


@dataclass(frozen=True)
class Repeat:
    """Matches its part so often; `most` is None if there is no end to it."""

    part: Tree
    least: int
    most: int | None


@dataclass(frozen=True)
class Look:
    """Matches no characters where its part is found ahead, or behind; unless it is wanted, where it is not."""

    part: Tree
    ahead: bool
    wanted: bool


@dataclass(frozen=True)
class Boundary:
    """Matches no characters where a word begins or ends; unless it is wanted, where none does."""

    wanted: bool


Tree = Chars | Anchor | Row | Choice | Repeat | Look | Boundary
TOKEN = re.compile(
    r"\\(?:[pPxuU]\{[^}]*\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[^0-9])"
    r"|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?:|\?<?[=!]|\?P?<\w+>)?|[*+?]\??|\{\d+(?:,\d*)?\}\??|.",
    re.DOTALL,
)
_QUANTIFIER = re.compile(r"([*+?])\??|\{(\d+)(,?)(\d*)\}\??")
_COUNTS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_NO_CHARACTER = frozenset(("\\A", "\\z", "\\Z", "\\"))


def tree_of(pattern: str) -> Tree:
    """Return the tree of a pattern. Raises Unreadable."""
    open_groups: list[tuple[str, list[list[Tree]]]] = []
    ways: list[list[Tree]] = [[]]
    for token in TOKEN.findall(pattern):
        row = ways[-1]
        if token[0] == "(":
            open_groups.append((token, ways))
            ways = [[]]
            if len(open_groups) > MAX_GROUPS:
                raise Unreadable
        elif token == ")":
            if not open_groups:
                raise Unreadable
            group, (opening, ways) = _choice(ways), open_groups.pop()
            if opening[-1] in "=!":
                group = Look(group, "<" not in opening, opening[-1] == "=")
            ways[-1].append(Row((group,)) if isinstance(group, Repeat) else group)  # which may be repeated too
        elif token == "|":
            ways.append([])
        elif counts := _QUANTIFIER.fullmatch(token):
            if not row or isinstance(row[-1], Repeat | Anchor | Look | Boundary):
                raise Unreadable
            least, most = _COUNTS.get(counts[1]) or (
                int(counts[2]),
                int(counts[4] or -1) if counts[3] else int(counts[2]),
            )
            row[-1] = Repeat(row[-1], least, None if most == -1 else most)
        elif token in "^$":
            row.append(Anchor(token == "^"))
        elif token in ("\\b", "\\B"):
            row.append(Boundary(token == "\\b"))
        elif token in _NO_CHARACTER:
            raise Unreadable
        else:
            row.append(Chars(token))
    if open_groups:
        raise Unreadable
    return _choice(ways)


def _choice(ways: list[list[Tree]]) -> Tree:
    rows = tuple(row[0] if len(row) == 1 else Row(tuple(row)) for row in ways)
    return rows[0] if len(rows) == 1 else Choice(rows)


class Texts(NamedTuple):
    """Holds the pattern of some texts, that may stand beside others; None: there are none."""

    pattern: str | None
    has_empty: bool


_NONE, _EMPTY, _ANY = Texts(None, False), Texts("", True), Texts("[\\s\\S]*", True)
Matches = dict[tuple[bool, bool], Texts]
"""What a part matches, by whether what it matches begins the whole text, and whether it ends it."""
_PLACES = [(begins, ends) for begins in (False, True) for ends in (False, True)]


def anchored(pattern: str) -> str:
    """Return a pattern that is found in the same texts, and has `^` and `$` only as its first and last character. One
    that no text can have, or that is not read here, is returned as it is."""
    if not {"^", "$"} & {*TOKEN.findall(pattern.removeprefix("^").removesuffix("$"))}:
        return pattern
    try:
        whole = _whole(pattern)
    except Unreadable:
        return pattern
    return pattern if whole.pattern is None else f"^{whole.pattern}$"


def whole_pattern(pattern: str) -> str:
    """Return a pattern, without anchors, of the whole texts in which another is found. Raises Unreadable, also where
    there are none."""
    whole = _whole(pattern)
    if whole.pattern is None:
        raise Unreadable
    return whole.pattern


def whole_text(pattern: str) -> Tree | None:
    """Return the tree, without anchors, of the whole texts in which a pattern is found; None if there are none. Raises
    Unreadable."""
    whole = _whole(pattern)
    return None if whole.pattern is None else tree_of(whole.pattern)


def _whole(pattern: str) -> Texts:
    found = _matches(tree_of(pattern))
    free, begun, ended, both = (found[place] for place in ((False, False), (True, False), (False, True), (True, True)))
    return _either(
        both if both not in (begun, ended) else _NONE,
        _after(begun, _ANY) if begun != free else _NONE,
        _after(_ANY, ended) if ended != free else _NONE,
        _after(_ANY, _after(free, _ANY)),
    )


def _matches(tree: Tree) -> Matches:
    """Return what a tree matches, without anchors."""
    match tree:
        case Chars(pattern):
            return dict.fromkeys(_PLACES, Texts(pattern, False))
        case Anchor(at_begin):
            return {(begins, ends): _EMPTY if (begins if at_begin else ends) else _NONE for begins, ends in _PLACES}
        case Choice(parts):
            found = [_matches(part) for part in parts]
            return {place: _either(*(one[place] for one in found)) for place in _PLACES}
        case Row(parts):
            row = dict.fromkeys(_PLACES, _EMPTY)
            for part in parts:
                row = _row(row, _matches(part))
            return row
        case Repeat(part, least, most):
            return _repeated(_matches(part), least, most)
        case Look() | Boundary():
            raise Unreadable


def _row(one: Matches, other: Matches) -> Matches:
    """A part that matches no characters leaves the other where the two begin and end."""
    found = {}
    for begins, ends in _PLACES:
        place, first, second = (begins, ends), one[begins, False], other[False, ends]
        ways = [_after(first, second)]
        if (first, second) != (one[place], other[place]):
            ways += [other[place]] if first.has_empty else []
            ways += [one[place]] if second.has_empty else []
            ways += [_EMPTY] if one[place].has_empty and other[place].has_empty else []
        found[place] = _either(*ways)
    return found


def _repeated(part: Matches, least: int, most: int | None) -> Matches:
    if len({*part.values()}) == 1:
        counts = f"{{{least},{'' if most is None else most}}}"
        return dict.fromkeys(_PLACES, _quantified(part[False, False], counts, least == 0))
    if least > 1 or most not in (1, None):
        raise Unreadable
    more = _quantified(part[False, False], "*", True)
    found = {}
    for begins, ends in _PLACES:
        ways = [part[begins, ends]]
        if most is None:
            ways.append(_after(part[begins, False], _after(more, part[False, ends])))
        found[begins, ends] = _either(*ways, *([] if least else [_EMPTY]))
    return found


def _quantified(texts: Texts, counts: str, has_empty: bool) -> Texts:
    if texts.pattern is None:
        return _EMPTY if has_empty else _NONE
    return _sized(f"(?:{texts.pattern}){counts}", has_empty or texts.has_empty) if texts.pattern else _EMPTY


def _either(*ways: Texts) -> Texts:
    patterns = [*dict.fromkeys(way.pattern for way in ways if way.pattern is not None)]
    if not patterns:
        return _NONE
    has_empty = any(way.has_empty for way in ways)
    return _sized(patterns[0] if len(patterns) == 1 else f"(?:{'|'.join(patterns)})", has_empty)


def _after(one: Texts, other: Texts) -> Texts:
    if one.pattern is None or other.pattern is None:
        return _NONE
    return _sized(one.pattern + other.pattern, one.has_empty and other.has_empty)


def _sized(pattern: str, has_empty: bool) -> Texts:
    if len(pattern) > MAX_REGEX_CHARS:
        raise Unreadable
    return Texts(pattern, has_empty)
