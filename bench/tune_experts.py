"""Tunes the experts' kernels on one GPU: all tiles at each number of tokens, then whole layers of the best ones.

    python bench/tune_experts.py --json experts.json           Qwen3-30B-A3B's sizes, bf16; needs a GPU and many cores
    python bench/tune_experts.py --tokens 1,32,1024
    python bench/tune_experts.py --fp8                         weights in fp8, and activations of tiles
    TRITON_INTERPRET=1 python bench/tune_experts.py --smoke    the script itself, tiny, on a CPU

Tiles are compiled in parallel processes, compared with fp32, and up and down are timed apart, in graphs that walk
through several sets of weights. At the end is what to paste into headrace/kernels/moe_config.py.

Its measurements have run on an H200; in this form they have not yet.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from graph_timing import graph_seconds
from torch import Tensor

from headrace.kernels import moe, moe_route
from headrace.kernels._triton import overlap
from headrace.kernels.fp8 import quantize_per_token, quantize_per_token_reference
from headrace.kernels.gemm import vector_of
from headrace.kernels.moe_config import MoeConfig, Tile, pick_moe_config
from headrace.kernels.norm import rms_norm_reference

SETS = 4
"""of weights, 1.2 GB each at the default sizes"""
SHARED_MEMORY = 220_000
INEXACT = 1e-2
ROUNDED = 0.12
"""The same where activations are rounded to fp8"""
TOKENS = "1,2,4,8,32,128,512,1024,2048,8192"
Numbers = tuple[int, ...]


def tiles(*numbers: Numbers) -> list[Tile]:
    """(block_n, block_k, warps, stages), and 1 behind them where the weight is the left operand"""
    return [Tile(*four, swap=bool(rest)) for *four, rest in ((*row[:4], row[4:]) for row in numbers)]


FEW_UP = tiles(
    (2, 2048, 8, 1), (2, 512, 4, 1), (1, 2048, 4, 1), (1, 1024, 4, 1), (4, 2048, 8, 1), (4, 1024, 4, 1),
    (2, 1024, 4, 1), (4, 512, 4, 1), (2, 2048, 4, 1), (8, 512, 8, 1), (8, 512, 4, 1), (1, 512, 2, 1),
)  # fmt: skip
FEW_DOWN = [
    Tile(n, k, warps, 1, group=group)
    for n, k, group, warps in (
        (1, 1024, 4, 1), (4, 256, 8, 2), (8, 256, 8, 4), (1, 256, 4, 1), (1, 1024, 8, 2), (1, 1024, 2, 1),
        (4, 256, 8, 8), (2, 256, 8, 4), (2, 256, 8, 1), (2, 1024, 4, 2), (4, 1024, 2, 2), (1, 256, 8, 1),
    )
]  # fmt: skip
SMALL_UP = tiles(
    (16, 128, 4, 4), (16, 256, 4, 4), (16, 256, 2, 4), (32, 128, 4, 4), (32, 128, 4, 5), (32, 256, 4, 3),
    (32, 64, 4, 6), (64, 128, 4, 3), (64, 64, 4, 5), (16, 512, 4, 3), (32, 128, 4, 4, 1), (32, 128, 4, 5, 1),
    (32, 256, 4, 3, 1), (64, 128, 4, 3, 1), (64, 64, 4, 5, 1), (64, 128, 8, 4, 1), (32, 64, 4, 7, 1),
)  # fmt: skip
SMALL_DOWN = tiles(
    (32, 128, 4, 4), (32, 256, 4, 3), (32, 256, 4, 4), (16, 256, 2, 4), (64, 128, 4, 4), (64, 128, 4, 5),
    (64, 256, 4, 3), (64, 64, 4, 6), (128, 128, 4, 3), (128, 64, 4, 5), (64, 128, 4, 4, 1), (64, 128, 4, 5, 1),
    (64, 256, 4, 3, 1), (128, 128, 4, 3, 1), (128, 64, 4, 5, 1), (128, 128, 8, 4, 1), (64, 64, 4, 7, 1),
)  # fmt: skip
BIG_UP = {
    64: tiles(
        (64, 64, 4, 4, 1), (128, 64, 8, 3, 1), (64, 64, 4, 4), (64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 4, 3),
        (64, 64, 8, 4), (32, 128, 4, 4), (64, 128, 4, 3),
    ),
    128: tiles(
        (128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 4), (64, 64, 8, 4), (64, 64, 4, 3), (64, 128, 8, 2),
        (128, 32, 8, 5),
    ),
}  # fmt: skip
BIG_DOWN = {
    64: tiles(
        (128, 64, 4, 4, 1), (256, 64, 8, 3, 1), (128, 64, 4, 4), (128, 64, 4, 3), (256, 64, 8, 3), (256, 64, 4, 3),
        (128, 64, 8, 4), (128, 128, 4, 3),
    ),
    128: tiles(
        (256, 64, 8, 3), (256, 64, 8, 4), (128, 64, 4, 4), (128, 64, 8, 4), (128, 64, 4, 3), (128, 128, 8, 2),
        (256, 32, 8, 5),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """of a layer; `wide`: of one expert"""

    experts: int
    top_k: int
    hidden: int
    wide: int
    fp8: bool = False
    smoke: bool = False

    @property
    def device(self) -> str:
        return "cpu" if self.smoke else "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Triton's interpreter, on a CPU, does not multiply bf16."""
        return torch.float16 if self.smoke else torch.bfloat16

    @property
    def weight_bytes(self) -> int:
        """of a number"""
        return 1 if self.fp8 else 2

    def weight(self, *shape: int, std: float = 1.0) -> Weight:
        values = self.normal(*shape, std=std)
        if not self.fp8:
            return Weight(values, None)
        rounded = [quantize_per_token_reference(one, torch.float8_e4m3fn) for one in values]
        return Weight(
            torch.stack([one.values for one in rounded]), torch.stack([one.scales.flatten() for one in rounded])
        )

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        return torch.empty(*shape, device=self.device, dtype=self.dtype).normal_(0, std)

    def seconds(self, calls: list[Callable[[], object]], repeats: int = 7) -> float:
        if self.smoke:
            calls[0]()
            return 1e-6
        return graph_seconds(calls, repeats)


