"""Rules of remarks: they name settings and conditions that exist, and the first that applies counts."""

from __future__ import annotations

import pytest

from headrace.advice.explain.case import make_case
from headrace.advice.explain.command_line import SCOPES, parse_command
from headrace.advice.explain.explain import CLAIMS, RULES
from headrace.advice.explain.remark import CONDITIONS, VERDICTS, Remark, choose, fine, no_effect
from headrace.advice.flags.table import find_flag, find_variable

SCOPE_NAMES = sorted({scope for scopes in SCOPES.values() for scope in scopes})


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_for_a_known_setting_and_known_conditions(name: str) -> None:
    assert find_flag(name, SCOPE_NAMES) if name.startswith("-") else find_variable(name)
    for condition, remark in RULES[name]:
        assert {word.removeprefix("!") for word in condition.split()} <= CONDITIONS.keys()
        if isinstance(remark, Remark):
            assert remark.verdict in VERDICTS
            assert remark.claim in ("", *CLAIMS)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("vllm serve m -tp 1 --enforce-eager", "alone"),
        ("vllm serve m -tp 2 --enforce-eager", "split"),
        ("vllm serve m -tp 2 --no-enforce-eager", None),
    ],
)
def test_the_first_rule_that_applies_counts(line: str, text: str | None) -> None:
    rules = (
        ("on tp1", no_effect("alone")),
        ("on", lambda case, setting: None),
        ("on !tp1", lambda case, setting: fine("split")),
        ("on", fine("never reached")),
    )
    case = make_case(parse_command(line))
    setting = case.line.find("--enforce-eager")
    remark = choose(rules, case, setting)
    assert (remark.text if remark is not None else None) == text
