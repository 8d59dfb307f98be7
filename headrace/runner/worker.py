"""Runs the work of one rank: loads its share of the model, checks and profiles it, and executes steps.

A worker reports facts to the engine core and does what it is told; it decides nothing.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from headrace.attention.table import load_backend, select_backend
from headrace.config import EngineConfig
from headrace.distributed.mesh import init_mesh
from headrace.distributed.progress import Progress
from headrace.distributed.ranks import Place, Ranks
from headrace.errors import HeadraceError, OutOfMemoryError, UserError
from headrace.graph_sizes import GraphSettings, most_in_pieces
from headrace.kernels.table import select_kernels
from headrace.layers.adapters import Adapters
from headrace.layers.context import LayerContext
from headrace.layers.exchange import Exchange
from headrace.layers.rotary import Rotary
from headrace.lora import LoRARequest
from headrace.model_config import ModelConfig
from headrace.model_spec import HeadSpec
from headrace.models.adapters import adapted_linears
from headrace.models.drafters import describe_draft, start_specs
from headrace.models.loader import load_model, multiplied_weights
from headrace.models.served import describe
from headrace.process import trim_heap
from headrace.runner.adapters import AdapterStore
from headrace.runner.drafting import load_draft, make_drafter
from headrace.runner.kernel_checks import Subject, kernel_checks
from headrace.runner.kv_cache import cache_dtype, cache_shape
from headrace.runner.kv_scales import Calibration, SettledScales, fill_missing_scales, settle_kv_scales
from headrace.runner.layer_checks import layer_checks
from headrace.runner.memory import device_memory, first_line, is_out_of_memory
from headrace.runner.model_runner import Forward, ModelRunner, RunnerLimits
from headrace.runner.peer_checks import describe_peers, peer_checks
from headrace.runner.pending import FinishedStep, MaskedStep, PendingStep
from headrace.runner.pipeline import Pipeline
from headrace.runner.profile import measure_memory, measure_step_times
from headrace.runner.self_check import WAITS_FOR_THE_HOST, SelfCheck, with_switches
from headrace.runner.step_checks import scratch_limits, step_checks, without_graphs
from headrace.runner.step_parts import execute_token_by_token, execute_with_less_memory
from headrace.stages import Stage
from headrace.step import Masks, SchedulerOutput, WorkerFacts

logger = logging.getLogger(__name__)

ONE_THREAD = 1e8
"""On a CPU a step of so many multiplications (tokens x weights of layers) runs on one thread: several wait for each
other in each of its some fifty operations a layer, for longer than they save, and much longer where cores are busy."""
LARGEST_CHECK = 8192
"""More tokens than a step has that is computed at load"""
TRIM_SECONDS = 30.0
"""How often the heap's free pages are given back on a CPU, where every step takes its tensors from the heap. It costs a
few milliseconds; without it a server under load grows by some 100 MiB an hour."""


T = TypeVar("T")


class Worker:
    """Holds one rank's device, model and runner. Call `load`, then `initialize_cache`, then `execute`."""

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        model_config: ModelConfig,
        rank: int = 0,
        rendezvous: Any = "",
        progress: Progress | None = None,
        address: str = "127.0.0.1",
    ) -> None:
        """Join the other ranks. The planner must have resolved `config`. `rank`: among those of its engine.
        `rendezvous`, `address`: see `init_mesh`."""
        self.config = config
        self.folder = folder
        self.model_config = model_config
        gpu = config.first_gpu + rank % config.ranks_per_node
        self.device = torch.device("cuda", gpu) if config.device == "cuda" else torch.device("cpu")
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        elif config.cpu_threads is not None:
            torch.set_num_threads(config.cpu_threads)
        ranks = Ranks(config.tensor_parallel_size, config.pipeline_parallel_size, config.joined_engines)
        rank += ranks.rank(Place((config.data_parallel_rank or 0) % config.joined_engines, 0, 0))
        no_peers = "as was asked for" if config.disable_custom_all_reduce else ""
        if config.ranks_per_node % config.tensor_parallel_size:
            no_peers = "GPUs are on several machines"
        self.mesh = init_mesh(
            rank, ranks, rendezvous, self.device, progress=progress, no_peers=no_peers, address=address,
            quick_reduce="NONE" if config.batch_invariant else config.quick_reduce_quantization,
            quick_most=config.quick_reduce_max_size_mb * 2**20,
        )  # fmt: skip
        largest_step = max(config.max_num_batched_tokens or 0, LARGEST_CHECK)
        self.exchange = Exchange(self.mesh.dp, largest_step, self.device)
        self.stage = Stage(ranks.place(rank).pp, config.partition)
        self.pipeline = Pipeline(self.stage, self.mesh, describe(model_config).hidden_size)
        self.memory = device_memory(self.device)
        self.model: Any = None
        self.draft: Any = None
        """what guesses tokens, if that is a model"""
        self.adapters: AdapterStore | None = None
        """None: no request has one"""
        self.num_weights = 0.0
        """of all layers, that a token is multiplied with on this rank"""
        self.backend: Any = None
        """attention.backend.Backend, once loaded"""
        self.kv_scales = SettledScales("", 0.0, "")
        self.runner: ModelRunner | None = None
        self._masked: MaskedStep | None = None
        """The step whose masks are awaited."""
        self._begun: Forward | str | None = None
        """What it has computed, or the message of its failure if it found no memory."""
        self._trimmed = time.monotonic()

    def load(self) -> WorkerFacts:
        """Read the weights, check the kernels on them, then `profile` the config. Raises OutOfMemoryError if the
        weights do not fit."""
        self.free_at_start = self.memory.free()
        try:
            self._load()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            message = first_line(error)
        else:
            return self.profile(self.config)
        raise OutOfMemoryError(  # here, where no traceback holds what was loaded
            f"the weights do not fit on {self.device} ({self.memory.name}), which has "
            f"{self.memory.total / 2**30:.1f} GiB, of which {self.free_at_start / 2**30:.1f} were free; "
            f"use more GPUs (-tp) or free memory: {message}"
        )

    def _load(self) -> None:
        config, model_config = self.config, self.model_config
        described = describe(model_config).keeping(config.decode_len)
        draft = describe_draft(config.speculation, model_config)
        behind = () if draft is None else draft.layers
        specs = start_specs(config, model_config, self.device.type)
        kv_dtype = cache_dtype(config.kv_cache_dtype, self.device)
        everything = replace(described, layers=(*described.layers, *behind))
        chosen = select_backend(specs, config.attention_backend)
        specs = specs[self.stage.layers]
        self.shape = cache_shape(
            everything, specs, config.tensor_parallel_size, config.block_size, kv_dtype, len(behind), self.stage
        )
        self.backend = load_backend(chosen.name)
        self.kernels = with_switches(select_kernels(self.device.type))
        context = LayerContext(
            self.mesh, self.kernels, self.backend, specs, self.dtype, self.device, config.batch_invariant,
            _positions(config), config.enable_expert_parallel, self.shape.layout.group_of, self.stage,
            kept_states=config.decode_len, exchange=self.exchange,
        )  # fmt: skip
        own = len(specs) - len(behind)
        of_model = context.layers(0, own)
        if config.enable_lora:
            names = adapted_linears(described, config.lora_experts).keys()
            adapters = Adapters(config.max_loras, config.max_lora_rank, names, self.kernels, self.dtype, self.device)
            self.adapters = AdapterStore(adapters, model_config, config.lora_experts)
            of_model = replace(of_model, seat=adapters.seat)
        self.model = load_model(
            self.folder, model_config, of_model, config.load_format, config.seed, config.quantization,
            draft.taps if isinstance(draft, HeadSpec) else (),
        )  # fmt: skip
        self.draft_context = context.layers(own)
        self.draft = load_draft(config, draft, self.draft_context, self.model, model_config, self.folder)
        self.num_weights = multiplied_weights(self.model, as_launched=False)
        self.notes = [f"Using {chosen.name} backend: {chosen.why}.", *self.model.notes]
        if self.adapters is not None:
            held = self.adapters.allocate(config.max_cpu_loras or config.max_loras)
            self.notes.append(
                f"Adapters: {held.num_slots} of rank {held.max_rank} at most take {held.num_bytes / 2**20:.1f} MiB."
            )
            if self.device.type != "cpu":
                logger.warning(
                    "steps with several adapters have ended in errors on an H200, for a reason that is not known yet: "
                    "do not depend on --enable-lora on a GPU (docs/performance.md)"
                )
        check = SelfCheck(self.mesh.experts, self.device)
        subject = Subject(
            self.model, self.backend, self.kernels, self.shape, model_config.vocab_size, self.dtype, self.device
        )
        subjects = [subject]
        if self.draft is not None:
            self.notes += [f"Draft: {note}" for note in self.draft.notes]
            subjects.append(replace(subject, model=self.draft))
        check.run(peer_checks(self.mesh, described.hidden_size, self.dtype, self.device))
        self.notes += describe_peers(self.mesh, config.quick_reduce_quantization)
        check.compile_ahead([made for one in subjects for made in (*kernel_checks(one), *layer_checks(one))])
        self.memory.drop_workspaces()
        for one in subjects:
            check.run(kernel_checks(one))
            check.run(layer_checks(one))
        if kv_dtype.itemsize == 1:
            shortened = replace(
                model_config, max_position_embeddings=min(model_config.max_position_embeddings, _positions(config))
            )
            calibration = Calibration(
                self.model, shortened, self.shape, self.dtype, self.mesh.experts, self.device, self.pipeline
            )
            self.kv_scales = settle_kv_scales(calibration, config.calculate_kv_scales)
            self.notes.append(self.kv_scales.note)
            fill_missing_scales(self.draft)
        waiting = WAITS_FOR_THE_HOST & {*check.demoted}
        self.refused_graphs = {"decode", "other"} if waiting else set()
        self.refused_graphs |= set() if subject.decodes else {"decode"}
        if waiting and self.device.type == "cuda":
            self.notes.append(f"CUDA graphs are off: the reference of {', '.join(sorted(waiting))} waits for the host.")
        limits = scratch_limits(model_config.vocab_size)
        unconnected = Pipeline(self.stage, hidden_size=described.hidden_size)
        check.run(step_checks(subject, self._graphs(limits, decode_lens=(1,)), self.refused_graphs, unconnected))
        self.notes += check.notes
        self.demoted = check.demoted

    def profile(self, config: EngineConfig) -> WorkerFacts:
        """Measure what `config`, which may be smaller than the one before, leaves for the KV cache. If its largest step
        does not fit, the facts have a `shortfall`, and nothing can run before the next call."""
        self.config = config
        self.runner = None
        for part in (self.model, self.draft):
            for layer in () if part is None else part.modules():
                if isinstance(layer, Rotary):
                    layer.keep(_positions(config))
        self.memory.empty_cache()
        try:
            self._build_runner()
            return self._measure()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            message = first_line(error)
        self.runner = None
        self.memory.empty_cache()
        return self._facts(shortfall=message)

    def _build_runner(self) -> None:
        config = self.config
        assert config.max_num_seqs is not None
        assert config.max_num_batched_tokens is not None
        assert config.max_model_len is not None
        limits = RunnerLimits(
            config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len, self.model_config.vocab_size
        )
        graphs = without_graphs(self._graphs(limits, config.decode_lens), self.refused_graphs)
        drafter = make_drafter(config, self.draft, self.draft_context, self.kernels)
        self.runner = ModelRunner(
            self.model,
            self.kernels,
            self.shape,
            limits,
            self.device,
            graphs,
            drafter=drafter,
            pooling=self.model_config.pooling,
            pipeline=self.pipeline,
            dtype=self.dtype,
            adapters=self.adapters,
            exchange=self.exchange,
        )

    def _graphs(self, limits: RunnerLimits, decode_lens: tuple[int, ...]) -> GraphSettings | None:
        if self.device.type != "cuda":
            return None
        weights = multiplied_weights(self.model) / max(1, self.shape.num_layers - self.shape.num_drafting)
        return GraphSettings.of(
            self.config.compilation_config, limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len,
            most_in_pieces(self.mesh.all.largest(weights, self.device)),  # stages must run steps of the same sizes
            decode_lens=decode_lens,
        )  # fmt: skip

    def _measure(self) -> WorkerFacts:
        assert self.runner is not None
        if self.device.type != "cuda":
            return self._facts(left=self.memory.free())
        share = self.config.gpu_memory_utilization
        use = self.use = measure_memory(self.runner, self.memory, share, self.free_at_start)
        total, free = self.memory.total / 2**30, self.free_at_start / 2**30
        memory = f"Memory of {self.device}: {use}; {share:g} of {total:.2f} GiB may be ours, {free:.2f} were free"
        return msgspec.structs.replace(
            self._facts(left=use.left),
            notes=[*self.notes, memory],
            step_times=measure_step_times(self.runner, self.mesh.all),
            step_bytes=use.step,
            table_bytes=max(0, use.standing - self._weight_bytes),
            graph_bytes=use.graphs,
            library_bytes=use.outside,
        )

    @property
    def _weight_bytes(self) -> int:
        """Bytes of all weights, those of what guesses tokens included."""
        own: int = self.model.weight_bytes
        return own + (0 if self.draft is None else self.draft.weight_bytes)

    def _facts(self, left: int = 0, shortfall: str = "") -> WorkerFacts:
        """Return the facts that are known without measuring. `left` is the memory in bytes that the KV cache may
        use."""
        graphs = None if self.runner is None else self.runner.graph_settings
        return WorkerFacts(
            device=self.device.type,
            device_name=self.memory.name,
            total_memory=self.memory.total,
            available_kv_memory=left,
            layout=self.shape.layout,
            weight_bytes=self._weight_bytes,
            attention_backend=self.backend.name,
            notes=self.notes,
            warmup_sizes=[] if graphs is None else graphs.warmup_sizes,
            kv_cache_error=self.kv_scales.error,
            kv_cache_remedy=self.kv_scales.remedy,
            demoted=self.demoted,
            shortfall=shortfall,
        )

    def initialize_cache(self, num_pages: int) -> WorkerFacts:
        """Allocate the KV cache and make ready to serve. If it does not fit, the facts have a `shortfall` and say how
        much memory there is now."""
        assert self.runner is not None
        try:
            self.runner.allocate(num_pages)
            return self._facts()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            message = first_line(error)
        self.memory.empty_cache()
        self.runner.allocate(1)
        left = self.memory.free()
        if self.device.type == "cuda":
            left -= self.use.step + self.use.graphs
        return self._facts(left=left, shortfall=message)

    def execute(self, step: SchedulerOutput) -> PendingStep | FinishedStep | MaskedStep:
        """Launch a step; a masked one stops before it samples, and `sample` launches the rest."""
        self.check_sums()
        if self.device.type == "cpu" and time.monotonic() - self._trimmed > TRIM_SECONDS:
            trim_heap()
            self._trimmed = time.monotonic()
        if step.masked:
            return self._on_threads(step, partial(self._begin, step))
        return self._on_threads(step, partial(self._execute, step))

    def check_sums(self) -> None:
        """Raise HeadraceError if a sum or exchange over GPUs has ended without the share of one of them: of a step that
        has ended on the device this tells whether it was computed rightly."""
        for own in (self.mesh.tp.peers, self.mesh.dp.peers):
            if own is not None and own.on and own.gave_up:
                raise HeadraceError("a sum over GPUs lacks the share of one of them, whose rank has died or is late")

    def read_adapter(self, request: LoRARequest, dropped: Sequence[int]) -> str:
        """Read an adapter onto the host, after forgetting the `dropped` ones; return why it cannot be used, or nothing.
        To be called from a thread of its own, beside which steps are launched."""
        assert self.adapters is not None
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.set_num_threads(1)  # of this thread: its many small operations need no others, nor the cores of steps
        try:
            self.adapters.read(request, dropped)
        except UserError as error:
            return str(error)
        except Exception as error:  # a file may change while it is read; other requests have nothing to do with it
            logger.warning("adapter %s cannot be read", request.lora_name, exc_info=True)
            return f"adapter {request.lora_name} cannot be read: {type(error).__name__}"
        return ""

    def sample(self, masks: Masks) -> PendingStep | FinishedStep:
        """Launch the rest of the step that was executed last, which was masked."""
        masked, self._masked = self._masked, None
        assert masked is not None
        assert self.runner is not None
        step = masked.step
        launch: Callable[[], PendingStep | FinishedStep]
        if self._begun is None:  # its tokens are computed one by one, each with its sampling
            launch = partial(self._execute, step, masks)
        elif isinstance(self._begun, str):
            launch = partial(execute_with_less_memory, self.runner, self.memory, step, self._begun, masks)
        else:
            launch = partial(self._in_parts_if_short, partial(self._finish, masks), step, masks)
        masked.sampled = self._on_threads(step, launch)
        return masked.sampled

    def _on_threads(self, step: SchedulerOutput, launch: Callable[[], T]) -> T:
        """Return what `launch` does; on a CPU a small step runs on one thread."""
        threads = torch.get_num_threads()
        tokens = 1 if self.config.batch_invariant else step.num_tokens  # then tokens are computed one by one, all alike
        if self.device.type != "cpu" or threads == 1 or tokens * self.num_weights > ONE_THREAD:
            return launch()
        torch.set_num_threads(1)
        try:
            return launch()
        finally:
            torch.set_num_threads(threads)

    @property
    def _token_by_token(self) -> bool:
        return self.config.batch_invariant and self.device.type == "cpu"

    def _begin(self, step: SchedulerOutput) -> MaskedStep:
        """Launch the forward of a masked step. If it finds no memory, all of the step is left to `sample`."""
        assert self.runner is not None
        self._masked, self._begun = MaskedStep(step), None
        if not self._token_by_token:
            try:
                self._begun = self.runner.begin(step)
            except RuntimeError as error:
                if not self._may_try_again(error):
                    raise
                self._begun = first_line(error)
        return self._masked

    def _finish(self, masks: Masks) -> PendingStep:
        """Launch the rest of the step whose forward was begun. Nobody holds that any longer, so that its logits leave
        room if this finds no memory."""
        begun, self._begun = self._begun, None
        assert isinstance(begun, Forward)
        assert self.runner is not None
        return self.runner.finish(begun, masks) if self.stage.is_last else PendingStep(begun.step.step)

    def _execute(self, step: SchedulerOutput, masks: Masks | None = None) -> PendingStep | FinishedStep:
        """Launch a step. One that runs out of memory is computed in parts, with a note."""
        runner = self.runner
        assert runner is not None
        if self._token_by_token:
            return execute_token_by_token(runner, step, masks)
        return self._in_parts_if_short(partial(runner.execute, step, masks), step, masks)

    def _in_parts_if_short(
        self, launch: Callable[[], PendingStep], step: SchedulerOutput, masks: Masks | None
    ) -> PendingStep | FinishedStep:
        """Return what `launch` does. If that runs out of memory, the whole step is computed in parts."""
        assert self.runner is not None
        try:
            return launch()
        except RuntimeError as error:
            if not self._may_try_again(error):
                raise
            message = first_line(error)
        return execute_with_less_memory(self.runner, self.memory, step, message, masks)

    def _may_try_again(self, error: RuntimeError) -> bool:
        """Return whether a step that failed may be computed again: it found no memory, and no other rank waits inside
        a collective for what this one did not compute."""
        return is_out_of_memory(error) and self.mesh.all.size == 1

    def close(self) -> None:
        """Leave the group and free the device's memory."""
        if self.runner is not None:
            self.runner.graphs = None  # they refer to the runner
        self.runner = self.model = self.draft = self.backend = self.adapters = None
        self.mesh.close()
        with contextlib.suppress(RuntimeError):  # a broken GPU context is freed with this process
            self.memory.empty_cache()


def _positions(config: EngineConfig) -> int:
    """Return how many positions a token can have, in guesses behind the longest sequence and in steps that are checked
    at load too."""
    assert config.max_model_len is not None
    return max(config.max_model_len + config.decode_len, scratch_limits(1).max_model_len)