class Weight(NamedTuple):
    values: Tensor
    """# [experts, outputs, inputs]"""
    scale: Tensor | None
    """# [experts, outputs]"""

    def expert(self, index: int) -> Tensor:
        """# [outputs, inputs] fp32"""
        one = self.values[index].float()
        return one if self.scale is None else one * self.scale[index, :, None]


class Variants(NamedTuple):
    block_m: int
    up: list[Tile]
    down: list[Tile]


class Job(NamedTuple):
    block_m: int
    up: bool
    tile: Tile


def variants(tokens: int, smoke: bool = False, fp8: bool = False) -> list[Variants]:
    """What is tried at so many tokens. In fp8 tiles have as many bytes, in rows twice as long."""
    found = []
    if tokens <= 4:
        found.append(Variants(1, FEW_UP, FEW_DOWN))
    if 1 < tokens <= 128:
        found.append(Variants(16, SMALL_UP, SMALL_DOWN))
    if 32 <= tokens <= 256:
        found.append(Variants(32, SMALL_UP, SMALL_DOWN))
    if 128 <= tokens <= 2048:
        found.append(Variants(64, BIG_UP[64], BIG_DOWN[64]))
    if tokens >= 512:
        found.append(Variants(128, BIG_UP[128], BIG_DOWN[128]))
    if fp8:
        found = [Variants(block_m, narrow(ups, block_m), narrow(downs, block_m)) for block_m, ups, downs in found]
    if smoke:
        return [Variants(block_m, ups[:1], downs[:1]) for block_m, ups, downs in found]
    return [
        Variants(block_m, [t for t in ups if fits(t, block_m, 2, fp8)], [t for t in downs if fits(t, block_m, 1, fp8)])
        for block_m, ups, downs in found
    ]


