"""Tunes the experts' kernels on this GPU: all tiles at each number of tokens, then whole layers of the best ones.

    python bench/tune_experts.py --json experts.json           Qwen3-30B-A3B's sizes, bf16; needs a GPU and many cores
    python bench/tune_experts.py --tokens 1,32,1024
    python bench/tune_experts.py --fp8                         weights in fp8, and activations of tiles
    TRITON_INTERPRET=1 python bench/tune_experts.py --smoke    the script itself, tiny, on a CPU

Tiles are compiled in parallel processes and compared with fp32. The two products of a layer (up and down) are timed
apart, in graphs that read several sets of weights in turn; then whole layers are, of the two best of each. Prints the
fastest, and at the end what to paste into headrace/kernels/moe_config.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timing import graph_seconds, relative_error
from torch import Tensor
from tuning import FP8, INEXACT, SHARED_MEMORY, add_common_flags, compile_all, plain_dtype

from headrace.kernels import moe, moe_kernels, moe_route
from headrace.kernels._triton import overlap
from headrace.kernels.fp8 import quantize_per_token, quantize_per_token_reference
from headrace.kernels.gemm import vector_of
from headrace.kernels.moe_config import Kind, MoeConfig, Tile, pick_moe_config
from headrace.kernels.norm import rms_norm_reference

SETS = 4
"""of weights, 1.2 GB each at the default sizes"""
INEXACT_FP8 = 0.12
"""INEXACT where activations are rounded to fp8"""
TOKENS = "1,2,4,8,32,128,512,1024,2048,8192"


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
        return plain_dtype(self.device)

    @property
    def kind(self) -> Kind:
        return "fp8" if self.fp8 else "half"

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight."""
        return 1 if self.fp8 else 2

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        return torch.empty(*shape, device=self.device, dtype=self.dtype).normal_(0, std)

    def weight(self, experts: int, up: bool) -> Weight:
        """Return random weights of the up or the down products of so many experts."""
        outputs, inputs = (2 * self.wide, self.hidden) if up else (self.hidden, self.wide)
        values = self.normal(experts, outputs, inputs, std=inputs**-0.5)
        if not self.fp8:
            return Weight(values, None)
        rounded = [quantize_per_token_reference(one, FP8) for one in values]
        return Weight(
            torch.stack([one.values for one in rounded]), torch.stack([one.scales.flatten() for one in rounded])
        )


class Weight(NamedTuple):
    """Holds the weights of all experts' up or down products."""

    values: Tensor
    """# [experts, outputs, inputs]"""
    scale: Tensor | None
    """# [experts, outputs]"""

    def expert(self, index: int) -> Tensor:
        """Return one expert's weight, # [outputs, inputs] fp32."""
        one = self.values[index].float()
        return one if self.scale is None else one * self.scale[index, :, None]


class Product(NamedTuple):
    """Names one of a layer's two products and its tile. A block_m of 1 serves pairs of token and expert one by one."""

    block_m: int
    up: bool
    tile: Tile

    def __str__(self) -> str:
        return f"block_m {self.block_m} {'up' if self.up else 'down'} {short(self.tile)}"


def candidates(sizes: Sizes, tokens: int) -> list[Product]:
    """Return the products to try at so many tokens. In fp8, tiles have as many bytes, in rows twice as long."""
    tried: list[tuple[int, list[Tile], list[Tile]]] = []
    if tokens <= 4:
        tried.append((1, FEW_UP, FEW_DOWN))
    if 1 < tokens <= 128:
        tried.append((16, SMALL_UP, SMALL_DOWN))
    if 32 <= tokens <= 256:
        tried.append((32, SMALL_UP, SMALL_DOWN))
    if 128 <= tokens <= 2048:
        tried.append((64, BIG_UP[64], BIG_DOWN[64]))
    if tokens >= 512:
        tried.append((128, BIG_UP[128], BIG_DOWN[128]))
    made = []
    for block_m, *both in tried:
        for up, choices in zip((True, False), both, strict=True):
            choices = choices[:1] if sizes.smoke else choices
            if sizes.fp8 and block_m > 1:
                choices = [replace(tile, block_k=2 * tile.block_k) for tile in choices]
            elif sizes.fp8:
                choices = [*choices, *(replace(tile, block_n=2 * tile.block_n) for tile in choices)]
            products = [Product(block_m, up, tile) for tile in choices]
            made += [product for product in products if sizes.smoke or fits(sizes, product)]
    return made


