"""Checks the self-check at load: kernels agree on a model as it is, and an injected fault is detected and demoted.

Faults are injected one a start. Experts have a part of their own, since their kernels take long to compile where a
machine has never had them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any
from unittest.mock import patch

import torch

import headrace.models.filling as filling
import headrace.quantization.gpu_linear as gpu_linear
import headrace.runner.worker as worker
from h200_parts.engines import greedy_tokens
from h200_parts.models import FORMATS, GPT_OSS_20B, LLAMA_8B, QWEN3_30B_A3B, TOY, TOY_EXPERTS, in_catalogue
from h200_parts.run import Run
from headrace import LLM
from headrace.attention import triton_attn
from headrace.attention.triton_attn import TritonAttention
from headrace.errors import ConfigError
from headrace.kernels.gemm import skinny_linear
from headrace.kernels.norm import HalfNormed
from headrace.kernels.table import TRITON_KERNELS
from headrace.kernels.tiled import TiledWeight
from headrace.runner.cuda_graph import StepGraphs

PROMPTS = [[(31 * i + 7 * j) % 500 + 5 for j in range(20 + 9 * i)] for i in range(6)]
SMALL_WEIGHTS, LARGE_WEIGHTS = 1e-3, 0.02
"""The range of dummy weights: with large ones, other sums give other tokens."""
Demoted = Callable[[list[str]], bool]


class Starts:
    """Starts engines that serve a few prompts, and adds a case for each."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.right: dict[str, list[list[int]]] = {}

    def start(self, model: str, **knobs: Any) -> tuple[list[str], list[str], list[list[int]]]:
        """Return (what was demoted, the notes about it, tokens)."""
        place: dict[str, Any] = self.run.settings.place(0.5) | ({"cpu_kv_cache_gib": 0.1} if self.run.smoke else {})
        dummy = {} if model == "demo" else {"load_format": "dummy"}
        limits: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 256}
        with LLM(model, dtype="bfloat16", skip_tokenizer_init=True, **limits, **place, **dummy, **knobs) as llm:
            facts = llm._core.facts.workers[0]
            tokens: list[list[int]] = []
            for _ in range(3):  # graph sizes are met, captured and replayed
                tokens = greedy_tokens(llm, PROMPTS, 24)
        notes = [note for note in facts.notes if "elf-check" in note or "graphs are off" in note]
        return facts.demoted, notes, tokens

    def agree(self, name: str, model: str, **knobs: Any) -> None:
        """Add a case that passes where nothing is demoted."""
        filling.DUMMY_RANGE = SMALL_WEIGHTS
        demoted, notes, _ = self.start(model, **knobs)
        title = ", ".join([name, *(f"{knob} {value}" for knob, value in knobs.items())])
        checked = bool(notes) or self.run.smoke  # on a CPU there is nothing to check
        self.run.case(f"{title} agrees", checked and not demoted, " ".join(notes))

    def inject(
        self, title: str, expected: Demoted, model: str, place: Any, attribute: str, fault: Any, **knobs: Any
    ) -> None:
        """Add a case with `fault` in place of `place.attribute`; it passes where the expected names are demoted."""
        filling.DUMMY_RANGE = LARGE_WEIGHTS
        key = f"{model} {knobs}"
        if key not in self.right:
            self.right[key] = self.start(model, **knobs)[2]
        with patch.object(place, attribute, fault):
            demoted, notes, tokens = self.start(model, **knobs)
        same = [
            a == b for x, y in zip(tokens, self.right[key], strict=True) for a, b in zip(x, y, strict=True)
        ]  # some may differ where the reference rounds differently
        said = f"demoted {demoted}, {sum(same) / len(same):.0%} of tokens as without the fault"
        self.run.case(title, expected(demoted), said)
        for note in notes:
            self.run.note(note)

    def inject_kernel(self, name: str, fault: Any, model: str, title: str) -> None:
        """`inject` a fault in place of a kernel of the table; it alone must be demoted."""
        table = replace(TRITON_KERNELS, **{name: fault})
        self.inject(title, only(name), model, worker, "select_kernels", lambda _: table)

    def inject_factor(self, name: str, factor: float, model: str) -> None:
        """`inject` a kernel of the table whose results are `factor` times what they should be."""
        self.inject_kernel(name, scaled(getattr(TRITON_KERNELS, name), factor), model, f"{name} x {factor}")


