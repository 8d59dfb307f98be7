"""TTFT, ITL, TPOT, E2EL under a fake clock, and vLLM's summary of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.cli.bench.metrics import (
    RequestResult,
    StreamRecorder,
    events_per_token,
    percentile_name,
    summarize,
    table,
)

DONE = b"[DONE]"


def chunk(text: str | None = "x", **more: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": None}], **more}).encode()


def chat_chunk(finish_reason: str | None = None, **delta: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}).encode()


def usage(prompt: int, completion: int) -> bytes:
    return json.dumps({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}).encode()


def record(*events: tuple[float, bytes], start: float = 100.0) -> RequestResult:
    """Events at seconds after the start."""
    recorder = StreamRecorder(0, start, prompt_len=3)
    for at, payload in events:
        recorder.event(payload, start + at)
    return recorder.finish()


def test_the_four_definitions() -> None:
    result = record((1.0, chunk()), (1.5, chunk()), (2.5, chunk()), (2.6, usage(5, 3)), (2.7, DONE))
    assert result.success
    assert result.ttft == pytest.approx(1.0)
    assert result.itl == pytest.approx([0.5, 1.0])
    assert result.latency == pytest.approx(2.5)  # to the last token, not to the usage that follows
    assert result.tpot == pytest.approx((2.5 - 1.0) / 2)
    assert (result.prompt_len, result.output_len) == (5, 3)


def test_chunks_of_several_tokens_count_once_in_itl_and_fully_in_tpot() -> None:
    result = record((1.0, chunk()), (3.0, chunk("four more")), (3.0, usage(5, 5)), (3.0, DONE))
    assert result.itl == pytest.approx([2.0])
    assert result.tpot == pytest.approx(2.0 / 4)


def test_a_token_without_text_is_a_token() -> None:
    result = record((1.0, chunk("")), (2.0, chunk("")), (2.0, DONE))
    assert (result.ttft, result.itl, result.output_len) == (pytest.approx(1.0), pytest.approx([1.0]), 2)


def test_one_token_has_no_tpot() -> None:
    result = record((1.0, chunk()), (1.0, DONE))
    assert (result.tpot, result.itl, result.output_len) == (0.0, [], 1)


def test_role_and_finish_of_a_chat_are_no_tokens() -> None:
    result = record(
        (0.1, chat_chunk(role="assistant", content="")),
        (1.0, chat_chunk(content="a")),
        (1.2, chat_chunk(content="b")),
        (9.0, chat_chunk("stop")),
        (9.0, DONE),
    )
    assert (result.ttft, result.latency, result.output_len) == (pytest.approx(1.0), pytest.approx(1.2), 2)


def test_role_and_first_token_in_one_chunk() -> None:
    result = record((0.5, chat_chunk(role="assistant", content="a")), (0.6, DONE))
    assert (result.ttft, result.output_len) == (pytest.approx(0.5), 1)


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([(1.0, chunk())], "without [DONE]"),
        ([(1.0, DONE)], "no token came"),
        ([(1.0, b'{"error": {"message": "died"}}')], "died"),
        ([(1.0, b"{nonsense"), (2.0, DONE)], "unreadable event"),
        ([(1.0, b'{"choices": 5}'), (2.0, DONE)], "unreadable event"),
    ],
)
def test_failures(events: list[tuple[float, bytes]], error: str) -> None:
    result = record(*events)
    assert not result.success
    assert error in result.error


def result(start: float, ttft: float, itl: list[float], output_len: int, success: bool = True) -> RequestResult:
    latency = ttft + sum(itl)
    return RequestResult(
        success=success, start_time=start, ttft=ttft, itl=itl, latency=latency, prompt_len=10, output_len=output_len
    )


RESULTS = [
    result(0.0, 1.0, [1.0, 1.0], 3),
    result(0.0, 2.0, [0.5], 2),
    result(2.0, 3.0, [], 1),
    result(0.0, 99.0, [99.0], 99, success=False),
]


def test_summary_counts_only_what_succeeded() -> None:
    summary = summarize(RESULTS, 10.0, ["ttft", "tpot", "itl", "e2el"], [50, 99.9])
    assert (summary["completed"], summary["failed"]) == (3, 1)
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (30, 6)
    assert summary["request_throughput"] == pytest.approx(0.3)
    assert summary["output_throughput"] == pytest.approx(0.6)
    assert summary["total_token_throughput"] == pytest.approx(3.6)
    assert summary["mean_ttft_ms"] == pytest.approx(2000.0)
    assert summary["median_ttft_ms"] == summary["p50_ttft_ms"] == pytest.approx(2000.0)
    assert summary["mean_tpot_ms"] == pytest.approx(750.0)  # of the two with more than one token
    assert summary["mean_itl_ms"] == pytest.approx(2500 / 3)
    assert summary["mean_e2el_ms"] == pytest.approx(8500 / 3)
    assert summary["std_ttft_ms"] == pytest.approx(816.4966)
    assert summary["p99.9_ttft_ms"] == pytest.approx(2998.0)
    assert summary["max_concurrent_requests"] == 3  # from 2.0 to 2.5 s
    assert summary["max_output_tokens_per_s"] == 3.0  # chunks at 2.0, 2.0 and 2.5 s
    assert summary["request_goodput"] is None


def test_goodput() -> None:
    assert summarize(RESULTS, 1.0, [], [], {"ttft": 2000.0})["request_goodput"] == 2
    assert summarize(RESULTS, 1.0, [], [], {"ttft": 2000.0, "tpot": 500.0})["request_goodput"] == 1
    assert summarize(RESULTS, 1.0, [], [], {"e2el": 1.0})["request_goodput"] == 0


def test_nothing_succeeded() -> None:
    summary = summarize([RESULTS[-1]], 10.0, ["ttft"], [99])
    assert (summary["completed"], summary["mean_ttft_ms"], summary["p99_ttft_ms"]) == (0, 0.0, 0.0)


def test_merged_events_show() -> None:
    one_each = RequestResult(success=True, itl=[0.1] * 3, output_len=4)
    merged = RequestResult(success=True, itl=[0.1], output_len=4)
    failed = RequestResult(success=False, itl=[], output_len=9)
    assert events_per_token([one_each, failed]) == 1.0
    assert events_per_token([one_each, merged]) == 0.75
    assert events_per_token([failed]) == 0.0


def test_percentile_names() -> None:
    assert [percentile_name(p) for p in (99.0, 99.9, 50)] == ["99", "99.9", "50"]


def test_the_table_is_vllms() -> None:
    summary = {"max_concurrency": 4, "request_rate": 2.0} | summarize(RESULTS, 10.0, ["ttft", "e2el"], [99])
    lines = table(summary, [99], [("CPU share:", "8%")]).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[1] == f"{'Successful requests:':<40} 3"
    assert f"{'Request rate configured (RPS):':<40} 2.00" in lines
    assert f"{'Maximum request concurrency:':<40} 4" in lines
    assert "---------------Time to First Token----------------" in lines
    assert f"{'Mean TTFT (ms):':<40} 2000.00" in lines
    assert any(line.startswith("P99 E2EL (ms):") for line in lines)
    assert not any("TPOT" in line for line in lines)
    assert lines[-2:] == [f"{'CPU share:':<40} 8%", "=" * 50]
