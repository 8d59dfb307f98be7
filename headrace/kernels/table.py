"""Lists the operations that have a kernel and a reference, and which function serves each.

The functions are chosen once, at load, and handed to the layers. An operation is a field of `KernelTable`; its kernel
is the function of that name in the operation's module, its reference the function NAME_reference beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from headrace.kernels import (
    activation,
    adapters,
    batch,
    delta_scan,
    elementwise,
    filter,
    fp8,
    gated_delta,
    index,
    latent_cache,
    logsumexp,
    moe,
    narrow,
    ngram,
    norm,
    qk_norm,
    rotary,
    sampling,
    tiled_widen,
)
from headrace.kernels._triton import HAS_TRITON
from headrace.kernels.norm import HalfNormed, Unsummed

MODULES = {
    norm: ("rms_norm", "rms_norm_quantized", "layer_norm", "add_up"),
    activation: ("gate_and_mul", "gate_and_mul_quantized"),
    fp8: ("quantize", "fp8_linear"),
    narrow: ("narrow_linear",),
    qk_norm: ("qk_squares", "qk_norm"),
    elementwise: ("clip", "gate_heads", "scale"),
    adapters: ("shrink_adapters", "expand_adapters"),
    rotary: ("step_angles", "rotary_and_cache"),
    latent_cache: ("latent_rotary_and_cache",),
    batch: ("copy_words", "scatter_words", "prepare_batch", "settle_lengths", "commit_tokens"),
    ngram: ("propose_ngram",),
    sampling: ("mask_tokens", "best_token", "gumbel_argmax"),
    filter: ("filter_floor",),
    logsumexp: ("logsumexp",),
    moe: ("fused_moe",),
    gated_delta: ("gated_delta_step",),
    delta_scan: ("gated_delta_scan",),
    index: ("index_scores", "top_keys"),
    tiled_widen: ("widen_tiled",),
}
"""module -> the operations it has"""


@dataclass(frozen=True)
class KernelTable:
    """Holds one callable an operation, with the signature of the function of that name."""

    rms_norm: Callable[..., Tensor]
    rms_norm_quantized: Callable[..., fp8.Quantized]
    layer_norm: Callable[..., Tensor]
    add_up: Callable[[Unsummed], Tensor]
    gate_and_mul: Callable[..., Tensor]
    gate_and_mul_quantized: Callable[..., fp8.Quantized]
    quantize: Callable[..., fp8.Quantized]
    fp8_linear: Callable[..., Tensor]
    narrow_linear: Callable[..., Tensor]
    qk_squares: Callable[..., Tensor]
    qk_norm: Callable[..., Tensor]
    clip: Callable[[Tensor, float], Tensor]
    gate_heads: Callable[[Tensor, Tensor], Tensor]
    scale: Callable[[Tensor, Tensor], Tensor]
    shrink_adapters: Callable[[Tensor, adapters.StepSlots, adapters.AdapterWeights], Tensor]
    expand_adapters: Callable[[Tensor, Tensor, adapters.StepSlots, adapters.AdapterWeights], None]
    step_angles: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
    rotary_and_cache: Callable[..., Tensor]
    latent_rotary_and_cache: Callable[..., Tensor]
    copy_words: Callable[[Tensor, Tensor], None]
    scatter_words: Callable[[Tensor, Tensor, Tensor], None]
    prepare_batch: Callable[..., tuple[Tensor, Tensor, Tensor]]
    settle_lengths: Callable[..., None]
    commit_tokens: Callable[..., None]
    propose_ngram: Callable[[Tensor, Tensor, Tensor, int, int, int, int], None]
    mask_tokens: Callable[[Tensor, Tensor, Tensor], None]
    best_token: Callable[[Tensor], tuple[Tensor, Tensor]]
    gumbel_argmax: Callable[..., Tensor]
    filter_floor: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    logsumexp: Callable[[Tensor], Tensor]
    fused_moe: Callable[..., tuple[Tensor | HalfNormed, Tensor]]
    gated_delta_step: Callable[..., Tensor]
    gated_delta_scan: Callable[..., Tensor]
    index_scores: Callable[..., Tensor]
    top_keys: Callable[..., Tensor]
    widen_tiled: Callable[..., Tensor]


def _table(suffix: str) -> KernelTable:
    return KernelTable(**{name: getattr(module, name + suffix) for module, names in MODULES.items() for name in names})


REFERENCE_KERNELS = _table("_reference")
TRITON_KERNELS = _table("")


def select_kernels(device_type: str) -> KernelTable:
    """Return Triton's kernels for a GPU, the references for a CPU. Raises RuntimeError on a GPU without Triton: torch
    builds for GPUs bring their own, so the installation is broken."""
    if device_type == "cpu":
        return REFERENCE_KERNELS
    if not HAS_TRITON:
        raise RuntimeError(f"device {device_type!r} needs Triton, which cannot be imported here")
    return TRITON_KERNELS