def fits(sizes: Sizes, product: Product) -> bool:
    """Tell whether the buffers fit into shared memory; one by one, none are kept there."""
    block_m, up, tile = product
    rows = (2 if up else 1) * tile.block_n + block_m
    return block_m == 1 or tile.num_stages * rows * tile.block_k * sizes.weight_bytes <= SHARED_MEMORY


def launch(sizes: Sizes, product: Product, x: Tensor, weight: Weight, routing: moe_route.Routing, out: Tensor) -> None:
    """Run one product, with the rounding of x before it. Down one by one adds to `out`; all else overwrites it."""
    (block_m, up, tile), (values, scale) = product, weight
    n, k = (sizes.wide, sizes.hidden) if up else (sizes.hidden, sizes.wide)
    blocks = -(-n // tile.block_n)
    common: dict[str, Any] = {"N": n, "K": k, "TOP_K": sizes.top_k, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    common |= {"num_warps": tile.num_warps, **overlap()}
    gates = moe.gate_options(None)
    if block_m > 1:
        count = routing.tiles.shape[1]
        rounded, x_scale, *_ = (x, None) if scale is None else quantize_per_token(x, values.dtype)
        moe_kernels.tiles_kernel[(count * blocks,)](
            out, rounded, x_scale, values, scale, None, routing.order, routing.tiles, count,
            GATED=up, BLOCK_M=block_m, SWAP=tile.swap, num_stages=tile.num_stages, **gates, **common,
        )  # fmt: skip
    elif up:
        moe_kernels.up_one_by_one_kernel[(blocks, out.shape[0])](
            out, x, values, scale, None, routing.ids, VECTOR=vector_of(values), **gates, **common
        )
    else:
        moe_kernels.down_one_by_one_kernel[(blocks, routing.ids.shape[0])](
            out, x, values, scale, None, routing.ids, routing.weights, out, None, None, 0, None, None, None,
            MEMBERS=tile.group, VECTOR=vector_of(values), **common,
        )  # fmt: skip


def route(sizes: Sizes, logits: Tensor, block_m: int) -> moe_route.Routing:
    return moe_route.route(logits, sizes.top_k, True, 0 if block_m == 1 else block_m)


def launch_once(sizes: Sizes, product: Product) -> None:
    """Compile one product, with few experts."""
    experts, tokens = max(8, sizes.top_k), 2
    pairs, one_by_one = tokens * sizes.top_k, product.block_m == 1
    routing = route(sizes, sizes.normal(tokens, experts), product.block_m)
    if product.up:
        x, out = sizes.normal(tokens, sizes.hidden), sizes.normal(pairs, sizes.wide)
    else:
        x, out = sizes.normal(pairs, sizes.wide), sizes.normal(tokens if one_by_one else pairs, sizes.hidden)
    launch(sizes, product, x, sizes.weight(experts, product.up), routing, out)


def short(tile: Tile) -> str:
    more = ", swap=True" * tile.swap + f", group={tile.group}" * (tile.group > 1)
    return f"Tile({tile.block_n}, {tile.block_k}, {tile.num_warps}, {tile.num_stages}{more})"


class Layer:
    """Holds the weights of SETS layers, and a router for each batch."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.sets = 1 if sizes.smoke else SETS
        self.weights = {up: [sizes.weight(sizes.experts, up) for _ in range(self.sets)] for up in (True, False)}
        self.routers = sizes.normal(4 * SETS, sizes.experts, sizes.hidden, std=sizes.hidden**-0.5)
        self.ones = torch.ones(sizes.hidden, device=sizes.device, dtype=sizes.dtype)

    def experts(self, i: int) -> moe.Experts:
        w13, w2 = (self.weights[up][i % self.sets] for up in (True, False))
        return moe.Experts(
            self.ones, 1e-6, self.routers[i], w13.values, w2.values, self.sizes.top_k, True,
            w13_scale=w13.scale, w2_scale=w2.scale,
        )  # fmt: skip


class Batch:
    """Holds so many tokens, several times over: other inputs read other weights, so that no cache holds them."""

    def __init__(self, layer: Layer, tokens: int) -> None:
        self.layer, self.sizes, self.tokens = layer, layer.sizes, tokens
        sizes = self.sizes
        count = layer.sets * (4 if tokens <= 2 else 1)
        self.xs = [rms_norm_reference(sizes.normal(tokens, sizes.hidden), layer.ones, 1e-6) for _ in range(count)]
        self.logits = [x @ layer.routers[i].t() for i, x in enumerate(self.xs)]
        chosen = [moe_route.route_reference(logits, sizes.top_k, True) for logits in self.logits]
        self.distinct = statistics.mean(int(one.ids.unique().numel()) for one in chosen)
        self.chosen = chosen[0]
        self.inner, self.outer, self.out = self.reference()
        self.down_bytes = self.distinct * sizes.wide * sizes.hidden * sizes.weight_bytes
        """of the experts' down products; up takes twice as many"""

    def reference(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return in fp32: inner [pairs, wide], outer [pairs, hidden] of the rounded inner, and out [T, hidden]."""
        sizes, ids, x = self.sizes, self.chosen.ids, self.xs[0]
        flat = ids.flatten()
        inner = torch.empty(len(flat), sizes.wide, device=sizes.device)
        outer = torch.empty(len(flat), sizes.hidden, device=sizes.device)
        w13, w2 = (self.layer.weights[up][0] for up in (True, False))
        for expert in flat.unique().tolist():
            rows = (flat == expert).nonzero()[:, 0]
            gate, up = (x[rows // sizes.top_k].float() @ w13.expert(expert).t()).chunk(2, -1)
            inner[rows] = F.silu(gate) * up
            outer[rows] = inner[rows].to(sizes.dtype).float() @ w2.expert(expert).t()
        return inner, outer, (outer.view(*ids.shape, sizes.hidden) * self.chosen.weights[..., None]).sum(1)

    def seconds(self, calls: list[Callable[[], object]]) -> float:
        return graph_seconds(calls * (1 if self.tokens >= 1024 else 2), repeats=7)

    def products(self, tried: list[Product]) -> list[tuple[float, Tile]]:
        """Time products of one block_m and direction; return (seconds, tile) of those that agree with fp32, fastest
        first."""
        sizes, (block_m, up, _) = self.sizes, tried[0]
        one_by_one, weights = block_m == 1, self.layer.weights[up]
        routings = [route(sizes, logits, block_m) for logits in self.logits]
        if up:
            sources, exact = self.xs, self.inner
        else:
            sources, exact = [self.inner.to(sizes.dtype)] * len(self.xs), self.out if one_by_one else self.outer
        bound = INEXACT_FP8 if sizes.fp8 and not one_by_one else INEXACT
        target = torch.empty(exact.shape, device=sizes.device, dtype=sizes.dtype)
        rows = []
        for product in tried:
            target.fill_(0.0 if one_by_one and not up else float("nan"))
            launch(sizes, product, sources[0], weights[0], routings[0], target)
            if not (wrong := relative_error(target, exact)) < bound:
                print(f"  WRONG {product}: {wrong:.1e}", flush=True)
                continue
            calls: list[Callable[[], object]] = [
                partial(launch, sizes, product, source, weights[i % self.layer.sets], routings[i], target)
                for i, source in enumerate(sources)
            ]
            rows.append((self.seconds(calls), product.tile))
        rows.sort(key=lambda row: row[0])
        told = " | ".join(f"{self.rate((2 if up else 1), time)} {short(tile)}" for time, tile in rows[:4])
        print(f"  block_m {block_m} {'up' if up else 'down'}: {told}", flush=True)
        return rows

    def rate(self, times_down: int, seconds: float) -> str:
        return f"{1e6 * seconds:.1f} us {times_down * self.down_bytes / seconds / 1e9:.0f} GB/s"

    def layers(self, best: dict[int, dict[bool, list[Tile]]]) -> list[tuple[float, MoeConfig, str]]:
        """Time whole layers of the best ups and downs of each block_m, and of the table's entry; fastest first."""
        sizes, layer, rows = self.sizes, self.layer, []
        scratch = torch.zeros(self.tokens, sizes.hidden, device=sizes.device, dtype=sizes.dtype)

        def seconds(config: MoeConfig | None) -> float:
            return self.seconds(
                [partial(moe.fused_moe, x, layer.experts(i), None, scratch, config) for i, x in enumerate(self.xs)]
            )

        for block_m, both in best.items():
            for config in (MoeConfig(block_m, up, down) for up in both[True] for down in both[False]):
                got, ids = moe.fused_moe(self.xs[0], layer.experts(0), config=config)
                same = (ids == self.chosen.ids).all(1)  # the others' logits are too close to tell
                rows.append((seconds(config), config, f"error {relative_error(got[same], self.out[same]):.1e}"))
        now = pick_moe_config(self.tokens, sizes.top_k, sizes.experts, sizes.kind, "cuda")
        rows.append((seconds(None), now, "the table's"))
        return sorted(rows, key=lambda row: row[0])


def tune(sizes: Sizes, counts: list[int], processes: int) -> list[dict[str, Any]]:
    """Tune each number of tokens; print what to paste, and return the timed layers."""
    jobs = sorted({product for count in counts for product in candidates(sizes, count)}, key=str)
    bad = set() if sizes.smoke else compile_all(partial(launch_once, sizes), jobs, processes)
    torch.manual_seed(0)
    layer = Layer(sizes)
    best: dict[int, MoeConfig] = {}
    results = []
    for count in counts:
        batch = Batch(layer, count)
        print(f"\n{count} tokens, {batch.distinct:.1f} distinct experts", flush=True)
        tried = [product for product in candidates(sizes, count) if product not in bad]
        fastest: dict[int, dict[bool, list[Tile]]] = {}
        for block_m, up in dict.fromkeys((product.block_m, product.up) for product in tried):
            rows = batch.products([one for one in tried if (one.block_m, one.up) == (block_m, up)])
            fastest.setdefault(block_m, {True: [], False: []})[up] = [tile for _, tile in rows[:2]]
        layers = batch.layers(fastest)
        for time, config, label in layers[:4] + [row for row in layers[4:] if row[2] == "the table's"]:
            told = f"block_m {config.block_m} {short(config.up)} {short(config.down)}: {label}"
            print(f"  layer {batch.rate(3, time)} {told}", flush=True)
        best[count] = layers[0][1]
        timed = [{"us": 1e6 * time, "config": str(config), "said": said} for time, config, said in layers]
        results.append({"tokens": count, "experts": batch.distinct, "layers": timed})
    paste(best, sizes)
    return results


def paste(best: dict[int, MoeConfig], sizes: Sizes) -> None:
    """Print the entries for moe_config.py."""
    print("\n# for headrace/kernels/moe_config.py:")
    if few := [count for count, config in best.items() if config.block_m == 1]:
        config = best[few[0]]
        print(f'FEW_TOKENS["cuda", "{sizes.kind}"] = {max(few)}')
        print(f'FEW["cuda", "{sizes.kind}"] = MoeConfig(1, {short(config.up)}, {short(config.down)})')
    many = [(count, config) for count, config in best.items() if config.block_m > 1]
    print(f'MANY["cuda", "{sizes.kind}"] = (')
    for number, (count, config) in enumerate(many):
        last = number == len(many) - 1
        bound = 'float("inf")' if last else f"{count * sizes.top_k / sizes.experts:g}"
        launches = f"MoeConfig({config.block_m}, {short(config.up)}, {short(config.down)})"
        print(f"    ({bound}, {launches}),  # {count} tokens")
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
    add_common_flags(made)
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
