"""Rules of remarks: they name settings, conditions and facts that exist, and the first that applies counts."""

from __future__ import annotations

import string

import pytest

from headrace.advice.explain import remark
from headrace.advice.explain.case import make_case
from headrace.advice.explain.command_fields import CommandFields
from headrace.advice.explain.command_line import SCOPES, parse_command
from headrace.advice.explain.explain import CLAIMS
from headrace.advice.explain.facts import CONDITIONS, CONDITIONS_OF, FACTS
from headrace.advice.explain.made_remarks import MADE_REMARKS
from headrace.advice.explain.remark import RULES, TEXTS, VERDICTS, Rule, choose
from headrace.advice.flags.table import find_flag, find_variable

SCOPE_NAMES = sorted({scope for scopes in SCOPES.values() for scope in scopes})


@pytest.mark.parametrize("name", sorted({*RULES, *MADE_REMARKS}))
def test_every_rule_is_for_a_known_setting_and_known_conditions(name: str) -> None:
    assert find_flag(name, SCOPE_NAMES) if name.startswith("-") else find_variable(name)
    for rule in RULES.get(name, ()):
        for word in rule.when.replace("!", "").split():
            condition, given, _ = word.partition(":")
            assert condition in (CONDITIONS_OF if given else CONDITIONS)
        named = {field for text in (rule.text, rule.better or "") for _, field, _, _ in string.Formatter().parse(text)}
        assert named <= {None, *FACTS, *TEXTS, *CommandFields.__dataclass_fields__}
        assert rule.verdict in VERDICTS
        assert rule.claim in ("", *CLAIMS)


@pytest.mark.parametrize(
    ("line", "text", "better"),
    [
        ("vllm serve m -tp 1 --enforce-eager", "alone", "drop"),
        ("vllm serve m -tp 2 --enforce-eager", "split over 2", "--enforce-eager true"),
        ("vllm serve m -tp 2 --no-enforce-eager", None, None),
    ],
)
def test_the_first_rule_that_applies_counts(
    line: str, text: str | None, better: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = [
        Rule("--enforce-eager", "no effect", "alone", "on tp1"),
        Rule("--enforce-eager", "fine", "split over {tp}", "on !tp1 is:1|true", "{name} {value}"),
        Rule("--enforce-eager", "fine", "never reached", "on"),
    ]
    monkeypatch.setitem(remark.RULES, "--enforce-eager", rules)
    case = make_case(parse_command(line))
    setting = case.line.find("--enforce-eager")
    found = choose(case, setting)
    assert (found and found.text, found and found.better) == (text, better)
