"""Takes a shell line that starts vLLM, headrace or a tool around them apart: program, model, flags, variables.

Reads what stands in guides: assignments before the command, `export`, continued lines, pipes, `docker run`, `bash -c`,
`python benchmark_throughput.py`. Runs nothing and opens nothing; what a setting means is said elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import PurePath

from headrace.advice.explain.json_keys import merged
from headrace.advice.explain.setting import Setting
from headrace.advice.explain.shell_words import BARE, END, commands, expanded, is_unexpanded, plain
from headrace.advice.flags.secrets import masked, without_assignments
from headrace.advice.flags.table import FALSE, SWITCH, TRUE, find_flag, find_variable, spelling
from headrace.errors import ConfigError

SCOPES = {
    "serve": ("server", "engine"),
    "generate": ("engine", "server"),
    "bench latency": ("offline", "bench", "engine", "server"),
    "bench throughput": ("offline", "bench", "engine", "server"),
    "bench serve": ("bench", "engine", "server"),
    "quantize": ("quantize",),
    "download": ("download",),
}
"""Program -> the scopes of flags/names.json that have its flags."""
SCRIPTS = {
    "benchmark_latency.py": "bench latency",
    "benchmark_throughput.py": "bench throughput",
    "benchmark_serving.py": "bench serve",
    "quantize_quark.py": "quantize",
}
MODULES = {"vllm.entrypoints.openai.api_server": "serve", "vllm.entrypoints.api_server": "serve"}
KEYWORDS = ("do", "then", "else", "time", "sudo", "nohup", "exec", "env", "&&", "{", "export")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
NO_MODEL = (
    "bash", "sh", "zsh", "python", "python3", "pip", "env", "sleep", "tail", "ls", "cat", "nvidia-smi", "rocm-smi",
)  # fmt: skip
"""Programs that people start in an image of vLLM's instead of its server."""


@dataclass(frozen=True)
class CommandLine:
    """Holds one command."""

    program: str
    """One of SCOPES."""
    model: str | None
    settings: tuple[Setting, ...]
    """Variables first, then flags, in order."""
    container: tuple[Setting, ...] = ()
    """Flags of `docker run`."""
    stray: tuple[str, ...] = ()
    """Words that belong to no flag."""
    engine: str = "vllm"
    """`vllm`, `headrace`, or the tool itself."""
    model_word: str = ""
    """`model`, with marks around what the shell is to expand."""
    unexpanded_words: tuple[str, ...] = ()
    """Words with marks that may be anything until the shell expands them."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Variables, with marks, of which nothing is known."""

    def find(self, key: str) -> Setting | None:
        """Return the last setting of that name, however it was spelled."""
        return next((setting for setting in reversed(self.settings) if setting.key == key), None)

    def value(self, key: str) -> str | None:
        """Return the value of the last setting of that name."""
        setting = self.find(key)
        return setting.value if setting is not None else None

    @property
    def may_have_more_flags(self) -> bool:
        """Further flags may stand in a file, or in what the shell expands."""
        return bool(self.unexpanded_words) or self.find("--config") is not None

    @property
    def variables(self) -> dict[str, str]:
        return {setting.name: setting.value for setting in self.settings if setting.is_variable}


def parse_command(text: str) -> CommandLine:
    """Return the first command of a shell text. Raises ConfigError where there is none."""
    return parse_commands(text)[0]


def parse_commands(text: str) -> list[CommandLine]:
    """Return every command of a shell text that is known here. Raises ConfigError where there is none."""
    shell = _Shell()
    shell.run(text)
    if not shell.collected:
        raise ConfigError(
            "no command of vLLM or headrace in this line; expected something like "
            f"'vllm serve MODEL --flags', got {masked(' '.join(text[:400].split()))[:80]!r}"
        )
    return list(map(_command, shell.collected))


@dataclass
class _Found:
    """A command as it was found."""

    program: str
    words: list[str]
    variables: dict[str, str]
    others: dict[str, str]
    """Variables set for this command alone of which nothing is known."""
    container: tuple[Setting, ...]
    engine: str


