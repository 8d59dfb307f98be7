"""All checks together: order, and that no file, command or variable of whatever content makes one fail."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.advice.doctor import checkup
from headrace.advice.doctor.finding import TEXTS, Finding, Severity
from headrace.advice.doctor.machine import Machine, Unreadable
from headrace.advice.doctor.software import PROBE
from headrace.advice.doctor.survey import Survey
from tests.advice.doctor.made_up import MadeUp

DOCS = Path(__file__).parents[3] / "docs" / "planning.md"


@pytest.mark.parametrize("vendor", ["", "nvidia", "amd"])
def test_a_machine_in_good_health(here: MadeUp, vendor: str) -> None:
    here.made(f"{vendor} 8" if vendor else "")
    assert {finding.severity for finding in here.findings()} == {Severity.OK}


def test_the_worst_comes_first(here: MadeUp) -> None:
    here.nvidia().environment |= {"NCCL_DEBUG": "INFO", "NCCL_P2P_DISABLE": "1"}
    here.write("/proc/sys/kernel/numa_balancing", "1")
    here.remove("/proc/meminfo")
    severities = [finding.severity for finding in here.findings()]
    assert severities == sorted(severities, key=list(Severity).index)
    assert here.ids(Severity.HURTS) == ["numa-balancing", "NCCL_P2P_DISABLE"]


def test_findings_say_what_to_do(here: MadeUp) -> None:
    here.amd(2).environment |= {"NCCL_P2P_DISABLE": "1", "HIP_LAUNCH_BLOCKING": "1"}
    here.write("/proc/sys/kernel/numa_balancing", "1")
    for finding in here.findings():
        if finding.severity is Severity.HURTS:
            assert finding.cost.endswith(".")
            assert finding.fix


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    def run(command: object, seconds: float) -> str:
        raise Unreadable("no command runs here")

    findings = checkup.examine(Survey(Machine({}, root=tmp_path / "none", run=run)))
    assert not [finding for finding in findings if "the check failed" in finding.seen]


def test_a_check_that_fails_is_a_finding(here: MadeUp, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(survey: Survey) -> Iterator[Finding]:
        raise ZeroDivisionError("oh")

    monkeypatch.setitem(checkup.CHECKS, "cpu-cores", broken)
    finding = here.finding("cpu-cores")
    assert (finding.severity, finding.seen) == (Severity.UNKNOWN, "the check failed: ZeroDivisionError: oh")
    assert here.finding("hub-cache").severity is Severity.OK


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
@pytest.mark.parametrize("text", [None, "", "-1\n", "no number\n[x]: - kB ::\n", b"\xff\x00\n1 2"])
def test_odd_and_missing_files_and_outputs(here: MadeUp, vendor: str, text: str | bytes | None) -> None:
    here.made(vendor)
    for path in [path for path in here.root.rglob("*") if path.is_file() and not path.is_symlink()]:
        before = path.read_bytes()
        if text is None:
            path.unlink()
        else:
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        assert not failed(here), path
        path.write_bytes(before)
    for name, output in list(here.commands.items()) if text is not None else ():
        here.commands[name] = text if isinstance(text, str) else text.decode(errors="replace")
        assert not failed(here), name
        here.commands[name] = output
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NCCL_MIN_NCHANNELS"):
        here.environment[name] = str(text)
        assert not failed(here), name


def failed(here: MadeUp) -> list[Finding]:
    return [finding for finding in here.findings() if "the check failed" in finding.seen]


def test_every_text_is_some_checks() -> None:
    folder = Path(checkup.__file__).parent
    source = "".join(path.read_text() for path in folder.glob("*.py"))
    made = {f"driver-{state}-{vendor}" for state in ("silent", "missing") for vendor in ("nvidia", "amd")}
    assert {name for name in TEXTS if f'"{name}"' in source} | made == set(TEXTS)


def test_the_page_names_every_check() -> None:
    page = DOCS.read_text()
    assert not [name for name in checkup.CHECKS if f"`{name}`" not in page]


def test_the_probe_of_torch_runs() -> None:
    """The one command that is our own: on any machine it prints a report."""
    report = json.loads(Machine({}).command(sys.executable, "-c", PROBE, seconds=120).splitlines()[-1])
    assert report["seconds"] > 0
