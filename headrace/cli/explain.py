"""`headrace explain`: prints what each flag of a vLLM command line does, as a table or as JSON. Loads no torch."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.cli.arguments import FlagParser, build_config
from headrace.errors import ConfigError
from headrace.knobs import check_knobs, knob

if TYPE_CHECKING:
    from rich.console import Console

    from headrace.advice.explain.explain import Answer, Explanation

EXAMPLES = """\
  headrace explain 'VLLM_ROCM_USE_AITER=1 vllm serve openai/gpt-oss-120b --kv-cache-dtype fp8 -tp 1' --gpu mi300x
  headrace explain 'docker run -e NCCL_MIN_NCHANNELS=112 rocm/vllm vllm serve ./model -tp 8' --json
  headrace explain - < start.sh"""
COLOURS = {
    "helps": "green",
    "fine": "default",
    "depends": "cyan",
    "not needed": "yellow",
    "no effect": "yellow",
    "costs": "red",
    "wrong": "bold red",
    "unknown": "magenta",
}
WIDEST = 150
"""Columns of the table; longer lines are hard to read."""


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """Holds the command's own flags."""

    gpu: str | None = knob(
        None,
        "The GPUs that the line is for (mi300x, h200, ...), or `auto` for those of this machine. Default: MI300X where "
        "the line sets AMD's variables, else none in particular.",
        group="explain",
    )
    json: bool = knob(False, "Print JSON.", group="explain")

    def __post_init__(self) -> None:
        check_knobs(self)


def build_parser() -> FlagParser:
    """Return the parser of the command's own flags."""
    parser = FlagParser(
        "explain 'COMMAND LINE'",
        "Explain a vLLM command line: what each flag and variable does, on which hardware, whether it helps, what is "
        "wrong with it and what becomes of it in headrace. Then write a better line.",
        EXAMPLES,
        model=False,
    )
    parser.add_knobs(ExplainOptions)
    return parser


def main(argv: list[str]) -> int:
    """Run the command. Raises ConfigError where there is no command line to explain."""
    words, own = split_own(argv)
    options = build_config(ExplainOptions, build_parser().parse(own))
    text = command_text(words)

    from headrace.advice.explain.explain import explain
    from headrace.planner.chips import find_chip, this_machine

    chip = None
    if options.gpu is not None:
        chip = this_machine()[0] if options.gpu == "auto" else find_chip(options.gpu)
    explanations = explain(text, chip)
    if options.json:
        records = [explanation.to_json() for explanation in explanations]
        print(json.dumps(records[0] if len(records) == 1 else records, indent=2))
        return 0

    from rich.console import Console

    console = Console(highlight=False)
    console.width = max(80, min(console.width, WIDEST))
    for number, explanation in enumerate(explanations):
        if number:
            console.print()
        show(console, explanation)
    return 0


def split_own(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into the command line and our own flags, which may stand before or behind it."""
    if argv[:1] in (["-h"], ["--help"]):
        return [], argv[:1]
    words, own = [], []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word.partition("=")[0] in ("--gpu", "--json", "--no-json"):
            own.append(word)
            if word == "--gpu":
                own += [rest.pop(0)] if rest else []
        else:
            words.append(word)
    return words, own


def command_text(words: list[str]) -> str:
    """Return the shell line: one quoted word, several words, or standard input. Raises ConfigError for none."""
    if words == ["-"] or (not words and not sys.stdin.isatty()):
        return sys.stdin.read()
    if not words:
        raise ConfigError("no command line given; put it in quotes: headrace explain 'vllm serve MODEL --flags'")
    return words[0] if len(words) == 1 else shlex.join(words)


def show(console: Console, explanation: Explanation) -> None:
    """Print a table of the settings, then what concerns the whole line, then the better lines."""
    from rich.markup import escape

    case = explanation.case
    gpu = case.chip.title if case.chip is not None else "any GPU (--gpu names one)"
    guessed = ", as the variables are AMD's (--gpu names another)" if case.chip_guessed else ""
    title = f"{case.line.program} {case.line.model or ''}".strip()
    console.print(f"[bold]{escape(title)}[/bold] on {gpu}{guessed}", soft_wrap=True)
    if explanation.answers:
        console.print(_table(explanation.answers))
    for finding in explanation.findings:
        console.print(f"[{COLOURS[finding.verdict]}]{finding.title}:[/] {escape(finding.text)}")
    if explanation.claims:
        from headrace.advice.explain.explain import CLAIMS

        console.print("\n[bold]Claims of guides that do not hold, or not as they are made[/bold]")
        for claim in explanation.claims:
            console.print(f"  - {escape(CLAIMS[claim])}")
    console.print("\n[bold]In headrace[/bold]")
    for line in explanation.notice.replace(" (`headrace explain` says more)", "").splitlines():
        indent = "    " if line.startswith("  ") else "  "
        console.print(f"{indent}{escape(line.strip().removeprefix('headrace: note: '))}")
    for gap in explanation.gaps:
        console.print(f"  [yellow]{escape(gap)}[/yellow]")
    for engine, line in explanation.better.items():
        console.print(f"\n[bold]A better line for {engine}[/bold]")
        console.print(f"  {escape(line)}", soft_wrap=True)


def _table(answers: tuple[Answer, ...]) -> object:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, expand=True, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("setting", max_width=WIDEST // 3, overflow="fold")
    table.add_column("here", no_wrap=True)
    table.add_column("what it does, what of it, and better", ratio=1)
    for answer in answers:
        where = "" if answer.hardware == "any" else f" [dim]({answer.hardware} only)[/dim]"
        cell = f"[dim]{escape(answer.does)}[/dim]{where}"
        if answer.why:
            cell += f"\n{escape(_sentence(answer.why))}"
        if answer.better:
            cell += f"\n[bold]better: {'leave it out' if answer.better == 'drop' else escape(answer.better)}[/bold]"
        table.add_row(escape(str(answer.setting)), f"[{COLOURS[answer.verdict]}]{answer.verdict}[/]", cell)
    return table


def _sentence(text: str) -> str:
    """With a capital and a full stop; names of flags stay as they are."""
    first = text[0].upper() + text[1:] if text[0].isalpha() and text.split()[0].islower() else text
    return first if first.endswith((".", ".)", "?")) else first + "."