def scaled(kernel: Callable[..., Any], factor: float) -> Callable[..., Any]:
    """Return a kernel whose results are `factor` times what they should be."""
    return lambda *arguments, **options: times(kernel(*arguments, **options), factor)


def times(out: Any, factor: float) -> Any:
    """Return what a kernel returned, times `factor`; token ids stay, and so does what a half-made norm is made of."""
    if isinstance(out, HalfNormed):
        return out._replace(scaled=out.scaled * factor)
    if isinstance(out, tuple):
        return tuple(times(x, factor) for x in out)
    return out * factor if out.is_floating_point() else out


def only(name: str) -> Demoted:
    return lambda demoted: demoted == [name]


def self_check_cases(run: Run) -> None:
    """Start every format without a fault, then inject faults into kernels, linears and graphs."""
    starts = Starts(run)
    big = run.settings.write_config("8b4l", LLAMA_8B | {"num_hidden_layers": 4} | (TOY if run.smoke else {}))
    for name, model in (("demo", "demo"), ("8B of 4 layers", big)):
        for knobs in ({}, {"quantization": "fp8"}, {"quantization": "ptpc_fp8"}, {"kv_cache_dtype": "fp8"}):
            starts.agree(name, model, **knobs)
    if not run.smoke:
        inject_kernels(starts, big)
        inject_linears(starts, big)
        inject_graphs(starts, big)


def self_check_formats_cases(run: Run) -> None:
    """Do the same with models in formats of a checkpoint."""
    starts = Starts(run)
    few = {"num_hidden_layers": 4}
    held = ("awq", "nvfp4", "int8", "fp8-block")
    paths = {}
    for name in held:
        config = LLAMA_8B | few | {"quantization_config": FORMATS[name]} | (TOY if run.smoke else {})
        paths[name] = run.settings.write_config(f"8b4l-{name}", config)
    layers = {"layer_types": ["sliding_attention", "full_attention"] * (1 if run.smoke else 2)}
    toy = TOY | {"num_local_experts": 8, "num_experts_per_tok": 2} if run.smoke else {}
    paths["gpt-oss"] = run.settings.write_config("20b4l", GPT_OSS_20B | few | layers | toy)
    for name, path in paths.items():
        starts.agree(f"{name} of 4 layers", path)
    if run.smoke:
        return
    for name in held:
        starts.inject(f"one {name} linear", of_one_size, paths[name], gpu_linear, "skinny_linear", one_size)
    starts.inject_factor("widen_tiled", 1.01, paths["awq"])
    starts.inject_factor("fused_moe", 1.05, paths["gpt-oss"])
    decode = TritonAttention.decode

    def without_sinks(*arguments: Any, **options: Any) -> Any:
        sinks = options.get("sinks")
        return decode(*arguments, **options | ({} if sinks is None else {"sinks": sinks - math.inf}))

    demoted = only("decode_attention")
    starts.inject("decode without sinks", demoted, paths["gpt-oss"], TritonAttention, "decode", without_sinks)


