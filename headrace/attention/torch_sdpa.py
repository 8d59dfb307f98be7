"""Implements the backend TORCH_SDPA: torch's own attention over K and V gathered from the paged cache, for CPUs.

On a CPU the count of operations is what costs. So a step's requests are put into few groups, each padded to its
longest member and served by one gather and one scaled_dot_product_attention; the groups, gather indices and masks are
made once a step and shared by all layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.attention.metadata import AttentionMetadata
from headrace.attention.spec import AttentionSpec
from headrace.kernels.latent import LatentHeads, latent_attention_reference

GROUP_COST = 60_000
"""nanoseconds that one more group costs in a layer"""
GATHER_COST = 0.3
"""nanoseconds to gather and read one element of K or V"""
PAIR_COST = 0.1
"""nanoseconds for one element of the product of a query and a key, weighting the value included"""
MOST_SCRATCH = 64 << 20
"""the most bytes of memory that is kept to gather into; the system takes back larger memory at once"""
MASKED, UNMASKED = np.float32("-inf"), np.float32(0)


class _Requests(NamedTuple):
    """Describes requests of a batch, in its order; arrays [R]."""

    rows: np.ndarray
    """the row of the tables that each owns"""
    starts: np.ndarray
    """its first token in the batch"""
    query_lens: np.ndarray
    seq_lens: np.ndarray
    skipped: np.ndarray
    """keys at the front, in whole blocks, that no query of this step sees"""
    spans: np.ndarray
    """keys behind them"""

    def only(self, chosen: np.ndarray) -> _Requests:
        """Return the requests with the numbers `chosen`."""
        return _Requests(*(column[chosen] for column in self))


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
    memory: Tensor | None = None
    """[planes, B * L / block_size, block_size, Hkv, D], of the cache's type: what every layer gathers K and V into;
    None: nothing is gathered, or too much for memory that is kept"""
    parts: tuple[Tensor, Tensor] | None = None
    """views of it as `_split` returns them; None: K and V have to be converted first"""

    @property
    def lone(self) -> bool:
        """Tell whether it is one request with several queries."""
        return self.size == 1 and self.query_len > 1


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
            planned = _plan_groups(metadata, spec, q.dtype)
            groups = metadata.plan[spec] = [self._placed(group, kv_cache, spec, q.dtype) for group in planned]
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

    def latent(
        self,
        q: Tensor,
        heads: LatentHeads,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        kv_scale: Tensor | None = None,
        out: Tensor | None = None,
        chosen: Tensor | None = None,
    ) -> Tensor:
        absorbed, turned = heads.absorb(q), q[..., heads.nope_dim :]
        if chosen is None:
            both = torch.cat((turned, absorbed), dim=-1)
            attended = self.forward(both, kv_cache, metadata, spec, kv_scale)
        else:
            sequences = metadata.sequences(spec.group)
            attended = latent_attention_reference(absorbed, turned, kv_cache, sequences, spec.scale, kv_scale, chosen)
        return heads.values(attended, out)

    def _placed(self, group: _Group, kv_cache: Tensor, spec: AttentionSpec, dtype: torch.dtype) -> _Group:
        """Return the group with memory to gather into."""
        if isinstance(group.blocks, slice) or kv_cache.device.type != "cpu":
            return group
        shape = (kv_cache.shape[0], group.blocks.shape[0], *kv_cache.shape[2:])
        size = math.prod(shape) * kv_cache.element_size()
        if size > MOST_SCRATCH:
            return group
        if self._scratch.numel() < size:
            self._scratch = torch.empty(min(2 * size, MOST_SCRATCH), dtype=torch.uint8)
        memory = self._scratch[:size].view(_stored(kv_cache).dtype).view(shape)
        parts = _split(memory, group, spec) if kv_cache.dtype == dtype else None
        return replace(group, memory=memory, parts=parts)

    def _keys_and_values(
        self, group: _Group, kv_cache: Tensor, spec: AttentionSpec, dtype: torch.dtype, kv_scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return K and V of a group in `dtype`, as `_split` does; the next call may overwrite them."""
        blocks, stored = group.blocks, _stored(kv_cache)
        gathered = stored[:, blocks] if isinstance(blocks, slice) else _gather(stored, blocks, group.memory)
        if group.parts is not None:
            return group.parts
        if kv_cache.dtype != dtype:
            gathered = gathered.view(kv_cache.dtype).to(dtype)
            if kv_cache.element_size() == 1 and kv_scale is not None:
                gathered.mul_(kv_scale[: len(gathered)].to(dtype).view(-1, 1, 1, 1, 1))
        return _split(gathered, group, spec)

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
        size, queries, mask = group.size, group.query_len, group.mask
        kv_heads, head_dim = spec.num_kv_heads, spec.head_dim
        shared = spec.num_heads // kv_heads
        key, value = self._keys_and_values(group, kv_cache, spec, q.dtype, kv_scale)
        if group.lone:  # [Hkv, shared, Q, D]
            query = q.view(queries, kv_heads, shared, head_dim).permute(1, 2, 0, 3)
        elif queries == 1:  # [B, Hkv, shared, D]
            query = q.view(size, kv_heads, shared, head_dim)
        else:  # [B, Hkv, shared * Q, D]
            query = q.view(size, queries, kv_heads, shared, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        if sinks is not None and mask is not None:
            # one more key: its score is the mask's number, and its value zero
            key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
            column = sinks.view(kv_heads, shared, 1, 1).expand(-1, -1, queries, -1)
            column = column if group.lone else column.reshape(1, kv_heads, -1, 1).expand(size, -1, -1, -1)
            mask = torch.cat((mask.expand(*column.shape[:3], -1), column), dim=-1)
        if spec.soft_cap is not None:
            assert mask is not None
            scores = spec.soft_cap * torch.tanh(query @ key.transpose(-1, -2) * (spec.scale / spec.soft_cap))
            out = (scores + mask).softmax(-1) @ value
        else:
            out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, scale=spec.scale)
        if group.lone:
            return out.permute(2, 0, 1, 3).reshape(*q.shape[:2], -1).contiguous()
        if queries > 1:
            out = out.unflatten(2, (shared, queries)).permute(0, 3, 1, 2, 4)
        return out.reshape(*q.shape[:2], -1)


