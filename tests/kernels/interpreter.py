"""What Triton's interpreter needs to take no longer than it must: a fifth of what it would. `python -m
tests.kernels.interpreter SCRIPT ...` runs a script with it."""

from __future__ import annotations

import functools
import math
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton.language import core
from triton.runtime import interpreter


def quicken() -> None:
    """Leave out what is done again and again for nothing.

    Triton replaces what triton.language is made of at every launch and at every call of a function such as tl.sum, for
    which it looks through hundreds of names; what is replaced stays so here, as it may where nothing is compiled. It
    computes every sum and product of integers once more, in 64 bits, to find overflows that it does not tell of, since
    the options say no debugging. And it makes a table of numpy's types whenever it looks one up."""
    _know_types()
    replace_names, look_up = interpreter._patch_lang, interpreter._get_np_dtype
    builder = interpreter.interpreter_builder
    known: dict[str, Any] = {}

    @functools.cache
    def once(function: Callable[..., Any]) -> SimpleNamespace:
        replace_names(function)
        return SimpleNamespace(restore=lambda: None)

    def numpy_type(kind: Any) -> Any:
        name = kind.scalar.name
        found = known.get(name)
        if found is None:
            found = known[name] = look_up(kind)
        return found

    interpreter._patch_lang, interpreter._get_np_dtype = once, numpy_type
    builder.options = replace(builder.options, sanitize_overflow=False)


def _know_types() -> None:
    """Make what a type says of itself once for each type. Triton wraps and checks the sizes of a block anew for every
    number that a kernel computes, which takes far longer than numpy takes to compute it; and it compares them size by
    size to find that two blocks are of one shape."""
    semantic = type(interpreter.interpreter_semantic)
    make_block, make_shape_compatible = core.block_type.__init__, semantic.broadcast_impl_value
    blocks: dict[Any, dict[str, Any]] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        key = element_ty.name, sizes
        if key not in blocks:
            make_block(self, element_ty, list(sizes))
            blocks[key] = {**vars(self), "sizes": sizes}
        vars(self).update(blocks[key])

    @functools.cache
    def wrapped(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = wrapped(kind.sizes if kind.is_block() else ())

    def spread(self: Any, scalar: Any, like: Any) -> Any:
        handle = scalar.handle
        data = np.empty(like.sizes, handle.data.dtype)
        data.fill(handle.data.item())
        return core.tensor(interpreter.TensorHandle(data, handle.dtype), like.with_element_ty(scalar.dtype))

    def broadcast(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        blocks = left.type.is_block(), right.type.is_block()
        if blocks == (True, False):
            return left, spread(self, right, left.type)
        if blocks == (False, True):
            return spread(self, left, right.type), right
        if blocks == (False, False) or left.type.sizes == right.type.sizes:
            return left, right
        return make_shape_compatible(self, left, right)

    core.block_type.__init__, core.tensor.__init__ = block, tensor
    core.block_type.to_ir = lambda self, builder: self
    interpreter.TensorHandle.__post_init__ = lambda self: None
    semantic.broadcast_impl_value = broadcast
    semantic.computation_type_impl = functools.cache(semantic.computation_type_impl)


if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = os.path.dirname(sys.argv[0])
    quicken()
    runpy.run_path(sys.argv[0], run_name="__main__")
