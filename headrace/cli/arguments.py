"""Makes flags from config fields: every knob of a config class becomes one flag, in all spellings that vLLM allows.

`canonical` rewrites a command line to `--flag=value` form; argparse does the rest. A flag that no knob has is looked up
in advice/flags/table.py, which says what becomes of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from headrace.advice.flags.table import (
    FOREIGN_VALUES,
    Note,
    find_flag,
    foreign_value,
    human_int,
    judge,
    judge_variables,
    notice,
)
from headrace.config import EngineConfig, ServerConfig
from headrace.environment import environment, knobs_from_environment
from headrace.errors import ConfigError
from headrace.knobs import knob_problem, knob_types

Config = TypeVar("Config")

GROUP_TITLES = {
    "model": "model",
    "engine": "engine",
    "cache": "KV cache",
    "scheduler": "scheduler",
    "parallel": "parallelism",
    "lora": "adapters (LoRA)",
    "server": "server and logs",
}
OTHER_FLAGS = "Further flags and variables of vLLM are taken by name; `headrace explain` says what becomes of each."
SWITCH_WORDS = {"true": True, "false": False}
OWNERS = {
    "engine": "`headrace serve`, `generate` and the benchmarks that run an engine",
    "server": "`headrace serve`",
    "bench": "a benchmark (`headrace bench --help`)",
    "offline": "`headrace bench latency` and `throughput`",
}
"""Scope of advice/flags/names.json -> the commands that take its flags."""


def parse_switch(text: str) -> bool:
    """Return the value of a switch. Raises ValueError for anything but true and false."""
    if text.lower() not in SWITCH_WORDS:
        raise ValueError(text)
    return SWITCH_WORDS[text.lower()]


def parse_json_object(text: str) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError for anything else."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


PARSERS: dict[type, tuple[Callable[[str], Any], str]] = {
    int: (human_int, "a whole number such as 4096, 8k or 8K"),
    float: (float, "a number"),
    str: (str, "text"),
    bool: (parse_switch, "true or false"),
    dict: (parse_json_object, "a JSON object"),
}


def flag_of(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


class FlagParser:
    """Parses flags that come from knobs. `parse` raises ConfigError: one line, naming the flag."""

    def __init__(self, command: str, summary: str, examples: str, *, model: bool = True) -> None:
        """With `model`, MODEL may be the first word as well as the value of `--model`."""
        self._command = command
        usage = f"headrace {command} [MODEL] [flags]" if model else f"headrace {command} [flags]"
        self._parser = _Argparse(
            usage=usage,
            description=textwrap.fill(summary, _help_width()),
            epilog="examples:\n" + examples,
            formatter_class=_help_formatter,
            allow_abbrev=False,
            add_help=False,
        )
        self._parser.add_argument("-h", "--help", action="help", help="Show this help.")
        if model:
            self._parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="The model; the same as --model.")
        self._groups: dict[str, Any] = {}
        self._switches: dict[str, tuple[str, bool]] = {}
        self._dicts: set[str] = set()
        self._flags: dict[str, str] = {"-h": "--help", "--help": "--help"}
        """Every spelling of this command's flags -> the main one."""
        self._scopes = [scope for scope in ("bench", "quantize") if command.startswith(scope)]
        """Scopes of advice/flags/names.json in which other flags are looked up."""

    def add_knobs(
        self, config_class: type, *, skip: tuple[str, ...] = (), single: tuple[str, ...] = (), **defaults: Any
    ) -> None:
        """Add a flag for every field of `config_class`; the help shows `defaults` in place of the class's own.

        Lists named in `single` take one value a flag, so that MODEL may follow.
        """
        kinds = knob_types(config_class)
        if config_class is EngineConfig:
            self._scopes = [*(["offline"] if self._scopes else []), *self._scopes, "engine"]
            self._parser.epilog = f"{self._parser.epilog}\n\n{OTHER_FLAGS}"
        elif config_class is ServerConfig:
            self._scopes.append("server")
        for field in dataclasses.fields(config_class):
            if field.name in skip:
                continue
            factory = field.default_factory
            default = factory() if factory is not dataclasses.MISSING else field.default
            default = defaults.get(field.name, default)
            nargs = 1 if field.name in single else "+"
            self.add_flag(field.name, *kinds[field.name], default, field.metadata, nargs=nargs)

    def add_flag(
        self,
        name: str,
        kind: type,
        optional: bool,
        default: Any,
        meta: Mapping[str, Any],
        element: type = str,
        nargs: int | str = "+",
    ) -> None:
        """Add one flag. `meta` is what `config.knob` keeps; `element` is the type of a list's items."""
        names = [flag_of(name), *(flag_of(alias.lstrip("-")) for alias in meta["aliases"])]
        if meta["short"]:
            names.append(meta["short"])
        options: dict[str, Any] = {
            "dest": name,
            "default": argparse.SUPPRESS,
            "help": _help_text(name, kind, optional, default, meta["help"]).replace("%", "%%"),
        }
        if kind is list:
            options |= {"nargs": nargs, "action": "extend", "type": _reader(element, True, meta), "metavar": "VALUE"}
        else:
            options |= {"type": _reader(kind, optional, meta), "metavar": _metavar(kind, meta)}
        title = GROUP_TITLES.get(meta["group"], meta["group"])
        if title not in self._groups:
            self._groups[title] = self._parser.add_argument_group(title)
        self._groups[title].add_argument(*names, **options)
        self._flags |= dict.fromkeys(names, names[0])
        if kind is dict:
            self._dicts.add(names[0])
        if kind is bool:
            for spelling in names:
                self._switches |= {spelling: (names[0], True), "--no-" + spelling[2:]: (names[0], False)}
            for one, other in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
                if names[0].startswith(one):
                    self._switches[other + names[0].removeprefix(one)] = (names[0], False)

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Return the flags that were given; defaults belong to the config classes.

        One notice on standard error names all flags and variables of vLLM that have no effect here.
        """
        args, notes = self.canonical(argv)
        values = self._parser.parse_args(args)
        tag = vars(values).pop("model_tag", None)
        if tag is not None:
            if getattr(values, "model", tag) != tag:
                raise ConfigError(f"two models given: {tag!r} and --model {values.model!r}")
            values.model = tag
        if "engine" in self._scopes:
            notes += judge_variables(environment())
        if notes:
            print(notice(notes), file=sys.stderr)
        return values

    def canonical(self, argv: list[str]) -> tuple[list[str], list[Note]]:
        """Rewrite underscores, switches, negations and dotted JSON keys to `--flag=value`.

        Also return notes on flags and values of vLLM that are left out.
        """
        result: list[str] = []
        notes: list[Note | None] = []
        objects: dict[str, dict[str, Any]] = {}
        tokens = list(argv)
        while tokens:
            token = tokens.pop(0)
            if token == "--":
                result += [token, *tokens]
                break
            head, equals, value = token.partition("=")
            if not head.startswith("-") or head == "-" or " " in head or re.match(r"-\.?\d", head):
                result.append(token)
                continue
            base, _, path = head.partition(".")
            if base.startswith("--"):
                base = base.replace("_", "-")
            given = value if equals else None
            if base in self._switches:
                flag, meaning = self._switches[base]
                value = _switch_value(given, tokens)
                if value in SWITCH_WORDS:
                    value = str(SWITCH_WORDS[value] is meaning)
                self._keep_or_leave(flag, value, flag, result, notes)
            elif base in self._dicts:
                value = self._value_after(head, tokens) if given is None else value
                _merge(objects.setdefault(base, {}), path, value, head)
            elif self._flags.get(base) in FOREIGN_VALUES and "engine" in self._scopes:
                value = self._value_after(head, tokens) if given is None else value
                self._keep_or_leave(self._flags[base], value, f"{base} {value}", result, notes)
            elif base in self._flags:
                result.append(base + equals + value)
            else:
                notes.append(self._of_vllm(base, path, given, tokens))
        merged = [f"{flag}={json.dumps(value)}" for flag, value in objects.items()]
        return merged + result, [note for note in notes if note is not None]

    def _keep_or_leave(self, flag: str, value: str, setting: str, result: list[str], notes: list[Note | None]) -> None:
        """Put a flag of this command into `result`, unless its value means something to vLLM alone."""
        why = foreign_value(flag, value)
        if why is None:
            result.append(f"{flag}={value}")
        else:
            notes.append(Note(setting, why))

    def _of_vllm(self, base: str, path: str, given: str | None, tokens: list[str]) -> Note | None:
        """Return the note on a flag that this command does not have, if there is one.

        Another spelling of a flag that it does have is pushed back to `tokens`.
        """
        match = find_flag(base, self._scopes)
        if match is None or match.known.fate == "ours":
            raise ConfigError(self._unknown(base))
        known = match.known
        if known.kind.name == "switch":
            value = _switch_value(given, tokens)
            if match.negated and value in SWITCH_WORDS:
                value = str(not SWITCH_WORDS[value])
        elif known.kind.name == "words":
            words = [self._value_after(base, tokens) if given is None else given]
            while given is None and tokens and not tokens[0].startswith("-"):
                words.append(tokens.pop(0))
            value = ",".join(words)
        else:
            value = self._value_after(base, tokens) if given is None else given
        if known.becomes:
            listed = f"[{value}]" if known.kind.name == "words" else value
            tokens.insert(0, f"{known.becomes}{'.' if path else ''}{path}={listed}")
            return None
        if path:  # one key of a JSON object
            return judge(known, f"{base}.{path}", json.dumps({path: value}))
        is_short = known.name.startswith("--") and not match.name.startswith("--")
        return judge(known, known.name if is_short else match.name, value)

    def _value_after(self, flag: str, tokens: list[str]) -> str:
        if not tokens:
            raise ConfigError(f"{flag} needs a value")
        return tokens.pop(0)

    def _unknown(self, flag: str) -> str:
        """What to do about a flag that this command does not take: who takes it, what is like it, or where all are."""
        for scope, owners in OWNERS.items():
            match = find_flag(flag, [scope])
            if match is not None and match.known.fate == "ours":
                return f"unknown flag {flag}: `headrace {self._command}` does not take it; it is for {owners}"
            if match is not None:
                why = match.known.why or "headrace does what it asks for anyway"
                return f"unknown flag {flag}: `headrace {self._command}` does not take it; it is vLLM's, and {why}"
        near = difflib.get_close_matches(flag, sorted({*self._flags, *self._switches}), 1, 0.6)
        if near:
            return f"unknown flag {flag}; did you mean {near[0]}?"
        return f"unknown flag {flag}: no flag of headrace's or vLLM's; `headrace {self._command} --help` lists them"


def _switch_value(given: str | None, tokens: list[str]) -> str:
    """`true` for a bare switch; a `true` or `false` behind it is its value."""
    if given is None:
        given = tokens.pop(0) if tokens and tokens[0].lower() in SWITCH_WORDS else "true"
    return given.lower() if given.lower() in SWITCH_WORDS else given


def build_config(config_class: type[Config], values: argparse.Namespace, **defaults: Any) -> Config:
    """Make a config from `defaults`, the environment and the flags; the later wins. Raises ConfigError."""
    given = vars(values)
    names = {field.name for field in dataclasses.fields(config_class)}  # pyrefly: ignore[bad-argument-type]
    flags = {name: given[name] for name in names & given.keys()}
    return config_class(**(defaults | knobs_from_environment(config_class) | flags))


def _reader(kind: type, optional: bool, meta: Mapping[str, Any]) -> Callable[[str], Any]:
    parse, wanted = PARSERS[kind]

    def read(text: str) -> Any:
        try:
            value = parse(text)
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}") from None
        problem = knob_problem(meta, kind, optional, value)
        if problem is not None:
            raise argparse.ArgumentTypeError(problem)
        return value

    return read


def _merge(target: dict[str, Any], path: str, text: str, flag: str) -> None:
    """Put JSON `text` into `target` at the dotted `path` ("" = the whole object)."""
    if not path:
        try:
            target.update(parse_json_object(text))
        except ValueError:
            raise ConfigError(f"{flag} must be a JSON object, got {text!r}") from None
        return
    *parents, last = path.replace("-", "_").split(".")
    for key in parents:
        child = target.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{flag}: {key!r} is not a JSON object")
        target = child
    try:
        target[last] = json.loads(text)
    except ValueError:
        target[last] = text


def _metavar(kind: type, meta: Mapping[str, Any]) -> str:
    if meta["choices"]:
        return "{" + ",".join(map(str, meta["choices"])) + "}"
    return {int: "N", float: "X", bool: "", dict: "JSON"}.get(kind, "VALUE")


def _help_text(name: str, kind: type, optional: bool, default: Any, text: str) -> str:
    if kind is bool:
        if not default:
            return text
        positive = name.startswith("disable_")
        off = flag_of("enable_" + name.removeprefix("disable_")) if positive else "--no-" + flag_of(name)[2:]
        return f"{text} (default: on; {off} turns it off)"
    if default is None and optional and kind in (int, float):
        return text if "default" in text else f"{text} (default: derived)"
    if default in (None, "", [], {}):
        return text
    return f"{text} (default: {default})"


def _help_width() -> int:
    return min(shutil.get_terminal_size().columns, 120)


def _help_formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=_help_width())


class _Argparse(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (-[^\s/]+)\S*: ", r"\1 ", message)
        message = re.sub(r"^unrecognized arguments: ", "unexpected argument ", message)
        raise ConfigError(message.replace("\n", " "))
