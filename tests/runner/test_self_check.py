"""A kernel that lies is found at load, named and replaced; the tokens are right then. What is right stays."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_configs import save_tiny_model
from torch import Tensor

import headrace
from headrace import LLM, SamplingParams
from headrace.attention.torch_sdpa import TorchSdpa
from headrace.config import EngineConfig
from headrace.distributed.mesh import Group
from headrace.engine.metrics import EngineMetrics
from headrace.errors import ConfigError
from headrace.kernels.cases import relative_error
from headrace.kernels.decode import decode_attention_reference
from headrace.kernels.fp8 import Quantized
from headrace.kernels.table import REFERENCE_KERNELS, KernelTable
from headrace.model_config import ModelConfig
from headrace.planner.decisions import decide_before_load
from headrace.runner import worker as worker_module
from headrace.runner.kernel_checks import KERNEL_CASES
from headrace.runner.self_check import Check, SelfCheck, switches
from headrace.runner.worker import Worker

DEMO = Path(headrace.__file__).parent / "demo_model"
CPU = torch.device("cpu")
PROMPTS = ["Once upon a time, there was a little", "The big dog ran to the"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=12, ignore_eos=True),
]
ELSEWHERE = {
    "layer_norm": ("CohereForCausalLM", "qk-norm"),
    "qk_norm": ("CohereForCausalLM", "qk-norm"),
    "qk_squares": ("Olmo2ForCausalLM", "one-kv-head"),
    "add_up": ("Olmo2ForCausalLM", "one-kv-head"),
    "clip": ("OlmoForCausalLM", "clipped"),
    "scale": ("Gemma4ForCausalLM", "keys-are-values"),
    "fused_moe": ("MixtralForCausalLM", "full"),
    "latent_rotary_and_cache": ("DeepseekV2ForCausalLM", "queries-too"),
    **dict.fromkeys(("index_scores", "top_keys"), ("DeepseekV32ForCausalLM", "sparse-groups")),
    **dict.fromkeys(("gate_heads", "gated_delta_step", "gated_delta_scan"), ("Qwen3NextForCausalLM", "hybrid")),
}
"""kernel of which the demo model has none -> a tiny model that has it"""
FP8_KERNELS = {"rms_norm_quantized", "gate_and_mul_quantized", "quantize"}


def copied(name: str) -> Callable[..., Any]:
    """The reference by another function: what differs from it in nothing but identity."""
    reference = getattr(REFERENCE_KERNELS, name)
    return lambda *arguments, **options: reference(*arguments, **options)


def disturbed(value: Any, factor: float) -> Any:
    """Everything in it off by a factor; integers by one."""
    if isinstance(value, Quantized):
        return value._replace(scales=value.scales * factor)
    if isinstance(value, tuple):
        return type(value)(disturbed(entry, factor) for entry in value)
    if not isinstance(value, Tensor):
        return value
    return value * factor if value.is_floating_point() else (value + 1).clamp(max=3)


def broken(name: str, factor: float = 1.05) -> Callable[..., Any]:
    kernel = copied(name)

    def run(*arguments: Any, **options: Any) -> Any:
        value, written = kernel(*arguments, **options), options.get("out")
        if value is None:
            written = arguments[0]
        elif any(value is one for one in arguments):
            written = value
        if written is not None:
            written.copy_(disturbed(written, factor))
        return disturbed(value, factor)

    return run


def plant(monkeypatch: pytest.MonkeyPatch, **kernels: Callable[..., Any]) -> None:
    """All kernels are fast ones, `kernels` among them."""
    fast = {field.name: copied(field.name) for field in fields(KernelTable)}
    table = KernelTable(**{**fast, **kernels})
    monkeypatch.setattr(worker_module, "select_kernels", lambda _: table)


def loaded(folder: Path = DEMO, **settings: Any) -> Worker:
    given = EngineConfig(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, **{"dtype": "float32", **settings}
    )
    model_config = ModelConfig.from_folder(folder)
    config, _ = decide_before_load(given, model_config, "cpu")
    worker = Worker(config, folder, model_config)
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
    assert {field.name for field in fields(KernelTable)} == set(KERNEL_CASES)


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


BROKEN = [
    (name, ELSEWHERE.get(name)) for name in sorted(set(KERNEL_CASES) - {"fp8_linear", "narrow_linear", "widen_tiled"})
]
"""kernels with the tiny model that has them, None: the demo. Those left out are of products that no CPU has."""
OF_AN_INDEX = [(name, ELSEWHERE["index_scores"]) for name in ("rotary_and_cache", "layer_norm")]
"""which nothing else in the model uses"""


@pytest.mark.parametrize(("name", "model"), [*BROKEN, *OF_AN_INDEX], ids=str)
def test_a_broken_kernel_is_demoted_and_it_alone(
    name: str, model: tuple[str, str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own check, and without the long one of whole steps behind it."""
    monkeypatch.setattr(worker_module, "step_checks", lambda *_: [])
    folder = DEMO
    if model is not None:
        folder = tmp_path
        save_tiny_model(*model, folder)
    plant(monkeypatch, **{name: broken(name)})
    of_adapters = name.endswith("_adapters")
    worker = loaded(folder, quantization="ptpc_fp8" if name in FP8_KERNELS else None, enable_lora=of_adapters)
    assert worker.demoted == [name]
    said = [note for note in worker.notes if note.startswith(f"Self-check: {name} ")]
    assert len(said) == 1
    assert "disagrees with its reference" in said[0]
    assert "is replaced by it" in said[0]
    replaced = {one for one, switch in switches(worker.kernels).items() if switch.call is switch.reference}
    reads_its_angles = {"rotary_and_cache", "latent_rotary_and_cache"} if name == "step_angles" else set()
    assert replaced == {name} | reads_its_angles


