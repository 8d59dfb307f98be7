"""Implements the backend TORCH_SDPA: torch's own attention over K and V gathered from the paged cache, for CPUs.

On a CPU the count of operations is what costs. So a step's requests are put into few groups, each padded to its
longest member and served by one gather and one scaled_dot_product_attention; the groups, gather indices and masks are
made once a step and shared by all layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.attention.metadata import AttentionMetadata
from headrace.attention.spec import AttentionSpec

GROUP_COST = 60_000
"""nanoseconds that one more group costs in a layer"""
GATHER_COST = 0.3
"""nanoseconds to gather and read one element of K or V"""
PAIR_COST = 0.1
"""nanoseconds for one element of the product of a query and a key, weighting the value included"""
MOST_SCRATCH = 64 << 20
"""the most bytes of memory that is kept to gather into; the system takes back larger memory at once"""
MASKED, UNMASKED = np.float32("-inf"), np.float32(0)


class _Request(NamedTuple):
    place: int
    """its number in the batch"""
    start: int
    """the number of its first token in the batch"""
    query_len: int
    seq_len: int
    skipped: int
    """keys at the front, in whole blocks, that no query of this step sees"""
    span: int
    """keys behind them"""


@dataclass(frozen=True)
class _Group:
    """Holds B requests padded to Q queries and L keys."""

    size: int
    query_len: int
    blocks: Tensor | slice
    """[B * L / block_size] int64; a slice if they lie one after the other, so that nothing is gathered"""
    mask: Tensor | None
    """[B, 1, rows, L], to be added to scores; rows = heads of a KV head x Q (B > 1) or Q (B = 1). None: causal"""
    first: int
    """the first token, if the group's tokens are consecutive in the batch"""
    tokens: Tensor | None
    """[B * Q] int64: tokens of the batch, each request's last one repeated as padding; None: consecutive ones"""


