"""Tunes the experts' kernels on this GPU: whole layers, with other tiles than the tables', at each number of tokens.

    python bench/tune_experts.py --json experts.json           Qwen3-30B-A3B's sizes, bf16; needs a GPU and many cores
    python bench/tune_experts.py --tokens 1,32,1024
    python bench/tune_experts.py --fp8                         weights in fp8, and activations of tiles
    TRITON_INTERPRET=1 python bench/tune_experts.py --smoke    the script itself, tiny, on a CPU

Tiles are compiled in parallel processes. A layer is timed with each tile of its first product (up), then, with the two
best of these, with each of its second (down), in graphs that read several layers; its result is compared with fp32.
Prints the fastest, and at the end what to paste into headrace/kernels/moe_config.py.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import graph_seconds, relative_error
from torch import Tensor

from headrace.kernels import moe
from headrace.kernels.fp8 import quantize_per_token_reference
from headrace.kernels.moe_config import Kind, MoeConfig, Tile, pick_moe_config

LAYERS = 4
"""of weights, 1.2 GB each at the default sizes"""
INEXACT, INEXACT_FP8 = 1e-2, 0.12
"""Relative errors beside fp32 from which a configuration counts as wrong; the second where activations are rounded."""
SHARED_MEMORY = 220_000
"""bytes that the buffers of a tile may take; larger ones are not tried"""
TOKENS = "1,2,4,8,32,128,512,1024,2048,8192"
Choices = dict[int, tuple[list[Tile], list[Tile]]]
"""block_m -> tiles of up and of down; a block_m of 1 serves pairs of token and expert one by one"""


def tiles(*numbers: tuple[int, ...]) -> list[Tile]:
    """Make tiles of (block_n, block_k, warps, stages), and a 1 behind them where the weight is the left operand."""
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
    """Holds the sizes of a layer of experts."""

    experts: int
    top_k: int
    hidden: int
    wide: int
    """inner size of one expert"""
    fp8: bool = False
    smoke: bool = False

    @property
    def device(self) -> str:
        return "cpu" if self.smoke else "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """The 16-bit type: Triton's interpreter, on a CPU, does not multiply bf16."""
        return torch.float16 if self.smoke else torch.bfloat16

    @property
    def kind(self) -> Kind:
        return "fp8" if self.fp8 else "half"

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        return torch.empty(*shape, device=self.device, dtype=self.dtype).normal_(0, std)

    def layer(self) -> moe.Experts:
        """Return a layer with random weights."""
        held: dict[str, Any] = {}
        for name, outputs, inputs in (("w13", 2 * self.wide, self.hidden), ("w2", self.hidden, self.wide)):
            held[name] = self.normal(self.experts, outputs, inputs, std=inputs**-0.5)
            if self.fp8:
                rounded = [quantize_per_token_reference(one, torch.float8_e4m3fn) for one in held[name]]
                held[name] = torch.stack([one.values for one in rounded])
                held[f"{name}_scale"] = torch.stack([one.scales.flatten() for one in rounded])
        router = self.normal(self.experts, self.hidden, std=self.hidden**-0.5)
        ones = torch.ones(self.hidden, device=self.device, dtype=self.dtype)
        return moe.Experts(ones, 1e-6, router, top_k=self.top_k, renormalize=True, **held)


