"""Every kernel compiles ahead of time for GPUs that are not here, and spills no registers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.environment import child_environment
from tests.sampled import some_of

ROOT = Path(__file__).parents[2]
TARGETS = ["sm_90", *some_of(["gfx942", "gfx950"], 1)]
"""AMD's take turns at what they compile. What was never compiled before takes minutes."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("extent", ["sample", pytest.param("sweep", marks=pytest.mark.slow)])
def test_kernels_compile_without_spilling(target, extent):
    pytest.importorskip("triton", reason="compiling needs Triton; the references are tested without it")
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.compile_kernels", target, extent]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    found, sweep = [json.loads(line) for line in done.stdout.splitlines()], extent == "sweep"
    ended = [entry for entry in found if entry["to_the_end"]]
    assert {entry["kernel"].split()[0] for entry in ended} == {entry["kernel"].split()[0] for entry in found}
    assert ended == found or not sweep
    attention = [entry for entry in found if entry["kernel"].startswith("attention")]
    # of dtypes, head_dims, groups; decode and prefill, which take turns in a sample
    assert len(attention) == (2 * 2 * 4 * 3 if sweep else 2)
    prefill = [entry for entry in found if entry["kernel"].startswith("prefill")]
    assert len(prefill) == (target == "sm_90") * (24 if sweep else 1)
    names = {entry["kernel"] for entry in found if entry["kernel"].startswith("_")}
    of_two_ways = 11  # of all; what is launched in one way alone is gfx942's turn
    assert len(names) == (26 if sweep or target != "gfx950" else of_two_ways)
    gpt_oss = {entry["kernel"] for entry in found if entry["kernel"].startswith("gpt-oss")}
    kinds = 3 if sweep or target == "sm_90" else 2 if target == "gfx942" else 1  # AMD's take turns
    assert len(gpt_oss) == kinds * 2 + (target == "sm_90")
    recurrent = {entry["kernel"].split()[1] for entry in found if entry["kernel"].startswith("recurrent")}
    assert len(recurrent) == 6
    experts = {entry["kernel"].split()[1] for entry in found if entry["kernel"].startswith("experts")}
    # two that AMD's matrix units do not take; those of one token are gfx942's turn
    assert len(experts) == (10 if target == "sm_90" else 8 if sweep or target == "gfx942" else 7)
    assert len([entry for entry in found if entry["kernel"].startswith("experts")]) >= (24 if sweep else 7)
    adapters = {entry["kernel"].split()[1] for entry in found if entry["kernel"].startswith("adapters")}
    assert len(adapters) == (2 if target == "gfx950" and not sweep else 4)  # linears that add them are gfx942's turn
    latents = [entry for entry in found if entry["kernel"].startswith("latents")]
    assert len(latents) >= (8 if sweep else 5)
    latents = [entry for entry in ended if entry in latents]
    # the sums of 64 rows over a latent leave few registers for all else, and are faster so than those of 32 on an H200
    assert all(entry["spills"] <= 1024 for entry in latents)
    adapting = [entry for entry in ended if entry["kernel"].startswith(("adapters _skinny", "adapters _tiled"))]
    # bytes, behind the loop; AMD's are scalar registers, which lanes of a vector register hold
    assert all(entry["spills"] <= 16 for entry in adapting)
    few = [entry for entry in ended if "decode" in entry["kernel"] and entry["early"]]
    assert all(entry["spills"] <= 272 for entry in few)  # of a first tile that waits for the query, 2% faster
    assert [entry for entry in ended if entry["spills"] and entry not in (*latents, *adapting, *few)] == []
    of_slots = [entry for entry in ended if entry["kernel"].startswith(("adapters _s", "adapters _e"))]
    assert of_slots
    assert not any(entry["cached"] for entry in of_slots)  # which slots are in use is what this step wrote
    linears = [entry for entry in ended if entry["kernel"].startswith(("linear", "tiled linear"))]
    assert linears
    assert all(entry["early"] for entry in linears) or target != "sm_90", linears  # weights, beside the kernel in front
