"""Checks every Triton kernel against its reference on a GPU.

    python bench/check_kernels.py               all, a process a core: they are mostly compiling
    python bench/check_kernels.py --shard 2/8   only that share

Inputs are random and fresh, outputs are poisoned with NaN. Cases of the kernel table stand in kernel_sweeps.py.
How long kernels take is time_kernels.py's business.
"""

from __future__ import annotations

import argparse
import itertools
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
from torch import Tensor

from headrace.kernels._triton import DEVICE_FAMILY
from headrace.kernels.attention import (
    is_hopper,
    multiprocessor_count,
    paged_attention,
    paged_attention_reference,
)
from headrace.kernels.attention_config import (
    COPY_ENGINE_PREFILL,
    SMALLEST_BOX,
    by_copy_engine,
    plan_attention,
)
from headrace.kernels.cases import Inputs
from headrace.kernels.paged import Sequences

DEVICE = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 2e-6}
Check = tuple[str, Callable[[], float], float]


def error(out: Tensor, reference: Tensor) -> float:
    """||out - reference|| / ||reference||; NaN where a NaN is."""
    difference = out.double() - reference.double()
    return float(difference.norm() / reference.double().norm().clamp_min(1e-30))


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


# --- checks -----------------------------------------------------------------------------------------------------------


def check_kernel(name: str, size: tuple[Any, ...], dtype: torch.dtype) -> float:
    """The largest error, in multiples of its bound."""
    found = swept(name, Inputs(dtype, DEVICE, torch.seed()), size)
    return max((error / bound if bound else error and float("inf") for error, bound in found), default=0.0)


