"""What Triton's interpreter needs to take no longer than it must; `python -m tests.kernels.interpreter SCRIPT ...` runs
a script with it."""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from triton.runtime import interpreter


def replace_once() -> None:
    """Replace what triton.language is made of once a function. Triton does so at every launch and at every call of a
    function such as tl.sum, for which it looks through hundreds of names: much longer than the function itself takes.
    What is replaced stays so, as it may where nothing is compiled."""
    replace = interpreter._patch_lang

    @functools.cache
    def once(function: Callable[..., Any]) -> SimpleNamespace:
        replace(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = once


if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = os.path.dirname(sys.argv[0])
    replace_once()
    runpy.run_path(sys.argv[0], run_name="__main__")
