"""Launching a kernel whose like was launched before, in a fraction of the host's time that Triton takes for it.

Knows nothing of what kernels compute.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from headrace.kernels._triton import DEVICE_FAMILY, triton

Grid = tuple[int, int, int]

_LAUNCHED: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}
"""what was compiled, and its constants, by all that it was compiled for"""


def launch(kernel: Any, grid: Grid, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """kernel[grid](*args, **keywords). Triton looks at each argument every time, and asks the driver about each
    pointer; here the types of all tell, of integers that it compiles for their value, of tensors their alignment, and
    on AMD's GPUs whether 31 bits address their memory.

    `args`, of which the first is a tensor on the current device, come before what `keywords` names in the kernel's
    signature.
    """
    parameters = getattr(kernel, "params", None)
    if parameters is None:  # the interpreter, which compiles nothing
        kernel[grid](*args, **keywords)
        if _RECORDINGS.open:
            _RECORDINGS.open[-1].append(Made(None, grid, args, []))
        return
    key: list[Any] = [id(kernel), args[0].get_device(), *keywords.values()]
    given: list[Any] = []
    for arg, parameter in zip(args, parameters, strict=False):
        if isinstance(arg, Tensor):
            address = arg.data_ptr()
            key += arg.dtype, address % 16
            if DEVICE_FAMILY == "hip":
                key.append(arg.untyped_storage().size() < 2**31)
            given.append(address)
        else:
            key.append(arg if type(arg) is int and not parameter.do_not_specialize else type(arg))
            given.append(arg)
    known = _LAUNCHED.get(alike := tuple(key))
    if known is not None:
        compiled, constants = known
        compiled[grid](*given, *constants)
    else:
        compiled = kernel[grid](*args, **keywords)
        constants = [keywords[name] for name in kernel.arg_names[len(args) :]]
        _LAUNCHED[alike] = compiled, constants
    if _RECORDINGS.open:
        _RECORDINGS.open[-1].append(Made(compiled, grid, args, [*given, *constants]))


@dataclass(frozen=True)
class Made:
    """A launch."""

    compiled: Any
    """None: by the interpreter"""
    grid: Grid
    args: tuple[Any, ...]
    """as they came, which keeps the memory that `given` points to"""
    given: list[Any]
    """to the launcher: addresses in place of tensors, then constants"""


class _Recordings(threading.local):
    """A thread's own: a start compiles on several."""

    def __init__(self) -> None:
        self.open: list[list[Made]] = []
        """of the calls that are being recorded, the innermost last"""


_RECORDINGS = _Recordings()


@contextmanager
def recorded() -> Iterator[list[Made]]:
    """What is launched inside."""
    made: list[Made] = []
    _RECORDINGS.open.append(made)
    try:
        yield made
    finally:
        _RECORDINGS.open.pop()


class Move(NamedTuple):
    """An argument that lies in one of a call's own tensors."""

    place: int
    """among the arguments"""
    which: int
    """of the call's tensors"""
    offset: int
    """bytes from its beginning"""


@dataclass(frozen=True)
class Recording:
    """What one call launched, to be launched again for other tensors that are alike in all but where they lie. What
    else it used it uses again, and what it took for itself is kept for that; its own tensors are not."""

    launches: list[tuple[Callable[..., None], list[Any], list[Move]]]
    """(takes the arguments; those given last; what of them moves)"""
    alignment: list[int]
    device: int
    kept: list[Any]
    """what the arguments that stay as they are point to"""

    @staticmethod
    def of(made: list[Made], tensors: Sequence[Tensor | None]) -> Recording | None:
        """Of a call that was given `tensors` of its own and launched `made`. None: it cannot be repeated, as it was
        interpreted, or as one of the tensors was not read where it lies but somewhere else, where it had been put."""
        if not made or any(one.compiled is None for one in made):
            return None
        begins = _addresses(tensors)
        launches, kept = [], []
        for one in made:
            found = [_move(place, arg, tensors, begins) for place, arg in enumerate(one.args)]
            moves = [move for move in found if move is not None]
            kept += [arg for arg, move in zip(one.args, found, strict=True) if move is None]
            launches.append((one.compiled[one.grid], one.given, moves))
        if any(move.offset and type(given[move.place]) is not int for _, given, moves in launches for move in moves):
            return None  # a descriptor that begins inside a tensor
        moved = {move.which for _, _, moves in launches for move in moves}
        if any(tensor is not None and which not in moved for which, tensor in enumerate(tensors)):
            return None
        return Recording(launches, [begin % 16 for begin in begins], made[0].args[0].get_device(), kept)

    def again(self, tensors: Sequence[Tensor | None]) -> bool:
        """For `tensors` in the same order. False: they are aligned otherwise, and nothing was launched."""
        addresses = _addresses(tensors)
        if [address % 16 for address in addresses] != self.alignment:
            return False
        stream = triton.runtime.driver.active.get_current_stream(self.device)
        for run, given, moves in self.launches:
            for place, which, offset in moves:
                if type(given[place]) is int:
                    given[place] = addresses[which] + offset
                else:  # a descriptor
                    given[place] = replace(given[place], base=tensors[which])
            run(*given, stream=stream)
        return True


def _addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _move(place: int, arg: Any, tensors: Sequence[Tensor | None], begins: list[int]) -> Move | None:
    used = getattr(arg, "base", arg)  # a descriptor's
    if isinstance(used, Tensor):
        address = used.data_ptr()
        for which, (tensor, begin) in enumerate(zip(tensors, begins, strict=True)):
            if tensor is not None and begin <= address < begin + tensor.nbytes:
                return Move(place, which, address - begin)
    return None
