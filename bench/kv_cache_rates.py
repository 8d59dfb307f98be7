"""The fp8 KV cache on a GPU: is it right, how fast is it, and do other launches do better?

    python bench/kv_cache_rates.py                              all, meant to take less than 3 minutes
    python bench/kv_cache_rates.py --check | --time | --tune
    TRITON_INTERPRET=1 python bench/kv_cache_rates.py --smoke   the script itself, tiny, on a CPU

Checks: what rotary and the fused decode write, and attention over it (paged and fused), against references on the same
quantized cache; exit code 1 if one fails. Times: TB/s of K and V that decodes read, and TFLOP/s of prefill, over caches
of 16 bits, e4m3 and e5m2. Tune: other configurations for one-byte caches, and rows for kernels/attention_config.py.

All has run on an H200.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from graph_timing import graph_seconds
from torch import Tensor

from headrace.kernels._triton import DEVICE_FAMILY
from headrace.kernels.attention import (
    is_hopper,
    multiprocessor_count,
    paged_attention,
    paged_attention_reference,
    tile_element_size,
)
from headrace.kernels.attention_config import (
    COPY_ENGINE_PREFILL,
    UNPACKED_BLOCK,
    AttentionConfig,
    AttentionPlan,
    by_copy_engine,
    plan_attention,
    plan_decode,
)
from headrace.kernels.decode import decode_attention, decode_attention_reference
from headrace.kernels.fp8_cache import UnpackedCache
from headrace.kernels.paged import Sequences
from headrace.kernels.rotary import rotary_and_cache, rotary_and_cache_reference

SMOKE = "--smoke" in sys.argv[1:]
DEVICE = torch.device("cpu" if SMOKE else "cuda")
PLAIN = torch.float16 if SMOKE else torch.bfloat16
"""Triton's interpreter, on a CPU, does not multiply bf16."""
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAME = {PLAIN: "16-bit", E4M3: "e4m3", E5M2: "e5m2"}
Heads = tuple[int, int, int]
"""(query heads, key heads, size)"""
HEADS: Heads = (8, 2, 16) if SMOKE else (32, 8, 128)
SCALE = torch.tensor([0.02, 0.015])
"""of K and V"""
BATCHES = (1, 32) if SMOKE else (1, 32, 128, 256)
CONTEXTS = (512,) if SMOKE else (512, 4096)


Pairs = tuple[int, int, int, int]


