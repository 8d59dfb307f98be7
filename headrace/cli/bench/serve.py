"""Runs `headrace bench serve`: puts load on an OpenAI-compatible server, and reports with vLLM's table and JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from headrace.cli.arguments import build_config
from headrace.cli.bench.client import ClientError, HttpClient, NobodyListensError, Target
from headrace.cli.bench.clients import LoadReport, run_clients
from headrace.cli.bench.datasets import (
    TEST_STREAM,
    BenchRequest,
    PromptMaker,
    arrival_times,
    load_requests,
    trace_times,
)
from headrace.cli.bench.metrics import RequestResult, events_per_token, summarize, table
from headrace.cli.bench.options import CHAT_BACKEND, ENDPOINTS, DatasetOptions, ServeBenchOptions
from headrace.cli.bench.output import progress_bar, write_json
from headrace.errors import ConfigError, HeadraceError
from headrace.hub import local_model_folder, resolve_tokenizer_folder

DEFAULT_VOCAB_SIZE = 10_000
"""The bound of random token ids where the vocabulary is unknown, as in vLLM's latency benchmark."""
LOADING_SECONDS = 600.0
"""How long to wait for a server that listens and does not answer yet, as in vLLM's benchmark."""
ANSWER_SECONDS, PROGRESS_SECONDS, POLL = 5.0, 5.0, 0.5
"""The time of one attempt, between two lines of progress, and between two attempts."""
START_OR_WAIT = "start a server there (headrace serve), or give --ready-check-timeout-sec 600 to wait for one"
BUSY_CLIENT = 0.7
"""Share of a core above which the client itself may be what is measured."""


@dataclass(frozen=True)
class ServerFacts:
    """Holds what /v1/models says about the model; None where it says nothing."""

    model: str
    root: str | None
    max_model_len: int | None


def run(values: argparse.Namespace) -> int:
    options, dataset = build_config(ServeBenchOptions, values), build_config(DatasetOptions, values)
    if options.trace_speed != 1.0 and dataset.kind not in ("azure", "mooncake"):
        raise ConfigError("--trace-speed needs a trace (--dataset-name azure or mooncake)")
    metrics, percentiles = options.metrics, options.percentiles
    limits, metadata = options.goodput_limits, _metadata(options.metadata)
    base_url = (options.base_url or f"http://{options.host}:{options.port}").rstrip("/")
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    facts = uvloop.run(server_facts(base_url, headers, options))
    target = Target(
        base_url=base_url,
        endpoint=options.endpoint or ENDPOINTS[options.backend],
        backend=options.backend,
        model=facts.model,
        headers=headers,
        extra_body=options.extra_body,
        temperature=options.temperature,
        ignore_eos=options.ignore_eos,
    )
    tokenizer = _lazy_tokenizer(options)
    requests = load_requests(dataset, lambda: _counter(tokenizer()))
    vocab_size = options.vocab_size or known_vocab_size(options, facts) or DEFAULT_VOCAB_SIZE
    if options.backend == CHAT_BACKEND:
        requests = _as_texts(requests, PromptMaker(dataset.seed, vocab_size), tokenizer())
    _warn_of_long_requests(requests, facts.max_model_len)
    if options.ready_check_timeout_sec != 0:
        test_run(target, requests[0], dataset.seed, vocab_size, options)

    replay = requests[0].arrival is not None and options.request_rate == float("inf")
    if replay:
        times = trace_times(requests, options.trace_speed)
        print(f"Replaying {len(requests)} requests of a trace over {times[-1]:.1f} s")
    else:
        times = arrival_times(requests, options.request_rate, options.burstiness, dataset.seed)
        print(f"Traffic request rate: {options.request_rate}")
        print(f"Burstiness factor: {options.burstiness}")
    print(f"Maximum request concurrency: {options.max_concurrency}", flush=True)
    with progress_bar("requests", len(requests), options.disable_tqdm) as on_progress:
        report = run_clients(
            target,
            requests,
            times,
            dataset.seed,
            vocab_size,
            processes=options.num_client_processes,
            max_concurrency=options.max_concurrency,
            on_progress=on_progress,
        )
    summary = describe(options, facts.model, len(requests))
    summary |= summarize(report.results, report.duration, metrics, percentiles, limits)
    summary |= {"client_cpu_shares": report.cpu_shares, "events_per_output_token": events_per_token(report.results)}
    summary |= metadata
    print(table(summary, percentiles, _client_rows(report, summary["events_per_output_token"])))
    _print_errors(report.results)
    save(options, summary, report)
    return 0 if summary["completed"] else 1


