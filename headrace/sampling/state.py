"""Keeps the sampling parameters of every live row in permanent device tables, written once at admission.

It also counts on the host which features live rows use, so that a step skips what no row needs.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.rules import RuleTable
from headrace.sampling.transfer import TableWriter, to_device
from headrace.sampling_params import SamplingParams
from headrace.step import NewRow

# A row has one record; the device table holds the same bytes as int32 columns. The seed comes first and the record is a
# multiple of 8 bytes long, so that a table of records can be viewed as int64 too.
RECORD = np.dtype(
    [
        ("seed", "u8"),
        ("row", "i4"),
        ("num_prompt_tokens", "i4"),
        ("top_k", "i4"),
        ("has_allowed_mask", "i4"),
        ("temperature", "f4"),
        ("top_p", "f4"),
        ("min_p", "f4"),
        ("presence_penalty", "f4"),
        ("frequency_penalty", "f4"),
        ("repetition_penalty", "f4"),
    ]
)
_COLUMNS = {name: (field[0].kind, field[1] // 4) for name, field in (RECORD.fields or {}).items()}
"""Field -> its kind of number (u: 64 bits, i, f) and its column of int32"""
_WIDTH = RECORD.itemsize // 4


class Feature(enum.Flag):
    """Names what a request needs beyond the argmax of its raw logits."""

    NONE = 0
    RANDOM = enum.auto()
    """temperature > 0"""
    FILTERS = enum.auto()
    """top_k, top_p or min_p, and RANDOM: a greedy choice is always inside them"""
    PENALTIES = enum.auto()
    RULES = enum.auto()
    """logit_bias, bad_words or min_tokens"""
    ALLOWED_MASK = enum.auto()
    LOGPROBS = enum.auto()


def features_of(new: NewRow, vocab_size: int) -> Feature:
    """Return what a request needs."""
    params = new.params
    features = Feature.NONE
    if not params.is_greedy:
        features |= Feature.RANDOM
        if 0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0:
            features |= Feature.FILTERS
    if (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0.0, 0.0, 1.0):
        features |= Feature.PENALTIES
    if params.logit_bias or new.bad_words_token_ids or (params.min_tokens > 0 and new.stop_token_ids):
        features |= Feature.RULES
    if params.allowed_token_ids is not None:
        features |= Feature.ALLOWED_MASK
    if params.logprobs is not None:
        features |= Feature.LOGPROBS
    return features


@dataclass(frozen=True)
class BatchParams:
    """Holds the records of a batch's rows in batch order, as strided views [n] of one gathered table on the device."""

    seed: Tensor
    """int64: the 64 bits of the seed"""
    row: Tensor
    """int32"""
    num_prompt_tokens: Tensor
    """int32"""
    top_k: Tensor
    """int32; vocab_size where there is no limit"""
    has_allowed_mask: Tensor
    """int32: 0 or 1"""
    temperature: Tensor
    """float32, as are all below; 0 where greedy"""
    top_p: Tensor
    min_p: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    repetition_penalty: Tensor


