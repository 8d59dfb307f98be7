"""`headrace doctor`: shows the findings of advice/doctor as a table or as JSON, and judges nothing itself."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.advice.doctor.checkup import examine
from headrace.advice.doctor.finding import Finding, Severity
from headrace.advice.doctor.machine import Machine
from headrace.advice.doctor.survey import Survey, take_survey
from headrace.cli.arguments import FlagParser
from headrace.config import check_knobs, environment, knob
from headrace.errors import ConfigError

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
    json: bool = knob(
        False, "Print JSON: the machine, and each finding with id, severity, seen, cost and fix.", group="output"
    )
    model_size: str | None = knob(
        None, "The weights that are to be served (16GB, 131GiB): is there room for them?", group="model"
    )

    def __post_init__(self) -> None:
        check_knobs(self)
        self.model_bytes()

    def model_bytes(self) -> int | None:
        if self.model_size is None:
            return None
        match = SIZE.fullmatch(self.model_size.strip())
        if match is None:
            raise ConfigError(f"--model-size must look like 16GB, 131GiB or 16000000000, got {self.model_size!r}")
        number, unit, binary = match.groups()
        power = "KMGT".index(unit.upper()) + 1 if unit else 0
        return int(float(number) * (1024 if binary else 1000) ** power)


def build_parser() -> FlagParser:
    summary = "Check this machine: what would hurt an engine on it, what that costs, and how to mend it."
    parser = FlagParser("doctor", f"{summary} Exit code 1 if something hurts.", EXAMPLES, model=False)
    parser.add_knobs(DoctorOptions)
    return parser


def main(argv: list[str]) -> int:
    options = DoctorOptions(**vars(build_parser().parse(argv)))
    with _spinner(quiet=options.json):
        survey = take_survey(Machine(environment()), options.model_bytes())
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
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }


def title(survey: Survey) -> str:
    """`8 x AMD Instinct MI300X, torch 2.11.0+rocm7.2, in a container`."""
    names: dict[str, int] = {}
    for gpu in survey.gpus:
        names[gpu.name] = names.get(gpu.name, 0) + 1
    parts = [f"{count} x {name}" for name, count in names.items()] or ["no GPU"]
    if survey.gpus and len(survey.visible) < len(survey.gpus):
        parts[-1] += f" ({len(survey.visible)} visible)"
    parts.append(f"torch {survey.torch.version}" if survey.torch else "no torch")
    if survey.container or survey.virtual:
        parts.append("in a container" if survey.container else "in a virtual machine")
    return ", ".join(parts)


def show(console: Console, survey: Survey, findings: Sequence[Finding]) -> None:
    """Trouble first, each with its cost and its fix; what is well, and what cannot be known here, in a line each."""
    from rich.text import Text

    def block(severity: Severity, *lines: Text) -> None:
        """The severity in a margin, the lines folded beside it."""
        console.print()
        folded = [part for line in lines for part in line.wrap(console, console.width - MARGIN)]
        for number, line in enumerate(folded):
            label = severity.value if number == 0 else ""
            line.rstrip()
            console.print(Text.assemble((label.ljust(MARGIN), STYLES[severity]), line))

    console.print(Text.assemble(("headrace doctor", "bold"), f": {title(survey)}"))
    for finding in findings:
        if finding.severity in (Severity.HURTS, Severity.NOTE):
            id = "" if finding.seen.startswith(finding.id) else f"  [{finding.id}]"
            seen = Text.assemble((finding.seen, "bold"), (id, "dim"))
            block(finding.severity, seen, Text(finding.cost))
            if finding.fix:
                # Left to the terminal to fold, so that it can be copied in one piece.
                fix = Text.assemble((" " * MARGIN + "$ ", "dim"), (finding.fix, "cyan"))
                console.print(fix, soft_wrap=True)
    dark = [f"{finding.id}: {finding.seen}" for finding in findings if finding.severity is Severity.UNKNOWN]
    if dark:
        block(Severity.UNKNOWN, *(Text(line, "dim") for line in dark))
    well = [finding.id for finding in findings if finding.severity is Severity.OK]
    if well:
        block(Severity.OK, Text(", ".join(well), "dim"))
    hurting = sum(finding.severity is Severity.HURTS for finding in findings)
    verdict = f"{hurting} {'thing hurts' if hurting == 1 else 'things hurt'}" if hurting else "nothing hurts"
    console.print(
        Text.assemble("\n", (verdict, "bold red" if hurting else "bold green"), f"{_rest(findings, hurting)}.")
    )


def _rest(findings: Sequence[Finding], hurting: int) -> str:
    counts = []
    for severity, one, many in (
        (Severity.NOTE, "note", "notes"),
        (Severity.UNKNOWN, "unknown", "unknown"),
        (Severity.OK, "ok", "ok"),
    ):
        count = sum(finding.severity is severity for finding in findings)
        if count:
            counts.append(f"{count} {one if count == 1 else many}")
    return f" ({', '.join(counts)})" if counts else ""