def choices(sizes: Sizes, tokens: int) -> Choices:
    """Return the tiles to try at so many tokens. In fp8, tiles have as many bytes, in rows twice as long."""
    tried: Choices = {}
    if tokens <= 4:
        tried[1] = FEW_UP, FEW_DOWN
    if 1 < tokens <= 128:
        tried[16] = SMALL_UP, SMALL_DOWN
    if 32 <= tokens <= 256:
        tried[32] = SMALL_UP, SMALL_DOWN
    if 128 <= tokens <= 2048:
        tried[64] = BIG_UP[64], BIG_DOWN[64]
    if tokens >= 512:
        tried[128] = BIG_UP[128], BIG_DOWN[128]

    def fitting(block_m: int, up: bool, tiles: list[Tile]) -> list[Tile]:
        if sizes.smoke:
            return tiles[:1]
        if sizes.fp8 and block_m == 1:
            tiles = [*tiles, *(replace(tile, block_n=2 * tile.block_n) for tile in tiles)]
        elif sizes.fp8:
            tiles = [replace(tile, block_k=2 * tile.block_k) for tile in tiles]
        row = 1 if sizes.fp8 else 2
        return [
            tile
            for tile in tiles
            if block_m == 1
            or tile.num_stages * ((2 if up else 1) * tile.block_n + block_m) * tile.block_k * row <= SHARED_MEMORY
        ]

    return {m: (fitting(m, True, ups), fitting(m, False, downs)) for m, (ups, downs) in tried.items()}


def attempt(sizes: Sizes, config: MoeConfig) -> str:
    """Compile a layer of few experts; return why it cannot run, or nothing."""
    try:
        few = replace(sizes, experts=max(8, sizes.top_k))
        moe.fused_moe(few.normal(2, few.hidden), few.layer(), config=config)
        torch.cuda.synchronize()
    except Exception as error:  # not every configuration fits the chip
        return f"{type(error).__name__}: {str(error)[:120]}"
    return ""


def without_bad(sizes: Sizes, tried: Choices, processes: int) -> Choices:
    """Compile all tiles in processes of their own, which fills Triton's cache on disk; return those that run."""
    jobs = [(m, True, MoeConfig(m, up, downs[0])) for m, (ups, downs) in tried.items() for up in ups]
    jobs += [(m, False, MoeConfig(m, ups[0], down)) for m, (ups, downs) in tried.items() for down in downs]
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        problems = list(pool.map(partial(attempt, sizes), [config for *_, config in jobs], chunksize=4))
    good: Choices = {m: ([], []) for m in tried}
    for (m, up, config), problem in zip(jobs, problems, strict=True):
        if problem:
            print(f"  {config} cannot run: {problem}")
        else:
            good[m][0 if up else 1].append(config.up if up else config.down)
    return good


def short(tile: Tile) -> str:
    more = ", swap=True" * tile.swap + f", group={tile.group}" * (tile.group > 1)
    return f"Tile({tile.block_n}, {tile.block_k}, {tile.num_warps}, {tile.num_stages}{more})"


def said(config: MoeConfig) -> str:
    return f"MoeConfig({config.block_m}, {short(config.up)}, {short(config.down)})"


class Batch:
    """Holds so many tokens, once for each layer: other inputs read other weights, so that no cache holds them."""

    def __init__(self, sizes: Sizes, layers: Sequence[moe.Experts], tokens: int) -> None:
        self.sizes, self.tokens = sizes, tokens
        self.inputs = [(sizes.normal(tokens, sizes.hidden), layer) for layer in layers]
        self.sums = torch.zeros(tokens, sizes.hidden, device=sizes.device, dtype=sizes.dtype)

    def error(self, config: MoeConfig) -> float:
        """Return how far the first layer is from fp32, over tokens that go to the same experts there."""
        x, layer = self.inputs[0]
        wide = {name: getattr(layer, name).float() for name in ("norm_weight", "router")}
        wide |= {} if self.sizes.fp8 else {"w13": layer.w13.float(), "w2": layer.w2.float()}
        expected, chosen = moe.fused_moe_reference(x.float(), replace(layer, **wide), config=config)
        out, ids = moe.fused_moe(x, layer, config=config)
        same = (ids == chosen).all(1)
        return relative_error(out[same], expected[same])

    def seconds(self, config: MoeConfig | None) -> float:
        calls = [partial(moe.fused_moe, x, layer, None, self.sums, config) for x, layer in self.inputs]
        return graph_seconds(calls * (1 if self.tokens >= 1024 else 2), repeats=7)

    def fastest(self, configs: list[MoeConfig]) -> list[tuple[float, MoeConfig]]:
        """Time configurations; return those that agree with fp32, the fastest first."""
        rows = []
        for config in configs:
            rounds = self.sizes.fp8 and config.block_m > 1
            if (wrong := self.error(config)) < (INEXACT_FP8 if rounds else INEXACT):
                rows.append((self.seconds(config), config))
            else:
                print(f"  WRONG {said(config)}: {wrong:.1e}", flush=True)
        return sorted(rows, key=lambda row: row[0])


