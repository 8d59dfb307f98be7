"""Checks each fast kernel against its reference on the loaded model: the cases of kernels/cases.py with made-up
activations and the layers' own weights and sizes.

Launch sizes are those that serving uses too, so that nothing is compiled for the checks alone. A kernel that the model
does not use is not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headrace.attention.backend import Backend
from headrace.attention.spec import AttentionSpec
from headrace.kernels import cases
from headrace.kernels.adapters import AdapterWeights
from headrace.kernels.cases import ROUNDED, Case, Cases, Inputs, NewTokens, new_tokens
from headrace.kernels.fp8 import NarrowWeight, Rounding
from headrace.kernels.table import KernelTable
from headrace.layers.adapters import Seat
from headrace.layers.attention import Attention, QKNorm, ValueNorm
from headrace.layers.gated_delta_net import GatedDeltaNet
from headrace.layers.indexer import Indexer
from headrace.layers.latent_attention import LatentAttention
from headrace.layers.linear import Linear
from headrace.layers.mlp import GatedMLP, PlainMLP
from headrace.layers.moe import SparseMoE
from headrace.layers.norm import LayerNorm, RMSNorm, Scale
from headrace.layers.rotary import Rotary
from headrace.quantization.fp8 import RoundingProduct
from headrace.quantization.gpu_linear import has_library
from headrace.quantization.packed import PackedProduct
from headrace.runner.kv_cache import CacheShape, IndexedCache, allocate_alone, without_index
from headrace.runner.self_check import Check, Switch, switches

TOKENS = (1, 8, 24, 40)
"""One number of tokens for each bucket of linears over few tokens, and for each way to run experts"""
ON_ANY_CHIP = 2e-5
"""The smallest bound where rounding may differ at all: float32 has other instructions on each chip"""
WIDE = {torch.bfloat16: 1e-2, torch.float16: 5e-3, torch.float32: 2e-3}
"""Bounds of sums of products that are added in another order; float32 may go through TF32"""
UNROTATED = 1000
"""Positions of made-up tokens of a model whose layers are not rotated"""
Kind = TypeVar("Kind", bound=nn.Module)


@dataclass(frozen=True)
class Subject:
    """Holds the model under check on one rank, and what it runs with."""

    model: Any
    """a CausalModel of the runner"""
    backend: Backend
    kernels: KernelTable
    shape: CacheShape
    vocab_size: int
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def inputs(self) -> Inputs:
        """A source of made-up inputs, the same on every rank."""
        return Inputs(self.dtype, self.device)

    def layers(self, kind: type[Kind]) -> list[Kind]:
        """Return all layers of a class."""
        return [module for module in self.model.modules() if isinstance(module, kind)]

    def ends(self, kind: type[Kind], key: Callable[[Kind], Any] = lambda _: None) -> list[Kind]:
        """Return the first and the last layer of each `key`."""
        first = {key(layer): layer for layer in reversed(self.layers(kind))}
        last = {key(layer): layer for layer in self.layers(kind)}
        return [layer for layer in self.layers(kind) if layer is first[key(layer)] or layer is last[key(layer)]]

    def kinds(self, kind: type[Kind], key: Callable[[Kind], Any]) -> list[Kind]:
        """Return the first layer of each `key`."""
        return list({key(layer): layer for layer in reversed(self.layers(kind))}.values())

    def rounding_linears(self) -> list[tuple[Linear, Rounding]]:
        """Return the first and the last linear of each size that rounds its input, each with how it does."""
        sized = self.ends(Linear, lambda layer: (layer.spec.in_features, layer.spec.out_features, layer.scheme))
        return [(layer, layer.rounding) for layer in sized if layer.rounding is not None]

    def attention_layers(self) -> list[Attention]:
        """Return one attention layer of each kind that has a cache."""
        return [layer for layer in self.kinds(Attention, lambda layer: layer.spec) if layer.spec.causal]

    @property
    def decodes(self) -> bool:
        """Tell whether a step may add a token to a text whose others are cached; an encoder computes it whole."""
        return all(layer.spec.causal for layer in self.layers(Attention))

    def latent_layers(self) -> list[LatentAttention]:
        """Return one layer of latent attention of each kind."""
        return list({layer.spec: layer for layer in reversed(self.layers(LatentAttention))}.values())

    def indexed_layers(self) -> list[LatentAttention]:
        """Return one layer with an index of its own of each kind."""
        return [layer for layer in self.latent_layers() if layer.indexer is not None]

    def drop_fused_decode(self) -> None:
        """Let all layers decode by separate kernels from now on."""
        for layer in self.layers(Attention):
            layer.decode = None

    def cache(self, spec: AttentionSpec, num_blocks: int) -> Tensor:
        """Return a cache like that of a layer of `spec`, filled with zeros; that of an index is left out."""
        cache = allocate_alone(self.shape, self.shape.specs.index(spec), num_blocks, self.device)
        assert cache is not None
        return without_index(cache)

    def index_keys(self, layer: LatentAttention, num_blocks: int) -> Tensor:
        """Return a cache like that of the keys of a layer's index, filled with zeros."""
        cache = allocate_alone(self.shape, self.shape.specs.index(layer.spec), num_blocks, self.device)
        assert isinstance(cache, IndexedCache)
        return cache.index_keys

    def rope(self, layer: Attention | LatentAttention) -> Tensor | None:
        """Return the table of rotary angles of a layer # [positions, rotary_dim]; None: it is not rotated."""
        return next((rotary.cos_sin for rotary in self.layers(Rotary) if rotary.turns == layer.turns), None)

    @property
    def positions(self) -> int:
        """The positions of the tables of rotary angles, if there are any."""
        tables = [rotary.cos_sin for rotary in self.layers(Rotary) if rotary.cos_sin is not None]
        return min((table.shape[0] for table in tables), default=UNROTATED)

    def temperature(self, layer: Attention, count: int) -> Tensor | None:
        """Return made-up factors of queries # [count] if the layer has such."""
        heated = layer.turns is not None and layer.turns.temperature is not None
        return self.inputs.uniform(count) + 1.5 if heated else None


