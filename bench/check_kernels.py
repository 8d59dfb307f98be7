"""Checks every Triton kernel against its reference on a GPU.

    python bench/check_kernels.py               all, a process a core: they are mostly compiling
    python bench/check_kernels.py --shard 2/8   only that share

Inputs are random and fresh, outputs are poisoned with NaN, errors are ||out - ref|| / ||ref|| against fp32 arithmetic
on the same inputs. How long kernels take is time_kernels.py's business.
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

import torch
from torch import Tensor

from headrace.kernels._triton import DEVICE_FAMILY, fp8_dtype
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
from headrace.kernels.moe import Experts
from headrace.kernels.moe_config import pick_moe_config
from headrace.kernels.norm import HalfNormed, half_norm_reference
from headrace.kernels.table import REFERENCE_KERNELS, TRITON_KERNELS

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


def check_norm(rows: int, hidden: int, dtype: torch.dtype) -> float:
    x, weight = randn(rows, hidden, dtype=dtype), randn(hidden, dtype=dtype)
    expected = REFERENCE_KERNELS.rms_norm(x.float(), weight.float(), 1e-5)
    return error(TRITON_KERNELS.rms_norm(x, weight, 1e-5), expected)


def check_silu(rows: int, width: int, dtype: torch.dtype) -> float:
    x = randn(rows, 2 * width, dtype=dtype)
    return error(TRITON_KERNELS.silu_and_mul(x), REFERENCE_KERNELS.silu_and_mul(x.float()))


def check_quantize(rows: int, width: int, dtype: torch.dtype) -> float:
    """Alone, and inside norm and activation, where it must be what both would give one after the other."""
    fp8, weight = fp8_dtype(DEVICE), randn(width, dtype=dtype)
    x = randn(rows, 2 * width, dtype=dtype)
    half = x[:, width:]
    pairs = (
        (TRITON_KERNELS.quantize_per_token(half, fp8), half),
        (TRITON_KERNELS.rms_norm_quantized(half, weight, 1e-5, fp8), TRITON_KERNELS.rms_norm(half, weight, 1e-5)),
        (TRITON_KERNELS.silu_and_mul_quantized(x, fp8), TRITON_KERNELS.silu_and_mul(x)),
    )
    wide = torch.float64
    return max(
        error(found.dequantize(wide), REFERENCE_KERNELS.quantize_per_token(plain, fp8).dequantize(wide))
        for found, plain in pairs
    )


def check_fp8_linear(rows: int, n: int, k: int, dtype: torch.dtype) -> float:
    fp8 = fp8_dtype(DEVICE)
    x = REFERENCE_KERNELS.quantize_per_token(randn(rows, k, dtype=dtype), fp8)
    weight = REFERENCE_KERNELS.quantize_per_token(randn(n, k, dtype=dtype), fp8)
    worst = 0.0
    for bias, scales in itertools.product((None, randn(n, dtype=dtype)), (n, 1)):
        arguments = (*x, weight.values, weight.scales[:scales, 0].contiguous(), bias)
        expected = REFERENCE_KERNELS.fp8_linear(*arguments, torch.float32)
        worst = max(worst, error(TRITON_KERNELS.fp8_linear(*arguments, dtype), expected))
    return worst


def check_rotary(heads: tuple[int, int, int], rotary_dim: int, norm: bool, dtype: torch.dtype) -> float:
    num_heads, kv_heads, dim = heads
    tokens, block_size, blocks = 37, 16, 9
    q, k, v = randn(tokens, num_heads + 2 * kv_heads, dim, dtype=dtype).split((num_heads, kv_heads, kv_heads), dim=1)
    angle = torch.rand(4096, rotary_dim // 2, device=DEVICE) * 6.28
    cos_sin = torch.cat((angle.cos(), angle.sin()), dim=-1)
    positions = torch.randint(0, 4096, (tokens,), device=DEVICE)
    slots = torch.randperm(blocks * block_size, device=DEVICE)[:tokens]
    slots[::7] = -1
    cache = randn(2, blocks, block_size, kv_heads, dim, dtype=dtype)
    expected_cache = cache.float()
    weights = [randn(dim, dtype=dtype) if norm else None for _ in range(2)]
    wide = [weight.float() if weight is not None else None for weight in weights]
    out = TRITON_KERNELS.rotary_and_cache(q, k, v, cos_sin, positions, cache, slots, *weights)
    expected = REFERENCE_KERNELS.rotary_and_cache(
        q.float(), k.float(), v.float(), cos_sin, positions, expected_cache, slots, *wide
    )
    return max(error(out, expected), error(cache, expected_cache))


def check_prepare() -> float:
    counts = [1] * 50 + [random.randint(1, 300) for _ in range(20)]
    computed = [random.randint(0, 2000) for _ in counts]
    starts = ints([0, *itertools.accumulate(counts)])
    tokens = torch.randint(0, 2**31 - 1, (80, 2400), dtype=torch.int32, device=DEVICE)
    blocks = torch.randint(0, 2**31 - 1, (80, 150), dtype=torch.int32, device=DEVICE)
    rows = torch.randperm(80, device=DEVICE)[: len(counts)].int()
    arguments = (rows, ints(computed), starts, tokens, blocks, 16, sum(counts))
    pairs = zip(
        TRITON_KERNELS.prepare_batch(*arguments), REFERENCE_KERNELS.prepare_batch(*arguments), strict=True
    )  # fmt: skip
    return 0.0 if all(torch.equal(a, b) for a, b in pairs) else 1.0


def check_around_the_step() -> float:
    """What comes out of the host's pinned memory, and what goes there."""
    words = torch.randint(-(2**31), 2**31 - 1, (10_280,), dtype=torch.int32).pin_memory()
    copied = torch.empty_like(words, device=DEVICE)
    TRITON_KERNELS.copy_words(copied, words)
    same = torch.equal(copied.cpu(), words)
    index = torch.randperm(20_000)[:9_001].pin_memory()
    tables = [torch.zeros(20_000, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    for kernels, table in zip((TRITON_KERNELS, REFERENCE_KERNELS), tables, strict=True):
        kernels.scatter_words(table, index, words[:9_001])
    same = same and torch.equal(*tables) and bool(tables[0].any())
    for count in (1, 64, 1000):
        rows, positions = torch.randperm(1025, device=DEVICE)[:count], torch.randint(0, 99, (count,), device=DEVICE)
        token_ids, best = torch.randint(0, 128256, (count,), device=DEVICE), randn(count, dtype=torch.bfloat16)
        raw_best = best.clone()
        best[1::3], raw_best[2::3] = float("-inf"), float("nan")
        found = []
        for kernels in (TRITON_KERNELS, REFERENCE_KERNELS):
            table = torch.zeros(1025, 99, dtype=torch.int32, device=DEVICE)
            out = torch.zeros(count, dtype=torch.int64).pin_memory()
            kernels.commit_tokens(out, table, token_ids, best, raw_best, rows, positions, -1, -2)
            torch.cuda.synchronize()
            found.append((out, table))
        same = same and all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    return 0.0 if same else 1.0


def check_gumbel(rows: int, vocab: int, dtype: torch.dtype) -> float:
    logits = randn(rows, vocab, dtype=dtype)
    temperature = torch.rand(rows, device=DEVICE) * 2
    temperature[::3] = 0
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), device=DEVICE)
    positions = torch.randint(0, 2**17, (rows,), device=DEVICE)
    arguments = (logits, temperature, seeds, positions)
    same = TRITON_KERNELS.gumbel_argmax(*arguments) == REFERENCE_KERNELS.gumbel_argmax(*arguments)
    return 1.0 - float(same.double().mean())


