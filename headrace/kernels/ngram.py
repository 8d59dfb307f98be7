"""Guesses the tokens that follow a sequence from what followed its last tokens before: the end of the sequence is
looked up in the sequence itself.

Prompt lookup decoding (Saxena 2023), over the whole context, without a model and without the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels._triton import overlap, tl, triton, wait_for_inputs
from headrace.kernels.launch import launch

PLACES = 1024
"""Places of a sequence that one program compares"""


@triton.jit(do_not_specialize=["token_table_stride", "most_known"])
def _find_matches_kernel(
    found_ptr,
    token_table_ptr,
    num_known_ptr,
    rows_ptr,
    token_table_stride,
    most_known,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    PLACES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the best of PLACES places for one row: its length in the upper 32 bits and where it ends in the lower."""
    wait_for_inputs(OVERLAP)
    row = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
    known = tl.minimum(tl.load(num_known_ptr + row), most_known)
    tokens_ptr = token_table_ptr + row * token_table_stride
    end = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    inside = end < known - 1
    length = tl.zeros([PLACES], tl.int64)
    alike = inside
    for back in tl.static_range(MOST):
        alike = alike & (end >= back)
        token = tl.load(tokens_ptr + end - back, mask=alike, other=-1)
        alike = alike & (token == tl.load(tokens_ptr + known - 1 - back, mask=known > back, other=-2))
        length += alike.to(tl.int64)
    score = tl.where(length >= LEAST, (length << 32) | (end + 1).to(tl.int64), 0)
    tl.store(found_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.max(score, axis=0))


@triton.jit(do_not_specialize=["token_table_stride", "most_known", "num_parts"])
def _copy_drafts_kernel(
    token_table_ptr,
    num_known_ptr,
    rows_ptr,
    found_ptr,
    token_table_stride,
    most_known,
    num_parts,
    NUM_DRAFTS: tl.constexpr,
    DRAFTS: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    part = tl.arange(0, PARTS)
    best = tl.max(tl.load(found_ptr + tl.program_id(0) * num_parts + part, mask=part < num_parts, other=0), axis=0)
    row = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
    known = tl.maximum(tl.minimum(tl.load(num_known_ptr + row), most_known), 1)
    begin = tl.where(best > 0, (best & 0xFFFFFFFF).to(tl.int32), known - 1)
    draft = tl.arange(0, DRAFTS)
    inside = draft < NUM_DRAFTS
    tokens_ptr = token_table_ptr + row * token_table_stride
    token = tl.load(tokens_ptr + begin + draft % (known - begin), mask=inside, other=0)
    tl.store(tokens_ptr + known + draft, token, mask=inside)


def propose_ngram(
    token_table: Tensor, num_known: Tensor, rows: Tensor, most_known: int, num_drafts: int, least: int, most: int
) -> None:
    """Write `num_drafts` tokens behind the known ones of each row in `rows` [R] int32.

    token_table [max_rows, width] int32 holds the tokens of each row, num_known [max_rows] int32 how many are known, at
    most `most_known`; width >= most_known + num_drafts. The last tokens of a row, `most` at most and `least` at least,
    are looked up before: the longest match counts, and of equally long ones the last. What followed it are the drafts,
    again and again if it reaches the end of the row. Where nothing matches the last token is repeated.
    """
    num_rows, parts = rows.shape[0], -(-most_known // PLACES)
    if not num_rows:
        return
    found = torch.empty((num_rows, parts), dtype=torch.int64, device=rows.device)
    shared = dict(num_warps=4, **overlap())
    looked_up = (found, token_table, num_known, rows, token_table.stride(0), most_known)
    constants = {"LEAST": least, "MOST": most, "PLACES": PLACES, **shared}
    launch(_find_matches_kernel, (num_rows, parts, 1), looked_up, constants)
    arguments = (token_table, num_known, rows, found, token_table.stride(0), most_known, parts)
    sizes = {"DRAFTS": triton.next_power_of_2(num_drafts), "PARTS": triton.next_power_of_2(parts)}
    launch(_copy_drafts_kernel, (num_rows, 1, 1), arguments, {"NUM_DRAFTS": num_drafts, **sizes, **shared})


def propose_ngram_reference(
    token_table: Tensor, num_known: Tensor, rows: Tensor, most_known: int, num_drafts: int, least: int, most: int
) -> None:
    rows = rows.long()
    known = num_known[rows].clamp(1, most_known).long()
    if rows.device.type == "cpu" and len(rows):  # where to look costs nothing
        most_known = int(known.max())
    tokens, ends = token_table[rows, :most_known], torch.arange(most_known, device=rows.device)
    alike = ends < known[:, None] - 1
    length = torch.zeros(alike.shape, dtype=torch.int64, device=rows.device)
    for back in range(most):
        last = tokens.gather(1, (known - 1 - back).clamp(min=0)[:, None])
        alike = alike & (ends >= back) & (tokens[:, (ends - back).clamp(min=0)] == last)
        length += alike
    best = torch.where(length >= least, length << 32 | ends + 1, 0).amax(1)
    begin = torch.where(best > 0, best & 0xFFFFFFFF, known - 1)
    drafts = torch.arange(num_drafts, device=rows.device)
    places = begin[:, None] + drafts % (known - begin)[:, None]
    token_table[rows[:, None], known[:, None] + drafts] = token_table[rows[:, None], places]
