"""Steps an engine core by hand, so that logits can be kept and its tokens replaced (teacher forcing).

Cores made under `reference_path` run the torch references of every kernel and the library's matmuls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from headrace.config import EngineConfig
from headrace.engine.build import build_core
from headrace.engine.core import EngineCore
from headrace.kernels.table import REFERENCE_KERNELS
from headrace.request import EngineCoreRequest
from headrace.sampling_params import SamplingParams


class RecordingSampler:
    """Wraps a sampler: keeps the logits of each step, and returns `forced` in place of the sampled tokens, if set."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.logits: list[Tensor] = []
        self.forced: list[int] | None = None
        """the next step's tokens"""

    def sample(self, logits: Tensor, *args: Any, **keywords: Any) -> Any:
        self.logits.append(logits.clone())
        result = self._sampler.sample(logits, *args, **keywords)
        if self.forced is None:
            return result
        tokens = torch.tensor(self.forced, dtype=result.token_ids.dtype, device=logits.device)
        return dataclasses.replace(result, token_ids=tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


@dataclasses.dataclass(frozen=True)
class Sequence:
    """Holds a request's output and the logits that it was chosen from."""

    tokens: list[int]
    logits: Tensor
    """[len(tokens), vocab_size]"""


@contextlib.contextmanager
def stepped_core(config: EngineConfig, folder: Path) -> Iterator[EngineCore]:
    """Build a core in this process, after freeing the memory of the one before."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    core = build_core(config, folder, beside_server=False)
    try:
        yield core
    finally:
        core.shutdown()


@contextlib.contextmanager
def reference_path() -> Iterator[None]:
    """Make the cores that are built inside use the kernels' torch references and the library's matmuls.

    Graphs and attention are left to their config (enforce_eager, TORCH_SDPA).
    """
    with (
        patch("headrace.runner.worker.select_kernels", return_value=REFERENCE_KERNELS),
        patch("headrace.quantization.gpu_linear.plan_all", return_value={}),
    ):
        yield


def continued(core: EngineCore, batches: list[list[list[int]]], behind: int) -> list[Sequence]:
    """Run batches of whole sequences, each of which goes on with its own last `behind` tokens."""
    made: list[Sequence] = []
    for batch in batches:
        made += decode(core, [one[:-behind] for one in batch], behind, [one[-behind:] for one in batch])
    return made


def decode(
    core: EngineCore, prompts: list[list[int]], new_tokens: int, forced: list[list[int]] | None = None
) -> list[Sequence]:
    """Run one greedy batch. With `forced`, each prompt goes on with those tokens, whatever the logits say."""
    worker = core._executor._worker  # pyrefly: ignore[missing-attribute]
    recorder = RecordingSampler(worker.runner.sampler)
    worker.runner.sampler = recorder
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        core.scheduler.add_request(
            EngineCoreRequest(
                request_id=str(index), prompt_token_ids=prompt, params=params, max_tokens=new_tokens, seed=0
            )
        )
    tokens: list[list[int]] = [[] for _ in prompts]
    logits: list[list[Tensor]] = [[] for _ in prompts]
    try:
        while core.scheduler.has_work():
            step = core.scheduler.schedule()
            if step is None:
                break
            owners = {request.row: int(request.request_id) for request in core.scheduler.running.items}
            sampling = [owners[row] for row, samples in zip(step.rows, step.samples, strict=True) if samples]
            if forced is not None:
                recorder.forced = [forced[index][len(tokens[index])] for index in sampling]
            recorder.logits.clear()
            output = worker.execute(step).result()
            core.scheduler.update(step, output)
            for place, index in enumerate(sampling):
                logits[index].append(recorder.logits[0][place])
                tokens[index].append(output.token_ids[place])
    finally:
        worker.runner.sampler = recorder._sampler
    return [Sequence(ids, torch.stack(rows)) for ids, rows in zip(tokens, logits, strict=True)]
