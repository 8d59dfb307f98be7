"""A kernel that lies is found at load, named and replaced; the tokens are right then. What is right stays."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace
from headrace import LLM, SamplingParams
from headrace.attention.torch_sdpa import TorchSdpa
from headrace.config import EngineConfig
from headrace.distributed.mesh import Group
from headrace.engine.async_engine import make_metrics
from headrace.engine.metrics import EngineMetrics
from headrace.errors import ConfigError
from headrace.kernels.decode import decode_attention_reference
from headrace.kernels.fp8 import Quantized
from headrace.kernels.table import REFERENCE_KERNELS, KernelTable
from headrace.layers.attention import Attention
from headrace.model_config import ModelConfig
from headrace.planner.decisions import decide_before_load
from headrace.runner import worker as worker_module
from headrace.runner.kernel_checks import KERNEL_CASES
from headrace.runner.self_check import Check, SelfCheck, relative_error, switches
from headrace.runner.worker import Worker

DEMO = Path(headrace.__file__).parent / "demo_model"
CPU = torch.device("cpu")
PROMPTS = ["Once upon a time, there was a little", "The big dog ran to the"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=12, ignore_eos=True),
]
FP8_KERNELS = {"rms_norm_quantized", "silu_and_mul_quantized", "quantize_per_token"}


def copied(name: str) -> Callable[..., Any]:
    """The reference by another function: what differs from it in nothing but identity."""
    reference = getattr(REFERENCE_KERNELS, name)
    return lambda *arguments, **options: reference(*arguments, **options)


def disturbed(value: Any, factor: float) -> Any:
    """Everything in it off by a factor; integers by one."""
    if isinstance(value, Quantized):
        return Quantized(value.values, value.scales * factor)
    if isinstance(value, tuple):
        return type(value)(disturbed(entry, factor) for entry in value)
    if not isinstance(value, Tensor):
        return value
    return value * factor if value.is_floating_point() else (value + 1).clamp(max=3)


def broken(name: str, factor: float = 1.05) -> Callable[..., Any]:
    kernel = copied(name)
    return lambda *arguments, **options: disturbed(kernel(*arguments, **options), factor)


def plant(monkeypatch: pytest.MonkeyPatch, **kernels: Callable[..., Any]) -> None:
    """All kernels are fast ones, `kernels` among them."""
    fast = {field.name: copied(field.name) for field in fields(KernelTable)}
    table = KernelTable(**{**fast, **kernels})
    monkeypatch.setattr(worker_module, "select_kernels", lambda _: table)


def loaded(**settings: Any) -> Worker:
    given = EngineConfig(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, **{"dtype": "float32", **settings}
    )
    model_config = ModelConfig.from_folder(DEMO)
    config, _ = decide_before_load(given, model_config, "cpu")
    worker = Worker(config, DEMO, model_config)
    worker.load()
    return worker


def tokens(**settings: Any) -> tuple[list[list[int]], LLM]:
    with LLM("demo", **{"dtype": "float32", **settings}) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)], llm


@pytest.fixture(scope="module")
def expected() -> dict[str | None, list[list[int]]]:
    """Tokens of the references, by quantization."""
    return {scheme: tokens(quantization=scheme)[0] for scheme in (None, "ptpc_fp8")}


def test_every_kernel_of_the_table_has_a_check() -> None:
    assert list(KERNEL_CASES) and {field.name for field in fields(KernelTable)} == set(KERNEL_CASES)


def test_references_alone_leave_nothing_to_check() -> None:
    worker = loaded()
    assert not worker.demoted
    assert not any("Self-check" in note for note in worker.notes)
    assert switches(worker.kernels) == {}


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}])
def test_kernels_that_agree_stay(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    worker = loaded(**settings)
    assert worker.demoted == []
    assert all(switch.call is switch.fast for switch in switches(worker.kernels).values())
    assert len([note for note in worker.notes if "Self-check" in note and "all agree" in note]) == 1


@pytest.mark.parametrize("name", sorted(set(KERNEL_CASES) - {"fused_moe", "fp8_linear"}))
def test_a_broken_kernel_is_demoted_and_it_alone(
    name: str, expected: dict[str | None, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = "ptpc_fp8" if name in FP8_KERNELS else None
    plant(monkeypatch, **{name: broken(name)})
    found, llm = tokens(quantization=scheme)
    facts = llm._client.facts.workers[0]
    assert facts.demoted == [name]
    said = [note for note in facts.notes if note.startswith(f"Self-check: {name} ")]
    assert len(said) == 1
    assert "disagrees with its reference" in said[0]
    assert "is replaced by it" in said[0]
    assert found == expected[scheme]
    assert f'headrace:kernel_demoted{{engine="0",kernel="{name}"' in llm.metrics.render().decode()
