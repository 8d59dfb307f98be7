"""Answers the words of remarks.json: the conditions of rules, and the facts that their texts name."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from fnmatch import fnmatchcase

from headrace.advice.explain.case import MASTER, Case
from headrace.advice.explain.context import OVERRIDES, changes_of, config_of, context_of, rope_theta
from headrace.advice.explain.setting import Setting, object_of
from headrace.advice.flags.table import human_int
from headrace.planner.catalogue import find_model
from headrace.planner.layouts import MANY_REQUESTS, ULTRA_SPARSE
from headrace.planner.shapes import expert_share

OFF_BY_DEFAULT = ("UNIFIED_ATTENTION", "FUSION_SHARED_EXPERTS", "FP4_ASM_GEMM", "PAGED_ATTN", "TRITON_ROPE",
                  "LINEAR_HIPBMM")  # fmt: skip
"""AITER's switches that are off unless they are set, by what follows the master switch's name."""

CONDITIONS: dict[str, Callable[[Case, Setting], bool]] = {
    "on": lambda case, setting: setting.on,
    "off": lambda case, setting: setting.off,
    "own-dtype": lambda case, setting: case.shape is not None and setting.value.lower() == case.shape.dtype,
    "off-by-default": lambda case, setting: setting.name.removeprefix(f"{MASTER}_") in OFF_BY_DEFAULT,
    "vllm": lambda case, setting: case.line.engine == "vllm",
    "quantizes": lambda case, setting: case.line.program == "quantize",
    "server": lambda case, setting: case.is_server,
    "nvidia": lambda case, setting: case.vendor == "nvidia",
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
    "stretches-context": lambda case, setting: case.shape is not None and _context(case) != _own_context(case),
    "fp8-cache": lambda case, setting: case.kv_width == 1.0,
    "brings-scales": lambda case, setting: case.shape is not None and case.shape.fp8_kv_cache,
    "aiter": lambda case, setting: case.aiter,
    "aiter-fa": lambda case, setting: case.aiter and not case.off(f"{MASTER}_MHA") and not _is_latent(case),
    "quick-reduce-off": lambda case, setting: _value(case, "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION") in ("", "NONE"),
}
"""Conditions by name."""

CONDITIONS_OF: dict[str, Callable[[Case, Setting, str], bool]] = {
    "is": lambda case, setting, pattern: fnmatchcase(setting.value.lower(), pattern),
    "named": lambda case, setting, pattern: fnmatchcase(setting.name, pattern),
    "below": lambda case, setting, limit: human_int(setting.value) < int(limit),
    "graphs": lambda case, setting, mode: str(object_of(setting).get("cudagraph_mode") or "").lower() == mode,
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
    "context": lambda case, setting: f"{_context(case):,}",
    "own_context": lambda case, setting: f"{_own_context(case):,}",
    "overrides": lambda case, setting: _as_overrides(case),
}
"""What names in braces stand for in the texts of rules."""


def holds(when: str, case: Case, setting: Setting) -> bool:
    """Return whether all conditions of a rule hold."""
    return all(_holds(word.removeprefix("!"), case, setting) is not word.startswith("!") for word in when.split())


def _holds(word: str, case: Case, setting: Setting) -> bool:
    name, given, words = word.partition(":")
    if not given:
        return CONDITIONS[name](case, setting)
    return any(CONDITIONS_OF[name](case, setting, one) for one in words.split("|"))


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


def _own_context(case: Case) -> int:
    """The context without what the line changes of it."""
    model = case.line.model or ""
    return context_of(config_of(model), {}, find_model(model).spec.max_position_embeddings)


def _as_overrides(case: Case) -> str:
    """--hf-overrides for all that the line changes of config.json; "": without the model's rope_theta, which it would
    lose, it cannot be said."""
    changes = changes_of(case.line)
    theta = rope_theta(config_of(case.line.model) if case.line.model else {}, changes)
    if theta is None or case.may_be_set_elsewhere(*OVERRIDES):
        return ""
    changes["rope_parameters"] = {**changes.get("rope_parameters", {}), "rope_theta": theta}
    return f"--hf-overrides {shlex.quote(json.dumps(changes))}"
