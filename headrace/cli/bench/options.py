"""Defines the flags of the benchmarks. It imports nothing heavy, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.knobs import check_knobs, knob

DATASETS = ("random", "sharegpt", "azure", "mooncake")
CHAT_BACKEND = "openai-chat"
ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", CHAT_BACKEND: "/v1/chat/completions"}
METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Holds the flags that choose what to send."""

    dataset_name: str | None = knob(
        None,
        "Where prompts come from; default: by the file's ending (.json sharegpt, .csv azure, .jsonl mooncake), "
        "without a file random.",
        choices=DATASETS,
        group="dataset",
    )
    dataset_path: str | None = knob(None, "The dataset's file.", aliases=("--dataset",), group="dataset")
    num_prompts: int = knob(1000, "Requests to send.", minimum=1, group="dataset")
    random_input_len: int = knob(
        1024, "Prompt tokens of a random request.", minimum=1, aliases=("--input-len",), group="dataset"
    )
    random_output_len: int = knob(
        128, "Output tokens of a random request.", minimum=1, aliases=("--output-len",), group="dataset"
    )
    random_range_ratio: float = knob(
        0.0, "Draw random lengths from [1 - R, 1 + R] times the given ones.", minimum=0.0, maximum=1.0, group="dataset"
    )
    random_prefix_len: int = knob(
        0, "Tokens that all random prompts share in front.", minimum=0, aliases=("--prefix-len",), group="dataset"
    )
    sharegpt_output_len: int | None = knob(
        None, "Output tokens of a ShareGPT request; default: as the conversation has.", minimum=1, group="dataset"
    )
    max_input_len: int | None = knob(
        None, "Cut prompts of a trace to this many tokens; default: do not.", minimum=1, group="dataset"
    )
    max_output_len: int | None = knob(
        None, "Cut outputs of a trace to this many tokens; default: do not.", minimum=1, group="dataset"
    )
    seed: int = knob(0, "Seeds prompts, lengths and arrival times.", minimum=0, group="dataset")

    def __post_init__(self) -> None:
        check_knobs(self)

    @property
    def kind(self) -> str:
        """The dataset's name, given or by the file's ending."""
        if self.dataset_name is not None:
            return self.dataset_name
        if self.dataset_path is None:
            return "random"
        return {".csv": "azure", ".jsonl": "mooncake"}.get(Path(self.dataset_path).suffix, "sharegpt")


@dataclass(frozen=True, kw_only=True)
class OfflineOptions:
    """Holds the flags that the offline benchmarks share."""

    n: int = knob(1, "Completions for each prompt.", minimum=1, group="benchmark")
    temperature: float = knob(0.0, "0 is greedy.", minimum=0.0, group="benchmark")
    output_json: str | None = knob(None, "Write the result to this file.", group="benchmark")
    disable_detokenize: bool = knob(False, "Leave text out of the measurement.", group="benchmark")
    disable_tqdm: bool = knob(False, "Show no progress bar.", group="benchmark")

    def __post_init__(self) -> None:
        check_knobs(self)


@dataclass(frozen=True, kw_only=True)
class LatencyOptions(OfflineOptions):
    """Holds the flags of `headrace bench latency`."""

    input_len: int = knob(32, "Prompt tokens.", minimum=1, group="benchmark")
    output_len: int = knob(128, "Output tokens.", minimum=1, group="benchmark")
    batch_size: int = knob(8, "Prompts that run together.", minimum=1, group="benchmark")
    num_iters_warmup: int = knob(10, "Runs before measuring.", minimum=0, group="benchmark")
    num_iters: int = knob(30, "Runs to measure.", minimum=1, group="benchmark")


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(OfflineOptions):
    """Holds the flags of `headrace bench throughput`."""

    num_warmups: int = knob(1, "Prompts to run before measuring.", minimum=0, group="benchmark")


