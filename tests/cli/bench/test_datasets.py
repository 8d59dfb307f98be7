"""Requests out of random lengths, ShareGPT files and traces; and when they leave."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.bench.datasets import PromptMaker, arrival_times, load_requests, trace_times
from headrace.cli.bench.options import DatasetOptions
from headrace.errors import ConfigError


def load(**options: Any) -> list[Any]:
    return load_requests(DatasetOptions(**options), lambda: lambda text: len(text.split()))


def test_random_lengths_are_exact_without_ratio() -> None:
    requests = load(num_prompts=5, random_input_len=10, random_output_len=3)
    assert [(r.prompt_len, r.output_len, r.arrival) for r in requests] == [(10, 3, None)] * 5


def test_random_lengths_within_ratio_and_repeatable() -> None:
    options = {"num_prompts": 300, "random_input_len": 100, "random_output_len": 10, "random_range_ratio": 0.5}
    requests = load(**options)
    lengths = {r.prompt_len for r in requests}
    assert (min(lengths), max(lengths)) == (50, 150)
    assert {r.output_len for r in requests} == set(range(5, 16))
    assert requests == load(**options)
    assert requests != load(seed=1, **options)


def test_random_prompts_share_the_prefix_and_nothing_else() -> None:
    requests = load(num_prompts=3, random_input_len=20, random_prefix_len=8)
    prompts = [PromptMaker(0, 1000).token_ids(r) for r in requests]
    assert [len(p) for p in prompts] == [28, 28, 28]
    assert prompts[0][:8] == prompts[1][:8] == prompts[2][:8]
    assert prompts[0][8:] != prompts[1][8:]
    assert all(0 <= token < 1000 for prompt in prompts for token in prompt)
    assert prompts[0] == PromptMaker(0, 1000).token_ids(requests[0])
    assert prompts[0] != PromptMaker(1, 1000).token_ids(requests[0])


def sharegpt(path: Path, *talks: list[str]) -> Path:
    path.write_text(json.dumps([{"id": "x", "conversations": [{"from": "h", "value": v} for v in t]} for t in talks]))
    return path


def test_sharegpt_takes_first_question_and_answer_and_leaves_out_extremes(tmp_path: Path) -> None:
    file = sharegpt(
        tmp_path / "talks.json",
        ["who are you my friend", "I am only a bot", "and more"],
        ["too short", "also this one is fine"],
        ["alone and without any answer"],
        ["word " * 1025, "an answer of five words"],
        ["word " * 1000, "word " * 1049],
    )
    requests = load(dataset_path=str(file), num_prompts=3)
    assert [(r.text, r.prompt_len, r.output_len) for r in requests] == [("who are you my friend", 5, 5)] * 3
    assert load(dataset_path=str(file), num_prompts=1, sharegpt_output_len=7)[0].output_len == 7


def test_azure_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.4799600,3180,8\n"
        "2023-11-16 18:17:05.9799600,7,0\n"
    )
    requests = load(dataset_path=str(file), max_input_len=4000)
    assert [(r.prompt_len, r.output_len) for r in requests] == [(4000, 10), (3180, 8), (7, 1)]
    assert trace_times(requests, 1.0) == pytest.approx([0.0, 0.5, 2.0])
    assert trace_times(requests, 4.0) == pytest.approx([0.0, 0.125, 0.5])
    assert len(load(dataset_path=str(file), num_prompts=2)) == 2
    maker = PromptMaker(0, 1000)
    assert maker.token_ids(requests[0])[:7] != maker.token_ids(requests[2])


def test_mooncake_trace_shares_blocks_by_hash_id(tmp_path: Path) -> None:
    records = [
        {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 3500, "input_length": 1030, "output_length": 6, "hash_ids": [0, 1, 3]},
        {"timestamp": 4000, "input_length": 600, "output_length": 7, "hash_ids": [0]},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    requests = load(dataset_path=str(file))
    prompts = [PromptMaker(0, 50000).token_ids(r) for r in requests]
    assert [len(p) for p in prompts] == [1100, 1030, 600]
    assert prompts[0][:1024] == prompts[1][:1024]
    assert prompts[0][1024:1030] != prompts[1][1024:]
    assert prompts[2][:512] == prompts[0][:512]
    assert prompts[2][512:] != prompts[0][512:600]  # tokens beyond the hashed blocks are its own
    assert trace_times(requests, 1.0) == pytest.approx([0.0, 2.5, 3.0])
    cut = load(dataset_path=str(file), max_input_len=512, max_output_len=2)
    assert [(r.prompt_len, r.output_len, len(r.segments)) for r in cut] == [(512, 2, 1)] * 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", None, "cannot be read"),
        ("x.json", "[1]", "is not in sharegpt format"),
        ("x.json", "{", "is not in sharegpt format"),
        ("x.json", "[]", "holds no usable request"),
        ("x.csv", "A,B\n1,2\n", "is not in azure format"),
        ("x.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "is not in azure format"),
        ("x.jsonl", '{"timestamp": 0}\n', "is not in mooncake format"),
    ],
)
def test_bad_files_name_the_flag(name: str, content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=f"--dataset-path.*{message}"):
        load(dataset_path=str(tmp_path / name))


def test_a_dataset_without_file() -> None:
    with pytest.raises(ConfigError, match="--dataset-name azure needs --dataset-path"):
        load(dataset_name="azure")


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 20.0, float("inf")])
def test_arrivals_keep_the_rate(burstiness: float) -> None:
    requests = load(num_prompts=400)
    times = arrival_times(requests, 8.0, burstiness, seed=3)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(400 / 8.0)
    assert times == arrival_times(requests, 8.0, burstiness, seed=3)


def test_burstiness_spreads_the_gaps() -> None:
    requests = load(num_prompts=2000)

    def variation(burstiness: float) -> float:
        times = arrival_times(requests, 1.0, burstiness, seed=0)
        gaps = [b - a for a, b in itertools.pairwise(times)]
        mean = sum(gaps) / len(gaps)
        return (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5 / mean

    assert variation(0.25) == pytest.approx(2.0, rel=0.25)  # a gamma's coefficient of variation is shape ** -0.5
    assert variation(1.0) == pytest.approx(1.0, rel=0.15)
    assert variation(100.0) == pytest.approx(0.1, rel=0.15)


def test_rate_inf_sends_all_at_once() -> None:
    assert arrival_times(load(num_prompts=3), float("inf"), 1.0, 0) == [0.0] * 3


def test_the_files_beside_the_repository_load() -> None:
    data = Path(__file__).parents[4] / "shared" / "data"
    files = ["azure-llm-2023/AzureLLMInferenceTrace_conv.csv", "mooncake/conversation_trace.jsonl"]
    if not all((data / name).is_file() for name in files):
        pytest.skip("the published traces are not beside this checkout")
    for name in files:
        requests = load(dataset_path=str(data / name), num_prompts=200)
        assert len(requests) == 200
        assert all(sum(length for _, length in r.segments) == r.prompt_len for r in requests)
