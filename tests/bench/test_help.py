"""Every script of bench/ starts, as far as its --help, without a GPU; docs name only scripts and parts that exist."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from runpy import run_path

import pytest
from h200 import KINDS, PARTS

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "bench").glob("*.py"))
NO_COMMANDS = {"kernel_sweeps.py", "peer_sums.py", "server_process.py"}
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


@pytest.mark.parametrize(
    "page", [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")], ids=lambda page: str(page.relative_to(ROOT))
)
def test_docs_name_scripts_and_parts_that_there_are(page: Path) -> None:
    text = page.read_text()
    assert [name for name in re.findall(r"\bbench/[\w/]+\.\w+", text) if not (ROOT / name).is_file()] == []
    parts = [part for names in re.findall(r"h200\.py --part ([\w,-]+)", text) for part in names.split(",")]
    assert set(parts) <= {*PARTS, *KINDS, "PART"}
