"""Makes the inputs on which each kernel of the table is compared with its reference, and bounds the difference.

A function makes the cases of one kernel, from sizes or tensors that its caller gives: those of a model at load
(runner/kernel_checks.py), small and odd or large ones where there is no model (bench/kernel_sweeps.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.kernels import exchange, norm, peers
from headrace.kernels._triton import DEVICE_FAMILY, fp8_dtype
from headrace.kernels.adapters import AdapterWeights, StepSlots, counters_of, shrink_adapters_reference
from headrace.kernels.fp8 import (
    NarrowWeight,
    Quantized,
    Rounding,
    quantize_per_token_reference,
    quantize_reference,
)
from headrace.kernels.gated_delta import DeltaHeads, DeltaWeights
from headrace.kernels.moe import LEAST_ADAPTED, Experts, fused_moe_reference
from headrace.kernels.moe_adapters import ExpertAdapters
from headrace.kernels.moe_config import pick_moe_config
from headrace.kernels.norm import HalfNormed, Unsummed, whole
from headrace.kernels.paged import Sequences
from headrace.kernels.peers import GROUP, QUICK_BITS, Peers
from headrace.kernels.qk_norm import qk_squares_reference
from headrace.kernels.rotary import rotary_and_cache_reference
from headrace.kernels.tiled import TiledWeight

Kernel = Callable[..., Any]
ROUNDED = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 2e-6}
"""where now and then a number is rounded to the other side"""
ROUNDED_FP8 = 2e-2
"""where now and then a row's scale, or one of its values, is one step away"""
FP8_SUMS = {torch.bfloat16: 6e-3, torch.float16: 4e-3, torch.float32: 4e-3}
"""where matrix units add up products of fp8 in fewer bits"""
EXPERTS = {torch.bfloat16: 3e-2, torch.float16: 1e-2, torch.float32: 2e-3}
"""where the reference adds up a token's experts in the model's type"""
RECURRENT = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 2e-5}
"""where products of matrices take states and writes rounded to the model's type"""
SUMS = 1e-5
"""of products in float32 that are added in another order"""
EPS = 1e-5


class Case(NamedTuple):
    """Runs a kernel, or its reference, on inputs that are the same each time; results may differ by `bound`."""

    run: Callable[[Kernel], Any]
    bound: float
    expected: Callable[[Kernel], Any] | None = None
    """how the reference is run, if not by `run`"""

    def error(self, kernel: Kernel, reference: Kernel) -> float:
        """Return how far they differ, as `relative_error` counts."""
        return relative_error(self.run(kernel), (self.expected or self.run)(reference))


Cases = Iterator[Case]


