"""Tunes linears over few tokens on this GPU: which of our configurations, or the vendor's library, is the fastest.

    python bench/tune_linears.py --out table.json              all SIZES, bf16 and fp8 (a GPU and many cores; minutes)
    python bench/tune_linears.py --sizes 6144x4096,4096x4096 --dtypes bf16 --buckets 16,32 --out table.json
    TRITON_INTERPRET=1 python bench/tune_linears.py --smoke --out table.json         the script itself, on a CPU

Sizes are outputs x inputs, as a rank has them. Every configuration is compiled (in parallel), compared with fp32 and
timed alone; the best 8 and the library are then timed behind a small kernel (a norm), as in a step, where our kernels
start while the norm still runs. The fastest there is the bucket's entry, null where that is the library. Prints the
four fastest of each bucket. --out has the form of headrace/quantization/gemm_tables.json; entries of a file that is
there already stay for other sizes, devices and buckets, so it may be that very file.

The shipped entries of Llama-3.1-8B's sizes were chosen inside whole layers, some in whole decode steps of the engine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import graph_seconds, relative_error
from torch import Tensor
from tuning import FP8, INEXACT, SHARED_MEMORY, add_common_flags, compile_all, plain_dtype

from headrace.kernels.fp8 import NarrowWeight, fp8_linear, quantize_per_token
from headrace.kernels.gemm import skinny_linear
from headrace.kernels.gemm_config import BUCKETS, GemmConfig
from headrace.kernels.norm import rms_norm
from headrace.quantization.gpu_linear import VERSION

SIZES = "6144x4096,4096x4096,28672x4096,4096x14336,128256x4096,5120x2048,2048x4096,151936x2048"
"""of Llama-3.1-8B and of Qwen3-30B-A3B"""
ITEMSIZES = {"bf16": 2, "fp8": 1}
POOL_BYTES = 1 << 30
"""of weights that are read in turn, so that no cache holds them"""
MOST_COPIES = 24
FINALISTS = 8

ONE_BY_ONE = (
    (4, 1024, 4), (2, 2048, 8), (2, 4096, 4), (4, 2048, 8), (2, 1024, 4), (1, 2048, 4), (4, 2048, 4), (8, 1024, 4),
    (8, 1024, 2), (16, 1024, 8), (16, 1024, 4), (4, 512, 2), (2, 1024, 2), (2, 4096, 8),
)  # fmt: skip
"""(block_n, block_k, warps) for one token, without the matrix units; for fp8, block_k also twice as long"""
TILES = (
    (16, 256, 1, 1), (16, 256, 1, 2), (16, 256, 1, 3), (16, 256, 1, 4), (16, 256, 2, 4), (16, 256, 2, 6),
    (16, 512, 1, 2), (16, 512, 2, 1), (16, 512, 2, 2), (16, 512, 2, 3), (16, 512, 2, 4), (16, 512, 4, 3),
    (16, 1024, 2, 2), (16, 1024, 4, 2),
    (32, 128, 2, 4), (32, 128, 4, 6), (32, 128, 4, 8), (32, 256, 2, 3), (32, 256, 4, 3), (32, 256, 4, 4),
    (32, 256, 4, 5), (32, 512, 4, 2), (32, 512, 4, 3), (64, 128, 4, 5),
)  # fmt: skip
"""(block_n, block_k, warps, stages), the tokens as the left operand; block_k of 16-bit weights, twice it for fp8"""
SWAPPED = (
    (64, 64, 4, 8), (64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 5), (64, 128, 4, 6), (64, 256, 4, 2),
    (64, 256, 4, 3), (64, 256, 4, 4), (64, 256, 4, 5), (64, 512, 4, 2), (64, 512, 4, 3), (128, 64, 4, 6),
    (128, 64, 4, 8), (128, 128, 4, 3), (128, 128, 4, 4), (128, 128, 8, 4), (128, 256, 8, 3),
)  # fmt: skip
"""the same with the weight as the left operand"""
WIDE = tuple(itertools.product((64, 128, 256), (64, 128), (4, 8), (3, 4, 5)))
"""both ways for 128 tokens, where a program takes all of them or half"""


@dataclass(frozen=True)
class Size:
    """A linear layer's size, as a rank has it."""

    itemsize: int
    """bytes of a weight"""
    out_features: int
    in_features: int

    def __str__(self) -> str:
        return f"{'fp8' if self.itemsize == 1 else 'bf16'} {self.out_features}x{self.in_features}"


Job = tuple[int, int, GemmConfig]
"""(bytes of a weight, tokens, configuration)"""