def kernel_checks(subject: Subject) -> Iterator[Check]:
    """Yield a check of each kernel that has a switch and is not demoted."""
    held = switches(subject.kernels)
    for name, make_cases in KERNEL_CASES.items():
        if name in held and held[name].call is held[name].fast and (runs := list(make_cases(subject))):
            yield _check(subject, name, held[name], runs)


def _check(subject: Subject, name: str, switch: Switch, runs: list[Case]) -> Check:
    """Return a check of one kernel over `runs`, whose errors are scaled to the loosest of their bounds."""
    bounds = [max(case.bound, ON_ANY_CHIP) if case.bound else 0.0 for case in runs]
    loosest = max(bounds)

    def error() -> float:
        errors = [case.error(switch.fast, switch.reference) for case in runs]
        return max(error * (loosest / bound if bound else 1.0) for error, bound in zip(errors, bounds, strict=True))

    def demote() -> str:
        switch.demote()
        if name != "step_angles":
            return "it"
        others = switches(subject.kernels)  # the angles that the reference makes are read by references alone
        for reader in ("rotary_and_cache", "latent_rotary_and_cache"):
            if reader in others:
                others[reader].demote()
        subject.drop_fused_decode()
        return "it, and rotary_and_cache and decode_attention by what reads its angles"

    return Check(name, error, loosest, demote)


def _rms_norm(subject: Subject) -> Cases:
    for norm in subject.ends(RMSNorm, lambda norm: (norm.weight.shape, norm.weight.dtype)):
        for tokens in (1, 40):
            yield from cases.rms_norm(subject.inputs, tokens, norm.weight, norm.eps)


def _rms_norm_quantized(subject: Subject) -> Cases:
    for layer, to in subject.rounding_linears():
        if (weight := layer.fused.norm_weight) is not None:
            yield from cases.rms_norm(subject.inputs, 40, weight, layer.fused.norm_eps, to)


def _gate_and_mul(subject: Subject) -> Cases:
    for width, activation, gated in {(mlp.width, mlp.activation, mlp.gated): None for mlp in _mlps(subject)}:
        yield from cases.gate_and_mul(subject.inputs, 40, width, activation, gated=gated)


def _gate_and_mul_quantized(subject: Subject) -> Cases:
    wanted = {id(layer): to for layer, to in subject.rounding_linears()}
    for mlp in _mlps(subject):
        if (to := wanted.get(id(mlp.second))) is not None:
            yield from cases.gate_and_mul(subject.inputs, 40, mlp.width, mlp.activation, to, gated=mlp.gated)