def narrow(tried: list[Tile], block_m: int) -> list[Tile]:
    if block_m > 1:
        return [replace(tile, block_k=2 * tile.block_k) for tile in tried]
    return [*tried, *(replace(tile, block_n=2 * tile.block_n) for tile in tried)]


def fits(tile: Tile, block_m: int, weights: int, fp8: bool) -> bool:
    """into shared memory; one by one, nothing is kept there"""
    buffers = tile.num_stages * (weights * tile.block_n + block_m) * tile.block_k * (1 if fp8 else 2)
    return block_m == 1 or buffers <= SHARED_MEMORY


def launch(
    sizes: Sizes, up: bool, tile: Tile, block_m: int, x: Tensor, weight: Weight, routing: moe_route.Routing, out: Tensor
) -> None:
    """One of a layer's two products, with the rounding of x before it. Down one by one adds to `out`; all else is
    written over it."""
    values, scale = weight
    n, k = (sizes.wide, sizes.hidden) if up else (sizes.hidden, sizes.wide)
    blocks = -(-n // tile.block_n)
    common: dict[str, Any] = {"N": n, "K": k, "TOP_K": sizes.top_k, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    common |= {"num_warps": tile.num_warps, **overlap()}
    if block_m > 1:
        count = routing.tiles.shape[1]
        rounded, x_scale = (x, None) if scale is None else quantize_per_token(x, values.dtype)
        moe._tiles_kernel[(count * blocks,)](
            out, rounded, x_scale, values, scale, routing.order, routing.tiles, count,
            GATED=up, BLOCK_M=block_m, SWAP=tile.swap, num_stages=tile.num_stages, **common,
        )  # fmt: skip
    elif up:
        moe._up_one_by_one_kernel[(blocks, out.shape[0])](
            out, x, values, scale, routing.ids, VECTOR=vector_of(values), **common
        )
    else:
        moe._down_one_by_one_kernel[(blocks, routing.ids.shape[0])](
            out, x, values, scale, routing.ids, routing.weights, out, None, None, 0, None, None, None,
            GROUP=tile.group, VECTOR=vector_of(values), **common,
        )  # fmt: skip


def compile_one(sizes: Sizes, job: Job) -> tuple[Job, str]:
    """In a process of its own, with few experts: fills Triton's cache on disk."""
    experts, tokens = max(8, sizes.top_k), 2
    try:
        logits = sizes.normal(tokens, experts)
        routing = moe_route.route(logits, sizes.top_k, True, 0 if job.block_m == 1 else job.block_m)
        pairs = tokens * sizes.top_k
        x, inner = sizes.normal(tokens, sizes.hidden), sizes.normal(pairs, sizes.wide)
        if job.up:
            launch(
                sizes,
                True,
                job.tile,
                job.block_m,
                x,
                sizes.weight(experts, 2 * sizes.wide, sizes.hidden),
                routing,
                inner,
            )
        else:
            out = sizes.normal(tokens if job.block_m == 1 else pairs, sizes.hidden)
            launch(
                sizes,
                False,
                job.tile,
                job.block_m,
                inner,
                sizes.weight(experts, sizes.hidden, sizes.wide),
                routing,
                out,
            )
        torch.cuda.synchronize()
    except Exception as error:  # not every tile fits the chip: it is said, and not tried
        return job, f"{type(error).__name__}: {str(error)[:120]}"
    return job, ""


def compile_all(sizes: Sizes, jobs: list[Job], processes: int) -> set[Job]:
    """Those that cannot run."""
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        bad = {job: said for job, said in pool.map(partial(compile_one, sizes), jobs, chunksize=3) if said}
    print(f"{len(jobs)} tiles compiled, {len(bad)} cannot run", flush=True)
    for job, said in bad.items():
        print(f"  block_m {job.block_m} {'up' if job.up else 'down'} {short(job.tile)}: {said}")
    return set(bad)


def short(tile: Tile) -> str:
    more = ", swap=True" * tile.swap + f", group={tile.group}" * (tile.group > 1)
    return f"Tile({tile.block_n}, {tile.block_k}, {tile.num_warps}, {tile.num_stages}{more})"


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.float() - exact.float()).norm() / exact.float().norm().clamp_min(1e-30))


