"""Runs `headrace bench throughput`: many prompts at once through an engine of its own."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from headrace.cli.arguments import build_config
from headrace.cli.bench.datasets import PromptMaker, load_requests
from headrace.cli.bench.offline import (
    check_lengths,
    fitting,
    model_facts,
    sampling_params,
    start_engine,
    warn_of_ragged_batches,
)
from headrace.cli.bench.options import DatasetOptions, ThroughputOptions
from headrace.cli.bench.output import write_json
from headrace.config import EngineConfig
from headrace.hub import resolve_tokenizer_folder


def run(values: argparse.Namespace) -> int:
    options, dataset = build_config(ThroughputOptions, values), build_config(DatasetOptions, values)
    config = build_config(EngineConfig, values, enable_prefix_caching=False)
    vocab_size, max_model_len = model_facts(config)

    def counter() -> Any:
        from headrace.engine.tokenizer import Tokenizer

        folder = resolve_tokenizer_folder(config.tokenizer or config.model, config.revision, config.download_dir)
        tokenizer = Tokenizer.from_folder(folder)
        return lambda text: len(tokenizer.encode(text))

    requests = load_requests(dataset, counter)
    if dataset.kind == "random":
        check_lengths(max(request.prompt_len + request.output_len for request in requests), max_model_len)
    else:
        requests = fitting(requests, max_model_len)
    maker = PromptMaker(dataset.seed, vocab_size)
    prompts = [request.text if request.text is not None else maker.token_ids(request) for request in requests]
    params = [sampling_params(options, config, request.output_len) for request in requests]
    llm = start_engine(config)
    try:
        warn_of_ragged_batches(len(requests), llm.config.max_num_seqs)
        if options.num_warmups:
            llm.generate(prompts[: options.num_warmups], params[: options.num_warmups], use_tqdm=False)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=not options.disable_tqdm)
        elapsed = time.perf_counter() - start
    finally:
        llm.shutdown()
    result = summarize_throughput(outputs, elapsed)
    print(report(result))
    if options.output_json:
        write_json(Path(options.output_json), result)
    return 0


def summarize_throughput(outputs: list[Any], elapsed: float) -> dict[str, Any]:
    """Return vLLM's keys and output_tokens_per_second, counted from the outputs."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return {
        "elapsed_time": elapsed,
        "num_requests": len(outputs),
        "total_num_tokens": num_prompt + num_output,
        "total_num_output_tokens": num_output,
        "requests_per_second": len(outputs) / elapsed,
        "tokens_per_second": (num_prompt + num_output) / elapsed,
        "output_tokens_per_second": num_output / elapsed,
    }


def report(result: dict[str, Any]) -> str:
    num_prompt = result["total_num_tokens"] - result["total_num_output_tokens"]
    return (
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s\n"
        f"Total num prompt tokens:  {num_prompt}\n"
        f"Total num output tokens:  {result['total_num_output_tokens']}"
    )
