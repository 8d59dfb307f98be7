"""Picks one token a row, of those that masks allow: greedily, or by Gumbel noise that depends on (seed, position,
token id) alone.

The noise comes from a counter-based hash in 32-bit integers, so that Triton and torch draw the same numbers, whatever
batch a request is in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels._triton import next_power_of_2, tl, triton
from headrace.kernels.launch import launch

GREEDY_BELOW = 1e-5
"""Rows with temperatures below this are greedy."""

# multipliers and shifts of a 32-bit finalizer with low bias (C. Wellons, hash-prospector)
_M1, _M2 = 0x7FEB352D, 0x846CA68B
_GOLDEN = 0x9E3779B9
_HIGHEST = 0xFFFFFF00
"""the largest hash whose fp32 value is below 2**32"""
_MASKED_AT_ONCE = 1 << 23
"""scores that the reference masks at once, which bounds its scratch memory"""


@triton.jit
def _mix(x):
    """Return a uint32 each of whose bits depends on all bits of the uint32 x."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _noise(key, other_key, token):
    """Return Gumbel noise, fp32, for uint32 token ids."""
    bits = _mix(_mix(token ^ key) + other_key)
    bits = tl.minimum(tl.maximum(bits, 1), 0xFFFFFF00)
    u = bits.to(tl.float32) * 2.3283064365386963e-10  # 2**-32, exact
    # -log(1 - u), by its series where 1 - u would round u's low bits away
    series = u * (1.0 + u * (0.5 + u * (0.3333333432674408 + u * 0.25)))
    waiting = tl.where(u < 0.015625, series, -tl.log(1.0 - u))
    return -tl.log(waiting)