@dataclass(frozen=True, kw_only=True)
class ServeBenchOptions:
    """Holds the flags of `headrace bench serve`."""

    base_url: str | None = knob(None, "http://host:port of the server, instead of --host and --port.", group="server")
    host: str = knob("127.0.0.1", "The server's address.", group="server")
    port: int = knob(8000, "The server's port.", minimum=1, maximum=65535, group="server")
    endpoint: str | None = knob(None, "Path of the API; default: by the backend.", group="server")
    backend: str = knob(
        "openai", "The API to use.", choices=tuple(ENDPOINTS), aliases=("--endpoint-type",), group="server"
    )
    model: str | None = knob(None, "Name to send; default: the first that /v1/models lists.", group="server")
    served_model_name: str | None = knob(None, "Name to send where --model is the tokenizer's folder.", group="server")
    tokenizer: str | None = knob(None, "Folder or id of the tokenizer, for texts; default: --model.", group="server")
    trust_remote_code: bool = knob(False, "Accepted for compatibility; no code is loaded.", group="server")
    vocab_size: int | None = knob(
        None,
        "Bound of random token ids; default: as the model's config.json says, if it is here.",
        minimum=1,
        group="server",
    )
    api_key: str | None = knob(None, "Sent as bearer token (VLLM_API_KEY).", group="server")
    ready_check_timeout_sec: float | None = knob(
        None,
        "Wait this many seconds until the server answers; default: 600 for one that loads and not at all where nothing "
        "listens on the port; 0: neither wait nor send a test request.",
        minimum=0.0,
        group="server",
    )

    request_rate: float = knob(float("inf"), "Requests a second; inf: all at once.", minimum=1e-9, group="load")
    burstiness: float = knob(
        1.0, "Shape of the gaps' gamma distribution; 1: Poisson, below: burstier.", minimum=1e-3, group="load"
    )
    max_concurrency: int | None = knob(
        None, "Most requests under way at once; default: no limit.", minimum=1, group="load"
    )
    trace_speed: float = knob(1.0, "Replay a trace this many times as fast.", minimum=1e-9, group="load")
    num_warmups: int = knob(0, "Requests to send before measuring.", minimum=0, group="load")
    ignore_eos: bool = knob(False, "Ask the server to go on to the full output length.", group="load")
    temperature: float = knob(0.0, "Sampling temperature to ask for.", minimum=0.0, group="load")
    extra_body: dict[str, Any] = knob({}, "Further fields of each request.", group="load")
    num_client_processes: int = knob(1, "Clients to spread the load over.", minimum=1, maximum=64, group="load")

    percentile_metrics: str = knob("ttft,tpot,itl,e2el", "Which of ttft, tpot, itl, e2el to report.", group="report")
    metric_percentiles: str = knob("99", "Percentiles to report, separated by commas.", group="report")
    goodput: list[str] = knob([], "Count requests within these, e.g. ttft:200 tpot:50 (ms).", group="report")
    label: str | None = knob(None, "Prefix of the result file's name; default: the backend.", group="report")
    save_result: bool = knob(False, "Write the JSON result under its default name.", group="report")
    save_detailed: bool = knob(False, "Add every request's own figures to the JSON.", group="report")
    result_dir: str | None = knob(None, "Folder of the result file.", group="report")
    result_filename: str | None = knob(None, "Name of the result file.", aliases=("--output-json",), group="report")
    metadata: list[str] = knob([], "KEY=VALUE pairs to keep in the JSON.", group="report")
    disable_tqdm: bool = knob(False, "Show no progress bar.", group="report")

    def __post_init__(self) -> None:
        check_knobs(self)

    @property
    def metrics(self) -> list[str]:
        """The metrics to report, in the report's order. Raises ConfigError."""
        wanted = [name.strip() for name in self.percentile_metrics.split(",") if name.strip()]
        for name in wanted:
            if name not in METRICS:
                raise ConfigError(f"--percentile-metrics must be of {', '.join(METRICS)}; got {name!r}")
        return [name for name in METRICS if name in wanted]

    @property
    def percentiles(self) -> list[float]:
        """The percentiles to report. Raises ConfigError."""
        try:
            values = [float(text) for text in self.metric_percentiles.split(",")]
        except ValueError:
            values = [-1.0]
        if not all(0 <= value <= 100 for value in values):
            raise ConfigError(
                f"--metric-percentiles must be numbers from 0 to 100 and commas, got {self.metric_percentiles!r}"
            )
        return values

    @property
    def goodput_limits(self) -> dict[str, float]:
        """The largest good milliseconds of each metric. Raises ConfigError."""
        limits: dict[str, float] = {}
        for pair in self.goodput:
            name, _, text = pair.partition(":")
            try:
                limits[name] = float(text)
            except ValueError:
                limits[name] = -1.0
            if name not in GOODPUT_METRICS or not limits[name] >= 0:
                raise ConfigError(
                    f"--goodput must be METRIC:MILLISECONDS with METRIC of {', '.join(GOODPUT_METRICS)}; got {pair!r}"
                )
        return limits