async def server_facts(base_url: str, headers: dict[str, str], options: ServeBenchOptions) -> ServerFacts:
    """Wait until the server lists its models. Raises ClientError when it does not in time: at once where nothing
    listens on the port, unless the user says how long to wait."""
    client = HttpClient(base_url, headers, timeout=ANSWER_SECONDS)
    began = time.monotonic()
    limit = LOADING_SECONDS if options.ready_check_timeout_sec is None else options.ready_check_timeout_sec
    told = -PROGRESS_SECONDS
    try:
        while True:
            try:
                status, body = await client.get("/v1/models")
                text = body[:200].decode(errors="replace")
                problem = "" if status == 200 else f"{base_url}/v1/models answers HTTP {status}: {text}"
                if status in (401, 403):
                    raise ConfigError(f"{base_url} refuses the key (HTTP {status}); give --api-key")
                if status in (404, 405):  # it will not come with time
                    raise ConfigError(f"{base_url} is no OpenAI-compatible server: {problem}")
            except NobodyListensError as error:
                if options.ready_check_timeout_sec is None:
                    raise ClientError(f"{error}; {START_OR_WAIT}") from None
                problem = str(error)
            except ClientError as error:
                problem = str(error)
            if not problem:
                break
            waited = time.monotonic() - began
            if waited >= limit:
                raise ClientError(problem)
            if waited - told >= PROGRESS_SECONDS:
                print(f"waiting for {base_url}, {waited:.0f} of {limit:g} s: {problem}", file=sys.stderr, flush=True)
                told = waited
            await asyncio.sleep(POLL)
    finally:
        client.close()
    return facts_of(body, options.served_model_name or options.model)


def facts_of(body: bytes, wanted: str | None) -> ServerFacts:
    """Read the answer of /v1/models; `wanted` is the model's name that the user gave."""
    try:
        cards = [card for card in json.loads(body)["data"] if isinstance(card, dict) and card.get("id")]
    except (ValueError, KeyError, TypeError):
        cards = []
    card = next((card for card in cards if wanted is None or card["id"] == wanted), {})
    name = wanted or card.get("id")
    if name is None:
        raise ConfigError("the server lists no model; give --model")
    length = card.get("max_model_len")
    return ServerFacts(name, card.get("root"), length if isinstance(length, int) else None)


def known_vocab_size(options: ServeBenchOptions, facts: ServerFacts) -> int | None:
    """Read the vocabulary's size from config.json of the tokenizer, the model or the server, if it is on this disk."""
    for name in (options.tokenizer, options.model, facts.root, facts.model):
        folder = local_model_folder(name) if name else None
        if folder is not None:
            size = json.loads((folder / "config.json").read_text()).get("vocab_size")
            if isinstance(size, int):
                return size
    return None


def test_run(target: Target, first: BenchRequest, seed: int, vocab_size: int, options: ServeBenchOptions) -> None:
    """Send one request, then those of the warm-up. Raises HeadraceError if the first one fails."""
    print("Starting initial single prompt test run...", flush=True)
    # Not the first request itself, which would then be in the server's prefix cache when it is measured.
    request = first
    if first.text is None:
        request = BenchRequest(
            prompt_len=first.prompt_len, output_len=first.output_len, segments=[(TEST_STREAM, first.prompt_len)]
        )
    single = {"seed": seed, "vocab_size": vocab_size, "processes": 1, "on_progress": lambda done: None}
    result = run_clients(target, [request], [0.0], max_concurrency=None, **single).results[0]
    if not result.success:
        raise HeadraceError(f"initial test run failed: {result.error}")
    if options.num_warmups:
        print(f"Warming up with {options.num_warmups} requests...", flush=True)
        count = options.num_warmups
        run_clients(target, [request] * count, [0.0] * count, max_concurrency=options.max_concurrency, **single)


