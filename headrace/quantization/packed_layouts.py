"""Reads weights of 2, 3, 4 and 8 bits in integers, and of 4 in floats, as AutoAWQ, GPTQ's tools (AutoRound's export
too), ModelOpt, Quark and compressed-tensors write them, and gpt-oss has them: most are packed into words.

They differ in names, in which way round a weight lies and along which side its codes are packed (spellings.py).
Codes are dense in their words: code i of a row has the bits from i * bits on, so that 3-bit codes cross words.
A rank reads the words that hold its codes, and cuts what it does not need after unpacking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.errors import CheckpointError, ConfigError
from headrace.kernels.coded import CodedWeight
from headrace.quantization.scheme import E8M0, FLOATS, LinearSpec, Part, Slot, Weights, noted_type, store_scales
from headrace.quantization.smoothing import NAME as SMOOTHING
from headrace.quantization.smoothing import empty_smoothing, smoothed, smoothing_slot, why_not_common
from headrace.quantization.spellings import INTERLEAVED, Axis, Spelling, unpack_words
from headrace.quantization.unquantized import bias_slot, empty_bias

Zeros = Literal["stored", "stored minus one", "perhaps", "none"]
"""Whether a checkpoint has zero points; perhaps: they are all 8 where it has none"""
MIDDLES = -0x77777778
"""a word of 4-bit zeros that are all 8"""
DUMMY_REACH = 2e-3
"""the largest dummy weight"""
DUMMY_FACTOR = 2.0**-12
"""factor of dummy weights, whose scales are 1"""
LEAST_GROUP = 16
"""inputs that kernels read at once, of which groups must be multiples"""
UNKNOWN = -1
"""group of a column where a checkpoint names none: groups are then neighbouring columns"""


@dataclass(frozen=True)
class Loaded:
    """Holds a part's weight on this rank, unpacked, perhaps with experts in front."""

    codes: Tensor
    """[..., out, in] uint8"""
    scales: Tensor
    """[..., out, groups] fp32, or as stored if they have 8 bits"""
    zeros: Tensor | None
    """[..., out, groups] uint8; None: the middle of the codes' range"""
    groups: Tensor | None
    """[..., in] int64: the group of each column; None: they are in order, and all but the last are whole"""
    dtype: torch.dtype
    """to which tools round the weight: that of float scales in the checkpoint"""
    factor: Tensor | None
    """[..., 1] fp32: the checkpoint's"""


