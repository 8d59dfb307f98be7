"""Explains a command line of vLLM flag by flag, and writes better lines for vLLM and for headrace.

It says what each setting does, on which hardware, whether it helps here, what is wrong with it, and what becomes of it
in headrace. What a flag does stands in flags/names.json, what is to be said of it in remarks.json and made_remarks.py.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.advice.explain.better_line import better_lines
from headrace.advice.explain.case import Case, make_case
from headrace.advice.explain.command_line import SCOPES, CommandLine, parse_command, parse_commands
from headrace.advice.explain.findings import Finding, findings_of
from headrace.advice.explain.made_remarks import MADE_REMARKS
from headrace.advice.explain.remark import Remark, choose
from headrace.advice.explain.setting import Setting
from headrace.advice.flags.table import Note, flags_by_name, foreign_value, judge, notice
from headrace.config import CHECKPOINT_WORDS
from headrace.errors import ConfigError
from headrace.planner.catalogue import find_config
from headrace.planner.chips import Chip
from headrace.planner.engines import model_gaps

CLAIMS: dict[str, str] = json.loads(Path(__file__).with_name("claims.json").read_text(encoding="utf-8"))
"""What guides claim that does not hold, or not as they put it, by name."""
ROUNDS = 4
"""How often a better line is examined: what mends one thing may leave, or break, another."""
HARDWARE = {"amd": "AMD", "nvidia": "NVIDIA", "": "any"}


@dataclass(frozen=True)
class Answer:
    """Holds what there is to say of one flag or variable."""

    setting: Setting
    does: str
    hardware: str
    """AMD, NVIDIA or any."""
    verdict: str
    """One of remark.VERDICTS."""
    why: str
    here: str
    """What becomes of it in headrace."""
    better: str = ""
    claim: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as --json prints it."""
        setting = {"setting": str(self.setting), "name": self.setting.name, "value": self.setting.shown_value}
        names = ("does", "hardware", "verdict", "why", "here", "better", "claim")
        return setting | {"headrace" if name == "here" else name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Explanation:
    """Holds what there is to say of a command line."""

    case: Case
    answers: tuple[Answer, ...]
    findings: tuple[Finding, ...]
    better: dict[str, str]
    """Engine -> a better line for it; an engine that cannot run this is left out."""
    notice: str
    """What `headrace` itself would say of the line; never empty."""
    gaps: tuple[str, ...] = ()
    """Why headrace cannot run the model yet."""

    @property
    def claims(self) -> list[str]:
        """The names of claims that the line seems to rest on."""
        return sorted({answer.claim for answer in self.answers if answer.claim})

    def to_json(self) -> dict[str, Any]:
        """Return it as --json prints it."""
        case = self.case
        findings = [asdict(finding) for finding in self.findings]
        return {
            "command": case.line.program,
            "model": case.line.model,
            "gpu": case.chip.name if case.chip is not None else None,
            "gpu_guessed": case.chip_guessed,
            "settings": [answer.to_json() for answer in self.answers],
            "findings": [{name: finding[name] for name in ("title", "verdict", "text")} for finding in findings],
            "claims": {claim: CLAIMS[claim] for claim in self.claims},
            "better": self.better,
            "headrace_lacks": list(self.gaps),
            "notice": self.notice,
        }


def explain(text: str, chip: Chip | None = None) -> list[Explanation]:
    """Explain every command of a shell line. Raises ConfigError where there is none."""
    return [explain_line(line, chip) for line in parse_commands(text)]


def explain_line(line: CommandLine, chip: Chip | None = None) -> Explanation:
    """Explain one command; without a chip it is guessed from the line, or left open."""
    case, answers, findings = _examined(line, chip)
    gaps = _gaps(case)
    better = {}
    for engine, text in _better(case, answers, findings).items():
        mended = _corrected(text, engine, case) if engine != "headrace" or not gaps else None
        if mended is not None:
            better[engine] = mended
    return Explanation(case, answers, findings, better, line_notice(line), tuple(gaps))


def _examined(line: CommandLine, chip: Chip | None) -> tuple[Case, tuple[Answer, ...], tuple[Finding, ...]]:
    case = make_case(line, chip)
    answers = tuple(answer_of(case, setting) for setting in (*line.settings, *line.container))
    return case, answers, tuple(findings_of(case))


def _better(case: Case, answers: tuple[Answer, ...], findings: tuple[Finding, ...]) -> dict[str, str]:
    return better_lines(case, [(answer.setting, answer.better) for answer in answers], findings)


def _corrected(text: str, engine: str, case: Case) -> str | None:
    """A line with nothing wrong in it: `text`, or what becomes of it when it is examined in turn. None: something that
    is wrong stays, or is right for the line's own engine alone."""
    for _ in range(ROUNDS):
        again, answers, findings = _examined(parse_command(text), case.chip)
        wrong = any(answer.verdict == "wrong" for answer in answers)
        if not wrong and all(finding.verdict != "wrong" for finding in findings):
            return text
        if engine != case.line.engine and wrong:
            return None
        text = _better(again, answers, findings).get(engine, text)
    return None


def answer_of(case: Case, setting: Setting) -> Answer:
    """Return what there is to say of one setting of the line."""
    known, fate = setting.known, fate_of(case.line, setting)
    does = known.does if known is not None else ""
    if setting.is_unexpanded:
        return Answer(setting, does, "any", "unknown", "known only once the shell has filled it in", fate.here)
    if known is None:
        why = "no flag of that name is known here: a typo, or newer than this table" + fate.hint
        return Answer(setting, does, "any", "unknown", why, fate.here)
    remark = _remark(case, setting, fate)
    hardware = HARDWARE[known.hardware]
    return Answer(setting, does, hardware, remark.verdict, remark.text, fate.here, remark.better, remark.claim)


def _remark(case: Case, setting: Setting, fate: Fate) -> Remark:
    known, ours = setting.known, case.line.engine == "headrace"
    assert known is not None
    problem = known.problem(setting.value, case.line.engine)
    if problem is not None or (ours and fate.refused):
        return Remark("wrong", problem or fate.refused, "drop")
    elsewhere = known.hardware and case.vendor not in ("", known.hardware)
    if elsewhere and not (ours and known.fate == "ours"):
        text = f"means something on {HARDWARE[known.hardware]}'s GPUs alone, not on {case.gpu}"
        return Remark("no effect", text, "drop")
    remark = choose(case, setting) or MADE_REMARKS.get(setting.key, lambda case, setting: None)(case, setting)
    if remark is not None:
        return remark
    if known.era.startswith("gone"):
        return Remark("no effect", known.era, "drop")
    if known.era:
        return Remark("depends", known.era)
    if ours and known.fate == "inert" and known.accepts is None:
        return Remark("no effect", known.why, "drop")
    return Remark("fine", "")


@dataclass(frozen=True)
class Fate:
    """Says what `headrace serve` or `bench` makes of a setting."""

    here: str
    note: Note | None = None
    """The note on a setting that is left out."""
    refused: str = ""
    """The error of a setting that is refused."""
    hint: str = ""
    """The name that an unknown one is near to."""


def fate_of(line: CommandLine, setting: Setting) -> Fate:
    """Return what headrace makes of a setting of the line."""
    known = setting.known
    if known is None:
        names = sorted({name for scope in SCOPES[line.program] for name in flags_by_name(scope)})
        near = difflib.get_close_matches(setting.name, names, 1, 0.8)
        hint = f"; did you mean {near[0]}?" if near else ""
        return Fate(f"refused: unknown flag{hint}", refused=f"unknown flag {setting.name}{hint}", hint=hint)
    if setting.is_unexpanded:
        return Fate("known only once the shell has filled it in")
    flag = known.becomes or known.name
    why = foreign_value(flag, setting.value) if known.fate == "ours" else None
    if why is not None:
        return Fate(f"left out: {why}", Note(str(setting), why))
    if known.fate == "library":
        return Fate(known.why)
    if known.fate != "ours" and known.becomes:
        return Fate(f"same as {flag}")
    try:
        note = judge(known, setting.name, setting.value)
    except ConfigError as error:
        return Fate(f"refused: {error}", refused=str(error))
    if known.fate == "ours":
        return Fate(f"same as {flag}" if known.becomes else "the same flag")
    return Fate(f"no effect: {note.why}" if note is not None else "headrace does this anyway", note)


def line_notice(line: CommandLine) -> str:
    """Return one notice of what is left out, refused or unknown; it also says where there is nothing of that."""
    fates = [fate_of(line, setting) for setting in line.settings]
    refused = [fate.refused for fate in fates if fate.refused]
    if line.stray:
        refused.append(f"words that belong to no flag: {' '.join(line.stray)}")
    notes = notice(fate.note for fate in fates if fate.note)
    parts = [notes, *(f"headrace: refused: {text}" for text in refused)]
    return "\n".join(filter(None, parts)) or "headrace: note: every setting of this line has an effect"


def _gaps(case: Case) -> list[str]:
    if case.shape is None or case.line.model is None:
        return []
    asked = case.asked.quantization
    return model_gaps(find_config(case.line.model).config, asked=asked if asked in CHECKPOINT_WORDS else None)
