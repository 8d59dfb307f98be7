"""Defines `TiledWeight`: a linear's weight of 4 or 8 bits, in the order in which the matrix units take it.

A CodedWeight (coded.py) is in the order of its rows. Here the codes that a thread multiplies lie together: it loads
16 bytes at once and widens them in place, and nothing passes between threads. The order within a tile is that of the
left operand of NVIDIA's `wgmma.m64nNk16` and `mma.m16n8k16` (PTX ISA, "Register Fragments"): the same for both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from headrace.kernels.coded import E2M1, CodedWeight, Values

ROWS = 64
"""outputs of a tile"""
BLOCK = 128
"""inputs of a block: codes, scales and zeros of a tile's block are loaded together"""
MOST_BLOCKS = 4
"""that a kernel takes at once"""
LANES = 1024
"""words of 16 bits of a chunk: ROWS outputs times 64 inputs of 4 bits or 32 of 8"""
LARGEST_GROUP = 1 << 30
"""stands for the inputs that share a scale where all of an output do"""
Scales = Literal["none", "float16", "bfloat16", "e8m0", "e5m3"]
"""How a group's scale is held. e8m0: 2 ** (byte - 253), so that the byte is the exponent of a bfloat16 that also undoes
the smallness of codes of e2m1 (tiled_codes.py). e5m3: a byte whose upper five bits are an exponent less 22 and
whose lower three are a mantissa that follows a 1, without a sign."""


