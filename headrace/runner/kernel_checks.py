"""How each fast kernel is run beside its reference on the loaded model: made-up activations, the layers' own weights,
batches ragged as a server's. Launch sizes are those that serving uses too, so that nothing is compiled for this alone.

A kernel that the model does not use is not run. Knows nothing of what is done with one that disagrees but how to
replace it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headrace.attention.backend import Backend
from headrace.kernels._triton import DEVICE_FAMILY
from headrace.kernels.fp8 import quantize_per_token_reference
from headrace.kernels.moe_config import MoeConfig, pick_moe_config
from headrace.kernels.norm import HalfNormed
from headrace.kernels.rotary import rotary_and_cache_reference
from headrace.kernels.table import REFERENCE_KERNELS, KernelTable
from headrace.layers.attention import Attention
from headrace.layers.linear import Linear
from headrace.layers.mlp import GatedMLP
from headrace.layers.moe import SparseMoE
from headrace.layers.norm import RMSNorm
from headrace.runner.kv_cache import CacheShape, allocate_alone
from headrace.runner.self_check import Check, Switch, relative_error, switches

TOKENS = (1, 8, 24, 40)
"""One of each bucket of linears over few tokens, and of the ways to run experts"""
TIGHT = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 2e-5}
"""One rounding, now and then to the other side"""
WIDE = {torch.bfloat16: 1e-2, torch.float16: 5e-3, torch.float32: 2e-3}
"""Sums of products, in another order; float32 may go through TF32"""
EXPERTS = {torch.bfloat16: 3e-2, torch.float16: 1e-2, torch.float32: 2e-3}
"""The reference adds a token's experts up in the model's type"""
FP8 = 2e-2
"""Now and then one value of a row comes to lie one step away, or its scale does"""
Kind = TypeVar("Kind", bound=nn.Module)
Case = tuple[Callable[[Any], Any], float]
"""(what a kernel gives on inputs that it gets fresh, bound)"""


@dataclass(frozen=True)
class Subject:
    """The model under check, on one rank."""

    model: Any
    """a CausalModel of layers"""
    backend: Backend
    kernels: KernelTable
    shape: CacheShape
    vocab_size: int
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def _generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(0)

    def random(self, *shape: int) -> Tensor:
        """Normal, the same on every rank."""
        return torch.randn(shape, generator=self._generator, device=self.device).to(self.dtype)

    def ints(self, *values: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def layers(self, kind: type[Kind]) -> list[Kind]:
        return [module for module in self.model.modules() if isinstance(module, kind)]

    def ends(self, kind: type[Kind], key: Callable[[Kind], Any] = lambda _: None) -> list[Kind]:
        """The first and the last layer of each `key`."""
        first = {key(layer): layer for layer in reversed(self.layers(kind))}
        last = {key(layer): layer for layer in self.layers(kind)}
        return [layer for layer in self.layers(kind) if layer is first[key(layer)] or layer is last[key(layer)]]

    def fp8_linears(self) -> list[tuple[Linear, torch.dtype]]:
        """(the first and the last of each size, in which type they want their input)"""
        sized = self.ends(Linear, lambda layer: (layer.spec.in_features, layer.spec.out_features, layer.scheme))
        wanted = [(layer, layer.scheme.product.input_dtype(layer.spec)) for layer in sized]
        return [(layer, fp8) for layer, fp8 in wanted if fp8 is not None]

    def cache(self, layer: Attention, num_blocks: int) -> Tensor:
        """Like that of `layer`, zeros."""
        cache = allocate_alone(self.shape, self.shape.specs.index(layer.spec), num_blocks, self.device)
        assert cache is not None
        return cache

    def rope(self) -> Tensor:
        """# [positions, rotary_dim]"""
        tables = [vars(module)["cos_sin"] for module in self.model.modules() if "cos_sin" in vars(module)]
        table: Tensor = tables[0]
        return table


def kernel_checks(subject: Subject) -> Iterator[Check]:
    """Of the table's kernels, those behind switches."""
    held = switches(subject.kernels)
    for name, cases in KERNEL_CASES.items():
        if name in held and held[name].call is held[name].fast and (runs := list(cases(subject))):
            yield _check(subject, name, held[name], runs)


