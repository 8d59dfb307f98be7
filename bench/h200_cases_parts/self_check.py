"""The self-check at load: all agree on a model as it is, and what lies is found, demoted, and served without.

Faults are planted one a start. Of experts' models these are parts of their own, since their kernels take long to
compile where a machine has never had them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from h200_parts.models import LLAMA_8B, QWEN3_30B_A3B, TOY, TOY_EXPERTS

import headrace.models.loader as loader
import headrace.quantization.gpu_linear as gpu_linear
import headrace.runner.worker as worker
from h200_cases_parts.report import Report
from headrace import LLM, SamplingParams
from headrace.attention.triton_attn import TritonAttention
from headrace.kernels.table import TRITON_KERNELS
from headrace.runner.cuda_graph import StepGraphs
from headrace.runner.self_check import Check, SelfCheck

PROMPTS = [[(31 * i + 7 * j) % 500 + 5 for j in range(20 + 9 * i)] for i in range(6)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SMALL_WEIGHTS, TELLING_WEIGHTS = 1e-3, 0.02
Demoted = Callable[[list[str]], bool]


class Starts:
    """Engines that start, serve a little and end."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.right: dict[str, list[list[int]]] = {}
        self.closest = ""

    def start(self, model: str, **knobs: Any) -> tuple[list[str], list[str], list[list[int]]]:
        """(what was demoted, what the log says of it, tokens)"""
        place: dict[str, Any] = {"gpu_memory_utilization": 0.5}
        if self.report.smoke:
            place = {"device": "cpu", "cpu_threads": 1, "cpu_kv_cache_gib": 0.1}
        dummy = {} if model == "demo" else {"load_format": "dummy"}
        limits = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 256}
        with (
            watched() as worst,
            LLM(model, dtype="bfloat16", skip_tokenizer_init=True, **limits, **place, **dummy, **knobs) as llm,
        ):
            self.closest = worst()
            facts = llm._client.facts.workers[0]
            tokens: list[list[int]] = []
            for _ in range(3):  # sizes come up, are captured, are replayed
                outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
                tokens = [list(output.outputs[0].token_ids) for output in outputs]
        notes = [note for note in facts.notes if "elf-check" in note or "graphs are off" in note]
        return facts.demoted, notes, tokens

    def agree(self, name: str, model: str, **knobs: Any) -> None:
        loader.DUMMY_RANGE = SMALL_WEIGHTS
        demoted, notes, _ = self.start(model, **knobs)
        title = ", ".join([name, *(f"{knob} {value}" for knob, value in knobs.items())])
        checked = bool(notes) or self.report.smoke  # on a CPU there is nothing to check
        self.report.case(f"{title} agrees", checked and not demoted, f"{' '.join(notes)} {self.closest}")

    def planted(
        self, title: str, expected: Demoted, model: str, place: Any, attribute: str, value: Any, **knobs: Any
    ) -> None:
        """A fault in place of `place.attribute`."""
        loader.DUMMY_RANGE = TELLING_WEIGHTS
        key = f"{model} {knobs}"
        if key not in self.right:
            self.right[key] = self.start(model, **knobs)[2]
        with patch.object(place, attribute, value):
            demoted, notes, tokens = self.start(model, **knobs)
        pairs = [
            a == b for x, y in zip(tokens, self.right[key], strict=True) for a, b in zip(x, y, strict=True)
        ]  # may differ where the reference rounds otherwise
        self.report.case(
            title, expected(demoted), f"demoted {demoted}, {sum(pairs) / len(pairs):.0%} of tokens as ever"
        )
        for note in notes:
            self.report.note(note)


@contextmanager
def watched() -> Iterator[Callable[[], str]]:
    """Gives what says which check came closest to its bound, and which took longest."""
    attempt = SelfCheck._attempt
    seen: list[tuple[float, float, str]] = []

    def timed(self: SelfCheck, check: Check) -> tuple[float, str]:
        began = time.perf_counter()
        found = attempt(self, check)
        share = found[0] / check.bound if check.bound else math.inf if found[0] else 0.0  # some must be exact
        seen.append((share, time.perf_counter() - began, check.name))
        return found

    def worst() -> str:
        if not seen:
            return ""
        close, slow = max(seen), max(seen, key=lambda one: one[1])
        return f"Closest: {close[2]} at {close[0]:.0%} of its bound; longest: {slow[2]}, {1000 * slow[1]:.0f} ms."

    with patch.object(SelfCheck, "_attempt", timed):
        yield worst


def kernels(**changed: Any) -> Callable[[str], Any]:
    """In place of select_kernels."""
    return lambda _: replace(TRITON_KERNELS, **changed)


