"""Compares attention over latents, in both of its forms, with its references at load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.attention.triton_attn import TritonAttention
from headrace.errors import ConfigError
from headrace.kernels._triton import DEVICE_FAMILY
from headrace.kernels.cases import relative_error
from headrace.kernels.latent import latent_attention_reference
from headrace.kernels.latent_config import expanded_launch
from headrace.kernels.latent_prompt import expanded_attention_reference
from headrace.layers.latent_attention import LatentAttention
from headrace.runner.kernel_checks import WIDE, Subject, cache_bound, cache_scale
from headrace.runner.made_up_cache import filled_cache, longest_sequence
from headrace.runner.self_check import Check

DECODES = (1, 8, 64)
"""Requests of a step, so that keys are split into many parts, into few and not at all"""


def latent_checks(subject: Subject) -> Iterator[Check]:
    """Yield the checks of each kind of layer."""
    if not isinstance(subject.backend, TritonAttention):  # torch's is the reference of a CPU
        return
    longest, size = longest_sequence(subject), subject.shape.block_size
    mixed = [1, 1, 3, 40], [longest, 0, 3, min(longest, 40 + size + 1)]
    for layer in subject.latent_layers():
        for requests in DECODES:
            yield _check(subject, layer, [1] * requests, [longest, *([5, 0] * requests)][:requests])
        yield _check(subject, layer, *mixed)
        yield _prompt_check(subject, layer, subject.backend)
        if (top_k := layer.spec.sparse_top_k) is not None:
            few = [longest, *([5, 0] * DECODES[1])][: DECODES[1]]
            for counts, lengths in (([1] * len(few), few), mixed):
                yield _check(subject, layer, counts, lengths, _some_keys(subject, counts, lengths, top_k))


def _some_keys(subject: Subject, counts: list[int], lengths: list[int], top_k: int) -> Tensor:
    """Return for each token about half of the keys that it sees, in any order, at least one # [tokens, top_k] int32,
    and -1 behind them."""
    rows = []
    for count, length in zip(counts, lengths, strict=True):
        for position in range(max(length - count, 0), max(length, count)):
            seen = position + 1 if length else 0
            some = subject.inputs.some_of(min(top_k, -(-seen // 2)), seen).int()
            rows.append(F.pad(some, (0, top_k - len(some)), value=-1))
    return torch.stack(rows)


def _check(
    subject: Subject, layer: LatentAttention, counts: list[int], lengths: list[int], chosen: Tensor | None = None
) -> Check:
    """Check a step in the absorbed form; `chosen`: over these keys alone."""

    def error() -> float:
        cache, metadata = filled_cache(subject, layer.spec, counts, lengths)
        spec, heads, scale = layer.spec, layer.kv_b_proj.heads, cache_scale(subject)
        q = subject.inputs.random(sum(counts), spec.num_heads, layer.mixer.head_dim)
        out = layer.attend(q, heads, cache, metadata, spec, scale, chosen=chosen)
        attended = latent_attention_reference(
            heads.absorb(q), q[..., heads.nope_dim :], cache, metadata.sequences(-1), spec.scale, scale, chosen
        )
        return relative_error(out, heads.values(attended))

    def demote() -> str:
        raise ConfigError(
            f"attention over latents by {subject.backend.name} disagrees with its reference on this model and device: "
            f"it must not serve; choose another --attention-backend"
        )

    return Check("latent_attention", error, cache_bound(subject, WIDE), demote)


def _prompt_check(subject: Subject, layer: LatentAttention, backend: TritonAttention) -> Check:
    """Check prompts with keys and values of each head, behind decodes, in one piece and in several."""

    def error() -> float:
        counts = [1, min(200, longest_sequence(subject)), 3, 40]
        lengths = [9, longest_sequence(subject), 3, 40]
        spec, heads, scale = layer.spec, layer.kv_b_proj.heads, cache_scale(subject)
        cache, metadata = filled_cache(subject, spec, counts, lengths)
        q = subject.inputs.random(sum(counts), spec.num_heads, layer.mixer.head_dim)
        sizes, keys = heads.sizes(q), sum(lengths[1:])
        launch = expanded_launch(sum(counts[1:]), len(counts) - 1, keys, sizes, q.element_size(), DEVICE_FAMILY)
        prompts = replace(metadata, prompt_keys=keys, plan={})
        plan, _ = backend.planned_latents(q, heads, cache, prompts, spec)
        key_starts = subject.inputs.ints(0, *accumulate(lengths[1:]))
        expected = expanded_attention_reference(q, heads, cache, metadata.sequences(-1), spec.scale, scale)
        found = []
        for piece in (launch.piece, 64):  # also where the absorbed form would be cheaper
            of_pieces = replace(plan, chunk=None, expanded=replace(launch, piece=piece))
            prompts.plan["latent", spec, None] = of_pieces, key_starts
            found.append(layer.attend(q, heads, cache, prompts, spec, scale))
        return relative_error(tuple(found), (expected, expected))

    def demote() -> str:
        backend.expands = False
        return "the absorbed form"

    return Check("expanded_attention", error, cache_bound(subject, WIDE), demote)