def _check(subject: Subject, name: str, switch: Switch, cases: list[Case]) -> Check:
    """Errors are told as multiples of the loosest bound."""
    loosest = max(bound for _, bound in cases)

    def error() -> float:
        worst = 0.0
        for run, bound in cases:
            found = relative_error(run(switch.fast), run(switch.reference))
            worst = max(worst, found * (loosest / bound if bound else 1.0))
        return worst

    def demote() -> str:
        switch.demote()
        if name != "step_angles":
            return "it"
        others = switches(subject.kernels)  # what the reference makes only its own kind can read
        if "rotary_and_cache" in others:
            others["rotary_and_cache"].demote()
        for layer in subject.layers(Attention):
            layer.decode = None
        return "it, and rotary_and_cache and decode_attention by what reads its angles"

    return Check(name, error, loosest, demote)


def _norms(subject: Subject) -> list[RMSNorm]:
    return subject.ends(RMSNorm, lambda norm: norm.weight.shape)


def _rms_norm(subject: Subject) -> Iterator[Case]:
    for norm in _norms(subject):
        for tokens in (1, 40):
            x, delta = (subject.random(tokens, norm.weight.shape[0]) for _ in range(2))
            yield partial(_call, x, norm.weight, norm.eps), TIGHT[subject.dtype]
            yield partial(_summed_and_normed, x, delta, (norm.weight, norm.eps)), TIGHT[subject.dtype]


def _rms_norm_quantized(subject: Subject) -> Iterator[Case]:
    for layer, fp8 in subject.fp8_linears():
        if (weight := layer.around.norm_weight) is not None:
            x, delta = (subject.random(40, weight.shape[0]) for _ in range(2))
            norm = (weight, layer.around.norm_eps, fp8)
            yield partial(_call, x, *norm), FP8
            yield partial(_summed_and_normed, x, delta, norm), FP8


def _summed_and_normed(x: Tensor, delta: Tensor, norm: tuple[Any, ...], kernel: Callable[..., Any]) -> Any:
    x = x.clone()
    return kernel(x, *norm, delta), x


def _silu_and_mul(subject: Subject) -> Iterator[Case]:
    for mlp in subject.ends(GatedMLP, lambda mlp: mlp.gate_up_proj.spec.out_features)[:1]:
        yield partial(_call, subject.random(40, mlp.gate_up_proj.spec.out_features)), TIGHT[subject.dtype]


def _silu_and_mul_quantized(subject: Subject) -> Iterator[Case]:
    wanted = {id(layer): fp8 for layer, fp8 in subject.fp8_linears()}
    for mlp in subject.layers(GatedMLP):
        if (fp8 := wanted.get(id(mlp.down_proj))) is not None:
            yield partial(_call, subject.random(40, mlp.gate_up_proj.spec.out_features), fp8), FP8


def _quantize_per_token(subject: Subject) -> Iterator[Case]:
    for size, fp8 in {layer.spec.in_features: fp8 for layer, fp8 in subject.fp8_linears()}.items():
        yield partial(_call, subject.random(40, size), fp8), FP8


def _fp8_linear(subject: Subject) -> Iterator[Case]:
    for layer, fp8 in subject.fp8_linears():
        if "weight_scale" not in layer.weights:  # a CPU has no such arithmetic
            continue
        for tokens in TOKENS:
            x = quantize_per_token_reference(subject.random(tokens, layer.spec.in_features), fp8)
            bias, weights = layer.weights.get("bias"), (layer.weights["weight"], layer.weights["weight_scale"])
            yield partial(_call, *x, *weights, bias, subject.dtype), WIDE[subject.dtype]


def _call(*arguments_then_kernel: Any) -> Any:
    *arguments, kernel = arguments_then_kernel
    return kernel(*arguments)