class SamplingState:
    """Holds the tables of `max_rows` rows; `add` writes a row and `remove` forgets it.

    Token ids from `vocab_size` on in stop ids, biases, bad words and allowed ids are dropped, since they have no logit
    (an eos id of the tokenizer may lie beyond the model's vocabulary).
    """

    TABLE = "sampling"

    @staticmethod
    def table_shape(max_rows: int) -> tuple[int, int]:
        """Return the shape of the table that `writer` must have; its last row, of padding, is greedy."""
        return max_rows + 1, _WIDTH

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, writer: TableWriter) -> None:
        """Use the table SamplingState.TABLE of `writer`, whose owner flushes it."""
        self._writer = writer
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.rules = RuleTable(vocab_size, self.device)
        self.allowed_masks: Tensor | None = None
        """[max_rows, ceil(vocab_size / 32)] int32: bit t % 32 of word t // 32 says that token t is allowed; allocated
        when a request first asks. Only rows whose record says so are read."""
        self._records = writer.tables[self.TABLE]
        self._live: dict[int, Feature] = {}
        self._num_live = Counter[Feature]()
        self._num_logprobs: dict[int, int] = {}
        self.features = Feature.NONE
        """what at least one live row needs"""
        self.max_logprobs: int | None = None
        """the most alternatives that a live row asked for; None: no row wants logprobs"""

    def add(self, new_rows: list[NewRow]) -> None:
        """Fill rows with the writer's next flush, and with a copy where requests have allowed_token_ids."""
        self.remove([new.row for new in new_rows if new.row in self._live])
        if not new_rows:
            return
        records = np.zeros(len(new_rows), dtype=RECORD)
        for record, new in zip(records, new_rows, strict=True):
            self._fill(record, new)
            features = features_of(new, self.vocab_size)
            self._live[new.row] = features
            self._num_live.update(features)
            if new.params.logprobs is not None:
                self._num_logprobs[new.row] = new.params.logprobs
            if Feature.RULES in features:
                self.rules.add(new)
        words = records["row"].astype(np.int64)[:, None] * _WIDTH + np.arange(_WIDTH)
        self._write_masks([(new.row, new.params.allowed_token_ids or []) for new in new_rows if _has_mask(new.params)])
        self._writer.write(self.TABLE, words.ravel(), records.view(np.int32))  # last: it cannot fail
        self._count_features()

    def remove(self, rows: list[int]) -> None:
        """Forget rows; empty rows are ignored. The device has nothing to do, since a dead row is never read."""
        for row in rows:
            features = self._live.pop(row, Feature.NONE)
            self._num_live.subtract(features)
            self._num_logprobs.pop(row, None)
            if Feature.RULES in features:
                self.rules.remove(row)
        self._count_features()

    def gather(self, rows: Tensor) -> BatchParams:
        """Return the records of `rows` [n] int64."""
        ints = self._records.index_select(0, rows)
        views = {"u": ints.view(torch.int64), "i": ints, "f": ints.view(torch.float32)}
        return BatchParams(**{name: views[kind][:, column] for name, (kind, column) in _COLUMNS.items()})

    def _count_features(self) -> None:
        self.features = Feature.NONE
        for feature, count in self._num_live.items():
            if count:
                self.features |= feature
        self.max_logprobs = max(self._num_logprobs.values(), default=None)

    def _fill(self, record: np.void, new: NewRow) -> None:
        params = new.params
        record["seed"] = new.seed & 0xFFFF_FFFF_FFFF_FFFF
        record["row"] = new.row
        record["num_prompt_tokens"] = len(new.prompt_token_ids)
        record["has_allowed_mask"] = _has_mask(params)
        record["presence_penalty"] = params.presence_penalty
        record["frequency_penalty"] = params.frequency_penalty
        record["repetition_penalty"] = params.repetition_penalty
        # A greedy row carries neutral values, so that its logits pass unchanged through what its neighbours need.
        greedy = params.is_greedy
        record["temperature"] = 0.0 if greedy else params.temperature
        record["top_p"] = 1.0 if greedy else params.top_p
        record["min_p"] = 0.0 if greedy else params.min_p
        limited = not greedy and 0 < params.top_k < self.vocab_size
        record["top_k"] = params.top_k if limited else self.vocab_size

    def _write_masks(self, masks: list[tuple[int, list[int]]]) -> None:
        if not masks:
            return
        num_words = -(-self.vocab_size // 32)
        if self.allowed_masks is None:
            self.allowed_masks = torch.zeros(self.max_rows, num_words, dtype=torch.int32, device=self.device)
        packed = np.zeros((len(masks), num_words + 1), dtype=np.int32)
        for line, (row, token_ids) in zip(packed, masks, strict=True):
            bits = np.zeros(num_words * 32, dtype=np.uint8)
            bits[[token for token in token_ids if token < self.vocab_size]] = 1
            line[0] = row
            line[1:] = np.packbits(bits, bitorder="little").view("<i4")
        on_device = to_device(packed, self.device)
        self.allowed_masks.index_copy_(0, on_device[:, 0].long(), on_device[:, 1:])


def _has_mask(params: SamplingParams) -> bool:
    return params.allowed_token_ids is not None
