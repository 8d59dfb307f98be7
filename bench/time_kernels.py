"""Times the kernels that matter on a GPU, attention beside torch's.

    python bench/time_kernels.py                all, as the tables have them
    python bench/time_kernels.py --tune         other attention configurations than the tables'

Medians of graph replays that walk through more memory than the L2 cache holds. Whether results are right is
check_kernels.py's business.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from check_kernels import DEVICE, attention_inputs, randn
from graph_timing import graph_seconds
from torch import Tensor

from headrace.kernels._triton import DEVICE_FAMILY
from headrace.kernels.attention import is_hopper, multiprocessor_count, paged_attention
from headrace.kernels.attention_config import AttentionConfig, AttentionPlan, plan_attention
from headrace.kernels.paged import Sequences
from headrace.kernels.table import TRITON_KERNELS

LLAMA_8B = (32, 8, 128)
PROMPTS = ((1, 2048, 0), (8, 2048, 0), (1, 8192, 0), (1, 512, 0), (1, 2048, 6144))
"""(requests, new tokens of each, keys before them)"""
Change = Callable[[AttentionPlan], AttentionPlan]


def graph_time(calls: list[Callable[[], object]], repeats: int = 15) -> float:
    """Median microseconds of one call, from replays of a graph of all `calls`."""
    return graph_seconds(calls, repeats) * 1e6


def decode_calls(
    batch: int, context: int, heads: tuple[int, int, int], block_size: int, max_len: int | None = None,
    change: Change = lambda plan: plan,
) -> tuple[list[Callable[[], object]], int]:  # fmt: skip
    """(calls over caches that together overflow the L2, bytes of K and V a call reads)"""
    size = 2 * batch * context * heads[1] * heads[2] * 2
    q, cache, table, rows, starts, lengths = attention_inputs(
        [1] * batch, [context] * batch, heads, block_size, torch.bfloat16
    )
    caches = [cache, *(cache.clone() for _ in range(min(31, int(3e8 / size))))]
    longest = max_len or context
    plan = change(plan_attention(batch, batch, batch, longest, *heads, 2, DEVICE_FAMILY, multiprocessor_count(DEVICE)))
    calls = [
        partial(paged_attention, q, c, Sequences(table, rows, starts, lengths), heads[2] ** -0.5, plan=plan)
        for c in caches
    ]
    return [call for _ in range(max(1, 8 // len(calls))) for call in calls], size


def prefill_call(
    prompts: tuple[int, int, int], heads: tuple[int, int, int], copy_engine: bool, change: Change = lambda plan: plan
) -> Callable[[], object]:
    batch, length, past = prompts
    inputs = attention_inputs([length] * batch, [past + length] * batch, heads, 16, torch.bfloat16)
    plan = plan_attention(
        batch, batch * length, 0, past + length, *heads, 2, DEVICE_FAMILY, multiprocessor_count(DEVICE),
        copy_engine=copy_engine,
    )  # fmt: skip
    return partial(paged_attention, *inputs[:2], Sequences(*inputs[2:]), heads[2] ** -0.5, plan=change(plan))


def teraflops(prompts: tuple[int, int, int], call: Callable[[], object]) -> float:
    batch, length, past = prompts
    work = 4 * batch * length * (past + length / 2) * LLAMA_8B[0] * LLAMA_8B[2]
    return work / 1e6 / graph_time([call] * 4)


def torch_prefill_call(batch: int, length: int, heads: tuple[int, int, int], backend: object) -> Callable[[], object]:
    from torch.nn.attention import sdpa_kernel

    q = randn(batch, heads[0], length, heads[2], dtype=torch.bfloat16)
    k, v = (randn(batch, heads[1], length, heads[2], dtype=torch.bfloat16) for _ in range(2))

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return call


def time_all() -> None:
    from torch.nn.attention import SDPBackend

    source, target = (torch.randn(2**29, device=DEVICE) for _ in range(2))
    spent = graph_time([partial(torch.add, source, 1.0, out=target)])
    print(f"device read and write: {2 * 2**31 / spent / 1e3:.0f} GB/s")
    source = target = None
    print("decode, Hq 32, Hkv 8, D 128, bf16, block 16: us a layer, GB/s of K and V read")
    for context in (512, 4096, 32768):
        cells = []
        for batch in (1, 8, 32, 128):
            calls, size = decode_calls(batch, context, LLAMA_8B, 16)
            spent = graph_time(calls)
            cells.append(f"batch {batch}: {spent:8.1f} us {size / spent / 1e3:6.0f} GB/s")
            del calls
        print(f"  context {context:6d}  " + "   ".join(cells))
    calls, size = decode_calls(1, 512, LLAMA_8B, 16, max_len=131072)
    print(f"  batch 1, context 512 in a graph for 131072: {graph_time(calls):.1f} us")
    for block_size in (1, 64):
        calls, size = decode_calls(32, 4096, LLAMA_8B, block_size)
        spent = graph_time(calls)
        print(f"  batch 32, context 4096, block {block_size}: {spent:.1f} us {size / spent / 1e3:.0f} GB/s")
    print(f"prefill, causal, bf16, TFLOP/s at (requests, tokens, keys before them): {PROMPTS}")
    print("  kernels/attention.py", *[f"{teraflops(p, prefill_call(p, LLAMA_8B, False)):.0f}" for p in PROMPTS])
    if is_hopper(DEVICE):
        print("  kernels/prefill.py", *[f"{teraflops(p, prefill_call(p, LLAMA_8B, True)):.0f}" for p in PROMPTS])
    for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        cells = []
        for prompts in PROMPTS:
            if prompts[2] == 0:  # torch's causal mask begins at the first key
                try:
                    cells.append(f"{teraflops(prompts, torch_prefill_call(*prompts[:2], LLAMA_8B, backend)):.0f}")
                except RuntimeError as problem:
                    cells.append(f"unavailable ({str(problem)[:60]})")
        print(f"  torch {name}", *cells)
    time_small()


def time_small() -> None:
    print("other kernels, bf16, Llama-8B shapes: us at 1 / 64 / 8192 tokens (GB/s at 8192)")
    weight = randn(4096, dtype=torch.bfloat16)

    def norm(tokens: int) -> Callable[[], object]:
        return partial(TRITON_KERNELS.rms_norm, randn(tokens, 4096, dtype=torch.bfloat16), weight, 1e-5)

    def silu(tokens: int) -> Callable[[], object]:
        return partial(TRITON_KERNELS.silu_and_mul, randn(tokens, 28672, dtype=torch.bfloat16))

    for make, elements in ((norm, 2 * 4096), (silu, 3 * 14336), (rotary_call, 2 * 6144)):
        cells = []
        for tokens in (1, 64, 8192):
            spent = graph_time([make(tokens)] * 10)
            cells.append(f"{spent:.1f}")
        print(f"  {make.__name__}: {' / '.join(cells)} us ({8192 * elements * 2 / spent / 1e3:.0f} GB/s)")
    for rows in (1, 64, 256):
        logits = randn(rows, 128256, dtype=torch.bfloat16)
        state = (torch.ones(rows, device=DEVICE), *(torch.arange(rows, device=DEVICE) for _ in range(2)))
        spent = graph_time([partial(TRITON_KERNELS.gumbel_argmax, logits, *state)] * 4)
        print(f"  {rows} x 128256: gumbel_argmax {spent:.1f} us, filter_floor: " + ", ".join(filter_times(rows)))


def filter_times(rows: int) -> Iterator[str]:
    """random logits (no model's are as flat), then such as models have: few tokens hold most of the probability"""
    flat = randn(rows, 128256, dtype=torch.bfloat16)
    ones = torch.ones(rows, device=DEVICE)
    for shape, logits in (("flat", flat), ("peaked", flat * 3)):
        for name, k, p, min_p in (
            ("off", 0, 1.0, 0.0), ("min_p", 0, 1.0, 0.05), ("top_k 50", 50, 1.0, 0.0), ("top_p 0.9", 0, 0.9, 0.0),
            ("top_k 50 top_p 0.9", 50, 0.9, 0.0), ("top_k 5000 top_p 0.9", 5000, 0.9, 0.0),
        ):  # fmt: skip
            if shape == "flat" or "p 0.9" in name:
                call = partial(TRITON_KERNELS.filter_floor, logits, ones, (ones * k).int(), ones * p, ones * min_p)
                yield f"{shape} {name} {graph_time([call] * 4):.1f} us"


def rotary_call(tokens: int) -> Callable[[], object]:
    q, k, v = randn(tokens, 48, 128, dtype=torch.bfloat16).split((32, 8, 8), dim=1)
    cos_sin = torch.rand(8192, 128, device=DEVICE)
    slots = torch.arange(tokens, device=DEVICE)
    cache = randn(2, tokens // 16 + 1, 16, 8, 128, dtype=torch.bfloat16)
    return partial(TRITON_KERNELS.rotary_and_cache, q, k, v, cos_sin, slots.clone(), cache, slots)


def tune() -> None:
    decode = itertools.product((16,), (32, 64), (1, 2), (3, 4, 5))
    shapes = ((1, 4096), (1, 32768), (8, 4096), (32, 4096), (128, 512), (128, 4096))
    print(f"decode GB/s at (batch, context): {shapes}")
    made = {shape: decode_calls(*shape, LLAMA_8B, 16) for shape in shapes}
    rows = []
    for block_m, block_n, warps, stages in decode:
        for wanted in (2, 4, 8):
            cells = []
            for shape in shapes:
                programs = shape[0] * LLAMA_8B[1]
                splits = 1 << max(0, -(-wanted * multiprocessor_count(DEVICE) // programs) - 1).bit_length()
                splits = max(1, min(splits, 64, shape[1] // (block_n * 2)))
                config = AttentionConfig(block_m, block_n, warps, stages)
                calls, size = made[shape]
                plan = replace(calls[0].args[-1], decode=config, decode_splits=splits)
                try:
                    spent = graph_time([partial(c.func, *c.args[:-1], plan) for c in calls], repeats=5)
                    cells.append(size / spent / 1e3)
                except Exception as problem:
                    cells.append(0.0)
                    print(config, type(problem).__name__, str(problem)[:80])
            rows.append((sum(cells), (block_m, block_n, warps, stages), wanted, [round(c) for c in cells]))
    for row in sorted(rows, reverse=True)[:20]:
        print("  ", *row[1:])
    print(f"prefill TFLOP/s at (requests, tokens, keys before them): {PROMPTS}")
    plain = itertools.product((64, 128), (32, 64), (4,), (2, 3, 4))
    configs = [AttentionConfig(*sizes) for sizes in plain]
    if is_hopper(DEVICE):
        configs += [AttentionConfig(128, n, 4, stages, copy_engine=True) for n in (64, 128) for stages in (2, 3)]
    for config in configs:
        cells = [prefill_cell(prompts, config) for prompts in PROMPTS]
        print("  ", (config.block_m, config.block_n, config.num_warps, config.num_stages, config.copy_engine), *cells)


def prefill_cell(prompts: tuple[int, int, int], config: AttentionConfig) -> str:
    """TFLOP/s, or what kept it from running"""
    batch, length, _ = prompts
    tiles = batch * length // (config.block_m * LLAMA_8B[1] // LLAMA_8B[0]) + batch

    def change(plan: AttentionPlan) -> AttentionPlan:
        return replace(plan, prefill=config, prefill_splits=1, prefill_tiles=tiles)

    try:
        return f"{teraflops(prompts, prefill_call(prompts, LLAMA_8B, config.copy_engine, change)):.0f}"
    except Exception as problem:
        return f"{type(problem).__name__} {str(problem)[:60]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="time other attention configurations")
    if parser.parse_args().tune:
        tune()
    else:
        time_all()


if __name__ == "__main__":
    main()
