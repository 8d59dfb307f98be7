"""Makes rules of lists in which no item comes twice, for arrays that are not written as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from headrace.structured_outputs.lark import Rules

MAX_ANY_ORDER = 6
"""Items that may come in any order: the rules double with each."""
MAX_WAYS = 10_000
"""Ways on in all rules together."""


def different_items(rules: Rules, items: Sequence[str], comma: str, least: int, most: int | None) -> str | None:
    """Return what matches so many of some items with commas between them, none of them twice: in any order if there are
    few, else in theirs. None: there are too many. Not for fewer items than `least`."""
    any_order = len(items) <= MAX_ANY_ORDER
    most = len(items) if most is None else min(most, len(items))
    counted = most if most < len(items) else max(least, 1)
    if not any_order and len(items) ** 2 * (counted + 1) > MAX_WAYS:
        return None

    @cache
    def behind(count: int, left: tuple[str, ...]) -> str:
        """Return what may follow so many items, or more where no more are counted."""
        ways = ['""'] if count >= least else []
        for place, item in enumerate(left if count < most else ()):
            rest = (left[:place] if any_order else ()) + left[place + 1 :]
            if len(rest) >= least - count - 1:
                ways.append(rules.joined(comma if count else "", item, behind(min(count + 1, counted), rest)))
        return rules.rule(" | ".join(ways))

    return behind(0, tuple(items))
