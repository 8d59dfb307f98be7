"""Implements the backend TORCH_WHOLE: encoders' attention, in which each token of a text sees all others, over the keys
of the step itself. Nothing is cached, so a text is computed in one step.

Texts of similar length are padded to one batch, whose places are found once a step for all layers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.attention.metadata import AttentionMetadata
from headrace.attention.spec import AttentionSpec

SHORTEST = 0.6
"""The share of a batch's longest text that its shortest has at least"""


class _Group(NamedTuple):
    """Holds B texts padded to L tokens."""

    tokens: Tensor
    """[B, L] int64: tokens of the step, a text's last one repeated as padding"""
    mask: Tensor | None
    """[B, 1, L or 1, L] bool: which keys each query sees; None: all"""
    places: Tensor
    """[n] int64: where in the flat batch its texts' tokens are"""
    owners: Tensor
    """[n] int64: the same tokens in the step"""


class TorchWhole:
    """Serves layers that are not causal, on any device."""

    name = "TORCH_WHOLE"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata, spec: AttentionSpec,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend to q [T, Hq, D], k and v [T, Hkv, D], rotated; return # [T, Hq, D]. Tokens of padding get zeros."""
        groups = metadata.plan.get(spec)
        if groups is None:
            groups = metadata.plan[spec] = _plan(metadata, spec, q.device)
        out = q.new_zeros(q.shape) if out is None else out.zero_()
        shared = spec.num_heads != spec.num_kv_heads
        for group in groups:
            query, key, value = (x[group.tokens].transpose(1, 2) for x in (q, k, v))
            attended = F.scaled_dot_product_attention(
                query, key, value, group.mask, scale=spec.scale, enable_gqa=shared
            )
            out[group.owners] = attended.transpose(1, 2).flatten(0, 1)[group.places]
        return out


def _plan(metadata: AttentionMetadata, spec: AttentionSpec, device: torch.device) -> list[_Group]:
    starts, lengths = metadata.query_start_loc.cpu().numpy(), metadata.seq_lens.cpu().numpy()
    texts = [(int(length), int(start)) for start, length in zip(starts[:-1], lengths, strict=True) if length > 0]
    groups: list[list[tuple[int, int]]] = []
    for length, start in sorted(texts, reverse=True):
        if groups and length >= SHORTEST * groups[-1][0][0]:
            groups[-1].append((length, start))
        else:
            groups.append([(length, start)])
    return [_group(np.array(members), spec.sliding_window, device) for members in groups]


def _group(members: np.ndarray, window: int | None, device: torch.device) -> _Group:
    lengths, starts = members[:, 0], members[:, 1]
    longest = int(lengths.max())
    at = np.arange(longest)
    tokens = starts[:, None] + np.minimum(at, lengths[:, None] - 1)
    inside = at < lengths[:, None]
    mask = None
    if not inside.all():
        mask = inside[:, None, None, :]
    if window is not None and longest > window:
        near = np.abs(at[:, None] - at) < window
        mask = near & inside[:, None, None, :]
        mask |= ~inside[:, None, :, None] & (at == 0)  # a query of padding sees something: none would give NaN
    places = np.flatnonzero(inside)
    return _Group(
        torch.from_numpy(tokens).to(device),
        None if mask is None else torch.from_numpy(mask).to(device),
        torch.from_numpy(places).to(device),
        torch.from_numpy(tokens.reshape(-1)[places]).to(device),
    )
