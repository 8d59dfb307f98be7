"""Writes the texts in which one pattern is found and another is not, or is too, as a pattern, which knows no complement
itself.

Both are followed at once through the characters of a text; the states they reach are then eliminated one by one. Where
dialects disagree on a class (is `é` a word's letter?), the pattern that must not be found takes the larger one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

from headrace.structured_outputs.limits import MAX_REGEX_CHARS
from headrace.structured_outputs.pattern import TOKEN, Chars, Choice, Repeat, Row, Tree, Unreadable, whole_text

MAX_STATES = 64
"""Sets of ways on from one place of a text."""
MAX_STEPS = 20_000
"""Ways on that are followed, over all states."""
ANY = "[\\s\\S]*"
_LAST = 0x10FFFF
Ranges = list[tuple[int, int]]
Way = tuple[Tree, ...]
"""What a text may still go through, part by part."""
State = tuple[frozenset[Way], frozenset[Way]]
S = TypeVar("S", bound=Hashable)
_SPACES: Ranges = [(9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
                   (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)]  # fmt: skip
_MORE_SPACES: Ranges = [(0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF)]
_DIGITS: Ranges = [(48, 57)]
_WORD: Ranges = [(48, 57), (65, 90), (95, 95), (97, 122)]
_NOT_ASCII: Ranges = [(128, _LAST)]
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}
_ITEM = re.compile(r"\\(?:[xu]\{([0-9a-fA-F]+)\}|u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))|(.)", re.DOTALL)


def difference(found: str, unfound: str) -> str | None:
    """Return a pattern of whole texts in which `found` is found and `unfound` is not; None: there are none. Raises
    Unreadable for what is not read, or would become too long."""
    return _combined(found, unfound, in_both=False)


def intersection(found: str, other: str) -> str | None:
    """Return a pattern of whole texts in which both patterns are found, `other` by any dialect; None: there are none.
    With `difference` of the same two it has all texts of `found`. Raises Unreadable."""
    return _combined(found, other, in_both=True)


def common(patterns: Sequence[str]) -> str:
    """Return a pattern of texts in which all of several are found. Raises Unreadable, also where there are none."""
    found = patterns[0]
    for pattern in patterns[1:]:
        both = intersection(found, pattern)
        if both is None:
            raise Unreadable
        found = both
    return found


def regions(patterns: Sequence[str]) -> list[tuple[str, tuple[int, ...]]]:
    """Return patterns of which no text fits two, each with the places of those of `patterns` that find its texts.
    Raises Unreadable."""
    known: list[tuple[str, tuple[int, ...]]] = []
    for place, pattern in enumerate(patterns):
        apart: list[tuple[str, tuple[int, ...]]] = []
        left: str | None = pattern
        for region, places in known:
            both, only = intersection(region, pattern), difference(region, pattern)
            apart += [] if only is None else [(only if both else region, places)]
            apart += [] if both is None else [(both, (*places, place))]
            if both is not None and left is not None:
                left = difference(left, region)
        known = apart if left is None else [*apart, (left, (place,))]
    return known


def as_python(pattern: str) -> str:
    """Return a pattern as Python's `re` reads it, whose characters have numbers of another form."""
    return re.sub(r"\\u\{(\w+)\}", lambda match: f"\\U{int(match[1], 16):08x}", pattern)


def _combined(found: str, other: str, *, in_both: bool) -> str | None:
    yes, no = whole_text(found), whole_text(other)
    if yes is None or (no is None and in_both):
        return None
    newline = (Repeat(Chars("\\n"), 0, 1),) if "$" in other else ()  # some find `$` before a last one too
    start: State = (frozenset([(yes,)]), frozenset([(no, *newline)]) if no is not None else frozenset())
    letters = letters_of({*_chars(yes)}, {*_chars(no), *_chars(Row(newline))} if no is not None else set())
    moves: dict[State, dict[State, Ranges]] = {}
    waiting, steps = [start], 0
    while waiting:
        state = waiting.pop()
        if state in moves:
            continue
        moves[state] = {}
        first, second = _next(state[0]), _next(state[1])
        steps += (len(first) + len(second)) * len(letters)
        if len(moves) > MAX_STATES or steps > MAX_STEPS:
            raise Unreadable
        for (taken, also), ranges in letters.items():
            target = (
                frozenset(way for char, way in first if char in taken),
                frozenset(way for char, way in second if char in also),
            )
            if target[0] and (target[1] or not in_both):
                moves[state].setdefault(target, []).extend(ranges)
                waiting.append(target)
    ends = {state for state in moves if any(map(_may_end, state[0])) and any(map(_may_end, state[1])) == in_both}
    pattern = eliminated(start, ends, moves)
    return None if pattern is None else f"^{pattern}$"


