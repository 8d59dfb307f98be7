"""What Triton's interpreter needs to take no longer than it must: half as long as it would. `python -m
tests.kernels.interpreter SCRIPT ...` runs a script with it."""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from triton.runtime import interpreter


def quicken() -> None:
    """Leave out what is done again and again for nothing.

    Triton replaces what triton.language is made of at every launch and at every call of a function such as tl.sum, for
    which it looks through hundreds of names; what is replaced stays so here, as it may where nothing is compiled. It
    computes every sum and product of integers once more, in 64 bits, to find overflows that it does not tell of, since
    the options say no debugging. And it makes a table of numpy's types whenever it looks one up."""
    replace_names, look_up = interpreter._patch_lang, interpreter._get_np_dtype
    builder = interpreter.interpreter_builder
    known: dict[str, Any] = {}

    @functools.cache
    def once(function: Callable[..., Any]) -> SimpleNamespace:
        replace_names(function)
        return SimpleNamespace(restore=lambda: None)

    def numpy_type(kind: Any) -> Any:
        found = known.get(kind.name)
        if found is None:
            found = known[kind.name] = look_up(kind)
        return found

    interpreter._patch_lang, interpreter._get_np_dtype = once, numpy_type
    builder.options = replace(builder.options, sanitize_overflow=False)


if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = os.path.dirname(sys.argv[0])
    quicken()
    runpy.run_path(sys.argv[0], run_name="__main__")
