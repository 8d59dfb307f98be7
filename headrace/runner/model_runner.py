"""Computes steps on one rank: gathers the step's tokens from the permanent rows, runs the model, samples, and writes
the sampled tokens back to the rows, where the next step finds them without visiting the host.

Decides nothing: what runs comes in the SchedulerOutput, which kernels serve comes from the table handed to the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.attention.metadata import AttentionMetadata
from headrace.kernels.table import KernelTable
from headrace.runner.cuda_graph import CudaDevice, GraphDevice, Shape, StepGraphs
from headrace.runner.graph_settings import GraphSettings
from headrace.runner.input_batch import Batch, InputBatch
from headrace.runner.kv_cache import CacheShape, KVCache, allocate_kv_cache
from headrace.runner.pending import REJECTED, HostLogprobs, Notes, Outgoing, PendingStep, logprobs_to_host
from headrace.runner.request_state import RequestState
from headrace.sampling.logprobs import LogprobTensors, gather_logprobs
from headrace.sampling.sampler import Sampler
from headrace.step import LOGITS_NOT_FINITE, NO_TOKEN_ALLOWED, SchedulerOutput

PROMPT_LOGPROBS_CHUNK = 256
"""Positions whose full-vocabulary logits are held at once."""


class CausalModel(Protocol):
    """What the runner needs of a model."""

    def __call__(
        self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, kv_caches: list[Tensor | None]
    ) -> Tensor: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...


class Drafter(Protocol):
    """Guesses what follows the known tokens of a row. Wrong guesses cost time and nothing else."""

    num_drafts: int
    """guesses a row"""

    def propose(self, batch: Batch, state: RequestState, hidden: Tensor) -> None:
        """Write guesses to the `num_drafts` places of state.token_table behind the state.num_known tokens of each row
        of batch.sample_rows. `hidden`: of the batch's tokens. It follows each step that samples, and must take no
        memory that it may not find: the step would be computed again, and its tokens are known already."""
        ...


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
        kernels: KernelTable,
        shape: CacheShape,
        limits: RunnerLimits,
        device: torch.device,
        graph_settings: GraphSettings | None = None,
        graph_device: Callable[[torch.device], GraphDevice] = CudaDevice,
        drafter: Drafter | None = None,
    ) -> None:
        """Ready to be profiled, on a cache of one page and without graphs; `allocate` makes it ready to serve."""
        self.model = model
        self.kernels = kernels
        self.shape = shape
        self.limits = limits
        self.device = device
        self.drafter = drafter
        self.num_drafts = 0 if drafter is None else drafter.num_drafts
        self.graph_settings = graph_settings
        self.graphs: StepGraphs | None = None
        self.notes = Notes()
        self._graph_device = graph_device
        self.inputs = InputBatch(
            limits.max_num_seqs, device, fixed=graph_settings is not None, copy_words=kernels.copy_words,
            decode_len=1 + self.num_drafts,
        )  # fmt: skip
        self.keep_results()
        self._build(num_pages=1)

    def allocate(self, num_pages: int) -> None:
        """(Re)build cache and rows for `num_pages` pages; whatever they held is gone, and the graphs that know their
        addresses with it."""
        self._build(num_pages)
        self.renew_graphs()

    def renew_graphs(self) -> None:
        """Free all graphs; they come back as sizes are used."""
        self.graphs = None
        self.notes.graph_bytes.clear()
        if self.graph_settings is not None:
            self.graphs = StepGraphs(self.graph_settings, self, self._graph_device(self.device), self.notes)

    def keep_results(self) -> None:
        """What queued steps leave for the host stays there, however many steps follow before it is read."""
        self._outgoing = Outgoing(self.limits.max_num_seqs * (1 + self.num_drafts), self.device)

    def _build(self, num_pages: int) -> None:
        limits = self.limits
        self.graphs = None
        self.cache = KVCache(self.shape, torch.empty(0), [])  # the one before is gone before another is made
        self.cache = allocate_kv_cache(self.shape, num_pages, self.device)
        sizes = [limits.max_model_len if group.is_state else group.block_size for group in self.shape.layout.groups]
        self.state = RequestState(
            limits.max_num_seqs, limits.max_model_len, sizes, limits.vocab_size, self.cache.scratch_blocks, self.device,
            self.kernels.scatter_words, self.num_drafts,
        )  # fmt: skip
        self.sampler = Sampler(self.state.sampling, self.kernels)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> PendingStep:
        if step.cleared_pages or step.state_copies:
            self.cache.prepare(step)
        self.state.apply(step)
        if not step.rows:
            return PendingStep(step.step)
        graphs = self.graphs
        shape = None if graphs is None else graphs.shape_of(step)
        batch = self.batch_of(step, shape)
        hidden = self.forward(batch)[0] if graphs is None or shape is None else graphs.run(shape, batch)
        prompts = self._prompt_logprobs(step, hidden)
        pending = self._sample(step, batch, self._logits(batch, hidden), prompts)
        if self.drafter is not None and batch.num_samples:
            self.drafter.propose(batch, self.state, hidden)
        return pending

    def batch_of(self, step: SchedulerOutput, shape: Shape | None = None) -> Batch:
        """The step's batch, padded to a graph's `shape`; where the host knows but bounds of lengths, they are what the
        rows say."""
        state = self.state
        if shape is None:
            batch = self.inputs.fill(step)
        else:
            tokens = None if shape.decode else shape.num_tokens
            batch = self.inputs.fill(step, shape.num_reqs, tokens, everyone=shape.kind == "piecewise")
        if state.num_known is not None:
            self.kernels.settle_lengths(
                batch.num_computed, batch.seq_lens, batch.rows, batch.sample_positions, batch.sample_rows,
                batch.sample_offsets, state.num_known,
            )  # fmt: skip
        return batch

    def forward(self, batch: Batch, cut: Callable[..., Tensor] | None = None) -> tuple[Tensor, AttentionMetadata]:
        """Hidden states [num_tokens, hidden_size] after the last norm, and what attention was told.

        With `cut` (see cuda_graph.py) inputs are gathered as for any batch of that many tokens.
        """
        state, whose = self.state, batch if cut is None else self.inputs.everyone()
        gathered = [
            self.kernels.prepare_batch(
                whose.rows,
                whose.num_computed,
                whose.query_start_loc,
                state.token_table,
                table,
                block_size,
                batch.num_tokens,
            )
            for table, block_size in zip(state.block_tables, state.block_sizes, strict=True)
        ]
        input_ids, positions, _ = gathered[0]
        metadata = self.metadata(batch, positions, tuple(slots for *_, slots in gathered))
        metadata.cut = cut
        return self.model(input_ids, positions, metadata, self.cache.layers), metadata

    def metadata(self, batch: Batch, positions: Tensor, slot_mappings: tuple[Tensor, ...]) -> AttentionMetadata:
        """What attention is told of the step."""
        return AttentionMetadata(
            rows=batch.rows,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            positions=positions,
            slot_mappings=slot_mappings,
            block_tables=self.state.block_tables,
            num_reqs=batch.num_reqs,
            num_tokens=batch.num_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            num_decodes=batch.num_decodes,
            max_prompt_len=batch.max_prompt_len,
        )

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
        token_ids = logprobs = samples = None
        if step.num_drafts:
            samples = [
                drafts + 1 if samples else 0 for drafts, samples in zip(step.num_drafts, step.samples, strict=True)
            ]
        if logits is not None:
            rows, positions = batch.sample_rows, batch.sample_positions
            offsets, most = batch.sample_offsets, 1 + self.num_drafts
            result = self.sampler.sample(logits, rows, positions, state.token_table, batch.max_seq_len, offsets, most)
            token_ids = self._outgoing.next(batch.num_samples)
            self.kernels.commit_tokens(
                token_ids, state.token_table, result.token_ids, result.best, result.raw_best, rows, positions,
                NO_TOKEN_ALLOWED, LOGITS_NOT_FINITE, state.num_known, offsets, most, REJECTED,
            )  # fmt: skip
            if result.logprobs is not None and state.wants_logprobs:
                counts = samples or step.samples
                sampled = [row for row, count in zip(step.rows, counts, strict=True) for _ in range(count)]
                logprobs = logprobs_to_host(result.logprobs, [state.wants_logprobs.get(row) for row in sampled])
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return PendingStep(step.step, token_ids, logprobs, prompts, event, self.notes.take(), samples)

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
                parts.append(gather_logprobs(logits, targets, k, self.kernels.logsumexp))
            if parts:
                joined = LogprobTensors(
                    torch.cat([part.token_ids for part in parts]),
                    torch.cat([part.logprobs for part in parts]),
                    torch.cat([part.ranks for part in parts]),
                )
                found[row] = logprobs_to_host(joined, [k] * wanted)
        return found
