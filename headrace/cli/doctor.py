"""`headrace doctor`: shows the findings of advice/doctor as a table or as JSON, and judges nothing itself."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.advice.doctor.checkup import examine
from headrace.advice.doctor.finding import Finding, Severity
from headrace.advice.doctor.machine import Machine
from headrace.advice.doctor.survey import Survey
from headrace.cli.arguments import FlagParser
from headrace.environment import environment
from headrace.errors import ConfigError
from headrace.knobs import check_knobs, knob

if TYPE_CHECKING:
    from rich.console import Console

EXAMPLES = """\
  headrace doctor
  headrace doctor --model-size 141GB
  headrace doctor --json | jq '.findings[] | select(.severity == "hurts")'"""
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", re.IGNORECASE)
STYLES = {Severity.HURTS: "bold red", Severity.NOTE: "yellow", Severity.UNKNOWN: "dim", Severity.OK: "green"}
WIDEST = 120
MARGIN = 9


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Holds the command's flags."""

    json: bool = knob(
        False, "Print JSON: the machine, and each finding with id, severity, seen, cost and fix.", group="output"
    )
    model_size: str | None = knob(
        None, "Size of the weights to be served (16GB, 131GiB): checks that there is room for them.", group="model"
    )

    def __post_init__(self) -> None:
        check_knobs(self)
        self.model_bytes()

    def model_bytes(self) -> int | None:
        """Return --model-size in bytes. Raises ConfigError where it cannot be read."""
        if self.model_size is None:
            return None
        match = SIZE.fullmatch(self.model_size.strip())
        if match is None:
            raise ConfigError(f"--model-size must look like 16GB, 131GiB or 16000000000, got {self.model_size!r}")
        number, unit, binary = match.groups()
        power = "KMGT".index(unit.upper()) + 1 if unit else 0
        return int(float(number) * (1024 if binary else 1000) ** power)


def build_parser() -> FlagParser:
    """Return the parser of the command's flags."""
    summary = "Check this machine for what would slow an engine down or keep it from starting, and say how to mend it."
    parser = FlagParser("doctor", f"{summary} The exit code is 1 if something hurts.", EXAMPLES, model=False)
    parser.add_knobs(DoctorOptions)
    return parser


def main(argv: list[str]) -> int:
    """Run the command; the exit code is 1 where something hurts."""
    options = DoctorOptions(**vars(build_parser().parse(argv)))
    with _spinner(quiet=options.json):
        survey = Survey(Machine(environment()), options.model_bytes())
        findings = examine(survey)
    if options.json:
        print(json.dumps(as_json(survey, findings), indent=2))
    else:
        from rich.console import Console

        # Colours and width come from the terminal; a very wide one is hard to read across.
        console = Console(highlight=False)
        console.width = min(console.width, WIDEST)
        show(console, survey, findings)
    return 1 if any(finding.severity is Severity.HURTS for finding in findings) else 0


@contextlib.contextmanager
def _spinner(quiet: bool) -> Iterator[None]:
    """Importing torch in the child takes seconds."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status("examining the machine"):
        yield


def as_json(survey: Survey, findings: Sequence[Finding]) -> dict[str, object]:
    """Return what --json prints."""
    return {
        "machine": {
            "gpus": [{"index": gpu.index, "name": gpu.name, "memory": gpu.memory_total} for gpu in survey.gpus],
            "visible": [gpu.index for gpu in survey.visible],
            "vendor": survey.vendor or None,
            "driver": survey.driver or None,
            "torch": survey.torch.version if survey.torch else None,
            "container": survey.container,
            "virtual": survey.virtual,
        },
        "hurts": sum(finding.severity is Severity.HURTS for finding in findings),
        "findings": [{"id": finding.id} | dataclasses.asdict(finding) for finding in findings],
    }


def title(survey: Survey) -> str:
    """Return the machine in a line: `8 x AMD Instinct MI300X, torch 2.11.0+rocm7.2, in a container`."""
    names = Counter(gpu.name for gpu in survey.gpus)
    parts = [f"{count} x {name}" for name, count in names.items()] or ["no GPU"]
    if survey.gpus and len(survey.visible) < len(survey.gpus):
        parts[-1] += f" ({len(survey.visible)} visible)"
    parts.append(f"torch {survey.torch.version}" if survey.torch else "no torch")
    if survey.container or survey.virtual:
        parts.append("in a container" if survey.container else "in a virtual machine")
    return ", ".join(parts)


def show(console: Console, survey: Survey, findings: Sequence[Finding]) -> None:
    """Print what hurts first, each finding with its cost and its fix; what is well or unknown gets a line each."""
    from rich.text import Text

    def block(severity: Severity, *lines: Text) -> None:
        """The severity in a margin, the lines folded beside it."""
        console.print()
        parts = [part for line in lines for part in line.wrap(console, console.width - MARGIN)]
        for number, part in enumerate(parts):
            part.rstrip()
            label = "" if number else severity.value
            console.print(Text.assemble((label.ljust(MARGIN), STYLES[severity]), part))

    console.print(Text.assemble(("headrace doctor", "bold"), f": {title(survey)}"))
    groups = {severity: [finding for finding in findings if finding.severity is severity] for severity in Severity}
    for finding in groups[Severity.HURTS] + groups[Severity.NOTE]:
        id = "" if finding.seen.startswith(finding.id) else f"  [{finding.id}]"
        block(finding.severity, Text.assemble((finding.seen, "bold"), (id, "dim")), Text(finding.cost))
        if finding.fix:
            # Left to the terminal to fold, so that it can be copied in one piece.
            fix = Text.assemble((" " * MARGIN + "$ ", "dim"), (finding.fix, "cyan"))
            console.print(fix, soft_wrap=True)
    if groups[Severity.UNKNOWN]:
        lines = [Text(f"{finding.id}: {finding.seen}", "dim") for finding in groups[Severity.UNKNOWN]]
        block(Severity.UNKNOWN, *lines)
    if groups[Severity.OK]:
        block(Severity.OK, Text(", ".join(finding.id for finding in groups[Severity.OK]), "dim"))
    hurting, notes = len(groups[Severity.HURTS]), len(groups[Severity.NOTE])
    verdict = f"{hurting} {'thing hurts' if hurting == 1 else 'things hurt'}" if hurting else "nothing hurts"
    counts = {"note" if notes == 1 else "notes": notes}
    counts |= {severity.value: len(groups[severity]) for severity in (Severity.UNKNOWN, Severity.OK)}
    rest = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    style = "bold red" if hurting else "bold green"
    console.print(Text.assemble("\n", (verdict, style), f" ({rest})." if rest else "."))
