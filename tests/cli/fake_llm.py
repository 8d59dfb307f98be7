"""Stands in for `headrace.llm.LLM`: answers every prompt with numbered tokens and remembers how it was called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from headrace.config import EngineConfig
from headrace.request import CompletionOutput, Logprob, RequestOutput
from headrace.sampling_params import SamplingParams


class FakeLLM:
    made: ClassVar[list[FakeLLM]] = []

    def __init__(self, **config: Any) -> None:
        self.config = EngineConfig(**config).replace(max_num_seqs=4)
        self.calls: list[tuple[list[Any], list[SamplingParams]]] = []
        self.alive = True
        self.made.append(self)

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool = True) -> list[RequestOutput]:
        each: Sequence[SamplingParams] = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        self.calls.append((prompts, list(each)))
        return [self._answer(str(i), prompt, each[i]) for i, prompt in enumerate(prompts)]

    def _answer(self, name: str, prompt: Any, params: SamplingParams) -> RequestOutput:
        ids = list(range(params.max_tokens or 3))
        logprobs = None if params.logprobs is None else [{i: Logprob(-0.5, 1, f"t{i}")} for i in ids]
        outputs = [
            CompletionOutput(n, f" é{n}" if params.detokenize else "", ids, None, logprobs, "length")
            for n in range(params.n)
        ]
        is_text = isinstance(prompt, str)
        return RequestOutput(name, prompt if is_text else None, [1, 2] if is_text else prompt, outputs, True)

    def shutdown(self) -> None:
        self.alive = False
