"""Writes a command line anew with what was advised: for vLLM, and for headrace what of it means something there."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from headrace.errors import ConfigError
from headrace.explain.case import Case
from headrace.explain.command_line import SCOPES, Setting
from headrace.explain.findings import Finding
from headrace.flags.table import find_flag, find_variable, foreign_value, judge

PROGRAMS = ("serve", "generate", "bench latency", "bench throughput", "bench serve")
KEPT_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HIP_FORCE_DEV_KERNARG", "VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE", "VLLM_BATCH_INVARIANT",
)  # fmt: skip
"""What means something to headrace or to the libraries below it; and what begins with HF_ or NCCL_"""
AUTO_LENGTH = ("auto", "-1")
HIDDEN = "***"

Flags = dict[str, list[str]]
"""A flag by the name we use -> the words of it"""


def better_lines(case: Case, advice: Iterable[tuple[Setting, str]], findings: Iterable[Finding]) -> dict[str, str]:
    """Engine -> line. headrace's is left out where it cannot do what is asked; programs that run no engine have none.

    `advice`: with each setting `drop`, what to write instead, or "" to leave it.
    """
    program = case.line.program
    if program not in PROGRAMS:
        return {}
    variables, flags = _advised(case, advice, findings)
    named = case.line.model is not None and program != "serve"
    model = [*(["--model"] if named else []), *([case.line.model] if case.line.model else [])]
    lines = {}
    if case.line.engine == "vllm":
        lines["vllm"] = _joined(variables, ["vllm", *program.split(), *model], flags)
    ours = _for_headrace(program, flags)
    if ours is not None:
        below = {name for name in variables if name in KEPT_VARIABLES or name.startswith(("HF_", "NCCL_"))}
        kept = {name: value for name, value in variables.items() if name in below}
        lines["headrace"] = _joined(kept, ["headrace", *program.split(), *model], ours)
    return lines


def _advised(
    case: Case, advice: Iterable[tuple[Setting, str]], findings: Iterable[Finding]
) -> tuple[dict[str, str], Flags]:
    """Variables and flags, as advised."""
    variables: dict[str, str] = {}
    flags: Flags = {}

    def put(words: list[str]) -> None:
        while words and not words[0].startswith("-"):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        while words:
            end = next((at for at, word in enumerate(words[1:], 1) if word.startswith("--")), len(words))
            found = find_flag(words[0], SCOPES[case.line.program])
            flags[found.known.name if found is not None else words[0]] = words[:end]
            words = words[end:]

    for setting, better in advice:
        if setting in case.line.container or better == "drop":
            continue
        if better:
            put(shlex.split(better))
        elif setting.is_variable:
            variables[setting.name] = setting.value
        elif setting.key != "--model":
            flags[setting.key] = _words(setting)
    for finding in findings:
        put(shlex.split(finding.add))
    return variables, flags


def _for_headrace(program: str, flags: Flags) -> Flags | None:
    """What headrace takes of them; None: it refuses one."""
    kept: Flags = {}
    for name, words in flags.items():
        found = find_flag(name, SCOPES[program])
        if found is None:
            return None
        value = " ".join(words[1:]) or ("false" if words[0].startswith("--no-") else "true")
        if found.known.fate == "ours" and foreign_value(found.known.name, value) is not None:
            continue
        if found.known.name == "--max-model-len" and value in AUTO_LENGTH:  # what headrace does where none is given
            continue
        try:
            judge(found.known, name, value)
        except ConfigError:
            return None
        if found.known.fate == "ours":
            kept[name] = words
    return kept


def _words(setting: Setting) -> list[str]:
    known = setting.known
    if known is not None and known.secret:
        return [setting.name, HIDDEN]
    if known is not None and known.kind.name == "switch":
        return str(setting).split()
    if known is not None and known.kind.name == "words":
        return [setting.name, *setting.value.split()]
    return [setting.name] if known is None and setting.value == "true" else [setting.name, setting.value]


def _joined(variables: dict[str, str], program: list[str], flags: Flags) -> str:
    assigned = []
    for name, value in variables.items():
        known = find_variable(name)
        assigned.append(f"{name}={HIDDEN if known is not None and known.secret else shlex.quote(value)}")
    words = [*program, *(word for group in flags.values() for word in group)]
    return " ".join([*assigned, *(word if word == HIDDEN else shlex.quote(word) for word in words)])
