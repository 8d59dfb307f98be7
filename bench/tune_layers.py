"""Which of our kernels, or the vendor's library, serves each linear of a dense layer best inside whole layers.

    python bench/tune_layers.py --out headrace/quantization/gemm_tables.json    Llama-3.1-8B, both types, every bucket
    python bench/tune_layers.py --sizes 6144,4096,14336 --dtypes fp8 --buckets 128 --out table.json
    TRITON_INTERPRET=1 python bench/tune_layers.py --smoke --out table.json         the script itself, on a CPU

A kernel alone, as tune_linears.py times it, starts behind another of its own kind; in a layer it shares the chip with
attention and small kernels, hands its sum to a norm half made, and prefers other tiles. Here graphs of layers over
distinct weights are timed, made of the very functions that serve, with a norm in attention's place; one linear is
varied at a time, from what the tables say now, and the best five of each are timed again beside the best of the others.
--sizes are outputs of qkv, hidden size, intermediate size. --out as in tune_linears.py.

What it is made of has run on an H200; in this form it has not yet.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from graph_timing import graph_seconds
from torch import Tensor
from tune_linears import (
    FP8,
    ITEMSIZES,
    Size,
    buckets_of,
    configs,
    short,
    table_parser,
    unquantized,
    write_table,
)

from headrace.kernels.gemm_config import BUCKETS, GemmConfig
from headrace.kernels.norm import whole
from headrace.kernels.table import TRITON_KERNELS
from headrace.quantization import gpu_linear
from headrace.quantization.fp8 import Fp8
from headrace.quantization.scheme import Around, LinearSpec, Scheme
from headrace.quantization.unquantized import Unquantized

LLAMA_8B = "6144,4096,14336"
NUM_LAYERS = 24
"""more weights than the caches hold"""
FINALISTS, REPEATS = 5, 9
WORTH = 1e-7
"""seconds a layer; less is noise"""
THREADS = 16
NORM: dict[str, Any] = {"norm_eps": 1e-5, "rms_norm": TRITON_KERNELS.rms_norm}
Plan = dict[str, GemmConfig | None]
"""linear -> what serves it; None: the library"""


class Layers:
    """Weights of several layers, and a batch of tokens."""

    def __init__(self, qkv: int, hidden: int, intermediate: int, itemsize: int, tokens: int, count: int) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype, self.itemsize, self.tokens = unquantized(self.device.type), itemsize, tokens
        shapes = {"qkv": (qkv, hidden), "o": (hidden, hidden), "gate_up": (2 * intermediate, hidden)}
        self.sizes = {
            name: Size(itemsize, *shape) for name, shape in {**shapes, "down": (hidden, intermediate)}.items()
        }
        held_as = FP8 if itemsize == 1 else self.dtype
        self.weights = [
            {
                name: torch.empty(size.out_features, size.in_features, device=self.device).normal_(0, 0.02).to(held_as)
                for name, size in self.sizes.items()
            }
            for _ in range(count)
        ]
        self.ones = torch.ones(hidden, device=self.device, dtype=self.dtype)
        self.attended = torch.randn(tokens, hidden, device=self.device).to(self.dtype)

    def scheme(self, plan: Plan) -> Scheme:
        """As a model's, but for its tables: `plan`, whatever the number of tokens."""
        tables = {
            (size.itemsize, size.out_features, size.in_features): [plan[name]] * (self.tokens + 1)
            for name, size in self.sizes.items()
        }
        if self.itemsize > 1:
            plain = Unquantized()
            plain.plans = tables
            return plain
        made = Fp8(per_channel=True)
        made.fp8, made.emulates, made.kernels, made.plans = FP8, False, TRITON_KERNELS, tables
        return made

    def layer(self, plan: Plan, weights: dict[str, Tensor]) -> Callable[[Any], Any]:
        """x, as a layer before leaves it -> the same."""
        scheme, computes = self.scheme(plan), {}
        activation: Any = TRITON_KERNELS.silu_and_mul
        if self.itemsize == 1:
            activation = partial(TRITON_KERNELS.silu_and_mul_quantized, fp8=FP8)
        normed, followed = Around(norm_weight=self.ones, **NORM), Around(next_norm=self.ones)
        around = {"qkv": normed, "o": followed, "down": followed}
        around["gate_up"] = Around(norm_weight=self.ones, activation=activation, **NORM)
        for name, size in self.sizes.items():
            held = {"weight": weights[name]}
            if self.itemsize == 1:
                held["weight_scale"] = torch.ones(size.out_features, device=self.device)
            spec = LinearSpec(size.in_features, size.out_features, (), self.dtype)
            computes[name] = scheme.finalize(spec, held, around[name])

        def run(x: Any) -> Any:
            computes["qkv"](x, None)
            attended = TRITON_KERNELS.rms_norm(self.attended, self.ones, 1e-5)  # stands for attention
            x = computes["o"](attended, whole(x))
            return computes["down"](computes["gate_up"](x, None), whole(x))

        return run

    def fresh(self) -> Tensor:
        return torch.randn(self.tokens, len(self.ones), device=self.device).to(self.dtype)

    def seconds(self, plan: Plan, repeats: int) -> float:
        """Of one layer."""
        layers, flowing = [self.layer(plan, weights) for weights in self.weights], [self.fresh()]

        def step(run: Callable[[Any], Any]) -> None:
            flowing[0] = run(flowing[0])

        if self.device.type == "cpu":
            step(layers[0])
            return 1.0
        return graph_seconds([partial(step, run) for run in layers], repeats)

    def compile(self, jobs: list[Plan]) -> list[Plan]:
        """Those that can run, compiled side by side."""

        def attempt(plan: Plan) -> bool:
            try:
                run = self.layer(plan, self.weights[0])
                run(run(self.fresh()))
            except Exception as error:  # not every configuration fits the chip: it is said, and not tried
                print(f"  cannot run {plan}: {type(error).__name__}: {str(error)[:80]}", flush=True)
                return False
            return True

        with ThreadPoolExecutor(1 if self.device.type == "cpu" else THREADS) as pool:
            ran = list(pool.map(attempt, jobs))
        return [plan for plan, fine in zip(jobs, ran, strict=True) if fine]


