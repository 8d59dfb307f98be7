"""What a started engine expects of itself, from its flags and from what its ranks reported."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.model_config import ModelConfig
from headrace.planner.catalogue import catalogue
from headrace.planner.decisions import decide_before_load
from headrace.planner.plan import make_plan
from headrace.planner.plan_request import PlanRequest
from headrace.planner.served import Expected, expect
from headrace.step import WorkerFacts

MODEL = ModelConfig.from_dict(catalogue()["llama-3.1-8b"].config)
H200 = WorkerFacts("cuda", "NVIDIA H200", 150_109_106_995, 10**11, 2**21, 16 * 2**30, "TRITON_ATTN")


def expected(fact: WorkerFacts = H200, num_blocks: int = 50_000, device: str = "cuda", **given: Any) -> Expected | None:
    config = decide_before_load(EngineConfig(model="llama-3.1-8b", **given), MODEL, device)[0]
    return expect(config, MODEL, [fact], num_blocks)


def test_nothing_is_expected_of_traffic_that_nobody_knows() -> None:
    assert expected() is None
    assert expected(objective="latency") is None


def test_the_same_prediction_as_the_plan() -> None:
    found = expected(expected_input_len=512, expected_output_len=128, expected_concurrency=4)
    assert found is not None
    made = make_plan(PlanRequest(model="llama-3.1-8b", gpu="h200", input_len=512, output_len=128, concurrency=4))
    assert made.prediction is not None
    assert found.prediction.itl_ms == pytest.approx(made.prediction.itl_ms, rel=0.1)
    assert str(found).startswith("expected on NVIDIA H200 SXM, 512 in / 128 out, 4 at once: ")


def test_what_is_left_open_is_as_in_a_plan() -> None:
    found = expected(expected_output_len=100)
    assert found is not None
    assert (found.workload.input_len, found.workload.output_len, found.workload.concurrency) == (1024, 100, 32)


def test_quantized_weights_are_read_sooner() -> None:
    plain, rounded = (
        expected(expected_concurrency=1, expected_input_len=64, quantization=form) for form in (None, "fp8")
    )
    assert plain is not None
    assert rounded is not None
    assert rounded.prediction.itl_ms < 0.8 * plain.prediction.itl_ms


def test_a_cpu_is_known_too() -> None:
    cpu = WorkerFacts("cpu", "CPU", 64 * 2**30, 10**10, 2**21, 16 * 2**30, "TORCH_SDPA")
    found = expected(cpu, device="cpu", expected_concurrency=1)
    assert found is not None
    assert found.prediction.itl_ms > 20


@pytest.mark.parametrize(
    ("fact", "num_blocks"),
    [(WorkerFacts("cuda", "Some GPU 9000", 10**11, 0, 0, 0, "ANY"), 50_000), (H200, 10)],
    ids=["unknown chip", "no room"],
)
def test_no_prediction_is_no_failure(fact: WorkerFacts, num_blocks: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert expected(fact, num_blocks, expected_concurrency=4) is None
    assert "no prediction: " in caplog.text
