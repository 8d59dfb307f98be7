"""Rules that change single logits of single requests: logit_bias, min_tokens and bad_words, as flat device tables.

The tables hold only what live requests asked for and are rebuilt (one copy to the device) when such a request comes
or goes; a step applies all of them at once, however many requests they belong to. Knows token ids and rows; not who
asked, nor how a token is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.transfer import to_device
from headrace.step import NewRow

FOREVER = 2**31 - 1
CHUNK_ELEMENTS = 1 << 22
"""Prefix tokens compared at once: bounds the memory that long bad words take in a step."""


@dataclass(frozen=True)
class _RowRules:
    """What one request brings, before it is merged with the others."""

    biases: list[tuple[int, float]] = field(default_factory=list)
    """(token id, value)"""
    bans: list[tuple[int, int]] = field(default_factory=list)
    """(token id, number of output tokens from which on it is allowed)"""
    phrases: list[tuple[int, list[int]]] = field(default_factory=list)
    """(token id, the tokens after which it is forbidden: at least one)"""


@dataclass(frozen=True)
class _DeviceRules:
    """The rules of all live rows; R differs between the three kinds. Token ids and rows are int64 [R]."""

    bias_rows: Tensor
    bias_tokens: Tensor
    bias_values: Tensor
    """[R] float32"""
    ban_rows: Tensor
    ban_tokens: Tensor
    ban_until: Tensor
    """[R] int32"""
    phrase_rows: Tensor
    phrase_tokens: Tensor
    prefix_lens: Tensor
    """[R] int64"""
    prefixes: Tensor
    """[R, longest prefix] int32, right-aligned"""


class RuleTable:
    """`add` and `remove` on the host; `apply_` in the step."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.device = device
        self._rows: dict[int, _RowRules] = {}
        self._merged: _DeviceRules | None = None

    def add(self, new: NewRow) -> None:
        vocab_size, params = self.vocab_size, new.params
        rules = _RowRules()
        rules.biases.extend((token, bias) for token, bias in (params.logit_bias or {}).items() if token < vocab_size)
        if params.min_tokens > 0:
            rules.bans.extend((t, params.min_tokens) for t in set(new.stop_token_ids) if t < vocab_size)
        for *prefix, last in new.bad_words_token_ids:
            if last >= vocab_size:
                continue
            if prefix:
                rules.phrases.append((last, prefix))
            else:
                rules.bans.append((last, FOREVER))
        self._rows[new.row] = rules
        self._merged = None

    def remove(self, row: int) -> None:
        self._rows.pop(row, None)
        self._merged = None

    def apply_(
        self, logits: Tensor, rows: Tensor, num_tokens: Tensor, num_outputs: Tensor, token_table: Tensor
    ) -> None:
        """Change `logits` [n, vocab_size] float32, contiguous, in place.

        rows, num_tokens, num_outputs [n] int64: entry i is at row rows[i], which knows num_tokens[i] tokens, the last
        num_outputs[i] of them sampled. token_table [rows, width] int32. No row may be in the batch twice.
        """
        if self._merged is None:
            self._merged = self._merge()
        rules, num_reqs = self._merged, rows.shape[0]
        # Where each row sits in the batch; -1: not in it, its rules do nothing this time.
        batch_index = torch.full((token_table.shape[0],), -1, dtype=torch.int64, device=logits.device)
        batch_index.index_copy_(0, rows, torch.arange(num_reqs, device=logits.device))
        flat = logits.view(-1)
        if rules.bias_rows.numel():
            index = batch_index[rules.bias_rows]
            value = rules.bias_values.masked_fill(index < 0, 0.0)
            flat.scatter_add_(0, index.clamp(min=0) * self.vocab_size + rules.bias_tokens, value)
        if rules.ban_rows.numel():
            index = batch_index[rules.ban_rows]
            here = index.clamp(min=0)
            banned = (index >= 0) & (num_outputs[here] < rules.ban_until)
            _ban_(flat, here * self.vocab_size + rules.ban_tokens, banned)
        if rules.phrase_rows.numel():
            self._apply_phrases_(flat, rules, batch_index[rules.phrase_rows], num_tokens, token_table)

    def _apply_phrases_(
        self, flat: Tensor, rules: _DeviceRules, index: Tensor, num_tokens: Tensor, token_table: Tensor
    ) -> None:
        longest = rules.prefixes.shape[1]
        offsets = torch.arange(-longest, 0, device=flat.device)
        here = index.clamp(min=0)
        known = num_tokens[here]
        banned = (index >= 0) & (known >= rules.prefix_lens)
        step = max(1, CHUNK_ELEMENTS // longest)
        matches = []
        for start in range(0, index.shape[0], step):
            part = slice(start, start + step)
            positions = (known[part, None] + offsets).clamp(min=0)
            tokens = token_table[rules.phrase_rows[part, None], positions]
            beyond = offsets < -rules.prefix_lens[part, None]
            matches.append(((tokens == rules.prefixes[part]) | beyond).all(dim=1))
        _ban_(flat, here * self.vocab_size + rules.phrase_tokens, banned & torch.cat(matches))

    def _merge(self) -> _DeviceRules:
        """All rows' rules in one int32 array, copied at once and cut up on the device."""
        biases = [(row, token, value) for row, r in self._rows.items() for token, value in r.biases]
        bans = [(row, token, until) for row, r in self._rows.items() for token, until in r.bans]
        phrases = [(row, token, prefix) for row, r in self._rows.items() for token, prefix in r.phrases]
        longest = max((len(prefix) for _, _, prefix in phrases), default=1)
        prefixes = np.zeros((len(phrases), longest), dtype=np.int32)
        for line, (_, _, prefix) in zip(prefixes, phrases, strict=True):
            line[longest - len(prefix) :] = prefix
        columns = [
            *(np.array([bias[i] for bias in biases], dtype=np.int32) for i in (0, 1)),
            np.array([bias[2] for bias in biases], dtype=np.float32).view(np.int32),
            *(np.array([ban[i] for ban in bans], dtype=np.int32) for i in (0, 1, 2)),
            *(np.array([phrase[i] for phrase in phrases], dtype=np.int32) for i in (0, 1)),
            np.array([len(prefix) for _, _, prefix in phrases], dtype=np.int32),
            prefixes.reshape(-1),
        ]
        parts = to_device(np.concatenate(columns), self.device).split([len(column) for column in columns])
        return _DeviceRules(
            bias_rows=parts[0].long(),
            bias_tokens=parts[1].long(),
            bias_values=parts[2].view(torch.float32),
            ban_rows=parts[3].long(),
            ban_tokens=parts[4].long(),
            ban_until=parts[5],
            phrase_rows=parts[6].long(),
            phrase_tokens=parts[7].long(),
            prefix_lens=parts[8].long(),
            prefixes=parts[9].view(-1, longest),
        )


def _ban_(flat: Tensor, index: Tensor, banned: Tensor) -> None:
    """flat[index] = -inf where `banned`. By minimum, as adding -inf to a logit of +inf would give NaN; a rule that does
    not hold takes the minimum with +inf, which changes nothing whatever else hits the same place."""
    value = torch.where(banned, float("-inf"), float("inf"))
    flat.scatter_reduce_(0, index, value, reduce="amin")