def tune(layers: Layers, base: Plan, tried: list[GemmConfig]) -> Plan:
    """The best of each linear, one after the other."""
    before = layers.seconds(base, REPEATS)
    best = dict(base)
    for name in layers.sizes:
        jobs = layers.compile([{**base, name: config} for config in (*tried, None)])
        timed = sorted(((layers.seconds(plan, 3), plan[name]) for plan in jobs), key=lambda one: one[0])
        told = " | ".join(f"{1e6 * (seconds - before):+.1f} {short(config)}" for seconds, config in timed[:4])
        print(f"  {name}, us a layer against now: {told}", flush=True)
        again = [(layers.seconds({**best, name: config}, REPEATS), config) for _, config in timed[:FINALISTS]]
        fastest, config = min(again, key=lambda one: one[0])
        if fastest < layers.seconds(best, REPEATS) - WORTH:
            best[name] = config
    after = layers.seconds(best, REPEATS)
    print(f"  a layer: {1e6 * before:.1f} -> {1e6 * after:.1f} us", flush=True)
    return best


def parser() -> argparse.ArgumentParser:
    return table_parser(__doc__, LLAMA_8B, "outputs of qkv, hidden size, intermediate size")


def main() -> int:
    options = parser().parse_args()
    if options.smoke:
        options.sizes, options.dtypes, options.buckets = "96,32,48", "bf16", "1,16"
    qkv, hidden, intermediate = map(int, options.sizes.split(","))
    buckets = buckets_of(options)
    name = "a CPU" if options.smoke else torch.cuda.get_device_name()
    known = gpu_linear._read(gpu_linear.SHIPPED, name)
    found: dict[Size, dict[int, GemmConfig | None]] = {}
    for dtype in options.dtypes.split(","):
        itemsize = ITEMSIZES[dtype]
        for bucket in buckets:
            print(f"{dtype}, {bucket} tokens", flush=True)
            layers = Layers(qkv, hidden, intermediate, itemsize, bucket, 1 if options.smoke else NUM_LAYERS)
            base: Plan = {}
            for linear, size in layers.sizes.items():
                plan = known.get((itemsize, size.out_features, size.in_features))
                base[linear] = plan[BUCKETS.index(bucket)] if plan else None
            for linear, config in tune(layers, base, configs(bucket, itemsize, options.smoke)).items():
                found.setdefault(layers.sizes[linear], {})[bucket] = config
            write_table(options.out, name, found)  # after every bucket
            del layers
    return 0


if __name__ == "__main__":
    sys.exit(main())
