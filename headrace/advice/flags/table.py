"""Looks up flags and environment variables of vLLM by name: what each does there, and what becomes of it here.

The rows are in names.json, by scope; those of headrace's own flags come from config.py. Nothing is ignored in silence:
a name is a flag of headrace, is read by a library below it, asks for what is done anyway, has no effect for a reason
that is said, or is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from headrace.advice.flags.secrets import HIDDEN, is_secret, masked, without_assignments
from headrace.config import ATTENTION_OF_VLLM, EngineConfig, ServerConfig
from headrace.errors import ConfigError
from headrace.knobs import knob_types

TRUE, FALSE = ("1", "true"), ("0", "false")
NEGATIONS = (("--no-", "--"), ("--disable-", "--enable-"), ("--enable-", "--disable-"))
NUMBER = re.compile(r"(-?\d+(?:\.\d+)?)([kKmMgG])")


def human_int(text: str) -> int:
    """Return the number that `4096`, `8k` (8,000), `8K` (8,192) or `1.5M` means. Raises ValueError."""
    match = NUMBER.fullmatch(text)
    if match is None:
        return int(text)
    number, unit = match.groups()
    power = "kmg".index(unit.lower()) + 1
    value = float(number) * (1000 if unit.islower() else 1024) ** power
    if value != int(value):
        raise ValueError(f"{text} is not a whole number")
    return int(value)


@dataclass(frozen=True)
class Kind:
    """Describes the values that a flag takes."""

    name: str
    """`switch`, `whole`, `number`, `text`, `words` (several), `json` or `choice`."""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    also: tuple[str, ...] = ()
    """Words that are taken in a number's place."""
    exact: bool = False
    """Capitals matter in `choices`."""

    def problem(self, text: str) -> str | None:
        """Return what is wrong with a value, naming what is accepted; None: nothing."""
        got = f"got {text!r}"
        if text.lower() in self.also:
            return None
        if self.choices and not self._chosen(text):
            return f"must be one of {', '.join(self.choices)}; {got}"
        if self.name == "switch":
            return None if text.lower() in TRUE + FALSE else f"must be 1, 0, true or false, {got}"
        if self.name == "json":
            try:
                return None if isinstance(json.loads(text), dict) else f"must be a JSON object, {got}"
            except ValueError:
                return f"must be a JSON object, {got}"
        wanted = self._number_problem(text) if self.name in ("whole", "number") else ""
        return f"must {' or '.join([wanted, *self.also])}, {got}" if wanted else None

    def _chosen(self, text: str) -> bool:
        return text in self.choices if self.exact else text.lower() in map(str.lower, self.choices)

    def _number_problem(self, text: str) -> str:
        try:
            value = human_int(text) if self.name == "whole" else float(text)
        except (ValueError, OverflowError):
            return f"be a {'whole ' if self.name == 'whole' else ''}number"
        low, high = self.minimum, self.maximum
        if (low is None or value >= low) and (high is None or value <= high):
            return ""
        return f"lie between {low:g} and {high:g}" if high is not None else f"be at least {low:g}"


SWITCH, TEXT, WORDS, JSON = Kind("switch"), Kind("text"), Kind("words"), Kind("json")
WHOLE, COUNT, AMOUNT = Kind("whole", minimum=0), Kind("whole", minimum=1), Kind("number", minimum=0)
KINDS = {
    "switch": SWITCH, "text": TEXT, "words": WORDS, "json": JSON, "whole": WHOLE, "count": COUNT, "amount": AMOUNT,
    "share": Kind("number", minimum=0.01, maximum=1), "length": Kind("whole", minimum=1, also=("auto", "-1")),
}  # fmt: skip
"""Kinds by the names that names.json has for them."""


@dataclass(frozen=True)
class Known:
    """Describes a flag or an environment variable."""

    names: tuple[str, ...]
    """All spellings, the main one first; a variable that ends in * stands for all that begin so."""
    does: str
    """What it does in vLLM, or in the library that reads it."""
    kind: Kind = SWITCH
    vllm: Kind | None = None
    """What vLLM takes for a flag that headrace has too; None: the same."""
    why: str = ""
    """Why it has no effect here, or, with `accepts`, why other values are refused."""
    fate: str = "inert"
    """`inert`; `ours`: a flag of headrace; `library`: read by a library below."""
    accepts: tuple[str, ...] | None = None
    """Values that ask for what is done anyway; all others are refused. None: nothing is refused."""
    becomes: str = ""
    """The flag of headrace that it is another spelling of."""
    hardware: str = ""
    """`amd` or `nvidia`, where it means something on that hardware alone."""
    era: str = ""
    """What became of it in vLLM, if it is not current."""
    scope: str = "engine"
    """`engine`, `server`, `bench`, `offline` (benchmarks with an engine), `quantize`, `download` or `docker`."""
    secret: bool = False
    """Its value is never shown."""

    @property
    def name(self) -> str:
        """The main spelling."""
        return self.names[0]

    @property
    def is_variable(self) -> bool:
        """It is an environment variable; else a flag, and so a keyword argument as well."""
        return not self.name.startswith("-")

    def problem(self, value: str, engine: str = "headrace") -> str | None:
        """Return what is wrong with a value for that engine, naming what is accepted; None: nothing."""
        if engine == "vllm":
            return (self.vllm or self.kind).problem(value)
        return self.kind.problem(value) if foreign_value(self.name, value) is None else None


