"""Checks and times attention over latents on a GPU: the absorbed form alone, and prompts with keys of each head.

    python bench/latents.py                     checks, then TFLOP/s and TB/s, and the shares of what the chip reaches
    python bench/latents.py --json out.json     writes the figures too
    TRITON_INTERPRET=1 python bench/latents.py --smoke      the script itself, at tiny sizes, on a CPU

Heads and latents are those of DeepSeek-V3 (128 heads) and V2-Lite (16). Figures are medians of graph replays, over
caches that together overflow the L2 cache; ceilings are measured by the run. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from h200_parts.chip import gpu_name, measure_ceilings, versions
from paged_batch import DEVICE, E4M3, ON_GPU, PLAIN, ints, num_sms, randn
from timing import graph_seconds, relative_error
from torch import Tensor
from torch.nn.functional import pad

from headrace.kernels._triton import DEVICE_FAMILY
from headrace.kernels.attention import tile_element_size
from headrace.kernels.latent import LatentHeads, latent_attention, latent_attention_reference
from headrace.kernels.latent_config import EXPANDED_BYTES, LatentPlan, plan_latent
from headrace.kernels.latent_prompt import expanded_attention, expanded_attention_reference
from headrace.kernels.paged import Sequences
from headrace.kernels.rotary import quantize_reference

NOPE, ROPE, VALUE, LATENT = (128, 64, 128, 512) if ON_GPU else (16, 8, 16, 24)
DECODES = (
    ((128, 64, 8192), (128, 8, 65536), (128, 1, 8192), *((16, size, 1024) for size in (1, 8, 32, 128)))
    if ON_GPU
    else ((4, 2, 40),)
)
"""(heads, requests, keys of each)"""
PROMPTS = ((16, 4096, 0), (128, 4096, 0), (16, 2048, 30000)) if ON_GPU else ((4, 60, 0),)
"""(heads, new tokens of one request, keys before them)"""
BOUND = 8e-3
SCALE = (NOPE + ROPE) ** -0.5


@dataclass(frozen=True)
class LatentBatch:
    """Holds ragged requests over a paged cache of latents, in blocks scattered over it."""

    heads: int
    counts: list[int]
    """new tokens of each request"""
    lengths: list[int]
    """known tokens, the new ones included"""
    block_size: int = 16
    cache_dtype: torch.dtype | None = None

    @cached_property
    def scale(self) -> Tensor | None:
        """What numbers of an fp8 cache are multiplied by."""
        return None if self.cache_dtype is None else torch.tensor([0.02, 0.0], device=DEVICE)

    @cached_property
    def sequences(self) -> Sequences:
        """The batch as kernels take it."""
        width = -(-max(*self.lengths, 1) // self.block_size)
        table = torch.randperm(len(self.counts) * width, device=DEVICE).int().view(len(self.counts), width)
        starts = ints([0, *accumulate(self.counts)])
        return Sequences(table, torch.randperm(len(self.counts), device=DEVICE).int(), starts, ints(self.lengths))

    @cached_property
    def cache(self) -> Tensor:
        """# [1, num_blocks, block_size, 1, ROPE + LATENT]"""
        shape = (1, self.sequences.block_table.numel(), self.block_size, 1, ROPE + LATENT)
        if self.scale is None:
            return randn(*shape)
        return quantize_reference(randn(*shape), self.scale[0], self.cache_dtype or PLAIN)

    @cached_property
    def q(self) -> Tensor:
        """# [T, heads, NOPE + ROPE]"""
        return randn(sum(self.counts), self.heads, NOPE + ROPE)

    @cached_property
    def of_heads(self) -> LatentHeads:
        """What makes keys and values."""
        return LatentHeads((randn(self.heads, NOPE + VALUE, LATENT) * LATENT**-0.5).to(PLAIN), NOPE)

    @cached_property
    def absorbed(self) -> Tensor:
        """# [T, heads, LATENT]"""
        return self.of_heads.absorb(self.q)

    def plan(self, expands: bool = False, num_chosen: int | None = None) -> LatentPlan:
        """Return the planner's launches; requests of one token come first."""
        decodes = sum(count == 1 for count in self.counts)
        return plan_latent(
            len(self.counts), len(self.q), decodes, max(self.lengths), sum(self.lengths[decodes:]) if expands else 0,
            self.of_heads.sizes(self.q), tile_element_size(self.q, self.cache), self.q.element_size(), DEVICE_FAMILY,
            num_sms(), num_chosen,
        )  # fmt: skip

    def attend(self, plan: LatentPlan, cache: Tensor | None = None, chosen: Tensor | None = None) -> Tensor:
        """Attend in the absorbed form; return # [T, heads, LATENT]."""
        out = torch.empty_like(self.absorbed)
        ends = (plan.decode, 0, plan.num_decodes), (plan.chunk, plan.num_decodes, len(self.counts))
        for how, first, end in ends:
            if how is not None:
                latent_attention(
                    self.absorbed, self.q[..., NOPE:], self.cache if cache is None else cache, self.sequences, SCALE,
                    how, self.scale, chosen, first, end, out,
                )  # fmt: skip
        return out

    def expand(self, plan: LatentPlan, memory: Tensor) -> Tensor:
        """Attend with keys and values of each head, behind the decodes; return # [T, heads, VALUE]."""
        assert plan.expanded is not None
        first = plan.num_decodes
        key_starts = pad(self.sequences.seq_lens[first:].cumsum(0, dtype=torch.int32), (1, 0))
        out = torch.full((len(self.q), self.heads, VALUE), float("nan"), dtype=PLAIN, device=DEVICE)
        return expanded_attention(
            self.q, self.of_heads, self.cache, self.sequences, key_starts, SCALE, plan.expanded, memory, self.scale,
            first, out,
        )  # fmt: skip


