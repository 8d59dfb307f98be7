"""Computes steps on one rank: gathers a step's tokens from the permanent rows, runs the model, samples, and writes the
sampled tokens back to the rows, where the next step reads them without waiting for the host.

The runner decides nothing: what runs comes in the SchedulerOutput, and which kernels run was settled when the model was
loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.attention.batch import Batch
from headrace.attention.metadata import AttentionMetadata
from headrace.graph_sizes import GraphSettings
from headrace.kernels.table import KernelTable
from headrace.layers.exchange import Exchange
from headrace.pooling import Pooling
from headrace.runner.adapters import AdapterStore
from headrace.runner.cuda_graph import CudaDevice, GraphDevice, Shape, StepGraphs
from headrace.runner.expert_load import LoadCounter
from headrace.runner.guesses import Guesses
from headrace.runner.input_batch import InputBatch
from headrace.runner.kv_cache import CacheShape, KVCache, LayerCache, allocate_kv_cache
from headrace.runner.pending import REJECTED, HostLogprobs, Notes, PendingStep, TokenBuffers, to_host
from headrace.runner.pipeline import Pipeline
from headrace.runner.pooler import Pooler
from headrace.runner.request_state import RequestState
from headrace.sampling.logprobs import LogprobTensors, gather_logprobs
from headrace.sampling.masks import StepMasks, step_masks
from headrace.sampling.sampler import Sampler
from headrace.sampling.transfer import to_device
from headrace.spec_decode.drafter import Drafter, Tables
from headrace.step import LOGITS_NOT_FINITE, NO_TOKEN_ALLOWED, ExpertLoad, Masks, SchedulerOutput

PROMPT_LOGPROBS_CHUNK = 256
"""Prompt positions whose logits over the whole vocabulary are held at once."""


class CausalModel(Protocol):
    """Describes what the runner needs of a model, or of what one pipeline stage holds of it."""

    def __call__(
        self, inputs: Tensor, positions: Tensor, metadata: AttentionMetadata, kv_caches: list[LayerCache | None]
    ) -> Tensor:
        """Map inputs, positions [num_tokens] to hidden states # [num_tokens, hidden_size], after the last norm. Inputs
        are token ids; on later stages the hidden states of the stage before."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states [n, hidden_size] to logits # [n, vocab_size]; of a model that pools, to what its requests
        get # [n, width]."""
        ...


@dataclass(frozen=True)
class RunnerLimits:
    """Bounds the size of steps and of the tables that hold requests."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True)
class Forward:
    """Holds what a step has computed before it samples. The next step's forward overwrites it."""

    step: SchedulerOutput
    batch: Batch
    shape: Shape | None
    """of the graph that it ran from, if any"""
    hidden: Tensor
    """[num_tokens, hidden_size]"""
    logits: Tensor | None
    """[num_samples, vocab_size]; None: nothing is sampled"""
    prompt_logprobs: dict[int, HostLogprobs]
    pooled: dict[int, Tensor]
    """by row, what a model that pools made, on the host"""
    expert_load: Callable[[], ExpertLoad] | None = None
    """tells where its tokens went, if it was counted"""


