"""Runs interpreted/ in processes of their own, two at a time: Triton reads TRITON_INTERPRET when it is imported."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.config import child_environment

FOLDER = Path(__file__).parent / "interpreted"


def run(file):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(FOLDER / file)]
    environment = {**child_environment(), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=560)


@pytest.fixture(scope="module")
def runs(request):
    """file -> its run, of the files that were asked for"""
    pytest.importorskip("triton", reason="kernels need Triton; the references are tested without it")
    asked = [item.callspec.params["file"] for item in request.session.items if item.path == Path(__file__)]
    with ThreadPoolExecutor(2) as pool:
        yield {file: pool.submit(run, file) for file in asked}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_triton_kernels_equal_their_references(file, runs):
    done = runs[file].result()
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