@dataclass(frozen=True)
class Note:
    """Says of a setting that was accepted without effect why it has none."""

    setting: str
    why: str


FOREIGN_VALUES: dict[str, tuple[tuple[str, ...], str]] = {
    "--attention-backend": (
        ATTENTION_OF_VLLM,
        "a kernel of vLLM's; attention is served by headrace's own, which the start-up log names",
    ),
    "--trust-remote-code": (("true",), "code from a model's repository is never run; every family here is native"),
}  # fmt: skip
"""Values of headrace's own flags that mean something to vLLM alone, and why they are left out: (values, why)."""


def foreign_value(flag: str, value: str) -> str | None:
    """Return why this value of headrace's own flag is left out; None: it is not."""
    values, why = FOREIGN_VALUES.get(flag, ((), ""))
    return why if value.lower() in (word.lower() for word in values) else None


@functools.cache
def _listed() -> dict[str, list[Known]]:
    """The rows of names.json by scope, those of environment variables as `variables`.

    A row names all spellings; flags that matter little share one. Its reasons may be `@name`s of common ones, its kind
    the choices there are (`mp|ray`), and what it leaves out has the default of `Known`.
    """
    data = json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8"))
    reasons = {f"@{name}": reason for name, reason in data.pop("reasons").items()}

    def known(scope: str, row: dict[str, Any]) -> Known:
        row = {key: reasons.get(value, value) for key, value in row.items()}
        kind, accepts = row.pop("kind", "switch"), row.pop("accepts", None)
        return Known(
            tuple(row.pop("names").split()),
            kind=KINDS.get(kind) or Kind("choice", tuple(kind.split("|")), exact=scope != "variables"),
            accepts=None if accepts is None else tuple(accepts.split()),
            scope="engine" if scope == "variables" else scope,
            **row,
        )

    return {scope: [known(scope, row) for row in rows] for scope, rows in data.items()}


@functools.cache
def flags_by_name(scope: str) -> dict[str, Known]:
    """Return the flags of one scope by all their spellings."""
    own = {"engine": _knobs(EngineConfig), "server": _knobs(ServerConfig)}.get(scope, [])
    table = {name: known for known in own for name in known.names}
    for known in _listed()[scope]:
        same = table.get(known.name)
        if same is not None:  # a knob of ours, of which the row says what it does in vLLM
            names = dict.fromkeys((*known.names, *same.names))
            known = dataclasses.replace(
                same, names=tuple(names), does=known.does, hardware=known.hardware, vllm=known.kind
            )
        table |= dict.fromkeys(known.names, known)
    return table


@functools.cache
def variables_by_name() -> dict[str, Known]:
    """Return the environment variables by all their names."""
    return {name: known for known in _listed()["variables"] for name in known.names}


def _knobs(config_class: type) -> list[Known]:
    kinds = knob_types(config_class)
    result = []
    for field in dataclasses.fields(config_class):
        meta: Mapping[str, Any] = field.metadata
        names = ("--" + field.name.replace("_", "-"), *meta["aliases"], *filter(None, [meta["short"]]))
        kind = _kind_of(meta, kinds[field.name][0])
        result.append(Known(names, meta["help"], kind, fate="ours", secret=field.name == "api_key"))
    return result


def _kind_of(meta: Mapping[str, Any], plain: type) -> Kind:
    """Of a knob of that type, with the bounds that config.py gives it."""
    choices = tuple(map(str, meta["choices"] or ()))
    if plain in (int, float):
        return Kind("whole" if plain is int else "number", choices, meta["minimum"], meta["maximum"])
    if choices:
        return Kind("choice", choices, exact=True)
    return {bool: SWITCH, list: WORDS, dict: JSON}.get(plain, TEXT)