def memory_of_heads() -> Tensor:
    return torch.empty(EXPANDED_BYTES // PLAIN.itemsize if ON_GPU else 1 << 20, dtype=PLAIN, device=DEVICE)


def errors() -> dict[str, float]:
    """Return how far each form is from its reference."""
    found, times = {}, 1 if ON_GPU else 20
    lengths = [length // times for length in (4000, 700, 60, 1300, 2100, 400)]
    shapes = ((128, 16), (128, 1), (20, 64), (16, 16), (5, 1)) if ON_GPU else ((4, 16),)
    for heads, block_size in shapes:
        for cache_dtype in (None, E4M3):
            batch = LatentBatch(heads, [1, 1, 1, 4, 300 // times, 400 // times], lengths, block_size, cache_dtype)
            batch.sequences.seq_lens[1] = 0
            args = batch.absorbed, batch.q[..., NOPE:], batch.cache, batch.sequences, SCALE, batch.scale
            label = f"{heads} heads blocks of {block_size} {'fp8' if cache_dtype else '16-bit'}"
            found[f"absorbed {label}"] = relative_error(batch.attend(batch.plan()), latent_attention_reference(*args))
            listed = torch.stack([
                pad(torch.randperm(max(position + 1, 0), device=DEVICE)[:50], (0, 50), value=-1)[:50]
                for count, length in zip(batch.counts, batch.sequences.seq_lens.tolist(), strict=True)
                for position in range(length - count, length)
            ]).int()  # fmt: skip
            out = batch.attend(batch.plan(num_chosen=50), chosen=listed)
            found[f"chosen {label}"] = relative_error(out, latent_attention_reference(*args, listed))
            plan, expected = (
                batch.plan(expands=True),
                expanded_attention_reference(
                    batch.q,
                    batch.of_heads,
                    batch.cache,
                    batch.sequences,
                    SCALE,
                    batch.scale,
                    batch.plan().num_decodes,
                ),
            )
            if plan.expanded is not None:
                out, done = batch.expand(plan, memory_of_heads()), int(batch.sequences.query_start_loc[3])
                found[f"expanded {label}"] = relative_error(out[done:], expected[done:])
    return found


def decode_figures(
    heads: int, requests: int, keys: int, ceilings: Any, cache_dtype: torch.dtype | None
) -> dict[str, Any]:
    """Return what the absorbed form alone reaches."""
    batch = LatentBatch(heads, [1] * requests, [keys] * requests, 64, cache_dtype)
    plan = batch.plan()
    copies = [
        batch.cache,
        *(batch.cache.clone() for _ in range(min(15, int(2e8 / batch.cache.nbytes)) if ON_GPU else 0)),
    ]
    seconds = graph_seconds([partial(batch.attend, plan, cache) for cache in copies] * max(1, 8 // len(copies)), 9)
    work, read = 2 * heads * (2 * LATENT + ROPE) * requests * keys, batch.cache.nbytes
    return {
        "what": f"decode, {heads} heads, {requests} x {keys}{'' if cache_dtype is None else ', fp8'}",
        "us": seconds * 1e6, "tflops": work / seconds / 1e12, "share of matmul": work / seconds / ceilings.bf16,
        "tbps": read / seconds / 1e12, "share of read": read / seconds / ceilings.read,
    }  # fmt: skip


def prompt_figures(heads: int, tokens: int, past: int, ceilings: Any) -> dict[str, Any]:
    """Return what a prompt reaches, gathering and projecting included."""
    batch, memory = LatentBatch(heads, [tokens], [past + tokens]), memory_of_heads()
    plan = batch.plan(expands=True)
    seconds = graph_seconds([partial(batch.expand, plan, memory)] * 4, 9)
    pairs = tokens * (past + tokens / 2)
    work = 2 * heads * (pairs * (NOPE + ROPE + VALUE) + (past + tokens) * LATENT * (NOPE + VALUE))
    return {
        "what": f"prompt, {heads} heads, {tokens} behind {past}", "us": seconds * 1e6, "tflops": work / seconds / 1e12,
        "share of matmul": work / seconds / ceilings.bf16,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--smoke", action="store_true", help="at the tiny sizes of a machine without a GPU")
    options = parser.parse_args()
    found = errors()
    wrong = {name: error for name, error in found.items() if not error <= BOUND}
    print(f"{len(found)} checks, the worst {max(found.values()):.1e}, wrong: {wrong or 'none'}", flush=True)
    ceilings = measure_ceilings(DEVICE, toy=not ON_GPU)
    figures = [decode_figures(*shape, ceilings, kind) for shape in DECODES for kind in (None, E4M3)]
    figures += [prompt_figures(*shape, ceilings) for shape in PROMPTS]
    for line in figures:
        print(
            "  " + "  ".join(f"{key} {value:.3g}" if key != "what" else value for key, value in line.items()),
            flush=True,
        )
    if options.json:
        about = {"gpu": gpu_name(DEVICE), "versions": versions(), "ceilings": ceilings.__dict__}
        options.json.write_text(json.dumps(about | {"figures": figures}, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
