"""Writes a pattern with look-around and word boundaries as one without, that is found in the same texts.

A text is followed character by character. A thread is one way through the pattern: what is left of it, and what its
look-ahead demands of the rest of the text, which is followed as threads too. What look-behind asks for is followed from
the beginning of the text. Where dialects disagree on a class, what must not be found takes the larger one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from headrace.structured_outputs.difference import ANY, MAX_STATES, MAX_STEPS, Ranges, Way, eliminated, letters_of
from headrace.structured_outputs.pattern import (
    TOKEN,
    Anchor,
    Boundary,
    Chars,
    Choice,
    Look,
    Repeat,
    Row,
    Tree,
    Unreadable,
    tree_of,
)

LOOKS = frozenset(("(?=", "(?!", "(?<=", "(?<!", "\\b", "\\B"))
_ANY_CHARACTER = Chars(ANY[:-1])
_REST = Repeat(_ANY_CHARACTER, 0, None)
_WORD, _OTHER = Chars("[0-9A-Za-z_]"), Chars(r"[\x00-/:-@\[-^`{-\x7f]")
"""The ASCII characters of words, and those that are of none in any dialect."""
_NEWLINE = Chars("\\n")
Letter = tuple[frozenset[Chars], frozenset[Chars]]
"""Characters that are alike: what takes them, read small and read large."""


class Thread(NamedTuple):
    """Holds one way through a pattern."""

    way: Way
    demands: frozenset[Demand] = frozenset()


class Demand(NamedTuple):
    """Holds what look-ahead asks: that the rest of the text goes through one of these threads, or through none."""

    wanted: bool
    large: bool
    """Classes of characters are read as large as any dialect has them."""
    threads: frozenset[Thread]


class Place(NamedTuple):
    """Holds what has come before a place of a text."""

    begins: bool
    before: Chars | None
    """The class of the last character, where words matter; None: a letter that only some dialects have in words."""
    behind: tuple[frozenset[Thread], ...]
    """For each look-behind, how far its pattern has come."""


Ways = tuple[list[tuple[Chars, Thread]], list[frozenset[Demand]]]
_ANYTHING = Thread((_REST,))
_NOWHERE = Place(False, _OTHER, ())
State = tuple[frozenset[Thread], Place]


def without_look_around(pattern: str) -> str:
    """Return a pattern that is found in the same texts and has no look-around. One that has none, that is not read, or
    that no text fits, is returned as it is."""
    if not LOOKS & {*TOKEN.findall(pattern)}:
        return pattern
    try:
        found = _Follower(tree_of(pattern)).pattern()
    except Unreadable:
        return pattern
    return pattern if found is None else f"^{found}$"


class _Follower:
    """Follows all texts through one pattern at the same time."""

    def __init__(self, tree: Tree) -> None:
        chars: tuple[set[Chars], set[Chars]] = (set(), {_NEWLINE})
        self._behind: list[tuple[Look, bool]] = []
        """Each look-behind, and whether it is read large."""
        self._bounds = False
        for one, large in self._parts(tree, False):
            if isinstance(one, Chars):
                chars[large].add(one)
            elif isinstance(one, Look) and not one.ahead:
                self._behind.append((one, large != (not one.wanted)))
            self._bounds |= isinstance(one, Boundary)
        for side in chars:
            side |= {_ANY_CHARACTER, *((_WORD, _OTHER) if self._bounds else ())}
        self._letters = letters_of(*chars)
        anchored = isinstance(tree, Row) and tree.parts[:1] == (Anchor(True),)
        self._start = Thread((tree, _REST) if anchored else (_REST, tree, _REST))
        self._steps = 0
        self._known: dict[tuple[Thread, bool, Place], Ways] = {}

    def _parts(self, tree: Tree, large: bool, *, in_behind: bool = False) -> Iterator[tuple[Tree, bool]]:
        """All parts of a tree, and whether they are read large."""
        yield tree, large
        match tree:
            case Row(parts) | Choice(parts):
                for part in parts:
                    yield from self._parts(part, large, in_behind=in_behind)
            case Repeat(part):
                yield from self._parts(part, large, in_behind=in_behind)
            case Look(part, ahead, wanted):
                if in_behind:
                    raise Unreadable
                yield from self._parts(part, large != (not wanted), in_behind=not ahead)

    def pattern(self) -> str | None:
        """Return the pattern of the whole texts, without anchors; None if there are none."""
        behind = tuple(frozenset([Thread((_REST, look.part))]) for look, _ in self._behind)
        start: State = (frozenset([self._start]), Place(True, _OTHER, behind))
        moves: dict[State, dict[State, Ranges]] = {}
        waiting = [start]
        while waiting:
            state = waiting.pop()
            if state in moves:
                continue
            moves[state] = {}
            if len(moves) > MAX_STATES:
                raise Unreadable
            for letter, ranges in self._letters.items():
                target = self._after(state, letter)
                if target[0]:
                    moves[state].setdefault(target, []).extend(ranges)
                    waiting.append(target)
        ends = {state for state in moves if self._may_end(state[0], False, state[1])}
        return eliminated(start, ends, moves)

    def _after(self, state: State, letter: Letter) -> State:
        threads, place = state
        found = self._advanced(threads, False, letter, place)
        if found == {_ANYTHING}:
            return found, _NOWHERE
        behind = tuple(
            self._advanced(some, large, letter, place)
            for some, (_, large) in zip(place.behind, self._behind, strict=True)
        )
        before: Chars | None = _OTHER
        if self._bounds:
            before = next((kind for kind in (_WORD, _OTHER) if kind in letter[0]), None)
        return found, Place(False, before, behind)

    def _advanced(self, threads: Iterable[Thread], large: bool, letter: Letter, place: Place) -> frozenset[Thread]:
        """Where threads are after one more character; only what takes any text, if something does."""
        found: set[Thread] = set()
        for thread in threads:
            moves, _ = self._ways_on(thread, large, place)
            self._count(1 + len(moves) + sum(len(one.threads) for one in thread.demands))
            for char, after in moves:
                if char in letter[large]:
                    demands = self._demands(after.demands, letter, place)
                    if demands is not None:
                        found.add(Thread(after.way, demands))
        if _ANYTHING in found:
            return frozenset([_ANYTHING])
        fewer: dict[Way, list[frozenset[Demand]]] = {}
        for way, demands in found:
            fewer.setdefault(way, []).append(demands)
        return frozenset(one for one in found if not any(demands < one.demands for demands in fewer[one.way]))

    def _demands(self, demands: Iterable[Demand], letter: Letter, place: Place) -> frozenset[Demand] | None:
        """What demands ask after one more character; None if one cannot be met any more."""
        left = set()
        for demand in demands:
            threads = self._advanced(demand.threads, demand.large, letter, place)
            if not threads or _ANYTHING in threads:
                if bool(threads) != demand.wanted:
                    return None
            else:
                left.add(demand._replace(threads=threads))
        return frozenset(left)

    def _may_end(self, threads: Iterable[Thread], large: bool, place: Place) -> bool:
        """Whether the text may end here."""
        return any(
            all(self._may_end(one.threads, one.large, place) == one.wanted for one in demands)
            for thread in threads
            for demands in self._ways_on(thread, large, place)[1]
        )

    def _ways_on(self, thread: Thread, large: bool, place: Place) -> Ways:
        """The characters that may come next, with what follows; and for each way to end here, what it demands."""
        key = (thread, large, place)
        if key not in self._known:
            self._known[key] = self._found_ways(thread, large, place)
        return self._known[key]

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise Unreadable

    def _found_ways(self, thread: Thread, large: bool, place: Place) -> Ways:
        moves: list[tuple[Chars, Thread]] = []
        ends: list[frozenset[Demand]] = []
        seen, waiting = set(), [thread]
        while waiting:
            thread = waiting.pop()
            if thread in seen:
                continue
            seen.add(thread)
            self._count(len(thread.way) + sum(len(one.threads) for one in thread.demands))
            if not thread.way:
                ends.append(thread.demands)
                continue
            head, rest = thread.way[0], Thread(thread.way[1:], thread.demands)
            match head:
                case Chars():
                    moves.append((head, rest))
                case Row(parts):
                    waiting.append(_before(parts, rest))
                case Choice(parts):
                    waiting += [_before((part,), rest) for part in parts]
                case Repeat(part, least, most):
                    waiting += [] if least else [rest]
                    if most != 0:
                        again = Repeat(part, max(least - 1, 0), most and most - 1)
                        waiting.append(_before((part, again), rest))
                case Anchor(at_begin):
                    if not at_begin:
                        ways: list[Way] = [(), (_NEWLINE,)] if large else [()]
                        waiting.append(_demanding(rest, True, large, ways))
                    elif place.begins:
                        waiting.append(rest)
                case Look(part, ahead, wanted):
                    if ahead:
                        waiting.append(_demanding(rest, wanted, large != (not wanted), [(part, _REST)]))
                    elif self._is_behind(head, place) == wanted:
                        waiting.append(rest)
                case Boundary(wanted):
                    if place.before is not None:
                        is_other = (place.before == _WORD) == wanted
                        ways = [(), (_OTHER, _REST)] if is_other else [(_WORD, _REST)]
                        waiting.append(_demanding(rest, True, large, ways))
        return moves, ends

    def _is_behind(self, look: Look, place: Place) -> bool:
        """Whether the pattern of a look-behind ends here."""
        threads, large = next(
            (threads, large) for threads, (one, large) in zip(place.behind, self._behind, strict=True) if one is look
        )
        return any(not demands for thread in threads for demands in self._ways_on(thread, large, place)[1])


def _before(parts: Way, rest: Thread) -> Thread:
    return Thread(parts + rest.way, rest.demands)


def _demanding(rest: Thread, wanted: bool, large: bool, ways: list[Way]) -> Thread:
    return Thread(rest.way, rest.demands | {Demand(wanted, large, frozenset(map(Thread, ways)))})