class Layer:
    """Weights of SETS layers, and a router for each batch."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        experts, hidden, wide = sizes.experts, sizes.hidden, sizes.wide
        self.sets = 1 if sizes.smoke else SETS
        self.w13 = [sizes.weight(experts, 2 * wide, hidden, std=hidden**-0.5) for _ in range(self.sets)]
        self.w2 = [sizes.weight(experts, hidden, wide, std=wide**-0.5) for _ in range(self.sets)]
        self.routers = sizes.normal(4 * SETS, experts, hidden, std=hidden**-0.5)
        self.ones = torch.ones(hidden, device=sizes.device, dtype=sizes.dtype)

    def experts(self, i: int) -> moe.Experts:
        w13, w2 = self.w13[i % self.sets], self.w2[i % self.sets]
        return moe.Experts(
            self.ones, 1e-6, self.routers[i], w13.values, w2.values, self.sizes.top_k, True,
            w13_scale=w13.scale, w2_scale=w2.scale,
        )  # fmt: skip


class Batch:
    """So many tokens, several times over: other inputs over the same weights, so that nothing stays in a cache."""

    def __init__(self, layer: Layer, tokens: int, peak: float) -> None:
        self.layer, self.sizes, self.tokens, self.peak = layer, layer.sizes, tokens, peak
        sizes = self.sizes
        count = layer.sets * (4 if tokens <= 2 else 1)
        self.xs = [rms_norm_reference(sizes.normal(tokens, sizes.hidden), layer.ones, 1e-6) for _ in range(count)]
        self.logits = [x @ layer.routers[i].t() for i, x in enumerate(self.xs)]
        chosen = [moe_route.route_reference(logits, sizes.top_k, True) for logits in self.logits]
        self.distinct = statistics.mean(int(one.ids.unique().numel()) for one in chosen)
        self.chosen = chosen[0]
        self.inner, self.outer, self.out = self.reference()
        expert = sizes.wide * sizes.hidden
        read = self.distinct * expert * sizes.weight_bytes
        self.bytes = {True: 2 * read, False: read}
        self.flops = {True: 4 * tokens * sizes.top_k * expert, False: 2 * tokens * sizes.top_k * expert}

    def reference(self) -> tuple[Tensor, Tensor, Tensor]:
        """fp32: (inner [pairs, wide], rounded as the kernels do, outer [pairs, hidden] unweighted, out [T, hidden])"""
        sizes, ids, x = self.sizes, self.chosen.ids, self.xs[0]
        flat = ids.flatten()
        inner = torch.empty(len(flat), sizes.wide, device=sizes.device)
        outer = torch.empty(len(flat), sizes.hidden, device=sizes.device)
        for expert in flat.unique().tolist():
            rows = (flat == expert).nonzero()[:, 0]
            gate, up = (x[rows // sizes.top_k].float() @ self.layer.w13[0].expert(expert).t()).chunk(2, -1)
            inner[rows] = F.silu(gate) * up
            outer[rows] = inner[rows].to(sizes.dtype).float() @ self.layer.w2[0].expert(expert).t()
        return inner, outer, (outer.view(*ids.shape, sizes.hidden) * self.chosen.weights[..., None]).sum(1)

    def seconds(self, calls: list[Callable[[], object]]) -> float:
        return self.sizes.seconds(calls * (1 if self.tokens >= 1024 else 2))

    def rate(self, up: tuple[bool, ...], seconds: float) -> str:
        size, flops = sum(self.bytes[one] for one in up), sum(self.flops[one] for one in up)
        return f"{1e6 * seconds:.1f} us {size / seconds / 1e9:.0f} GB/s {flops / seconds / 1e12:.0f} TF"

    def products(self, up: bool, block_m: int, tried: list[Tile]) -> list[tuple[float, Tile]]:
        """Fastest first."""
        sizes, layer = self.sizes, self.layer
        one_by_one = block_m == 1
        routings = [moe_route.route(one, sizes.top_k, True, 0 if one_by_one else block_m) for one in self.logits]
        weights = layer.w13 if up else layer.w2
        if up:
            sources, exact = self.xs, self.inner
        else:
            sources, exact = [self.inner.to(sizes.dtype)] * len(self.xs), self.out if one_by_one else self.outer
        bound = ROUNDED if sizes.fp8 and not one_by_one else INEXACT
        target = torch.empty(exact.shape, device=sizes.device, dtype=sizes.dtype)
        rows = []
        for tile in tried:
            target.fill_(0.0 if one_by_one and not up else float("nan"))
            launch(sizes, up, tile, block_m, sources[0], weights[0], routings[0], target)
            if not (wrong := error(target, exact)) < bound:
                print(f"  WRONG block_m {block_m} {'up' if up else 'down'} {short(tile)}: {wrong:.1e}", flush=True)
                continue
            calls: list[Callable[[], object]] = [
                partial(launch, sizes, up, tile, block_m, source, weights[i % layer.sets], routings[i], target)
                for i, source in enumerate(sources)
            ]
            rows.append((self.seconds(calls), tile))
        rows.sort(key=lambda row: row[0])
        told = " | ".join(f"{self.rate((up,), time)} {short(tile)}" for time, tile in rows[:4])
        worst = f" ... worst {1e6 * rows[-1][0]:.1f}" if rows else ""
        print(f"  block_m {block_m} {'up' if up else 'down'}: {told}{worst}", flush=True)
        return rows

    def layers(self, table: dict[int, dict[bool, list[tuple[float, Tile]]]]) -> list[tuple[float, MoeConfig, str]]:
        """Whole ones, of the two best ups and downs of each block_m, and of what the table has now; fastest first."""
        sizes, layer, rows = self.sizes, self.layer, []
        scratch = torch.zeros(self.tokens, sizes.hidden, device=sizes.device, dtype=sizes.dtype)

        def seconds(config: MoeConfig | None) -> float:
            return self.seconds(
                [partial(moe.fused_moe, x, layer.experts(i), None, scratch, config) for i, x in enumerate(self.xs)]
            )

        for block_m, found in table.items():
            for up in found[True][:2]:
                for down in found[False][:2]:
                    config = MoeConfig(block_m, up[1], down[1])
                    got, ids = moe.fused_moe(self.xs[0], layer.experts(0), config=config)
                    same = (ids == self.chosen.ids).all(1)  # the others' logits are too close to tell
                    rows.append((seconds(config), config, f"error {error(got[same], self.out[same]):.1e}"))
        now = pick_moe_config(self.tokens, sizes.top_k, sizes.experts, sizes.weight_bytes, "cuda")
        rows.append((seconds(None), now, "the table's"))
        return sorted(rows, key=lambda row: row[0])


def tune(sizes: Sizes, options: argparse.Namespace) -> list[dict[str, Any]]:
    counts = [int(count) for count in options.tokens.split(",")]
    jobs = {
        Job(one.block_m, up, tile)
        for count in counts
        for one in variants(count, sizes.smoke, sizes.fp8)
        for up, tried in ((True, one.up), (False, one.down))
        for tile in tried
    }
    bad = set() if sizes.smoke else compile_all(sizes, sorted(jobs, key=str), options.processes)
    peak = 1e12 if sizes.smoke else read_rate()
    torch.manual_seed(0)
    layer = Layer(sizes)
    best: dict[int, MoeConfig] = {}
    results = []
    for count in counts:
        batch = Batch(layer, count, peak)
        floor, work = sum(batch.bytes.values()) / peak, sum(batch.flops.values()) / 700e12
        print(f"\n{count} tokens: {batch.distinct:.1f} experts, at least {1e6 * floor:.1f} us by bytes, "
              f"{1e6 * work:.1f} us at 700 TFLOP/s", flush=True)  # fmt: skip
        table = {}
        for one in variants(count, sizes.smoke, sizes.fp8):
            found = {
                up: batch.products(up, one.block_m, [t for t in tried if Job(one.block_m, up, t) not in bad])
                for up, tried in ((True, one.up), (False, one.down))
            }
            if found[True] and found[False]:
                table[one.block_m] = found
        rows = batch.layers(table)
        for time, config, label in rows[:4] + [row for row in rows[4:] if row[2] == "the table's"]:
            share = f"{100 * sum(batch.bytes.values()) / time / peak:.0f}% of read"
            print(f"  layer {batch.rate((True, False), time)} ({share}) block_m {config.block_m} "
                  f"{short(config.up)} {short(config.down)}: {label}", flush=True)  # fmt: skip
        best[count] = rows[0][1]
        layers = [{"us": 1e6 * time, "config": str(config), "said": said} for time, config, said in rows]
        results.append({"tokens": count, "experts": batch.distinct, "layers": layers})
    paste(best, sizes)
    return results


def read_rate() -> float:
    """Bytes a second of a reduction over 8 GiB."""
    big = torch.zeros(1 << 30, dtype=torch.int64, device="cuda")
    rate = big.numel() * 8 / graph_seconds([big.sum])
    print(f"reading {rate / 1e12:.2f} TB/s", flush=True)
    return rate


def paste(best: dict[int, MoeConfig], sizes: Sizes) -> None:
    print("\n# for headrace/kernels/moe_config.py:")
    if few := [count for count, config in best.items() if config.block_m == 1]:
        config = best[few[0]]
        print(f'FEW_TOKENS["cuda", {sizes.weight_bytes}] = {max(few)}')
        print(f'FEW["cuda", {sizes.weight_bytes}] = MoeConfig(1, {short(config.up)}, {short(config.down)})')
    many = [(count, config) for count, config in best.items() if config.block_m > 1]
    print(f'MANY["cuda", {sizes.weight_bytes}] = (')
    for number, (count, config) in enumerate(many):
        last = number == len(many) - 1
        bound = 'float("inf")' if last else f"{count * sizes.top_k / sizes.experts:g}"
        print(
            f"    ({bound}, MoeConfig({config.block_m}, {short(config.up)}, {short(config.down)})),  # {count} tokens"
        )
    print(")")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--tokens", default=TOKENS, help="numbers of tokens, separated by commas")
    made.add_argument("--json", type=Path, help="write what was found to this file")
    made.add_argument("--experts", type=int, default=128)
    made.add_argument("--top-k", type=int, default=8, help="experts of a token")
    made.add_argument("--hidden", type=int, default=2048)
    made.add_argument("--wide", type=int, default=768, help="inner size of an expert, as a rank has it")
    made.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="that compile")
    made.add_argument("--fp8", action="store_true", help="weights in fp8")
    made.add_argument("--smoke", action="store_true", help="toy sizes on the CPU, nothing is timed")
    return made


def main() -> int:
    options = parser().parse_args()
    sizes = Sizes(options.experts, options.top_k, options.hidden, options.wide, options.fp8)
    if options.smoke:
        sizes = Sizes(8, 2, 64, 32, options.fp8, smoke=True)
        options.tokens = "2,3"
    results = tune(sizes, options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
