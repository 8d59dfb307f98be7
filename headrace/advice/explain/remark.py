"""Defines remarks on a setting of a command line, and the rules that choose one.

Rules are the rows of remarks.json, of which the first that applies to a setting counts. Where a remark depends on
several numbers it is made by a function (made_remarks.py), which is asked where no row applies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from headrace.advice.explain.case import Case
from headrace.advice.explain.facts import FACTS, holds
from headrace.advice.explain.setting import Setting

VERDICTS = ("helps", "fine", "depends", "not needed", "no effect", "costs", "wrong", "unknown")
DROPPED = ("not needed", "no effect", "costs", "wrong")
"""Verdicts on what a better line does without, unless the remark says otherwise."""


class Remark(msgspec.Struct, frozen=True):
    """Holds what is to be said of one setting."""

    verdict: str
    """One of VERDICTS."""
    text: str
    better: str = ""
    """`drop`, or the setting to write instead; "": leave it."""
    claim: str = ""
    """The name, in explain.CLAIMS, of a claim of guides that does not hold."""


helps, fine, depends, unknown = (partial(Remark, verdict) for verdict in ("helps", "fine", "depends", "unknown"))
not_needed, no_effect, costs, wrong = (partial(Remark, verdict, better="drop") for verdict in DROPPED)

MakeRemark = Callable[[Case, Setting], Remark | None]


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Holds a row of remarks.json."""

    of: str
    """The names of settings, with blanks between; one that ends in * stands for all that begin so and have no row."""
    verdict: str
    text: str
    """Names in braces, here and in `better`, stand for facts (facts.py), or for texts that several rows share."""
    when: str = ""
    """Conditions (facts.py), with blanks between, all of which must hold; `!` negates one."""
    better: str | None = None
    """As in Remark; absent: `drop` for the verdicts in DROPPED, else ""."""
    claim: str = ""


class _Rows(msgspec.Struct):
    texts: dict[str, str]
    rules: list[Rule]


_ROWS = msgspec.json.decode(Path(__file__).with_name("remarks.json").read_bytes(), type=_Rows)
TEXTS = _ROWS.texts
RULES: dict[str, list[Rule]] = {}
"""Name of a setting -> its rules."""
for _rule in _ROWS.rules:
    for _name in _rule.of.split():
        RULES.setdefault(_name, []).append(_rule)


class _Words:
    """What names in braces stand for, each looked up when it is met."""

    def __init__(self, case: Case, setting: Setting) -> None:
        self._of = case, setting

    def __getitem__(self, name: str) -> object:
        if name in TEXTS:
            return TEXTS[name]
        return FACTS[name](*self._of) if name in FACTS else getattr(self._of[0].asked, name)


def choose(case: Case, setting: Setting) -> Remark | None:
    """Return the remark of the first rule that applies to a setting; None where none does."""
    starts = [name for name in RULES if name.endswith("*") and setting.name.startswith(name[:-1])]
    rules = RULES.get(setting.key) or [rule for name in starts for rule in RULES[name]]
    rule = next((rule for rule in rules if holds(rule.when, case, setting)), None)
    if rule is None:
        return None
    words = _Words(case, setting)
    better = rule.better if rule.better is not None else "drop" if rule.verdict in DROPPED else ""
    return Remark(rule.verdict, rule.text.format_map(words), better.format_map(words), rule.claim)
