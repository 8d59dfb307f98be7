"""A kernel whose like was launched before is given the same arguments, without Triton looking at them again; and so is
what a later layer of a step repeats."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.environment import child_environment

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


def test_a_number_compiled_for_its_value_does_not_meet_another_numbers_kernel(found):
    """Of the first number 1 is a kernel of its own, and so is what 16 divides; of the second none is."""
    numbers = ((1, 5, 1), (3, 5, 2), (3, 16, 2), (16, 5, 3), (32, 7, 3), (5, 1, 3), (1, 7, 3))
    assert found["numbers"] == [[told, free, kernels, [told, free]] for told, free, kernels in numbers]


def test_memory_that_31_bits_do_not_address_is_another_kernel_where_triton_makes_one_for_less(found):
    """AMD's: buffer loads, whose offsets have 32 bits"""
    assert found["kernels"][3] == (4 if found["target"] == "gfx942" else 3)


def test_a_later_layer_launches_what_it_would_have_launched_alone(found):
    for step, (recorded, pairs) in found["layers"].items():
        assert recorded, step
        for repeated, alone in pairs:
            assert repeated == alone, step
            assert all(any(part in str(repeated) for part in (one, "own")) for one in ("out", "q", "cache", "sinks"))


def test_the_steps_are_of_all_launches_that_attention_has(found):
    launches = {step: len(pairs[0][0]) for step, (_, pairs) in found["layers"].items()}
    parts = {"decodes in parts": 2, "prompts beside decodes": 3, "of an fp8 cache": 4, "a lone prompt": 1}
    whole = {"decodes in parts": 2, "prompts beside decodes": 4, "of an fp8 cache": 4, "a lone prompt": 2}
    assert launches == (parts if found["target"] == "sm_90" else whole)


def test_a_call_whose_tensor_was_read_elsewhere_is_not_repeated():
    import torch

    from headrace.kernels.launch import Launch, Recording

    def run(*given, stream):
        pass

    q, out = torch.zeros(4), torch.zeros(4)
    made = [Launch(run, (out, q), [out.data_ptr(), q.data_ptr()])]
    assert Recording.of(made, (out, q, None)) is not None
    assert Recording.of(made, (out, q.clone())) is None
    assert Recording.of([], (out, q)) is None


def test_a_recording_keeps_no_tensor_of_the_layer_it_is_of():
    import weakref

    import torch

    from headrace.kernels.launch import Launch, Recording

    def run(*given, stream):
        pass

    q, out, table = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    made = [Launch(run, (out, q, table), [one.data_ptr() for one in (out, q, table)])]
    recording = Recording.of(made, (out, q))
    held = [weakref.ref(one) for one in (q, out, table)]
    del q, out, table, made
    assert [one() is not None for one in held] == [False, False, True]
    assert recording is not None
