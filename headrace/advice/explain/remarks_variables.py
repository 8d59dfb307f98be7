"""Lists what is to be said of environment variables, AMD's above all: facts first, then advice."""

from __future__ import annotations

import shlex

from headrace.advice.explain.case import MASTER, Case
from headrace.advice.explain.remark import Remark, Rules, costs, depends, fine, helps, no_effect, not_needed, wrong
from headrace.advice.explain.setting import Setting

OFF_BY_DEFAULT = {
    f"{MASTER}_{name}"
    for name in (
        "UNIFIED_ATTENTION", "FUSION_SHARED_EXPERTS", "FP4_ASM_GEMM", "PAGED_ATTN", "TRITON_ROPE", "LINEAR_HIPBMM",
    )
}  # fmt: skip
LATENT_ONLY = {f"{MASTER}_{name}" for name in ("MLA", "FP8BMM", "FP4BMM")}
EXPERTS_ONLY = {f"{MASTER}_MOE", f"{MASTER}_FUSION_SHARED_EXPERTS", "VLLM_ROCM_MOE_PADDING"}
FP4_UNITS = {f"{MASTER}_FP4BMM", f"{MASTER}_FP4_ASM_GEMM"}
BLOG_VARIABLES = (MASTER, "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "VLLM_ROCM_USE_AITER_MHA", "HIP_FORCE_DEV_KERNARG")
"""The four that a blog wants set together."""
UNIFIED_BACKEND = "--attention-backend ROCM_AITER_UNIFIED_ATTN"
ON_BY_DEFAULT = (("on", not_needed("on by default")), ("!on", costs("off only to find a fault")))
CHANNELS = "112-channels-everywhere"


def for_other_vendor(case: Case, setting: Setting) -> Remark | None:
    """Return a remark on what is AMD's or NVIDIA's alone, where it is given for the other's GPUs."""
    hardware = setting.known.hardware if setting.known is not None else ""
    titles = {"amd": "AMD's GPUs", "nvidia": "NVIDIA's GPUs"}
    if not hardware or case.vendor in ("", hardware):
        return None
    return no_effect(f"means something on {titles[hardware]} alone, not on {case.gpu}")


def _aiter(case: Case, setting: Setting) -> Remark:
    together = all(case.line.find(name) is not None for name in BLOG_VARIABLES)
    return helps(
        "off by default, and official images left it off: 1.7 times slower on short prompts, 3.7 at 12k tokens. (AITER "
        "is AMD's Tensor Engine; without it vLLM runs Triton kernels, not generic torch operators"
        + (". It needs none of the other three variables.)" if together else ".)"),
        claim="four-variables-belong-together" if together else "without-aiter-generic-torch-runs",
    )


def aiter_part(case: Case, setting: Setting) -> Remark | None:
    """Return a remark on one of AITER's switches below the master switch."""
    name = setting.name
    if name.endswith(("_MHA", "_UNIFIED_ATTENTION")) and case.aiter:
        special = _aiter_attention(case, setting)
        if special is not None:
            return special
    if not case.aiter:
        claim = "aiter-switches-work-alone"
        if setting.off and name not in OFF_BY_DEFAULT:
            return no_effect(f"AITER is off anyway: {MASTER} is not set to 1", claim=claim)
        better = f"{MASTER}=1" if setting.on else "drop"
        return no_effect(f"needs the master switch {MASTER}=1", better=better, claim=claim)
    if case.shape is not None and name in LATENT_ONLY and not case.shape.is_mla:
        return no_effect("the model has no latent attention (MLA)")
    if case.shape is not None and name in EXPERTS_ONLY and not case.shape.is_moe:
        return no_effect("the model has no experts")
    if name in FP4_UNITS and case.chip is not None and "fp4" not in case.chip.flops:
        if setting.on:
            return wrong(f"{case.gpu} has no fp4 units: the default has crashed it", better=f"{name}=0")
        return helps(f"{case.gpu} has no fp4 units, and the default of 1 has crashed it in some builds")
    if setting.on is (name not in OFF_BY_DEFAULT):
        return not_needed(f"{'on' if setting.on else 'off'} is its default under the master switch")
    if setting.on:
        return depends("off by default; measure it")
    if name.endswith("_MOE"):
        return costs("experts run on Triton. For `wrong! device_gemm` try AITER_ONLINE_TUNE=1 first")
    return costs("Triton's kernel runs instead: to find a fault, not to serve")


def _aiter_attention(case: Case, setting: Setting) -> Remark | None:
    unified, mha = f"{MASTER}_UNIFIED_ATTENTION", f"{MASTER}_MHA"
    if setting.name == unified and setting.on:
        if not case.off(mha):
            return no_effect(f"only with {mha}=0", better=UNIFIED_BACKEND)
        make = helps if case.has_windows else depends
        return make("windows and sinks in AITER's kernel, as gpt-oss has", better=UNIFIED_BACKEND)
    if setting.name != mha or not setting.off:
        return None
    if case.on(unified) or case.asked.attention_backend is not None:
        return fine("makes way for the backend that is asked for")
    wanted = UNIFIED_BACKEND if case.has_windows or case.shape is None else "drop"
    if case.on("VLLM_V1_USE_PREFILL_DECODE_ATTENTION"):
        text = "gives AITER's attention up for the old split kernels, 2.7-4.4 times slower on Qwen3-235B"
        return costs(text, better=wanted)
    text = "without UNIFIED_ATTENTION=1 attention runs on vLLM's plain Triton kernel, not on any FlashAttention"
    return costs(text, better=wanted, claim="mha-off-gives-flash-attention")


def _quick_reduce(case: Case, setting: Setting) -> Remark | None:
    kind = (case.line.value("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION") or "NONE").upper()
    if kind == "NONE":
        return no_effect("Quick Reduce is off (VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=NONE)")
    if setting.name.endswith("_QUANTIZATION"):
        lossy = "" if kind == "FP" else f", and {kind} rounds what it sends: check the answers"
        return depends(f"large all-reduces only, those of prompts; those of decode steps are too small for it{lossy}")
    if setting.name.endswith("_CAST_BF16_TO_FP16") and setting.on:
        text = "on by default. float16 overflows where bfloat16 does not: 0 for models with large sums"
        return not_needed(text)
    return None


def _visible_devices(case: Case, setting: Setting) -> Remark | None:
    others = [name for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if name != setting.name]
    if setting.name != "ROCR_VISIBLE_DEVICES" and case.line.find(others[0]) is not None:
        text, claim = f"{others[0]} is set too: they hide GPUs from each other", "both-visible-devices"
        if setting.name == "CUDA_VISIBLE_DEVICES":
            return depends(f"{text}; this one is read everywhere, and stays", claim=claim)
        return wrong(text, claim=claim)
    if setting.name == "HIP_VISIBLE_DEVICES" and setting.value and case.line.engine == "vllm":
        better = f"CUDA_VISIBLE_DEVICES={shlex.quote(setting.value)}"
        return depends("vLLM reads CUDA_VISIBLE_DEVICES on ROCm too, and wants this one unset", better=better)
    return None


def _triton_awq(case: Case, setting: Setting) -> Remark:
    if case.checkpoint_format not in ("int4", ""):
        return no_effect("the checkpoint is not AWQ")
    return helps("vLLM on ROCm has no other kernels for AWQ; current versions set it themselves")


def _shuffled_cache(case: Case, setting: Setting) -> Remark:
    """Remark on the other layout of the KV cache, which AMD's guide finds faster from 32 requests on."""
    if not case.aiter or case.off(f"{MASTER}_MHA") or (case.shape is not None and case.shape.is_mla):
        return no_effect("belongs to ROCM_AITER_FA, which does not run here")
    return depends("faster decodes from 32 requests at once, slower below")


def _misspelt(case: Case, setting: Setting) -> Remark:
    """Remark on a variable of NCCL's that bears RCCL's name."""
    right = setting.name.replace("RCCL_", "NCCL_")
    return no_effect(f"RCCL reads {right}", better=f"{right}={shlex.quote(setting.value)}", claim="rccl-names")


QUICK_REDUCE = (
    ("tp1", no_effect("with one GPU there is no all-reduce; nor has it to do with AITER or fused kernels",
                      claim="quick-reduce-helps-on-one-gpu")),
    ("", _quick_reduce),
)  # fmt: skip
VARIABLE_RULES: Rules = {
    MASTER: (
        ("off", costs("the default, and slow: Triton kernels instead of AITER's", better=f"{MASTER}=1")),
        ("", _aiter),
    ),
    "VLLM_ROCM_USE_SKINNY_GEMM": ON_BY_DEFAULT,
    "VLLM_ROCM_FP8_PADDING": ON_BY_DEFAULT,
    "VLLM_ROCM_MOE_PADDING": ON_BY_DEFAULT,
    "VLLM_ROCM_CUSTOM_PAGED_ATTN": ON_BY_DEFAULT,
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": (("!on", not_needed("off by default")), ("", _shuffled_cache)),
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": QUICK_REDUCE,
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16": QUICK_REDUCE,
    "VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB": QUICK_REDUCE,
    "VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB": QUICK_REDUCE,
    "HIP_FORCE_DEV_KERNARG": (
        ("on", helps("a variable of the HIP runtime and none of AITER's; AMD's images set it already")),
        ("", costs("launches start later", better="HIP_FORCE_DEV_KERNARG=1")),
    ),
    "SAFETENSORS_FAST_GPU": (("on", helps("a faster start; AMD's images set it already")),),
    "TORCH_BLAS_PREFER_HIPBLASLT": (("", depends("torch chooses by itself on MI300X; measure it")),),
    "PYTORCH_TUNABLEOP_ENABLED": (
        ("", depends("the first run of every size is slow while it tunes; AITER's own products are not touched")),
    ),
    "VLLM_USE_V1": (
        ("on", not_needed("there is no other engine any more")),
        ("", wrong("the first engine is gone from vLLM")),
    ),
    "VLLM_V1_USE_PREFILL_DECODE_ATTENTION": (
        ("on", costs("renamed to --attention-backend ROCM_ATTN: shapes that it has no kernel for run 2.7-4.4 times "
                     "slower without a word; AITER's backends are faster")),
        ("", not_needed("off by default, and renamed since")),
    ),
    "NCCL_MIN_NCHANNELS": (
        ("one-gpu", no_effect("with one GPU there are no collectives", claim=CHANNELS)),
        ("nvidia", costs("AMD's number: here each channel takes an SM from the model and memory beside it",
                         claim=CHANNELS)),
        ("", depends("for MI300X; a later edition of AMD's own page left it out. Small sums do not gain",
                     claim=CHANNELS)),
    ),
    "CUDA_VISIBLE_DEVICES": (("", _visible_devices),),
    "HIP_VISIBLE_DEVICES": (("", _visible_devices),),
    "ROCR_VISIBLE_DEVICES": (("", _visible_devices),),
    "VLLM_MLA_DISABLE": (
        ("not-latent", no_effect("the model has no latent attention (MLA)")),
        ("on", costs("the cache grows some tens of times; for finding faults")),
    ),
    "VLLM_USE_TRITON_AWQ": (("", _triton_awq),),
    "RCCL_DEBUG": (("", _misspelt),),
    "RCCL_DEBUG_SUBSYS": (("", _misspelt),),
    "RCCL_NET_GDR_LEVEL": (("", _misspelt),),
}  # fmt: skip
"""Rules by name; those that begin with the master switch's name and are not here go to `aiter_part`."""