def tune(sizes: Sizes, counts: list[int], processes: int) -> list[dict[str, Any]]:
    """Tune each number of tokens; print what to paste, and return the timed layers."""
    torch.manual_seed(0)
    layers = [sizes.layer() for _ in range(1 if sizes.smoke else LAYERS)]
    best: dict[int, MoeConfig] = {}
    results = []
    for count in counts:
        tried = choices(sizes, count)
        tried = tried if sizes.smoke else without_bad(sizes, tried, processes)
        batch, rows = Batch(sizes, layers, count), list[tuple[float, MoeConfig]]()
        for block_m, (ups, downs) in tried.items():
            by_up = batch.fastest([MoeConfig(block_m, up, downs[0]) for up in ups])
            rows += batch.fastest([MoeConfig(block_m, one.up, down) for _, one in by_up[:2] for down in downs])
        rows.sort(key=lambda row: row[0])
        best[count] = rows[0][1]
        now = pick_moe_config(count, sizes.top_k, sizes.experts, sizes.kind, "cuda")
        print(f"\n{count} tokens; the table's: {1e6 * batch.seconds(None):.1f} us, {said(now)}")
        for time, config in rows[:4]:
            print(f"  {1e6 * time:.1f} us, {said(config)}", flush=True)
        results.append({"tokens": count, "layers": [{"us": 1e6 * time, "config": said(c)} for time, c in rows]})
    paste(best, sizes)
    return results


def paste(best: dict[int, MoeConfig], sizes: Sizes) -> None:
    """Print the entries for moe_config.py."""
    print("\n# for headrace/kernels/moe_config.py:")
    if few := [count for count, config in best.items() if config.block_m == 1]:
        config = best[few[0]]
        print(f'FEW_TOKENS["cuda", "{sizes.kind}"] = {max(few)}')
        print(f'FEW["cuda", "{sizes.kind}"] = {said(config)}')
    many = [(count, config) for count, config in best.items() if config.block_m > 1]
    print(f'MANY["cuda", "{sizes.kind}"] = (')
    for number, (count, config) in enumerate(many):
        last = number == len(many) - 1
        bound = 'float("inf")' if last else f"{count * sizes.top_k / sizes.experts:g}"
        print(f"    ({bound}, {said(config)}),  # {count} tokens")
    print(")")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--tokens", default=TOKENS, help="numbers of tokens, separated by commas")
    made.add_argument("--json", type=Path, help="write the timed layers to this file")
    made.add_argument("--experts", type=int, default=128)
    made.add_argument("--top-k", type=int, default=8, help="experts of a token")
    made.add_argument("--hidden", type=int, default=2048)
    made.add_argument("--wide", type=int, default=768, help="inner size of an expert, as a rank has it")
    made.add_argument("--fp8", action="store_true", help="weights in fp8")
    made.add_argument("--smoke", action="store_true", help="toy sizes on the CPU, nothing is timed")
    made.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="that compile")
    return made


def main() -> int:
    options = parser().parse_args()
    sizes = Sizes(options.experts, options.top_k, options.hidden, options.wide, options.fp8)
    if options.smoke:
        sizes, options.tokens = Sizes(8, 2, 64, 32, options.fp8, smoke=True), "2,3"
    results = tune(sizes, [int(count) for count in options.tokens.split(",")], options.processes)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
