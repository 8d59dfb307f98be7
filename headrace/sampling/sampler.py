"""Samples one token for each request from a step's logits, without waiting for the device.

The stages come in the order that vLLM documents for its sampler:

1. raw logits: logprobs, alternatives and ranks are of this distribution
2. float32, if stage 4 or 5 needs it or allowed_token_ids are given
3. allowed_token_ids and the masks of grammars: what both allow is left
4. logit_bias, bad_words and min_tokens: a sum and bans, whose order does not matter
5. repetition, then frequency and presence penalty
6. greedy rows: argmax, of equals the lowest id
7. the others: temperature, min_p, top_k, top_p, then a draw whose random numbers depend on (seed, position, token id)
   alone, whatever else is in the batch

A stage that no live row needs is skipped, and a stage changes nothing in rows that did not ask for it, so that a row's
token does not depend on its neighbours. Every tensor-parallel rank samples from the same logits and gets the same ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.table import KernelTable
from headrace.sampling.logprobs import LogprobTensors, gather_logprobs
from headrace.sampling.masks import StepMasks
from headrace.sampling.processors import apply_penalties_
from headrace.sampling.state import BatchParams, Feature, SamplingState

CHANGES_LOGITS = Feature.ALLOWED_MASK | Feature.RULES | Feature.PENALTIES


@dataclass(frozen=True)
class SampleResult:
    """Holds the sampled tokens, and what tells rows with nothing to sample from: NaN or Inf among the logits, or every
    token forbidden. Such a row's `best` is -inf or NaN, or its `raw_best` is not finite, and its token means
    nothing."""

    token_ids: Tensor
    """[n] int64, always within the vocabulary"""
    best: Tensor
    """[n] the highest score"""
    raw_best: Tensor
    """[n] the highest logit as the model gave it"""
    logprobs: LogprobTensors | None
    """of every row, if a live row asked; k is the most that any live row asked for"""


class Sampler:
    """Chooses a token for each row of a batch, by the row's parameters in `state`."""

    def __init__(self, state: SamplingState, kernels: KernelTable) -> None:
        self.state = state
        self.kernels = kernels

    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        num_tokens: Tensor,
        token_table: Tensor,
        max_num_tokens: int | None = None,
        offsets: Tensor | None = None,
        most: int = 1,
        masks: StepMasks | None = None,
    ) -> SampleResult:
        """Choose the next token of each row; `logits` is left as it is.

        logits [n, vocab_size] any float dtype; rows [n] int64; num_tokens [n] int64: tokens known before the one to be
        sampled, which is also its position; token_table [>= max_rows, width] int32 holds them. With drafts a row occurs
        up to `most` times, with `offsets` [n] int64, and each sample is drawn as if the drafts before it were known.
        `masks`: of the rows that have a grammar. `max_num_tokens` is an upper bound of num_tokens that saves the
        penalties work; default: width.
        """
        state, features, scores = self.state, self.state.features, logits
        if features & ~Feature.LOGPROBS:
            params = state.gather(rows)
        if features & CHANGES_LOGITS or masks is not None:
            dtype = torch.float32 if features & CHANGES_LOGITS else logits.dtype
            scores = logits.to(dtype, copy=True, memory_format=torch.contiguous_format)
        if masks is not None:
            self.kernels.mask_tokens(scores, masks.bits, masks.lines)
        if features & CHANGES_LOGITS:
            self._change_(scores, params, rows, num_tokens, token_table[:, :max_num_tokens], offsets, most)
        # The maximum of a row with NaN is NaN, so it also shows rows without any usable logit.
        best, token_ids = self.kernels.best_token(scores)
        raw_best = best if scores is logits else self.kernels.best_token(logits)[0]
        if Feature.RANDOM in features:
            token_ids = torch.where(best > float("-inf"), self._draw(scores, params, num_tokens), token_ids)
        logprobs = None
        if state.max_logprobs is not None:
            logprobs = gather_logprobs(logits, token_ids, state.max_logprobs, self.kernels.logsumexp)
        return SampleResult(token_ids, best, raw_best, logprobs)

    def _change_(
        self, scores: Tensor, params: BatchParams, rows: Tensor, num_tokens: Tensor, tokens: Tensor,
        offsets: Tensor | None, most: int,
    ) -> None:  # fmt: skip
        """Apply stages 3 to 5 in place."""
        state, features = self.state, self.state.features
        if Feature.ALLOWED_MASK in features and state.allowed_masks is not None:
            lines = torch.where(params.has_allowed_mask > 0, rows, -1)
            self.kernels.mask_tokens(scores, state.allowed_masks, lines)
        if Feature.RULES in features:
            num_outputs = num_tokens - params.num_prompt_tokens
            state.rules.apply_(scores, rows, num_tokens, num_outputs, tokens, offsets, most)
        if Feature.PENALTIES in features:
            apply_penalties_(
                scores,
                params.repetition_penalty,
                params.frequency_penalty,
                params.presence_penalty,
                tokens,
                rows,
                num_tokens,
                params.num_prompt_tokens,
            )

    def _draw(self, scores: Tensor, params: BatchParams, positions: Tensor) -> Tensor:
        """Apply stage 7, in which a greedy row gets its argmax."""
        temperature, floor = params.temperature, None
        if Feature.FILTERS in self.state.features:
            floor = self.kernels.filter_floor(scores, temperature, params.top_k, params.top_p, params.min_p)
        return self.kernels.gumbel_argmax(scores, temperature.contiguous(), params.seed.contiguous(), positions, floor)
