"""Times the experts' routing on one GPU: norm, router, choice and sort, by one launch and apart, and their parts alone.

    python bench/time_routing.py --json routing.json           Qwen3-30B-A3B's sizes, bf16
    TRITON_INTERPRET=1 python bench/time_routing.py --smoke    the script itself, tiny, on a CPU

A line a number of tokens, microseconds a layer inside a graph. What is timed is compared with torch first.

Its measurements have run on an H200; in this form they have not yet.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tune_experts import INEXACT, Sizes, error

from headrace.kernels import moe_route
from headrace.kernels.moe_config import pick_moe_config
from headrace.kernels.norm import rms_norm_reference

TOKENS = "1,2,4,8,16,32,64,128,1024,8192"


def check_routing(sizes: Sizes, routing: moe_route.Routing, logits: Tensor, block_m: int) -> float:
    """Share of the ids that are torch's; raises where order and tiles are not those of the ids."""
    if block_m:
        if not torch.equal(routing.order.long(), routing.ids.flatten().sort(stable=True).indices):
            raise AssertionError("pairs are not in the order of their experts")
        first, expected = 0, []
        for expert, count in enumerate(routing.ids.flatten().bincount(minlength=sizes.experts).tolist()):
            expected += [(expert, first + i, min(block_m, count - i)) for i in range(0, count, block_m)]
            first += count
        if [tile for tile in zip(*routing.tiles.tolist(), strict=True) if tile[2]] != expected:
            raise AssertionError("tiles are not those of the pairs")
    if (off := float((routing.weights.sum(1) - 1).abs().max())) > 1e-5:
        raise AssertionError(f"weights sum to one but for {off:.1e}")
    wanted = moe_route.route_reference(logits, sizes.top_k, True)
    return float((routing.ids == wanted.ids).float().mean())


def time_routing(sizes: Sizes, counts: list[int]) -> list[dict[str, Any]]:
    """Microseconds a layer of norm + router + choice + sort, fused and apart, and of their parts."""
    torch.manual_seed(0)
    routers = sizes.normal(8 if sizes.smoke else 64, sizes.experts, sizes.hidden, std=sizes.hidden**-0.5)
    return [time_one_routing(sizes, routers, count) for count in counts]


def time_one_routing(sizes: Sizes, routers: Tensor, count: int) -> dict[str, Any]:
    ones = torch.ones(sizes.hidden, device=sizes.device, dtype=sizes.dtype)
    x = sizes.normal(count, sizes.hidden)
    block_m = pick_moe_config(count, sizes.top_k, sizes.experts, 2, "cuda").block_m
    block_m = 0 if block_m == 1 else block_m
    turns = range(len(routers) if count <= 128 else 8)
    row: dict[str, Any] = {"tokens": count, "block_m": block_m}

    def whole(i: int, block_m: int = block_m) -> tuple[moe_route.Routing, Tensor, Tensor]:
        return moe_route.norm_and_route(x, ones, 1e-6, routers[i], sizes.experts, sizes.top_k, True, block_m)

    def us(call: Callable[[int], object]) -> float:
        return round(1e6 * sizes.seconds([partial(call, i) for i in turns]), 2)

    limit, normed = moe_route.ROUTER_TOKENS, x
    try:
        for most in (64, 0) if count <= 32 else (0,):  # by one launch, and by three
            moe_route._arrivals.cache_clear()
            moe_route.ROUTER_TOKENS = most
            routing, logits, normed = whole(0)
            exact = F.linear(rms_norm_reference(x, ones, 1e-6), routers[0])
            if not (wrong := error(logits, exact)) < INEXACT:
                raise AssertionError(f"logits are wrong by {wrong:.1e}")
            name = "one launch" if most else "apart"
            row[f"{name}: ids as torch's"] = check_routing(sizes, routing, logits[:, : sizes.experts], block_m)
            row[name] = us(whole)
            if most and block_m:
                row["one launch without sort"] = us(partial(whole, block_m=0))
    finally:
        moe_route._arrivals.cache_clear()
        moe_route.ROUTER_TOKENS = limit
    logits_of = [F.linear(normed, router) for router in routers[:8]]
    row["norm"] = us(lambda i: moe_route.rms_norm(x, ones, 1e-6))
    row["linear"] = us(lambda i: F.linear(normed, routers[i]))
    row["route"] = us(lambda i: moe_route.route(logits_of[i % 8], sizes.top_k, True, 0))
    if block_m:
        routings = [moe_route.route(one, sizes.top_k, True, block_m) for one in logits_of]
        row["sort"] = us(lambda i: moe_route._sort(routings[i % 8], sizes.experts, block_m))
    row["in use"] = "one launch" if count <= limit else "apart"
    print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return row


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--tokens", default=TOKENS, help="numbers of tokens, separated by commas")
    made.add_argument("--json", type=Path, help="write what was found to this file")
    made.add_argument("--experts", type=int, default=128)
    made.add_argument("--top-k", type=int, default=8, help="experts of a token")
    made.add_argument("--hidden", type=int, default=2048)
    made.add_argument("--smoke", action="store_true", help="toy sizes on the CPU, nothing is timed")
    return made


def main() -> int:
    options = parser().parse_args()
    sizes = Sizes(options.experts, options.top_k, options.hidden, 0)
    if options.smoke:
        sizes, options.tokens = Sizes(8, 2, 64, 0, smoke=True), "2,3"
    results = time_routing(sizes, [int(count) for count in options.tokens.split(",")])
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