@dataclass
class _Shell:
    """Walks through shell text, remembers what was exported, and collects commands. Words bear marks."""

    exported: dict[str, str] = field(default_factory=dict)
    collected: list[_Found] = field(default_factory=list)
    container: tuple[Setting, ...] = ()
    """Flags of `docker run`, where the shell is in a container."""

    def run(self, text: str, variables: Mapping[str, str] | None = None) -> None:
        for words in commands(text):
            self.command(words, dict(variables or {}))

    def command(self, words: list[str], variables: dict[str, str]) -> None:
        words = [part for word in words for part in expanded(word, self.exported)]
        if words and words[0].startswith("-") and self.collected:  # a line that was meant to continue the one before
            self.collected[-1].words.extend(words)
            return
        kept = words[:1] == ["export"]
        while words and (words[0] in KEYWORDS or ASSIGNMENT.fullmatch(words[0])):
            match = ASSIGNMENT.fullmatch(words.pop(0))
            if match is not None:
                variables[match[1]] = match[2]
        program = PurePath(words[0]).name if words else ""
        if not words or kept:
            self.exported |= variables
        elif program == "unset":
            self.exported = {name: value for name, value in self.exported.items() if name not in words[1:]}
        elif program in ("docker", "podman") and {"run", "exec"} & set(words[1:3]):
            self._run_container(words, variables)
        elif program in ("bash", "sh") and any(re.fullmatch(r"-\w*c", word) for word in words[1:-1]):
            self.run(plain(words[-1]), variables)
        else:
            self._program(words, variables)

    def _program(self, words: list[str], variables: dict[str, str]) -> None:
        for at, word in enumerate(words):
            # What stands before the program (numactl, timeout, taskset, mpirun) is passed over, but for assignments.
            match = ASSIGNMENT.fullmatch(word)
            if match is not None and not word.startswith("-"):
                variables[match[1]] = match[2]
            program, taken, engine = _program_at(words, at)
            if program:
                self._find(program, words[at + taken :], variables, engine)
                return

    def _find(self, program: str, words: list[str], variables: dict[str, str], engine: str = "vllm") -> None:
        others = {name: value for name, value in variables.items() if find_variable(name) is None}
        found = _Found(program, words, self.exported | variables, others, self.container, engine)
        self.collected.append(found)

    def _run_container(self, words: list[str], variables: dict[str, str]) -> None:
        """`docker run`: the image's own entry point takes what follows it, where that is no command by itself."""
        runs = "run" in words[1:3]
        settings, inside, rest = self._container_flags(words[words.index("run" if runs else "exec") + 1 :], variables)
        entry = next((plain(setting.value) for setting in settings if setting.name == "--entrypoint"), "")
        image, rest = plain(rest[0]) if rest else "", rest[1:]
        shell, before = _Shell({}, self.collected, tuple(map(_read, settings))), len(self.collected)
        if entry:
            shell.command([entry, *rest], inside)
        elif rest and not rest[0].startswith("-"):
            shell.command(rest, inside)
        if runs and len(self.collected) == before and _is_for_server(image, rest):
            shell._find("serve", rest[rest[0] == "serve" :], inside)

    def _container_flags(
        self, words: list[str], variables: dict[str, str]
    ) -> tuple[list[Setting], dict[str, str], list[str]]:
        """Flags, variables inside, and what follows. `-e NAME` alone takes the variable from outside."""
        settings: list[Setting] = []
        inside: dict[str, str] = {}
        while words and words[0].startswith("-"):
            setting, words = _take([*_unjoined(words[0]), *words[1:]], ("docker",), False)
            if setting.key in ("-e", "--env"):
                name, given, value = setting.value.partition("=")
                outside = f"{BARE}${name}{END}" if re.fullmatch(r"[A-Za-z_]\w*", name) else ""
                inside[name] = value if given else variables.get(name, self.exported.get(name, outside))
            else:
                settings.append(setting)
        return settings, inside, words


def _is_for_server(image: str, words: list[str]) -> bool:
    """Whether an image's entry point is `vllm serve`: vLLM's own, and those that are handed --model."""
    if not words:
        return False
    name = PurePath(plain(words[0])).name
    if "vllm" in image:
        return name not in NO_MODEL
    named = any(word.partition("=")[0] == "--model" for word in words)
    return named and (words[0].startswith("-") or name == "serve")


def _unjoined(word: str) -> list[str]:
    """`-itv/a:/b` -> `-i`, `-t`, `-v`, `/a:/b`, as docker reads short flags in one word."""
    if word.startswith("--") or find_flag(word, ("docker",)) is not None:
        return [word]
    flags: list[str] = []
    for at, letter in enumerate(word[1:], 2):
        match = find_flag(f"-{letter}", ("docker",))
        if match is None:
            return [word]
        flags.append(f"-{letter}")
        if match.known.kind is not SWITCH:
            value = word[at:].removeprefix("=")
            return [*flags, value] if value else flags
    return flags


def _program_at(words: list[str], at: int) -> tuple[str, int, str]:
    """(program, how many words name it, engine) of a program that begins at `at`; "" for none."""
    word, after = PurePath(plain(words[at])).name, words[at + 1 :]
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


def _command(found: _Found) -> CommandLine:
    program, words = found.program, found.words
    known = ((name, value, find_variable(name)) for name, value in found.variables.items())
    settings = [Setting(*one, True, (one[1],)) for one in known if one[2] is not None]
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
    model = without_assignments(model) if model is not None else None
    return CommandLine(
        program,
        None if model is None else plain(model),
        tuple(map(_read, merged(settings))),
        found.container,
        tuple(masked(word) for word in positional if not is_unexpanded(word)),
        found.engine,
        model or "",
        tuple(word for word in positional if is_unexpanded(word)),
        found.others,
    )


def _read(setting: Setting) -> Setting:
    """Without marks in its value, which its words keep."""
    return replace(setting, value=plain(setting.value))


def _take(words: list[str], scopes: tuple[str, ...], wants_model: bool) -> tuple[Setting, list[str]]:
    """The flag that `words` begins with, and what is left. A flag that nobody knows takes the next word as its value,
    unless that looks like another flag, or may be the model that is still to come."""
    head, equals, given = words[0].partition("=")
    rest = words[1:]
    base, dot, path = head.partition(".")
    match = find_flag(base, scopes)
    if match is None or dot:
        alone = not rest or (match is None and (rest[0].startswith("-") or wants_model))
        taken = [given] if equals else [] if alone else [rest.pop(0)]
        name = spelling(head) if match is None else f"{match.name}.{path}"
        return Setting(name, taken[0] if taken else "true", match.known if match else None, words=tuple(taken)), rest
    kind = match.known.kind.name
    if kind == "switch":
        value = given
        if not equals:
            value = rest.pop(0) if rest and rest[0].lower() in ("true", "false") else "true"
        if match.negated and value.lower() in TRUE + FALSE:
            value = "false" if value.lower() in TRUE else "true"
        return Setting(match.name, value, match.known, words=(value,)), rest
    if equals:
        taken = [given]
    else:
        several = list(takewhile(lambda word: not word.startswith("-"), rest))
        taken = several if kind == "words" else rest[:1]
        rest = rest[len(taken) :]
    return Setting(match.name, " ".join(taken), match.known, words=tuple(taken)), rest