def check_filter(rows: int, vocab: int, spread: float, dtype: torch.dtype) -> float:
    """Share of rows whose limit differs; a row alone must get what it gets among others."""
    logits = (torch.randn(rows, vocab, device=DEVICE) * spread).to(dtype)
    temperature, top_p, min_p = (torch.rand(rows, device=DEVICE) for _ in range(3))
    top_k = torch.randint(-1, random.choice((60, 3000, 2 * vocab)), (rows,), device=DEVICE, dtype=torch.int32)
    top_k[::3], top_p[1::4], min_p = 0, 1.0, min_p * 0.1
    min_p[::2] = 0
    logits[0, : vocab // 2], logits[-1] = float("-inf"), 1.0
    params = (temperature + 0.05, top_k, top_p, min_p)
    found = TRITON_KERNELS.filter_floor(logits, *params)
    alone = TRITON_KERNELS.filter_floor(logits[1:2], *(value[1:2] for value in params))
    same = found == REFERENCE_KERNELS.filter_floor(logits, *params)
    return 1.0 - float(same.double().mean()) + float(alone[0] != found[min(1, rows - 1)])


def check_experts(tokens: int, sizes: tuple[int, int, int, int], shared: bool, dtype: torch.dtype) -> float:
    """sizes: experts, those of a token, hidden, an expert's. Where batch invariance is broken: infinite."""
    count, top_k, hidden, width = sizes
    x, residual, extra = (randn(tokens, hidden, dtype=dtype) for _ in range(3))
    experts = Experts(
        randn(hidden, dtype=dtype), 1e-6, randn(count + shared, hidden, dtype=dtype) * hidden**-0.5,
        randn(count, 2 * width, hidden, dtype=dtype) * hidden**-0.5,
        randn(count, hidden, width, dtype=dtype) * width**-0.5, top_k, not shared,
    )  # fmt: skip
    names = ("norm_weight", "router", "w13", "w2")
    wide = replace(experts, **{name: getattr(experts, name).float() for name in names})
    expected, wanted = REFERENCE_KERNELS.fused_moe(
        x.float(), wide, extra.float() if shared else None, residual.clone().float()
    )  # fmt: skip
    halves = replace(experts, next_norm=randn(hidden, dtype=dtype))
    out, ids = TRITON_KERNELS.fused_moe(x, halves, extra if shared else None, residual.clone())
    if isinstance(out, HalfNormed):
        half, out = out, out.x
        again = half_norm_reference(out, halves.next_norm)
        if error(half.scaled, again.scaled) + error(half.squares.sum(1), again.squares.sum(1)) > 1e-5:
            return float("inf")
    invariant = replace(experts, invariant=True)
    together, one = residual.clone(), slice(tokens // 2, tokens // 2 + 1)
    others = TRITON_KERNELS.fused_moe(x, invariant, extra if shared else None, together)[1]
    # a rounded logit may choose another expert
    same, also = ((found.sort().values == wanted.sort().values).all(dim=1) for found in (ids, others))
    alone = TRITON_KERNELS.fused_moe(x[one], invariant, extra[one] if shared else None, residual[one].clone())[0]
    usual = 0.99 if dtype == torch.float32 else 0.5
    if not torch.equal(together[one], alone) or (tokens > 16 and same.float().mean() < usual):
        return float("inf")
    return max(error(out[same], expected[same]), error(together[also], expected[also]))


def check_rounded_experts(tokens: int, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> float:
    """Weights in fp8. The reference rounds the tokens that the table's configuration rounds."""
    count, top_k, hidden, width = sizes
    x, fp8 = randn(tokens, hidden, dtype=dtype), fp8_dtype(DEVICE)
    router = randn(count, hidden, dtype=dtype) * hidden**-0.5
    (w13, w13_scale), (w2, w2_scale) = (
        REFERENCE_KERNELS.quantize_per_token(randn(count * out, size, dtype=dtype) * size**-0.5, fp8)
        for out, size in ((2 * width, hidden), (hidden, width))
    )
    experts = Experts(
        randn(hidden, dtype=dtype), 1e-6, router, w13.view(count, 2 * width, hidden), w2.view(count, hidden, width),
        top_k, True, w13_scale=w13_scale.view(count, 2 * width), w2_scale=w2_scale.view(count, hidden),
    )  # fmt: skip
    config = pick_moe_config(tokens, top_k, count, 1, DEVICE_FAMILY)
    expected, wanted = REFERENCE_KERNELS.fused_moe(x, experts, config=config)
    out, ids = TRITON_KERNELS.fused_moe(x, experts)
    same = (ids == wanted).all(dim=1)  # a rounded logit may choose another expert
    if tokens > 16 and same.float().mean() < 0.5:
        return float("inf")
    return error(out[same], expected[same])


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
    reference = paged_attention_reference(
        *(t.float() if t.is_floating_point() else t for t in inputs), scale, *longest, window
    )
    worst = 0.0
    plans = [plan, *(replace(plan, decode_splits=splits, prefill_splits=splits) for splits in (1, 4))]
    served = not window and q.element_size() == 2 and block_size >= SMALLEST_BOX and heads[2] in COPY_ENGINE_PREFILL
    if chunks and served and is_hopper(DEVICE):
        plans.append(by_copy_engine(plan, len(chunks), sum(chunks), longest[1], heads[2], heads[0] // heads[1], 2))
    for forced in plans:
        out = torch.full_like(q, float("nan"))
        paged_attention(*inputs, scale, *longest, window, out, forced)
        worst = max(worst, error(out, reference)) if worst == worst else worst
    return worst


ROTARY_SHAPES = (
    # ((query heads, KV heads, head_dim), rotary_dim, QK norm)
    ((32, 8, 128), 128, False),
    ((16, 8, 128), 128, True),
    ((12, 2, 64), 64, False),
    ((8, 4, 8), 8, False),
    ((5, 5, 80), 32, True),
    ((6, 1, 96), 96, False),
)
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
        for rows, hidden in ((1, 4096), (33, 8192), (7, 100), (5, 16384)):
            yield f"norm {rows}x{hidden} {name}", partial(check_norm, rows, hidden, dtype), limit
        for rows, width in ((1, 14336), (65, 1000), (3, 7)):
            yield f"silu_and_mul {rows}x{width} {name}", partial(check_silu, rows, width, dtype), limit
        for rows, width in ((1, 4096), (33, 14336), (5, 28672), (7, 100)):
            yield f"quantize {rows}x{width} {name}", partial(check_quantize, rows, width, dtype), 1e-3
        for rows, n, k in ((1, 4096, 4096), (17, 6144, 4096), (300, 4096, 14336), (5, 48, 16)):
            label = f"fp8 linear {rows}x{n}x{k} {name}"
            yield label, partial(check_fp8_linear, rows, n, k, dtype), max(limit, 4e-3)  # sums of fewer bits
        for heads, rotary, norm in ROTARY_SHAPES:
            yield f"rotary {heads}/{rotary} {name}", partial(check_rotary, heads, rotary, norm, dtype), limit
        for rows, vocab in ((1, 128256), (33, 151936), (7, 513)):
            yield f"gumbel_argmax {rows}x{vocab} {name}", partial(check_gumbel, rows, vocab, dtype), 0.0
        for rows, vocab, spread in ((2, 128256, 1.0), (33, 151936, 4.0), (7, 513, 1e-3), (64, 32000, 20.0)):
            label = f"filter_floor {rows}x{vocab}x{spread} {name}"
            yield label, partial(check_filter, rows, vocab, spread, dtype), 0.0
        for sizes in ((128, 8, 2048, 768), (8, 2, 1024, 3584), (60, 4, 2048, 1408), (5, 3, 72, 40)):
            for tokens in (1, 2, 7, 16, 40, 129, 1100):
                label = f"experts {sizes} x {tokens} {name}"
                yield label, partial(check_experts, tokens, sizes, sizes[0] < 100, dtype), 2 * limit
                # now and then one value of a row comes to lie one step of fp8 away
                yield f"fp8 {label}", partial(check_rounded_experts, tokens, sizes, dtype), 2 * limit + 2e-2
        for number, heads in enumerate(ATTENTION_SHAPES):
            for kind in ("decode", "prefill", "chunk", "mixed"):
                size = 1 if kind == "chunk" else (16, 32, 64)[(number + len(kind)) % 3]
                window = 77 if kind in ("chunk", "decode") and heads in ((32, 8, 128), (12, 3, 80)) else None
                label = f"attention {kind} {heads} block {size} window {window} {name}"
                yield label, partial(check_attention, kind, heads, size, window, dtype), limit
    yield "prepare_batch", check_prepare, 0.0
    yield "copy_words, commit_tokens", check_around_the_step, 0.0


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
        for dtype in DTYPES:
            if name.split()[-1] == str(dtype).removeprefix("torch.") and name.split("_")[0] not in ("gumbel", "filter"):
                worst[dtype] = max(worst[dtype], found)
    torch.use_deterministic_algorithms(False)
    errors = ", ".join(f"{str(dtype).removeprefix('torch.')} {value:.1e}" for dtype, value in worst.items())
    print(f"checks {shard}/{of}: {passed} passed, {len(failures)} failed; worst errors {errors}")
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
