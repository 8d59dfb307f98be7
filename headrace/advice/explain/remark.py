"""Defines remarks on a setting of a command line, and the rules that choose one.

A rule is a condition and a remark. The condition is words of CONDITIONS, all of which must hold; `!` negates one. Where
the remark depends on numbers it is a function, which may return None to leave the word to the next rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from headrace.advice.explain.case import Case
from headrace.advice.explain.setting import Setting

VERDICTS = ("helps", "fine", "depends", "not needed", "no effect", "costs", "wrong", "unknown")


@dataclass(frozen=True)
class Remark:
    """Holds what is to be said of one setting."""

    verdict: str
    """One of VERDICTS."""
    text: str
    better: str = ""
    """`drop`, or the setting to write instead; "": leave it."""
    claim: str = ""
    """The name, in explain.CLAIMS, of a claim of guides that does not hold."""


helps, fine, depends, unknown = (partial(Remark, verdict) for verdict in ("helps", "fine", "depends", "unknown"))
not_needed, no_effect, costs, wrong = (
    partial(Remark, verdict, better="drop") for verdict in ("not needed", "no effect", "costs", "wrong")
)

MakeRemark = Callable[[Case, Setting], Remark | None]
Rule = tuple[str, Remark | MakeRemark]
Rules = dict[str, tuple[Rule, ...]]
"""Name of a setting -> its rules, of which the first that applies counts."""

CONDITIONS: dict[str, Callable[[Case, Setting], bool]] = {
    "on": lambda case, setting: setting.on,
    "off": lambda case, setting: setting.off,
    "auto": lambda case, setting: setting.value.lower() == "auto",
    "vllm": lambda case, setting: case.line.engine == "vllm",
    "quantizes": lambda case, setting: case.line.program == "quantize",
    "server": lambda case, setting: case.is_server,
    "nvidia": lambda case, setting: case.vendor == "nvidia",
    "one-gpu": lambda case, setting: case.gpus == 1,
    "tp1": lambda case, setting: case.tp == 1,
    "pp1": lambda case, setting: case.pp == 1,
    "dp1": lambda case, setting: case.dp == 1,
    "one-node": lambda case, setting: case.nodes == 1,
    "known-model": lambda case, setting: case.shape is not None,
    "dense": lambda case, setting: case.shape is not None and not case.shape.is_moe,
    "latent": lambda case, setting: case.shape is not None and case.shape.is_mla,
    "not-latent": lambda case, setting: case.shape is not None and not case.shape.is_mla,
}


def choose(rules: tuple[Rule, ...], case: Case, setting: Setting) -> Remark | None:
    """Return the remark of the first rule that applies; None where none does."""
    for condition, remark in rules:
        words = ((word.removeprefix("!"), not word.startswith("!")) for word in condition.split())
        if all(CONDITIONS[word](case, setting) is wanted for word, wanted in words):
            chosen = remark if isinstance(remark, Remark) else remark(case, setting)
            if chosen is not None:
                return chosen
    return None
