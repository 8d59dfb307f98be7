"""Writes a better command line from what was advised: for vLLM, and for headrace with what means something there.

What the shell is to expand is written so that it still does.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import replace

from headrace.advice.explain.case import Case
from headrace.advice.explain.command_fields import AUTO_LENGTH
from headrace.advice.explain.command_line import SCOPES, CommandLine
from headrace.advice.explain.findings import Finding
from headrace.advice.explain.setting import Setting
from headrace.advice.explain.shell_words import as_typed, is_unexpanded, is_variable, plain
from headrace.advice.flags.secrets import HIDDEN, masked, without_assignments
from headrace.advice.flags.table import find_flag, find_variable, foreign_value, hides, judge
from headrace.errors import ConfigError

PROGRAMS = ("serve", "generate", "bench latency", "bench throughput", "bench serve")
KEPT_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HIP_FORCE_DEV_KERNARG", "VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE", "VLLM_BATCH_INVARIANT",
)  # fmt: skip
"""Variables that headrace or the libraries below it read, beside those that begin with HF_ or NCCL_."""
ADDING = ("--middleware",)
"""Flags of vLLM that add up where they are repeated."""

Flags = dict[str, list[str]]
"""A flag by its main name -> its words, with marks around what the shell expands."""


def better_lines(case: Case, advice: Iterable[tuple[Setting, str]], findings: Iterable[Finding]) -> dict[str, str]:
    """Return a line for each engine that can do what is asked; programs that run no engine have none.

    `advice` has for each setting `drop`, what to write instead, or "" to leave it.
    """
    line = case.line
    if line.program not in PROGRAMS:
        return {}
    variables, flags = _advised(case, advice, findings)
    lines = {}
    if line.engine == "vllm":
        lines["vllm"] = _written(line, variables, flags)
    ours = _for_headrace(line.program, flags)
    if ours is not None:
        below = {name for name in variables if name in KEPT_VARIABLES or name.startswith(("HF_", "NCCL_"))}
        kept = {name: value for name, value in variables.items() if name in below}
        lines["headrace"] = _written(replace(line, engine="headrace"), kept, ours)
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
            match = find_flag(words[0], SCOPES[case.line.program])
            flags[match.known.name if match is not None else words[0]] = words[:end]
            words = words[end:]

    for setting, better in advice:
        if setting in case.line.container or better == "drop":
            continue
        if better:
            put(shlex.split(better))
        elif setting.is_variable:
            variables[setting.name] = setting.words[0]
        elif setting.key in flags and _adds(setting, case.line.engine):
            flags[setting.key] += _words(setting)
        elif setting.key != "--model":
            flags[setting.key] = _words(setting)
    for finding in findings:
        put(shlex.split(finding.add))
    return variables, flags


def _adds(setting: Setting, engine: str) -> bool:
    """Whether the flag, given again, adds to what it was given before; else the last one counts."""
    known = setting.known
    lists = known is not None and known.fate == "ours" and known.kind.name == "words"
    return setting.key in ADDING or (lists and engine == "headrace")


def _for_headrace(program: str, flags: Flags) -> Flags | None:
    """What headrace takes of them; None: it refuses one, or may."""
    kept: Flags = {}
    for name, words in flags.items():
        match = find_flag(name, SCOPES[program])
        if match is None:
            return None
        known, value = match.known, " ".join(words[1:]) or ("false" if words[0].startswith("--no-") else "true")
        if is_unexpanded(value):
            if known.fate != "ours" and known.accepts is not None:
                return None
        elif not _takes(known.name, value):
            continue
        else:
            try:
                judge(known, name, value)
            except ConfigError:
                return None
        if known.fate == "ours":
            kept[name] = words
    return kept


def _takes(flag: str, value: str) -> bool:
    """Whether a value of our own flag is one that we have; others ask for what is done without being asked."""
    return foreign_value(flag, value) is None and not (flag == "--max-model-len" and value in AUTO_LENGTH)


def _words(setting: Setting) -> list[str]:
    known = setting.known
    if known is not None and known.kind.name == "switch" and not setting.is_unexpanded:
        return str(setting).split()
    shows = not setting.is_secret or all(map(is_variable, setting.words))
    clean = masked if known is None else without_assignments
    words = [word if clean(plain(word)) == plain(word) else clean(plain(word)) for word in setting.words]
    return [setting.name, *(words if shows else [HIDDEN])]


def _written(line: CommandLine, variables: dict[str, str], flags: Flags) -> str:
    words = [f"{name}={_value(name, value)}" for name, value in {**variables, **line.others}.items()]
    words += [line.engine, line.program]
    if line.model is not None:
        words += [*(["--model"] if line.program != "serve" else []), as_typed(line.model_word)]
    for name, group in flags.items():
        match = find_flag(name, SCOPES[line.program])
        several = match is not None and match.known.kind.name == "words"
        words += [word if word == HIDDEN else as_typed(word, splits=several) for word in group]
    return " ".join([*words, *(as_typed(word, splits=True) for word in line.unexpanded_words)])


def _value(variable: str, word: str) -> str:
    hidden = hides(variable, plain(word), find_variable(variable)) and not is_variable(word)
    return HIDDEN if hidden else as_typed(word)