def num_sms() -> int:
    return 4 if SMOKE else multiprocessor_count(DEVICE)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(PLAIN)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def split_qkv(tokens: int, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as a layer has them: parts of one tensor."""
    num_heads, kv_heads, dim = heads
    q, k, v = randn(tokens, num_heads + 2 * kv_heads, dim).split((num_heads, kv_heads, kv_heads), 1)
    return q, k, v


def angles_of(positions: int, dim: int) -> Tensor:
    """# [positions, dim] fp32: cosines, then sines"""
    angles = torch.rand(positions, dim // 2, device=DEVICE) * 6
    return torch.cat((angles.cos(), angles.sin()), -1)


class Inputs:
    """Requests with `counts` new tokens and `lengths` keys, whose blocks lie anywhere; unused table entries lead to
    others' blocks."""

    def __init__(self, counts: list[int], lengths: list[int], heads: Heads, dtype: torch.dtype) -> None:
        num_heads, kv_heads, dim = heads
        block_size = 16
        needed = [-(-length // block_size) for length in lengths]
        total = sum(needed)
        shape = (len(counts) + 4, max(needed) + 3)
        self.table = torch.randint(0, max(1, total), shape, dtype=torch.int32, device=DEVICE)
        self.rows = torch.randperm(len(counts) + 4, device=DEVICE)[: len(counts)].int()
        blocks, used = torch.randperm(total, device=DEVICE).int(), 0
        for row, count in zip(self.rows.tolist(), needed, strict=True):
            self.table[row, :count] = blocks[used : used + count]
            used += count
        self.scale = SCALE.to(DEVICE)
        self.cache = randn(2, total + 1, block_size, kv_heads, dim)
        if dtype != PLAIN:
            self.cache = (self.cache.float() / self.scale.view(2, 1, 1, 1, 1)).to(dtype)
        self.q = randn(sum(counts), num_heads, dim)
        self.starts = ints([0, *itertools.accumulate(counts)])
        self.lengths = ints(lengths)

    @property
    def element_size(self) -> int:
        return tile_element_size(self.q, self.cache)

    def all(self, cache: Tensor | None = None) -> tuple[Tensor, Tensor, Sequences]:
        """What paged attention begins with."""
        sequences = Sequences(self.table, self.rows, self.starts, self.lengths)
        return self.q, self.cache if cache is None else cache, sequences


# --- checks -----------------------------------------------------------------------------------------------------------


def error(out: Tensor, reference: Tensor) -> float:
    return float((out.double() - reference.double()).norm() / reference.double().norm().clamp_min(1e-30))


def report(name: str, value: float, bound: float) -> bool:
    bound *= 10 if SMOKE else 1  # a few percent of the interpreter's casts to fp8 are wrong
    ok = value <= bound  # not, where it is NaN
    print(f"{'OK  ' if ok else 'FAIL'} {name}: {value:.2e} (at most {bound:g})", flush=True)
    return ok


def by_copy_engine_here(heads: Heads) -> bool:
    return not SMOKE and is_hopper(DEVICE) and heads[2] in COPY_ENGINE_PREFILL


def room_for(inputs: Inputs, plan: AttentionPlan) -> UnpackedCache | None:
    """NaN, as far as the plan has an fp8 cache unpacked."""
    if not plan.unpacked_blocks:
        return None
    blocks = len(inputs.lengths) * plan.unpacked_blocks
    room = torch.full((2, blocks, UNPACKED_BLOCK, *inputs.cache.shape[3:]), float("nan"), dtype=PLAIN, device=DEVICE)
    return UnpackedCache.within(room, plan, len(inputs.lengths))


def check_attention(dtype: torch.dtype, heads: Heads, kind: str, window: int | None = None) -> bool:
    decodes = [1] * 9 if kind != "prefill" else []
    chunks = [random.randint(2, 20 if SMOKE else 300) for _ in range(4)] if kind != "decode" else []
    counts = decodes + chunks
    before = {"prefill": 0}.get(kind, 30 if SMOKE else 700)
    lengths = [count + random.randint(0, before) for count in counts]
    if decodes:
        lengths[4], lengths[5] = 0, 1
    inputs = Inputs(counts, lengths, heads, dtype)
    q, *rest = inputs.all()
    plan = plan_attention(
        len(counts), len(q), len(decodes), max(lengths), *heads, inputs.element_size, DEVICE_FAMILY, num_sms()
    )
    size = heads[2] ** -0.5
    expected = paged_attention_reference(q.float(), *rest, size, window, inputs.scale)
    worst = 0.0
    plans = [replace(plan, decode_splits=splits, prefill_splits=splits) for splits in (1, 4)]
    if chunks and window is None and by_copy_engine_here(heads):
        plans.append(by_copy_engine(plan, len(chunks), sum(chunks), max(lengths), heads[2], heads[0] // heads[1], 1))
    for forced in plans:
        out = torch.full_like(q, float("nan"))
        unpacked = room_for(inputs, forced)
        paged_attention(q, *rest, size, window, inputs.scale, out, plan=forced, unpacked=unpacked)
        found = error(out, expected)
        worst = max(worst, found) if found == found else float("inf")
    return report(f"attention {NAME[dtype]} {heads} {kind} window {window}", worst, 4e-3)


def check_write(dtype: torch.dtype, heads: Heads, norm: bool) -> bool:
    """Values beyond the type's range among them, tokens without a slot, and the last slot."""
    _, kv_heads, dim = heads
    tokens = 9 if SMOKE else 200
    q, k, v = split_qkv(tokens, heads)
    v[3], v[4] = 3e4, -6e4
    cos_sin, positions = angles_of(512, dim), torch.randint(0, 512, (tokens,), device=DEVICE)
    slots = torch.randperm(tokens + 7, device=DEVICE)[:tokens]
    slots[::5] = -1
    slots[4] = tokens + 6
    weights = [torch.rand(dim, device=DEVICE).to(PLAIN) if norm else None for _ in range(2)]
    start = torch.zeros(2, -(-(tokens + 7) // 16), 16, kv_heads, dim, device=DEVICE).to(dtype)
    ours, theirs = start.clone(), start.clone()
    scale = SCALE.to(DEVICE)
    rotary_and_cache(q, k, v, cos_sin, positions, ours, slots, *weights, 1e-6, scale)
    rotary_and_cache_reference(q, k, v, cos_sin, positions, theirs, slots, *weights, 1e-6, scale)
    found, wanted = ours.float(), theirs.float()
    bad = float((found != wanted).float().mean()) + float(not found.isfinite().all())
    bad += float(dtype == E4M3 and found.max() != 448)  # the largest there is
    return report(f"write {NAME[dtype]} {heads} {'with' if norm else 'without'} norm: share of other codes", bad, 0.01)


def check_fused(dtype: torch.dtype, heads: Heads) -> bool:
    _, kv_heads, dim = heads
    lengths = [40, 0, 1, 7, 64, 33] if SMOKE else [700, 0, 1, 33, 512, 2048, 5, 100]
    inputs = Inputs([1] * len(lengths), [max(1, length) for length in lengths], heads, dtype)
    q, k, v = split_qkv(len(lengths), heads)
    cos_sin, scale = angles_of(4096, dim), inputs.scale
    ours, theirs = inputs.cache.clone(), inputs.cache.clone()
    where = inputs.all()[2]._replace(seq_lens=ints(lengths))
    expected = decode_attention_reference(q, k, v, cos_sin, theirs, where, dim**-0.5, kv_scale=scale)
    config, splits = plan_decode(len(lengths), *heads, inputs.element_size, DEVICE_FAMILY, num_sms())
    tickets = torch.zeros(len(lengths) * kv_heads, dtype=torch.int32, device=DEVICE)
    out = decode_attention(q, k, v, cos_sin, ours, where, tickets, dim**-0.5, config, splits, kv_scale=scale)
    other = float((ours.float() != theirs.float()).float().mean())
    # a code of the new token that rounds otherwise is much where there are few keys
    return report(f"fused decode {NAME[dtype]} {heads}", max(error(out, expected), other), 1e-2)


def check() -> bool:
    results = []
    sizes: list[Heads] = [HEADS] if SMOKE else [(32, 8, 128), (8, 8, 64), (8, 2, 256), (14, 2, 96)]
    for dtype in (E4M3, E5M2):
        for heads in sizes:
            results += [check_attention(dtype, heads, kind) for kind in ("decode", "prefill", "mixed")]
            results += [check_fused(dtype, heads), check_write(dtype, heads, heads[1] == 8)]
        results.append(check_attention(dtype, HEADS, "mixed", 50))
    return all(results)


# --- times ------------------------------------------------------------------------------------------------------------


def seconds(calls: list[Callable[[], object]]) -> float:
    """of one call"""
    if SMOKE:
        calls[0]()
        return 1e-6
    return graph_seconds(calls, repeats=9)


class Decodes:
    """One shape of decode batch, over caches that together overflow the L2."""

    def __init__(self, batch: int, context: int, dtype: torch.dtype) -> None:
        if SMOKE:
            batch, context = min(batch, 3), 40
        self.inputs = Inputs([1] * batch, [context] * batch, HEADS, dtype)
        self.batch, self.context, cache = batch, context, self.inputs.cache
        self.bytes = 2 * batch * context * HEADS[1] * HEADS[2] * cache.element_size()
        copies = 0 if SMOKE else min(31, int(3e8 / self.bytes))
        self.caches = [cache, *(cache.clone() for _ in range(copies))]
        self.qkv = split_qkv(batch, HEADS)
        self.cos_sin = angles_of(8192, HEADS[2])
        self.tickets = torch.zeros(batch * HEADS[1], dtype=torch.int32, device=DEVICE)

    def rate(self, calls: list[Callable[[], object]]) -> float:
        return self.bytes / seconds(calls * max(1, 8 // len(calls))) / 1e12

    def paged(self, config: AttentionConfig | None = None) -> float:
        """TB/s"""
        element = self.inputs.element_size
        plan = plan_attention(
            self.batch, self.batch, self.batch, self.context, *HEADS, element, DEVICE_FAMILY, num_sms()
        )
        if config is not None:
            plan = replace(plan, decode=config)
        run = partial(paged_attention, scale=HEADS[2] ** -0.5, kv_scale=self.inputs.scale, plan=plan)
        return self.rate([partial(run, *self.inputs.all(cache)) for cache in self.caches])

    def fused(self, config: AttentionConfig | None = None) -> float:
        """TB/s"""
        planned, splits = plan_decode(self.batch, *HEADS, self.inputs.element_size, DEVICE_FAMILY, num_sms())
        run = partial(decode_attention, *self.qkv, self.cos_sin, kv_scale=self.inputs.scale)
        rest = (self.inputs.all()[2], self.tickets, HEADS[2] ** -0.5, config or planned, splits)
        return self.rate([partial(run, cache, *rest) for cache in self.caches])


def prefill_rate(
    dtype: torch.dtype, config: AttentionConfig | None = None, copy_engine: bool = False, length: int = 2048
) -> float:
    """TFLOP/s of one prompt, unpacking counted in"""
    length = 64 if SMOKE else length
    inputs = Inputs([length], [length], HEADS, dtype)
    plan = plan_attention(
        1, length, 0, length, *HEADS, inputs.element_size, DEVICE_FAMILY, num_sms(), copy_engine=copy_engine
    )
    if config is not None:
        tiles = length // (config.block_m // (HEADS[0] // HEADS[1])) + 1
        plan = replace(plan, prefill=config, prefill_tiles=tiles)
    size, unpacked = HEADS[2] ** -0.5, room_for(inputs, plan)
    call = partial(paged_attention, *inputs.all(), size, None, inputs.scale, plan=plan, unpacked=unpacked)
    return 2 * length * length * HEADS[0] * HEADS[2] / seconds([call] * 4) / 1e12


def write_us(dtype: torch.dtype, tokens: int) -> float:
    slots = torch.arange(tokens, device=DEVICE)
    cache = torch.zeros(2, tokens // 16 + 1, 16, HEADS[1], HEADS[2], device=DEVICE).to(dtype)
    q, k, v = split_qkv(tokens, HEADS)
    run = partial(rotary_and_cache, q, k, v, angles_of(8192, HEADS[2]), slots.clone(), cache, slots)
    return 1e6 * seconds([partial(run, kv_scale=SCALE.to(DEVICE))] * 8)


def time_all() -> None:
    print(f"decode at {HEADS}, blocks of 16: TB/s of K and V read, paged / fused with rotary and write")
    for context in CONTEXTS:
        for batch in BATCHES:
            cells = []
            for dtype in NAME:
                shape = Decodes(batch, context, dtype)
                paged, fused = shape.paged(), shape.fused()
                us = shape.bytes / fused / 1e6
                cells.append(f"{NAME[dtype]} {paged:5.2f} /{fused:5.2f} ({us:7.1f} us)")
                del shape
            print(f"  context {context:5d} batch {batch:4d}  " + "   ".join(cells), flush=True)
    for length in (512, 2048, 8192):
        told = ", ".join(f"{name} {prefill_rate(dtype, length=length):.0f}" for dtype, name in NAME.items())
        if by_copy_engine_here(HEADS):
            rates = [(name, prefill_rate(dtype, copy_engine=True, length=length)) for dtype, name in NAME.items()]
            told += "; kernels/prefill.py: " + ", ".join(f"{name} {rate:.0f}" for name, rate in rates)
        print(f"prefill 1 x {length}, TFLOP/s: {told}", flush=True)
    for tokens in (1, 128, 2048):
        told = ", ".join(f"{name} {write_us(dtype, tokens):.1f}" for dtype, name in NAME.items())
        print(f"rotary and write, {tokens} tokens, us: {told}", flush=True)


# --- tuning -----------------------------------------------------------------------------------------------------------

DECODE_CONFIGS: tuple[Pairs, ...] = (
    (16, 32, 1, 4), (16, 32, 1, 6), (16, 32, 1, 8), (16, 64, 1, 3), (16, 64, 1, 4), (16, 64, 1, 6), (16, 64, 2, 4),
    (16, 128, 2, 2), (16, 128, 2, 4), (16, 128, 4, 2), (16, 128, 4, 3),
)  # fmt: skip
PREFILL_CONFIGS: tuple[Pairs, ...] = (
    (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (64, 128, 4, 2), (128, 32, 4, 2),
)  # fmt: skip
SHAPES = ((1, 512), (1, 4096), (32, 512), (32, 4096), (256, 512), (256, 4096))
"""(batch, context): the first two are few decodes"""


def tune() -> None:
    shapes = SHAPES[:3] if SMOKE else SHAPES
    print(f"fused decode over e4m3, TB/s at {shapes}; paged at the last two")
    made = [Decodes(*shape, E4M3) for shape in shapes]
    few: dict[Pairs, float] = {}
    many: dict[Pairs, float] = {}
    for numbers in DECODE_CONFIGS[: 2 if SMOKE else None]:
        config = AttentionConfig(*numbers)
        try:
            rates = [shape.fused(config) for shape in made]
            paged = [shape.paged(config) for shape in made[-2:]]
        except Exception as problem:  # not every configuration fits the chip: it is said, and not tried
            print(f"  {numbers} cannot run: {type(problem).__name__}: {str(problem)[:100]}", flush=True)
            continue
        print(f"  {numbers} {rates_told(rates)} | paged {rates_told(paged)}", flush=True)
        few[numbers], many[numbers] = sum(rates[:2]), sum(rates[2:])
    del made
    prefill: dict[Pairs, float] = {}
    for numbers in PREFILL_CONFIGS[: 2 if SMOKE else None]:
        try:
            prefill[numbers] = prefill_rate(E4M3, AttentionConfig(*numbers))
        except Exception as problem:
            print(f"  prefill {numbers} cannot run: {type(problem).__name__}: {str(problem)[:100]}", flush=True)
            continue
        print(f"  prefill {numbers} {prefill[numbers]:.0f} TFLOP/s", flush=True)
    print("# for headrace/kernels/attention_config.py:")
    for name, found in (("DECODE", many), ("FEW_DECODES", few), ("PREFILL", prefill)):
        if found:
            print(f'{name:12s} ("cuda", 1, {HEADS[2]}): AttentionConfig{max(found, key=found.__getitem__)},')


def rates_told(rates: list[float]) -> str:
    return " ".join(f"{rate:5.2f}" for rate in rates)


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    for part in ("check", "time", "tune"):
        parser.add_argument(f"--{part}", action="store_true", help="this part; default: all three")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU, nothing is timed")
    options = parser.parse_args()
    every, good, began = not (options.check or options.time or options.tune), True, time.monotonic()
    if every or options.check:
        good = check()
    if every or options.time:
        time_all()
    if every or options.tune:
        tune()
    print(f"{'OK' if good else 'FAIL'} after {time.monotonic() - began:.0f} s")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
