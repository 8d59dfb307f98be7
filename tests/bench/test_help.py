"""Every script of bench/ starts, as far as its --help, without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from runpy import run_path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "bench").glob("*.py"))
NO_COMMANDS = {"kernel_sweeps.py", "paged_batch.py", "planner_fit.py", "server_process.py", "timing.py", "tuning.py"}
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
