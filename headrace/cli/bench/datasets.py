"""Makes the requests of a benchmark and their arrival times: random lengths, ShareGPT, the Azure and Mooncake traces.

A prompt of token ids is kept as segments of seeded random streams, so a trace of a hundred million tokens costs a few
megabytes until a prompt is sent.
"""

from __future__ import annotations

import csv
import functools
import json
import random
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy

from headrace.cli.bench.options import DatasetOptions
from headrace.errors import ConfigError

MOONCAKE_BLOCK = 512
"""Tokens that one hash id of a Mooncake trace stands for."""
SHAREGPT_MIN_TOKENS = 4
SHAREGPT_MAX_PROMPT = 1024
SHAREGPT_MAX_TOTAL = 2048
PREFIX_STREAM = 0
TEST_STREAM = 2**32
"""The stream of warm-up prompts. No dataset uses it, so a prefix cache holds nothing of the measured prompts."""


class BenchRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Holds one request: its lengths, and its prompt as text or as segments."""

    prompt_len: int
    output_len: int
    text: str | None = None
    segments: list[tuple[int, int]] = []
    """(stream, tokens): the first tokens of a seeded random stream; equal streams give equal tokens"""
    arrival: float | None = None
    """seconds after the first request of its trace"""


class PromptMaker:
    """Makes token ids from segments, and caches segments that recur."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._block = functools.lru_cache(maxsize=4096)(functools.partial(_block, seed, vocab_size))

    def token_ids(self, request: BenchRequest) -> list[int]:
        ids: list[int] = []
        for stream, length in request.segments:
            ids += self._block(stream, length)
        return ids


def _block(seed: int, vocab_size: int, stream: int, length: int) -> list[int]:
    ids: list[int] = numpy.random.default_rng([seed, stream]).integers(vocab_size, size=length).tolist()
    return ids