class CodedLayout:
    """Keeps the checkpoint's words until a linear is repacked, each part's tensors by themselves: `0.qweight`, ..."""

    def __init__(
        self, spelling: Spelling, bits: int, group_size: int, zeros: Zeros = "none", act_order: bool = False
    ) -> None:
        """Take group_size 0 for one group an output; `act_order`: columns may be in groups that are not neighbours."""
        self.spelling, self.bits, self.group_size = spelling, bits, group_size
        self.zeros, self.act_order = zeros, act_order
        self.kept_bits = 8 if bits == 8 else 4
        self.stored_bits = spelling.stored_bits or bits
        self.shift = (1 << self.kept_bits - 1) - (1 << bits - 1)
        """what is added to codes of fewer bits, so that the middle of their range is that of the kept ones"""

    def create_weights(self, spec: LinearSpec, device: torch.device, experts: tuple[int, ...] = ()) -> Weights:
        weights = empty_bias(spec, device, experts)
        if self.spelling.narrow_scales is None:
            weights["scale_types"] = torch.zeros(*experts, len(spec.parts), dtype=torch.uint8, device=device)
        for index, part in enumerate(spec.parts):
            for name, slot in self._slots_of(part):
                held = (cut.stop - cut.start for cut in slot.source)
                weights[f"{index}.{name}"] = made = torch.empty(*experts, *held, dtype=slot.dtype, device=device)
                if slot.optional:
                    made.fill_(UNKNOWN if name == self.spelling.groups else MIDDLES)
        if self.spelling.smoothed:
            weights["smoothing"] = empty_smoothing(spec, device, experts)
        return weights

    def slots(self, spec: LinearSpec, weights: Weights) -> Iterator[tuple[Part, str, Slot]]:
        for index, part in enumerate(spec.parts):
            for name, slot in self._slots_of(part):
                held = weights[f"{index}.{name}"]
                store = partial(store_scales, held, weights["scale_types"][index]) if slot.as_stored else None
                yield part, name, replace(slot, destination=held, store=store)
            if self.spelling.groups and not self.group_size:  # all zeros
                types = ("I32", "I64")
                yield part, self.spelling.groups, Slot(part.shape[1:], (part.columns,), None, True, stored=types)
            if self.spelling.shape:
                check = partial(_check_shape, part.shape, self.spelling.shape)
                yield part, self.spelling.shape, _checked_slot(2, check, torch.int64, ("I64", "I32"))
            if self.spelling.smoothed:
                yield part, SMOOTHING, smoothing_slot(part, index, weights)
            for name in self.spelling.unused:
                yield part, name, Slot((1,), (slice(0, 1),), None, True, stored=(*FLOATS, "I8", "I32"))
            yield from bias_slot(spec, part, weights)
            if self.spelling.spare_bias and not spec.bias:
                yield part, "bias", _checked_slot(part.shape[0], _check_zeros, torch.float32, FLOATS)

    def why_widened(self, spec: LinearSpec, weights: Weights) -> str:
        """Say why kernels cannot read the weights of a linear or of experts: groups are small, or an order of inputs is
        not one for the whole linear, or leaves groups in pieces; "" if they can."""
        if self.group_size % LEAST_GROUP:
            return f"kernels read {LEAST_GROUP} inputs at once, and groups are of {self.group_size}"
        if why := why_not_common(weights):
            return why
        order = self._common_order([self._columns(index, part, weights) for index, part in enumerate(spec.parts)])
        return order if isinstance(order, str) else ""

    def coded(self, spec: LinearSpec, weights: Weights) -> CodedWeight:
        """Return the weight of a linear as `tile` takes it, without bias and `smoothing`. There must be no reason why
        it is widened."""
        parts = [self._unpack(index, part, weights) for index, part in enumerate(spec.parts)]
        order, rows = self._common_order([part.groups for part in parts]), spec.out_features
        codes, narrow = _stacked([part.codes for part in parts], rows), self.spelling.narrow_scales
        if narrow is None:
            scales = _stacked([part.scales for part in parts], rows).to(noted_type(weights["scale_types"]))
        else:
            scales = _stacked([part.scales.view(torch.uint8) for part in parts], rows).view(narrow)
        zeros = None
        if parts[0].zeros is not None:
            middle = 1 << self.kept_bits - 1
            zeros = _stacked([part.zeros for part in parts if part.zeros is not None], rows, middle)
            zeros = None if bool((zeros == middle).all()) else zeros
        factors = [one for part in parts if (one := self._factors(part)) is not None]
        ordered = order if isinstance(order, Tensor) else None
        return CodedWeight(
            codes if ordered is None else codes[:, ordered],
            scales,
            zeros,
            _stacked([one[..., None] for one in factors], rows)[..., 0] if factors else None,
            bits=self.kept_bits,
            values=self.spelling.values,
            group_size=self._size(scales, codes),
            order=ordered,
        )

    def dequantize(self, spec: LinearSpec, weights: Weights) -> Weights:
        parts = [self._unpack(index, part, weights) for index, part in enumerate(spec.parts)]
        if self.spelling.smoothed:
            wide = _stacked([self._widened(part).float() for part in parts], spec.out_features)
            plain: Weights = {"weight": smoothed(spec, weights, wide)}
        else:
            plain = {"weight": _stacked([self._widened(part).to(spec.dtype) for part in parts], spec.out_features)}
        return {**plain, "bias": weights["bias"]} if "bias" in weights else plain

    def _slots_of(self, part: Part) -> Iterator[tuple[str, Slot]]:
        """Yield the names of a part's tensors that are kept, and their slots without memory. Raises ConfigError if
        groups or words do not fit its shape or this rank's slice."""
        words = self.spelling
        yield words.codes, self._plane(part, "in", words.packed)
        yield words.scales, self._plane(part, "groups")
        if self.zeros != "none":
            yield words.zeros, replace(self._plane(part, "groups", "out"), optional=self.zeros == "perhaps")
        if words.factor:
            dummy = DUMMY_FACTOR ** (-1 if words.divides else 1)
            one, shapes = (slice(0, 1),), ((), (1, 1))
            yield words.factor, Slot((1,), one, None, dtype=torch.float32, shapes=shapes, dummy=dummy, is_scale=True)
        if words.groups and self.group_size:
            types = ("I32", "I64")
            yield words.groups, Slot(part.shape[1:], (part.columns,), None, True, dtype=torch.int32, stored=types)

    def _plane(self, part: Part, columns: Axis, packed: Axis | None = None) -> Slot:
        """Return the slot of a tensor of outputs and `columns`, packed along one of them; None: scales."""
        sides = []
        for axis in ("out", columns):
            size, held = {
                "out": (part.shape[0], part.rows),
                "in": (part.shape[1], part.columns),
                "groups": self._groups(part),
            }[axis]
            sides.append(self._words(part, axis, size, held) if axis == packed else (size, held))
        shape, source = zip(*(reversed(sides) if self.spelling.transposed else sides), strict=True)
        if packed is None and self.spelling.flat_scales:
            shape, source = shape[:1], source[:1]
        if packed is None and (narrow := self.spelling.narrow_scales):
            e8m0 = narrow == torch.uint8
            return Slot(
                shape, source, None, dtype=narrow, stored=E8M0 if e8m0 else ("F8_E4M3",), e8m0=e8m0,
                dummy=None if e8m0 else 1.0, is_scale=True,
            )  # fmt: skip
        if packed is None:
            dummy = DUMMY_REACH / (1 << self.bits)
            return Slot(shape, source, None, dtype=torch.float32, dummy=dummy, as_stored=True)
        if self.spelling.by_group:
            (count, groups), words = self._groups(part), shape[1] // self._groups(part)[0]
            shape, source = (shape[0], count, words), (source[0], groups, slice(0, words))
        return Slot(shape, source, None, dtype=self.spelling.word, stored=self.spelling.types)

    def _groups(self, part: Part) -> tuple[int, slice]:
        """Return the number of groups of an output, and which of them this rank's columns are in. With act-order, they
        may be in any."""
        size, (start, stop) = self.group_size or part.shape[1], (part.columns.start, part.columns.stop)
        if self.spelling.values != "integer" and part.shape[1] % size:
            name = "the linear" if part.name is None else part.name
            raise ConfigError(f"{name} has {part.shape[1]} inputs in groups of {size}; accepted: a multiple of {size}")
        whole = -(-part.shape[1] // size)
        if whole == 1 or self.act_order:
            return whole, slice(0, whole)
        for edge in (start, stop):
            if edge % size and edge != part.shape[1]:
                raise ConfigError(
                    f"groups of {size} inputs do not divide the inputs [{start}, {stop}) that a rank holds of "
                    f"{part.shape[1]}; accepted: a tensor_parallel_size whose slices begin with a group"
                )
        return whole, slice(start // size, -(-stop // size))

    def _words(self, part: Part, axis: str, size: int, held: slice) -> tuple[int, slice]:
        """Return how many words hold `size` codes, and which of them hold those of `held`."""
        codes, words = self._unit
        if size % codes and words > 1:
            raise ConfigError(f"{size} {axis}puts are packed in {self.bits} bits; accepted: multiples of {codes}")
        return -(-size // codes) * words, slice(held.start // codes * words, -(-held.stop // codes) * words)

    @property
    def _unit(self) -> tuple[int, int]:
        """The fewest codes that fill whole words, and these words."""
        word = self._word
        return (word // self.stored_bits, 1) if word % self.stored_bits == 0 else (word, self.stored_bits)

    @property
    def _word(self) -> int:
        """The bits of a word."""
        return self.spelling.word.itemsize * 8

    def _unpack(self, index: int, part: Part, weights: Weights) -> Loaded:
        """Return what `weights` hold of a part."""
        spelling = self.spelling
        dtype = torch.bfloat16 if spelling.rounds else torch.float32
        if spelling.narrow_scales is None:
            dtype = noted_type(weights["scale_types"][..., index])

        def plane(name: str) -> Tensor:
            held = weights[f"{index}.{name}"]
            return held.transpose(-1, -2) if spelling.transposed else held

        codes, scales, zeros = plane(spelling.codes), plane(spelling.scales), None
        codes = codes.flatten(-2) if spelling.by_group else codes
        scales = scales[..., None] if spelling.flat_scales else scales
        if spelling.packed == "in":
            codes = self._codes(spelling.codes, codes, part.columns)
        else:
            codes = self._codes(spelling.codes, codes.transpose(-1, -2), part.rows).transpose(-1, -2)
        if self.zeros != "none":
            words = plane(spelling.zeros).transpose(-1, -2)
            minus_one = self.zeros == "stored minus one"
            zeros = self._codes(spelling.zeros, words, part.rows, minus_one).transpose(-1, -2)
        groups = self._columns(index, part, weights)
        if groups is None and scales.shape[-1] > 1:
            mine = self._neighbours(part)
            scales, zeros = scales[..., mine], None if zeros is None else zeros[..., mine]
        factor = weights[f"{index}.{spelling.factor}"] if spelling.factor else None
        return Loaded(codes, scales, zeros, groups, dtype, factor)

    def _neighbours(self, part: Part) -> slice:
        """Return which of the groups that are held are those of this rank's columns, where groups are neighbours."""
        size, start = self.group_size or part.shape[1], self._groups(part)[1].start
        return slice(part.columns.start // size - start, -(-part.columns.stop // size) - start)

    def _columns(self, index: int, part: Part, weights: Weights) -> Tensor | None:
        """Return the group of each column among those that are held # [..., in]; None: groups are neighbours."""
        name = self.spelling.groups
        if f"{index}.{name}" not in weights:
            return None
        held, groups = self._groups(part)[1], weights[f"{index}.{name}"].long()
        neighbours = torch.arange(part.columns.start, part.columns.stop, device=groups.device) // self.group_size
        groups = torch.where((groups == UNKNOWN).any(-1, keepdim=True), neighbours, groups)
        if bool((groups < held.start).any() | (groups >= held.stop).any()):
            raise CheckpointError(
                f"{name} names groups {int(groups.min())} to {int(groups.max())}; accepted here: {held.start} to "
                f"{held.stop - 1}, more only where config.json says act-order (desc_act)"
            )
        begins_with_group = part.columns.start % self.group_size == 0 or held.stop - held.start == 1
        return None if begins_with_group and bool((groups == neighbours).all()) else groups - held.start

    def _codes(self, name: str, words: Tensor, held: slice, plus_one: bool = False) -> Tensor:
        """Return the codes [..., n] of `held`, shifted to kept_bits, given the words that hold them in the tensor
        `name`; `plus_one`: one more than each."""
        per_unit, _ = self._unit
        words = words.clone(memory_format=torch.contiguous_format)  # also where a side of size 1 has another stride
        whole_words = self._word % self.stored_bits == 0
        if plus_one and whole_words:  # as GPTQ's tools do, so that a stored -1 is 0 again
            words = words + sum(1 << first for first in range(0, self._word, self.stored_bits))
        codes = unpack_words(words, self.stored_bits)
        if self.spelling.interleaved:
            codes = codes.unflatten(-1, (-1, 8))[..., INTERLEAVED].flatten(-2)
        codes = codes[..., held.start % per_unit :][..., : held.stop - held.start]
        if plus_one and not whole_words:
            codes = codes + 1 & (1 << self.bits) - 1
        if self.spelling.signed:
            codes = codes + (1 << self.bits - 1) & (1 << self.stored_bits) - 1
        if self.stored_bits > self.bits and bool((codes >> self.bits).any()):
            least = -(1 << self.bits - 1)
            raise CheckpointError(f"{name} holds numbers beyond {self.bits} bits; accepted: {least} to {-least - 1}")
        return codes + self.shift if self.shift else codes

    def _size(self, scales: Tensor, codes: Tensor) -> int:
        alone = scales.shape[-1] == 1 and self.spelling.values == "integer"
        return codes.shape[-1] if alone else self.group_size

    def _common_order(self, groups: list[Tensor | None]) -> Tensor | str | None:
        """Return the order of inputs in which groups are neighbours, in all parts; None: that of the checkpoint; or say
        why there is none. Parts with orders of their own would each need their own copy of the activations. Tools make
        one for all, since it follows from the activations."""
        some = next((one for one in groups if one is not None), None)
        if some is None:
            return None
        if some.dim() > 1:
            return "each expert has its inputs in an order of its own"
        columns = torch.arange(len(some), device=some.device) // self.group_size
        given = [columns if one is None else one for one in groups]
        order = given[0].argsort(stable=True)
        if any(not torch.equal(one.argsort(stable=True), order) for one in given[1:]):
            return "its parts have their inputs in different orders"
        if any(not torch.equal(one[order], columns) for one in given):
            return "its act-order leaves groups in pieces here"
        return order

    def _factors(self, part: Loaded) -> Tensor | None:
        """Return what each output is multiplied by besides # [..., out]."""
        if part.factor is None:
            return None
        factor = part.factor.reciprocal() if self.spelling.divides else part.factor
        return factor.expand(part.codes.shape[:-1])

    def _widened(self, part: Loaded) -> Tensor:
        """Return the weight in the type to which the formats' tools round it too."""
        scales, zeros, size = part.scales, part.zeros, self._size(part.scales, part.codes)
        if part.groups is not None:
            columns, size = part.groups[..., None, :], 1
            scales = scales.take_along_dim(columns, -1)
            zeros = None if zeros is None else zeros.take_along_dim(columns, -1)
        factors = self._factors(part)
        if part.factor is not None and self.spelling.rounds:  # a product with a reciprocal would be rounded twice
            scales, factors = scales.float() / part.factor[..., None], None
        bits, values = self.kept_bits, self.spelling.values
        held = CodedWeight(part.codes, scales, zeros, factors, bits=bits, values=values, group_size=size)
        return held.dequantize(part.dtype)


def _stacked(parts: list[Tensor], rows: int, fill: int = 0) -> Tensor:
    """Return the parts' rows one below the other, and below them rows of `fill`, up to `rows`."""
    stacked = torch.cat(parts, -2)
    return F.pad(stacked, (0, 0, 0, rows - stacked.shape[-2]), value=fill) if stacked.shape[-2] < rows else stacked


def _checked_slot(size: int, check: Callable[[Tensor], None], dtype: torch.dtype, stored: tuple[str, ...]) -> Slot:
    """Return the slot of `size` numbers that are only looked at."""
    return Slot((size,), (slice(0, size),), torch.empty(size, dtype=dtype), True, check, stored=stored)


def _check_shape(shape: tuple[int, ...], name: str, values: Tensor) -> None:
    if tuple(values.tolist()) != shape:
        raise CheckpointError(f"{name} is {values.tolist()}, config.json asks for {list(shape)}")


def _check_zeros(values: Tensor) -> None:
    if bool(values.any()):
        raise CheckpointError("a linear that has no bias in config.json is stored with one that is not zero")