def self_check_moe_cases(run: Run) -> None:
    """Do the same with experts."""
    starts = Starts(run)
    toy = TOY | TOY_EXPERTS if run.smoke else {}
    moe = run.settings.write_config("30b4l", QWEN3_30B_A3B | {"num_hidden_layers": 4} | toy)
    for knobs in ({}, {"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}):
        starts.agree("30B-A3B of 4 layers", moe, **knobs)
    if not run.smoke:
        starts.inject_factor("fused_moe", 1.05, moe)


def self_check_latent_cases(run: Run) -> None:
    """Do the same with attention to latents, to all of them and to those that an index chooses."""
    starts, toy = Starts(run), TOY | TOY_EXPERTS | {"head_dim": None} if run.smoke else {}
    few = {"num_hidden_layers": 4, "n_routed_experts": 16, "n_group": 1, "topk_group": 1, "quantization_config": None}
    lite = run.settings.write_config("v2-lite-4l", in_catalogue("deepseek-v2-lite", "deepseek_v2") | few | toy)
    indexed = in_catalogue("deepseek-v3.2", "deepseek_v32") | few | {"hidden_size": 2048} | toy
    sparse = run.settings.write_config("v3.2-4l", indexed)
    for name, model in (("V2-Lite", lite), ("V3.2", sparse)):
        for knobs in ({}, {"kv_cache_dtype": "fp8"}):
            starts.agree(f"{name} of 4 layers", model, **knobs)
    if run.smoke:
        return

    def off(kernel: Any, **changed: Any) -> Any:
        """Return a kernel that writes what is a little off; `changed`: arguments that it gets in place of its own."""

        def wrong(*arguments: Any, **options: Any) -> Any:
            bound = signature(kernel).bind(*arguments, **options)
            bound.arguments.update(changed)
            out = kernel(*bound.args, **bound.kwargs)
            return out if changed else out.mul_(1.02) if out.is_floating_point() else out.add_(1)

        return wrong

    for name in ("latent_rotary_and_cache", "layer_norm", "rotary_and_cache", "index_scores", "top_keys"):
        model = lite if name.startswith("latent") else sparse
        kernel = getattr(TRITON_KERNELS, name)
        starts.inject_kernel(name, scaled(kernel, 1.02) if name == "layer_norm" else off(kernel), model, f"{name} off")
    wrong = off(triton_attn.expanded_attention)
    starts.inject("expanded off", only("expanded_attention"), lite, triton_attn, "expanded_attention", wrong)
    ignoring: dict[str, Any] = {"chosen": None}
    for title, model, changed in (("latents off", lite, {}), ("all keys for those chosen", sparse, ignoring)):
        wrong = off(triton_attn.latent_attention, **changed)
        with patch.object(triton_attn, "latent_attention", wrong):
            try:
                starts.start(model)
            except ConfigError as error:
                run.case(title, "attention over latents" in str(error), str(error))
            else:
                run.case(title, False, "served")


def inject_kernels(starts: Starts, big: str) -> None:
    factors = {"rms_norm": 1.01, "gate_and_mul": math.nan, "rotary_and_cache": 1.02, "logsumexp": 1.01}
    for name, factor in factors.items():
        starts.inject_factor(name, factor, "demo")

    def one_late(*arguments: Any) -> Any:
        return tuple(x + (i == 1) for i, x in enumerate(TRITON_KERNELS.prepare_batch(*arguments)))

    starts.inject_kernel("prepare_batch", one_late, "demo", "prepare_batch off by one")
    for factor in (1.02, math.nan):
        wrong, demoted = scaled(TritonAttention.decode, factor), only("decode_attention")
        starts.inject(f"decode x {factor}", demoted, big, TritonAttention, "decode", wrong)
    from headrace.kernels import prefill  # not importable without a GPU

    attend = prefill.prefill_attention

    def scaled_prefill(out: Any, *arguments: Any) -> None:
        attend(out, *arguments)
        out *= 1.02

    starts.inject("prefill x 1.02", only("prefill_attention"), big, prefill, "prefill_attention", scaled_prefill)


def one_size(x: Any, weight: Any, bias: Any, config: Any, *rest: Any, **options: Any) -> Any:
    """Multiply by a wrong weight where it is 4096 x 14336 and tokens are at most 16."""
    tiled = isinstance(weight, TiledWeight)
    size = (weight.out_features, weight.in_features) if tiled else tuple(weight.shape)
    if size == (4096, 14336) and config.block_m in (1, 8, 16):
        if isinstance(weight, torch.Tensor):
            weight = weight * 1.03
        elif tiled:
            factors = torch.ones(size[0], device=weight.codes.device) if weight.factors is None else weight.factors
            weight = replace(weight, factors=factors * 1.03)
        else:
            weight = weight._replace(scales=weight.scales * 1.03)
    return skinny_linear(x, weight, bias, config, *rest, **options)


def of_one_size(demoted: list[str]) -> bool:
    return bool(demoted) and all(name.startswith("linear_4096x14336_up_to_") for name in demoted)


def inject_linears(starts: Starts, big: str) -> None:
    starts.inject("one linear", of_one_size, big, gpu_linear, "skinny_linear", one_size)
    starts.inject("one fp8 linear", of_one_size, big, gpu_linear, "skinny_linear", one_size, quantization="fp8")


def inject_graphs(starts: Starts, big: str) -> None:
    run = StepGraphs.run

    def stale(self: StepGraphs, shape: Any, batch: Any) -> torch.Tensor:
        hidden = run(self, shape, batch)
        return hidden.neg() if self._captured and shape.decode else hidden

    starts.inject("decode graphs", only("cuda_graph_decode"), big, StepGraphs, "run", stale)
