"""Runs prompts on an engine of this process, and reaches into it."""

from __future__ import annotations

from typing import Any

from headrace import LLM, SamplingParams


def greedy_tokens(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Return the greedy output tokens of each prompt, of full length."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def runner_of(llm: LLM) -> Any:
    """Return the model runner."""
    executor: Any = llm._core._executor
    return executor._worker.runner