class ModelRunner:
    """Holds a rank's cache, rows and graphs, and computes steps on them in the order in which it is given them."""

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
        pooling: Pooling | None = None,
        pipeline: Pipeline | None = None,
        dtype: torch.dtype = torch.float32,
        adapters: AdapterStore | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        """Make a runner that can be profiled: it has a cache of one page and no graphs until `allocate`. `pooling`: how
        the model pools; None: it generates. `dtype`: of hidden states. `adapters`: None: no request has one.
        `exchange`: what the model's layers were built with."""
        self.model = model
        self.adapters = adapters
        self._exchange = exchange or Exchange()
        self._loads = LoadCounter(model, device)
        self.pipeline = pipeline or Pipeline()
        self.kernels = kernels
        self.shape = shape
        self.limits = limits
        self.device = device
        self.drafter = drafter
        self.num_drafts = 0 if drafter is None else drafter.num_drafts
        self.pooler = None if pooling is None else Pooler(pooling, limits.max_num_seqs, device)
        self.graph_settings = graph_settings
        self.graphs: StepGraphs | None = None
        self.notes = Notes()
        self._graph_device = graph_device
        self._turns = 3 + self.pipeline.group.size
        """more than the steps that are ever under way"""
        self._drafted = -self._turns
        """the number of the last step with drafts"""
        self.inputs = InputBatch(
            limits.max_num_seqs, device, stages=self._turns, fixed=graph_settings is not None,
            copy_words=kernels.copy_words, decode_len=1 + self.num_drafts,
        )  # fmt: skip
        most = limits.max_num_batched_tokens
        most = most if graph_settings is None else max(most, graph_settings.most_tokens)
        self._received = self.pipeline.buffer(most, dtype, device)
        """of the stage before # [most, hidden_size]"""
        self.keep_results()
        self._build(num_pages=1)

    def allocate(self, num_pages: int) -> None:
        """Build cache and rows anew, with `num_pages` pages. What they held is lost, and so are the graphs, which know
        their addresses."""
        self._build(num_pages)
        self.renew_graphs()

    def renew_graphs(self) -> None:
        """Free all graphs; they are captured again as their sizes are used."""
        self.graphs = None
        self.notes.graph_bytes.clear()
        settings = self.graph_settings
        device = None if settings is None else self._graph_device(self.device)
        if self.guesses is not None:
            self.guesses.renew_graphs(settings, device, self.notes)
        if settings is not None and device is not None:
            self.graphs = StepGraphs(settings, self, device, self.notes)

    def make_up_hidden_states(self) -> None:
        """Put made-up numbers in place of the hidden states of the stage before, if there is one."""
        if self._received is not None:
            self._received.copy_(torch.linspace(-1, 1, self._received.numel()).view_as(self._received).sin_())

    def keep_results(self) -> None:
        """Leave the results of queued steps where they are, however many steps follow before they are read."""
        self._token_buffers = TokenBuffers(self.limits.max_num_seqs * (1 + self.num_drafts), self.device, self._turns)

    def _build(self, num_pages: int) -> None:
        limits = self.limits
        self.graphs = None
        self.cache = KVCache(self.shape, torch.empty(0), [])  # the one before is gone before another is made
        self.cache = allocate_kv_cache(self.shape, num_pages, self.device)
        sizes = [limits.max_model_len if group.is_state else group.block_size for group in self.shape.layout.groups]
        self.state = RequestState(
            limits.max_num_seqs, limits.max_model_len, sizes, limits.vocab_size, self.cache.scratch_blocks, self.device,
            self.kernels.scatter_words, self.num_drafts, self.adapters is not None,
        )  # fmt: skip
        self.sampler = Sampler(self.state.sampling, self.kernels)
        self.guesses: Guesses | None = None
        if self.drafter is not None and self.state.num_known is not None:
            self.tables = Tables(
                self.state.token_table, self.state.num_known, self.state.sampling, self.state.block_tables,
                tuple(sizes), self.cache.of_drafter, limits.max_model_len, self._hidden_states(),
            )  # fmt: skip
            self.guesses = Guesses(self.drafter, self.tables, self.state.write_lengths)

    def _hidden_states(self) -> Tensor | None:
        """Return memory for what the drafter reads of the model's hidden states, of the largest step."""
        limits, settings = self.limits, self.graph_settings
        assert self.drafter is not None
        decodes = (limits.max_num_seqs + 1) * (1 + self.num_drafts)
        tokens = max(limits.max_num_batched_tokens, decodes, 0 if settings is None else settings.most_tokens)
        return self.drafter.hidden_states(tokens, self.device)

    def execute(self, step: SchedulerOutput, masks: Masks | None = None) -> PendingStep:
        """Launch a step on the device, without waiting for it."""
        forward = self.begin(step)
        if forward is None or not self.pipeline.stage.is_last:
            return PendingStep(step.step)
        return self.finish(forward, masks)

    @torch.inference_mode()
    def begin(self, step: SchedulerOutput) -> Forward | None:
        """Launch all of a step that comes before sampling; on the last pipeline stage `finish` launches the rest.
        Nothing else may run between. A step without requests has nothing to finish."""
        if step.num_drafts:
            self._drafted = step.step
        if self.guesses is not None:
            self.guesses.catch_up(step)
        pipeline = self.pipeline
        if pipeline.is_split and pipeline.stage.is_first:
            pipeline.settle(step, self.state.token_table)
        if step.cleared_pages or step.state_copies:
            self.cache.prepare(step)
        if self.adapters is not None and step.adapter_loads:
            self.adapters.put(step.adapter_loads)
        self.state.apply(step)
        if not step.rows:
            return None
        graphs, rows = self.graphs, max(step.engine_tokens, default=0)
        if graphs is not None and rows:
            rows = graphs.padded(rows)
        counted = self._loads.due
        shape = None if graphs is None or counted else graphs.shape_of(step, self._num_adapted(step), rows)
        self._exchange.begin(step.engine_tokens, rows)
        batch = self.batch_of(step, shape)
        if self._received is not None:
            pipeline.receive(self._received[: step.num_tokens])
        if counted:
            self._loads.begin()
        hidden = self.forward(batch)[0] if graphs is None or shape is None else graphs.run(shape, batch)
        load = self._loads.end() if counted else None
        if self.pooler is not None:
            pooled = self.pooler.pool(self.model.compute_logits, step, batch, hidden, self.state.pools_tokens)
            return Forward(step, batch, shape, hidden, None, {}, pooled, load)
        if not pipeline.stage.is_last:
            pipeline.send(hidden[: step.num_tokens])
            if pipeline.stage.is_first:
                pipeline.expect(step)
            return Forward(step, batch, shape, hidden, None, {}, {})
        prompts = self._prompt_logprobs(step, hidden)
        return Forward(step, batch, shape, hidden, self._logits(batch, hidden), prompts, {}, load)

    @torch.inference_mode()
    def finish(self, forward: Forward, masks: Masks | None) -> PendingStep:
        """Launch the rest of the step that was begun last."""
        step, batch = forward.step, forward.batch
        of_step = None if masks is None else step_masks(step, masks, self.device)
        pending = self._sample(forward, of_step)
        if self.pipeline.is_split:
            self.pipeline.give_back(batch, self.state.token_table)
        if self.guesses is not None:
            self.guesses.make(step, batch, forward.shape)
            if masks is not None and step.num_guesses and batch.num_samples:
                masked = [row for row in step.rows if row in masks.first_lines]
                pending.drafts = self._proposed(masked, step.num_guesses)
                if pending.event is not None:
                    pending.event.record()
        return pending

    def _proposed(self, rows: list[int], count: int) -> tuple[list[int], Tensor]:
        """Return `rows`, and a copy for the host of the `count` drafts behind their newest tokens."""
        state, index = self.state, to_device(np.array(rows, dtype=np.int64), self.device)
        assert state.num_known is not None
        places = state.num_known[index, None].long() + torch.arange(count, device=self.device)
        return rows, to_host(state.token_table[index[:, None], places])

    def batch_of(self, step: SchedulerOutput, shape: Shape | None = None) -> Batch:
        """Return the step's batch, padded to a graph's `shape`. Where the host knows only bounds of lengths, because
        drafts are not accepted or rejected yet, the rows' own lengths replace them on the device. Where it knows them,
        and nothing is guessed behind the step, that is computed as without a drafter."""
        state = self.state
        settled = not (step.num_drafts or step.num_guesses) and step.step - self._drafted >= self._turns
        if shape is None:
            batch = self.inputs.fill(step, settled=settled)
        else:
            tokens, length = (None, shape.num_tokens // shape.num_reqs) if shape.decode else (shape.num_tokens, 1)
            batch = self.inputs.fill(step, shape.num_reqs, tokens, shape.kind == "piecewise", length, settled)
        if self._num_adapted(step):
            batch = replace(batch, adapted=True)
        if state.num_known is not None and batch.sample_offsets is not None:
            state.write_lengths()
            self.kernels.settle_lengths(
                batch.num_computed, batch.seq_lens, batch.rows, batch.sample_positions, batch.sample_rows,
                batch.sample_offsets, state.num_known,
            )  # fmt: skip
        return batch

    def forward(self, batch: Batch, cut: Callable[..., Tensor] | None = None) -> tuple[Tensor, AttentionMetadata]:
        """Return hidden states # [num_tokens, hidden_size], after the last norm, and the metadata given to attention.

        With `cut` (see cuda_graph.py) inputs are gathered in a way that serves any batch of that many tokens.
        """
        state, whose = self.state, batch if cut is None else self.inputs.all_rows()
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
        inputs = input_ids if self._received is None else self._received[: batch.num_tokens]
        applied: AbstractContextManager[None] = nullcontext()
        if batch.adapted and self.adapters is not None and state.adapter_slots is not None:
            places = whose.rows, whose.query_start_loc, batch.num_tokens
            applied = self._applied(self.adapters.slots_of_tokens(state.adapter_slots, *places))
        if self.drafter is None:
            with applied:
                return self.model(inputs, positions, metadata, self.cache.of_model), metadata
        if cut is not None or not batch.decode_only:
            self.drafter.fill(input_ids, metadata, self.tables)
        kept = None if self.tables.hidden is None else self.tables.hidden[: batch.num_tokens]
        metadata.tapped = kept if self.drafter.taps else None
        with applied:
            hidden = self.model(inputs, positions, metadata, self.cache.of_model)
        if kept is not None and not self.drafter.taps:
            kept.copy_(hidden)
        return hidden, metadata

    def metadata(self, batch: Batch, positions: Tensor, slot_mappings: tuple[Tensor, ...]) -> AttentionMetadata:
        """Return what attention needs to know of the step."""
        return AttentionMetadata.of(batch, positions, slot_mappings, self.state.block_tables)

    def _logits(self, batch: Batch, hidden: Tensor) -> Tensor | None:
        """# [num_samples, vocab_size]"""
        if not batch.num_samples:
            return None
        sampled = hidden[: batch.num_samples] if batch.decode_only else hidden.index_select(0, batch.sample_index)
        if not batch.adapted or self.state.adapter_slots is None:
            return self.model.compute_logits(sampled)
        with self._applied(self.state.adapter_slots[batch.sample_rows]):
            return self.model.compute_logits(sampled)

    def _num_adapted(self, step: SchedulerOutput) -> int:
        """Return how many places of the model adapters may change, if requests of the step have any; else 0."""
        if self.adapters is None or self.state.adapted.keys().isdisjoint(step.rows):
            return 0
        return self.adapters.adapters.num_used

    def _applied(self, slots: Tensor) -> AbstractContextManager[None]:
        """Return a context in which the model computes tokens with the adapters of `slots`."""
        assert self.adapters is not None
        return self.adapters.adapters.applied(slots)

    def _sample(self, forward: Forward, masks: StepMasks | None) -> PendingStep:
        """Sample, write the tokens back to their rows, and queue what the host wants to see."""
        state, step, batch, logits = self.state, forward.step, forward.batch, forward.logits
        token_ids = logprobs = samples = None
        if step.num_drafts:
            samples = [
                drafts + 1 if samples else 0 for drafts, samples in zip(step.num_drafts, step.samples, strict=True)
            ]
        if logits is not None:
            rows, positions, offsets = batch.sample_rows, batch.sample_positions, batch.sample_offsets
            num_known, most = (None, 1) if offsets is None else (state.num_known, 1 + self.num_drafts)
            result = self.sampler.sample(
                logits, rows, positions, state.token_table, batch.max_seq_len, offsets, most, masks
            )
            token_ids = self._token_buffers.next(batch.num_samples)
            self.kernels.commit_tokens(
                token_ids, state.token_table, result.token_ids, result.best, result.raw_best, rows, positions,
                NO_TOKEN_ALLOWED, LOGITS_NOT_FINITE, num_known, offsets, most, REJECTED,
            )  # fmt: skip
            if num_known is None and state.num_known is not None:
                state.note_lengths(step)
            if result.logprobs is not None and state.wants_logprobs:
                counts = samples or step.samples
                sampled = [row for row, count in zip(step.rows, counts, strict=True) for _ in range(count)]
                logprobs = HostLogprobs.of(result.logprobs, [state.wants_logprobs.get(row) for row in sampled])
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        prompts = forward.prompt_logprobs
        pending = PendingStep(step.step, token_ids, logprobs, prompts, event, self.notes.take(), samples)
        pending.expert_load = forward.expert_load
        if self.pooler is not None:
            pending.pooled, pending.completes = (
                forward.pooled,
                [row for row, samples in zip(step.rows, step.samples, strict=True) if samples],
            )
        return pending

    def _prompt_logprobs(self, step: SchedulerOutput, hidden: Tensor) -> dict[int, HostLogprobs]:
        """Return, for rows that asked, the log-probability of the prompt token that follows each position of this
        step."""
        logprobs: dict[int, HostLogprobs] = {}
        if not self.state.prompt_logprobs:
            return logprobs
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
                of_chunk = hidden[start + offset : start + offset + size]
                slot = self.state.adapted.get(row, -1)
                with nullcontext() if slot < 0 else self._applied(of_chunk.new_full((size,), slot, dtype=torch.int32)):
                    logits = self.model.compute_logits(of_chunk)
                position = computed + offset + 1
                targets = self.state.token_table[row, position : position + size].long()
                parts.append(gather_logprobs(logits, targets, k, self.kernels.logsumexp))
            if parts:
                logprobs[row] = HostLogprobs.of(LogprobTensors.concatenate(parts), [k] * wanted)
        return logprobs
