"""Times the kernels that matter on a GPU: attention over 16-bit and fp8 caches beside torch's, and others.

    python bench/time_kernels.py                all: TB/s of keys and values that decodes read, TFLOP/s of prompts, us
    python bench/time_kernels.py --tune         other attention configurations than those of attention_config.py
    python bench/time_kernels.py --tune --cache e4m3
    TRITON_INTERPRET=1 python bench/time_kernels.py --smoke     the script itself, at tiny sizes, on a CPU

Figures are medians of graph replays that read more memory than the L2 cache holds. --tune prints the rates of each
configuration, and the best ones as rows for headrace/kernels/attention_config.py. check_kernels.py checks the results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from paged_batch import DEVICE, KV_SCALE, NAMES, ON_GPU, PLAIN, Heads, PagedBatch, randn, rope_table, split_qkv
from timing import graph_seconds
from torch import Tensor

from headrace.kernels.attention import is_hopper
from headrace.kernels.attention_config import AttentionConfig
from headrace.kernels.table import TRITON_KERNELS

HOPPER = ON_GPU and is_hopper(DEVICE)
HEADS: Heads = (32, 8, 128) if ON_GPU else (8, 2, 16)
"""Llama-3.1-8B's"""
CONTEXTS, BATCHES = ((512, 4096, 32768), (1, 8, 32, 128)) if ON_GPU else ((40,), (2,))
PROMPTS = ((1, 512, 0), (1, 2048, 0), (8, 2048, 0), (1, 8192, 0), (1, 2048, 6144)) if ON_GPU else ((1, 64, 0),)
"""(requests, new tokens of each, keys before them)"""
TUNED_DECODES = ((1, 512), (1, 4096), (8, 4096), (32, 4096), (128, 512), (256, 4096)) if ON_GPU else ((2, 40), (3, 40))
"""(batch, context); of the first two few programs run"""
DECODE_CONFIGS = (
    (16, 32, 1, 3), (16, 32, 1, 4), (16, 32, 1, 6), (16, 32, 1, 8), (16, 32, 2, 4), (16, 64, 1, 3), (16, 64, 1, 4),
    (16, 64, 1, 6), (16, 64, 2, 2), (16, 64, 2, 3), (16, 64, 2, 4), (16, 64, 2, 5), (16, 64, 4, 2), (16, 128, 2, 2),
    (16, 128, 2, 4), (16, 128, 4, 2), (16, 128, 4, 3),
)  # fmt: skip
"""block_m, block_n, warps, stages"""
Make = Callable[[int], Callable[[], object]]
"""tokens or rows -> the call to time"""
PREFILL_CONFIGS = (
    (64, 32, 4, 2), (64, 32, 4, 3), (64, 32, 4, 4), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 2),
    (128, 32, 4, 2), (128, 32, 4, 3), (128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3),
)  # fmt: skip


def seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Return the seconds of one call, in a graph of at least eight."""
    return graph_seconds([*calls] * max(1, 8 // len(calls)), repeats=9)


def decode_rate(batch: PagedBatch, config: AttentionConfig | None = None, fused: bool = True) -> float:
    """Return the bytes/s of keys and values that decodes read, in the fused kernel or in paged attention alone."""
    plan = replace(batch.plan(), decode=config) if config else batch.plan()
    run = partial(batch.decode, config=config) if fused else partial(batch.attend, plan)
    return batch.bytes_read / seconds([partial(run, cache=cache) for cache in batch.copies()])


def decodes_of(size: int, context: int, cache_dtype: torch.dtype) -> PagedBatch:
    return PagedBatch([1] * size, [context] * size, HEADS, decodes=size, cache_dtype=cache_dtype)


def prefill_rate(
    prompts: tuple[int, int, int], cache_dtype: torch.dtype, copy_engine: bool, config: AttentionConfig | None = None
) -> str:
    """Return the TFLOP/s of prompts, unpacking included. `copy_engine`: kernels/prefill.py may serve."""
    size, length, past = prompts
    batch = PagedBatch([length] * size, [past + length] * size, HEADS, cache_dtype=cache_dtype)
    plan = batch.plan(copy_engine)
    if config is not None:
        tiles = len(batch.q) // (config.block_m * HEADS[1] // HEADS[0]) + size
        plan = replace(plan, prefill=config, prefill_splits=1, prefill_tiles=tiles)
    call = partial(batch.attend, plan, unpacked=batch.unpacked(plan))
    return f"{teraflops(prompts, call):.0f}"


def teraflops(prompts: tuple[int, int, int], call: Callable[[], object]) -> float:
    size, length, past = prompts
    work = 4 * size * length * (past + length / 2) * HEADS[0] * HEADS[2]
    return work / 1e12 / seconds([call] * 4)


def torch_prefill_rate(prompts: tuple[int, int, int], backend: object) -> str:
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


def tune(cache_dtype: torch.dtype) -> None:
    """Time attention configurations, and print the best ones."""
    made = [decodes_of(*shape, cache_dtype) for shape in TUNED_DECODES]
    print(f"decode over a {NAMES[cache_dtype]} cache, TB/s at (batch, context) {TUNED_DECODES}; the last also unfused")
    few: dict[AttentionConfig, float] = {}
    many: dict[AttentionConfig, float] = {}
    prefill: dict[AttentionConfig, float] = {}
    for config in (AttentionConfig(*numbers) for numbers in DECODE_CONFIGS[: None if ON_GPU else 2]):
        try:
            rates = [decode_rate(batch, config) / 1e12 for batch in made]
            rates.append(decode_rate(made[-1], config, fused=False) / 1e12)
        except Exception as problem:  # not every configuration fits the chip
            print(f"  {config} cannot run: {type(problem).__name__}: {str(problem)[:80]}", flush=True)
            continue
        print(f"  {config} {' '.join(f'{rate:5.2f}' for rate in rates)}", flush=True)
        few[config], many[config] = sum(rates[:2]), sum(rates[2:])
    print(f"prompts, TFLOP/s at (requests, tokens, keys before them) {PROMPTS}")
    configs = [AttentionConfig(*numbers) for numbers in PREFILL_CONFIGS[: None if ON_GPU else 2]]
    if HOPPER:
        configs += [AttentionConfig(128, n, 4, stages, copy_engine=True) for n in (64, 128) for stages in (2, 3)]
    for config in configs:
        try:
            cells = [prefill_rate(prompts, cache_dtype, config.copy_engine, config) for prompts in PROMPTS]
        except Exception as problem:
            print(f"  {config} cannot run: {type(problem).__name__}: {str(problem)[:80]}", flush=True)
            continue
        print(f"  {config}", *cells, flush=True)
        prefill[config] = sum(map(float, cells))
    print("# for headrace/kernels/attention_config.py:")
    tiled, by_copy_engine = ({c: r for c, r in prefill.items() if c.copy_engine == by} for by in (False, True))
    key, tables = f'"cuda", {cache_dtype.itemsize}, {HEADS[2]}', {"DECODE": many, "FEW_DECODES": few, "PREFILL": tiled}
    for name, rates_of in (tables | {"COPY_ENGINE_PREFILL": by_copy_engine}).items():
        if rates_of:
            print(f"{name}[{key if name in tables else HEADS[2]}] = {max(rates_of, key=rates_of.__getitem__)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="time other attention configurations")
    parser.add_argument("--cache", choices=tuple(NAMES.values()), default="16-bit", help="type of the tuned cache")
    parser.add_argument("--smoke", action="store_true", help="all of it at the tiny sizes of a machine without a GPU")
    options = parser.parse_args()
    if options.smoke or not options.tune:
        time_attention()
        time_others()
    if options.smoke or options.tune:
        tune(next(dtype for dtype, name in NAMES.items() if name == options.cache))
    return 0


if __name__ == "__main__":
    sys.exit(main())
