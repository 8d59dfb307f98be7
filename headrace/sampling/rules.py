"""Applies logit_bias, min_tokens and bad_words, which change single logits of single requests, as flat device tables.

The tables hold only what live requests asked for, and are rebuilt (one copy to the device) when such a request comes
or goes. A step applies all of them at once, however many requests they belong to.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.transfer import to_device
from headrace.step import NewRow

FOREVER = 2**31 - 1
"""Output tokens after which a token that is never allowed would be"""
CHUNK_ELEMENTS = 1 << 22
"""Prefix tokens compared at once, which bounds the memory that long bad words take in a step"""


class _RowRules(NamedTuple):
    """Holds the rules of one request on the host; R differs between the three kinds."""

    biases: np.ndarray
    """[3, R] int32: row, token id, bits of the float32 to add"""
    bans: np.ndarray
    """[3, R] int32: row, token id, number of output tokens from which on the token is allowed"""
    phrases: np.ndarray
    """[3, R] int32: row, token id, length of the prefix after which the token is forbidden (at least one)"""
    prefixes: np.ndarray
    """[R, longest prefix of this request] int32, right-aligned"""


class _Rules(NamedTuple):
    """Holds the rules of one kind, of all live rows."""

    rows: Tensor
    """[R] int64"""
    tokens: Tensor
    """[R] int64: the token that a rule is about"""
    values: Tensor
    """[R] int32: the third line of the kind's table in _RowRules"""


class _DeviceRules(NamedTuple):
    """Holds the rules of all live rows on the device; R differs between the three kinds."""

    biases: _Rules
    bans: _Rules
    phrases: _Rules
    prefixes: Tensor
    """[R, longest prefix] int32, right-aligned"""


class RuleTable:
    """Collects rules on the host (`add`, `remove`) and applies them in the step (`apply_`)."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._rows: dict[int, _RowRules] = {}
        self._merged: _DeviceRules | None = None

    def add(self, new: NewRow) -> None:
        """Take in the rules of a request. Token ids beyond the vocabulary are dropped."""
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
        """Forget the rules of a row."""
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

        rows, num_tokens, num_outputs [n] int64: entry i belongs to row rows[i], which knows num_tokens[i] tokens, the
        last num_outputs[i] of them sampled. token_table [rows, width] int32. A row may be in the batch up to `most`
        times, each time with another of `offsets` [n] int64.
        """
        if self._merged is None:
            self._merged = self._merge()
        rules = self._merged
        # Where each row is in the batch; -1: it is not, and its rules do nothing this time.
        places = torch.full((token_table.shape[0] * most,), -1, dtype=torch.int64, device=logits.device)
        place = rows if offsets is None else rows * most + offsets
        places.index_copy_(0, place, torch.arange(rows.shape[0], device=logits.device))
        flat = logits.view(-1)
        for batch_index in places.view(-1, most).unbind(1):
            if rules.biases.rows.numel():
                index = batch_index[rules.biases.rows]
                value = rules.biases.values.view(torch.float32).masked_fill(index < 0, 0.0)
                flat.scatter_add_(0, index.clamp(min=0) * self.vocab_size + rules.biases.tokens, value)
            if rules.bans.rows.numel():
                index = batch_index[rules.bans.rows]
                here = index.clamp(min=0)
                banned = (index >= 0) & (num_outputs[here] < rules.bans.values)
                _ban_(flat, here * self.vocab_size + rules.bans.tokens, banned)
            if rules.phrases.rows.numel():
                self._apply_phrases_(flat, rules, batch_index[rules.phrases.rows], num_tokens, token_table)

    def _apply_phrases_(
        self, flat: Tensor, rules: _DeviceRules, index: Tensor, num_tokens: Tensor, token_table: Tensor
    ) -> None:
        (rows, last_tokens, prefix_lens), longest = rules.phrases, rules.prefixes.shape[1]
        offsets = torch.arange(-longest, 0, device=flat.device)
        here = index.clamp(min=0)
        known = num_tokens[here]
        banned = (index >= 0) & (known >= prefix_lens)
        step = max(1, CHUNK_ELEMENTS // longest)
        matches = []
        for start in range(0, index.shape[0], step):
            part = slice(start, start + step)
            positions = (known[part, None] + offsets).clamp(min=0)
            tokens = token_table[rows[part, None], positions]
            beyond = offsets < -prefix_lens[part, None]
            matches.append(((tokens == rules.prefixes[part]) | beyond).all(dim=1))
        _ban_(flat, here * self.vocab_size + last_tokens, banned & torch.cat(matches))

    def _merge(self) -> _DeviceRules:
        """Copy all rows' rules to the device as one int32 array, and split it there."""
        *kinds, all_prefixes = zip(*self._rows.values(), strict=True)
        tables = [np.concatenate(kind, axis=1) for kind in kinds]
        longest = max(prefixes.shape[1] for prefixes in all_prefixes)
        padded = np.zeros((tables[2].shape[1], longest), dtype=np.int32)
        first = 0
        for prefixes in all_prefixes:
            count, width = prefixes.shape
            padded[first : first + count, longest - width :] = prefixes
            first += count
        packed = to_device(np.concatenate([part.ravel() for part in (*tables, padded)]), self.device)
        *parts, flat = packed.split([*(table.size for table in tables), padded.size])
        columns = (part.view(3, -1) for part in parts)
        biases, bans, phrases = (_Rules(rows.long(), tokens.long(), values) for rows, tokens, values in columns)
        return _DeviceRules(biases, bans, phrases, flat.view(-1, longest) if longest else flat.view(0, 1))


def _columns(row: int, token_ids: list[int], third: list[int] | np.ndarray) -> np.ndarray:
    """Return a table # [3, len(token_ids)] int32."""
    table = np.empty((3, len(token_ids)), dtype=np.int32)
    table[0], table[1], table[2] = row, token_ids, third
    return table


def _ban_(flat: Tensor, index: Tensor, banned: Tensor) -> None:
    """Set flat[index] = -inf where `banned`.

    It takes a minimum, since adding -inf to a logit of +inf would give NaN. Where a rule does not hold the minimum is
    with +inf, which changes nothing, whatever other rule has the same index.
    """
    value = torch.where(banned, float("-inf"), float("inf"))
    flat.scatter_reduce_(0, index, value, reduce="amin")
