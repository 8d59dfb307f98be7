"""Inside a layer torch computes nothing but products, sums with the residual and views: all else is a kernel's, in
every family. Here kernels are their references, into which the count does not look; bench/h200.py counts on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import driver
import pytest
from h200_parts.format_numerics import watch
from tiny_configs import ALIKE, VARIANTS, save_tiny_model
from torch.utils._python_dispatch import _disable_current_modes

from headrace.attention.torch_sdpa import TorchSdpa
from headrace.kernels.table import REFERENCE_KERNELS
from headrace.models.registry import SERVED


def uncounted(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return function(*arguments, **options)

    return run


class Uncounted(TorchSdpa):
    forward, latent = uncounted(TorchSdpa.forward), uncounted(TorchSdpa.latent)


def computed_by_torch(architecture: str, folder: Path) -> Counter[str]:
    """What torch computes inside the layers of a family, in prompts and decodes."""
    save_tiny_model(architecture, next(iter(VARIANTS[architecture])), folder)
    made, seen = driver.Driver(folder), Counter[str]()
    watch(made.model, seen)
    made.greedy([[5], [17, 3, 99]], 2)
    return seen


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in SERVED]
)
def test_torch_computes_products_alone(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {field.name: uncounted(getattr(REFERENCE_KERNELS, field.name)) for field in fields(REFERENCE_KERNELS)}
    monkeypatch.setattr(driver, "select_kernels", lambda _: replace(REFERENCE_KERNELS, **kernels))
    monkeypatch.setattr(driver, "load_backend", lambda _: Uncounted())
    assert not computed_by_torch(architecture, tmp_path)


def test_the_count_sees_what_references_do(tmp_path: Path) -> None:
    seen = computed_by_torch("Qwen3NextForCausalLM", tmp_path)
    assert {"sigmoid", "mul", "rsqrt_", "cat"} <= set(seen)
