"""Rules that change single logits of single requests: logit_bias, min_tokens and bad_words, as flat device tables.

The tables hold only what live requests asked for and are rebuilt (one copy to the device) when such a request comes
or goes; a step applies all of them at once, however many requests they belong to. Knows token ids and rows; not who
asked, nor how a token is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """What one request brings, on the host; R differs between the three kinds."""

    biases: np.ndarray
    """[3, R] int32: row, token id, bits of the float32 to add"""
    bans: np.ndarray
    """[3, R] int32: row, token id, number of output tokens from which on it is allowed"""
    phrases: np.ndarray
    """[3, R] int32: row, token id, how many tokens the prefix has after which it is forbidden (at least one)"""
    prefixes: np.ndarray
    """[R, longest prefix of this request] int32, right-aligned"""


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
        biases = {token: value for token, value in (params.logit_bias or {}).items() if token < vocab_size}
        stops = set(new.stop_token_ids) if params.min_tokens > 0 else ()
        bans = [(token, params.min_tokens) for token in stops if token < vocab_size]
        words = [word for word in new.bad_words_token_ids if word and word[-1] < vocab_size]
        bans += [(word[0], FOREVER) for word in words if len(word) == 1]
        phrases = [word for word in words if len(word) > 1]
        longest = max(map(len, phrases), default=1) - 1
        prefixes = np.zeros((len(phrases), longest), dtype=np.int32)
        for line, word in zip(prefixes, phrases, strict=True):
            line[longest + 1 - len(word) :] = word[:-1]
        values = np.fromiter(biases.values(), dtype=np.float32, count=len(biases)).view(np.int32)
        self._rows[new.row] = _RowRules(
            biases=_columns(new.row, list(biases), values),
            bans=_columns(new.row, [token for token, _ in bans], [until for _, until in bans]),
            phrases=_columns(new.row, [word[-1] for word in phrases], [len(word) - 1 for word in phrases]),
            prefixes=prefixes,
        )
        self._merged = None

    def remove(self, row: int) -> None:
        self._rows.pop(row, None)
        self._merged = None

    def apply_(
        self,
        logits: Tensor,
        rows: Tensor,
        num_tokens: Tensor,
        num_outputs: Tensor,
        token_table: Tensor,
        offsets: Tensor | None = None,
        most: int = 1,
    ) -> None:
        """Change `logits` [n, vocab_size] float32, contiguous, in place.

        rows, num_tokens, num_outputs [n] int64: entry i is at row rows[i], which knows num_tokens[i] tokens, the last
        num_outputs[i] of them sampled. token_table [rows, width] int32. A row may be in the batch `most` times, each
        with another one of `offsets` [n] int64.
        """
        if self._merged is None:
            self._merged = self._merge()
        rules = self._merged
        # Where each row sits in the batch; -1: not in it, its rules do nothing this time.
        places = torch.full((token_table.shape[0] * most,), -1, dtype=torch.int64, device=logits.device)
        place = rows if offsets is None else rows * most + offsets
        places.index_copy_(0, place, torch.arange(rows.shape[0], device=logits.device))
        flat = logits.view(-1)
        for batch_index in places.view(-1, most).unbind(1):
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
        owners = list(self._rows.values())
        tables = [
            np.concatenate([rules.biases for rules in owners], axis=1),
            np.concatenate([rules.bans for rules in owners], axis=1),
            np.concatenate([rules.phrases for rules in owners], axis=1),
        ]
        longest = max(rules.prefixes.shape[1] for rules in owners)
        prefixes = np.zeros((tables[2].shape[1], longest), dtype=np.int32)
        first = 0
        for rules in owners:
            count, width = rules.prefixes.shape
            prefixes[first : first + count, longest - width :] = rules.prefixes
            first += count
        packed = to_device(np.concatenate([part.ravel() for part in (*tables, prefixes)]), self.device)
        *parts, flat_prefixes = packed.split([*(table.size for table in tables), prefixes.size])
        biases, bans, phrases = (part.view(3, -1) for part in parts)
        return _DeviceRules(
            bias_rows=biases[0].long(),
            bias_tokens=biases[1].long(),
            bias_values=biases[2].view(torch.float32),
            ban_rows=bans[0].long(),
            ban_tokens=bans[1].long(),
            ban_until=bans[2],
            phrase_rows=phrases[0].long(),
            phrase_tokens=phrases[1].long(),
            prefix_lens=phrases[2].long(),
            prefixes=flat_prefixes.view(-1, longest) if longest else flat_prefixes.view(0, 1),
        )


def _columns(row: int, token_ids: list[int], third: list[int] | np.ndarray) -> np.ndarray:
    """# [3, len(token_ids)] int32"""
    table = np.empty((3, len(token_ids)), dtype=np.int32)
    table[0], table[1], table[2] = row, token_ids, third
    return table


def _ban_(flat: Tensor, index: Tensor, banned: Tensor) -> None:
    """flat[index] = -inf where `banned`. By minimum, as adding -inf to a logit of +inf would give NaN; a rule that does
    not hold takes the minimum with +inf, which changes nothing whatever else hits the same place."""
    value = torch.where(banned, float("-inf"), float("inf"))
    flat.scatter_reduce_(0, index, value, reduce="amin")
