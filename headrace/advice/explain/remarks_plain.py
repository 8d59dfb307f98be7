"""What is to be said of switches and variables whatever the line is otherwise: what they do when on, and when off."""

from __future__ import annotations

from headrace.advice.explain.case import Remark

BY_DEFAULT = Remark("not needed", "on by default", "drop")
ONLY_A_FAULT = Remark("costs", "off only to find a fault", "drop")
TUNES = "the first run of every size is slow while it tunes; AITER's own products are not touched"
ONE_BY_ONE = "every step launches its kernels one by one: small batches wait for the host"
NO_SWAP = "the current engine (V1) recomputes preempted requests and never swaps"
WHOLE_PROMPT = (
    "a long prompt runs in one step, and every running request waits for it; the step must also be as long as the "
    "longest prompt. That it is faster on MI300X is said without a measurement"
)
ASYNC_OFF = (
    "guides say off for latency; measured, it lowers the time per token too (gpt-oss-20b on an H100: 91 -> 87 ms)"
)
SPLIT = (
    "renamed to --attention-backend ROCM_ATTN: shapes that it has no kernel for run 2.7-4.4 times slower without a "
    "word; AITER's backends are faster"
)
KERNARG = "a variable of the HIP runtime and none of AITER's; AMD's images set it already"


def _always(*remark: str) -> tuple[Remark, Remark]:
    return Remark(*remark), Remark(*remark)


PLAIN: dict[str, tuple[Remark | None, Remark | None]] = {
    "--enable-chunked-prefill": (BY_DEFAULT, Remark("costs", WHOLE_PROMPT, "drop", "chunked-prefill-off-is-faster")),
    "--async-scheduling": (
        Remark("not needed", "the default of current vLLM", "drop"),
        Remark("costs", ASYNC_OFF, "drop", "async-scheduling-hurts-latency"),
    ),
    "--enforce-eager": (Remark("costs", ONE_BY_ONE, "drop"), None),
    "--disable-log-requests": (Remark("not needed", "requests are not logged by default any more", "drop"), None),
    "--swap-space": _always("no effect", NO_SWAP, "drop"),
    "VLLM_ROCM_USE_SKINNY_GEMM": (BY_DEFAULT, ONLY_A_FAULT),
    "VLLM_ROCM_FP8_PADDING": (BY_DEFAULT, ONLY_A_FAULT),
    "VLLM_ROCM_MOE_PADDING": (BY_DEFAULT, ONLY_A_FAULT),
    "VLLM_ROCM_CUSTOM_PAGED_ATTN": (BY_DEFAULT, ONLY_A_FAULT),
    "HIP_FORCE_DEV_KERNARG": (
        Remark("helps", KERNARG),
        Remark("costs", "launches start later", "HIP_FORCE_DEV_KERNARG=1"),
    ),
    "SAFETENSORS_FAST_GPU": (Remark("helps", "a faster start; AMD's images set it already"), None),
    "TORCH_BLAS_PREFER_HIPBLASLT": _always("depends", "torch chooses by itself on MI300X; measure it"),
    "PYTORCH_TUNABLEOP_ENABLED": _always("depends", TUNES),
    "VLLM_USE_V1": (
        Remark("not needed", "there is no other engine any more", "drop"),
        Remark("wrong", "the first engine is gone from vLLM", "drop"),
    ),
    "VLLM_V1_USE_PREFILL_DECODE_ATTENTION": (
        Remark("costs", SPLIT, "drop"),
        Remark("not needed", "off by default, and renamed since", "drop"),
    ),
}
"""name -> (when on, when off); None: nothing"""
