"""One rank: its device, its share of the model, its runner. Reports facts upwards and does as it is told.

Knows nothing of requests or of other ranks but through the mesh.
"""

from __future__ import annotations

from pathlib import Path

import torch

from headrace.attention.table import load_backend, select_backend
from headrace.config import EngineConfig
from headrace.distributed.mesh import init_mesh
from headrace.errors import OutOfMemoryError
from headrace.kernels.table import select_kernels
from headrace.layers.context import LayerContext
from headrace.model_config import ModelConfig
from headrace.models.loader import load_model
from headrace.models.registry import attention_spec
from headrace.runner.cuda_graph import GraphSettings
from headrace.runner.kv_cache import KVCacheShape
from headrace.runner.model_runner import ModelRunner, RunnerLimits
from headrace.runner.one_by_one import execute_one_by_one
from headrace.runner.pending import FinishedStep, PendingStep
from headrace.runner.step_times import measure_step_times
from headrace.sampling_params import SamplingParams
from headrace.step import BlockUpdate, NewRow, SchedulerOutput, WorkerFacts

GRAPH_RESERVE = 1 << 30
"""Bytes left for decode graphs, which are captured after the cache has been sized."""


class Worker:
    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        model_config: ModelConfig,
        rank: int = 0,
        rendezvous: str = "",
    ) -> None:
        """`config` is resolved by the planner."""
        self.config = config
        self.folder = folder
        self.model_config = model_config
        self.device = torch.device("cuda", rank) if config.device == "cuda" else torch.device("cpu")
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        elif config.cpu_threads is not None:
            torch.set_num_threads(config.cpu_threads)
        self.mesh = init_mesh(rank, config.tensor_parallel_size, rendezvous, self.device)

    def load(self) -> WorkerFacts:
        """Raises OutOfMemoryError if the weights, or the largest step, do not fit."""
        try:
            return self._load()
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"the weights and a step of {self.config.max_num_batched_tokens} tokens do not fit on {self.device}; "
                f"lower --max-num-batched-tokens or --max-num-seqs, or use more GPUs (-tp): {error}"
            ) from None

    def _load(self) -> WorkerFacts:
        config, model_config = self.config, self.model_config
        free_before = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0
        spec = attention_spec(
            model_config,
            tp_size=config.tensor_parallel_size,
            block_size=config.block_size,
            dtype=config.dtype,
            device_type=self.device.type,
            batch_invariant=config.batch_invariant,
        )
        chosen = select_backend(spec, config.attention_backend)
        backend = load_backend(chosen.name)
        kernels = select_kernels(self.device.type)
        context = LayerContext(self.mesh, kernels, backend, spec, self.dtype, self.device)
        model = load_model(self.folder, model_config, context, config.load_format, config.seed)
        assert config.max_num_seqs is not None
        assert config.max_num_batched_tokens is not None
        assert config.max_model_len is not None
        self.limits = RunnerLimits(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.max_model_len,
            config.block_size,
            model_config.vocab_size,
        )
        shape = KVCacheShape(model_config.num_layers, spec.num_kv_heads, spec.head_dim, config.block_size, self.dtype)
        graphs = None
        if self.device.type == "cuda":
            graphs = GraphSettings.of(
                config.compilation_config, config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len
            )
        self.runner = ModelRunner(model, backend, kernels, shape, self.limits, self.device, graphs)
        notes = [f"Using {chosen.name} backend: {chosen.why}."]
        notes += [f"Passed over {passed}" for passed in chosen.passed_over]
        step_times: list[tuple[int, float]] = []
        if self.device.type == "cuda":
            available = self._profile_gpu(free_before)
            step_times = measure_step_times(self.runner)
            name = torch.cuda.get_device_name(self.device)
            total = torch.cuda.get_device_properties(self.device).total_memory
        else:
            total, available = _cpu_memory()
            name = "CPU"
        return WorkerFacts(
            device=self.device.type,
            device_name=name,
            total_memory=total,
            available_kv_memory=available,
            kv_bytes_per_block=shape.bytes_per_block,
            weight_bytes=model.weight_bytes,
            attention_backend=chosen.name,
            notes=notes,
            step_times=step_times,
        )

    def initialize_cache(self, num_blocks: int) -> None:
        """Raises OutOfMemoryError if the blocks do not fit after all."""
        try:
            self.runner.allocate(num_blocks)
        except torch.OutOfMemoryError as error:
            size = num_blocks * self.runner.shape.bytes_per_block / 2**30
            raise OutOfMemoryError(f"no room for {num_blocks} KV blocks ({size:.1f} GiB): {error}") from None

    def execute(self, step: SchedulerOutput) -> PendingStep | FinishedStep:
        if self.config.batch_invariant and self.device.type == "cpu":
            return execute_one_by_one(self.runner, step)
        return self.runner.execute(step)

    def close(self) -> None:
        self.mesh.close()

    def _profile_gpu(self, free_before: int) -> int:
        """Bytes left for the KV cache after running the largest step on an empty cache of one block."""
        torch.cuda.reset_peak_memory_stats(self.device)
        self.runner.execute(_largest_step(self.limits)).result()
        self.runner.execute(SchedulerOutput(0, [], list(range(self.limits.max_num_seqs)), [], [], [], [], []))
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved(self.device)
        outside = max(0, free_before - torch.cuda.mem_get_info(self.device)[0] - reserved)  # kernels, cuBLAS, NCCL
        total = torch.cuda.get_device_properties(self.device).total_memory
        allowed = min(int(total * self.config.gpu_memory_utilization), free_before)
        reserve = GRAPH_RESERVE if self.runner.graph_settings is not None else 0
        return max(0, allowed - peak - outside - reserve)


def _largest_step(limits: RunnerLimits) -> SchedulerOutput:
    """max_num_batched_tokens tokens in as few sequences as max_model_len allows, the rest of the rows one token each,
    all of them sampling; every row's blocks point at block 0, so one block of cache is enough."""
    counts: list[int] = []
    left = limits.max_num_batched_tokens
    for row in range(limits.max_num_seqs):
        rows_after = limits.max_num_seqs - row - 1
        count = min(limits.max_model_len, max(1, left - rows_after), left)
        if count == 0:
            break
        counts.append(count)
        left -= count
    counts.sort()
    rows = list(range(len(counts)))
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=10, max_tokens=None, seed=0)
    return SchedulerOutput(
        step=0,
        new_rows=[NewRow(row, [0], params, []) for row in rows],
        freed_rows=[],
        block_updates=[BlockUpdate(row, 0, [0]) for row in rows],
        rows=rows,
        num_computed_tokens=[0] * len(rows),
        num_scheduled_tokens=counts,
        samples=[True] * len(rows),
    )


def _cpu_memory() -> tuple[int, int]:
    """(total, available) bytes of this machine."""
    sizes: dict[str, int] = {}
    with open("/proc/meminfo") as file:
        for line in file:
            name, value = line.split(":")
            sizes[name] = int(value.split()[0]) * 1024
    return sizes["MemTotal"], sizes["MemAvailable"]
