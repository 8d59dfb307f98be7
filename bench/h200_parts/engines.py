"""Runs prompts on an engine of this process, and reaches into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from headrace import LLM, SamplingParams


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