def _mlps(subject: Subject) -> list[GatedMLP | PlainMLP]:
    return [*subject.layers(GatedMLP), *subject.layers(PlainMLP)]


def _layer_norm(subject: Subject) -> Cases:
    for norm in subject.kinds(LayerNorm, lambda norm: (norm.size, norm.weight is None, norm.bias is None)):
        yield from cases.layer_norm(subject.inputs, 40, norm.size, norm.weight, norm.bias, norm.eps)


def _add_up(subject: Subject) -> Cases:
    behind = [norm for norm in subject.layers(RMSNorm) if norm.pending and not norm.next_makes_sum]
    for norm in behind[:1]:
        yield from cases.add_up(subject.inputs, 40, norm.weight, norm.eps)


def _qk_squares(subject: Subject) -> Cases:
    for norm in subject.kinds(QKNorm, lambda norm: (norm.heads, norm.wide)):
        if norm.wide:
            yield from cases.qk_squares(subject.inputs, 24, norm.heads, norm.weight.shape[1])


def _qk_norm(subject: Subject) -> Cases:
    for norm in subject.kinds(QKNorm, lambda norm: (norm.heads, norm.wide)):
        of_norm = norm.heads, norm.norm.eps, norm.norm.kind == "layer", norm.wide
        yield from cases.qk_norm(subject.inputs, 24, norm.weight, *of_norm)
    for values in subject.kinds(ValueNorm, lambda norm: norm.weight.shape):
        yield from cases.qk_norm(subject.inputs, 24, values.weight, values.heads, values.eps, False, False)


def _scale(subject: Subject) -> Cases:
    for layer in subject.kinds(Scale, lambda layer: layer.width):
        yield from cases.scale(subject.inputs, 24, layer.width)


def _clip(subject: Subject) -> Cases:
    for layer in subject.attention_layers():
        if layer.clip is not None:
            yield from cases.clip(subject.inputs, 24, layer.qkv_proj.spec.out_features, layer.clip)


def _gate_heads(subject: Subject) -> Cases:
    for layer in subject.attention_layers():
        if layer.output_gate:
            yield from cases.gate_heads(subject.inputs, 24, layer.heads[0], layer.heads[1], layer.spec.head_dim)


def _adapters(subject: Subject, of_kernel: Callable[[Inputs, int, AdapterWeights], Cases]) -> Cases:
    for layer in subject.ends(Linear, lambda layer: (layer.spec.in_features, layer.spec.out_features)):
        if isinstance(seat := layer.fused.addend, Seat):
            made = cases.made_up_adapters(subject.inputs, seat.weights.sizes, layer.spec.in_features, seat.weights.rank)
            for tokens in TOKENS[::3]:
                yield from of_kernel(subject.inputs, tokens, made)


def _quantize(subject: Subject) -> Cases:
    for size, to in {layer.spec.in_features: to for layer, to in subject.rounding_linears()}.items():
        yield from cases.quantize(subject.inputs, 40, size, to)


def _fp8_linear(subject: Subject) -> Cases:
    for layer, _ in subject.rounding_linears():
        if (weight := _narrow(layer)) is not None and has_library(weight):
            for tokens in TOKENS:
                held = weight.values, weight.scales, layer.weights.get("bias")
                yield from cases.fp8_linear(subject.inputs, tokens, *held)


def _widen_tiled(subject: Subject) -> Cases:
    for layer in subject.ends(Linear, lambda layer: (layer.spec.in_features, layer.spec.out_features, layer.scheme)):
        if isinstance(product := layer.scheme.product, PackedProduct) and (held := product.held_in(layer.weights)):
            yield from cases.widen_tiled(subject.inputs, held)


def _narrow(layer: Linear) -> NarrowWeight | None:
    """Return the layer's weight of 8 bits; None on a CPU, which has no such arithmetic."""
    product = layer.scheme.product
    if not isinstance(product, RoundingProduct) or "weight_scale" not in layer.weights:
        return None
    return product.narrow_weight(layer.spec, layer.weights)