def spelling(flag: str) -> str:
    """Return a flag with dashes: `--max-num-seqs` for `--max_num_seqs`."""
    return flag.replace("_", "-") if flag.startswith("--") else flag


class FlagMatch(NamedTuple):
    """Holds a flag that was looked up."""

    known: Known
    name: str
    """As it was spelled, without the negation."""
    negated: bool


def find_flag(name: str, scopes: Iterable[str]) -> FlagMatch | None:
    """Return the flag of that name, or the one that it negates, from the first of `scopes` that has it."""
    wanted = spelling(name)
    for scope in scopes:
        table = flags_by_name(scope)
        if wanted in table:
            return FlagMatch(table[wanted], wanted, False)
        for old, new in NEGATIONS:
            positive = new + wanted.removeprefix(old)
            if wanted.startswith(old) and positive in table and table[positive].kind is SWITCH:
                return FlagMatch(table[positive], positive, True)
    return None


def find_variable(name: str) -> Known | None:
    """Return the variable of that name, or the row that stands for all that begin like it."""
    table = variables_by_name()
    if name in table:
        return table[name]
    starts = [row for row in table if row.endswith("*") and name.startswith(row[:-1])]
    return table[max(starts, key=len)] if starts else None


def hides(name: str, value: str, known: Known | None) -> bool:
    """Return whether the value is never shown: known flags say it in their row, all others by their name."""
    if known is not None and (known.secret or not known.is_variable):
        return known.secret
    return is_secret(name, value)


def shown_value(name: str, value: str, known: Known | None) -> str:
    """Return the value without secrets, also without those that it assigns (`--label TOKEN=...`)."""
    if hides(name, value, known):
        return HIDDEN
    return masked(value) if known is None or known.scope == "docker" else without_assignments(value)


def shown(name: str, value: str, known: Known | None) -> str:
    """Return the setting as one types it: `--swap-space 16`, `VLLM_ROCM_USE_AITER=1`; secrets without their value."""
    value = shown_value(name, value, known)
    if not name.startswith("-"):
        return f"{name}={value}"
    if known is not None and known.kind is SWITCH and value.lower() in TRUE + FALSE:
        return name if value.lower() in TRUE else "--no-" + name[2:]
    return f"{name} {value}"


def judge(known: Known, name: str, value: str) -> Note | None:
    """Return what a user is told of a setting that headrace does not have.

    None: it asks for what is done anyway, or a library reads it. Raises ConfigError where the value is wrong, or asks
    for what headrace lacks.
    """
    if known.fate == "library":
        return None  # whose business wrong values are
    subject = f"environment variable {name}" if known.is_variable else name
    problem = known.problem(value)
    if problem is not None:
        raise ConfigError(f"{subject} {problem}")
    if known.accepts is not None:
        if _asks_nothing(known, value):
            return None
        if known.kind is SWITCH or not known.accepts:
            raise ConfigError(f"{shown(name, value, known)} is not supported: {known.why}")
        raise ConfigError(f"{subject} must be {' or '.join(known.accepts)}, got {value!r}: {known.why}")
    if known.fate != "inert":
        return None
    return Note(shown(name, value, known), known.why)


def _asks_nothing(known: Known, value: str) -> bool:
    accepted = known.accepts or ()
    if known.kind.name in ("whole", "number"):
        return float(human_int(value) if known.kind.name == "whole" else value) in map(float, accepted)
    if known.kind is JSON:
        return not json.loads(value)
    if known.kind is SWITCH:
        return ("true" in accepted) is (value.lower() in TRUE)
    return value.lower() in accepted


def judge_variables(environ: Mapping[str, str]) -> list[Note]:
    """Return notes on what the environment sets for vLLM without effect here. Raises ConfigError for wrong values."""
    notes = []
    for name in sorted(environ):
        known = find_variable(name)
        if known is None or not environ[name]:
            continue
        why = foreign_value(known.becomes, environ[name])
        note = judge(known, name, environ[name]) if why is None else Note(shown(name, environ[name], known), why)
        notes += [note] if note is not None else []
    return notes


def notice(notes: Iterable[Note]) -> str:
    """Return all notes as one notice, settings with the same reason together; "" for none."""
    by_reason: dict[str, list[str]] = {}
    for note in notes:
        settings = by_reason.setdefault(note.why, [])
        if note.setting not in settings:
            settings.append(note.setting)
    lines = [f"{', '.join(settings)}: {why}" for why, settings in by_reason.items()]
    if len(lines) < 2:
        return "".join(f"headrace: note: no effect here: {line}" for line in lines)
    return "\n  ".join(["headrace: note: no effect here (`headrace explain` says more):", *lines])
