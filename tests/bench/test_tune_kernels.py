"""The tuning scripts launch kernels by hand: on a CPU, through Triton's interpreter, each runs and agrees with fp32."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.config import child_environment

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize(("script", "flags"), [("tune_linears.py", ["--out", "table.json"]), ("tune_experts.py", [])])
def test_a_toy_run_launches_every_kind_of_kernel(script: str, flags: list[str], tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="kernels need Triton")
    command = [sys.executable, str(BENCH / script), "--smoke", *flags]
    environment = {**child_environment(), "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "WRONG" not in done.stdout
    assert "block_m 1 down" in done.stdout or "1 tokens" in done.stdout