@triton.jit
def _gumbel_kernel(
    best_ptr,
    index_ptr,
    logits_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    floor_ptr,
    logits_stride,
    vocab_size,
    num_blocks,
    GREEDY_BELOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the best score and its token id within one block of the vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    score = tl.load(logits_ptr + row * logits_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    if floor_ptr is not None:
        score = tl.where(score < tl.load(floor_ptr + row), float("-inf"), score)
    temperature = tl.load(temperature_ptr + row)
    if temperature >= GREEDY_BELOW:
        seed = tl.load(seeds_ptr + row)
        low = seed.to(tl.uint32)
        high = (seed >> 32).to(tl.uint32)
        position = tl.load(positions_ptr + row).to(tl.uint32)
        key = _mix(_mix(low + 0x9E3779B9) ^ position)
        other_key = _mix(high ^ key)
        score = score / temperature + _noise(key, other_key, token.to(tl.uint32))
    score = tl.where(inside, score, float("-inf"))
    best, index = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_ptr + row * num_blocks + block, best)
    tl.store(index_ptr + row * num_blocks + block, block * BLOCK + index)


@triton.jit
def _pick_kernel(out_ptr, best_ptr, index_ptr, num_blocks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    inside = block < num_blocks
    best = tl.load(best_ptr + row * num_blocks + block, mask=inside, other=float("-inf"))
    winner = tl.argmax(best, axis=0, tie_break_left=True)
    tl.store(out_ptr + row, tl.load(index_ptr + row * num_blocks + winner).to(tl.int64))


def gumbel_argmax(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, floor: Tensor | None = None
) -> Tensor:
    """Return argmax(logits / temperature + Gumbel(seed, position, token id)) of each row: token ids [n] int64.

    That is a draw from softmax(logits / temperature) (the Gumbel-max trick, arXiv 1611.01144). logits [n, V] (last dim
    contiguous), temperature [n] fp32, seeds and positions [n] int64, floor [n] fp32: logits below it are never drawn.
    Rows with a temperature below 1e-5 are greedy. Ties go to the lowest id.
    """
    rows, vocab_size = logits.shape
    device = logits.device
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if rows:
        block = 1024
        blocks = -(-vocab_size // block)
        best = torch.empty((rows, blocks), dtype=torch.float32, device=device)
        index = torch.empty((rows, blocks), dtype=torch.int32, device=device)
        _gumbel_kernel[(rows, blocks)](
            best, index, logits, temperature, seeds, positions, floor, logits.stride(0), vocab_size, blocks,
            GREEDY_BELOW=GREEDY_BELOW, BLOCK=block, num_warps=4,
        )  # fmt: skip
        _pick_kernel[(rows,)](out, best, index, blocks, BLOCK=1 << (blocks - 1).bit_length(), num_warps=1)
    return out


@triton.jit
def _best_kernel(best_ptr, index_ptr, scores_ptr, scores_stride, vocab_size, num_blocks, BLOCK: tl.constexpr):
    """Store the highest score and its token id within one block of the vocabulary; a NaN is higher than all."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    score = tl.load(scores_ptr + row * scores_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    ranked = tl.where(score == score, score, float("inf"))  # a NaN must win
    best, index = tl.max(ranked, axis=0, return_indices=True, return_indices_tie_break_left=True)
    nan = tl.max((score != score).to(tl.int32), axis=0)
    tl.store(best_ptr + row * num_blocks + block, tl.where(nan > 0, float("nan"), best))
    tl.store(index_ptr + row * num_blocks + block, block * BLOCK + index)


@triton.jit
def _pick_best_kernel(score_ptr, out_ptr, best_ptr, index_ptr, num_blocks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    inside = block < num_blocks
    best = tl.load(best_ptr + row * num_blocks + block, mask=inside, other=float("-inf"))
    ranked = tl.where(best == best, best, float("inf"))
    winner = tl.argmax(ranked, axis=0, tie_break_left=True)
    nan = tl.max((best != best).to(tl.int32), axis=0)
    highest = tl.where(nan > 0, float("nan"), tl.max(ranked, axis=0))
    tl.store(score_ptr + row, highest.to(score_ptr.dtype.element_ty))
    tl.store(out_ptr + row, tl.load(index_ptr + row * num_blocks + winner).to(tl.int64))


def best_token(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the highest score [n] of each row of scores [n, V], and its token id [n] int64; ties go to the lowest id.
    A row with a NaN has NaN for its highest score, and an id that means nothing."""
    rows, vocab_size = scores.shape
    score = torch.empty(rows, dtype=scores.dtype, device=scores.device)
    out = torch.empty(rows, dtype=torch.int64, device=scores.device)
    if rows:
        block = 2048
        blocks = -(-vocab_size // block)
        best = torch.empty((rows, blocks), dtype=torch.float32, device=scores.device)
        index = torch.empty((rows, blocks), dtype=torch.int32, device=scores.device)
        of_blocks = (best, index, scores, scores.stride(0), vocab_size, blocks)
        launch(_best_kernel, (rows, blocks, 1), of_blocks, {"BLOCK": block, "num_warps": 4})
        constants = {"BLOCK": next_power_of_2(blocks), "num_warps": 1}
        launch(_pick_best_kernel, (rows, 1, 1), (score, out, best, index, blocks), constants)
    return score, out


def best_token_reference(scores: Tensor) -> tuple[Tensor, Tensor]:
    if scores.device.type != "cpu":
        best, token_ids = scores.max(dim=1)
        return best, token_ids
    token_ids = torch.from_numpy(scores.float().numpy().argmax(axis=1))  # ten times as fast as torch's own
    return scores.gather(1, token_ids.unsqueeze(1)).squeeze(1), token_ids


@triton.jit
def _mask_kernel(
    scores_ptr, masks_ptr, lines_ptr, scores_stride, masks_stride, vocab_size, num_words, BLOCK: tl.constexpr
):
    """Forbid tokens within one block of the vocabulary. Only what is forbidden is written, and no score is read."""
    row = tl.program_id(0).to(tl.int64)
    line = tl.load(lines_ptr + row)
    if line >= 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        word = token // 32
        bits = tl.load(masks_ptr + line * masks_stride + word, mask=word < num_words, other=0)
        forbidden = ((bits >> (token % 32)) & 1) == 0
        never = tl.full((BLOCK,), float("-inf"), scores_ptr.dtype.element_ty)
        tl.store(scores_ptr + row * scores_stride + token, never, mask=forbidden & (token < vocab_size))


def mask_tokens(scores: Tensor, masks: Tensor, lines: Tensor) -> None:
    """Set scores [n, V] of forbidden tokens to -inf, in place; rows without a mask keep theirs bit for bit.

    masks [m, words] int32: bit t % 32 of word t // 32 allows token t, and tokens beyond a line are forbidden. lines [n]
    int64: each row's line of `masks`, or -1 where it has none.
    """
    rows, vocab_size = scores.shape
    if rows:
        block = 2048
        numbers = (scores.stride(0), masks.stride(0), vocab_size, masks.shape[1])
        constants = {"BLOCK": block, "num_warps": 4}
        launch(_mask_kernel, (rows, -(-vocab_size // block), 1), (scores, masks, lines, *numbers), constants)


def mask_tokens_reference(scores: Tensor, masks: Tensor, lines: Tensor) -> None:
    (rows, vocab_size), width = scores.shape, 32 * masks.shape[1]
    shifts = torch.arange(32, dtype=torch.int32, device=scores.device)
    step = max(1, _MASKED_AT_ONCE // vocab_size)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        masked = (lines[part] >= 0)[:, None]
        words = masks.index_select(0, lines[part].clamp(min=0))
        forbidden = ((words[:, :, None] >> shifts) & 1).view(words.shape[0], -1)[:, :vocab_size] == 0
        scores[part, :width].masked_fill_(forbidden & masked, float("-inf"))
        scores[part, width:].masked_fill_(masked, float("-inf"))


def _mix_reference(x: Tensor) -> Tensor:
    """Do what `_mix` does on int32 bit patterns: products wrap, a mask makes shifts logical."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _signed(_M1)
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _signed(_M2)
    return x ^ ((x >> 16) & 0xFFFF)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def hash_bits_reference(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return the hash that the noise is made of # [n, vocab_size] int64 in 0 .. 2**32 - 1."""
    low, high = seeds.to(torch.int32), (seeds >> 32).to(torch.int32)
    key = _mix_reference(_mix_reference(low + _signed(_GOLDEN)) ^ positions.to(torch.int32))
    other_key = _mix_reference(high ^ key)
    token = torch.arange(vocab_size, dtype=torch.int32, device=seeds.device)
    bits = _mix_reference(_mix_reference(token ^ key[:, None]) + other_key[:, None])
    return bits.long() & 0xFFFFFFFF


def gumbel_argmax_reference(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, floor: Tensor | None = None
) -> Tensor:
    if floor is not None:
        logits = logits.masked_fill(logits.float() < floor[:, None], float("-inf"))
    sampled = temperature >= GREEDY_BELOW
    if logits.device.type == "cpu" and not bool(sampled.any()):
        return logits.argmax(-1)
    u = hash_bits_reference(seeds, positions, logits.shape[1]).clamp_(1, _HIGHEST).float().mul_(2.0**-32)
    series = u * (1.0 + u * (0.5 + u * (1 / 3 + u * 0.25)))
    noise = torch.where(u < 0.015625, series, (1.0 - u).log_().neg_()).log_().neg_()
    column = sampled[:, None]
    scores = logits.float() / torch.where(sampled, temperature, 1.0)[:, None]
    return torch.where(column, scores + noise, scores).argmax(-1)