@dataclass(frozen=True)
class _Tokens:
    """New tokens of one attention layer: # [T, heads, head_dim] as projected, where they are and where they go."""

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    slots: Tensor
    cache: Tensor
    """# [2, blocks, block_size, Hkv, D], zeros"""
    kv_scale: Tensor | None
    norms: tuple[Tensor | None, Tensor | None]
    eps: float

    def rotate(self, angles: tuple[Tensor, Tensor | None], kernel: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        cache = self.cache.clone()
        out = kernel(self.q, self.k, self.v, *angles, cache, self.slots, *self.norms, self.eps, self.kv_scale)
        return out, *written(cache, self.slots)


def written(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """# [2, blocks, block_size, Hkv, D] -> (what lies in `slots`, what lies everywhere else)"""
    plain, slots = cache.float().flatten(1, 2), slots[slots >= 0]
    return plain[:, slots], plain.index_fill(1, slots, 0.0)


def attention_layers(subject: Subject) -> list[Attention]:
    """One of each kind."""
    return list({layer.spec: layer for layer in reversed(subject.layers(Attention))}.values())


def head_norms(layer: Attention) -> tuple[Tensor | None, Tensor | None]:
    """of q and k"""
    return (layer.q_norm.weight, layer.k_norm.weight) if layer.qk_norm else (None, None)


def _new_tokens(subject: Subject, layer: Attention) -> _Tokens:
    spec, size = layer.spec, subject.shape.block_size
    count = min(40, subject.rope().shape[0])
    slots = torch.arange(count, device=subject.device) + size
    slots[count // 2] = -1  # padding
    q, k, v = subject.random(count, sum(layer.heads), spec.head_dim).split(layer.heads, dim=1)
    positions = torch.arange(count, device=subject.device).flip(0)
    cache = subject.cache(layer, count // size + 3)
    return _Tokens(q, k, v, positions, slots, cache, cache_scale(subject), head_norms(layer), layer.eps)


def cache_scale(subject: Subject) -> Tensor | None:
    """For K and V of a few standard deviations in an fp8 cache."""
    if subject.shape.dtype.itemsize > 1:
        return None
    return torch.tensor([8.0, 9.0], device=subject.device) / torch.finfo(subject.shape.dtype).max


def cache_bound(subject: Subject, plain: dict[torch.dtype, float]) -> float:
    return max(plain[subject.dtype], FP8 if subject.shape.dtype.itemsize == 1 else plain.get(subject.shape.dtype, 0.0))


def _step_angles(subject: Subject) -> Iterator[Case]:
    table = subject.rope()
    tokens = _new_tokens(subject, subject.layers(Attention)[0])

    def run(kernel: Callable[..., Any]) -> tuple[Tensor, ...]:
        return tokens.rotate(kernel(table, tokens.positions), rotary_and_cache_reference)

    yield run, cache_bound(subject, TIGHT)


def _rotary_and_cache(subject: Subject) -> Iterator[Case]:
    for layer in attention_layers(subject):
        tokens = _new_tokens(subject, layer)
        angles = subject.kernels.step_angles(subject.rope(), tokens.positions)
        yield partial(tokens.rotate, angles), cache_bound(subject, TIGHT)


def _prepare_batch(subject: Subject) -> Iterator[Case]:
    size = subject.shape.block_size
    counts, computed = (1, 1, 24, 3 * size + 1), (0, 2 * size - 1, size + 1, 0)
    length = max(map(sum, zip(counts, computed, strict=True)))
    starts = subject.ints(0, *torch.tensor(counts).cumsum(0).tolist())
    tokens = (torch.arange(5 * length, dtype=torch.int32, device=subject.device) * 7).view(5, length)
    blocks = (torch.arange(5 * (length // size + 1), dtype=torch.int32, device=subject.device) * 3).view(5, -1)
    rows, done = subject.ints(3, 0, 4, 1), subject.ints(*computed)

    def run(kernel: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, ...]:
        made = kernel(rows, done, starts, tokens, blocks, size, sum(counts))
        return tuple(tensor.long() for tensor in made)

    yield run, 0.0


def _copy_words(subject: Subject) -> Iterator[Case]:
    words = torch.arange(1, 3001, dtype=torch.int32).repeat(2)
    source = words.pin_memory() if subject.device.type == "cuda" else words

    def run(kernel: Callable[..., None]) -> Tensor:
        copied = torch.zeros_like(words, device=subject.device)
        kernel(copied, source)
        return copied.long()

    yield run, 0.0


def _scatter_words(subject: Subject) -> Iterator[Case]:
    index = torch.randperm(4000, generator=torch.Generator().manual_seed(2))[:1500]
    values = torch.arange(1, 1501, dtype=torch.int32)
    if subject.device.type == "cuda":
        index, values = index.pin_memory(), values.pin_memory()

    def run(kernel: Callable[..., None]) -> Tensor:
        table = torch.zeros(40, 100, dtype=torch.int32, device=subject.device)
        kernel(table, index, values)
        return table.long()

    yield run, 0.0


def _settle_lengths(subject: Subject) -> Iterator[Case]:
    rows, known = subject.ints(3, 0, 2), subject.ints(9, 4, 0, 21)
    whose, offsets = subject.ints(3, 3, 0, dtype=torch.int64), subject.ints(0, 1, 0, dtype=torch.int64)

    def run(kernel: Callable[..., None]) -> Tensor:
        computed, lengths = subject.ints(24, 3, 0), subject.ints(26, 9, 0)
        positions = subject.ints(25, 26, 9, dtype=torch.int64)
        kernel(computed, lengths, rows, positions, whose, offsets, known)
        return torch.cat((computed, lengths, positions)).long()

    yield run, 0.0


def _commit_tokens(subject: Subject) -> Iterator[Case]:
    token_ids, rows = subject.ints(7, 3, 9, 8, dtype=torch.int64), subject.ints(2, 0, 3, 1, dtype=torch.int64)
    positions = subject.ints(0, 5, 3, 2, dtype=torch.int64)
    best = torch.tensor([1.0, float("nan"), float("-inf"), 2.0], device=subject.device).to(subject.dtype)
    raw_best = torch.tensor([1.0, float("nan"), 3.0, float("inf")], device=subject.device).to(subject.dtype)

    def run(
        kernel: Callable[..., None], rows: Tensor = rows, positions: Tensor = positions, offsets: Tensor | None = None
    ) -> Tensor:
        table = torch.full((4, 6), 7, dtype=torch.int32, device=subject.device)
        known = None if offsets is None else torch.zeros(4, dtype=torch.int32, device=subject.device)
        out = torch.zeros(4, dtype=torch.int64, pin_memory=subject.device.type == "cuda")
        drafts = () if offsets is None else (known, offsets, 3, -3)
        kernel(out, table, token_ids, best, raw_best, rows, positions, -1, -2, *drafts)
        if subject.device.type == "cuda":
            torch.cuda.synchronize(subject.device)
        found = [table.long().flatten(), out.to(subject.device)]
        return torch.cat(found if known is None else [*found, known.long()])

    yield run, 0.0
    # of three tokens of a row the second is no number, behind a right draft; then a row without drafts
    rows, positions = subject.ints(2, 2, 2, 0, dtype=torch.int64), subject.ints(1, 2, 3, 5, dtype=torch.int64)
    offsets = subject.ints(0, 1, 2, 0, dtype=torch.int64)
    yield partial(run, rows=rows, positions=positions, offsets=offsets), 0.0


def _logits(subject: Subject, rows: int = 6) -> Tensor:
    """# [rows, vocab_size], the best of each row the only one"""
    logits = subject.random(rows, subject.vocab_size) * 3
    best = torch.arange(rows, device=subject.device) * 7919 % subject.vocab_size
    logits[torch.arange(rows, device=subject.device), best] = 40.0
    return logits


def _best_token(subject: Subject) -> Iterator[Case]:
    yield partial(_call, _logits(subject)), 0.0


def _drawn(subject: Subject) -> tuple[Tensor, Tensor]:
    """(logits, temperatures); a row in three is greedy"""
    logits = subject.random(6, subject.vocab_size) * 3
    return logits, torch.tensor([0.7, 1.0, 0.0, 1.3, 0.2, 0.0], device=subject.device)


def _gumbel_argmax(subject: Subject) -> Iterator[Case]:
    logits, temperatures = _drawn(subject)
    logits = torch.where((temperatures > 0)[:, None], logits, _logits(subject))
    seeds = subject.ints(1, 2**40 + 3, 5, 2**62, 11, 13, dtype=torch.int64)
    positions = subject.ints(0, 7, 100, 2000, 31, 5, dtype=torch.int64)
    yield partial(_call, logits, temperatures, seeds, positions, None), 0.0
    yield partial(_call, logits, temperatures, seeds, positions, logits.float().median(dim=1).values), 0.0


def _filter_floor(subject: Subject) -> Iterator[Case]:
    logits, temperatures = _drawn(subject)
    top_k = subject.ints(10, 0, 5, 50, 0, 1)
    top_p = torch.tensor([0.9, 0.5, 0.9, 1.0, 0.99, 0.8], device=subject.device)
    min_p = torch.tensor([0.0, 0.1, 0.0, 0.0, 0.0, 0.01], device=subject.device)
    yield partial(_call, logits, temperatures, top_k, top_p, min_p), 0.0


def _logsumexp(subject: Subject) -> Iterator[Case]:
    yield partial(_call, subject.random(4, subject.vocab_size) * 3), TIGHT[torch.float32]


def _fused_moe(subject: Subject) -> Iterator[Case]:
    for layer in subject.ends(SparseMoE):
        for tokens in TOKENS:
            x = subject.random(tokens, layer.spec.hidden_size)
            shared = subject.random(tokens, layer.spec.hidden_size) if layer.has_shared else None
            rounds = layer.experts.w13_scale is not None  # some tokens, as their configuration says
            top_k, count = layer.spec.experts_per_token, layer.spec.num_experts
            config = pick_moe_config(tokens, top_k, count, 1, DEVICE_FAMILY) if rounds else None
            expected, chosen = REFERENCE_KERNELS.fused_moe(x, layer.experts, shared, torch.zeros_like(x), config)
            bound = EXPERTS[subject.dtype] + (FP8 if rounds else 0.0)
            yield partial(_experts, x, layer, shared, config, expected, chosen), bound


def _experts(
    x: Tensor,
    layer: SparseMoE,
    shared: Tensor | None,
    config: MoeConfig | None,
    expected: Any,
    chosen: Tensor,
    kernel: Callable[..., Any],
) -> Tensor:
    """A token whose choice of experts was a close call may choose otherwise: it is taken as the reference had it,
    unless there are many of them. Beside what comes out stands what the next norm makes of it, where it is half done.
    """
    out, ids = kernel(x, layer.experts, shared, torch.zeros_like(x), config)
    if isinstance(out, HalfNormed):
        out = torch.stack((out.x, out.normed(layer.experts.eps).to(x.dtype)))
        expected = torch.stack((expected.x, expected.normed(layer.experts.eps).to(x.dtype)))
    other = (ids.sort(dim=1).values != chosen.sort(dim=1).values).any(dim=1)
    if int(other.sum()) > max(1, len(x) // 2):
        return out.fill_(float("nan"))
    return torch.where(other[:, None], expected, out)


KERNEL_CASES: dict[str, Callable[[Subject], Iterator[Case]]] = {
    "rms_norm": _rms_norm,
    "rms_norm_quantized": _rms_norm_quantized,
    "silu_and_mul": _silu_and_mul,
    "silu_and_mul_quantized": _silu_and_mul_quantized,
    "quantize_per_token": _quantize_per_token,
    "fp8_linear": _fp8_linear,
    "step_angles": _step_angles,
    "rotary_and_cache": _rotary_and_cache,
    "copy_words": _copy_words,
    "scatter_words": _scatter_words,
    "prepare_batch": _prepare_batch,
    "settle_lengths": _settle_lengths,
    "commit_tokens": _commit_tokens,
    "best_token": _best_token,
    "gumbel_argmax": _gumbel_argmax,
    "filter_floor": _filter_floor,
    "logsumexp": _logsumexp,
    "fused_moe": _fused_moe,
}
"""Every kernel of the table, in the order in which they are checked"""
