"""Moves a step's inputs and results: integers from the host, tokens from the permanent rows, samples back to both.

The kernels read and write the host's pinned memory themselves: a copy by the copy engine costs 3 us, and as much again
before and after it, several times what they take. Knows how a batch is laid out (query_start_loc), not who is in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels._triton import overlap, tl, triton, wait_for_inputs
from headrace.kernels.launch import launch


@triton.jit(do_not_specialize=["num_words"])
def _copy_words_kernel(destination_ptr, source_ptr, num_words, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = word < num_words
    words = tl.load(source_ptr + word, mask=inside, other=0)  # on its way while the step before ends
    wait_for_inputs(OVERLAP)
    tl.store(destination_ptr + word, words, mask=inside)


def copy_words(destination: Tensor, source: Tensor) -> None:
    """Copy `source` [n] int32, in the host's pinned memory, to `destination` [n] int32 on the device. The host must not
    change `source` until the stream has reached the copy. Nothing on the device may write to it, since it is read
    before the kernels in front have ended."""
    num_words = source.shape[0]
    if num_words:
        constants = dict(BLOCK=1024, num_warps=4, **overlap())
        launch(_copy_words_kernel, (-(-num_words // 1024), 1, 1), (destination, source, num_words), constants)


def copy_words_reference(destination: Tensor, source: Tensor) -> None:
    destination.copy_(source, non_blocking=True)


@triton.jit(do_not_specialize=["num_words"])
def _scatter_words_kernel(table_ptr, index_ptr, values_ptr, num_words, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = word < num_words
    index = tl.load(index_ptr + word, mask=inside, other=0)  # on their way while the step before ends
    values = tl.load(values_ptr + word, mask=inside, other=0)
    wait_for_inputs(OVERLAP)
    tl.store(table_ptr + index, values, mask=inside)


def scatter_words(table: Tensor, index: Tensor, values: Tensor) -> None:
    """Do table.view(-1)[index] = values, for a contiguous int32 table on the device. index [n] int64, without
    repetitions, and values [n] int32 are in the host's pinned memory, as in `copy_words`."""
    num_words = index.shape[0]
    if num_words:
        constants = dict(BLOCK=512, num_warps=4, **overlap())
        launch(_scatter_words_kernel, (-(-num_words // 512), 1, 1), (table, index, values, num_words), constants)


def scatter_words_reference(table: Tensor, index: Tensor, values: Tensor) -> None:
    index, values = (tensor.to(table.device, non_blocking=True) for tensor in (index, values))
    table.view(-1)[index] = values


@triton.jit(do_not_specialize=["num_reqs", "num_samples"])
def _settle_lengths_kernel(
    num_computed_ptr,
    seq_lens_ptr,
    rows_ptr,
    positions_ptr,
    sample_rows_ptr,
    offsets_ptr,
    num_known_ptr,
    num_reqs,
    num_samples,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_reqs
    row = tl.load(rows_ptr + index, mask=inside, other=0)
    known = tl.load(num_known_ptr + row, mask=inside, other=0)
    bound = tl.load(num_computed_ptr + index, mask=inside, other=0)
    computed = tl.minimum(bound, tl.maximum(known - 1, 0))
    seq_len = tl.load(seq_lens_ptr + index, mask=inside, other=0)
    tl.store(num_computed_ptr + index, computed, mask=inside)
    tl.store(seq_lens_ptr + index, seq_len - (bound - computed), mask=inside)
    inside = index < num_samples
    row = tl.load(sample_rows_ptr + index, mask=inside, other=0)
    known = tl.load(num_known_ptr + row, mask=inside, other=0).to(tl.int64)
    offset = tl.load(offsets_ptr + index, mask=inside, other=0)
    position = tl.load(positions_ptr + index, mask=inside, other=0)
    tl.store(positions_ptr + index, tl.minimum(position, known + offset), mask=inside)


def settle_lengths(
    num_computed: Tensor,
    seq_lens: Tensor,
    rows: Tensor,
    positions: Tensor,
    sample_rows: Tensor,
    offsets: Tensor,
    num_known: Tensor,
) -> None:
    """Correct the lengths of a batch, in place, which the host made before it knew how many drafts were accepted.

    The host gave upper bounds, as if all had been: `num_computed` and `seq_lens` [num_reqs] int32 of the requests in
    `rows` int32, and the `positions` [num_samples] int64 of the samples in `sample_rows`, `offsets` behind the first
    one of their request. num_known [max_rows] int32: the tokens known in each row. Exact numbers stay as they are.
    """
    num_reqs, num_samples = rows.shape[0], sample_rows.shape[0]
    arguments = (
        num_computed, seq_lens, rows, positions, sample_rows, offsets, num_known, num_reqs, num_samples,
    )  # fmt: skip
    constants = {"BLOCK": 128, "num_warps": 4}  # no overlap(): later kernels read lengths before they wait
    launch(_settle_lengths_kernel, (-(-max(num_reqs, num_samples) // 128), 1, 1), arguments, constants)


def settle_lengths_reference(
    num_computed: Tensor,
    seq_lens: Tensor,
    rows: Tensor,
    positions: Tensor,
    sample_rows: Tensor,
    offsets: Tensor,
    num_known: Tensor,
) -> None:
    computed = torch.minimum(num_computed, (num_known[rows.long()] - 1).clamp_(min=0))
    seq_lens -= num_computed - computed
    num_computed.copy_(computed)
    positions.copy_(torch.minimum(positions, num_known[sample_rows] + offsets))


@triton.jit(do_not_specialize=["token_table_stride", "num_samples", "none_allowed", "not_finite", "rejected"])
def _commit_tokens_kernel(
    token_table_ptr,
    out_ptr,
    token_ids_ptr,
    best_ptr,
    raw_best_ptr,
    rows_ptr,
    positions_ptr,
    num_known_ptr,
    offsets_ptr,
    token_table_stride,
    num_samples,
    none_allowed,
    not_finite,
    rejected,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Commit; a lane is a sample. With drafts, the lane of a request's first sample does the work for all of them."""
    wait_for_inputs(OVERLAP)
    sample = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = sample < num_samples
    if num_known_ptr is not None:
        inside = inside & (tl.load(offsets_ptr + sample, mask=inside, other=1) == 0)
    row = tl.load(rows_ptr + sample, mask=inside, other=0)
    position = tl.load(positions_ptr + sample, mask=inside, other=0)
    row_ptr = token_table_ptr + row * token_table_stride + position
    counts = inside
    num_counted = tl.zeros([BLOCK], tl.int32)
    for offset in tl.static_range(MOST):
        own = inside
        if offset:
            behind = (sample + offset < num_samples) & inside
            own = tl.load(offsets_ptr + sample + offset, mask=behind, other=-1) == offset
            counts = counts & own
        token = tl.load(token_ids_ptr + sample + offset, mask=own, other=0)
        best = tl.load(best_ptr + sample + offset, mask=own, other=0.0).to(tl.float32)
        raw_best = tl.load(raw_best_ptr + sample + offset, mask=own, other=0.0).to(tl.float32)
        shown = tl.where(best > float("-inf"), token, none_allowed)
        shown = tl.where(tl.abs(raw_best) < float("inf"), shown, not_finite)  # false for NaN
        if num_known_ptr is not None:
            draft = tl.load(row_ptr + offset, mask=own, other=0)
            num_counted += counts.to(tl.int32)
            tl.store(out_ptr + sample + offset, tl.where(counts, shown, rejected), mask=own)
            tl.store(row_ptr + offset, token.to(tl.int32), mask=counts)
            counts = counts & (shown == draft)
        else:
            tl.store(row_ptr, token.to(tl.int32), mask=inside)
            tl.store(out_ptr + sample, shown, mask=inside)
    if num_known_ptr is not None:
        tl.store(num_known_ptr + row, position.to(tl.int32) + num_counted, mask=inside)


def commit_tokens(
    out: Tensor,
    token_table: Tensor,
    token_ids: Tensor,
    best: Tensor,
    raw_best: Tensor,
    rows: Tensor,
    positions: Tensor,
    none_allowed: int,
    not_finite: int,
    num_known: Tensor | None = None,
    offsets: Tensor | None = None,
    most: int = 1,
    rejected: int = 0,
) -> None:
    """Write sampled tokens to their rows, for the next step, and to `out`, for the host.

    out [n] int64 is on the device or in the host's pinned memory. It gets `not_finite` where the model's highest logit,
    `raw_best` [n], is NaN or infinite; else `none_allowed` where the highest logit that the sampling parameters left,
    `best` [n], is NaN or -inf. token_table [max_rows, max_model_len] int32; token_ids, rows, positions [n] int64.

    With drafts, `num_known` [max_rows] int32 is updated, offsets [n] int64 number each request's samples, at most
    `most` of them, and its drafts are in token_table where the samples would go. A sample counts only if all before it
    equal their drafts; the others are written nowhere, and `out` gets `rejected` for them.
    """
    num_samples = token_ids.shape[0]
    if num_samples:
        arguments = (
            token_table, out, token_ids, best, raw_best, rows, positions, num_known, offsets, token_table.stride(0),
            num_samples, none_allowed, not_finite, rejected,
        )  # fmt: skip
        constants = dict(MOST=most, BLOCK=128, num_warps=4, **overlap())
        launch(_commit_tokens_kernel, (-(-num_samples // 128), 1, 1), arguments, constants)


def commit_tokens_reference(
    out: Tensor,
    token_table: Tensor,
    token_ids: Tensor,
    best: Tensor,
    raw_best: Tensor,
    rows: Tensor,
    positions: Tensor,
    none_allowed: int,
    not_finite: int,
    num_known: Tensor | None = None,
    offsets: Tensor | None = None,
    most: int = 1,
    rejected: int = 0,
) -> None:
    shown = torch.where(best > float("-inf"), token_ids, none_allowed)
    shown = torch.where(raw_best.abs() < float("inf"), shown, not_finite)  # false for NaN
    if num_known is not None and offsets is not None:
        drafts = token_table[rows, positions]
        wrong = (shown != drafts).long()
        wrong_before = wrong.cumsum(0) - wrong
        first = torch.arange(len(rows), device=rows.device) - offsets
        counts = wrong_before == wrong_before[first]
        num_known.scatter_reduce_(0, rows, torch.where(counts, positions + 1, 0).int(), "amax", include_self=False)
        shown = torch.where(counts, shown, rejected)
        token_ids = torch.where(counts, token_ids, drafts)
    token_table[rows, positions] = token_ids.to(torch.int32)
    out.copy_(shown, non_blocking=True)


@triton.jit(do_not_specialize=["token_table_stride", "block_table_stride", "num_reqs", "num_tokens", "search_steps"])
def _prepare_batch_kernel(
    input_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    rows_ptr,
    num_computed_ptr,
    query_start_loc_ptr,
    token_table_ptr,
    block_table_ptr,
    token_table_stride,
    block_table_stride,
    num_reqs,
    num_tokens,
    search_steps,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.full([BLOCK], 1, tl.int32) * num_reqs
    for _ in range(search_steps):  # the last request that starts at or before the token
        middle = (low + high) // 2
        starts = tl.load(query_start_loc_ptr + middle, mask=inside, other=0)
        low = tl.where(starts <= token, middle, low)
        high = tl.where(starts <= token, high, middle)
    row = tl.load(rows_ptr + low, mask=inside, other=0).to(tl.int64)
    first = tl.load(query_start_loc_ptr + low, mask=inside, other=0)
    position = tl.load(num_computed_ptr + low, mask=inside, other=0) + token - first
    token_id = tl.load(token_table_ptr + row * token_table_stride + position, mask=inside, other=0)
    block = tl.load(block_table_ptr + row * block_table_stride + position // BLOCK_SIZE, mask=inside, other=0)
    slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(input_ids_ptr + token, token_id, mask=inside)
    tl.store(positions_ptr + token, position.to(tl.int64), mask=inside)
    tl.store(slot_mapping_ptr + token, slot, mask=inside)


def prepare_batch(
    rows: Tensor,
    num_computed: Tensor,
    query_start_loc: Tensor,
    token_table: Tensor,
    block_table: Tensor,
    block_size: int,
    num_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return input_ids [num_tokens] int32, positions [num_tokens] int64 and slot_mapping [num_tokens] int64.

    rows, num_computed [num_reqs] and query_start_loc [num_reqs + 1] are int32, as are the tables
    token_table [max_rows, max_model_len] and block_table [max_rows, max_blocks]. num_tokens == query_start_loc[-1].
    Requests at the end may have no tokens.
    """
    device = rows.device
    input_ids = torch.empty(num_tokens, dtype=torch.int32, device=device)
    positions = torch.empty(num_tokens, dtype=torch.int64, device=device)
    slot_mapping = torch.empty(num_tokens, dtype=torch.int64, device=device)
    num_reqs = rows.shape[0]
    if num_tokens:
        arguments = (
            input_ids, positions, slot_mapping, rows, num_computed, query_start_loc, token_table, block_table,
            token_table.stride(0), block_table.stride(0), num_reqs, num_tokens, num_reqs.bit_length(),
        )  # fmt: skip
        constants = dict(BLOCK_SIZE=block_size, BLOCK=128, num_warps=4, **overlap())
        launch(_prepare_batch_kernel, (-(-num_tokens // 128), 1, 1), arguments, constants)
    return input_ids, positions, slot_mapping


def prepare_batch_reference(
    rows: Tensor,
    num_computed: Tensor,
    query_start_loc: Tensor,
    token_table: Tensor,
    block_table: Tensor,
    block_size: int,
    num_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    if num_tokens == rows.shape[0] and int(query_start_loc[-2]) == num_tokens - 1:  # a token each
        positions = num_computed.long()
    else:
        counts = query_start_loc.diff()
        shift = num_computed - query_start_loc[:-1]
        packed = torch.stack((rows, shift)).repeat_interleave(counts, dim=1, output_size=num_tokens)
        rows = packed[0]
        positions = torch.arange(num_tokens, device=rows.device) + packed[1]
    rows = rows.long()
    column = positions // block_size
    shift = block_table[rows, column] - column  # from a token's block in its sequence to that in the cache
    return token_table[rows, positions], positions, positions.add(shift, alpha=block_size)
