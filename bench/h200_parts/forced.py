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

from h200_parts.settings import Settings
from headrace.config import EngineConfig
from headrace.engine.build import build_core
from headrace.engine.core import EngineCore
from headrace.kernels.table import REFERENCE_KERNELS
from headrace.request import EngineCoreRequest
from headrace.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Sequence:
    """Holds a request's output and the logits that it was chosen from."""

    tokens: list[int]
    logits: Tensor
    """[len(tokens), vocab_size]"""


@contextlib.contextmanager
def stepped_core(settings: Settings, folder: Path, share: float = 0.5, **knobs: Any) -> Iterator[EngineCore]:
    """Build a core on a model in this process, after freeing the memory of the one before. It has that share of the
    GPU, and no prefix cache unless `knobs` say so."""
    gc.collect()
    torch.cuda.empty_cache()
    base: dict[str, Any] = {"model": str(folder), "enable_prefix_caching": False, "skip_tokenizer_init": True}
    core = build_core(
        EngineConfig(**base | settings.place(share) | knobs | settings.engine), folder, beside_server=False
    )
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
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        core.scheduler.add_request(
            EngineCoreRequest(
                request_id=str(index), prompt_token_ids=prompt, params=params, max_tokens=new_tokens, seed=0
            )
        )
    tokens: list[list[int]] = [[] for _ in prompts]
    logits: list[list[Tensor]] = [[] for _ in prompts]
    sample, sampling = worker.runner.sampler.sample, list[int]()

    def recorded(of_step: Tensor, *arguments: Any, **keywords: Any) -> Any:
        """Keep the logits of the requests that sample, and put in place of their tokens what they are to go on with."""
        for index, row in zip(sampling, of_step.clone(), strict=False):
            logits[index].append(row)
        result = sample(of_step, *arguments, **keywords)
        if forced is None:
            return result
        given = [forced[index][len(tokens[index])] for index in sampling]
        return dataclasses.replace(result, token_ids=result.token_ids.new_tensor(given))

    with patch.object(worker.runner.sampler, "sample", recorded):
        while core.scheduler.has_work():
            step = core.scheduler.schedule()
            if step is None:
                break
            owners = {request.row: int(request.request_id) for request in core.scheduler.running.items}
            sampling = [owners[row] for row, samples in zip(step.rows, step.samples, strict=True) if samples]
            output = worker.execute(step).result()
            core.scheduler.update(step, output)
            for index, token in zip(sampling, output.token_ids, strict=False):
                tokens[index].append(token)
    return [Sequence(ids, torch.stack(rows)) for ids, rows in zip(tokens, logits, strict=True)]
