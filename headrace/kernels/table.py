"""Which function serves each operation, chosen once at load and handed to the layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from headrace.kernels import activation, batch, filter, fp8, logsumexp, moe, norm, rotary, sampling
from headrace.kernels._triton import HAS_TRITON
from headrace.kernels.norm import HalfNormed


@dataclass(frozen=True)
class KernelTable:
    """One callable an operation; signatures are those of the functions of the same name in this package."""

    rms_norm: Callable[..., Tensor]
    rms_norm_quantized: Callable[..., fp8.Quantized]
    silu_and_mul: Callable[[Tensor], Tensor]
    silu_and_mul_quantized: Callable[..., fp8.Quantized]
    quantize_per_token: Callable[..., fp8.Quantized]
    fp8_linear: Callable[..., Tensor]
    step_angles: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
    rotary_and_cache: Callable[..., Tensor]
    copy_words: Callable[[Tensor, Tensor], None]
    scatter_words: Callable[[Tensor, Tensor, Tensor], None]
    prepare_batch: Callable[..., tuple[Tensor, Tensor, Tensor]]
    settle_lengths: Callable[..., None]
    commit_tokens: Callable[..., None]
    best_token: Callable[[Tensor], tuple[Tensor, Tensor]]
    gumbel_argmax: Callable[..., Tensor]
    filter_floor: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    logsumexp: Callable[[Tensor], Tensor]
    fused_moe: Callable[..., tuple[Tensor | HalfNormed, Tensor]]


REFERENCE_KERNELS = KernelTable(
    rms_norm=norm.rms_norm_reference,
    rms_norm_quantized=norm.rms_norm_quantized_reference,
    silu_and_mul=activation.silu_and_mul_reference,
    silu_and_mul_quantized=activation.silu_and_mul_quantized_reference,
    quantize_per_token=fp8.quantize_per_token_reference,
    fp8_linear=fp8.fp8_linear_reference,
    step_angles=rotary.step_angles_reference,
    rotary_and_cache=rotary.rotary_and_cache_reference,
    copy_words=batch.copy_words_reference,
    scatter_words=batch.scatter_words_reference,
    prepare_batch=batch.prepare_batch_reference,
    settle_lengths=batch.settle_lengths_reference,
    commit_tokens=batch.commit_tokens_reference,
    best_token=sampling.best_token_reference,
    gumbel_argmax=sampling.gumbel_argmax_reference,
    filter_floor=filter.filter_floor_reference,
    logsumexp=logsumexp.logsumexp_reference,
    fused_moe=moe.fused_moe_reference,
)

TRITON_KERNELS = KernelTable(
    rms_norm=norm.rms_norm,
    rms_norm_quantized=norm.rms_norm_quantized,
    silu_and_mul=activation.silu_and_mul,
    silu_and_mul_quantized=activation.silu_and_mul_quantized,
    quantize_per_token=fp8.quantize_per_token,
    fp8_linear=fp8.fp8_linear,
    step_angles=rotary.step_angles,
    rotary_and_cache=rotary.rotary_and_cache,
    copy_words=batch.copy_words,
    scatter_words=batch.scatter_words,
    prepare_batch=batch.prepare_batch,
    settle_lengths=batch.settle_lengths,
    commit_tokens=batch.commit_tokens,
    best_token=sampling.best_token,
    gumbel_argmax=sampling.gumbel_argmax,
    filter_floor=filter.filter_floor,
    logsumexp=logsumexp.logsumexp,
    fused_moe=moe.fused_moe,
)


def select_kernels(device_type: str) -> KernelTable:
    """Triton's on a GPU, the references on a CPU. RuntimeError on a GPU without Triton: a build of torch for GPUs
    brings its own, so its absence is a broken installation, not a reason to run slowly in silence."""
    if device_type == "cpu":
        return REFERENCE_KERNELS
    if not HAS_TRITON:
        raise RuntimeError(f"device {device_type!r} needs Triton, which cannot be imported here")
    return TRITON_KERNELS
