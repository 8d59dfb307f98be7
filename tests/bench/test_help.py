"""Every script of bench/ starts, as far as its --help, without a GPU; and the cases' command checks its parts."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from runpy import run_path

import pytest
from h200_cases import ON_A_CPU, PARTS

SCRIPTS = sorted((Path(__file__).parents[2] / "bench").glob("*.py"))
NO_COMMANDS = {"graph_timing.py", "kernel_sweeps.py", "planner_fit.py"}
"""are imported by others"""


@pytest.mark.parametrize(
    "script", [path for path in SCRIPTS if path.name not in NO_COMMANDS], ids=lambda path: str(path.name)
)
def test_help(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process: torch is imported once."""
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as ended:
        run_path(str(script), run_name="__main__")
    assert not ended.value.code
    assert capsys.readouterr().out.startswith(f"usage: {script.name}")


def test_parts_lead_to_functions() -> None:
    for place in PARTS.values():
        module, function = place.split(".")
        assert callable(getattr(import_module(f"h200_cases_parts.{module}"), function))
    assert set(ON_A_CPU) < set(PARTS)


def test_an_unknown_part_is_named() -> None:
    script = next(path for path in SCRIPTS if path.name == "h200_cases.py")
    done = subprocess.run([sys.executable, str(script), "--part", "graph"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "unknown part graph; parts are graphs, memory" in done.stderr
