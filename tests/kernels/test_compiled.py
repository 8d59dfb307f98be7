"""Every kernel compiles ahead of time for GPUs that are not here, and attention spills no registers."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.config import child_environment

ROOT = Path(__file__).parents[2]


def run(target):
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.compile_kernels", target]
    return subprocess.run(command, capture_output=True, text=True, env=child_environment(), cwd=ROOT, timeout=850)


@pytest.fixture(scope="module")
def runs(request):
    """target -> its run, of the targets that were asked for, two at a time"""
    pytest.importorskip("triton", reason="compiling needs Triton; the references are tested without it")
    asked = [item.callspec.params["target"] for item in request.session.items if item.path == Path(__file__)]
    with ThreadPoolExecutor(2) as pool:
        yield {target: pool.submit(run, target) for target in asked}


@pytest.mark.compiles
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", ["sm_90", "gfx942", "gfx950"])
def test_kernels_compile_without_spilling(target, runs):
    done = runs[target].result()
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    attention = [entry for entry in found if entry["kernel"].startswith("attention")]
    assert len(attention) == 2 * 2 * 3 * 3  # decode and prefill, dtypes, head_dims, groups
    assert len([entry for entry in found if entry["kernel"].startswith("prefill")]) == 24 * (target == "sm_90")
    assert len({entry["kernel"] for entry in found if entry["kernel"].startswith("_")}) == 13
    assert len([entry for entry in found if entry["kernel"].startswith("experts")]) >= 24
    assert [entry for entry in found if entry["spills"]] == []
