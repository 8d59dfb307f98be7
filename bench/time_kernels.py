"""Times the kernels that matter on a GPU: attention over caches of keys (beside torch's) and of latents, and others.

    python bench/time_kernels.py                all: TB/s of keys and values that decodes read, TFLOP/s of prompts, us
    TRITON_INTERPRET=1 python bench/time_kernels.py --smoke     the script itself, at tiny sizes, on a CPU

Figures are medians of graph replays that read more memory than the L2 cache holds. check_kernels.py
checks the results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from paged_batch import (
    DEVICE,
    E4M3,
    KV_SCALE,
    LATENT,
    NAMES,
    NOPE,
    ON_GPU,
    PLAIN,
    ROPE,
    VALUE,
    Heads,
    LatentBatch,
    PagedBatch,
    randn,
    rope_table,
    split_qkv,
)  # fmt: skip
from timing import graph_seconds
from torch import Tensor

from headrace.kernels.attention import is_hopper
from headrace.kernels.table import TRITON_KERNELS

HOPPER = ON_GPU and is_hopper(DEVICE)
HEADS: Heads = (32, 8, 128) if ON_GPU else (8, 2, 16)
"""Llama-3.1-8B's"""
CONTEXTS, BATCHES = ((512, 4096, 32768), (1, 8, 32, 128)) if ON_GPU else ((40,), (2,))
PROMPTS = ((1, 512, 0), (1, 2048, 0), (8, 2048, 0), (1, 8192, 0), (1, 2048, 6144)) if ON_GPU else ((1, 64, 0),)
"""(requests, new tokens of each, keys before them)"""
LATENT_DECODES = (
    ((128, 64, 8192), (128, 8, 65536), (128, 1, 8192), *((16, size, 1024) for size in (1, 8, 32, 128)))
    if ON_GPU
    else ((4, 2, 40),)
)
"""(heads of DeepSeek-V3 and V2-Lite, requests, keys of each)"""
LATENT_PROMPTS = ((16, 4096, 0), (128, 4096, 0), (16, 2048, 30000)) if ON_GPU else ((4, 60, 0),)
"""(heads, new tokens of one request, keys before them)"""
Make = Callable[[int], Callable[[], object]]
"""tokens or rows -> the call to time"""


def seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Return the seconds of one call, in a graph of at least eight."""
    return graph_seconds([*calls] * max(1, 8 // len(calls)), repeats=9)


def decode_rate(batch: PagedBatch, fused: bool = True) -> float:
    """Return the bytes/s of keys and values that decodes read, in the fused kernel or in paged attention alone."""
    run = batch.decode if fused else partial(batch.attend, batch.plan())
    return batch.bytes_read / seconds([partial(run, cache=cache) for cache in batch.copies()])


def decodes_of(size: int, context: int, cache_dtype: torch.dtype) -> PagedBatch:
    return PagedBatch([1] * size, [context] * size, HEADS, decodes=size, cache_dtype=cache_dtype)


def prefill_rate(prompts: tuple[int, int, int], cache_dtype: torch.dtype, copy_engine: bool) -> str:
    """Return the TFLOP/s of prompts, unpacking included. `copy_engine`: kernels/prefill.py may serve."""
    size, length, past = prompts
    batch = PagedBatch([length] * size, [past + length] * size, HEADS, cache_dtype=cache_dtype)
    plan = batch.plan(copy_engine)
    call = partial(batch.attend, plan, unpacked=batch.unpacked(plan))
    return f"{teraflops(prompts, call):.0f}"


def teraflops(prompts: tuple[int, int, int], call: Callable[[], object]) -> float:
    size, length, past = prompts
    work = 4 * size * length * (past + length / 2) * HEADS[0] * HEADS[2]
    return work / 1e12 / seconds([call] * 4)


def torch_prefill_rate(prompts: tuple[int, int, int], backend: Any) -> str:
    """Return the TFLOP/s of torch's attention, whose keys and values lie in one piece."""
    from torch.nn.attention import sdpa_kernel

    size, length, past = prompts
    if past:  # torch's causal mask begins at the first key
        return "-"
    q, k, v = (randn(size, heads, length, HEADS[2]) for heads in (HEADS[0], HEADS[1], HEADS[1]))

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    try:
        return f"{teraflops(prompts, call):.0f}"
    except RuntimeError as problem:
        return f"unavailable ({str(problem)[:60]})"


