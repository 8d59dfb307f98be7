"""Launches a kernel in a fraction of the host time that Triton takes, if it was launched with like arguments before.

`launch` remembers which compiled kernel serves arguments of which types and alignments. A `Recording` goes further: it
repeats all launches of a call for other tensors, by exchanging their addresses. Knows nothing of what kernels compute.
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
"""all that a kernel was compiled for -> the compiled kernel, and its constants"""
_OPEN = threading.local()
"""`launches`: the list that `recorded` gave out. Each thread has its own, since a start compiles on several"""


def launch(kernel: Any, grid: Grid, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Run kernel[grid](*args, **keywords).

    `args`, of which the first is a tensor on the current device, come before what `keywords` names in the kernel's
    signature. Triton looks at each argument every time, and asks the driver about each pointer. Here the compiled
    kernel is found by the arguments' types, by the values of integers that Triton specializes on, by the alignment of
    tensors, and on AMD's GPUs by whether 31 bits address their memory.
    """
    parameters = getattr(kernel, "params", None)
    if parameters is None:  # the interpreter, which compiles nothing
        kernel[grid](*args, **keywords)
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
    launches = getattr(_OPEN, "launches", None)
    if launches is not None:
        launches.append(Launch(compiled[grid], args, [*given, *constants]))


class Launch(NamedTuple):
    """Describes a launch of a compiled kernel."""

    run: Callable[..., None]
    args: tuple[Any, ...]
    """as they were given to `launch`, which keeps their memory alive"""
    given: list[Any]
    """what `run` takes: addresses in place of tensors, then constants"""


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Give a list to which this thread's launches are added until the context ends; interpreted ones are not."""
    _OPEN.launches = []
    try:
        yield _OPEN.launches
    finally:
        _OPEN.launches = None


class Moved(NamedTuple):
    """Names an argument that lies in one of the call's own tensors."""

    place: int
    """among the arguments"""
    which: int
    """of the call's tensors"""
    offset: int
    """bytes from the tensor's beginning"""


@dataclass(frozen=True)
class Recording:
    """Repeats the launches of a call for other tensors that differ from the call's own in nothing but their addresses.
    Whatever else the call's kernels read or wrote, like its temporary memory, is used again and kept alive for that.
    The call's own tensors are not kept."""

    launches: list[tuple[Callable[..., None], list[Any], list[Moved]]]
    """(takes the arguments; those given last; which of them move)"""
    alignment: list[int]
    device: int
    kept: list[Any]
    """the arguments that do not move"""

    @staticmethod
    def of(made: list[Launch], tensors: Sequence[Tensor | None]) -> Recording | None:
        """Record a call that was given `tensors` and made these launches; None if it cannot be repeated. It cannot if
        nothing was launched, or if one of the tensors was not read where it lies but from a copy."""
        begins, launches, kept = _addresses(tensors), [], []
        for run, args, given in made:
            found = [_moved(place, arg, tensors, begins) for place, arg in enumerate(args)]
            moved = [one for one in found if one is not None]
            if any(one.offset and type(given[one.place]) is not int for one in moved):
                return None  # a descriptor that begins inside a tensor
            kept += [arg for arg, one in zip(args, found, strict=True) if one is None]
            launches.append((run, given, moved))
        read = {one.which for _, _, moved in launches for one in moved}
        if not made or any(tensor is not None and which not in read for which, tensor in enumerate(tensors)):
            return None
        return Recording(launches, [begin % 16 for begin in begins], made[0].args[0].get_device(), kept)

    def again(self, tensors: Sequence[Tensor | None]) -> bool:
        """Repeat the launches for `tensors`, in the same order; False, without any launch, if they are not aligned
        like those before."""
        addresses = _addresses(tensors)
        if [address % 16 for address in addresses] != self.alignment:
            return False
        stream = triton.runtime.driver.active.get_current_stream(self.device)
        for run, given, moved in self.launches:
            for place, which, offset in moved:
                if type(given[place]) is int:
                    given[place] = addresses[which] + offset
                else:  # a descriptor
                    given[place] = replace(given[place], base=tensors[which])
            run(*given, stream=stream)
        return True


def _addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _moved(place: int, arg: Any, tensors: Sequence[Tensor | None], begins: list[int]) -> Moved | None:
    """Return which of the call's tensors an argument lies in; None if it lies in none of them."""
    used = getattr(arg, "base", arg)  # a descriptor's
    if isinstance(used, Tensor):
        address = used.data_ptr()
        for which, (tensor, begin) in enumerate(zip(tensors, begins, strict=True)):
            if tensor is not None and begin <= address < begin + tensor.nbytes:
                return Moved(place, which, address - begin)
    return None
