"""Makes batches for the attention kernels, whose keys, or latents, lie scattered over a paged cache of 16 or 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

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
    SMALLEST_BOX,
    UNPACKED_BLOCK,
    AttentionPlan,
    by_copy_engine,
    plan_attention,
    plan_decode,
)
from headrace.kernels.decode import decode_attention
from headrace.kernels.fp8_cache import UnpackedCache
from headrace.kernels.latent import LatentHeads, latent_attention
from headrace.kernels.latent_config import EXPANDED_BYTES, LatentPlan, plan_latent
from headrace.kernels.latent_prompt import expanded_attention
from headrace.kernels.paged import Sequences
from headrace.kernels.rotary import quantize_reference

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PLAIN = torch.bfloat16 if ON_GPU else torch.float16
"""Triton's interpreter, on a CPU, does not multiply bf16."""
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = {PLAIN: "16-bit", E4M3: "e4m3", E5M2: "e5m2"}
KV_SCALE = (0.02, 0.015)
"""of K and V in an fp8 cache"""
Heads = tuple[int, int, int]
"""(query heads, KV heads, size of a head)"""
NOPE, ROPE, VALUE, LATENT = (128, 64, 128, 512) if ON_GPU else (16, 8, 16, 24)
"""DeepSeek-V3's and V2-Lite's numbers of a head, and of a latent"""
LATENT_SCALE = (NOPE + ROPE) ** -0.5


def num_sms() -> int:
    return multiprocessor_count(DEVICE) if ON_GPU else 4