def time_attention() -> None:
    """Print the rates of decodes and prompts over each type of cache."""
    print(f"decode at {HEADS}, blocks of 16: TB/s of keys and values read, paged / fused with rotary and write")
    for context in CONTEXTS:
        for size in BATCHES:
            cells = []
            for cache_dtype, name in NAMES.items():
                batch = decodes_of(size, context, cache_dtype)
                paged, fused = decode_rate(batch, fused=False), decode_rate(batch)
                us = batch.bytes_read / fused * 1e6
                cells.append(f"{name} {paged / 1e12:5.2f} /{fused / 1e12:5.2f} ({us:7.1f} us)")
                del batch
            print(f"  context {context:5d} batch {size:4d}  " + "   ".join(cells), flush=True)
    print(f"prompts, causal, TFLOP/s at (requests, tokens, keys before them): {PROMPTS}")
    for cache_dtype, name in NAMES.items():
        for copy_engine in (False, True) if HOPPER else (False,):
            kernel = "prefill.py" if copy_engine else "attention.py"
            rates = [prefill_rate(prompts, cache_dtype, copy_engine) for prompts in PROMPTS]
            print(f"  kernels/{kernel}, {name}:", *rates, flush=True)
    if ON_GPU:
        from torch.nn.attention import SDPBackend

        for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
            print(f"  torch {name}:", *[torch_prefill_rate(prompts, backend) for prompts in PROMPTS], flush=True)


def time_latents() -> None:
    """Print the rates of attention over latents: decodes in the absorbed form, and prompts with keys of each head,
    gathering and projecting included."""
    print("latents, decodes: us, TFLOP/s, TB/s read, at heads, requests x keys of each")
    for heads, requests, keys in LATENT_DECODES:
        for cache_dtype in (None, E4M3):
            batch = LatentBatch(heads, [1] * requests, [keys] * requests, 64, cache_dtype)
            more = min(15, int(2e8 / batch.cache.nbytes)) if ON_GPU else 0
            copies = [batch.cache, *(batch.cache.clone() for _ in range(more))]
            took = seconds([partial(batch.attend, batch.plan(), cache) for cache in copies])
            work = 2 * heads * (2 * LATENT + ROPE) * requests * keys
            rates = f"{took * 1e6:.1f}  {work / took / 1e12:.3g}  {batch.cache.nbytes / took / 1e12:.3g}"
            print(f"  {heads}, {requests} x {keys}, {NAMES[cache_dtype or PLAIN]}: {rates}", flush=True)
    print("latents, prompts: us, TFLOP/s, at heads, new tokens behind known ones")
    for heads, tokens, past in LATENT_PROMPTS:
        batch = LatentBatch(heads, [tokens], [past + tokens])
        took = seconds([partial(batch.expand, batch.plan(expands=True))] * 4)
        pairs = 2 * heads * tokens * (past + tokens / 2) * (NOPE + ROPE + VALUE)
        both = pairs + 2 * heads * (past + tokens) * LATENT * (NOPE + VALUE)
        print(f"  {heads}, {tokens} behind {past}: {took * 1e6:.1f}  {both / took / 1e12:.3g}", flush=True)


def time_others() -> None:
    """Print the microseconds of the kernels around the products, and of sampling."""
    counts, vocab = ((1, 64, 8192), 128256) if ON_GPU else ((1, 3), 500)
    ones, weight = torch.ones(counts[-1], device=DEVICE), randn(4096)
    whole = torch.arange(counts[-1], device=DEVICE)

    def rotary(n: int, cache_dtype: torch.dtype) -> Callable[[], object]:
        cache = torch.zeros(2, n // 16 + 1, 16, *HEADS[1:], device=DEVICE).to(cache_dtype)
        scale = None if cache_dtype == PLAIN else torch.tensor(KV_SCALE, device=DEVICE)
        qkv, angles, slots = split_qkv(n, HEADS), rope_table(8192, HEADS[2]), whole[:n]
        return partial(TRITON_KERNELS.rotary_and_cache, *qkv, angles, slots.clone(), cache, slots, kv_scale=scale)

    def filtered(n: int, k: int, p: float) -> Callable[[], object]:
        logits, one = randn(n, vocab) * 3, ones[:n]  # as peaked as a model's: few tokens hold most of the probability
        return partial(TRITON_KERNELS.filter_floor, logits, one, (one * k).int(), one * p, one * 0)

    kernels: dict[str, Make] = {
        "rms_norm": lambda n: partial(TRITON_KERNELS.rms_norm, randn(n, 4096), weight, 1e-5),
        "gate_and_mul": lambda n: partial(TRITON_KERNELS.gate_and_mul, randn(n, 28672)),
        **{f"rotary and write, {name}": partial(rotary, cache_dtype=dtype) for dtype, name in NAMES.items()},
    }
    of_rows: dict[str, Make] = {
        "gumbel_argmax": lambda n: partial(
            TRITON_KERNELS.gumbel_argmax, randn(n, vocab), ones[:n], whole[:n], whole[:n]
        ),
        **{
            f"filter_floor {k=} {p=}": partial(filtered, k=k, p=p)
            for k, p in ((0, 1.0), (50, 1.0), (0, 0.9), (50, 0.9))
        },
    }
    for made, sizes, what in ((kernels, counts, "tokens"), (of_rows, counts[:2], f"rows of {vocab} logits")):
        print(f"us at {sizes} {what}, Llama-8B shapes:")
        for name, make in made.items():
            print(f"  {name}: {' / '.join(f'{1e6 * seconds([make(n)]):.1f}' for n in sizes)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="all of it at the tiny sizes of a machine without a GPU")
    parser.parse_args()
    time_attention()
    time_latents()
    time_others()
    return 0


if __name__ == "__main__":
    sys.exit(main())
