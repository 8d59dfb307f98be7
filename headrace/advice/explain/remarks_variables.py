"""What is to be said of environment variables, AMD's above all, for one command line: facts first, then advice.

Each function takes the case and the setting, and answers with a remark, or None where there is nothing to add.
"""

from __future__ import annotations

import shlex

from headrace.advice.explain.case import Case, Remark
from headrace.advice.explain.setting import Setting

MASTER = "VLLM_ROCM_USE_AITER"
OFF_BY_DEFAULT = {
    f"{MASTER}_{name}"
    for name in (
        "UNIFIED_ATTENTION",
        "FUSION_SHARED_EXPERTS",
        "FP4_ASM_GEMM",
        "PAGED_ATTN",
        "TRITON_ROPE",
        "LINEAR_HIPBMM",
    )
}
LATENT_ONLY = {f"{MASTER}_{name}" for name in ("MLA", "FP8BMM", "FP4BMM")}
EXPERTS_ONLY = {f"{MASTER}_MOE", f"{MASTER}_FUSION_SHARED_EXPERTS", "VLLM_ROCM_MOE_PADDING"}
FP4_UNITS = {f"{MASTER}_FP4BMM", f"{MASTER}_FP4_ASM_GEMM"}
SHUFFLED_FROM = 32
"""requests at once, from which AMD's guide finds the other layout of the cache faster"""
CONCERT = (MASTER, "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "VLLM_ROCM_USE_AITER_MHA", "HIP_FORCE_DEV_KERNARG")
"""The four that a blog wants set together"""


def elsewhere(case: Case, setting: Setting) -> Remark | None:
    """What is AMD's or NVIDIA's alone, on the other's GPUs."""
    hardware = setting.known.hardware if setting.known is not None else ""
    titles = {"amd": "AMD's GPUs", "nvidia": "NVIDIA's GPUs"}
    if not hardware or case.vendor in ("", hardware):
        return None
    return Remark("no effect", f"means something on {titles[hardware]} alone, not on {case.gpu}", "drop")


def aiter(case: Case, setting: Setting) -> Remark | None:
    if setting.off:
        return Remark("costs", "the default, and slow: Triton kernels instead of AITER's", f"{MASTER}=1")
    together = ""
    if all(case.line.find(name) is not None for name in CONCERT):
        together = ". It needs none of the other three variables"
    return Remark(
        "helps",
        "off by default, and official images left it off: 1.7 times slower on short prompts, 3.7 at 12k tokens. (AITER "
        f"is AMD's Tensor Engine; without it vLLM runs Triton kernels, not generic torch operators{together}.)",
        claim="four-variables-belong-together" if together else "without-aiter-generic-torch-runs",
    )


def aiter_part(case: Case, setting: Setting) -> Remark | None:
    name = setting.name
    if name.endswith(("_MHA", "_UNIFIED_ATTENTION")) and case.aiter:
        special = _aiter_attention(case, setting)
        if special is not None:
            return special
    if not case.aiter:
        claim = "aiter-switches-work-alone"
        if setting.off and name not in OFF_BY_DEFAULT:
            return Remark("no effect", f"AITER is off anyway: {MASTER} is not set to 1", "drop", claim)
        return Remark(
            "no effect", f"needs the master switch {MASTER}=1", f"{MASTER}=1" if setting.on else "drop", claim
        )
    if case.shape is not None and name in LATENT_ONLY and not case.shape.is_mla:
        return Remark("no effect", "the model has no latent attention (MLA)", "drop")
    if case.shape is not None and name in EXPERTS_ONLY and not case.shape.is_moe:
        return Remark("no effect", "the model has no experts", "drop")
    if name in FP4_UNITS and case.chip is not None and "fp4" not in case.chip.flops:
        if setting.on:
            return Remark("wrong", f"{case.gpu} has no fp4 units: the default has crashed it", f"{name}=0")
        return Remark("helps", f"{case.gpu} has no fp4 units, and the default of 1 has crashed it in some builds")
    if setting.on is (name not in OFF_BY_DEFAULT):
        return Remark("not needed", f"{'on' if setting.on else 'off'} is its default under the master switch", "drop")
    if setting.off:
        if name.endswith("_MOE"):
            return Remark(
                "costs", "experts run on Triton. For `wrong! device_gemm` try AITER_ONLINE_TUNE=1 first", "drop"
            )
        return Remark("costs", "Triton's kernel runs instead: to find a fault, not to serve", "drop")
    return Remark("depends", "off by default; measure it")


def _aiter_attention(case: Case, setting: Setting) -> Remark | None:
    unified, mha = f"{MASTER}_UNIFIED_ATTENTION", f"{MASTER}_MHA"
    if setting.name == unified and setting.on and not case.off(mha):
        return Remark("no effect", f"only with {mha}=0", "--attention-backend ROCM_AITER_UNIFIED_ATTN")
    if setting.name == mha and setting.off and not case.on(unified) and case.asked.attention_backend is None:
        wanted = "--attention-backend ROCM_AITER_UNIFIED_ATTN" if case.has_windows or case.shape is None else "drop"
        if case.on("VLLM_V1_USE_PREFILL_DECODE_ATTENTION"):
            return Remark(
                "costs",
                "gives AITER's attention up for the old split kernels, 2.7-4.4 times slower on Qwen3-235B",
                wanted,
            )
        return Remark(
            "costs",
            "without UNIFIED_ATTENTION=1 attention runs on vLLM's plain Triton kernel, not on any FlashAttention",
            wanted,
            "mha-off-gives-flash-attention",
        )
    if setting.name == mha and setting.off:
        return Remark("fine", "makes way for the backend that is asked for")
    if setting.name == unified and setting.on:
        return Remark(
            "helps" if case.has_windows else "depends",
            "windows and sinks in AITER's kernel, as gpt-oss has",
            "--attention-backend ROCM_AITER_UNIFIED_ATTN",
        )
    return None


def quick_reduce(case: Case, setting: Setting) -> Remark | None:
    if case.tp == 1:
        return Remark(
            "no effect",
            "with one GPU there is no all-reduce; nor has it to do with AITER or fused kernels",
            "drop",
            "quick-reduce-helps-on-one-gpu",
        )
    kind = (case.line.value("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION") or "NONE").upper()
    if kind == "NONE":
        return Remark("no effect", "Quick Reduce is off (VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=NONE)", "drop")
    if setting.name.endswith("_QUANTIZATION"):
        lossy = "" if kind == "FP" else f", and {kind} rounds what it sends: check the answers"
        return Remark("depends", f"large sums only, those of prompts; sums of decode steps are too small for it{lossy}")
    if setting.name.endswith("_CAST_BF16_TO_FP16") and setting.on:
        return Remark(
            "not needed",
            "on by default. float16 overflows where bfloat16 does not: 0 for models with large sums",
            "drop",
        )
    return None


def min_channels(case: Case, setting: Setting) -> Remark | None:
    if case.gpus == 1:
        return Remark("no effect", "with one GPU there are no collectives", "drop", "112-channels-everywhere")
    if case.vendor == "nvidia":
        return Remark(
            "costs",
            "AMD's number: here each channel takes an SM from the model and memory beside it",
            "drop",
            "112-channels-everywhere",
        )
    return Remark(
        "depends",
        "for MI300X; a later edition of AMD's own page left it out. Small sums do not gain",
        claim="112-channels-everywhere",
    )


def visible_devices(case: Case, setting: Setting) -> Remark | None:
    others = [name for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if name != setting.name]
    if setting.name != "ROCR_VISIBLE_DEVICES" and case.line.find(others[0]) is not None:
        text, claim = f"{others[0]} is set too: they hide GPUs from each other", "both-visible-devices"
        if setting.name == "CUDA_VISIBLE_DEVICES":
            return Remark("depends", f"{text}; this one is read everywhere, and stays", claim=claim)
        return Remark("wrong", text, "drop", claim)
    if setting.name == "HIP_VISIBLE_DEVICES" and setting.value and case.line.engine == "vllm":
        return Remark(
            "depends",
            "vLLM reads CUDA_VISIBLE_DEVICES on ROCm too, and wants this one unset",
            f"CUDA_VISIBLE_DEVICES={shlex.quote(setting.value)}",
        )
    return None


def latent_as_ordinary(case: Case, setting: Setting) -> Remark | None:
    if case.shape is not None and not case.shape.is_mla:
        return Remark("no effect", "the model has no latent attention (MLA)", "drop")
    return Remark("costs", "the cache grows some tens of times; for finding faults", "drop") if setting.on else None


def triton_awq(case: Case, setting: Setting) -> Remark | None:
    if case.checkpoint_format not in ("int4", ""):
        return Remark("no effect", "the checkpoint is not AWQ", "drop")
    return Remark("helps", "vLLM on ROCm has no other kernels for AWQ; current versions set it themselves")


def shuffled_cache(case: Case, setting: Setting) -> Remark | None:
    if not setting.on:
        return Remark("not needed", "off by default", "drop")
    if not case.aiter or case.off(f"{MASTER}_MHA") or (case.shape is not None and case.shape.is_mla):
        return Remark("no effect", "belongs to ROCM_AITER_FA, which does not run here", "drop")
    return Remark("depends", f"faster decodes from {SHUFFLED_FROM} requests at once, slower below")


def misspelt(case: Case, setting: Setting) -> Remark | None:
    right = setting.name.replace("RCCL_", "NCCL_")
    return Remark("no effect", f"RCCL reads {right}", f"{right}={shlex.quote(setting.value)}", "rccl-names")


VARIABLE_RULES = {
    MASTER: aiter,
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": shuffled_cache,
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": quick_reduce,
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16": quick_reduce,
    "VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB": quick_reduce,
    "VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB": quick_reduce,
    "NCCL_MIN_NCHANNELS": min_channels,
    "CUDA_VISIBLE_DEVICES": visible_devices,
    "HIP_VISIBLE_DEVICES": visible_devices,
    "ROCR_VISIBLE_DEVICES": visible_devices,
    "VLLM_MLA_DISABLE": latent_as_ordinary,
    "VLLM_USE_TRITON_AWQ": triton_awq,
    "RCCL_DEBUG": misspelt,
    "RCCL_DEBUG_SUBSYS": misspelt,
    "RCCL_NET_GDR_LEVEL": misspelt,
}
"""Rules by name; those that begin with the master switch's name and are not here go to `aiter_part`."""