@pytest.mark.parametrize("name", ["rotary_and_cache", "filter_floor", "rms_norm_quantized"])
def test_tokens_are_right_where_a_kernel_is_replaced(
    name: str, expected: dict[str | None, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = "ptpc_fp8" if name in FP8_KERNELS else None
    plant(monkeypatch, **{name: broken(name)})
    found, llm = tokens(quantization=scheme)
    assert llm._core.facts.workers[0].demoted == [name]
    assert found == expected[scheme]
    assert f'headrace:kernel_demoted{{engine="0",kernel="{name}"' in llm.metrics.render().decode()


class BrokenDecode(TorchSdpa):
    """A backend with a fused decode."""

    factor = 1.0

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        kv_cache: Tensor,
        metadata: Any,
        spec: Any,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        kv_scale: Tensor | None = None,
        out: Tensor | None = None,
        temperature: Tensor | None = None,
        q_weight: Tensor | None = None,
    ) -> Tensor:
        arguments = metadata.sequences(spec.group), spec.scale, spec.sliding_window
        found = decode_attention_reference(q, k, v, cos_sin, kv_cache, *arguments, q_norm, k_norm, eps, kv_scale)
        return found * self.factor if out is None else out.copy_(found * self.factor)


@pytest.mark.parametrize("factor", [1.0, 1.03, math.nan])
def test_a_fused_decode(
    factor: float, expected: dict[str | None, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = BrokenDecode()
    backend.factor = factor
    monkeypatch.setattr(worker_module, "load_backend", lambda _: backend)
    plant(monkeypatch, step_angles=lambda table, positions: (table, positions))  # as Triton's: the table itself
    monkeypatch.setitem(vars(REFERENCE_KERNELS), "step_angles", lambda table, positions: (table, positions))
    found, llm = tokens()
    assert found == expected[None]
    assert llm._core.facts.workers[0].demoted == ([] if factor == 1.0 else ["decode_attention"])


def test_a_backend_that_disagrees_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(TorchSdpa):
        name = "FAST"

        def forward(self, *arguments: Any, **options: Any) -> Tensor:
            return super().forward(*arguments, **options) * 1.05

    monkeypatch.setattr(worker_module, "load_backend", lambda _: Broken())
    with pytest.raises(ConfigError, match="attention backend FAST disagrees with its reference"):
        loaded()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_percent_is_too_much(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, rms_norm=broken("rms_norm", 1.01))
    worker = loaded(dtype=dtype)
    assert worker.demoted == ["rms_norm"]
    (said,) = [note for note in worker.notes if "rms_norm" in note]
    expected = r"1\.0e-02 > 2e-05" if dtype == "float32" else r"(9\.\de-03|1\.0e-02) > 4e-03"  # sums differ by machine
    assert re.search(rf"\(relative error {expected}\) and is replaced by it", said)


@pytest.mark.parametrize("name", ["gate_and_mul", "logsumexp"])
def test_what_is_no_number_or_cannot_run_is_demoted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **options: Any) -> Tensor:
        raise ValueError("no such instruction\nmore")

    plant(monkeypatch, **{name: broken(name, math.nan)})
    assert loaded().demoted == [name]
    plant(monkeypatch, **{name: refuses})
    worker = loaded()
    assert worker.demoted == [name]
    assert any(f"{name} cannot run (ValueError: no such instruction) and is" in note for note in worker.notes)


def test_several_at_once_and_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, rms_norm=broken("rms_norm"), best_token=broken("best_token"))
    with caplog.at_level(logging.DEBUG, "headrace"):
        _, llm = tokens()
    assert llm._core.facts.workers[0].demoted == ["rms_norm", "best_token"]
    assert "Self-check: best_token disagrees with its reference" in caplog.text
    assert "2 demoted" in caplog.text


def test_what_only_a_whole_step_shows_turns_every_kernel_to_its_reference(
    expected: dict[str | None, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    silu = copied("gate_and_mul")
    plant(
        monkeypatch,
        gate_and_mul=lambda x, *more, **options: silu(x, *more, **options) * (3.0 if x.shape[0] == 17 else 1.0),
    )
    found, llm = tokens()
    assert found == expected[None]
    facts = llm._core.facts.workers[0]
    assert facts.demoted == ["whole_step"]
    assert any("replaced by the references of all kernels" in note for note in facts.notes)


def test_no_memory_for_a_check_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> float:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        SelfCheck(Group(), CPU).run([Check("any", fails, 1.0, lambda: "it")])


def test_what_another_rank_found_is_demoted_here_too() -> None:
    asked: list[str] = []

    def check(name: str) -> Check:
        return Check(name, lambda: 0.0, 1e-3, lambda: asked.append(name) or "it")  # type: ignore[func-returns-value]

    theirs = iter([0.0, 0.5, math.inf])
    group = Group(0, 2, all_gather=lambda mine: torch.cat((mine, torch.tensor([[next(theirs)]])), dim=-1))
    found = SelfCheck(group, CPU)
    found.run([check("a"), check("b"), check("c")])
    assert found.demoted == asked == ["b", "c"]
    assert "(relative error inf > 1e-03)" in found.notes[2]


def test_relative_error() -> None:
    ones, nan, inf = torch.ones(2, 3), torch.full((2, 3), math.nan), torch.full((2, 3), math.inf)
    assert relative_error(ones, ones) == relative_error(nan, nan) == relative_error(inf, inf) == 0.0
    assert relative_error(ones * 1.01, ones) == pytest.approx(0.01, rel=1e-4)
    assert relative_error(nan, ones) == relative_error(ones, nan) == relative_error(inf, -inf) == math.inf
    assert relative_error(ones, ones[:1]) == relative_error(ones, ones.bfloat16()) == math.inf
    assert relative_error((ones, ones * 2), (ones, ones)) == pytest.approx(1.0)
    assert relative_error(torch.tensor([2**40 + 1]), torch.tensor([2**40])) > 0
    assert relative_error(torch.empty(0), torch.empty(0)) == 0.0
    assert relative_error(ones, ones * 0) > 1
    quantized = Quantized(ones, torch.full((2, 1), 2.0))
    assert relative_error(quantized, quantized._replace(scales=quantized.scales / 2)) == pytest.approx(1.0)


def test_metrics_count_none() -> None:
    shown = EngineMetrics("m", 100, {}).render().decode()
    assert 'headrace:kernels_demoted{engine="0",model_name="m"} 0.0' in shown
    assert "headrace:kernel_demoted{" not in shown


def test_threads_that_compile_have_a_context_before_their_first_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naming the device makes none in a thread whose device it is already, and cuBLAS warns where it comes first."""
    ready: set[int] = set()
    found: list[bool] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: ready.add(threading.get_ident()))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())

    def error() -> float:
        found.append(threading.get_ident() in ready)
        return 0.0

    SelfCheck(Group(), torch.device("cuda")).compile_ahead([Check("one", error, 1.0, str)] * 5)
    assert found == [True] * 5