@dataclass(frozen=True, eq=False)
class TiledWeight:
    """Holds a weight [out, in] or, with one more dimension in front, those of experts.

    Its value at (row, column) is value(code) * scale of the group * the row's factor.
    """

    codes: Tensor
    """[..., tiles, blocks, chunks, LANES] int16"""
    words: Tensor | None
    """[..., tiles, blocks or 1, words, ROWS] int32: for each output the block's scales, then its zeros, byte by byte"""
    factors: Tensor | None
    """[..., out] fp32; None: 1"""
    arrived: Tensor
    """[programs] int32 zeros: how many of the programs that share a tile are done; kernels leave zeros behind"""
    bits: int
    values: Values
    """what codes stand for; of integers the zero is 2 ** (bits - 1) where there are no zeros"""
    group_size: int
    """inputs that share a scale: 16, 32, 64, a multiple of BLOCK, or LARGEST_GROUP"""
    scales: Scales
    zeros: bool
    out_features: int
    in_features: int
    gated: bool
    """a tile holds 32 rows of the weight's first half, then 32 of its second"""
    order: Tensor | None = None
    """as a CodedWeight has it"""

    @property
    def num_bytes(self) -> int:
        """Return the bytes that it holds on the device."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def words_step(self) -> int:
        """Return 1 if each block has words of its own, 0 if all share them."""
        return int(self.words is not None and self.words.shape[-3] > 1)

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by the names of their fields."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def expert(self, index: int) -> TiledWeight:
        """Return one expert's weight [out, in], a view; kernels do not take it, who read beyond a weight's end."""
        own: dict[str, Any] = {name: one[index] for name, one in self.tensors().items() if name != "arrived"}
        return replace(self, **own)

    def clone(self) -> TiledWeight:
        """Return the same weight in memory of its own."""
        changes: dict[str, Any] = {name: _with_tail(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **changes)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [..., out, in] in `dtype`, computed in fp32, its columns in the checkpoint's order."""
        if self.codes.dim() > 4:
            return torch.stack([self.expert(index).dequantize(dtype) for index in range(len(self.codes))])
        codes = _untiled(self.codes, self.bits, self.values)
        scale, zero = self._of_columns()
        if self.values == "e2m1":
            values = torch.tensor(E2M1, device=codes.device)[codes.int()]
        elif self.values == "e4m3":
            values = codes.view(torch.float8_e4m3fn).float()
        else:
            values = codes.float() - zero
        rows = _places(self.out_features, self.gated, codes.device)
        values, scale = values[rows, : self.in_features], scale[rows, : self.in_features]
        wide = (values * (scale if self.factors is None else scale * self.factors[:, None])).to(dtype)
        return wide if self.order is None else torch.empty_like(wide).index_copy_(-1, self.order, wide)

    def _of_columns(self) -> tuple[Tensor, Tensor]:
        """Return (scales, zeros) of every column # [tiles * ROWS, blocks * BLOCK]."""
        shape, device = (len(self.codes) * ROWS, self.codes.shape[1] * BLOCK), self.codes.device
        scale, zero = torch.ones(shape, device=device), torch.full(shape, float(1 << (self.bits - 1)), device=device)
        if self.words is None:
            return scale, zero
        blocks = self.codes.shape[1]
        by_row = self.words.permute(0, 3, 1, 2).flatten(0, 1)  # [tiles * ROWS, blocks or 1, words]
        held = by_row.flatten().view(torch.uint8).view(*by_row.shape[:2], -1).expand(-1, blocks, -1)
        runs = runs_of(self.group_size)
        width = BYTES[self.scales] * runs
        spread: Any = lambda of_runs: of_runs.flatten(1).repeat_interleave(BLOCK // runs, 1)  # noqa: E731
        if width:
            scale = spread(_floats(held[..., :width], self.scales))
        if self.zeros:
            zero = spread(held[..., width : width + runs].float())
        return scale, zero


BYTES: dict[Scales, int] = {"none": 0, "float16": 2, "bfloat16": 2, "e8m0": 1, "e5m3": 1}


def runs_of(group_size: int) -> int:
    """Return how many groups a block meets."""
    return BLOCK // min(group_size, BLOCK)


def why_not_tiled(weight: CodedWeight) -> str:
    """Say why `tile` cannot take a weight; nothing if it can."""
    size = weight.group_size
    if weight.values == "e4m3" and weight.scales.dtype == torch.uint8:
        return "values of e4m3 have scales of e8m0"
    if weight.scales.shape[-1] > 1 and BLOCK % size and size % BLOCK:
        return f"groups of {size} inputs neither divide {BLOCK} nor are multiples of it"
    return ""


def tile(weight: CodedWeight, dtype: torch.dtype, gated: bool = False) -> TiledWeight:
    """Return the weight for activations of `dtype`. `gated`: outputs are
    multiplied pairwise, those of the first half with those of the second."""
    if weight.codes.dim() > 2:
        count = len(weight.codes)
        return tile_experts((weight.expert(index) for index in range(count)), count, dtype, gated)
    n, k = weight.codes.shape
    one_group = weight.scales.shape[-1] == 1 and weight.values != "e2m1"
    places = _places(n, gated, weight.codes.device)
    rows = int(places.max()) + 1
    rows += -rows % ROWS
    blocks = -(-k // BLOCK)
    group = LARGEST_GROUP if one_group else weight.group_size
    runs = runs_of(group)
    scales, held, factors = _held_scales(weight, dtype, one_group)
    parts = [] if scales is None else [scales.view(torch.uint8).unflatten(-1, (-1, BYTES[held]))]
    if weight.zeros is not None:
        parts.append(weight.zeros[..., None])
    words: Tensor | None = None
    if parts:
        of_blocks = 1 if one_group else blocks
        columns = torch.arange(of_blocks * runs, device=places.device) * min(group, BLOCK) // group
        columns.clamp_(max=parts[0].shape[1] - 1)
        spread = [part[:, columns].unflatten(1, (of_blocks, runs)).flatten(2) for part in parts]
        together = torch.cat(spread, -1)
        spare = -together.shape[-1] % 4
        together = torch.nn.functional.pad(together, (0, spare))
        by_place = together.new_zeros((rows, *together.shape[1:]))
        by_place[places] = together
        words = by_place.view(torch.int32).unflatten(0, (-1, ROWS)).permute(0, 2, 3, 1)
        words = _with_tail(words)
    codes = _with_tail(_tiled(weight, places, rows, blocks))
    arrived = torch.zeros(len(codes) * 8, dtype=torch.int32, device=codes.device)
    return TiledWeight(
        codes, words, factors, arrived, weight.bits, weight.values, group, held,
        weight.zeros is not None, n, k, gated, weight.order,
    )  # fmt: skip


def tile_experts(weights: Iterable[CodedWeight], count: int, dtype: torch.dtype, gated: bool = False) -> TiledWeight:
    """Return the same of `count` experts, which come one at a time so that no more codes are held one a byte."""
    stacked = dict[str, Any]()
    for index, weight in enumerate(weights):
        one = tile(weight, dtype, gated)
        for name, tensor in one.tensors().items():
            if not index:
                stacked[name] = _with_room(tensor, count)
            stacked[name][index] = tensor
    stacked["arrived"] = stacked["arrived"].flatten()
    return replace(one, **stacked)


def _with_room(tensor: Tensor, count: int) -> Tensor:
    """Return zeros for so many like it; behind them as many as `_with_tail` has."""
    size = count * tensor.numel()
    tail = MOST_BLOCKS * tensor[0, 0].numel() if tensor.dim() > 1 else 0
    return tensor.new_zeros(size + tail)[:size].view(count, *tensor.shape)


def _with_tail(tensor: Tensor) -> Tensor:
    """Return the same with zeros behind it in memory: kernels that take several blocks at once read beyond the last."""
    size = tensor.numel()
    memory = tensor.new_zeros(size + (MOST_BLOCKS * tensor[0, 0].numel() if tensor.dim() > 1 else 0))
    memory[:size] = tensor.reshape(-1)
    return memory[:size].view(tensor.shape)


def _places(n: int, gated: bool, device: torch.device) -> Tensor:
    """Return where tiles hold each of n rows."""
    row = torch.arange(n, device=device)
    if not gated:
        return row
    half, within = n // 2, row % (n // 2)
    return within // (ROWS // 2) * ROWS + within % (ROWS // 2) + (row >= half) * (ROWS // 2)


def _tiled(weight: CodedWeight, places: Tensor, rows: int, blocks: int) -> Tensor:
    """Return the codes in their order # [tiles, blocks, chunks, LANES] int16."""
    plain, inputs = weight.codes, weight.codes.shape[1]
    if weight.values == "e2m1" and weight.scales.dtype != torch.uint8 and bool((weight.scales.float() == 0).any()):
        empty = (weight.scales.float() == 0).repeat_interleave(weight.group_size, 1)[:, :inputs]
        plain = plain.masked_fill(empty, 0)  # e5m3 has no 0
    padded = plain.new_zeros((rows, blocks * BLOCK))
    padded[places, :inputs] = plain
    per_word = 16 // weight.bits
    # row: tile, warp, 8 rows or the next 8, row of these; column: block, chunk, code of a word, 8 columns or the next
    # 8, pair of columns, column of these
    apart = padded.view(-1, 4, 2, 8, blocks, BLOCK // (16 * per_word), per_word, 2, 4, 2)
    apart = apart.permute(0, 4, 5, 1, 3, 8, 7, 2, 9, 6)
    if weight.bits == 4:
        apart = apart[..., 0::2] | apart[..., 1::2] << 4
    words = apart.contiguous().view(torch.int16).view(rows // ROWS, blocks, -1, LANES)
    return _ready(words) if weight.values == "e2m1" else words


def _ready(words: Tensor) -> Tensor:
    """Return words of four codes of e2m1, each code's bits apart as in a bfloat16, 15 for the sign and 8 to 6: the
    first's are there, the second's 3 bits lower, the third's 6. The fourth has what is left: 14 for the sign, then 13,
    10 and 11."""
    a, b, c, d = (words >> (4 * place) & 15 for place in range(4))
    first = (a & 7) << 6 | (b & 7) << 3 | c & 7
    signs = (a & 8) << 12 | (b & 8) << 9 | (c & 8) << 6
    return first | signs | (d & 13) << 11 | (d & 2) << 9


def _unready(words: Tensor) -> Tensor:
    """Return what `_ready` took."""
    a, b, c = ((words >> (6 - 3 * place)) & 7 | (words >> (12 - 3 * place)) & 8 for place in range(3))
    d = (words >> 11) & 13 | (words >> 9) & 2
    return a | b << 4 | c << 8 | d << 12


def _untiled(codes: Tensor, bits: int, values: Values) -> Tensor:
    """Return the codes one a byte # [tiles * ROWS, blocks * BLOCK] uint8, given what `_tiled` returned."""
    tiles, blocks = codes.shape[:2]
    codes = _unready(codes) if values == "e2m1" else codes
    apart = codes.view(torch.uint8).view(tiles, blocks, -1, 4, 8, 4, 2, 2, 2, 2)
    if bits == 4:
        apart = torch.stack((apart & 15, apart >> 4), -1).flatten(-2)
    # the inverse of the order there
    apart = apart.permute(0, 3, 7, 4, 1, 2, 9, 6, 5, 8)
    return apart.reshape(tiles * ROWS, blocks * BLOCK)


def _held_scales(
    weight: CodedWeight, dtype: torch.dtype, one_group: bool
) -> tuple[Tensor | None, Scales, Tensor | None]:
    """Return (scales [out, groups] as TiledWeight holds them, how that is, factors [out])."""
    if weight.scales.dtype == torch.uint8:
        return _e8m0(weight.scales, dtype, weight.factors)
    if weight.values == "e2m1":
        return _e5m3(weight.scales.float()), "e5m3", weight.factors
    if one_group:
        own = weight.scales[:, 0].float()
        return None, "none", own if weight.factors is None else own * weight.factors
    if weight.scales.dtype == torch.float16:
        return weight.scales, "float16", weight.factors
    if weight.scales.dtype == torch.bfloat16:
        return weight.scales, "bfloat16", weight.factors
    exponents = torch.frexp(weight.scales.float().abs().amax(1)).exponent
    held = torch.ldexp(weight.scales.float(), -exponents[:, None]).to(torch.float16)
    return held, "float16", _times(weight.factors, exponents)


def _times(factors: Tensor | None, exponents: Tensor) -> Tensor:
    """Return factors * 2 ** exponents in fp32; None: 1."""
    ones = torch.ones(exponents.shape, device=exponents.device)
    return torch.ldexp(ones if factors is None else factors, exponents)


def _e8m0(scales: Tensor, dtype: torch.dtype, factors: Tensor | None) -> tuple[Tensor, Scales, Tensor]:
    """Return a row's largest as 2 ** 0, which no type of activations overflows, what is left in the row's factor."""
    largest = scales.amax(1).int()
    least = 125 if dtype == torch.bfloat16 else 224  # what the type holds as 0
    held = (scales.int() - largest[:, None] + 253).clamp_(min=least).to(torch.uint8)
    return held, "e8m0", _times(factors, largest - 127)


def _e5m3(scales: Tensor) -> Tensor:
    """Return numbers of e4m3 that are not negative as e5m3; 0 as the least of these."""
    mantissa, exponent = torch.frexp(scales)
    held = ((exponent - 1 + 22) << 3) + ((mantissa * 2 - 1) * 8).int()
    return held.masked_fill_(scales == 0, 0).to(torch.uint8)


def _floats(held: Tensor, scales: Scales) -> Tensor:
    """Return scales in fp32, given the bytes that hold them."""
    if scales == "float16":
        return held.contiguous().view(torch.float16).float()
    if scales == "bfloat16":
        return held.contiguous().view(torch.bfloat16).float()
    bits = held.int()
    if scales == "e8m0":
        return torch.ldexp(torch.ones(bits.shape, device=bits.device), bits - 253)
    return torch.ldexp(1 + (bits & 7) / 8, (bits >> 3) - 22)