def configs(bucket: int, itemsize: int, smoke: bool = False) -> list[GemmConfig]:
    """Return the configurations to try for `bucket` tokens, without those whose buffers are too large for the chip."""
    longer = 2 // itemsize
    found = []
    if bucket == 1:
        lengths = (1,) if longer == 1 else (1, longer)
        found = [GemmConfig(1, n, k * times, warps) for n, k, warps in ONE_BY_ONE for times in lengths]
    for block_m in (64, 128) if bucket == 128 else (max(16, bucket),):
        for shapes, swap in ((TILES, False), (SWAPPED, True)) if bucket < 128 else ((WIDE, False), (WIDE, True)):
            for n, k, warps, stages in shapes:
                large = stages * (n + block_m) * k * 2 > SHARED_MEMORY or block_m * n > 4096 * warps
                if not (large or (block_m >= 64 and n < 32)):
                    found.append(GemmConfig(block_m, n, k * longer, warps, stages, swap))
    return found[:: len(found) // 2] if smoke else found


class Inputs:
    """Holds a batch of tokens and several weights of one size."""

    def __init__(self, size: Size, tokens: int, weights: list[Tensor]) -> None:
        device = weights[0].device
        self.dtype = plain_dtype(device.type)
        self.size, self.weights = size, weights
        self.x = torch.randn(tokens, size.in_features, device=device).to(self.dtype)
        self.scales = torch.rand(size.out_features, device=device) + 0.5
        self.quantized = quantize_per_token(self.x, FP8) if size.itemsize == 1 else None
        self.ones = torch.ones(size.in_features, device=device, dtype=self.dtype)

    def ours(self, config: GemmConfig, weight: Tensor, x: Tensor | None = None) -> Tensor:
        """Run our kernel, on `x` in place of the batch where it is not fp8."""
        held = weight if self.quantized is None else NarrowWeight(weight, self.scales)
        given: Any = self.x if x is None else x
        if self.quantized is not None and config.block_m > 1:
            given = self.quantized
        out: Tensor = skinny_linear(given, held, None, config, self.dtype)
        return out

    def library(self, weight: Tensor, x: Tensor | None = None) -> Tensor:
        if self.quantized is not None:
            return fp8_linear(self.quantized, weight, self.scales, None, self.dtype)
        return F.linear(self.x if x is None else x, weight)

    def behind_a_norm(self, run: Callable[..., Tensor], weight: Tensor) -> Tensor:
        return run(weight, rms_norm(self.x, self.ones, 1e-5))

    def error(self, config: GemmConfig) -> float:
        """Return how far our kernel is from fp32 on the same inputs."""
        weight = self.weights[0]
        x = self.x.float()
        if self.quantized is not None and config.block_m > 1:
            x = self.quantized.dequantize(torch.float32)
        exact = F.linear(x, weight.float())
        exact = exact if self.quantized is None else exact * self.scales
        return relative_error(self.ours(config, weight), exact)


def weights_of(size: Size, device: torch.device, one: bool) -> list[Tensor]:
    """Return enough weights to be timed, or one."""
    count = size.out_features * size.in_features
    copies = 1 if one else max(2, min(MOST_COPIES, POOL_BYTES // (count * size.itemsize)))
    shape, dtype = (size.out_features, size.in_features), FP8 if size.itemsize == 1 else plain_dtype(device.type)
    std = 1.0 if size.itemsize == 1 else 0.02
    return [torch.empty(shape, device=device).normal_(0, std).to(dtype) for _ in range(copies)]


def launch_once(job: Job) -> None:
    """Compile one configuration. The size only matters as far as blocks divide it."""
    itemsize, tokens, config = job
    weight = torch.zeros(4096, 4096, device="cuda").to(FP8 if itemsize == 1 else torch.bfloat16)
    Inputs(Size(itemsize, 4096, 4096), tokens, [weight]).ours(config, weight)


def short(config: GemmConfig | None) -> str:
    if config is None:
        return "library"
    swap = " swap" if config.swap else ""
    return f"{config.block_m}x{config.block_n}x{config.block_k} w{config.num_warps} s{config.num_stages}{swap}"


def best(inputs: Inputs, tried: list[GemmConfig], label: str) -> GemmConfig | None:
    """Return the fastest configuration behind a norm; None: the library."""

    def alone(run: Callable[..., Tensor]) -> float:
        return graph_seconds([partial(run, weight) for weight in inputs.weights])

    def behind(run: Callable[..., Tensor]) -> float:
        return graph_seconds([partial(inputs.behind_a_norm, run, weight) for weight in inputs.weights])

    times = []
    for config in tried:
        if not (wrong := inputs.error(config)) < INEXACT:
            print(f"  WRONG {label} {short(config)}: {wrong:.1e}", flush=True)
            continue
        times.append((alone(partial(inputs.ours, config)), config))
    times.sort(key=lambda one: one[0])
    rows: list[tuple[float, float, GemmConfig | None]] = [
        (behind(partial(inputs.ours, config)), time, config) for time, config in times[:FINALISTS]
    ]
    rows.append((behind(inputs.library), alone(inputs.library), None))
    rows.sort(key=lambda one: one[0])
    shown = rows[:4] + [row for row in rows[4:] if row[2] is None]
    told = " | ".join(f"{1e6 * b:.1f}/{1e6 * a:.1f} {short(config)}" for b, a, config in shown)
    print(f"{label}, us behind a norm/alone: {told}", flush=True)
    return rows[0][2]


Plans = dict[tuple[int, ...], list[dict[str, Any] | None]]
"""(bytes an element, out_features, in_features) -> an entry a bucket"""


def write_table(path: Path, device: str, tuned: dict[Size, dict[int, GemmConfig | None]]) -> None:
    """Replace the file's entries of these sizes and buckets; other buckets of a size that is new there are null."""
    devices: dict[str, list[dict[str, Any]]] = json.loads(path.read_text())["devices"] if path.exists() else {}
    plans: Plans = {tuple(entry["size"]): entry["plan"] for entry in devices.get(device, [])}
    for size, entries in tuned.items():
        key = (size.itemsize, size.out_features, size.in_features)
        plan = list(plans.get(key, [None] * len(BUCKETS)))
        for bucket, config in entries.items():
            plan[BUCKETS.index(bucket)] = config and asdict(config)
        plans[key] = plan
    devices[device] = [{"size": list(size), "plan": plan} for size, plan in plans.items()]
    path.write_text(table_text(devices))


def table_text(devices: dict[str, list[dict[str, Any]]]) -> str:
    """Format a line a launch, so that a diff of two tables can be read."""
    blocks = []
    for name, entries in devices.items():
        sizes = []
        for entry in entries:
            plan = ",\n".join(f"    {json.dumps(config)}" for config in entry["plan"])
            sizes.append(f'   {{"size": {json.dumps(entry["size"])}, "plan": [\n{plan}\n   ]}}')
        blocks.append(f"  {json.dumps(name)}: [\n" + ",\n".join(sizes) + "\n  ]")
    return f'{{\n "version": {VERSION},\n "devices": {{\n' + ",\n".join(blocks) + "\n }\n}\n"


def sizes_of(options: argparse.Namespace) -> Iterator[Size]:
    for dtype in options.dtypes.split(","):
        for size in options.sizes.split(","):
            out_features, in_features = map(int, size.split("x"))
            itemsize = ITEMSIZES[dtype]
            if itemsize == 2 or out_features < 100_000:  # the output layer is not quantized
                yield Size(itemsize, out_features, in_features)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True, help="the table to write, or to write into")
    made.add_argument("--sizes", default=SIZES, help="outputs x inputs, separated by commas")
    made.add_argument("--dtypes", default="bf16,fp8", help="of the weights; default: both")
    made.add_argument("--buckets", default=",".join(map(str, BUCKETS)), help="numbers of tokens")
    add_common_flags(made)
    return made


def main() -> int:
    options = parser().parse_args()
    device = torch.device("cpu" if options.smoke else "cuda")
    name = "a CPU" if options.smoke else torch.cuda.get_device_name(device)
    if options.smoke:
        options.sizes, options.buckets = "64x96", "1,16"
    buckets = [int(bucket) for bucket in options.buckets.split(",")]
    if unknown := set(buckets) - set(BUCKETS):
        raise SystemExit(f"unknown bucket {sorted(unknown)}; buckets are {list(BUCKETS)}")
    sizes = list(sizes_of(options))
    jobs = [
        (itemsize, bucket, config)
        for itemsize in sorted({size.itemsize for size in sizes})
        for bucket in buckets
        for config in configs(bucket, itemsize, options.smoke)
    ]
    bad = set() if options.smoke else compile_all(launch_once, jobs, options.processes)
    tuned: dict[Size, dict[int, GemmConfig | None]] = {}
    for size in sizes:
        weights = weights_of(size, device, options.smoke)
        tuned[size] = {}
        for bucket in buckets:
            tried = [c for i, b, c in jobs if (i, b) == (size.itemsize, bucket) and (i, b, c) not in bad]
            tuned[size][bucket] = best(Inputs(size, bucket, weights), tried, f"{size} {bucket} tokens")
        write_table(options.out, name, tuned)  # after every size
        del weights
    return 0


if __name__ == "__main__":
    sys.exit(main())