def attention_inputs(
    counts: list[int], lengths: list[int], heads: tuple[int, int, int], block_size: int, dtype: torch.dtype,
    layers: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(q, kv_cache, block_table, rows, query_start_loc, seq_lens) with blocks scattered over the cache, and NaN in them
    behind each request's last key; with `layers`, the cache of the last of so many, which follow each other in a block,
    the others full of NaN"""
    num_heads, kv_heads, dim = heads
    width = -(-max(lengths) // block_size) + 3
    total = sum(-(-length // block_size) for length in lengths)
    table = torch.randint(0, total, (len(counts) + 4, width), dtype=torch.int32, device=DEVICE)
    rows = torch.randperm(len(counts) + 4, device=DEVICE)[: len(counts)].int()
    blocks = torch.randperm(total, device=DEVICE).int()
    used = 0
    cache = randn(2, total + 1, block_size, kv_heads, dim, dtype=dtype)
    for row, length in zip(rows.tolist(), lengths, strict=True):
        needed = -(-length // block_size)
        table[row, :needed] = blocks[used : used + needed]
        used += needed
        if length % block_size:
            cache[:, blocks[used - 1], length % block_size :] = float("nan")
    if layers:
        arena = cache.new_full((total + 1, layers, 2, *cache.shape[2:]), float("nan"))
        cache = arena[:, -1].transpose(0, 1).copy_(cache)
    q = randn(sum(counts), num_heads, dim, dtype=dtype)
    return q, cache, table, rows, ints([0, *itertools.accumulate(counts)]), ints(lengths)


def check_attention(
    kind: str, heads: tuple[int, int, int], block_size: int, window: int | None, dtype: torch.dtype
) -> float:
    """One ragged batch: decodes (some padding), prefills, chunks, or decodes followed by chunks."""
    decodes = [1] * 9 if kind in ("decode", "mixed") else []
    chunks = [random.randint(2, 300) for _ in range(4)] if kind != "decode" else []
    counts = decodes + chunks
    past = 0 if kind == "prefill" else 700
    lengths = [count + random.randint(0, past) for count in counts]
    if kind == "decode":
        lengths[4] = 0
        lengths[5] = 1
    elif kind != "prefill":
        lengths[-1] = 0  # padding of a whole graph
    inputs = attention_inputs(counts, lengths, heads, block_size, dtype, random.choice((0, 1, 3)))
    q = inputs[0]
    plan = plan_attention(
        len(counts), len(q), len(decodes), max(lengths), *heads, q.element_size(), DEVICE_FAMILY,
        multiprocessor_count(DEVICE),
    )  # fmt: skip
    scale, longest = heads[2] ** -0.5, (max(counts), max(lengths))
    reference = paged_attention_reference(q.float(), inputs[1].float(), Sequences(*inputs[2:]), scale, window)
    worst = 0.0
    plans = [plan, *(replace(plan, decode_splits=splits, prefill_splits=splits) for splits in (1, 4))]
    served = not window and q.element_size() == 2 and block_size >= SMALLEST_BOX and heads[2] in COPY_ENGINE_PREFILL
    if chunks and served and is_hopper(DEVICE):
        plans.append(by_copy_engine(plan, len(chunks), sum(chunks), longest[1], heads[2], heads[0] // heads[1], 2))
    for forced in plans:
        out = torch.full_like(q, float("nan"))
        paged_attention(*inputs[:2], Sequences(*inputs[2:]), scale, window, None, out, plan=forced)
        worst = max(worst, error(out, reference)) if worst == worst else worst
    return worst


ATTENTION_SHAPES = (
    (32, 8, 128),
    (28, 4, 128),
    (8, 8, 64),
    (8, 1, 64),
    (8, 8, 128),
    (8, 2, 256),
    (8, 8, 256),
    (12, 3, 80),
    (8, 4, 8),
    (14, 2, 96),
    (32, 1, 16),
)


def checks() -> Iterator[Check]:
    for dtype in DTYPES:
        name, limit = str(dtype).removeprefix("torch."), TOLERANCE[dtype]
        for kernel, sweep in SWEEPS.items():
            for size in sweep.large:
                yield f"{kernel} {size} {name}", partial(check_kernel, kernel, size, dtype), 1.0
        for number, heads in enumerate(ATTENTION_SHAPES):
            for kind in ("decode", "prefill", "chunk", "mixed"):
                size = 1 if kind == "chunk" else (16, 32, 64)[(number + len(kind)) % 3]
                window = 77 if kind in ("chunk", "decode") and heads in ((32, 8, 128), (12, 3, 80)) else None
                label = f"attention {kind} {heads} block {size} window {window} {name}"
                yield label, partial(check_attention, kind, heads, size, window, dtype), limit


def run_checks(shard: int, of: int) -> bool:
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills torch.empty with NaN
    torch.manual_seed(torch.seed())
    passed, worst = 0, dict.fromkeys(DTYPES, 0.0)
    failures = []
    for number, (name, check, limit) in enumerate(checks()):
        if number % of != shard:
            continue
        try:
            found = check()
        except Exception as problem:  # the sweep goes on, the failure is reported below
            failures.append(f"{name}: {type(problem).__name__}: {str(problem)[:300]}")
            continue
        if not found <= limit:
            failures.append(f"{name}: error {found:.2e} > {limit:.0e}")
            continue
        passed += 1
        dtype = getattr(torch, name.split()[-1])
        worst[dtype] = max(worst[dtype], found / limit)
    torch.use_deterministic_algorithms(False)
    errors = ", ".join(f"{str(dtype).removeprefix('torch.')} {value:.2f}" for dtype, value in worst.items())
    print(f"checks {shard}/{of}: {passed} passed, {len(failures)} failed; worst errors / bounds {errors}")
    for failure in failures:
        print(f"  FAILED {failure}")
    return not failures


def run_all_checks() -> bool:
    """One process a core: what takes long is compiling each kernel for each shape, on the host."""
    of = min(16, len(os.sched_getaffinity(0)))
    command = [sys.executable, __file__, "--shard"]
    shards = [subprocess.Popen([*command, f"{shard}/{of}"]) for shard in range(of)]
    codes = [shard.wait() for shard in shards]
    return not any(codes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", help="I/N: every N-th check from the I-th; default: all, a process a core")
    options = parser.parse_args()
    good = run_checks(*map(int, options.shard.split("/"))) if options.shard else run_all_checks()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