def _stored(kv_cache: Tensor) -> Tensor:
    """Return the cache as a tensor that can be gathered from, which one of fp8 is as bytes."""
    return kv_cache.view(torch.uint8) if kv_cache.element_size() == 1 else kv_cache


def _gather(stored: Tensor, blocks: Tensor, memory: Tensor | None) -> Tensor:
    """Copy `blocks` of every plane into `memory`, or into fresh memory; return that."""
    if memory is None:
        memory = stored.new_empty((stored.shape[0], len(blocks), *stored.shape[2:]))
    # by blocks: along another dimension than the first, torch copies a cache whole if other layers' rows lie in between
    torch.index_select(stored.transpose(0, 1), 0, blocks, out=memory.transpose(0, 1))
    return memory


def _split(gathered: Tensor, group: _Group, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Return K and V as views of `gathered` # [planes, B * L / block_size, block_size, Hkv, D]: [B, Hkv, L, D], and for
    a lone request of several queries [Hkv, shared, L, D], which repeats keys without a copy."""
    if group.lone:
        length = group.query_len if group.mask is None else group.mask.shape[-1]
        parts = gathered.flatten(1, 2)[:, :length].transpose(1, 2).unsqueeze(2)
        parts = parts.expand(-1, -1, spec.num_heads // spec.num_kv_heads, -1, -1)
    else:
        parts = gathered.reshape(len(gathered), group.size, -1, spec.num_kv_heads, spec.head_dim).transpose(2, 3)
    if spec.latent_dim is None:
        key, value = parts.unbind()
        return key, value
    return parts[0], parts[0, ..., -spec.latent_dim :]


def _plan_groups(metadata: AttentionMetadata, spec: AttentionSpec, dtype: torch.dtype) -> list[_Group]:
    starts, seq_lens = metadata.query_start_loc.cpu().numpy(), metadata.seq_lens.cpu().numpy()
    query_lens = np.diff(starts)
    skipped = _first_visible(seq_lens - query_lens, spec) // spec.block_size * spec.block_size
    rows = metadata.rows.cpu().numpy()
    requests = _Requests(rows, starts[:-1], query_lens, seq_lens, skipped, seq_lens - skipped)
    computing = (seq_lens > 0) & (query_lens > 0)
    if not computing.all():
        requests = requests.only(computing.nonzero()[0])
    return [_make_group(members, metadata, spec, dtype) for members in _partition(requests, spec)]


def _first_visible(positions: np.ndarray, spec: AttentionSpec) -> np.ndarray:
    """Return the first key that each query sees."""
    window = spec.sliding_window
    if window is None:
        return np.zeros_like(positions)
    return positions // window * window if spec.chunked else np.maximum(positions - window + 1, 0)


def _partition(requests: _Requests, spec: AttentionSpec) -> list[_Requests]:
    """Put requests of similar size together wherever padding costs less than one more group."""
    per_key = GATHER_COST * 2 * spec.num_kv_heads * spec.head_dim
    per_pair = PAIR_COST * spec.num_heads * spec.head_dim
    query_lens, spans = requests.query_lens, requests.spans
    if not len(spans):
        return []
    padding = int(spans.max() - spans.min()) * (per_key + int(query_lens[0]) * per_pair)
    if padding <= GROUP_COST and (query_lens == query_lens[0]).all():  # most steps: all together
        return [requests]

    def cost(count: int, query_len: int, span: int) -> float:
        return GROUP_COST + count * span * (per_key + query_len * per_pair)

    groups: list[list[int]] = []
    widest = longest = 0
    sizes = zip(query_lens.tolist(), spans.tolist(), range(len(spans)), strict=True)
    for query_len, span, index in sorted(sizes, reverse=True):
        if groups:
            if query_len == widest and span == longest:  # alike: surely together
                groups[-1].append(index)
                continue
            count, padded = len(groups[-1]), max(longest, span)
            apart = cost(count, widest, longest) + cost(1, query_len, span)
            if cost(count + 1, widest, padded) <= apart:
                groups[-1].append(index)
                longest = padded
                continue
        groups.append([index])
        widest, longest = query_len, span
    return [requests.only(np.array(sorted(group))) for group in groups]


def _make_group(members: _Requests, metadata: AttentionMetadata, spec: AttentionSpec, dtype: torch.dtype) -> _Group:
    block_size, window = spec.block_size, spec.sliding_window
    size = len(members.rows)
    queries = int(members.query_lens.max())
    num_blocks = -(-int(members.spans.max()) // block_size)
    block_table = metadata.block_tables[spec.group]
    table, device = block_table.cpu().numpy(), block_table.device
    rows, start, query_len, seq_len, skipped, _ = (column[:, None] for column in members)
    # not beyond a request's last block: table entries there may be stale, and no blocks of this cache group
    columns = np.minimum(skipped // block_size + np.arange(num_blocks), (seq_len - 1) // block_size)
    block_ids = table[rows, columns].ravel().astype(np.int64)
    one_run = block_ids[-1] - block_ids[0] == block_ids.size - 1 and bool((np.diff(block_ids) == 1).all())
    blocks = slice(int(block_ids[0]), int(block_ids[-1]) + 1) if one_run else torch.from_numpy(block_ids).to(device)

    tokens = None
    offset = np.minimum(np.arange(queries), query_len - 1)
    at = start + offset  # [B, Q]
    first = int(at[0, 0])
    if int(at[-1, -1]) - first != at.size - 1 or (query_len != queries).any():
        tokens = torch.from_numpy(at.ravel().astype(np.int64)).to(device)
    plain = not spec.sinks and spec.soft_cap is None and (window is None or window >= queries)
    if size == 1 and queries > 1 and int(seq_len[0, 0]) == queries and plain:
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
