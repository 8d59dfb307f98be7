"""A KV cache in fp8 that nobody asked for: where it is taken, and when it is given back.

It rounds, so a start that finds that it moves this model too far goes on without it, and every start says what it
found and how to do without. What it moves, runner/kv_scales.py measures.
"""

from __future__ import annotations

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.planner.chips import Chip, find_chip, read_gpus
from headrace.planner.record import Decision
from headrace.step import WorkerFacts

MOST_UNASKED = 0.1
"""Most that hidden states may move where nobody asked: twice what is measured on the demo model, and half of what ten
standard deviations of bias on K make of one; runner/kv_scales.py has what is served to whoever asks."""
ROUNDED = (
    "a byte a number is read in half the time and leaves room for twice the requests; a start that finds hidden states "
    f"moved by over {MOST_UNASKED:.0%} goes back"
)


def rounds_cache(objective: str | None, dtype: str, chip: Chip) -> bool:
    """Whether K and V are kept in fp8 where nobody says how: not where the one request that runs is to be fast, which
    gains least. On Hopper alone: there it has run. `dtype` is of activations; whoever wants 32 bits wants no eight."""
    return _may_round(objective, dtype) and chip.arch == "sm_90"


def _may_round(objective: str | None, dtype: str) -> bool:
    return objective != "latency" and dtype != "float32"


def rounds_cache_here(config: EngineConfig, dtype: str, device_type: str) -> bool:
    """The same on the GPUs of this machine, for a start."""
    if device_type != "cuda" or config.batch_invariant or not _may_round(config.objective, dtype):
        return False
    try:
        chips = [find_chip(name, memory) for name, memory in read_gpus()]
    except ConfigError:  # no plan is made for such a GPU
        return False
    return bool(chips) and all(rounds_cache(config.objective, dtype, chip) for chip in chips)


def settled_cache(config: EngineConfig, asked: bool, facts: list[WorkerFacts]) -> tuple[EngineConfig, Decision] | None:
    """After a load: the config and decision to load again with, because the fp8 cache moves hidden states too far;
    None: it does not. `asked`: for fp8, by the user or the checkpoint.

    Raises ConfigError where what was asked for moves them so far that it is never served.
    """
    name, dtype = config.kv_cache_dtype, config.dtype
    worst = max(facts, key=lambda fact: (fact.kv_cache_error != fact.kv_cache_error, fact.kv_cache_error))
    moved = f"the cache in {name} moves hidden states by {worst.kv_cache_error:.1%}"
    if asked and worst.kv_cache_remedy:
        raise ConfigError(
            f"kv_cache_dtype {name}: {moved}: K or V has outliers, beside which the rest is lost; use "
            f"{worst.kv_cache_remedy}"
        )
    if asked or worst.kv_cache_error <= MOST_UNASKED:
        return None
    reason = (
        f"{moved}, and {MOST_UNASKED:.0%} is the most where nobody asked for it; --kv-cache-dtype {dtype} saves the "
        "next start the second load"
    )
    return config.replace(kv_cache_dtype=dtype), Decision("kv_cache_dtype", dtype, reason, name, source="measured")