def scaled(name: str, factor: float) -> Any:
    """A kernel whose results are `factor` times what they should be."""
    kernel = getattr(TRITON_KERNELS, name)

    def wrong(*arguments: Any, **options: Any) -> Any:
        out = kernel(*arguments, **options)
        if isinstance(out, tuple):
            return tuple(x * factor if x.is_floating_point() else x for x in out)
        return out * factor

    return wrong


def only(name: str) -> Demoted:
    return lambda demoted: demoted == [name]


def self_check_cases(report: Report) -> None:
    starts = Starts(report)
    big = report.model("8b4l", LLAMA_8B | {"num_hidden_layers": 4} | (TOY if report.smoke else {}))
    for name, model in (("demo", "demo"), ("8B of 4 layers", big)):
        for knobs in ({}, {"quantization": "fp8"}, {"quantization": "ptpc_fp8"}, {"kv_cache_dtype": "fp8"}):
            starts.agree(name, model, **knobs)
    if not report.smoke:
        plant_kernels(starts, big)
        plant_linears(starts, big)
        plant_graphs(starts, big)


def self_check_moe_cases(report: Report) -> None:
    starts = Starts(report)
    toy = TOY | TOY_EXPERTS if report.smoke else {}
    moe = report.model("30b4l", QWEN3_30B_A3B | {"num_hidden_layers": 4} | toy)
    for knobs in ({}, {"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}):
        starts.agree("30B-A3B of 4 layers", moe, **knobs)
    if not report.smoke:
        wrong = kernels(fused_moe=scaled("fused_moe", 1.05))
        starts.planted("fused_moe x 1.05", only("fused_moe"), moe, worker, "select_kernels", wrong)


def plant_kernels(starts: Starts, big: str) -> None:
    factors = {"rms_norm": 1.01, "silu_and_mul": math.nan, "rotary_and_cache": 1.02, "logsumexp": 1.01}
    for name, factor in factors.items():
        wrong = kernels(**{name: scaled(name, factor)})
        starts.planted(f"{name} x {factor}", only(name), "demo", worker, "select_kernels", wrong)

    def one_late(*arguments: Any) -> Any:
        return tuple(x + (i == 1) for i, x in enumerate(TRITON_KERNELS.prepare_batch(*arguments)))

    wrong = kernels(prepare_batch=one_late)
    starts.planted("prepare_batch off by one", only("prepare_batch"), "demo", worker, "select_kernels", wrong)
    decode = TritonAttention.decode
    for factor in (1.02, math.nan):

        def scaled_decode(*arguments: Any, factor: float = factor, **options: Any) -> Any:
            return decode(*arguments, **options) * factor

        demoted = only("decode_attention")
        starts.planted(f"decode x {factor}", demoted, big, TritonAttention, "decode", scaled_decode)
    from headrace.kernels import prefill  # which can be imported where it can run

    attend = prefill.prefill_attention

    def scaled_prefill(out: Any, *arguments: Any) -> None:
        attend(out, *arguments)
        out *= 1.02

    starts.planted("prefill x 1.02", only("prefill_attention"), big, prefill, "prefill_attention", scaled_prefill)


def plant_linears(starts: Starts, big: str) -> None:
    skinny = gpu_linear.skinny_linear

    def one_size(
        x: Any, weight: Any, bias: Any, config: Any, x_scale: Any = None, weight_scale: Any = None, *rest: Any,
        **options: Any,
    ) -> Any:  # fmt: skip
        if weight.shape == (4096, 14336) and config.block_m in (1, 16):
            if weight_scale is None:
                weight = weight * 1.03
            else:
                weight_scale = weight_scale * 1.03
        return skinny(x, weight, bias, config, x_scale, weight_scale, *rest, **options)

    def of_that_size(demoted: list[str]) -> bool:
        return bool(demoted) and all(name.startswith("linear_4096x14336_up_to_") for name in demoted)

    starts.planted("one linear", of_that_size, big, gpu_linear, "skinny_linear", one_size)
    starts.planted("one fp8 linear", of_that_size, big, gpu_linear, "skinny_linear", one_size, quantization="fp8")


def plant_graphs(starts: Starts, big: str) -> None:
    run = StepGraphs.run

    def stale(self: StepGraphs, shape: Any, batch: Any) -> torch.Tensor:
        hidden = run(self, shape, batch)
        return hidden.neg() if self._captured and shape.decode else hidden

    starts.planted("decode graphs", only("cuda_graph_decode"), big, StepGraphs, "run", stale)
