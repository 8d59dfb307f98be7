"""Checks every Triton kernel against its reference on a GPU.

    python bench/check_kernels.py               all, a process a core: most of the time goes into compiling
    python bench/check_kernels.py --shard 2/8   only that share
    TRITON_INTERPRET=1 python bench/check_kernels.py --smoke    attention at tiny sizes, on a CPU

Inputs are random and fresh, outputs start as NaN. Sizes for kernels of the table are in kernel_sweeps.py; attention is
checked here, over 16-bit and fp8 caches of keys and of latents. Prints failures, and the worst error of each type as a
share of its bound; exit code 1 if a check fails. time_kernels.py measures how long kernels take.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from kernel_sweeps import SWEEPS, swept
from paged_batch import (
    DEVICE,
    E4M3,
    E5M2,
    KV_SCALE,
    LATENT_SCALE,
    NAMES,
    NOPE,
    ON_GPU,
    PLAIN,
    Heads,
    LatentBatch,
    PagedBatch,
    rope_table,
    split_qkv,
)  # fmt: skip
from timing import relative_error
from torch import Tensor
from torch.nn.functional import pad

from headrace.kernels.cases import Inputs
from headrace.kernels.decode import decode_attention_reference
from headrace.kernels.latent import latent_attention_reference
from headrace.kernels.latent_prompt import expanded_attention_reference
from headrace.kernels.rotary import rotary_and_cache, rotary_and_cache_reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 2e-6}
OVER_FP8 = 4e-3
"""attention over an fp8 cache, beside a reference on the same quantized cache"""
OTHER_CODES = 4e-2
"""Share of codes of a few new keys and values that the other way of rounding them makes: half of one in a hundred"""
BYTES_A_PROCESS = 12 * 2**30
"""GPU memory of a process: its context, compiled kernels and the largest case with its reference"""
SCALE = 1 if ON_GPU else 20
"""Lengths are divided by this."""
Check = tuple[str, Callable[[], float], float]
"""name, error, bound"""
ATTENTION_HEADS: tuple[Heads, ...] = (
    (32, 8, 128), (28, 4, 128), (8, 8, 64), (8, 1, 64), (8, 8, 128), (8, 2, 256), (8, 8, 256), (12, 3, 80), (8, 4, 8),
    (14, 2, 96), (32, 1, 16), (64, 8, 64),
)  # fmt: skip
FP8_HEADS: tuple[Heads, ...] = ((32, 8, 128), (8, 8, 64), (8, 2, 256), (14, 2, 96), (64, 8, 64))
WITH_SINKS: tuple[Heads, ...] = ((64, 8, 64), (14, 2, 96), (8, 2, 16))
"""Heads of which each has a sink: gpt-oss's, and others"""
SMOKE_HEADS: tuple[Heads, ...] = ((8, 2, 16),)
LATENTS = ((128, 16), (128, 1), (20, 64), (16, 16), (5, 1))
"""(heads, block size) over latents"""
SMOKE_LATENTS = ((4, 16),)
OVER_LATENTS = 8e-3
CHOSEN = 50
"""most keys that an index chooses"""


def worse(worst: float, error: float) -> float:
    """Return the larger error; NaN where one is NaN."""
    return max(worst, error) if worst == worst and error == error else float("nan")


def check_kernel(name: str, size: tuple[Any, ...], dtype: torch.dtype) -> float:
    """Return the largest error, in multiples of its bound."""
    errors = swept(name, Inputs(dtype, DEVICE, torch.seed()), size)
    return max((error / bound if bound else error and float("inf") for error, bound in errors), default=0.0)


