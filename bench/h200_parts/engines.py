"""Runs prompts on an engine of this process, reaches into it, and builds layers without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headrace import LLM, SamplingParams
from headrace.attention.table import load_backend, select_backend
from headrace.distributed.mesh import Group, Mesh
from headrace.kernels.table import select_kernels
from headrace.layers.context import LayerContext
from headrace.model_config import ModelConfig
from headrace.models.served import attention_specs


def greedy_tokens(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Return the greedy output tokens of each prompt, of full length."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def runner_of(llm: LLM) -> Any:
    """Return the model runner."""
    core: Any = llm._core
    return core._executor._worker.runner


@contextmanager
def watched(runner: Any, launched: Callable[[Any], None]) -> Iterator[None]:
    """Call `launched` with each step that the model runner has launched."""
    execute = runner.execute

    def watching(step: Any, masks: Any = None) -> Any:
        pending = execute(step, masks)
        launched(step)
        return pending

    runner.execute = watching
    try:
        yield
    finally:
        runner.execute = execute


def context_for(config: ModelConfig, device: torch.device, ranks: int = 1) -> LayerContext:
    """Return what layers are built with in bfloat16, on the first of `ranks`."""
    specs = attention_specs(config, tp_size=ranks, block_size=16, dtype="bfloat16", device_type=device.type)
    backend = load_backend(select_backend(specs).name)
    return LayerContext(Mesh(Group(0, ranks)), select_kernels(device.type), backend, specs, torch.bfloat16, device)
