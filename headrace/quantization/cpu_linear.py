"""Chooses how a CPU stores the weight of a linear layer: as it is, transposed, packed by oneDNN, or in float32.

`F.linear` is up to seven times slower than the best way, which depends on the processor (has it units for bf16?), the
weight and the number of tokens. The choice follows rules that were measured (AVX2, AVX-512 with bf16), and is not
measured at load, so that every start computes the same bits. Knows no parts, checkpoints or ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.quantization.scheme import LinearSpec, Multiply

Hold = Callable[[Tensor, Tensor | None], Multiply]
"""weight [out, in], bias [out] or None -> the function that applies them; it stores the weight in a form of its own."""
FEW_TOKENS = 4
"""Below this many tokens reading the weight takes the time, from it on computing does."""
IN_CACHE = 16 << 20
"""A model with fewer bytes of weights keeps them in the CPU's cache between steps; a larger one's come from memory."""
PACKED_FROM = 1 << 16
"""the fewest elements of a float32 weight that is packed in such a small model: smaller products end sooner without"""


def round_tokens(tokens: int) -> int:
    """Return the number of tokens, filled up by at most an eighth, for which oneDNN computes a product. It keeps some
    0.3 MB for every shape that it ever met, whatever its cache of primitives may hold, so that a server whose steps
    have any number of tokens would grow by hundreds of megabytes."""
    step = 1 << max(tokens.bit_length() - 4, 0)  # eight sizes between a power of two and the next
    return -(-tokens // step) * step


def with_few_shapes(multiply: Multiply) -> Multiply:
    """Let a product of oneDNN meet only the numbers of tokens of `round_tokens`."""

    def multiply_rounded(x: Tensor) -> Tensor:
        tokens = x.shape[0]
        missing = round_tokens(tokens) - tokens
        return multiply(F.pad(x, (0, 0, 0, missing)))[:tokens] if missing else multiply(x)

    return multiply_rounded


def hold_plain(weight: Tensor, bias: Tensor | None) -> Multiply:
    """Store the weight as it is."""
    if weight.dtype == torch.float32:
        return lambda x: F.linear(x, weight, bias)
    return with_few_shapes(lambda x: F.linear(x, weight, bias))


def hold_transposed(weight: Tensor, bias: Tensor | None) -> Multiply:
    """Store the weight as [in, out], which suits sgemm when tokens are few."""
    transposed = weight.t().contiguous()
    if bias is None:
        return lambda x: torch.mm(x, transposed)
    return lambda x: torch.addmm(bias, x, transposed)


def hold_packed(weight: Tensor, bias: Tensor | None) -> Multiply:
    """Store the weight in oneDNN's blocked layout."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
    linear = torch.ops.mkldnn._linear_pointwise.default
    return with_few_shapes(lambda x: linear(x, packed, bias, "none", [], ""))


def in_float32(hold: Hold) -> Hold:
    """Convert 16-bit weights to float32 once, for CPUs that would convert them in every product. Sums are float32
    either way."""

    def hold_converted(weight: Tensor, bias: Tensor | None) -> Multiply:
        dtype = weight.dtype
        linear = hold(weight.float(), None if bias is None else bias.float())
        return lambda x: linear(x.float()).to(dtype)

    return hold_converted


@dataclass(frozen=True)
class Choice:
    """Stores a weight in two ways, `few` for under FEW_TOKENS tokens and `many` for more. They may be the same."""

    few: Hold
    many: Hold

    def hold(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        """Store the weight, once if the two ways are the same."""
        few = self.few(weight, bias)
        if self.many is self.few:
            return few
        many = self.many(weight, bias)
        return lambda x: few(x) if x.shape[0] < FEW_TOKENS else many(x)


def choose_all(specs: list[LinearSpec], spare_bytes: int) -> dict[tuple[int, int, torch.dtype], Choice]:
    """Return for each (out, in, dtype) among `specs` how to store such a weight. `spare_bytes`: memory that the model
    may take beyond one copy of its weights. If a second copy in float32 does not fit, there is one copy, in the
    checkpoint's type."""
    count = sum(spec.out_features * spec.in_features for spec in specs)
    in_cache = sum(spec.out_features * spec.in_features * spec.dtype.itemsize for spec in specs) < IN_CACHE
    sizes = {(spec.out_features, spec.in_features, spec.dtype) for spec in specs}
    return {size: choose(*size, roomy=4 * count <= spare_bytes, in_cache=in_cache) for size in sizes}


def choose(out_features: int, in_features: int, dtype: torch.dtype, roomy: bool, in_cache: bool) -> Choice:
    """Return how to store a weight of these sizes. `roomy`: there is memory for a second copy in float32; `in_cache`:
    the model is so small that its weights stay in the CPU's cache."""
    packs = torch.backends.mkldnn.is_available()
    if dtype == torch.float32:  # MKL packs an unpacked weight anew in every product of several tokens
        large = not in_cache or out_features * in_features >= PACKED_FROM
        return Choice(hold_transposed, hold_packed if packs and large and roomy else hold_transposed)
    if has_units(dtype):
        return Choice(hold_packed, hold_packed)
    if not roomy:
        return Choice(hold_plain, hold_plain)
    wide = in_float32(hold_packed if packs and not in_cache else hold_transposed)
    return Choice(wide if in_cache else hold_plain, wide)  # from memory, half the bytes are worth converting each time


def has_units(dtype: torch.dtype) -> bool:
    """Tell whether this CPU multiplies 16-bit numbers of `dtype` as they are, and oneDNN has kernels for that."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    emulated = torch.cpu._is_avx2_supported() and not (  # oneDNN emulates bf16 on AVX-512 without it
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and not emulated


def spare_memory() -> int:
    """Return half of this machine's free memory in bytes; the rest is for the weights' first copy and the KV cache."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 // 2
    return 0
