"""Runs interpreted/ in a process of its own, since Triton reads TRITON_INTERPRET when it is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.environment import child_environment

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.timeout(3600)  # each test in there has the usual limit
def test_triton_kernels_equal_their_references(pytestconfig):
    pytest.importorskip("triton", reason="kernels need Triton; the references are tested without it")
    plugins = ("-p", "no:cacheprovider", "-p", "no:xdist")
    marks = ("-m", pytestconfig.getoption("markexpr"))
    command = [sys.executable, "-m", "pytest", *plugins, *marks, str(FOLDER)]
    environment = {**child_environment(), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
