"""A kernel whose like was launched before is given the same arguments, without Triton looking at them again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.config import child_environment

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", name="found", params=["sm_90", "gfx942"])
def run(request):
    pytest.importorskip("triton", reason="launching needs Triton")
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.launches", request.param]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout) | {"target": request.param}


def test_a_second_launch_is_given_what_the_first_was(found):
    assert len(found["first"]) == 2  # attention in parts, and what puts them together
    assert found["again"] == found["first"]


def test_another_alignment_and_another_type_are_other_kernels(found):
    assert found["elsewhere"] == found["first"]
    assert [launch[:3] for launch in found["other"]] == [launch[:3] for launch in found["first"]]
    assert found["kernels"][:3] == [1, 3, 5]


def test_memory_that_31_bits_do_not_address_is_another_kernel_where_triton_makes_one_for_less(found):
    """AMD's: buffer loads, whose offsets have 32 bits"""
    assert found["kernels"][3] == (4 if found["target"] == "gfx942" else 3)