def randn(*shape: int, dtype: torch.dtype = PLAIN) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def split_qkv(tokens: int, heads: Heads, dtype: torch.dtype = PLAIN) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v as a layer has them: parts of one tensor."""
    num_heads, kv_heads, dim = heads
    q, k, v = randn(tokens, num_heads + 2 * kv_heads, dim, dtype=dtype).split((num_heads, kv_heads, kv_heads), 1)
    return q, k, v


def rope_table(positions: int, dim: int) -> Tensor:
    """Return # [positions, dim] fp32: cosines, then sines."""
    angles = torch.rand(positions, dim // 2, device=DEVICE) * 6
    return torch.cat((angles.cos(), angles.sin()), -1)


class PagedBatch:
    """Holds requests with `counts` new tokens and `lengths` keys each, in blocks scattered over the cache.

    The first `decodes` run one token each. `sinks`: each head has a logit besides its keys'. Behind each request's last
    key a 16-bit cache holds NaN; unused entries of the block table name blocks of other requests. With `layers`, the
    cache is the last of so many layers that follow each other in a block, the others full of NaN.
    """

    def __init__(
        self, counts: list[int], lengths: list[int], heads: Heads, block_size: int = 16, decodes: int = 0,
        dtype: torch.dtype = PLAIN, cache_dtype: torch.dtype | None = None, layers: int = 0, sinks: bool = False,
    ) -> None:  # fmt: skip
        num_heads, kv_heads, dim = heads
        self.heads, self.counts, self.lengths, self.decodes = heads, counts, lengths, decodes
        needed = [-(-length // block_size) for length in lengths]
        total, shape = sum(needed), (len(counts) + 4, max(needed) + 3)
        table = torch.randint(0, max(1, total), shape, dtype=torch.int32, device=DEVICE)
        rows = torch.randperm(len(counts) + 4, device=DEVICE)[: len(counts)].int()
        blocks, used = torch.randperm(total, device=DEVICE).int(), 0
        self.cache = randn(2, total + 1, block_size, kv_heads, dim, dtype=dtype)
        self.kv_scale: Tensor | None = None
        if cache_dtype not in (None, dtype):
            self.kv_scale = torch.tensor(KV_SCALE, device=DEVICE)
            self.cache = (self.cache.float() / self.kv_scale.view(2, 1, 1, 1, 1)).to(cache_dtype)
        for row, length, count in zip(rows.tolist(), lengths, needed, strict=True):
            table[row, :count] = blocks[used : used + count]
            used += count
            if length % block_size and self.kv_scale is None:
                self.cache[:, blocks[used - 1], length % block_size :] = float("nan")
        if layers:
            arena = self.cache.new_full((total + 1, layers, 2, *self.cache.shape[2:]), float("nan"))
            self.cache = arena[:, -1].transpose(0, 1).copy_(self.cache)
        self.q = randn(sum(counts), num_heads, dim, dtype=dtype)
        starts = ints([0, *accumulate(counts)])
        self.sequences = Sequences(table, rows, starts, ints(lengths))
        self.scale = dim**-0.5
        self.sinks = 2 * randn(num_heads, dtype=dtype) if sinks else None

    @property
    def element_size(self) -> int:
        return tile_element_size(self.q, self.cache)

    @property
    def bytes_read(self) -> int:
        """Bytes of the keys and values of all requests."""
        return 2 * sum(self.lengths) * self.heads[1] * self.heads[2] * self.cache.element_size()

    def plan(self, copy_engine: bool = False) -> AttentionPlan:
        """Plan the launches as serving would."""
        return plan_attention(
            len(self.counts), len(self.q), self.decodes, max(self.lengths), *self.heads, self.element_size,
            DEVICE_FAMILY, num_sms(), copy_engine=copy_engine,
        )  # fmt: skip

    def plan_by_copy_engine(self, plan: AttentionPlan) -> AttentionPlan | None:
        """Return `plan` with its prompts served by kernels/prefill.py; None where that kernel cannot."""
        prompts, dim, group = len(self.counts) - self.decodes, self.heads[2], self.heads[0] // self.heads[1]
        able = self.q.element_size() == 2 and self.cache.shape[2] >= SMALLEST_BOX and dim in COPY_ENGINE_PREFILL
        if not (prompts and able and ON_GPU and is_hopper(DEVICE)):
            return None
        tokens = len(self.q) - self.decodes
        return by_copy_engine(plan, prompts, tokens, max(self.lengths), dim, group, self.element_size)

    def attend(
        self, plan: AttentionPlan, window: int | None = None, cache: Tensor | None = None, out: Tensor | None = None,
        unpacked: UnpackedCache | None = None,
    ) -> Tensor:  # fmt: skip
        """Run paged attention, over `cache` in place of the batch's own."""
        return paged_attention(
            self.q, self.cache if cache is None else cache, self.sequences, self.scale, window, self.kv_scale, out,
            self.sinks, plan=plan, unpacked=unpacked,
        )  # fmt: skip

    def reference(self, window: int | None = None) -> Tensor:
        """Run the reference in fp32."""
        cache = self.cache.float() if self.kv_scale is None else self.cache
        return paged_attention_reference(
            self.q.float(), cache, self.sequences, self.scale, window, self.kv_scale, sinks=self.sinks
        )

    def unpacked(self, plan: AttentionPlan) -> UnpackedCache | None:
        """Return a 16-bit cache of NaN, as large as the plan unpacks an fp8 cache to; None where it does not."""
        if not plan.unpacked_blocks:
            return None
        blocks, shape = len(self.counts) * plan.unpacked_blocks, self.cache.shape[3:]
        cache = torch.full((2, blocks, UNPACKED_BLOCK, *shape), float("nan"), dtype=self.q.dtype, device=DEVICE)
        return UnpackedCache.within(cache, plan, len(self.counts))

    @cached_property
    def new_tokens(self) -> tuple[Tensor, ...]:
        """The inputs of a fused decode: q, k, v, the table of angles, the tickets."""
        tickets = torch.zeros(len(self.counts) * self.heads[1], dtype=torch.int32, device=DEVICE)
        return *split_qkv(len(self.counts), self.heads, self.q.dtype), rope_table(8192, self.heads[2]), tickets

    def decode(self, cache: Tensor, window: int | None = None) -> Tensor:
        """Run the fused decode kernel (rotary, write and attention) on new tokens. It writes into `cache`."""
        sizes = (len(self.counts), *self.heads, self.element_size, DEVICE_FAMILY, num_sms())
        planned, splits = plan_decode(*sizes, window)
        q, k, v, angles, tickets = self.new_tokens
        return decode_attention(
            q, k, v, angles, cache, self.sequences, tickets, self.scale, planned, splits, window,
            kv_scale=self.kv_scale, sinks=self.sinks,
        )  # fmt: skip

    def copies(self) -> list[Tensor]:
        """Return caches with the same keys that together overflow the L2 cache."""
        return [self.cache, *(self.cache.clone() for _ in range(min(31, int(3e8 / self.bytes_read)) if ON_GPU else 0))]


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
                    self.absorbed, self.q[..., NOPE:], self.cache if cache is None else cache, self.sequences,
                    LATENT_SCALE, how, self.scale, chosen, first, end, out,
                )  # fmt: skip
        return out

    @cached_property
    def memory(self) -> Tensor:
        """Room for keys and values of each head."""
        return torch.empty(EXPANDED_BYTES // PLAIN.itemsize, dtype=PLAIN, device=DEVICE)

    def expand(self, plan: LatentPlan) -> Tensor:
        """Attend with keys and values of each head, behind the decodes; return # [T, heads, VALUE]."""
        assert plan.expanded is not None
        first = plan.num_decodes
        key_starts = pad(self.sequences.seq_lens[first:].cumsum(0, dtype=torch.int32), (1, 0))
        out = torch.full((len(self.q), self.heads, VALUE), float("nan"), dtype=PLAIN, device=DEVICE)
        return expanded_attention(
            self.q, self.of_heads, self.cache, self.sequences, key_starts, LATENT_SCALE, plan.expanded, self.memory,
            self.scale, first, out,
        )  # fmt: skip
