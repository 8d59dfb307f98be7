"""Scripts that launch kernels by hand: on a CPU, through Triton's interpreter, each runs and agrees with fp32."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.environment import child_environment

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize(
    ("script", "flags", "last"),
    [
        ("time_kernels.py", [], "kernels/attention.py, e5m2:"),
        ("check_kernels.py", ["--shard", "1/4"], " 0 failed"),
        pytest.param("check_kernels.py", [], " 0 failed", marks=pytest.mark.slow),
    ],
)
def test_a_toy_run_launches_every_kind_of_kernel(script: str, flags: list[str], last: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="kernels need Triton")
    command = [sys.executable, "-m", "tests.kernels.interpreter", str(BENCH / script), "--smoke", *flags]
    environment = {**child_environment(), "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "WRONG" not in done.stdout
    assert last in done.stdout
