"""Makes up caches full of numbers, and steps of requests that read them, for the checks at load."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.attention.metadata import AttentionMetadata
from headrace.attention.spec import AttentionSpec
from headrace.kernels.rotary import quantize_reference as quantize_cache
from headrace.runner.kernel_checks import Subject, cache_scale

LONGEST = 1000
"""Keys of a decode, enough for several parts"""


def longest_sequence(subject: Subject) -> int:
    """Return the length of the longest made-up sequence."""
    return min(LONGEST, subject.positions)


def filled_cache(
    subject: Subject, spec: AttentionSpec, counts: list[int], lengths: list[int]
) -> tuple[Tensor, AttentionMetadata]:
    """Return a layer's cache full of numbers, and a step of `counts` new tokens of requests that then have
    `lengths`."""
    size, device = subject.shape.block_size, subject.device
    needed = [max(1, -(-length // size)) for length in lengths]
    cache = subject.cache(spec, sum(needed) + 1)
    content = subject.inputs.random(*cache.shape)
    scale = cache_scale(subject)
    if scale is None:
        cache.copy_(content)
    else:
        cache.copy_(quantize_cache(content, scale[: len(cache)].view(-1, 1, 1, 1, 1), cache.dtype))
    table = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    free = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1)).int()
    for row, own in enumerate(free.split(needed)):
        table[row, : len(own)] = own
    positions, slots = [], []
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        for position in range(length - count, length):
            positions.append(max(0, position))
            slots.append(int(table[row, position // size]) * size + position % size if length else -1)
    ends = torch.tensor(counts).cumsum(0).tolist()
    num_groups = spec.group + 1
    return cache, AttentionMetadata(
        rows=torch.arange(len(lengths), dtype=torch.int32, device=device),
        query_start_loc=subject.inputs.ints(0, *ends),
        seq_lens=subject.inputs.ints(*lengths),
        positions=subject.inputs.ints(*positions, dtype=torch.int64),
        slot_mappings=(subject.inputs.ints(*slots, dtype=torch.int64),) * num_groups,
        block_tables=(table.to(device),) * num_groups,
        num_reqs=len(counts),
        num_tokens=sum(counts),
        max_query_len=max(counts),
        max_seq_len=max(lengths),
        num_decodes=sum(count == 1 for count in counts),
    )