def _narrow_linear(subject: Subject) -> Cases:
    for layer, to in subject.rounding_linears():
        if (weight := _narrow(layer)) is not None and not has_library(weight):
            for tokens in (*TOKENS, 100, 300):
                yield from cases.narrow_linear(subject.inputs, tokens, weight, to, layer.weights.get("bias"))


def _new_tokens(subject: Subject, layer: Attention) -> NewTokens:
    cache = subject.cache(layer.spec, 40 // subject.shape.block_size + 3)
    of_layer = {
        "kv_scale": cache_scale(subject),
        "norms": layer.head_weights(),
        "eps": layer.eps,
        "interleaved": layer.spec.interleaved,
        "q_weight": layer.q_weight,
    }
    made = new_tokens(subject.inputs, layer.heads, layer.spec.head_dim, subject.positions, cache, **of_layer)
    return replace(made, temperature=subject.temperature(layer, len(made.q)))


def cache_scale(subject: Subject) -> Tensor | None:
    """Return scales # [2] of an fp8 cache for K and V of a few standard deviations; None: the cache is not fp8."""
    if subject.shape.dtype.itemsize > 1:
        return None
    return torch.tensor([8.0, 9.0], device=subject.device) / torch.finfo(subject.shape.dtype).max


def cache_bound(subject: Subject, plain: dict[torch.dtype, float]) -> float:
    """Return the bound of what passes through the cache, where `plain` are the bounds without it."""
    narrow = subject.shape.dtype
    return max(plain[subject.dtype], cases.ROUNDED_FP8 if narrow.itemsize == 1 else plain.get(narrow, 0.0))


def _step_angles(subject: Subject) -> Cases:
    for layer in subject.attention_layers():
        if (table := subject.rope(layer)) is not None:
            yield from cases.step_angles(table, _new_tokens(subject, layer), cache_bound(subject, ROUNDED))


def _rotary_and_cache(subject: Subject) -> Cases:
    for layer in subject.attention_layers():
        tokens = _new_tokens(subject, layer)
        table = subject.rope(layer)
        angles = (None, None) if table is None else subject.kernels.step_angles(table, tokens.positions)
        yield from cases.rotary_and_cache(angles, tokens, cache_bound(subject, ROUNDED))
    for latent in subject.indexed_layers()[:1]:
        index, table = latent.indexer, subject.rope(latent)
        assert index is not None
        assert table is not None
        cache = subject.index_keys(latent, 40 // subject.shape.block_size + 3)
        scale = index.unscaled if cache.dtype.itemsize == 1 else None
        of_index = {"kv_scale": scale, "interleaved": index.interleaved}
        tokens = new_tokens(subject.inputs, (index.heads, 1, 0), index.dim, subject.positions, cache, **of_index)
        angles = subject.kernels.step_angles(table, tokens.positions)
        yield from cases.rotary_and_cache(angles, tokens, cache_bound(subject, ROUNDED))


def _latent_rotary_and_cache(subject: Subject) -> Cases:
    for layer in subject.latent_layers():
        table, mixer = subject.rope(layer), layer.mixer
        assert table is not None
        cache = subject.cache(layer.spec, 40 // subject.shape.block_size + 3)
        norm, bound = layer.kv_a_layernorm, cache_bound(subject, ROUNDED)
        angles = partial(subject.kernels.step_angles, table)
        yield from cases.latent_rotary_and_cache(
            subject.inputs, layer.spec.num_heads, mixer.nope_dim, norm.weight, norm.eps, angles, subject.positions,
            cache, bound, cache_scale(subject), layer.spec.interleaved, layer.heated,
        )  # fmt: skip


def _prepare_batch(subject: Subject) -> Cases:
    size = subject.shape.block_size
    return cases.prepare_batch(subject.inputs, (1, 1, 24, 3 * size + 1), (0, 2 * size - 1, size + 1, 0), size)


def _fused_moe(subject: Subject) -> Cases:
    for layer in subject.ends(SparseMoE):
        for tokens in TOKENS:
            yield from cases.fused_moe(subject.inputs, tokens, layer.experts, layer.has_shared)
            if layer.experts.joined is not None:  # which are then computed too
                yield from cases.fused_moe(subject.inputs, tokens, layer.experts, shared=False)
        for seat in layer.seats[:1]:
            for tokens in TOKENS[::3]:
                yield from cases.fused_moe(subject.inputs, tokens, layer.experts, layer.has_shared, seat.weights.rank)


def _gated_delta_step(subject: Subject) -> Cases:
    for layer in subject.ends(GatedDeltaNet):
        for counts, known in (((1,), (5,)), ((1, 1, 1), (2, 0, 40))):
            yield from cases.gated_delta(subject.inputs, layer.heads, layer.held, counts, known)


def _gated_delta_scan(subject: Subject) -> Cases:
    counts, known = (1, 1, 70, 2), (5, 40, 0, 9)
    for layer in subject.ends(GatedDeltaNet):
        if (most := layer.heads.slots) > 1:  # steps of decodes with guesses
            yield from cases.gated_delta(subject.inputs, layer.heads, layer.held, (most, most), (5, 0), 0, True)
        first = 0 if layer.in_turn else 2
        yield from cases.gated_delta(subject.inputs, layer.heads, layer.held, counts, known, first, layer.in_turn)


def _index_scores(subject: Subject) -> Cases:
    for index in subject.ends(Indexer)[:1]:
        for requests in _past_top_k(index):
            sizes = index.heads, index.dim, *requests, index.spec.block_size, index.top_k
            yield from cases.index_scores(subject.inputs, *sizes, subject.shape.dtype)


def _top_keys(subject: Subject) -> Cases:
    for index in subject.ends(Indexer)[:1]:
        for requests in _past_top_k(index):
            yield from cases.top_keys(subject.inputs, *requests, index.top_k)


def _past_top_k(index: Indexer) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield how many tokens requests have and how many are known before them: decodes, and a prompt that comes to see
    more keys than the index chooses."""
    yield (1, 1), (index.top_k + 300, index.top_k - 1)
    yield (1, 24), (index.top_k + 100, index.top_k - 5)


KERNEL_CASES: dict[str, Callable[[Subject], Cases]] = {
    "rms_norm": _rms_norm,
    "rms_norm_quantized": _rms_norm_quantized,
    "layer_norm": _layer_norm,
    "add_up": _add_up,
    "gate_and_mul": _gate_and_mul,
    "gate_and_mul_quantized": _gate_and_mul_quantized,
    "quantize": _quantize,
    "fp8_linear": _fp8_linear,
    "narrow_linear": _narrow_linear,
    "qk_squares": _qk_squares,
    "qk_norm": _qk_norm,
    "clip": _clip,
    "gate_heads": _gate_heads,
    "scale": _scale,
    "shrink_adapters": partial(_adapters, of_kernel=cases.shrink_adapters),
    "expand_adapters": partial(_adapters, of_kernel=cases.expand_adapters),
    "step_angles": _step_angles,
    "rotary_and_cache": _rotary_and_cache,
    "latent_rotary_and_cache": _latent_rotary_and_cache,
    "copy_words": lambda subject: cases.copy_words(subject.inputs, 6000),
    "scatter_words": lambda subject: cases.scatter_words(subject.inputs, 1500),
    "prepare_batch": _prepare_batch,
    "settle_lengths": lambda subject: cases.settle_lengths(subject.inputs),
    "commit_tokens": lambda subject: cases.commit_tokens(subject.inputs, 8),
    "propose_ngram": lambda subject: cases.propose_ngram(subject.inputs, (9, 1, 0, 2000), 5),
    "mask_tokens": lambda subject: cases.mask_tokens(subject.inputs, 6, subject.vocab_size),
    "best_token": lambda subject: cases.best_token(subject.inputs, 6, subject.vocab_size),
    "gumbel_argmax": lambda subject: cases.gumbel_argmax(subject.inputs, 6, subject.vocab_size),
    "filter_floor": lambda subject: cases.filter_floor(subject.inputs, 6, subject.vocab_size),
    "logsumexp": lambda subject: cases.logsumexp(subject.inputs, 4, subject.vocab_size),
    "fused_moe": _fused_moe,
    "gated_delta_step": _gated_delta_step,
    "gated_delta_scan": _gated_delta_scan,
    "index_scores": _index_scores,
    "top_keys": _top_keys,
    "widen_tiled": _widen_tiled,
}
"""The cases of every kernel of the table, in the order in which they are checked"""
