"""Answers the words of remarks.json: the conditions of rules, and the facts that their texts name."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from fnmatch import fnmatchcase

from headrace.advice.explain.case import MANY_REQUESTS, MASTER, Case, duration, size
from headrace.advice.explain.setting import Setting, object_of
from headrace.advice.flags.table import human_int
from headrace.planner.chips import GIB
from headrace.planner.cost import StepWork, step_model
from headrace.planner.layouts import ULTRA_SPARSE
from headrace.planner.shapes import expert_share

LARGE_STEP = 16384
"""Prompt tokens of a step, from which more hardly raises throughput while every running request waits for it."""
OFF_BY_DEFAULT = ("UNIFIED_ATTENTION", "FUSION_SHARED_EXPERTS", "FP4_ASM_GEMM", "PAGED_ATTN", "TRITON_ROPE",
                  "LINEAR_HIPBMM")  # fmt: skip
"""AITER's switches that are off unless they are set, by what follows the master switch's name."""
QUICK_REDUCE = ("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "--quick-reduce-quantization")
USUAL_SEQS = "a default of vLLM's (1024 where a GPU has much memory, else 256): "

CONDITIONS: dict[str, Callable[[Case, Setting], bool]] = {
    "on": lambda case, setting: setting.on,
    "off": lambda case, setting: setting.off,
    "own-dtype": lambda case, setting: case.shape is not None and setting.value.lower() == case.shape.dtype,
    "off-by-default": lambda case, setting: setting.name.removeprefix(f"{MASTER}_") in OFF_BY_DEFAULT,
    "vllm": lambda case, setting: case.line.engine == "vllm",
    "quantizes": lambda case, setting: case.line.program == "quantize",
    "server": lambda case, setting: case.is_server,
    "nvidia": lambda case, setting: case.vendor == "nvidia",
    "amd": lambda case, setting: case.vendor == "amd",
    "maybe-amd": lambda case, setting: case.vendor in ("amd", ""),
    "no-fp4": lambda case, setting: case.chip is not None and "fp4" not in case.chip.flops,
    "one-gpu": lambda case, setting: case.gpus == 1,
    "tp1": lambda case, setting: case.tp == 1,
    "pp1": lambda case, setting: case.pp == 1,
    "dp1": lambda case, setting: case.dp == 1,
    "one-node": lambda case, setting: case.nodes == 1,
    "stage-holds-all": lambda case, setting: (case.fewest_gpus() or case.tp + 1) <= case.tp,
    "experts-spread": lambda case, setting: case.gpus > 1 and _maybe_on(case, "--enable-expert-parallel"),
    "known-model": lambda case, setting: case.shape is not None,
    "dense": lambda case, setting: case.shape is not None and not case.shape.is_moe,
    "ultra-sparse": lambda case, setting: case.shape is not None and expert_share(case.shape.spec) < ULTRA_SPARSE,
    "latent": lambda case, setting: case.shape is not None and case.shape.is_mla,
    "not-latent": lambda case, setting: case.shape is not None and not case.shape.is_mla,
    "sparse": lambda case, setting: case.is_sparse_attention,
    "windows": lambda case, setting: case.has_windows,
    "text-only": lambda case, setting: case.shape is not None and not case.shape.spec.vision_weights,
    "trained-in-bfloat16": lambda case, setting: case.shape is not None and case.shape.dtype == "bfloat16",
    "known-format": lambda case, setting: bool(case.checkpoint_format),
    "int4": lambda case, setting: case.checkpoint_format == "int4",
    "stretches": lambda case, setting: case.stretches,
    "beyond-context": lambda case, setting: case.shape is not None and _asked(case, setting) > _context(case),
    "below-lengths": lambda case, setting: _lengths(case) > _asked(case, setting),
    "whole-prompts": lambda case, setting: case.asked.enable_chunked_prefill is False,
    "large-step": lambda case, setting: _asked(case, setting) > LARGE_STEP,
    "part-empty": lambda case, setting: 0 < _whole_batches(case) < (case.asked.num_prompts or 0),
    "fp8-cache": lambda case, setting: case.kv_width == 1.0,
    "brings-scales": lambda case, setting: case.shape is not None and case.shape.fp8_kv_cache,
    "aiter": lambda case, setting: case.aiter,
    "aiter-fa": lambda case, setting: case.aiter and not case.off(f"{MASTER}_MHA") and not _is_latent(case),
    "quick-reduce-off": lambda case, setting: {"", "NONE"} >= {_value(case, name) for name in QUICK_REDUCE},
}
"""Conditions by name."""

CONDITIONS_OF: dict[str, Callable[[Case, Setting, str], bool]] = {
    "is": lambda case, setting, pattern: fnmatchcase(setting.value.lower(), pattern),
    "named": lambda case, setting, pattern: fnmatchcase(setting.name, pattern),
    "below": lambda case, setting, limit: human_int(setting.value) < int(limit),
    "above": lambda case, setting, limit: _asked(case, setting) > float(limit),
    "equals": lambda case, setting, number: _asked(case, setting) == float(number),
    "less-than": lambda case, setting, field: _asked(case, setting) < (getattr(case.asked, field) or 0),
    "more-than": lambda case, setting, field: _asked(case, setting) > (getattr(case.asked, field) or math.inf),
    "graphs": lambda case, setting, mode: fnmatchcase(str(object_of(setting).get("cudagraph_mode", "")).lower(), mode),
    "backend": lambda case, setting, name: _backend(case).lower() == name,
    "with": lambda case, setting, key: case.line.find(key) is not None,
    "on": lambda case, setting, key: case.on(key),
    "off": lambda case, setting, key: case.off(key),
    "asked": lambda case, setting, field: getattr(case.asked, field) is not None,
    "elsewhere": lambda case, setting, key: case.may_be_set_elsewhere(key),
}
"""Conditions of the form NAME:WORD|WORD, which hold for one of the words: a value or name (* stands for anything), a
number, another setting, a field of CommandFields."""

FACTS: dict[str, Callable[[Case, Setting], object]] = {
    "value": lambda case, setting: setting.value,
    "VALUE": lambda case, setting: setting.value.upper(),
    "word": lambda case, setting: shlex.quote(setting.value),
    "name": lambda case, setting: setting.name,
    "nccl_name": lambda case, setting: setting.name.replace("RCCL_", "NCCL_"),
    "gpu": lambda case, setting: case.gpu,
    "tp": lambda case, setting: case.tp,
    "many_requests": lambda case, setting: MANY_REQUESTS,
    "some_requests": lambda case, setting: MANY_REQUESTS // 2,
    "expert_share": lambda case, setting: f"{expert_share(case.shape.spec):.2%}" if case.shape is not None else "few",
    "backend": lambda case, setting: _backend(case),
    "unified_or_drop": lambda case, setting: _unified_or_drop(case),
    "longest": lambda case, setting: _context(case),
    "lengths": lambda case, setting: _lengths(case),
    "sequence_size": lambda case, setting: _sequence_size(case),
    "usual_seqs": lambda case, setting: USUAL_SEQS if case.asked.max_num_seqs in (256, 1024) else "",
    "one_sequence": lambda case, setting: _one_sequence(case),
    "outside": lambda case, setting: _outside(case),
    "step_time": lambda case, setting: _step_time(case),
    "smaller_step": lambda case, setting: _smaller_step(case),
    "whole_batches": lambda case, setting: _whole_batches(case),
}
"""What names in braces stand for in the texts of rules, beside the fields of CommandFields."""


def holds(when: str, case: Case, setting: Setting) -> bool:
    """Return whether all conditions of a rule hold."""
    return all(_holds(word.removeprefix("!"), case, setting) is not word.startswith("!") for word in when.split())


def _holds(word: str, case: Case, setting: Setting) -> bool:
    name, given, words = word.partition(":")
    if not given:
        return CONDITIONS[name](case, setting)
    return any(CONDITIONS_OF[name](case, setting, one) for one in words.split("|"))


def _asked(case: Case, setting: Setting) -> float:
    """The number that the line asks for by that flag; 0 where it leaves it open."""
    return getattr(case.asked, setting.key.removeprefix("--").replace("-", "_")) or 0


def _lengths(case: Case) -> int:
    return (case.asked.input_len or 0) + (case.asked.output_len or 0)


def _whole_batches(case: Case) -> int:
    """The requests of whole batches; 0 where that is not known, or not even one is whole."""
    seqs = case.asked.max_num_seqs or 0
    return (case.asked.num_prompts or 0) // seqs * seqs if seqs else 0


def _sequence_size(case: Case) -> str:
    one = case.kv_bytes(case.asked.max_model_len or 0, case.kv_width)
    windows = ", windows counted" if case.has_windows else ""
    return "" if one is None else f". One sequence that long takes {size(one)}{windows}"


def _one_sequence(case: Case) -> str:
    one = case.kv_bytes(case.asked.max_model_len or 0, case.kv_width)
    return "" if one is None else f" ({size(one)}, not {size(one * (case.asked.max_num_seqs or 1))})"


def _outside(case: Case) -> str:
    if case.chip is None:
        return ""
    left, memory = 1 - (case.asked.gpu_memory_utilization or 0), case.chip.memory_bytes
    return f"; {size(left * memory)} of {memory / GIB:.0f} GiB stay outside"


def _step_time(case: Case) -> str:
    if case.shape is None or case.chip is None:
        return ""
    tokens = case.asked.max_num_batched_tokens or 0
    seconds = step_model(case.deployment(case.shape, case.parallel())).seconds(StepWork(0, 0.0, tokens, tokens / 2))
    return f". A full one takes about {duration(seconds)} here"


def _smaller_step(case: Case) -> int:
    whole = case.asked.enable_chunked_prefill is False
    return max(LARGE_STEP, case.asked.max_model_len or 0) if whole else LARGE_STEP


def _maybe_on(case: Case, key: str) -> bool:
    return case.on(key) or case.may_be_set_elsewhere(key)


def _is_latent(case: Case) -> bool:
    return case.shape is not None and case.shape.is_mla


def _value(case: Case, key: str) -> str:
    return (case.line.value(key) or "").upper()


def _backend(case: Case) -> str:
    """The attention backend that is asked for, or that AITER chooses."""
    return (case.asked.attention_backend or ("ROCM_AITER_FA" if case.aiter else "")).upper()


def _unified_or_drop(case: Case) -> str:
    wanted = case.has_windows or case.shape is None
    return "--attention-backend ROCM_AITER_UNIFIED_ATTN" if wanted else "drop"


def _context(case: Case) -> int:
    return case.shape.spec.max_position_embeddings if case.shape is not None else 0
