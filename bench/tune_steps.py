"""Which of our kernels, or the vendor's library, serves each linear of a model best inside the engine's decode steps.

    python bench/tune_steps.py --model bf16 --batches 8,32 --out headrace/quantization/gemm_tables.json
    python bench/tune_steps.py --model fp8 --batches 1 --sizes 28672x4096 --out table.json
    python bench/tune_steps.py --smoke --out table.json     its engine and its clock, on a CPU, which has no such tables

A kernel alone, as tune_linears.py times it, starts behind another of its own kind. In a step it shares the chip with
attention and with the product behind it, whose first weights need shared memory of their own: the fastest alone may not
be the fastest there. One linear is varied at a time, for the batch's bucket, from what the tables say now, out of those
that agree with fp32; the best five are timed again, between two timings of what serves now. A configuration takes
two seconds at small batches. --out as in tune_linears.py; sizes are outputs x inputs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from h200_parts.models import MODELS
from h200_parts.offline import INPUT, Bench
from h200_parts.settings import Settings
from tune_linears import BUCKETS, INEXACT, Inputs, Size, configs, short, weights_of, write_table

from headrace.cli.bench.latency import summarize_latency
from headrace.kernels.gemm_config import GemmConfig
from headrace.quantization.scheme import GemmTable

OUTPUT = 96
FINALISTS, REPEATS = 5, 3
WORTH = 0.997
"""of the time now; more is noise"""
THREADS = 16
Config = GemmConfig | None
"""None: the library"""


def best_of(milliseconds: Callable[[Config, int], float], now: Config, tried: list[Config]) -> Config:
    """`milliseconds` of a step with a configuration, out of so many runs; printed as it goes."""
    times = sorted(((milliseconds(config, 1), config) for config in tried if config != now), key=lambda one: one[0])
    before = milliseconds(now, REPEATS)
    again = [(milliseconds(config, REPEATS), config) for _, config in times[:FINALISTS]]
    before = min(before, milliseconds(now, REPEATS))
    told = " | ".join(f"{time:.3f} {short(config)}" for time, config in sorted(again, key=lambda one: one[0]))
    print(f"    now {before:.3f} {short(now)}; {told}", flush=True)
    fastest, config = min(again, key=lambda one: one[0], default=(before, now))
    return config if fastest < WORTH * before else now


class Steps:
    """Decode steps of one engine, whose tables are the ones that it serves with."""

    def __init__(self, settings: Settings, model: str) -> None:
        self.settings = settings
        self.bench = Bench(settings, MODELS[model], ceilings=None)  # type: ignore[arg-type]  # no bound is asked for
        self.prompts: dict[int, list[list[int]]] = {}
        """of a batch: the same ones in every run, so that the same experts are chosen"""
        self.runner: Any = self.bench.llm._client._core._executor._worker.runner
        schemes = {id(layer.scheme): layer.scheme for layer in self.runner.model.modules() if hasattr(layer, "scheme")}
        self.tables: dict[Size, GemmTable] = {}
        for scheme in schemes.values():
            self.tables |= {Size(*size): table for size, table in getattr(scheme.product, "tables", {}).items()}

    def milliseconds(self, batch: int, repeats: int) -> float:
        """Of one step, by what the tables say now; out of medians."""
        self.runner.renew_graphs()
        if batch not in self.prompts:
            self.prompts[batch] = self.bench.prompts(self.settings.requests(batch), self.settings.tokens(INPUT))
        length = self.settings.tokens(OUTPUT)
        found = summarize_latency(*self.bench.whole_and_first(self.prompts[batch], length, repeats), length)
        return float(found["decode_step_ms"])

    def tune(self, batch: int, size: Size) -> tuple[int, Config]:
        """(bucket, what serves it best), which from now on it does."""
        table = self.tables[size]
        bucket = next(bucket for bucket in BUCKETS if bucket >= batch)
        span = range(max([0, *(smaller for smaller in BUCKETS if smaller < bucket)]) + 1, bucket + 1)

        def put(config: Config) -> None:
            for tokens in span:
                table[tokens] = config

        def milliseconds(config: Config, repeats: int) -> float:
            put(config)
            return self.milliseconds(batch, repeats)

        now = table[batch]
        best = best_of(milliseconds, now, [*runnable(size, bucket), None])
        put(best)
        return bucket, best


def runnable(size: Size, bucket: int) -> list[Config]:
    """Those that fit this GPU and agree with fp32; compiled side by side, alone and with what a step adds to them."""
    inputs = Inputs(size, bucket, weights_of(size, torch.device("cuda"), one=True))
    weight, ones = inputs.weights[0], torch.ones(size.out_features, device="cuda", dtype=inputs.dtype)

    def attempt(config: GemmConfig) -> bool:
        next_norm = ones if inputs.quantized is None or config.block_m == 1 else None
        try:
            error = inputs.error(config)
            inputs.ours(config, weight, gated=True)
            inputs.ours(config, weight, residual=ones.repeat(bucket, 1), next_norm=next_norm)
            torch.cuda.synchronize()
        except Exception as failure:  # whatever it is, it is said, and this one is not tried
            print(f"    cannot run {short(config)}: {type(failure).__name__}: {str(failure)[:80]}", flush=True)
            return False
        if not error < INEXACT:
            print(f"    WRONG {short(config)}: {error:.1e}", flush=True)
        return error < INEXACT

    found = configs(bucket, size.itemsize)
    with ThreadPoolExecutor(THREADS) as pool:
        return [config for config, fine in zip(found, pool.map(attempt, found), strict=True) if fine]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True, help="the table to write, or to write into")
    made.add_argument("--model", choices=list(MODELS), default="bf16")
    made.add_argument("--batches", default="1,8,32,64,128", help="requests; each stands for its bucket of tokens")
    made.add_argument("--sizes", help="linears to vary; default: all that the model's tables name")
    made.add_argument("--smoke", action="store_true", help="a toy model on the CPU, which has no such tables")
    return made


def main() -> int:
    options = parser().parse_args()
    batches = [int(batch) for batch in options.batches.split(",")]
    if beyond := [batch for batch in batches if not 1 <= batch <= BUCKETS[-1]]:
        raise SystemExit(f"batches of 1 to {BUCKETS[-1]} have a bucket, not {beyond}")
    name = "a CPU" if options.smoke else torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as work:
        steps = Steps(Settings(Path(work), options.smoke), options.model)
        by_name = {f"{size.out_features}x{size.in_features}": size for size in steps.tables}
        asked = options.sizes.split(",") if options.sizes else list(by_name)
        if unknown := [one for one in asked if one not in by_name]:
            raise SystemExit(f"unknown sizes {unknown}; the model has {list(by_name)}")
        found: dict[Size, dict[int, Config]] = {}
        for batch in batches:
            before = steps.milliseconds(batch, REPEATS)
            for size in map(by_name.__getitem__, asked):
                print(f"  batch {batch}, {size}, ms a step", flush=True)
                bucket, config = steps.tune(batch, size)
                found.setdefault(size, {})[bucket] = config
                write_table(options.out, name, found)  # after every one
            print(f"batch {batch}: {before:.3f} -> {steps.milliseconds(batch, REPEATS):.3f} ms", flush=True)
        steps.bench.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
