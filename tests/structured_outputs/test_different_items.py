"""Rules for lists without repeated items, beside all lists that Python makes of the same items."""

import random
from itertools import combinations, permutations

from headrace.structured_outputs.different_items import MAX_ANY_ORDER, different_items
from headrace.structured_outputs.lark import Rules
from tests.structured_outputs.support import accepts, matcher_of


def taken(items: str, least: int, most: int | None, texts: list[str]) -> list[str]:
    """Those of some texts that the rules for such a list take."""
    rules = Rules({})
    start = different_items(rules, [rules.literal(item) for item in items], rules.literal(","), least, most)
    assert start is not None
    matcher = matcher_of(rules.grammar(start))
    return [text for text in texts if accepts(matcher, text)]


def test_few_items_come_in_any_order_and_none_twice() -> None:
    for _ in range(6):
        items = "abcd"[: random.randint(1, 4)]
        least = random.randint(0, len(items))
        most = random.choice([None, random.randint(least, 5)])
        lists = [",".join(some) for length in range(6) for some in permutations(items, length)]
        twice = [",".join(some) + "," + some[0] for length in range(1, 5) for some in permutations(items, length)]
        end = len(items) if most is None else most
        fitting = [text for text in lists if least <= len(text.split(",")) - (not text) <= end]
        assert taken(items, least, most, lists + twice) == fitting, (items, least, most)


def test_more_items_come_in_their_order() -> None:
    items = "abcdefgh"[: MAX_ANY_ORDER + random.randint(1, 2)]
    least, most = random.randint(0, 3), random.choice([None, random.randint(3, 9)])
    lists = [",".join(some) for length in range(len(items) + 1) for some in combinations(items, length)]
    end = len(items) if most is None else most
    fitting = [text for text in lists if least <= len(text.split(",")) - (not text) <= end]
    others = ["b,a", "a,a", "a,b,c,a", "a,"]
    assert taken(items, least, most, lists + others) == fitting, (items, least, most)


def test_what_takes_too_many_rules_is_not_written() -> None:
    many = [f'"{number}"' for number in range(200)]
    assert different_items(Rules({}), many, '","', 0, None) is None
    assert different_items(Rules({}), many[:40], '","', 0, None) is not None
    assert different_items(Rules({}), many[:40], '","', 20, None) is None
