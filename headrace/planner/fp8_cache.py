"""Decides whether the KV cache is in fp8, which is lossy: only `--objective throughput` takes it unasked.

A start that took it for the objective alone, and finds that it changes this model's hidden states too much, goes on
without it. runner/kv_scales.py measures how much.
"""

from __future__ import annotations

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.planner.chips import Chip, find_chip, read_gpus
from headrace.planner.record import Decision
from headrace.step import WorkerFacts

MOST_FOR_THROUGHPUT = 0.1
"""Largest relative change of hidden states where the objective alone asked: twice what is measured on the demo model,
and half of what ten standard deviations of bias on K make of one. runner/kv_scales.py has the limit for those who name
the type."""
FP8 = "fp8_e4m3"
TAKEN = (
    "--objective throughput takes it: twice the tokens, read in half the time, but rounded; a start that finds hidden "
    f"states moved by over {MOST_FOR_THROUGHPUT:.0%} goes back"
)
LOSSLESS = "the model's, so the cache rounds nothing"
OFFERED = "fp8, which rounds: twice the tokens, read in half the time, by --kv-cache-dtype fp8"


def cached_bytes(kv_dtype: str) -> float:
    """Return the bytes of a cached number."""
    return 1.0 if kv_dtype.startswith("fp8") else 4.0 if kv_dtype == "float32" else 2.0


def runs_fp8_cache(dtype: str, chip: Chip) -> bool:
    """Tell whether an fp8 cache has run on the chip and suits activations in `dtype`: whoever wants 32 bits wants no
    8."""
    return dtype != "float32" and chip.arch == "sm_90"


def runs_fp8_cache_here(config: EngineConfig, dtype: str, device_type: str) -> bool:
    """Tell whether `runs_fp8_cache` holds for all GPUs of this machine."""
    if device_type != "cuda" or config.batch_invariant:
        return False
    try:
        chips = [find_chip(name, memory) for name, memory in read_gpus()]
    except ConfigError:  # no plan is made for such a GPU
        return False
    return bool(chips) and all(runs_fp8_cache(dtype, chip) for chip in chips)


def cache_for(objective: str | None, dtype: str) -> tuple[str, str, str]:
    """Choose (type of the cache, why, runner-up), where an fp8 cache runs and nobody names a type."""
    if objective == "throughput":
        return FP8, TAKEN, f"{dtype}, which rounds nothing"
    other = "" if objective == "latency" else f"{OFFERED} or --objective throughput"  # one request gains least
    return dtype, LOSSLESS, other


def settled_cache(config: EngineConfig, asked: bool, facts: list[WorkerFacts]) -> tuple[EngineConfig, Decision] | None:
    """Return the config to load again with, and why, where the fp8 cache of a load changes hidden states too much;
    None: it does not. `asked`: the user or the checkpoint named fp8.

    Raises ConfigError where it was asked for and changes them so much that it is never served.
    """
    name, dtype = config.kv_cache_dtype, config.dtype
    worst = _worst(facts)
    moved = f"the cache in {name} moves hidden states by {worst.kv_cache_error:.1%}"
    if asked and worst.kv_cache_remedy:
        raise ConfigError(
            f"kv_cache_dtype {name}: {moved}: K or V has outliers, beside which the rest is lost; use "
            f"{worst.kv_cache_remedy}"
        )
    if asked or worst.kv_cache_error <= MOST_FOR_THROUGHPUT:
        return None
    reason = (
        f"{moved}, and {MOST_FOR_THROUGHPUT:.0%} is the most that --objective throughput takes by itself; "
        f"--kv-cache-dtype {dtype} saves the next start the second load"
    )
    return config.replace(kv_cache_dtype=dtype), Decision("kv_cache_dtype", dtype, reason, name, source="measured")


def describe_lossy_cache(config: EngineConfig, facts: list[WorkerFacts], num_pages: int) -> str:
    """Write a line for the log on what an fp8 cache gains and costs; empty where the cache rounds nothing."""
    name, dtype = config.kv_cache_dtype, config.dtype
    if not name.startswith("fp8"):
        return ""
    wider = 4 if dtype == "float32" else 2
    layout = facts[0].layout
    tokens, kib = layout.tokens_in(num_pages, config.max_model_len or 1), layout.bytes_per_token / 1024
    return (
        f"The KV cache is lossy: {name} holds {tokens:,} tokens where {dtype} would hold {tokens // wider:,}, of "
        f"{kib:.4g} KiB each on a rank instead of {wider * kib:.4g}, read in 1/{wider} of the time; it moves hidden "
        f"states by {_worst(facts).kv_cache_error:.1%}"
    )


def _worst(facts: list[WorkerFacts]) -> WorkerFacts:
    """The rank whose hidden states change most; one whose error is NaN counts most."""
    return max(facts, key=lambda fact: (fact.kv_cache_error != fact.kv_cache_error, fact.kv_cache_error))