def describe(options: ServeBenchOptions, model: str, num_prompts: int) -> dict[str, Any]:
    """Return the head of the result file: the settings of the run."""
    rate = options.request_rate
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": model,
        "tokenizer_id": options.tokenizer or options.model or model,
        "num_prompts": num_prompts,
        "request_rate": "inf" if rate == float("inf") else rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
    }


def save(options: ServeBenchOptions, summary: dict[str, Any], report: LoadReport) -> None:
    """Write the result file, if one is asked for."""
    if not (options.save_result or options.result_filename):
        return
    concurrency = f"-concurrency{options.max_concurrency}" if options.max_concurrency else ""
    model = summary["model_id"].rstrip("/").split("/")[-1]
    label = options.label or options.backend
    name = options.result_filename or f"{label}-{options.request_rate}qps{concurrency}-{model}-{summary['date']}.json"
    path = Path(options.result_dir or ".", name)
    if options.save_detailed:
        results = report.results
        summary = summary | {
            "input_lens": [result.prompt_len for result in results],
            "output_lens": [result.output_len for result in results],
            "ttfts": [result.ttft for result in results],
            "itls": [result.itl for result in results],
            "latencies": [result.latency for result in results],
            "start_times": [result.start_time for result in results],
            "errors": [result.error for result in results],
        }
    write_json(path, summary)


def _metadata(pairs: list[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise ConfigError(f"--metadata must be KEY=VALUE, got {pair!r}")
    return dict(pair.split("=", 1) for pair in pairs)


def _lazy_tokenizer(options: ServeBenchOptions) -> Callable[[], Any]:
    def load() -> Any:
        name = options.tokenizer or options.model
        if name is None:
            raise ConfigError("prompts of text need a tokenizer: give --tokenizer (or --model) FOLDER")
        from headrace.engine.tokenizer import Tokenizer

        return Tokenizer.from_folder(resolve_tokenizer_folder(name))

    return load


def _counter(tokenizer: Any) -> Callable[[str], int]:
    return lambda text: len(tokenizer.encode(text))


def _as_texts(requests: list[BenchRequest], prompts: PromptMaker, tokenizer: Any) -> list[BenchRequest]:
    """Decode random ids, since a chat takes text only; the prompts get about the given lengths."""
    return [
        request
        if request.text is not None
        else msgspec.structs.replace(request, text=tokenizer.decode(prompts.token_ids(request)), segments=[])
        for request in requests
    ]


def _warn_of_long_requests(requests: list[BenchRequest], limit: int | None) -> None:
    if limit is None:
        return
    long = sum(request.prompt_len + request.output_len > limit for request in requests)
    if long:
        print(
            f"headrace: warning: {long} of {len(requests)} requests exceed the server's max_model_len ({limit}) "
            "and will fail; --max-input-len and --max-output-len cut those of a trace",
            file=sys.stderr,
        )


def _client_rows(report: LoadReport, events: float) -> list[tuple[str, str]]:
    busiest = max(report.cpu_shares)
    if busiest > BUSY_CLIENT and len(report.cpu_shares) < len(os.sched_getaffinity(0)):
        print(
            f"headrace: warning: the client was busy {busiest:.0%} of the time and may be what was measured; "
            "use --num-client-processes",
            file=sys.stderr,
        )
    shares = " ".join(f"{share:.1%}" for share in report.cpu_shares)
    return [("CPU share of each client process:", shares), ("Token events per output token:", f"{events:.3f}")]


def _print_errors(results: list[RequestResult]) -> None:
    errors = [result.error for result in results if not result.success]
    for error in list(dict.fromkeys(errors))[:10]:
        print(f"headrace: failed request: {' '.join(error.split())}", file=sys.stderr)
