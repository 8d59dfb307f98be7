"""Runs an engine of its own for the offline benchmarks, and checks lengths before anything is loaded."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from headrace.cli.bench.datasets import BenchRequest
from headrace.cli.bench.options import OfflineOptions
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.hub import resolve_model_folder
from headrace.models.served import read_served_config
from headrace.sampling_params import SamplingParams


def model_facts(config: EngineConfig) -> tuple[int, int]:
    """Return (vocab_size, max_model_len) before anything is loaded."""
    folder = resolve_model_folder(config.model, config.revision, config.download_dir, config.load_format)
    model = read_served_config(folder)
    return model.vocab_size, config.max_model_len or model.max_position_embeddings


def fitting(requests: list[BenchRequest], max_model_len: int) -> list[BenchRequest]:
    """Leave out, with a warning, the requests that are too long for the model. Raises ConfigError if none is left."""
    fit = [request for request in requests if request.prompt_len + request.output_len <= max_model_len]
    if not fit:
        raise ConfigError(f"every request of the dataset is longer than max_model_len ({max_model_len})")
    if len(fit) < len(requests):
        print(
            f"headrace: warning: {len(requests) - len(fit)} of {len(requests)} requests are longer than max_model_len "
            f"({max_model_len}) and left out",
            file=sys.stderr,
        )
    return fit


def check_lengths(longest: int, max_model_len: int) -> None:
    """Raise ConfigError where a request of `longest` tokens is too long for the model."""
    if longest > max_model_len:
        raise ConfigError(
            f"input and output together need {longest} tokens, more than max_model_len ({max_model_len}); "
            "lower --input-len or --output-len, or raise --max-model-len"
        )


def sampling_params(options: OfflineOptions, config: EngineConfig, output_len: int) -> SamplingParams:
    """Return the parameters of a request that makes exactly `output_len` tokens."""
    return SamplingParams(
        n=options.n,
        temperature=options.temperature,
        ignore_eos=True,
        max_tokens=output_len,
        detokenize=not (options.disable_detokenize or config.skip_tokenizer_init),
    )


def start_engine(config: EngineConfig) -> Any:
    """Load an LLM."""
    from headrace.llm import LLM

    return LLM(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


def warn_of_ragged_batches(num_prompts: int, max_num_seqs: int | None) -> None:
    """Warn where the last batch is not full, which makes the throughput look lower than it is."""
    if max_num_seqs and num_prompts > max_num_seqs and num_prompts % max_num_seqs:
        print(
            f"headrace: warning: --num-prompts {num_prompts} is not a multiple of max_num_seqs ({max_num_seqs}): "
            "the last batch runs part empty",
            file=sys.stderr,
        )