def load_requests(options: DatasetOptions, count_tokens: Callable[[], Callable[[str], int]]) -> list[BenchRequest]:
    """Return at most `num_prompts` requests. Raises ConfigError for a file that is missing, malformed or empty.

    `count_tokens()` returns a function that counts a text's tokens; it is called only for a dataset of texts.
    """
    if options.kind == "random":
        return random_requests(options)
    if options.dataset_path is None:
        raise ConfigError(f"--dataset-name {options.kind} needs --dataset-path FILE")
    path = Path(options.dataset_path)
    try:
        if options.kind == "sharegpt":
            requests = sharegpt_requests(path, options, count_tokens())
        elif options.kind == "azure":
            requests = azure_requests(path, options)
        else:
            requests = mooncake_requests(path, options)
    except OSError as error:
        raise ConfigError(f"--dataset-path {str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        detail = f"{type(error).__name__}: {error}"
        raise ConfigError(f"--dataset-path {str(path)!r} is not in {options.kind} format ({detail:.150})") from None
    if not requests:
        raise ConfigError(f"--dataset-path {str(path)!r} holds no usable request")
    return requests


def random_requests(options: DatasetOptions) -> list[BenchRequest]:
    """Draw lengths uniformly from [1 - ratio, 1 + ratio] times the given ones; prompts share nothing but the prefix."""
    rng = numpy.random.default_rng([options.seed])

    def lengths(given: int) -> list[int]:
        low = max(1, int(given * (1 - options.random_range_ratio)))
        high = max(low, int(given * (1 + options.random_range_ratio)))
        drawn: list[int] = rng.integers(low, high + 1, size=options.num_prompts).tolist()
        return drawn

    inputs, outputs = lengths(options.random_input_len), lengths(options.random_output_len)
    prefix = [(PREFIX_STREAM, options.random_prefix_len)] if options.random_prefix_len else []
    return [
        BenchRequest(
            prompt_len=options.random_prefix_len + inputs[i],
            output_len=outputs[i],
            segments=[*prefix, (i + 1, inputs[i])],
        )
        for i in range(options.num_prompts)
    ]


def sharegpt_requests(path: Path, options: DatasetOptions, count: Callable[[str], int]) -> list[BenchRequest]:
    """Read the first question and answer of each conversation, in random order, without those that vLLM leaves out as
    too short or too long. A file with fewer conversations than `num_prompts` is repeated."""
    conversations = [entry["conversations"] for entry in json.loads(path.read_text(encoding="utf-8"))]
    conversations = [turns for turns in conversations if len(turns) >= 2]
    random.Random(options.seed).shuffle(conversations)
    requests: list[BenchRequest] = []
    for turns in conversations:
        if len(requests) == options.num_prompts:
            break
        text = turns[0]["value"]
        prompt_len = count(text)
        output_len = options.sharegpt_output_len or count(turns[1]["value"])
        shortest = prompt_len if options.sharegpt_output_len else min(prompt_len, output_len)
        if shortest < SHAREGPT_MIN_TOKENS:
            continue
        if prompt_len > SHAREGPT_MAX_PROMPT or prompt_len + output_len > SHAREGPT_MAX_TOTAL:
            continue
        requests.append(BenchRequest(prompt_len=prompt_len, output_len=output_len, text=text))
    if not requests:
        return []
    return [requests[i % len(requests)] for i in range(options.num_prompts)]


def azure_requests(path: Path, options: DatasetOptions) -> list[BenchRequest]:
    """Read lengths and arrivals from columns TIMESTAMP, ContextTokens, GeneratedTokens; prompts share nothing."""
    requests: list[BenchRequest] = []
    first: datetime | None = None
    with path.open(newline="", encoding="utf-8-sig") as file:
        for row in csv.DictReader(file):
            if len(requests) == options.num_prompts:
                break
            time = _timestamp(row["TIMESTAMP"])
            first = first or time
            prompt_len, output_len = _cut(int(row["ContextTokens"]), int(row["GeneratedTokens"]), options)
            requests.append(
                BenchRequest(
                    prompt_len=prompt_len,
                    output_len=output_len,
                    segments=[(len(requests) + 1, prompt_len)],
                    arrival=(time - first).total_seconds(),
                )
            )
    return requests


def mooncake_requests(path: Path, options: DatasetOptions) -> list[BenchRequest]:
    """Read lines of timestamp (ms), input_length, output_length, hash_ids; equal ids mean equal 512-token blocks."""
    requests: list[BenchRequest] = []
    first: float | None = None
    with path.open(encoding="utf-8") as file:
        for line in file:
            if len(requests) == options.num_prompts:
                break
            if not line.strip():
                continue
            record: dict[str, Any] = json.loads(line)
            first = record["timestamp"] if first is None else first
            prompt_len, output_len = _cut(int(record["input_length"]), int(record["output_length"]), options)
            segments, left = [], prompt_len
            for hash_id in record["hash_ids"]:
                segments.append((int(hash_id), min(MOONCAKE_BLOCK, left)))
                left -= segments[-1][1]
                if not left:
                    break
            if left:
                # More tokens than blocks: the rest is this request's own.
                segments.append((TEST_STREAM + 1 + len(requests), left))
            requests.append(
                BenchRequest(
                    prompt_len=prompt_len,
                    output_len=output_len,
                    segments=segments,
                    arrival=(record["timestamp"] - first) / 1000,
                )
            )
    return requests


def _timestamp(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _cut(prompt_len: int, output_len: int, options: DatasetOptions) -> tuple[int, int]:
    prompt_len = min(prompt_len, options.max_input_len or prompt_len)
    output_len = min(output_len, options.max_output_len or output_len)
    return max(1, prompt_len), max(1, output_len)


def arrival_times(requests: list[BenchRequest], rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the seconds after the start at which each request is sent.

    Gaps are gamma distributed with mean 1/rate (burstiness 1: a Poisson process; larger: more even), then scaled so
    that the last request is sent at exactly num/rate: runs with other seeds stay comparable.
    """
    count = len(requests)
    if rate == float("inf"):
        return [0.0] * count
    if burstiness == float("inf"):
        gaps = numpy.full(count, 1.0 / rate)
    else:
        gaps = numpy.random.default_rng([seed, 1]).gamma(burstiness, 1.0 / (rate * burstiness), size=count)
    times = numpy.cumsum(gaps)
    if times[-1] > 0:
        times *= count / rate / times[-1]
    result: list[float] = times.tolist()
    return result


def trace_times(requests: list[BenchRequest], speed: float) -> list[float]:
    """Return the trace's own arrivals, `speed` times as fast."""
    return [(request.arrival or 0.0) / speed for request in requests]