def without_look_ahead(pattern: str) -> list[str]:
    """Return patterns that are all found where `^(?=x)(?!y)z` is, without look-ahead. What has another form, or is not
    read, is returned as it is."""
    parts, depth = [""], 0
    for token in TOKEN.findall(pattern.removeprefix("^")):
        if token == "|" and not depth:
            return [pattern]
        depth += (token[0] == "(") - (token == ")")
        parts[-1] += token
        if token == ")" and not depth and parts[-1].startswith(("(?!", "(?=")):
            parts.append("")
    if len(parts) == 1 or not pattern.startswith("^"):
        return [pattern]
    wanted = [f"^(?:{part[3:-1]})" for part in parts[:-1] if part.startswith("(?=")]
    unwanted = [f"^(?:{part[3:-1]})" for part in parts[:-1] if part.startswith("(?!")]
    rest = f"^{parts[-1]}"
    try:
        left = difference(rest, "|".join(unwanted)) if unwanted else rest
    except Unreadable:
        return [pattern]
    return [pattern] if left is None else [left, *wanted]


def _next(ways: Iterable[Way]) -> set[tuple[Chars, Way]]:
    """Return the characters that may come next, each with what may follow."""
    found, seen, waiting = set(), set(), [*ways]
    while waiting:
        way = waiting.pop()
        if way in seen or not way:
            continue
        seen.add(way)
        if len(seen) > MAX_STEPS // 10:
            raise Unreadable
        head, rest = way[0], way[1:]
        match head:
            case Chars():
                found.add((head, rest))
            case Row(parts):
                waiting.append(parts + rest)
            case Choice(parts):
                waiting += [(part, *rest) for part in parts]
            case Repeat(part, least, most):
                if not least or _may_end((part,)):
                    waiting.append(rest)
                if most != 0:
                    waiting.append((part, Repeat(part, max(least - 1, 0), most and most - 1), *rest))
    return found


def _may_end(way: Way) -> bool:
    """Return whether all parts of a way match no text too."""
    return all(
        (isinstance(part, Row) and _may_end(part.parts))
        or (isinstance(part, Choice) and any(_may_end((one,)) for one in part.parts))
        or (isinstance(part, Repeat) and (not part.least or _may_end((part.part,))))
        for part in way
    )


def _chars(tree: Tree) -> Iterable[Chars]:
    match tree:
        case Chars():
            yield tree
        case Row(parts) | Choice(parts):
            for part in parts:
                yield from _chars(part)
        case Repeat(part):
            yield from _chars(part)


def letters_of(taken: set[Chars], excluded: set[Chars]) -> dict[tuple[frozenset[Chars], frozenset[Chars]], Ranges]:
    """Return the characters that are alike: which of the one and of the other take them -> their ranges."""
    sets = [(one, 0, _ranges(one.pattern, False)) for one in taken]
    sets += [(one, 1, _ranges(one.pattern, True)) for one in excluded]
    bounds = {0, 0xD800, 0xE000, _LAST + 1}
    for _, _, ranges in sets:
        bounds |= {bound for low, high in ranges for bound in (low, high + 1)}
    order = sorted(bounds)
    if len(sets) * len(order) > MAX_STEPS:
        raise Unreadable
    found: dict[tuple[frozenset[Chars], frozenset[Chars]], Ranges] = {}
    for low, after in itertools.pairwise(order):
        if low != 0xD800:  # halves of surrogate pairs are no characters
            fit = [(one, side) for one, side, ranges in sets if any(a <= low <= b for a, b in ranges)]
            key = (frozenset(one for one, side in fit if not side), frozenset(one for one, side in fit if side))
            found.setdefault(key, []).append((low, after - 1))
    return found


