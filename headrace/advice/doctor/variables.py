"""Checks the environment's variables: those left on, meant for another vendor's GPUs, or read by nobody.

A finding bears the variable's name. A variable that is set and does no harm is not mentioned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.advice.doctor.finding import Finding, Severity, note, ok
from headrace.advice.doctor.host import INFINIBAND
from headrace.advice.doctor.survey import Survey

WHERE: dict[str, Callable[[Survey], bool]] = {
    "amd": lambda survey: survey.vendor == "amd",
    "not-amd": lambda survey: survey.vendor != "amd",
    "nvidia": lambda survey: survey.vendor == "nvidia",
    "gpu": lambda survey: bool(survey.checked_gpus),
    "no-gpu": lambda survey: not survey.checked_gpus,
    "one": lambda survey: not survey.several,
    "several": lambda survey: survey.several,
    "infiniband": lambda survey: bool(survey.machine.names(INFINIBAND)),
}
"""Machines that a rule is for: `several` GPUs, `one` at most, ..."""


Harmful = Callable[[str, Survey, list[str]], bool]


def _no_such_interface(value: str, survey: Survey, words: list[str]) -> bool:
    """`eth0,ib` are beginnings of names; `=eth0` is a whole one; `^docker` excludes."""
    names = survey.machine.names("/sys/class/net")
    if not names or value.startswith("^"):
        return False
    wanted = tuple(part.partition(":")[0] for part in value.lstrip("=").split(","))
    return not any(name in wanted if value.startswith("=") else name.startswith(wanted) for name in names)


VALUES: dict[str, Harmful] = {
    "any": lambda value, survey, words: True,
    "on": lambda value, survey, words: value.lower() in ("1", "true", "yes", "on"),
    "off": lambda value, survey, words: value.lower() in ("0", "false", "no", "off"),
    "above": lambda value, survey, words: value.isdigit() and int(value) > int(words[0]),
    "among": lambda value, survey, words: value.upper() in words,
    "unknown-interface": _no_such_interface,
}
"""Values that do harm, with the words behind their name: `above 32`, `among EAGER`."""


@dataclass(frozen=True)
class Rule:
    """Says what a variable costs, on which machines and with which values; a row of variables.json."""

    name: str
    severity: Severity
    cost: str
    where: str = ""
    """Words of WHERE, all of which must hold."""
    value: str = "on"
    """One of VALUES."""
    fix: str = ""
    """Empty: unset it."""

    def speaks(self, value: str, survey: Survey) -> bool:
        """Return whether the rule is for this machine and value."""
        kind, *words = self.value.split()
        return all(WHERE[word](survey) for word in self.where.split()) and VALUES[kind](value, survey, words)


RULES = msgspec.json.decode(Path(__file__).with_name("variables.json").read_bytes(), type=list[Rule])
KERNARG = next(rule.cost for rule in RULES if rule.name == "HIP_FORCE_DEV_KERNARG")


def check_variables(survey: Survey) -> Iterator[Finding]:
    """Yield a finding for each variable that does harm; one that all is well where none does."""
    environment = survey.machine.environment
    findings = [
        Finding(rule.severity, f"{rule.name}={value}", rule.cost, rule.fix or f"unset {rule.name}", id=rule.name)
        for rule in RULES
        if (value := environment.get(rule.name)) is not None and rule.speaks(value.strip(), survey)
    ]
    if survey.vendor == "amd" and survey.checked_gpus and "HIP_FORCE_DEV_KERNARG" not in environment:
        name = "HIP_FORCE_DEV_KERNARG"
        findings.append(note(f"{name} is not set", KERNARG, f"export {name}=1", id=name))
    if not findings:
        seen = sorted(name for name in environment if re.match(r"(R|N)CCL_|HSA_|AITER_", name))
        findings.append(ok(f"{', '.join(seen)} do no harm" if seen else "none set that hurts"))
    yield from findings
