"""Chooses how a CPU stores the weight of a linear layer, by trying the ways on each size at load, in about a second.

`F.linear` is up to seven times slower than the best way. Which that is depends on the processor (has it bf16 units?),
the sizes and the number of tokens. Knows no parts, checkpoints or ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.quantization.scheme import LinearSpec, Multiply

Hold = Callable[[Tensor, Tensor | None], Multiply]
"""weight [out, in], bias [out] or None -> the function that applies them; it stores the weight in a form of its own."""


def hold_plain(weight: Tensor, bias: Tensor | None) -> Multiply:
    """Store the weight as it is."""
    return lambda x: F.linear(x, weight, bias)


def hold_transposed(weight: Tensor, bias: Tensor | None) -> Multiply:
    """Store the weight as [in, out], which suits sgemm when tokens are few."""
    transposed = weight.t().contiguous()
    if bias is None:
        return lambda x: torch.mm(x, transposed)
    return lambda x: torch.addmm(bias, x, transposed)


def hold_packed(weight: Tensor, bias: Tensor | None) -> Multiply:
    """Store the weight in oneDNN's blocked layout."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
    linear = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: linear(x, packed, bias, "none", [], "")


def in_float32(hold: Hold) -> Hold:
    """Convert 16-bit weights to float32 once, for CPUs that would convert them in every product. Sums are float32
    either way."""

    def hold_converted(weight: Tensor, bias: Tensor | None) -> Multiply:
        dtype = weight.dtype
        linear = hold(weight.float(), None if bias is None else bias.float())
        return lambda x: linear(x.float()).to(dtype)

    return hold_converted


@dataclass(frozen=True)
class Choice:
    """Stores a weight in two ways: `few` for under `threshold` tokens, `many` for more. They may be the same."""

    few: Hold
    many: Hold
    threshold: int = 1

    def hold(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        """Store the weight, once if the two ways are the same."""
        few = self.few(weight, bias)
        if self.many is self.few:
            return few
        many, threshold = self.many(weight, bias), self.threshold
        return lambda x: few(x) if x.shape[0] < threshold else many(x)


def ways(dtype: torch.dtype, in_cache: bool, roomy: bool = True) -> list[Hold]:
    """Return the ways to try for `dtype`; the first is taken unless another is clearly faster. `in_cache`: the model is
    so small that its weights stay in the CPU's cache. Weights that come from memory gain little from being transposed,
    but may gain from packing. `roomy`: there is memory for 16-bit weights in float32. (In 16 bits a transposed weight
    is never faster, and in float16 up to a hundred times slower: torch then multiplies without oneDNN.)"""
    found: list[Hold] = [hold_plain]
    if dtype == torch.float32:
        found.insert(0 if in_cache else 1, hold_transposed)
    packs = torch.backends.mkldnn.is_available() and not in_cache
    if packs and _multiplies(dtype):
        found.append(hold_packed)
    if dtype != torch.float32 and roomy:
        found.append(in_float32(hold_packed if packs else hold_transposed))
    return found


def _multiplies(dtype: torch.dtype) -> bool:
    """Tell whether oneDNN has kernels for `dtype` on this CPU."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


SIZES = (1, 4, 16)
"""numbers of tokens tried"""
WORTH = 0.8
"""A way is taken if it needs less than this share of a simpler one's time."""
IN_CACHE = 16 << 20
"""A model with fewer bytes of weights keeps them in the CPU's cache between steps; a larger one's come from memory."""
STREAMED = 8 << 20
"""elements of the weight on which ways are tried for a larger model, so that no cache holds much of it"""
PACKED_FROM, PACKED_TOKENS = 1 << 17, 4
"""In a small model, float32 weights with at least so many elements are packed for at least so many tokens, since MKL
would pack them anew in every product. This is a rule, not a trial, so that every start computes the same bits."""
SECONDS_PER_WAY = 0.001
ROUNDS = (2, 30)
"""fewest and most runs of one way at one size; the fastest counts"""


def choose_all(specs: list[LinearSpec], spare_bytes: int) -> dict[tuple[int, int, torch.dtype], Choice]:
    """Return for each (out, in, dtype) among `specs` how to store such a weight. `spare_bytes`: memory that the model
    may take beyond one copy of its weights. If a second copy in float32 does not fit, there is one copy, in the
    checkpoint's type."""
    count = sum(spec.out_features * spec.in_features for spec in specs)
    stored = sum(spec.out_features * spec.in_features * spec.dtype.itemsize for spec in specs)
    roomy = 4 * count <= spare_bytes
    sizes = {(spec.out_features, spec.in_features, spec.dtype) for spec in specs}
    if stored < IN_CACHE:
        return {size: choose(*size, roomy, in_cache=True) for size in sizes}
    streamed = {
        width: choose(max(1, STREAMED // width[0]), *width, roomy, in_cache=False)
        for width in {size[1:] for size in sizes}
    }
    return {size: streamed[size[1:]] for size in sizes}


def choose(out_features: int, in_features: int, dtype: torch.dtype, roomy: bool, in_cache: bool) -> Choice:
    """Try every way on a weight of these sizes, and choose. `roomy`: there is memory for a second copy."""
    small = in_cache and roomy and dtype == torch.float32 and torch.backends.mkldnn.is_available()
    if small and out_features * in_features >= PACKED_FROM:
        return Choice(hold_transposed, hold_packed, PACKED_TOKENS)
    candidates = ways(dtype, in_cache, roomy)
    weight = torch.full((out_features, in_features), 0.01, dtype=dtype)
    held = [hold(weight, None) for hold in candidates]
    times = {size: _try(held, torch.full((size, in_features), 0.01, dtype=dtype)) for size in SIZES}
    few, many = _fastest(times[SIZES[0]]), _fastest(times[SIZES[-1]])
    for single in (few, many):  # one copy is enough where it is nearly as good for both
        if all(times[size][single] * WORTH <= min(times[size]) for size in (SIZES[0], SIZES[-1])):
            return Choice(candidates[single], candidates[single])
    if not roomy:
        return Choice(candidates[few], candidates[few])
    threshold = next(size for size in SIZES if times[size][many] < times[size][few])
    return Choice(candidates[few], candidates[many], threshold)


def spare_memory() -> int:
    """Return half of this machine's free memory in bytes; the rest is for the weights' first copy and the KV cache."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 // 2
    return 0


def _try(held: list[Multiply], x: Tensor) -> list[float]:
    """Return the seconds that each takes for x, run in turns so that a busy moment hits them alike."""
    best = [float("inf")] * len(held)
    start, rounds = time.perf_counter(), 0
    while rounds < ROUNDS[0] or (rounds < ROUNDS[1] and time.perf_counter() - start < SECONDS_PER_WAY * len(held)):
        for index, compute in enumerate(held):
            before = time.perf_counter()
            compute(x)
            best[index] = min(best[index], time.perf_counter() - before)
        rounds += 1
    return best


def _fastest(times: list[float]) -> int:
    best = 0
    for index, seconds in enumerate(times):
        if seconds < times[best] * WORTH:
            best = index
    return best