@dataclass(frozen=True)
class Inputs:
    """Makes random inputs, which are the same for the same seed and order of calls."""

    dtype: torch.dtype
    device: torch.device
    seed: int = 0
    fp8_type: torch.dtype | None = None
    """None: the type that the device computes with"""

    @cached_property
    def generator(self) -> torch.Generator:
        """The source of the numbers."""
        return torch.Generator(self.device).manual_seed(self.seed)

    @property
    def fp8(self) -> torch.dtype:
        """The type of quantized inputs."""
        return self.fp8_type or fp8_dtype(self.device)

    def random(self, *shape: int) -> Tensor:
        """Return normally distributed numbers."""
        return torch.randn(shape, generator=self.generator, device=self.device).to(self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        """Return float32 numbers between 0 and 1."""
        return torch.rand(shape, generator=self.generator, device=self.device)

    def ints(self, *values: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return the given integers."""
        return torch.tensor(values, dtype=dtype, device=self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return random integers from `low` up to below `high`."""
        return torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=dtype)

    def some_of(self, count: int, of: int) -> Tensor:
        """Return `count` different integers below `of`."""
        return torch.randperm(of, generator=self.generator, device=self.device)[:count]

    def on_host(self, tensor: Tensor) -> Tensor:
        """Return the tensor in the host's memory, where a kernel can read it."""
        return tensor.cpu().pin_memory() if self.device.type == "cuda" else tensor


def relative_error(found: Any, expected: Any) -> float:
    """Return ||found - expected|| / ||expected||, the largest of the tensors in two nests of tuples. It is infinite if
    shapes, types or integers differ, or if one number is not finite and the other is not the same."""
    if isinstance(found, Quantized) and isinstance(expected, Quantized):
        return relative_error(found.dequantize(torch.float32), expected.dequantize(torch.float32))
    if isinstance(found, tuple) and isinstance(expected, tuple) and len(found) == len(expected):
        return max((relative_error(a, b) for a, b in zip(found, expected, strict=True)), default=0.0)
    if found is None and expected is None:
        return 0.0
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        return math.inf
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return math.inf
    if not found.is_floating_point():
        return 0.0 if torch.equal(found, expected) else math.inf
    found, expected = found.float(), expected.float()
    same = (found == expected) | (found.isnan() & expected.isnan())
    if not bool((same | (found.isfinite() & expected.isfinite())).all()):
        return math.inf
    difference = float((found - expected).masked_fill_(same, 0.0).norm())
    return difference / float(expected.masked_fill(~expected.isfinite(), 0.0).norm() or 1e-30) if difference else 0.0


def bits(x: Tensor) -> Tensor:
    """Return the numbers' bits as integers, which must be equal."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


# ---- norms, activation, fp8


def rms_norm(make: Inputs, rows: int, weight: Tensor, eps: float = EPS, *to: Rounding) -> Cases:
    """Make cases of rms_norm; with `to`, of rms_norm_quantized."""
    x, delta = (make.random(rows, weight.shape[0]) for _ in range(2))
    bound = ROUNDED_FP8 if to else ROUNDED[make.dtype]
    yield Case(lambda kernel: kernel(x, weight, eps, *to), bound)
    normed: tuple[Any, ...] = (weight, 3 * eps)
    for more in ((), normed):
        yield Case(partial(_after_a_sum, Unsummed(x, delta, *more), weight, eps, *to), bound)


def _after_a_sum(unsummed: Unsummed, *arguments_then_kernel: Any) -> Any:
    """Return what a kernel makes of a sum, and the sum, whose last bit may differ where one part is a norm."""
    *arguments, kernel = arguments_then_kernel
    total = unsummed.x.clone()
    return kernel(unsummed._replace(x=total), *arguments), total if unsummed.weight is not None else bits(total)


def layer_norm(
    make: Inputs, rows: int, size: int, weight: Tensor | None, bias: Tensor | None, eps: float = EPS
) -> Cases:
    """Make cases of numbers about a mean that is not zero."""
    x, delta = make.random(rows, size) + 2, make.random(rows, size)
    yield Case(lambda kernel: kernel(x, weight, bias, eps), ROUNDED[make.dtype])
    yield Case(partial(_after_a_sum, Unsummed(x, delta), weight, bias, eps), ROUNDED[make.dtype])


def add_up(make: Inputs, rows: int, weight: Tensor, eps: float = EPS) -> Cases:
    x, delta = (make.random(rows, weight.shape[0]) for _ in range(2))
    yield Case(partial(_after_a_sum, Unsummed(x, delta, weight, eps)), ROUNDED[make.dtype])


def share_of_sum(make: Inputs, rank: int, ranks: int, rows: int, hidden: int) -> tuple[Tensor, Tensor]:
    """Return a rank's share of a sum, some of whose numbers are -0.0, and the sum # [rows, hidden]. All ranks get
    shares of the same sum if they have the same seed and draw nothing else before."""
    shares = make.random(ranks, rows, hidden)
    shares[make.uniform(*shares.shape) < 0.1] = -0.0
    total = torch.zeros(rows, hidden, device=make.device)
    for share in shares:
        total += share
    return shares[rank].clone(), total.to(make.dtype)


def share_in_bits(make: Inputs, rank: int, ranks: int, rows: int, hidden: int, bits: int) -> tuple[Tensor, Tensor]:
    """Return what `share_of_sum` does, of a sum that travels in so many bits without being rounded: each number is a
    code, some group's largest or less, times 2^rank."""
    most = 2 ** (min(bits, 8) - 1) - 1
    codes = (make.uniform(rows, hidden) * (2 * most + 1)).floor() - most
    codes.view(-1)[::GROUP] = most * (-1.0 if rows % 2 else 1.0)
    codes[codes == 0] = -0.0
    return (codes * 2**rank).to(make.dtype), (codes * (2**ranks - 1) + 0.0).to(make.dtype)


def sums_over_ranks(make: Inputs, own: Peers, rows: int, hidden: int) -> Iterator[tuple[Callable[[], Any], Any, float]]:
    """Make one sum in all the ways in which kernels sum over ranks: alone, with a residual, and normed. Yields (what
    computes it, which all ranks must call together; what must come out; bound)."""
    share, total = share_of_sum(make, own.rank, own.ranks, rows, hidden)
    x, weight = make.random(rows, hidden), make.random(hidden)
    shared, whole = Unsummed(x, share, peers=own), Unsummed(x, total)
    yield lambda: bits(peers.all_reduce(share.clone(), own)), bits(total), 0.0
    yield lambda: _after_a_sum(shared, norm.add_up), _after_a_sum(whole, norm.add_up_reference), 0.0
    normed = _after_a_sum(whole, weight, EPS, norm.rms_norm_reference)
    yield lambda: _after_a_sum(shared, weight, EPS, norm.rms_norm), normed, ROUNDED[make.dtype]


def sums_in_two(
    make: Inputs, own: Peers, rows: int, hidden: int, in_bits: Sequence[int] = (*QUICK_BITS.values(),)
) -> Iterator[tuple[Callable[[], Any], Any, float]]:
    """Make sums in two shots, one for each number of bits in which numbers travel, like `sums_over_ranks`."""
    for each in in_bits:
        share, total = share_in_bits(make, own.rank, own.ranks, rows, hidden, each)
        yield partial(_in_two, share, own, each), bits(total), 0.0


def _in_two(share: Tensor, own: Peers, in_bits: int) -> Tensor:
    return bits(peers.all_reduce_in_two(share.clone(), own, in_bits))


def rows_of_ranks(make: Inputs, own: Peers, rows: int, hidden: int) -> Iterator[tuple[Callable[[], Any], Any, float]]:
    """Make an exchange of engines, each of which has `rows`, and yield its two ways like `sums_over_ranks`. The copies
    keep kernels from starting beside a sum: where two ranks share a GPU, they would take the other's room."""
    everybody = make.random(own.ranks, rows, hidden)
    everybody[make.uniform(*everybody.shape) < 0.1] = -0.0
    mine = everybody[own.rank].clone()
    yield lambda: bits(exchange.gather_rows(mine.clone(), own) + 0.0), bits((everybody + 0.0).flatten(0, 1)), 0.0
    share, total = share_of_sum(make, own.rank, own.ranks, own.ranks * rows, hidden)
    yield lambda: bits(exchange.scatter_rows(share.clone(), own)), bits(total.chunk(own.ranks)[own.rank]), 0.0


def gate_and_mul(
    make: Inputs, rows: int, width: int, activation: str = "silu", *to: Rounding, gated: bool = True,
    curves: Tensor | None = None,
) -> Cases:  # fmt: skip
    """Make cases of an activation; of xIELU those of `curves`, or of some."""
    if activation == "xielu" and curves is None:
        curves = torch.tensor([0.9, 0.7, 0.5, -1e-6], device=make.device)
    x, bound = make.random(rows, (1 + gated) * width) * 3, ROUNDED_FP8 if to else ROUNDED[make.dtype]
    yield Case(lambda kernel: kernel(x, *to, activation=activation, gated=gated, curves=curves), bound)


def qk_squares(make: Inputs, rows: int, heads: tuple[int, int], dim: int) -> Cases:
    qkv = make.random(rows, sum(heads) + heads[1], dim)
    yield Case(lambda kernel: kernel(qkv, heads), ROUNDED[torch.float32])


def qk_norm(
    make: Inputs, rows: int, weight: Tensor, heads: tuple[int, int], eps: float, centered: bool, wide: bool
) -> Cases:
    """Make cases for `weight` # [heads of queries and keys, head_dim]; what lies behind them must not change."""
    qkv = make.random(rows, sum(heads) + heads[1], weight.shape[1]) + 1
    squares = qk_squares_reference(qkv, heads) * 2 if wide else None
    yield Case(
        lambda kernel: kernel(qkv.clone(), weight, heads, eps, centered, squares, 2 if wide else 1),
        ROUNDED[make.dtype],
    )


def clip(make: Inputs, rows: int, width: int, limit: float) -> Cases:
    x = make.random(rows, width) * (2 * limit)
    if x.numel():
        x[0, width // 2] = math.nan
    yield Case(lambda kernel: kernel(x.clone(), limit), 0.0)


def scale(make: Inputs, rows: int, width: int) -> Cases:
    x, factor = make.random(rows, width), make.random(1)
    yield Case(lambda kernel: kernel(x.clone(), factor), ROUNDED[make.dtype])


def gate_heads(make: Inputs, rows: int, heads: int, kv_heads: int, dim: int) -> Cases:
    """Make gates among queries, keys and values: each behind its query, and all behind all queries."""
    attended, projected = make.random(rows, heads, dim), make.random(rows, 2 * (heads + kv_heads), dim) * 3
    for places in (slice(1, 2 * heads, 2), slice(heads, 2 * heads)):
        yield Case(partial(_gated, attended, projected[:, places]), ROUNDED[make.dtype])


def _gated(attended: Tensor, gates: Tensor, kernel: Callable[..., Tensor]) -> Tensor:
    return kernel(attended.clone(), gates)


def made_up_adapters(make: Inputs, sizes: Sequence[int], inputs: int, rank: int, slots: int = 3) -> AdapterWeights:
    """Make adapters of a linear whose parts have outputs of such `sizes`: one of full rank, others of smaller ones, and
    the last of rank 0."""
    ranks = [rank, *(max(1, rank // (slot + 1)) for slot in range(1, slots - 1)), 0]
    held = torch.arange(rank, device=make.device) < make.ints(*ranks)[:, None]
    a = make.random(slots, len(sizes), rank, inputs) * held[:, None, :, None] * inputs**-0.5
    b = make.random(slots, sum(sizes), rank) * held[:, None]
    a, b = torch.cat((a.flatten(1), b.flatten(1)), 1).split((a[0].numel(), b[0].numel()), 1)
    starts = make.ints(*accumulate(sizes, initial=0))
    arrived = make.ints(*[0] * counters_of(slots, len(sizes) * rank))
    return AdapterWeights(
        a.unflatten(1, (-1, inputs)), b.unflatten(1, (-1, rank)), make.ints(*ranks), starts, tuple(sizes), arrived
    )


def shrink_adapters(make: Inputs, rows: int, weights: AdapterWeights) -> Cases:
    x, slots = make.random(rows, weights.a.shape[2]), _slots(make, rows, weights)
    in_use = (torch.arange(len(weights.a), device=make.device) < slots.used[0])[:, None]
    sizes = (len(weights.sizes), len(weights.a), weights.rank)
    # n products added up one after the other are eps * sqrt(n) / 6 away: 2.4e-6 where 14336 are in float32
    bound = max(ROUNDED[make.dtype], SUMS)
    yield Case(lambda kernel: kernel(x, slots, weights).unflatten(1, sizes).where(in_use, 0.0), bound)


def _slots(make: Inputs, rows: int, weights: AdapterWeights) -> StepSlots:
    return StepSlots.of(make.integers(-1, len(weights.a), rows, dtype=torch.int32), len(weights.a))


def expand_adapters(make: Inputs, rows: int, weights: AdapterWeights) -> Cases:
    slots = _slots(make, rows, weights)
    s = shrink_adapters_reference(make.random(rows, weights.a.shape[2]), slots, weights)
    out = make.random(rows, weights.b.shape[1] + 8)
    yield Case(partial(_added, s, slots, weights, out), ROUNDED[make.dtype])


def _added(s: Tensor, slots: StepSlots, weights: AdapterWeights, out: Tensor, kernel: Kernel) -> Tensor:
    added = out.clone()
    kernel(added, s, slots, weights)
    return added


def quantize(make: Inputs, rows: int, width: int, to: Rounding) -> Cases:
    x = make.random(rows, width) * 3
    yield Case(lambda kernel: kernel(x, to), ROUNDED_FP8)


def fp8_linear(make: Inputs, rows: int, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Cases:
    bounds = FP8_SUMS if make.device.type == "cuda" else ROUNDED
    x = quantize_per_token_reference(make.random(rows, weight.shape[1]), make.fp8)
    yield Case(lambda kernel: kernel(x, weight, scales, bias, make.dtype), bounds[make.dtype])


def widen_tiled(make: Inputs, weight: TiledWeight) -> Cases:
    yield Case(lambda kernel: kernel(weight, make.dtype), ROUNDED[make.dtype])


def narrow_linear(make: Inputs, rows: int, weight: NarrowWeight, to: Rounding, bias: Tensor | None) -> Cases:
    bounds = FP8_SUMS if make.device.type == "cuda" else ROUNDED
    x = quantize_reference(make.random(rows, weight.values.shape[1]), to)
    yield Case(lambda kernel: kernel(x, weight, bias, make.dtype), bounds[make.dtype])


# ---- positions and the cache


@dataclass(frozen=True)
class NewTokens:
    """Holds new tokens of an attention layer, # [T, heads, head_dim] as projected, with their positions and slots."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    """None: the cache holds keys alone"""
    positions: Tensor
    slots: Tensor
    cache: Tensor
    """# [2, blocks, block_size, Hkv, D], which may be a view of memory with other layers' caches"""
    kv_scale: Tensor | None = None
    norms: tuple[Tensor | None, Tensor | None] = (None, None)
    eps: float = EPS
    interleaved: bool = False
    temperature: Tensor | None = None
    q_weight: Tensor | None = None

    def rotate(self, angles: tuple[Tensor | None, Tensor | None], kernel: Kernel) -> tuple[Tensor, ...]:
        """Return what a kernel returns, what it wrote to the slots, and the other memory, which must not change."""
        layout = self.cache.size(), self.cache.stride(), self.cache.storage_offset()
        memory = self.cache.new_empty(0).set_(self.cache.untyped_storage()).clone()
        cache = memory.as_strided(*layout)
        out = kernel(
            self.q, self.k, self.v, *angles, cache, self.slots, *self.norms, self.eps, self.kv_scale, self.interleaved,
            self.temperature, self.q_weight,
        )  # fmt: skip
        found = written(cache, self.slots)
        cache.view(torch.uint8).zero_()
        return out, *found, bits(memory)


def new_tokens(
    make: Inputs, heads: Sequence[int], dim: int, positions: int, cache: Tensor, **of_layer: Any
) -> NewTokens:
    """Make as many tokens as there are positions, up to 40, one of them padding, for any slots of the cache. `heads`:
    those of q, k and v, which may be none; `of_layer`: fields of NewTokens."""
    count = min(40, positions, cache.shape[1] * cache.shape[2])
    slots = make.some_of(count, cache.shape[1] * cache.shape[2])
    slots[count // 2] = -1
    q, k, v = make.random(count, sum(heads), dim).split(list(heads), dim=1)
    v = v if heads[2] else None
    return NewTokens(q, k, v, make.integers(0, positions, count), slots, cache, **of_layer)


def written(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is in `slots` of a cache # [2, blocks, block_size, Hkv, D], and what is elsewhere."""
    plain, slots = cache.float().flatten(1, 2), slots[slots >= 0]
    return plain[:, slots], bits(plain.index_fill(1, slots, 0.0))


def step_angles(table: Tensor, tokens: NewTokens, bound: float) -> Cases:
    def run(kernel: Kernel) -> Any:
        return tokens.rotate(kernel(table, tokens.positions), rotary_and_cache_reference)

    yield Case(run, bound)


def rotary_and_cache(angles: tuple[Tensor | None, Tensor | None], tokens: NewTokens, bound: float) -> Cases:
    yield Case(partial(tokens.rotate, angles), bound)


def latent_rotary_and_cache(
    make: Inputs, heads: int, nope: int, weight: Tensor, eps: float, angles: Callable[[Tensor], Any], positions: int,
    cache: Tensor, bound: float, kv_scale: Tensor | None = None, interleaved: bool = False, heated: bool = False,
) -> Cases:  # fmt: skip
    """Make tokens as `new_tokens` does, whose queries and keys lie in one tensor. `weight` is that of the norm,
    `angles` makes what kernels take of positions, `heated` multiplies queries by a temperature."""
    count = min(40, positions, cache.shape[1] * cache.shape[2])
    latent, rope = weight.shape[0], cache.shape[4] - weight.shape[0]
    width = heads * (nope + rope)
    projected, slots = make.random(count, width + latent + rope), make.some_of(count, cache.shape[1] * cache.shape[2])
    slots[count // 2] = -1
    given, temperature = angles(make.integers(0, positions, count)), make.uniform(count) + 1 if heated else None

    def run(kernel: Kernel) -> Any:
        layout = cache.size(), cache.stride(), cache.storage_offset()
        memory, both = cache.new_empty(0).set_(cache.untyped_storage()).clone(), projected.clone()
        own, q = memory.as_strided(*layout), both[:, :width].view(count, heads, -1)
        out = kernel(q, both[:, width:], weight, eps, *given, own, slots, kv_scale, interleaved, temperature)
        found = written(own, slots)
        own.view(torch.uint8).zero_()
        return out, both, *found, bits(memory)

    yield Case(run, bound)


# ---- around the step


def prepare_batch(make: Inputs, counts: Sequence[int], computed: Sequence[int], block_size: int) -> Cases:
    """Make requests of `counts` new tokens each, behind `computed` ones."""
    length, rows = max(map(sum, zip(counts, computed, strict=True))), len(counts) + 3
    tokens = make.integers(0, 2**31 - 1, rows, length + 2, dtype=torch.int32)
    blocks = make.integers(0, 2**31 - 1, rows, length // block_size + 2, dtype=torch.int32)
    chosen, starts = make.some_of(len(counts), rows).int(), make.ints(0, *accumulate(counts))

    def run(kernel: Kernel) -> Any:
        return kernel(chosen, make.ints(*computed), starts, tokens, blocks, block_size, sum(counts))

    yield Case(run, 0.0)


def copy_words(make: Inputs, count: int) -> Cases:
    source = make.on_host(make.integers(-(2**31), 2**31 - 1, count, dtype=torch.int32))

    def run(kernel: Kernel) -> Any:
        room = torch.full((count + 3,), 5, dtype=torch.int32, device=make.device)
        kernel(room[:count], source)
        return room

    yield Case(run, 0.0)


def scatter_words(make: Inputs, count: int) -> Cases:
    index = make.on_host(make.some_of(count, 4 * count + 4))
    values = make.on_host(make.integers(-(2**31), 2**31 - 1, count, dtype=torch.int32))

    def run(kernel: Kernel) -> Any:
        table = torch.full((4, count + 1), 9, dtype=torch.int32, device=make.device)
        kernel(table, index, values)
        return table

    yield Case(run, 0.0)


def settle_lengths(make: Inputs) -> Cases:
    rows, known, offsets = make.ints(3, 0, 2), make.ints(9, 4, 0, 21), make.ints(0, 1, 0, dtype=torch.int64)
    whose = make.ints(3, 3, 0, dtype=torch.int64)

    def run(kernel: Kernel) -> Any:
        lengths = make.ints(24, 3, 0), make.ints(26, 9, 0)
        positions = make.ints(25, 26, 9, dtype=torch.int64)
        kernel(*lengths, rows, positions, whose, offsets, known)
        return *lengths, positions

    yield Case(run, 0.0)


def commit_tokens(make: Inputs, count: int) -> Cases:
    """Make samples, for some of which no token is allowed or logits are not finite; then three to a request, with
    drafts of which a third is right."""
    rows, positions = make.some_of(count, count + 100), make.integers(0, 40, count)
    token_ids, best = make.integers(0, 2**31 - 1, count), make.random(count)
    raw_best = best.clone()
    best[1::4], raw_best[2::4], raw_best[3::8], best[7::8] = -math.inf, math.nan, math.inf, math.nan
    offsets = torch.arange(count, device=make.device) % 3
    first = torch.arange(count, device=make.device) - offsets
    behind = make.integers(8, 11, count), best, raw_best, rows[first], positions[first] + offsets
    for samples, drafts in (((token_ids, best, raw_best, rows, positions), None), (behind, offsets)):
        yield Case(partial(_committed, make, samples, drafts), 0.0)


def propose_ngram(make: Inputs, known: Sequence[int], num_drafts: int) -> Cases:
    """Make rows of so many known tokens, of few different ones, so that there are matches of every length and none."""
    most_known = max(known, default=1)
    table = make.integers(0, 4, len(known) + 2, most_known + num_drafts + 1).int()
    rows = make.some_of(len(known) + 2, len(known) + 2)[: len(known)].int()
    num_known = torch.zeros(len(known) + 2, dtype=torch.int32, device=make.device)
    num_known[rows.long()] = make.ints(*known)

    def run(sizes: tuple[int, int], kernel: Kernel) -> Any:
        drafted = table.clone()
        kernel(drafted, num_known, rows, most_known, num_drafts, *sizes)
        return drafted

    for sizes in ((1, 1), (3, 8), (2, 5)):
        yield Case(partial(run, sizes), 0.0)


def _committed(make: Inputs, samples: tuple[Tensor, ...], offsets: Tensor | None, kernel: Kernel) -> Any:
    count = len(samples[0])
    table = torch.full((count + 101, 43), 9, dtype=torch.int32, device=make.device)
    known = None if offsets is None else torch.full((count + 101,), 77, dtype=torch.int32, device=make.device)
    out = make.on_host(torch.full((count,), -7))
    kernel(out, table, *samples, -1, -2, *(() if offsets is None else (known, offsets, 3, -3)))
    if make.device.type == "cuda":
        torch.cuda.synchronize(make.device)
    return out, table, known


# ---- sampling


def mask_tokens(make: Inputs, rows: int, vocab: int) -> Cases:
    """Make masks that cover the vocabulary, and shorter ones; a row without a mask, and a mask of two rows."""
    scores = make.random(rows, vocab)
    lines = make.integers(-1, 3, rows)
    lines[0], lines[rows // 2 :] = -1, 2
    for words in (-(-vocab // 32), max(1, vocab // 64)):
        masks = make.integers(-(2**31), 2**31 - 1, 3, words, dtype=torch.int32)
        masks[1] = 0
        for dtype in {make.dtype, torch.float32}:
            yield Case(partial(_masked, scores.to(dtype), masks, lines), 0.0)


def _masked(scores: Tensor, masks: Tensor, lines: Tensor, kernel: Kernel) -> Tensor:
    changed = scores.clone()
    kernel(changed, masks, lines)
    return bits(changed)


def best_token(make: Inputs, rows: int, vocab: int) -> Cases:
    """Make rows with ties, then rows with NaN and infinities."""
    scores = make.random(rows, vocab)
    scores[0, vocab // 2 :] = scores[0, vocab // 4]
    yield Case(lambda kernel: kernel(scores), 0.0)
    broken = scores.clone()
    broken[-1, vocab // 3], broken[:-1] = math.nan, -math.inf
    yield Case(lambda kernel: kernel(broken)[0], 0.0)


def gumbel_argmax(make: Inputs, rows: int, vocab: int) -> Cases:
    """Make greedy and drawn rows, rows with ties, and rows with one token left."""
    logits, temperatures = make.random(rows, vocab) * 3, make.uniform(rows) * 2
    temperatures[::3], temperatures[1::5] = 0.0, 1e-6
    logits[3::4] = logits[3::4, :1]
    logits[2::6, :-1] = -math.inf
    seeds, positions = make.integers(-(2**63), 2**63 - 1, rows), make.integers(0, 2**20, rows)
    middle = logits.float().sort(dim=1).values[:, vocab // 2].contiguous()
    for floor in (None, middle):
        yield Case(partial(_called, logits, temperatures, seeds, positions, floor), 0.0)


def _called(*arguments_then_kernel: Any) -> Any:
    *arguments, kernel = arguments_then_kernel
    return kernel(*arguments)


def filter_floor(make: Inputs, rows: int, vocab: int) -> Cases:
    """Make rows for which each of the filters is off now and then; a row alone must get what it gets among others."""
    spread = torch.logspace(-3, 1.5, rows, device=make.device)[:, None]
    logits = (make.random(rows, vocab) * spread).to(make.dtype)
    logits[0, : vocab // 2], logits[-1] = -math.inf, 1.0
    temperatures, top_p, min_p = make.uniform(rows) * 2 + 0.1, make.uniform(rows), make.uniform(rows) * 0.2
    top_k = torch.where(temperatures > 1, make.integers(-1, 60, rows), make.integers(-1, 2 * vocab, rows)).int()
    top_k[::3], top_p[1::4], min_p[::2], temperatures[5::7] = 0, 1.0, 0.0, 0.0
    limits = (temperatures, top_k, top_p, min_p)

    def run(kernel: Kernel) -> Any:
        return kernel(logits, *limits), kernel(logits[1:2], *(limit[1:2] for limit in limits))

    yield Case(run, 0.0)


def logsumexp(make: Inputs, rows: int, vocab: int) -> Cases:
    logits = make.random(rows, vocab) * 3
    yield Case(lambda kernel: kernel(logits), ROUNDED[torch.float32])


# ---- experts


def fused_moe(make: Inputs, tokens: int, experts: Experts, shared: bool, rank: int = 0) -> Cases:
    """Make a case of a layer's own experts, with made-up adapters of them if these have a `rank`."""
    adapters = made_up_expert_adapters(make, tokens, experts, rank) if rank else None
    x = make.random(tokens, experts.router.shape[1])
    extra = make.random(*x.shape) if shared else None
    rounds = experts.kind == "fp8"  # tokens are rounded or not, as their configuration says
    most = max(tokens, LEAST_ADAPTED) if rank else tokens
    config = pick_moe_config(most, experts.top_k, experts.num_experts, "fp8", DEVICE_FAMILY) if rounds else None
    expected, chosen = fused_moe_reference(x, experts, extra, torch.zeros_like(x), config, adapters)

    def run(kernel: Kernel) -> Any:
        out, ids = kernel(x, experts, extra, torch.zeros_like(x), config, adapters)
        if isinstance(out, HalfNormed) and isinstance(expected, HalfNormed):
            both = torch.stack((out.x, out.normed(experts.eps).to(x.dtype)))
            return as_chosen(both, torch.stack((expected.x, expected.normed(experts.eps).to(x.dtype))), ids, chosen)
        return as_chosen(out, whole(expected), ids, chosen)

    yield Case(run, EXPERTS[make.dtype] + (ROUNDED_FP8 if rounds else 0.0))


def made_up_expert_adapters(make: Inputs, tokens: int, experts: Experts, rank: int) -> ExpertAdapters:
    """Make adapters of experts as `made_up_adapters` does, and the slots of tokens."""
    number, n, hidden = experts.num_experts, experts.inner_size, experts.router.shape[1]
    up = made_up_adapters(make, 2 * number * (n,), hidden, rank)
    down = made_up_adapters(make, number * (hidden,), n, rank)
    return ExpertAdapters(make.integers(-1, len(up.a), tokens, dtype=torch.int32), up, down)


def as_chosen(out: Tensor, expected: Tensor, ids: Tensor, chosen: Tensor, most: float = 0.5) -> Tensor:
    """Return `out` with the reference's result for tokens that chose other experts, as a close call may turn out. If
    more than `most` of the tokens did, it returns NaN."""
    other = (ids.sort(dim=1).values != chosen.sort(dim=1).values).any(dim=1)
    if int(other.sum()) > max(1, most * len(ids)):
        return out.fill_(math.nan)
    return torch.where(other[:, None], expected.to(out.dtype), out)


# ---- sparse attention


def index_scores(
    make: Inputs, heads: int, dim: int, counts: Sequence[int], known: Sequence[int], block_size: int, top_k: int,
    cache_dtype: torch.dtype | None = None,
) -> Cases:  # fmt: skip
    """Score the keys of requests of `counts` tokens behind `known` ones, and padding of one token: for all queries, and
    for some from one's middle on. Other layers' rows lie between the blocks. `cache_dtype`: that of keys; None: the
    model's."""
    sequences, blocks, visible = _some_requests(make, counts, known, block_size)
    q, longest = make.random(len(visible), heads, dim), int(visible.max())
    weights, arena = make.random(len(visible), heads + 5)[:, 3:-2], make.random(blocks, 2, block_size, 1, dim)
    arena = arena.to(cache_dtype or arena.dtype)
    decodes = set(counts) == {1}

    def run(first: int, last: int, kernel: Kernel) -> Any:
        out = torch.full((last - first, longest + 3), math.nan, device=make.device)
        kernel(q, weights, arena[:, 1].unsqueeze(0), sequences, out, first, top_k, decodes)
        seen = visible[first:last, None]
        places = torch.arange(longest + 3, device=make.device)
        return torch.where((seen > top_k) & (places < seen), out, 0.0)

    for first, last in ((0, len(q)), (len(q) // 3, len(q) - len(q) // 3)):
        yield Case(partial(run, first, last), SUMS)


def top_keys(make: Inputs, counts: Sequence[int], known: Sequence[int], top_k: int) -> Cases:
    """Choose among scores that differ, and among few that many keys share, of the same requests; behind a query's own
    key is NaN."""
    sequences, _, visible = _some_requests(make, counts, known, 16)
    places = torch.arange(int(visible.max()) + 3, device=make.device)
    shape = len(visible), len(places)
    for scores in (make.uniform(*shape) - 0.5, make.integers(-2, 3, *shape) * 0.25):
        held = torch.where(places < visible[:, None], scores, math.nan)
        for first, last in ((0, len(held)), (len(held) // 3, len(held) - len(held) // 3)):
            yield Case(partial(_chosen, sequences, held[first:last], first, top_k), 0.0)


def _chosen(sequences: Sequences, scores: Tensor, first: int, top_k: int, kernel: Kernel) -> Any:
    return kernel(
        scores, sequences, torch.full((len(scores), top_k), -7, dtype=torch.int32, device=scores.device), first
    )


def _some_requests(
    make: Inputs, counts: Sequence[int], known: Sequence[int], block_size: int
) -> tuple[Sequences, int, Tensor]:
    """Return requests with padding of one token, of how many blocks, and how many keys each token sees # [tokens]."""
    lengths = [count + before for count, before in zip(counts, known, strict=True)]
    width, rows = -(-max(lengths) // block_size) + 1, len(counts) + 3
    table = make.some_of(rows * width, rows * width).view(rows, width).int()
    starts = make.ints(0, *accumulate((*counts, 1)))
    sequences = Sequences(table, make.some_of(len(counts) + 1, rows).int(), starts, make.ints(*lengths, 0))
    visible = [before + place + 1 for count, before in zip(counts, known, strict=True) for place in range(count)]
    return sequences, rows * width, make.ints(*visible, 0, dtype=torch.int64)


# ---- recurrent states


def gated_delta(
    make: Inputs,
    heads: DeltaHeads,
    weights: DeltaWeights,
    counts: Sequence[int],
    known: Sequence[int],
    first_req: int | None = None,
    in_turn: bool = False,
) -> Cases:
    """Make requests of `counts` tokens behind `known` ones, and padding of one token; what the block of one that begins
    here held before is NaN. With `first_req` a case of gated_delta_scan from there on, else of gated_delta_step."""
    places, tokens = heads.places, sum(counts) + 1
    columns = max(places.z, places.v, places.k) + heads.key_heads * max(places.values_apart, places.keys_apart)
    projected, own = make.random(tokens, columns + 16), make.random(tokens, places.a + 2 * heads.value_heads + 16)
    lengths = [count + before for count, before in zip(counts, known, strict=True)]
    chosen = make.some_of(len(counts) + 1, len(counts) + 4)
    table = make.integers(0, 9, len(counts) + 4, 3, dtype=torch.int32)
    table[:, 0] = make.some_of(len(counts) + 4, len(counts) + 6)
    starts = make.ints(0, *accumulate((*counts, 1)))
    sequences = Sequences(table, chosen.int(), starts, make.ints(*lengths, 0))
    numbers = heads.numbers
    arena = make.uniform(len(counts) + 6, numbers + 64)
    blocks = table[chosen, 0].long()
    for block, before in zip(blocks.tolist(), known, strict=False):
        arena[block] = arena[block] - 0.5 if before else math.nan
    arena[blocks[-1]] = 0.0  # of padding, which may be written or not
    scan = {} if first_req is None else {"first_req": first_req, "in_turn": in_turn}

    def run(kernel: Kernel) -> Any:
        memory, out = arena.clone(), projected.new_zeros((tokens, heads.value_heads * heads.value_dim))
        states = memory[:, 32 : 32 + numbers]
        kernel(projected[:, :columns], own, heads, weights, states, sequences, out=out, **scan)
        for block, length in zip(blocks.tolist(), lengths, strict=False):  # rows of tokens that never were
            states[block, heads.slots * heads.state_size :].view(heads.ring, -1)[length:] = 0.0
        return out, memory

    yield Case(run, RECURRENT[make.dtype])