def _ranges(pattern: str, large: bool) -> Ranges:
    """Return the characters of a `Chars`, of those that dialects disagree on all or none."""
    if pattern == ANY[:-1]:
        return [(0, _LAST)]
    if pattern == ".":
        return _others([(10, 10)] if large else [(10, 10), (13, 13), (0x2028, 0x2029)])
    if not pattern.startswith("[") or pattern == "[":
        return _item(_ITEM.fullmatch(pattern), large)
    negated = pattern.startswith("[^")
    items = [*_ITEM.finditer(pattern[1 + negated : -1])]
    if re.search(r"(?<!\\)\[|&&|~~|--", pattern[1:]):
        raise Unreadable  # operations on sets, in some dialects
    ranges: Ranges = []
    while items:
        low = _item(items.pop(0), large != negated)
        if len(items) > 1 and items[0][0] == "-":
            high = _item(items[1], large != negated)
            if len(low) != 1 or len(high) != 1 or low[0][0] > high[0][1]:
                raise Unreadable
            low, items = [(low[0][0], high[0][1])], items[2:]
        ranges += low
    return _others(ranges) if negated else ranges


def _item(match: re.Match[str] | None, large: bool) -> Ranges:
    if match is None:
        raise Unreadable
    code, escaped = match[1] or match[2] or match[3], match[4]
    if code:
        return [(int(code, 16),) * 2]
    if escaped is None:
        return [(ord(match[5]),) * 2]
    if escaped in _CONTROLS:
        return [(_CONTROLS[escaped],) * 2]
    if escaped in "sS":
        spaces = _SPACES + _MORE_SPACES if large == (escaped == "s") else _SPACES
        return spaces if escaped == "s" else _others(spaces)
    if escaped in "dwDW":
        known = _DIGITS if escaped in "dD" else _WORD
        if escaped in "dw":
            return known + _NOT_ASCII if large else known
        return _others(known) if large else _others(known + _NOT_ASCII)
    if escaped.isalnum():
        raise Unreadable
    return [(ord(escaped),) * 2]


def _others(ranges: Ranges) -> Ranges:
    found, low = [], 0
    for first, last in sorted(ranges):
        if first > low:
            found.append((low, first - 1))
        low = max(low, last + 1)
    return [*found, (low, _LAST)] if low <= _LAST else found


def eliminated(start: S, ends: set[S], moves: dict[S, dict[S, Ranges]]) -> str | None:
    """Return a pattern of the texts that lead from the start to an end: each state goes, and the ways through it become
    patterns between those beside it."""
    numbers = _merged(ends, moves)
    begin, end = -1, -2
    ways: dict[int, dict[int, str]] = {begin: {numbers[start]: ""}}
    for state, number in numbers.items():
        if number not in ways:
            ranges: dict[int, Ranges] = {}
            for target, some in moves[state].items():
                ranges.setdefault(numbers[target], []).extend(some)
            ways[number] = {to: _class(some) for to, some in ranges.items()}
            if state in ends:
                ways[number][end] = ""
    while len(ways) > 1:
        into = {one: sum(one in others for others in ways.values()) for one in ways if one != begin}
        gone = min(into, key=lambda one: (into[one] * len(ways[one]), one))
        after = ways.pop(gone)
        loop = f"(?:{after.pop(gone)})*" if gone in after else ""
        for others in ways.values():
            if gone in others:
                before = _grouped(others.pop(gone)) + loop
                for to, pattern in after.items():
                    made = before + _grouped(pattern)
                    others[to] = f"{others[to]}|{made}" if to in others else made
                    if len(others[to]) > MAX_REGEX_CHARS:
                        raise Unreadable
    return f"(?:{ways[begin][end]})" if end in ways[begin] else None


def _merged(ends: set[S], moves: dict[S, dict[S, Ranges]]) -> dict[S, int]:
    """Number the states so that those that take the same texts have one number."""
    numbers = {state: int(state in ends) for state in moves}
    while True:
        kinds: dict[object, int] = {}
        finer = {}
        for state, ways in moves.items():
            merged: dict[int, Ranges] = {}
            for target, ranges in ways.items():
                merged.setdefault(numbers[target], []).extend(ranges)
            kind = (numbers[state], frozenset((to, tuple(sorted(ranges))) for to, ranges in merged.items()))
            finer[state] = kinds.setdefault(kind, len(kinds))
        if len(kinds) == len({*numbers.values()}):
            return finer
        numbers = finer


def _class(ranges: Ranges) -> str:
    whole: Ranges = []
    for low, high in sorted(ranges):
        if whole and whole[-1][1] + 1 == low:
            whole[-1] = (whole[-1][0], high)
        else:
            whole.append((low, high))
    return "[" + "".join(f"\\u{{{a:x}}}" + (f"-\\u{{{b:x}}}" if b > a else "") for a, b in whole) + "]"


def _grouped(pattern: str) -> str:
    return f"(?:{pattern})" if "|" in pattern else pattern
