"""Two ranks, one of which finds no memory: both get the same smaller plan, and nobody waits for ever."""

from __future__ import annotations

from typing import Any

import psutil
import pytest

from headrace import LLM, SamplingParams
from headrace.executor import multiproc
from headrace.process import Child, spawn
from tests.executor.short_rank import SAID

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "skip_tokenizer_init": True,
    "max_num_seqs": 4,
    "max_model_len": 64,
    "cpu_threads": 1,
}


def test_both_ranks_get_the_same_smaller_plan(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0)
    prompts = [[5, 6, 7] * 10, [9, 8]]
    with LLM("demo", **SETTINGS) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    children: list[Child] = []

    def spawn_short(module: str, config: bytes, environment: dict[str, str]) -> Child:
        assert module == "headrace.executor.rank"
        children.append(spawn("tests.executor.short_rank", config, environment))
        return children[-1]

    monkeypatch.setattr(multiproc, "spawn", spawn_short)
    with LLM("demo", tensor_parallel_size=2, max_num_batched_tokens=32, **SETTINGS) as llm:
        assert len(children) == 4, "a group was stuck and started again"
        assert [child.is_alive() for child in children] == [False] * 2 + [True] * 2
        config = llm._core.facts.config
        assert config.max_num_batched_tokens == 16
        assert llm._core.facts.num_pages <= 20
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    assert found == expected
    assert caplog.text.count("did not fit") >= 2
    assert SAID in caplog.text
    assert not any(psutil.pid_exists(child.process.pid) for child in children)
