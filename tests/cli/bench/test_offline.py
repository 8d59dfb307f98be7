"""`bench latency` and `bench throughput`: what they ask of the engine, what they compute, and their JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.bench.latency import measure, summarize_latency
from headrace.cli.bench.options import LatencyOptions
from headrace.cli.main import main
from tests.cli.fake_llm import FakeLLM


def test_decode_step_is_end_to_end_less_first_token_over_the_rest() -> None:
    result = summarize_latency([1.1, 1.0, 1.3], [0.2, 0.1, 0.9], output_len=11)
    assert result["ttft_ms"] == pytest.approx(200.0)
    assert result["decode_step_ms"] == pytest.approx((1.1 - 0.2) / 10 * 1000)
    assert result["avg_latency"] == pytest.approx(3.4 / 3)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["percentiles"]["50"] == pytest.approx(1.1)
    assert summarize_latency([1.0], [1.0], output_len=1)["decode_step_ms"] is None


def test_warm_up_is_not_measured() -> None:
    asked: list[int] = []

    def run(output_len: int) -> float:
        asked.append(output_len)
        return float(len(asked))

    latencies, first = measure(run, LatencyOptions(num_iters_warmup=2, num_iters=2, output_len=9))
    assert asked == [9, 9, 1, 9, 1, 9]
    assert (first, latencies) == ([3.0, 5.0], [4.0, 6.0])


def test_latency(fake_llm: type[FakeLLM], model_folder: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    argv = ["bench", "latency", model_folder, "--batch-size", "3", "--input-len", "7", "--output-len", "5", "--n", "2"]
    argv += ["--num-iters", "2", "--num-iters-warmup", "1", "--skip-tokenizer-init", "--output-json", str(out)]
    assert main(argv) == 0
    (llm,) = fake_llm.made
    assert (llm.config.enable_prefix_caching, llm.alive) == (False, False)
    prompts, params = llm.calls[0]
    assert [len(prompt) for prompt in prompts] == [7, 7, 7]
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert all(0 <= token < 64 for prompt in prompts for token in prompt)
    assert (params[0].max_tokens, params[0].ignore_eos, params[0].n) == (5, True, 2)
    assert (params[0].temperature, params[0].detokenize) == (0.0, False)
    result = json.loads(out.read_text())
    assert len(result["latencies"]) == 2
    assert {"avg_latency", "percentiles", "ttft_ms", "decode_step_ms"} <= result.keys()


def test_throughput(
    fake_llm: type[FakeLLM], model_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    argv = ["bench", "throughput", model_folder, "--num-prompts", "6", "--input-len", "7", "--output-len", "5"]
    assert main([*argv, "--output-json", str(out), "--disable-tqdm"]) == 0
    (llm,) = fake_llm.made
    assert [len(prompts) for prompts, _ in llm.calls] == [1, 6]  # a warm-up, then the run
    result = json.loads(out.read_text())
    assert (result["num_requests"], result["total_num_tokens"]) == (6, 6 * 12)
    ratio = result["output_tokens_per_second"] / result["tokens_per_second"]
    assert ratio == pytest.approx(5 / 12)
    assert result["requests_per_second"] == pytest.approx(6 / result["elapsed_time"])
    captured = capsys.readouterr()
    assert "requests/s" in captured.out
    assert "--num-prompts 6 is not a multiple of max_num_seqs (4)" in captured.err


def test_full_batches_get_no_warning(
    fake_llm: type[FakeLLM], model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for count in ("8", "3"):
        argv = ["bench", "throughput", model_folder, "--num-prompts", count, "--input-len", "1", "--output-len", "1"]
        assert main([*argv, "--disable-tqdm"]) == 0
    assert "multiple" not in capsys.readouterr().err


@pytest.mark.parametrize("bench", ["latency", "throughput"])
def test_more_tokens_than_the_model_takes(bench: str, model_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", bench, model_folder, "--input-len", "100", "--output-len", "29"]) == 2
    assert "need 129 tokens, more than max_model_len (128)" in capsys.readouterr().err


def test_requests_of_a_file_that_do_not_fit_are_left_out(
    fake_llm: type[FakeLLM], model_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    rows = ["2023-11-16 18:17:03,100,28", "2023-11-16 18:17:04,100,29"]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    argv = ["bench", "throughput", model_folder, "--dataset", str(trace), "--disable-tqdm", "--num-warmups", "0"]
    assert main(argv) == 0
    assert [len(prompt) for prompt in fake_llm.made[0].calls[0][0]] == [100]
    assert "1 of 2 requests are longer than max_model_len (128)" in capsys.readouterr().err
    assert main([*argv, "--max-model-len", "50"]) == 2


def test_an_unwritable_result_file(
    fake_llm: type[FakeLLM], model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["bench", "throughput", model_folder, "--num-prompts", "1", "--input-len", "1", "--output-len", "1"]
    assert main([*argv, "--disable-tqdm", "--output-json", f"{model_folder}/config.json/x"]) == 2
    assert "cannot be written" in capsys.readouterr().err
