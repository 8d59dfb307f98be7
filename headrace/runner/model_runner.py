"""Computes steps on one rank: gathers the step's tokens from the permanent rows, runs the model, samples, and writes
the sampled tokens back to the rows, where the next step finds them without visiting the host.

Decides nothing: what runs comes in the SchedulerOutput, which kernels serve comes from the table handed to the layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.attention.backend import Backend
from headrace.attention.metadata import AttentionMetadata
from headrace.kernels.table import KernelTable
from headrace.runner.cuda_graph import DecodeGraphs
from headrace.runner.input_batch import Batch, InputBatch
from headrace.runner.kv_cache import KVCacheShape, allocate_kv_cache
from headrace.runner.pending import HostLogprobs, PendingStep, logprobs_to_host, to_host
from headrace.runner.request_state import RequestState
from headrace.sampling.logprobs import LogprobTensors, gather_logprobs
from headrace.sampling.sampler import Sampler
from headrace.step import INVALID_TOKEN, SchedulerOutput

PROMPT_LOGPROBS_CHUNK = 256
"""Positions whose full-vocabulary logits are held at once."""


class CausalModel(Protocol):
    """What the runner needs of a model."""

    def __call__(
        self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, kv_caches: list[Tensor]
    ) -> Tensor: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class RunnerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    vocab_size: int


class ModelRunner:
    def __init__(
        self,
        model: CausalModel,
        backend: Backend,
        kernels: KernelTable,
        shape: KVCacheShape,
        limits: RunnerLimits,
        device: torch.device,
        use_graphs: bool,
    ) -> None:
        self.model = model
        self.backend = backend
        self.kernels = kernels
        self.shape = shape
        self.limits = limits
        self.device = device
        self.use_graphs = use_graphs
        self.inputs = InputBatch(limits.max_num_seqs, device)
        self.allocate(num_blocks=1)

    def allocate(self, num_blocks: int) -> None:
        """(Re)build cache and rows for `num_blocks` blocks; whatever they held is gone, and the graphs that know their
        addresses with it."""
        limits = self.limits
        self.graphs = DecodeGraphs(limits.max_num_seqs) if self.use_graphs else None
        self.kv_caches: list[Tensor] = []
        self.kv_caches = allocate_kv_cache(self.shape, num_blocks, self.device)
        self.state = RequestState(
            limits.max_num_seqs, limits.max_model_len, limits.block_size, limits.vocab_size, num_blocks, self.device
        )
        self.sampler = Sampler(self.state.sampling)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> PendingStep:
        self.state.apply(step)
        if not step.rows:
            return PendingStep(step.step)
        padded = self._padded_size(step)
        batch = self.inputs.fill(step, padded)
        if padded is not None and self.graphs is not None:
            hidden = self.graphs.run(batch, self._hidden_of_decodes)
        else:
            hidden = self._hidden(batch, batch.max_seq_len)
        return self._sample(step, batch, self._logits(batch, hidden), self._prompt_logprobs(step, hidden))

    def _padded_size(self, step: SchedulerOutput) -> int | None:
        """The captured batch size that serves this step, or None where it runs eagerly: a step of anything but decodes.
        (A token that samples is never one that prompt logprobs are wanted after.)"""
        if self.graphs is None or not all(step.samples) or step.num_tokens != len(step.rows):
            return None
        return self.graphs.padded_size(len(step.rows))

    def _hidden(self, batch: Batch, max_seq_len: int) -> Tensor:
        """# [num_tokens, hidden_size] after the last norm"""
        state, limits = self.state, self.limits
        input_ids, positions, slot_mapping = self.kernels.prepare_batch(
            batch.rows,
            batch.num_computed,
            batch.query_start_loc,
            state.token_table,
            state.block_table,
            limits.block_size,
            batch.num_tokens,
        )
        metadata = AttentionMetadata(
            rows=batch.rows,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            positions=positions,
            slot_mapping=slot_mapping,
            block_table=state.block_table,
            num_reqs=batch.num_reqs,
            num_tokens=batch.num_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=max_seq_len,
            num_decodes=batch.num_decodes,
        )
        self.backend.plan(metadata)
        return self.model(input_ids, positions, metadata, self.kv_caches)

    def _hidden_of_decodes(self, batch: Batch) -> Tensor:
        """What a decode graph holds: nothing in it may depend on the current lengths."""
        return self._hidden(batch, self.limits.max_model_len)

    def _logits(self, batch: Batch, hidden: Tensor) -> Tensor | None:
        """# [num_samples, vocab_size]"""
        if not batch.num_samples:
            return None
        sampled = hidden[: batch.num_samples] if batch.decode_only else hidden.index_select(0, batch.sample_index)
        return self.model.compute_logits(sampled)

    def _sample(
        self, step: SchedulerOutput, batch: Batch, logits: Tensor | None, prompts: dict[int, HostLogprobs]
    ) -> PendingStep:
        """Sample, write the tokens back to their rows, and queue what the host wants to see."""
        state = self.state
        token_ids = logprobs = None
        if logits is not None:
            result = self.sampler.sample(
                logits,
                batch.sample_rows,
                batch.sample_positions,
                state.token_table,
                max_num_tokens=batch.max_seq_len,
            )
            state.token_table[batch.sample_rows, batch.sample_positions] = result.token_ids.to(torch.int32)
            token_ids = to_host(result.token_ids.masked_fill(result.invalid, INVALID_TOKEN))
            if result.logprobs is not None and state.wants_logprobs:
                sampled_rows = [row for row, samples in zip(step.rows, step.samples, strict=True) if samples]
                logprobs = logprobs_to_host(result.logprobs, [state.wants_logprobs.get(row) for row in sampled_rows])
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return PendingStep(step.step, token_ids, logprobs, prompts, event)

    def _prompt_logprobs(self, step: SchedulerOutput, hidden: Tensor) -> dict[int, HostLogprobs]:
        """For the rows that asked: the distribution after each prompt position of this step, scored at the prompt token
        that follows it."""
        found: dict[int, HostLogprobs] = {}
        if not self.state.prompt_logprobs:
            return found
        first = 0
        for row, computed, count in zip(step.rows, step.num_computed_tokens, step.num_scheduled_tokens, strict=True):
            start, first = first, first + count
            if row not in self.state.prompt_logprobs:
                continue
            k, prompt_length = self.state.prompt_logprobs[row]
            wanted = min(computed + count, prompt_length - 1) - computed
            parts = []
            for offset in range(0, wanted, PROMPT_LOGPROBS_CHUNK):
                size = min(PROMPT_LOGPROBS_CHUNK, wanted - offset)
                logits = self.model.compute_logits(hidden[start + offset : start + offset + size])
                position = computed + offset + 1
                targets = self.state.token_table[row, position : position + size].long()
                parts.append(gather_logprobs(logits, targets, k))
            if parts:
                joined = LogprobTensors(
                    torch.cat([part.token_ids for part in parts]),
                    torch.cat([part.logprobs for part in parts]),
                    torch.cat([part.ranks for part in parts]),
                )
                found[row] = logprobs_to_host(joined, [k] * wanted)
        return found