class TorchSdpa:
    """Serves any layer that is causal, on any device."""

    name = "TORCH_SDPA"

    def __init__(self) -> None:
        self._scratch = torch.empty(0, dtype=torch.uint8)
        """memory into which K and V are gathered in every layer and step; fresh memory of another size each time would
        cost page faults, and leave the heap in pieces that are never given back"""

    def forward(
        self,
        q: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        kv_scale: Tensor | None = None,
        out: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        groups = metadata.plan.get(spec)
        if groups is None:
            groups = metadata.plan[spec] = _plan_groups(metadata, spec, q.dtype)
        if len(groups) == 1 and groups[0].tokens is None and groups[0].size * groups[0].query_len == q.shape[0]:
            attended = self._attend(groups[0], q, kv_cache, spec, kv_scale, sinks)
            return attended if out is None else out.copy_(attended)
        out = q.new_zeros((*q.shape[:2], spec.latent_dim or q.shape[2])) if out is None else out.zero_()
        for group in groups:
            if group.tokens is None:
                stop = group.first + group.size * group.query_len
                out[group.first : stop] = self._attend(group, q[group.first : stop], kv_cache, spec, kv_scale, sinks)
            else:
                # padding repeats a request's last token with that token's own mask, so whoever writes last is right
                out[group.tokens] = self._attend(group, q[group.tokens], kv_cache, spec, kv_scale, sinks)
        return out

    def _gather(self, kv_cache: Tensor, blocks: Tensor | slice, dtype: torch.dtype, kv_scale: Tensor | None) -> Tensor:
        """Return K and V of `blocks` in `dtype`; the next call may overwrite them."""
        quantized = kv_cache.element_size() == 1
        stored = kv_cache.view(torch.uint8) if quantized else kv_cache
        gathered = stored[:, blocks] if isinstance(blocks, slice) else self._select(stored, blocks)
        if kv_cache.dtype == dtype:
            return gathered
        converted = gathered.view(kv_cache.dtype).to(dtype)
        if quantized and kv_scale is not None:
            converted.mul_(kv_scale[: len(converted)].to(dtype).view(-1, 1, 1, 1, 1))
        return converted

    def _select(self, stored: Tensor, blocks: Tensor) -> Tensor:
        """Copy `blocks` of every plane into the memory that is kept for it, or into fresh memory if they are large."""
        shape = (stored.shape[0], blocks.shape[0], *stored.shape[2:])
        size = math.prod(shape) * stored.element_size()
        if size > MOST_SCRATCH or stored.device.type != "cpu":
            return stored.index_select(1, blocks)
        if self._scratch.numel() < size:
            self._scratch = torch.empty(min(2 * size, MOST_SCRATCH), dtype=torch.uint8)
        return torch.index_select(stored, 1, blocks, out=self._scratch[:size].view(stored.dtype).view(shape))

    def _attend(
        self,
        group: _Group,
        q: Tensor,
        kv_cache: Tensor,
        spec: AttentionSpec,
        kv_scale: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Return [B * Q, Hq, D of values] for q [B * Q, Hq, D]. Query heads of a KV head are rows of one product."""
        size, queries = group.size, group.query_len
        kv_heads, head_dim = spec.num_kv_heads, spec.head_dim
        shared = spec.num_heads // kv_heads
        gathered = self._gather(kv_cache, group.blocks, q.dtype, kv_scale)
        lone, mask = size == 1 and queries > 1, group.mask
        if lone:  # [Hkv, shared, Q, D] against keys repeated without a copy
            length = queries if mask is None else mask.shape[-1]
            parts = gathered.flatten(1, 2)[:, :length].transpose(1, 2).unsqueeze(2)
            parts = parts.expand(-1, -1, shared, -1, -1)
            query = q.view(queries, kv_heads, shared, head_dim).permute(1, 2, 0, 3)
        else:  # [B, Hkv, shared * Q, D]
            parts = gathered.reshape(len(gathered), size, -1, kv_heads, head_dim).transpose(2, 3)
            query = q.view(size, -1, kv_heads, shared, head_dim)
            query = query.squeeze(1) if queries == 1 else query.permute(0, 2, 3, 1, 4).flatten(2, 3)
        key, value = (parts[0], parts[0, ..., -spec.latent_dim :]) if spec.latent_dim else parts.unbind()
        if sinks is not None and mask is not None:
            # one more key: its score is the mask's number, and its value zero
            key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
            column = sinks.view(kv_heads, shared, 1, 1).expand(-1, -1, queries, -1)
            column = column if lone else column.reshape(1, kv_heads, -1, 1).expand(size, -1, -1, -1)
            mask = torch.cat((mask.expand(*column.shape[:3], -1), column), dim=-1)
        out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, scale=spec.scale)
        if lone:
            return out.permute(2, 0, 1, 3).reshape(*q.shape[:2], -1)
        if queries > 1:
            out = out.unflatten(2, (shared, queries)).permute(0, 3, 1, 2, 4)
        return out.reshape(*q.shape[:2], -1)


def _first_visible(position: int, spec: AttentionSpec) -> int:
    """Return the first key that a query sees."""
    window = spec.sliding_window
    if window is None:
        return 0
    return position // window * window if spec.chunked else max(0, position - window + 1)


def _plan_groups(metadata: AttentionMetadata, spec: AttentionSpec, dtype: torch.dtype) -> list[_Group]:
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    block_size = spec.block_size
    requests: list[_Request] = []
    for index, seq_len in enumerate(lengths):
        query_len = starts[index + 1] - starts[index]
        if seq_len == 0 or query_len == 0:
            continue
        skipped = _first_visible(seq_len - query_len, spec) // block_size * block_size
        requests.append(_Request(index, starts[index], query_len, seq_len, skipped, seq_len - skipped))
    return [_make_group(members, metadata, spec, dtype) for members in _partition(requests, spec)]


def _partition(requests: list[_Request], spec: AttentionSpec) -> list[list[_Request]]:
    """Put requests of similar size together wherever padding costs less than one more group."""
    per_key = GATHER_COST * 2 * spec.num_kv_heads * spec.head_dim
    per_pair = PAIR_COST * spec.num_heads * spec.head_dim

    def cost(count: int, query_len: int, span: int) -> float:
        return GROUP_COST + count * span * (per_key + query_len * per_pair)

    groups: list[list[_Request]] = []
    widest = longest = 0
    for request in sorted(requests, key=lambda r: (r.query_len, r.span), reverse=True):
        if groups:
            if request.query_len == widest and request.span == longest:  # alike: surely together
                groups[-1].append(request)
                continue
            count, span = len(groups[-1]), max(longest, request.span)
            apart = cost(count, widest, longest) + cost(1, request.query_len, request.span)
            if cost(count + 1, widest, span) <= apart:
                groups[-1].append(request)
                longest = span
                continue
        groups.append([request])
        widest, longest = request.query_len, request.span
    return [sorted(group, key=lambda r: r.place) for group in groups]


def _make_group(
    members: list[_Request], metadata: AttentionMetadata, spec: AttentionSpec, dtype: torch.dtype
) -> _Group:
    block_size, window = spec.block_size, spec.sliding_window
    size = len(members)
    queries = max(member.query_len for member in members)
    num_blocks = max(-(-member.span // block_size) for member in members)
    block_table = metadata.block_tables[spec.group]
    table, device = block_table.cpu().numpy(), block_table.device
    index, start, query_len, seq_len, skipped, _ = np.array(members).T[..., None]
    # not beyond a request's last block: table entries there may be stale, and no blocks of this cache group
    columns = np.minimum(skipped // block_size + np.arange(num_blocks), (seq_len - 1) // block_size)
    block_ids = table[metadata.rows.cpu().numpy()[index], columns].ravel().astype(np.int64)
    one_run = block_ids[-1] - block_ids[0] == block_ids.size - 1 and bool((np.diff(block_ids) == 1).all())
    blocks = slice(int(block_ids[0]), int(block_ids[-1]) + 1) if one_run else torch.from_numpy(block_ids).to(device)

    tokens = None
    offset = np.minimum(np.arange(queries), query_len - 1)
    first = members[0].start
    if any(member.start != first + i * queries or member.query_len != queries for i, member in enumerate(members)):
        tokens = torch.from_numpy((start + offset).ravel()).to(device)
    lone = members[0]
    plain = not spec.sinks and (window is None or window >= queries)
    if size == 1 and queries > 1 and lone.seq_len == queries and plain:
        return _Group(size, queries, blocks, None, first, tokens)

    query_at = (seq_len - query_len + offset)[..., None]  # [B, Q, 1]
    key_at = (skipped + np.arange(num_blocks * block_size))[:, None]  # [B, 1, L]
    hidden = key_at > query_at
    if window is not None:
        hidden |= key_at < query_at // window * window if spec.chunked else key_at <= query_at - window
    mask = torch.from_numpy(np.where(hidden, MASKED, UNMASKED)).to(device, dtype)
    if size > 1 and queries > 1:
        mask = mask.repeat(1, spec.num_heads // spec.num_kv_heads, 1)  # rows: heads that share, then queries
    return _Group(size, queries, blocks, mask.unsqueeze(1), first, tokens)
