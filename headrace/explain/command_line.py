"""A shell line that starts vLLM, or headrace, or a tool around them, taken apart: program, model, flags, variables.

Reads what stands in guides: assignments before the command, `export`, continued lines, pipes, `docker run`, `bash -c`,
`python benchmark_throughput.py`. Runs nothing and opens nothing. flags.py and explain.py say what a setting means.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from headrace.errors import ConfigError
from headrace.flags.table import FALSE, TRUE, Known, find_flag, find_variable, shown, spelling

SCOPES = {
    "serve": ("server", "engine"),
    "generate": ("engine", "server"),
    "bench latency": ("offline", "bench", "engine", "server"),
    "bench throughput": ("offline", "bench", "engine", "server"),
    "bench serve": ("bench", "engine", "server"),
    "quantize": ("quantize",),
    "download": ("download",),
}
"""Program -> where its flags are looked up"""
SCRIPTS = {
    "benchmark_latency.py": "bench latency",
    "benchmark_throughput.py": "bench throughput",
    "benchmark_serving.py": "bench serve",
    "quantize_quark.py": "quantize",
}
MODULES = {
    "vllm.entrypoints.openai.api_server": "serve",
    "vllm.entrypoints.api_server": "serve",
}
KEYWORDS = ("do", "then", "else", "time", "sudo", "nohup", "exec", "env", "&&", "{", "export")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
PLACEHOLDER = re.compile(r"<([A-Za-z][\w ./-]*)>")
REDIRECTION = re.compile(r"(?:(?<=\s)\d|&)?>{1,2}(?:&\d|\s*[\w./$-]+)")


@dataclass(frozen=True)
class Setting:
    """One flag or environment variable of a command line."""

    name: str
    """with dashes for underscores, and without a negation"""
    value: str
    """true or false for switches"""
    known: Known | None
    """None: nothing of that name is known"""
    is_variable: bool = False

    @property
    def key(self) -> str:
        """The name that all its other spellings share."""
        if self.known is None or self.is_variable:
            return self.name
        return self.known.name if self.known.fate == "ours" or not self.name.startswith("--") else self.name

    @property
    def on(self) -> bool:
        return self.value.lower() in TRUE

    @property
    def off(self) -> bool:
        return self.value.lower() in FALSE

    def __str__(self) -> str:
        return shown(self.name, self.value, self.known)


@dataclass(frozen=True)
class CommandLine:
    program: str
    """serve, generate, bench latency, bench throughput, bench serve, quantize or download"""
    model: str | None
    settings: tuple[Setting, ...]
    """variables first, then flags, in order"""
    container: tuple[Setting, ...] = ()
    """flags of `docker run`"""
    stray: tuple[str, ...] = ()
    """words that belong to no flag"""
    engine: str = "vllm"
    """vllm, headrace, or the tool itself"""

    def find(self, key: str) -> Setting | None:
        """The last setting of that name, however it was spelled."""
        return next((setting for setting in reversed(self.settings) if setting.key == key), None)

    def value(self, key: str) -> str | None:
        found = self.find(key)
        return found.value if found is not None else None

    @property
    def variables(self) -> dict[str, str]:
        return {setting.name: setting.value for setting in self.settings if setting.is_variable}


def parse_command(text: str) -> CommandLine:
    """The one command of `text`, the first where there are several. Raises ConfigError where there is none."""
    return parse_commands(text)[0]


def parse_commands(text: str) -> list[CommandLine]:
    """Every command of `text` that we know something of. Raises ConfigError where there is none."""
    shell = _Shell()
    shell.run(text)
    if not shell.found:
        raise ConfigError(
            "no command of vLLM or headrace in this line; expected something like "
            f"'vllm serve MODEL --flags', got {' '.join(text.split())[:80]!r}"
        )
    return [_command(program, words, found) for program, words, found in shell.found]


def from_argv(program: str, argv: Sequence[str], variables: Mapping[str, str] | None = None) -> CommandLine:
    """A command that is taken apart already: "serve" or "bench latency", and what follows it."""
    if program not in SCOPES:
        raise ConfigError(f"command must be one of {', '.join(SCOPES)}; got {program!r}")
    return _command(program, list(argv), _Place(dict(variables or {})))


@dataclass(frozen=True)
class _Place:
    """Where a command stands."""

    variables: dict[str, str]
    container: tuple[Setting, ...] = ()
    engine: str = "vllm"


@dataclass
class _Shell:
    """Walks through shell text, remembers what was exported, and collects commands."""

    exported: dict[str, str] = field(default_factory=dict)
    found: list[tuple[str, list[str], _Place]] = field(default_factory=list)

    def run(self, text: str, variables: Mapping[str, str] | None = None, container: tuple[Setting, ...] = ()) -> None:
        for words in _simple_commands(text):
            self.command(words, dict(variables or {}), container)

    def command(self, words: list[str], variables: dict[str, str], container: tuple[Setting, ...]) -> None:
        words = [self._expand(word) for word in words]
        if words[0].startswith("-") and self.found:  # a line that was meant to continue the one before
            self.found[-1][1].extend(words)
            return
        kept = words[0] == "export"
        while words and (words[0] in KEYWORDS or ASSIGNMENT.fullmatch(words[0])):
            match = ASSIGNMENT.fullmatch(words.pop(0))
            if match is not None:
                variables[match[1]] = match[2]
        if not words or kept:
            self.exported |= variables
        elif words[0] == "unset":
            self.exported = {name: value for name, value in self.exported.items() if name not in words[1:]}
        elif PurePath(words[0]).name in ("docker", "podman") and {"run", "exec"} & set(words[1:3]):
            self._container(words, variables)
        elif words[0] in ("bash", "sh") and any(re.fullmatch(r"-\w*c", word) for word in words[1:-1]):
            self.run(words[-1], variables, container)
        else:
            self._program(words, variables, container)

    def _program(self, words: list[str], variables: dict[str, str], container: tuple[Setting, ...]) -> None:
        for at, word in enumerate(words):
            # What stands before the program (numactl, timeout, taskset, mpirun) is passed over, but for assignments.
            match = ASSIGNMENT.fullmatch(word)
            if match is not None and not word.startswith("-"):
                variables[match[1]] = match[2]
            program, taken, engine = _program_at(words, at)
            if program:
                place = _Place(self.exported | variables, container, engine)
                self.found.append((program, words[at + taken :], place))
                return

    def _container(self, words: list[str], variables: dict[str, str]) -> None:
        settings, rest = [], words[words.index("run" if "run" in words[1:3] else "exec") + 1 :]
        inside: dict[str, str] = {}
        while rest and rest[0].startswith("-"):
            setting, rest = _take(rest, ("docker",), False)
            if setting.key in ("-e", "--env"):
                name, _, value = setting.value.partition("=")
                inside[name] = value or variables.get(name, self.exported.get(name, ""))
            else:
                settings.append(setting)
        container, image, rest = tuple(settings), rest[0] if rest else "", rest[1:]
        if rest and (rest[0].startswith("-") or rest[0] == "serve") and "vllm" in image:
            self.found.append(("serve", rest[rest[0] == "serve" :], _Place(inside, container)))  # vLLM's own images
        elif rest:
            self.command(rest, inside, container)

    def _expand(self, word: str) -> str:
        """$NAME and ${NAME}, where it was assigned before."""
        return re.sub(r"\$\{?(\w+)\}?", lambda match: self.exported.get(match[1], match[0]), word)


def _simple_commands(text: str) -> Iterator[list[str]]:
    """The words of each command, split at newlines, semicolons and pipes; redirections are dropped."""
    text = re.sub(r"\\[ \t]*\r?\n", " ", text)
    text = PLACEHOLDER.sub(lambda match: "./" + re.sub(r"[^\w.-]+", "-", match[1]), text)
    text = REDIRECTION.sub(" ", text)
    words: list[str] = []
    for line in _logical_lines(text):
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|()")
        lexer.whitespace_split = True
        try:
            tokens = list(lexer)
        except ValueError as error:
            raise ConfigError(f"the line cannot be read as shell words: {str(error).lower()}") from None
        for token in [*tokens, ";"]:
            if token and not set(token) - set(";&|()"):
                if words:
                    yield words
                words = []
            elif token != "\\":
                words.append(token)


def _logical_lines(text: str) -> Iterator[str]:
    """Lines, with those joined that are inside one pair of quotes."""
    held = ""
    for line in text.splitlines():
        held = f"{held}\n{line}" if held else line
        try:
            shlex.split(held, comments=True)
        except ValueError:
            continue
        yield held
        held = ""
    if held:
        yield held


def _program_at(words: list[str], at: int) -> tuple[str, int, str]:
    """(program, how many words name it, engine) of a program that begins at `at`; "" for none."""
    word, after = PurePath(words[at]).name, words[at + 1 :]
    if word == "-m" and after and after[0] in MODULES:
        return MODULES[after[0]], 2, "vllm"
    if word in SCRIPTS:
        return SCRIPTS[word], 1, "vllm" if SCRIPTS[word].startswith("bench") else "quark"
    if word in ("huggingface-cli", "hf") and after[:1] == ["download"]:
        return "download", 2, "hub"
    if word in ("vllm", "headrace", "vllm.entrypoints.cli.main") and after:
        name = " ".join(after[:2]) if after[0] == "bench" else after[0]
        if name in SCOPES:
            return name, 1 + len(name.split()), "headrace" if word == "headrace" else "vllm"
    return "", 0, ""


def _command(program: str, words: list[str], place: _Place) -> CommandLine:
    settings = [
        Setting(name, value, find_variable(name), is_variable=True)
        for name, value in place.variables.items()
        if find_variable(name) is not None
    ]
    positional: list[str] = []
    rest = list(words)
    while rest:
        if rest[0] == "--":
            positional += rest[1:]
            break
        if not rest[0].startswith("-") or rest[0] == "-" or re.match(r"-\.?\d", rest[0]):
            positional.append(rest.pop(0))
            continue
        wants_model = program == "serve" and not positional and "--model" not in words
        setting, rest = _take(rest, SCOPES[program], wants_model)
        settings.append(setting)
    model = next((setting.value for setting in settings if setting.key in ("--model", "--model-dir")), None)
    if model is None and positional:
        model = positional.pop(0)
    return CommandLine(program, model, tuple(settings), place.container, tuple(positional), place.engine)


def _take(words: list[str], scopes: tuple[str, ...], wants_model: bool) -> tuple[Setting, list[str]]:
    """The flag that `words` begins with, and what is left. A flag that nobody knows takes the next word as its value,
    unless that looks like another flag, or may be the model that is still to come."""
    head, equals, value = words[0].partition("=")
    rest = words[1:]
    base, dot, path = head.partition(".")
    found = find_flag(base, scopes)
    if found is None and re.fullmatch(r"-[A-Za-z]{2,}", base) and all(find_flag("-" + c, scopes) for c in base[1:]):
        found = find_flag("-" + base[-1], scopes)  # short flags in one word, as docker's -it
    if found is None:
        if not equals:
            alone = not rest or rest[0].startswith("-") or wants_model
            value = "true" if alone else rest.pop(0)
        return Setting(spelling(head), value, None), rest
    kind = found.known.kind.name
    if kind == "switch":
        if not equals:
            value = rest.pop(0) if rest and rest[0].lower() in ("true", "false") else "true"
        if found.negated and value.lower() in TRUE + FALSE:
            value = "false" if value.lower() in TRUE else "true"
    elif kind == "words":
        taken = [value] if equals else []
        while not equals and rest and not rest[0].startswith("-"):
            taken.append(rest.pop(0))
        value = " ".join(taken)
    elif not equals:
        value = rest.pop(0) if rest else ""
    if dot:
        value = _object(path, value)
    return Setting(found.name, value, found.known), rest


def _object(path: str, text: str) -> str:
    """`a.b` and `1` -> `{"a": {"b": 1}}`."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    for key in reversed(path.replace("-", "_").split(".")):
        value = {key: value}
    return json.dumps(value)
