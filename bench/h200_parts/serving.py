"""Measures over HTTP: a server's start, from exec to first token, and loads on a running server."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from server_process import Server, load, serving

from h200_parts.models import MODELS
from h200_parts.rows import Result
from h200_parts.run import Run
from headrace.cli.bench.client import HttpClient

START_SECONDS = 240.0
BUSY_CLIENT = 0.7
"""Share of a core above which the client itself may be what is measured."""
PROMPT = list(range(100, 228))
CACHES = ("HEADRACE_CACHE", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
"""Variables that say where a start keeps what it has made."""


def first_token_seconds(server: Server) -> float:
    """Return the time from the launch to the first token of a completion, sent as soon as the log names the URL."""
    url = server.wait_for_url(START_SECONDS)
    body = {"model": "", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}

    async def ask() -> float:
        client = HttpClient(url, {}, timeout=START_SECONDS)
        try:
            result = await client.stream("/v1/completions", msgspec.json.encode(body), 0, len(PROMPT))
        finally:
            client.close()
        if not result.success:
            raise RuntimeError(f"the first request failed: {result.error}")
        return result.start_time + result.ttft - server.launched

    return asyncio.run(ask())


STARTS = {"start": "bf16", "start-gpt-oss-20b": "gpt-oss-20b"}
"""part -> the model that is served"""


def start_rows(run: Run) -> None:
    """Time two starts with caches of this run alone: empty ones, and those that the first start left."""
    flags = run.settings.serve_flags(MODELS[STARTS[run.part]])
    environment = {variable: str(run.settings.work / variable.lower()) for variable in CACHES}
    for name in ("first", "again"):
        with serving(flags, environment) as server:
            seconds = first_token_seconds(server)
        log = "\n".join(server.lines[:60])
        print(f"\n{run.part}/{name}: first token after {seconds:.2f} s; the server's log:\n{log}")
        run.emit(Result(f"{run.part}/{name}", seconds))


def serve_rows(run: Run) -> None:
    """Measure three loads on one server: one request at a time, all at once, and 16 requests a second."""
    run.measure_chip()
    with serving(run.settings.serve_flags(MODELS["bf16"])) as server:
        url = server.wait_for_url(START_SECONDS)
        print(f"server ready after {time.monotonic() - server.launched:.1f} s", flush=True)
        first_token_seconds(server)
        run_loads(run, url)
        warnings = [line for line in server.lines if " WARNING " in line]
        print("\n".join(["the server's warnings:", *(warnings or ["none"])]), flush=True)


def run_loads(run: Run, url: str) -> None:
    """Emit the rows of the three loads on the server at `url`."""
    summary, shared = run_load(run, url, 20, 128, 128, max_concurrency=1)
    run.emit(Result("served/single/ttft", summary["median_ttft_ms"], **shared))
    run.emit(Result("served/single/tpot", summary["median_tpot_ms"], **shared))
    summary, shared = run_load(run, url, 1000, 128, 512)
    run.emit(Result("served/at-once", summary["output_throughput"], **shared))
    summary, shared = run_load(run, url, 400, 1024, 128, request_rate=16)
    for statistic, metrics in (("p50", ("ttft", "tpot", "itl", "e2el")), ("p99", ("ttft", "itl"))):
        for metric in metrics:
            key = f"{'median' if statistic == 'p50' else statistic}_{metric}_ms"
            run.emit(Result(f"served/rate/{metric}-{statistic}", summary[key], **shared))


def run_load(
    run: Run, url: str, requests: int, input_len: int, output_len: int, **flags: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run `headrace bench serve`; return its result file, and what every row of this load shares."""
    settings = run.settings
    summary = load(
        url, random_input_len=settings.tokens(input_len), random_output_len=settings.tokens(output_len),
        num_prompts=settings.requests(requests), vocab_size=settings.vocab_size(MODELS["bf16"]),
        num_client_processes=4, **flags,
    )  # fmt: skip
    tokens = {"prompt": summary["total_input_tokens"], "output": summary["total_output_tokens"]}
    asked = settings.requests(requests) * settings.tokens(output_len)
    shares = summary["client_cpu_shares"]
    notes = [
        f"client processes busy {' '.join(f'{share:.0%}' for share in shares)}",
        f"{summary['events_per_output_token']:.3f} events a token",
        "with tokenizer" if settings.tokenizer else "without tokenizer",
    ]
    if summary["failed"]:
        notes.append(f"{summary['failed']} requests failed")
    if max(shares) > BUSY_CLIENT:
        notes.append(f"the client was busier than {BUSY_CLIENT:.0%}")
    valid = max(shares) <= BUSY_CLIENT and not summary["failed"] and tokens["output"] == asked
    return summary, {"tokens": tokens, "notes": notes, "valid": valid}
