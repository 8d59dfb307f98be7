"""What a started engine expects of itself, from its flags and from what its ranks reported."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.cache_groups import same_layout
from headrace.config import EngineConfig
from headrace.model_config import ModelConfig
from headrace.planner.catalogue import catalogue
from headrace.planner.cost import StepWork
from headrace.planner.decisions import decide_before_load
from headrace.planner.plan import make_plan
from headrace.planner.plan_request import PlanRequest
from headrace.planner.record import Decision
from headrace.planner.served import Expected, expect, predict_memory, predict_steps, report_memory
from headrace.planner.settings import all_settings
from headrace.step import WorkerFacts

MODEL, SPARSE = (ModelConfig.from_dict(catalogue()[name].config) for name in ("llama-3.1-8b", "qwen3-30b-a3b"))
LAYOUT = same_layout(16, 2**21)
H200 = WorkerFacts("cuda", "NVIDIA H200", 150_109_106_995, 10**11, LAYOUT, 16 * 2**30, "TRITON_ATTN")


def expected(fact: WorkerFacts = H200, num_pages: int = 50_000, device: str = "cuda", **given: Any) -> Expected | None:
    config = decide_before_load(EngineConfig(model="llama-3.1-8b", **given), MODEL, device)[0]
    return expect(config, MODEL, [fact], num_pages)


@pytest.mark.parametrize(
    ("given", "lengths", "at_once", "source"),
    [
        ({}, (1024, 256), 32, "usual for interactive; --expected-input-len, "),
        ({"objective": "latency"}, (1024, 256), 1, "usual for latency; --expected-input-len, "),
        ({"objective": "throughput"}, (1024, 256), 625, "usual for throughput; --expected-input-len, "),
        ({"max_model_len": 512}, (256, 128), 32, "usual for interactive; "),
        ({"expected_output_len": 100}, (1024, 100), 32,
         "flags and usual values; --expected-input-len, --expected-concurrency would say otherwise"),
    ],
)  # fmt: skip
def test_traffic_of_which_nobody_speaks_is_the_usual_one_and_said_to_be(
    given: dict[str, Any], lengths: tuple[int, int], at_once: int, source: str
) -> None:
    found = expected(**given)
    load = found.workload
    assert ((load.input_len, load.output_len), load.concurrency) == (lengths, at_once)
    assert found.source.startswith(source)


def test_every_family_that_is_served_is_predicted() -> None:
    """Nothing in a config.json that starts is too much for the planner."""
    for name in ("llama-3.1-8b", "mistral-7b", "qwen3-8b", "qwen3-30b-a3b", "mixtral-8x7b"):
        model = ModelConfig.from_dict(catalogue()[name].config)
        config = decide_before_load(EngineConfig(model=name), model, "cuda")[0]
        assert expect(config, model, [H200], 50_000) is not None
        assert predict_steps(config, model, [H200]) is not None
        assert predict_memory(config, model, [H200]) is not None


def test_steps_are_predicted_and_what_slows_them_is_known() -> None:
    config = decide_before_load(EngineConfig(model="llama-3.1-8b", enforce_eager=True), MODEL, "cuda")[0]
    found = predict_steps(config, MODEL, [H200])
    assert 0.003 < found.model.seconds(StepWork(1, 128.0)) < 0.006
    assert (found.chip, found.warns) == ("NVIDIA H200 SXM", True)
    assert found.excuse == "eager steps (cudagraph_mode NONE)"
    cpu = WorkerFacts("cpu", "CPU", 64 * 2**30, 10**10, LAYOUT, 16 * 2**30, "TORCH_SDPA")
    rough = predict_steps(decide_before_load(EngineConfig(), MODEL, "cpu")[0], MODEL, [cpu])
    assert not rough.warns
    unknown = WorkerFacts("cuda", "Some GPU 9000", 10**11, 0, LAYOUT, 0, "ANY")
    assert predict_steps(config, MODEL, [unknown]) is predict_memory(config, MODEL, [unknown]) is None
    assert predict_steps(config, MODEL, []) is None


def test_steps_that_last_as_long_as_those_of_other_engines_are_not_predicted() -> None:
    """But memory is, of which the experts that others hold take none."""
    spread = EngineConfig(model="qwen3-30b-a3b", data_parallel_size=2, enable_expert_parallel=True)
    shared = decide_before_load(spread, SPARSE, "cuda")[0]
    own = shared.replace(enable_expert_parallel=False)
    assert predict_steps(own, SPARSE, [H200]) is not None
    assert predict_steps(shared, SPARSE, [H200]) is expect(shared, SPARSE, [H200], 1000) is None
    less, more = (predict_memory(config, SPARSE, [H200]) for config in (shared, own))
    assert less is not None
    assert more is not None
    assert less.weights["experts"] * 2 == more.weights["experts"] > 0
    assert less.weights["attention"] == more.weights["attention"]


def test_memory_is_reported_beside_what_was_predicted() -> None:
    config = decide_before_load(EngineConfig(model="llama-3.1-8b", max_model_len=8192), MODEL, "cuda")[0]
    fact = msgspec.structs.replace(H200, step_bytes=2**30, graph_bytes=2**29, library_bytes=2**28, table_bytes=2**25)
    roomier = msgspec.structs.replace(fact, available_kv_memory=2 * fact.available_kv_memory)
    found = report_memory(config, predict_memory(config, MODEL, [fact]), [roomier, fact], 1000)
    parts = {part.name: part for part in found.parts}
    assert parts["weights"].predicted == 16_060_522_496
    assert parts["weights"].reported == fact.weight_bytes
    assert parts["graphs"].reported == 2**29
    assert parts["left for the KV cache"].reported == 10**11
    assert found.kv_bytes_per_token.predicted == found.kv_bytes_per_token.reported == 131_072
    assert found.kv_cache == 1000 * 2**21
    assert str(found).startswith("memory of NVIDIA H200 in GiB, predicted / reported: weights 14.96 / 16.00, tables ")


def test_what_was_not_measured_or_cannot_be_predicted_is_left_open() -> None:
    cpu = WorkerFacts("cpu", "CPU", 64 * 2**30, 10**10, LAYOUT, 16 * 2**30, "TORCH_SDPA")
    config = decide_before_load(EngineConfig(), MODEL, "cpu")[0]
    found = report_memory(config, None, [cpu], 10)
    assert [part.reported for part in found.parts] == [16 * 2**30] + [None] * 5
    assert {part.predicted for part in found.parts} == {None}
    assert "weights ? / 16.00;" in str(found)
    assert report_memory(config, None, [], 10) is None


def test_decisions_are_all_settings() -> None:
    config = decide_before_load(EngineConfig(block_size=32), MODEL, "cuda")[0]
    made = [
        Decision("max_num_batched_tokens", 8192, "a prefill chunk that fills a GPU"),
        Decision("num_gpu_blocks", 5, "what memory leaves", source="measured"),
        Decision("something_new", 1, "because"),
        Decision("max_num_batched_tokens", 4096, "8192 did not fit", "8192", "measured"),
    ]
    found = all_settings(config, made)
    fields = [entry.field for entry in found]
    assert len({*fields}) == len(fields)
    assert fields.index("block_size") < fields.index("num_gpu_blocks") < fields.index("max_num_batched_tokens")
    assert fields[-1] == "something_new"
    by_field = {entry.field: entry for entry in found}
    assert (by_field["max_num_batched_tokens"].value, by_field["max_num_batched_tokens"].runner_up) == (4096, "8192")
    assert by_field["block_size"].source == "user"
    assert by_field["async_scheduling"].source == "derived"
    assert by_field["cudagraph_capture_sizes"].value[-1] == config.max_num_seqs


def test_the_same_prediction_as_the_plan() -> None:
    found = expected(expected_input_len=512, expected_output_len=128, expected_concurrency=4)
    made = make_plan(PlanRequest(model="llama-3.1-8b", gpu="h200", input_len=512, output_len=128, concurrency=4))
    assert found.prediction.itl_ms == pytest.approx(made.prediction.itl_ms, rel=0.1)
    assert str(found).startswith("expected on NVIDIA H200 SXM, 512 in / 128 out, 4 at once (as flags say): ")


def test_quantized_weights_are_read_sooner() -> None:
    plain, rounded = (
        expected(expected_concurrency=1, expected_input_len=64, quantization=form) for form in (None, "fp8")
    )
    assert rounded.prediction.itl_ms < 0.8 * plain.prediction.itl_ms


def test_a_cpu_is_known_too() -> None:
    cpu = WorkerFacts("cpu", "CPU", 64 * 2**30, 10**10, LAYOUT, 16 * 2**30, "TORCH_SDPA")
    found = expected(cpu, device="cpu", expected_concurrency=1)
    assert found.prediction.itl_ms > 20


@pytest.mark.parametrize(
    ("fact", "num_pages"),
    [(WorkerFacts("cuda", "Some GPU 9000", 10**11, 0, LAYOUT, 0, "ANY"), 50_000), (H200, 10)],
    ids=["unknown chip", "no room"],
)
def test_no_prediction_is_no_failure(fact: WorkerFacts, num_pages: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert expected(fact, num_pages, expected_concurrency=4) is None
    assert "no prediction: " in caplog.text
