"""The checks of attention for a GPU: on a CPU, through Triton's interpreter, they run and agree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.environment import child_environment

SCRIPT = Path(__file__).parents[2] / "bench" / "check_kernels.py"


@pytest.mark.parametrize(
    "flags", [["--shard", "1/4"], pytest.param([], marks=pytest.mark.slow)], ids=lambda flags: " ".join(flags) or "all"
)
def test_a_toy_run_launches_every_kind_of_kernel(flags: list[str], tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="kernels need Triton")
    command = [sys.executable, "-m", "tests.kernels.interpreter", str(SCRIPT), "--smoke", *flags]
    environment = {**child_environment(), "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert " 0 failed" in done.stdout