def check_attention(
    kind: str, heads: Heads, block_size: int, window: int | None, dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
) -> float:  # fmt: skip
    """Check one ragged batch: decodes (some padding), prefills, chunks, or decodes followed by chunks."""
    decodes = [1] * 9 if kind in ("decode", "mixed") else []
    chunks = [random.randint(2, 300 // SCALE) for _ in range(4)] if kind != "decode" else []
    counts = decodes + chunks
    past = 0 if kind == "prefill" else 700 // SCALE
    lengths = [count + random.randint(0, past) for count in counts]
    if decodes and (kind == "decode" or cache_dtype):
        lengths[4], lengths[5] = 0, 1
    elif kind != "prefill" and not cache_dtype:
        lengths[-1] = 0  # padding of a whole graph
    layers = 0 if cache_dtype else random.choice((0, 1, 3))
    batch = PagedBatch(
        counts, lengths, heads, block_size, len(decodes), dtype, cache_dtype, layers, heads in WITH_SINKS
    )
    reference, plan = batch.reference(window), batch.plan()
    plans = [plan, *(replace(plan, decode_splits=splits, prefill_splits=splits) for splits in (1, 4))]
    if not window and (by_copy_engine := batch.plan_by_copy_engine(plan)):
        plans.append(by_copy_engine)
    worst = 0.0
    for forced in plans:
        out = torch.full_like(batch.q, float("nan"))
        out = batch.attend(forced, window, out=out, unpacked=batch.unpacked(forced))
        worst = worse(worst, relative_error(out, reference))
    return worst


def check_fused_decode(heads: Heads, cache_dtype: torch.dtype, window: int | None = None) -> float:
    """Check the fused decode kernel: its output, and the share of other codes in the cache."""
    lengths = [length // SCALE if length > 100 else length for length in (700, 0, 1, 33, 512, 2048, 5, 100)]
    batch = PagedBatch(
        [1] * len(lengths), [max(1, n) for n in lengths], heads, decodes=len(lengths), cache_dtype=cache_dtype,
        sinks=heads in WITH_SINKS,
    )  # fmt: skip
    batch.sequences.seq_lens.copy_(torch.tensor(lengths))
    ours, theirs = batch.cache.clone(), batch.cache.clone()
    q, k, v, angles, _ = batch.new_tokens
    expected = decode_attention_reference(
        q, k, v, angles, theirs, batch.sequences, batch.scale, window, kv_scale=batch.kv_scale, sinks=batch.sinks
    )
    return worse(relative_error(batch.decode(ours, window=window), expected), other_codes(ours, theirs))


def check_fp8_write(heads: Heads, cache_dtype: torch.dtype, norm: bool) -> float:
    """Check what rotary_and_cache writes: values beyond the type's range, tokens without a slot, and the last slot."""
    _, kv_heads, dim = heads
    tokens = 200 // SCALE
    q, k, v = split_qkv(tokens, heads)
    v[3], v[4] = 3e4, -6e4
    angles, positions = rope_table(512, dim), torch.randint(0, 512, (tokens,), device=DEVICE)
    slots = torch.randperm(tokens + 6, device=DEVICE)[:tokens]
    slots[::5] = -1
    slots[4] = tokens + 6  # the last one
    of_q, of_k = (torch.rand(dim, device=DEVICE).to(PLAIN) if norm else None for _ in range(2))
    ours, theirs = (
        torch.zeros(2, -(-(tokens + 7) // 16), 16, kv_heads, dim, device=DEVICE).to(cache_dtype) for _ in range(2)
    )
    scale = torch.tensor(KV_SCALE, device=DEVICE)
    rotary_and_cache(q, k, v, angles, positions, ours, slots, of_q, of_k, 1e-6, scale)
    rotary_and_cache_reference(q, k, v, angles, positions, theirs, slots, of_q, of_k, 1e-6, scale)
    largest = ours.float().max() == torch.finfo(cache_dtype).max or cache_dtype == E5M2
    return other_codes(ours, theirs) if largest and ours.float().isfinite().all() else float("inf")


def check_latents(form: str, heads: int, block_size: int, cache_dtype: torch.dtype | None) -> float:
    """Check attention over latents: `absorbed`, over the `chosen` keys alone, or `expanded` to those of each head."""
    lengths = [length // SCALE for length in (4000, 700, 60, 1300, 2100, 400)]
    batch = LatentBatch(heads, [1, 1, 1, 4, 300 // SCALE, 400 // SCALE], lengths, block_size, cache_dtype)
    sequences, plan = batch.sequences, batch.plan(form == "expanded", CHOSEN if form == "chosen" else None)
    sequences.seq_lens[1] = 0
    if plan.expanded is not None:
        given = batch.q, batch.of_heads, batch.cache, sequences, LATENT_SCALE, batch.scale, plan.num_decodes
        behind = int(sequences.query_start_loc[plan.num_decodes])
        return relative_error(batch.expand(plan)[behind:], expanded_attention_reference(*given)[behind:])
    listed = None
    if form == "chosen":
        ends = zip(batch.counts, sequences.seq_lens.tolist(), strict=True)
        seen = [position + 1 for count, length in ends for position in range(length - count, length)]
        drawn = (torch.randperm(max(size, 0), device=DEVICE)[:CHOSEN] for size in seen)
        listed = torch.stack([pad(keys, (0, CHOSEN - len(keys)), value=-1) for keys in drawn]).int()
    rotated = batch.q[..., NOPE:]
    expected = latent_attention_reference(
        batch.absorbed, rotated, batch.cache, sequences, LATENT_SCALE, batch.scale, listed
    )
    return relative_error(batch.attend(plan, chosen=listed), expected)


def other_codes(ours: Tensor, theirs: Tensor) -> float:
    """Return the share of values that differ."""
    return float((ours.float() != theirs.float()).float().mean())


def fp8_cache_checks(all_heads: tuple[Heads, ...]) -> Iterator[Check]:
    """Yield the checks of fp8 caches. In the interpreter a few percent of the casts to fp8 are wrong."""
    dtype, times = str(PLAIN).removeprefix("torch."), 1 if ON_GPU else 30
    for cache_dtype in (E4M3, E5M2) if ON_GPU else (E4M3,):
        for heads in all_heads:
            label = f"{NAMES[cache_dtype]} cache {heads}"
            for kind, window in (("decode", None), ("prefill", None), ("mixed", None), ("mixed", 50)):
                check = partial(check_attention, kind, heads, 16, window, PLAIN, cache_dtype)
                yield f"attention {kind} window {window} {label} {dtype}", check, OVER_FP8 * times
            for window in (None, 128) if heads in WITH_SINKS else (None,):
                check = partial(check_fused_decode, heads, cache_dtype, window)
                yield f"fused decode window {window} {label} {dtype}", check, OTHER_CODES * times
            norm = heads[1] == 8
            write = partial(check_fp8_write, heads, cache_dtype, norm)
            yield f"rotary {'with' if norm else 'without'} norm {label} {dtype}", write, 1e-2 * times


def latent_checks(sizes: tuple[tuple[int, int], ...]) -> Iterator[Check]:
    """Yield the checks of attention over latents."""
    for heads, block_size in sizes:
        for cache_dtype in (None, E4M3):
            for form in ("absorbed", "chosen", "expanded"):
                label = f"latents {form} {heads} heads block {block_size} {NAMES[cache_dtype or PLAIN]} cache"
                check = partial(check_latents, form, heads, block_size, cache_dtype)
                yield f"{label} {str(PLAIN).removeprefix('torch.')}", check, OVER_LATENTS


def attention_checks(all_heads: tuple[Heads, ...], dtype: torch.dtype) -> Iterator[Check]:
    """Yield the checks of attention over caches of the queries' type."""
    for number, heads in enumerate(all_heads):
        for kind in ("decode", "prefill", "chunk", "mixed"):
            size = 1 if kind == "chunk" else (16, 32, 64)[(number + len(kind)) % 3]
            with_windows = ((32, 8, 128), (12, 3, 80), (64, 8, 64))
            window = 77 if kind in ("chunk", "decode") and heads in with_windows else None
            label = f"attention {kind} {heads} block {size} window {window} {str(dtype).removeprefix('torch.')}"
            yield label, partial(check_attention, kind, heads, size, window, dtype), TOLERANCE[dtype]


def checks(smoke: bool) -> Iterator[Check]:
    """Yield every check; its name ends in its type."""
    if smoke:
        yield from attention_checks(SMOKE_HEADS, PLAIN)
        yield from fp8_cache_checks(SMOKE_HEADS)
        yield from latent_checks(SMOKE_LATENTS)
        return
    for dtype in DTYPES:
        for kernel, sweep in SWEEPS.items():
            for size in sweep.large:
                label = f"{kernel} {size} {str(dtype).removeprefix('torch.')}"
                yield label, partial(check_kernel, kernel, size, dtype), 1.0
        yield from attention_checks(ATTENTION_HEADS, dtype)
    yield from fp8_cache_checks(FP8_HEADS)
    yield from latent_checks(LATENTS)


def run_checks(shard: int, of: int, smoke: bool = False) -> bool:
    """Run every `of`-th check from the `shard`-th; print what failed."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills torch.empty with NaN
    torch.manual_seed(torch.seed())
    passed, worst = 0, dict.fromkeys(DTYPES, 0.0)
    failures = []
    for number, (name, check, limit) in enumerate(checks(smoke)):
        if number % of != shard:
            continue
        try:
            error = check()
        except Exception as problem:  # the sweep goes on, the failure is reported below
            failures.append(f"{name}: {type(problem).__name__}: {str(problem)[:300]}")
            continue
        if not error <= limit:
            failures.append(f"{name}: error {error:.2e} > {limit:.0e}")
            continue
        passed += 1
        dtype = getattr(torch, name.split()[-1])
        worst[dtype] = max(worst[dtype], error / limit)
    torch.use_deterministic_algorithms(False)
    errors = ", ".join(f"{str(dtype).removeprefix('torch.')} {value:.2f}" for dtype, value in worst.items())
    print(f"checks {shard}/{of}: {passed} passed, {len(failures)} failed; worst errors / bounds {errors}")
    for failure in failures:
        print(f"  FAILED {failure}")
    return not failures


def run_all_checks() -> bool:
    """Run the checks in one process a core, since compiling each kernel for each shape, on the host, takes long; in
    fewer where the GPU's memory is too small for so many."""
    of = min(16, len(os.sched_getaffinity(0)))
    if ON_GPU:
        of = max(1, min(of, torch.cuda.get_device_properties(0).total_memory // BYTES_A_PROCESS))
    command = [sys.executable, __file__, "--shard"]
    shards = [subprocess.Popen([*command, f"{shard}/{of}"]) for shard in range(of)]
    codes = [shard.wait() for shard in shards]
    return not any(codes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", help="I/N: every N-th check from the I-th; default: all, a process a core")
    parser.add_argument("--smoke", action="store_true", help="attention at tiny sizes on the CPU")
    options = parser.parse_args()
    shard, of = map(int, (options.shard or "0/1").split("/"))
    good = run_checks(shard, of, options.smoke) if options.smoke or options.shard else run_all_checks()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
