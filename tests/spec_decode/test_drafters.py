"""Every way to guess tokens leaves the answers of the whole engine as they are: greedy and drawn ones, under a grammar,
with stop strings, several choices, prompts that begin alike and a cache so small that requests are preempted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

import headrace
from headrace import LLM, SamplingParams, StructuredOutputsParams
from headrace.engine import build
from headrace.errors import ConfigError
from headrace.planner.served import predict_memory
from headrace.request import Request, RequestOutput
from headrace.scheduler.draft_length import DraftLength
from headrace.spec_decode import draft_model
from tests.distributed.thread_ranks import THREADS
from tests.runner.harness import LLAMA
from tests.spec_decode.heads import save_demo_heads

DEMO = Path(headrace.__file__).parent / "demo_model"
SMALL: dict[str, Any] = {
    "device": "cpu", "cpu_threads": 1, "max_model_len": 160, "max_num_seqs": 6, "num_gpu_blocks_override": 24,
    "max_num_batched_tokens": 64, "dtype": "float32",
}  # fmt: skip
STORY = "Once upon a time there was a little dog. The little dog had a red ball. "
PROMPTS = [STORY + "The little", STORY, STORY + STORY + "Once upon a time", "A", "The red ball was red. The red", STORY]
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": NGRAM,
    "the model itself": {"method": "draft_model", "model": "demo", "num_speculative_tokens": 3},
    "a trained model": {"model": "demo-draft", "num_speculative_tokens": 2},
    "eagle3": {"model": "demo-eagle3", "num_speculative_tokens": 2},
    "eagle": {},
    "mtp": {},
}
"""by name; those of the last two are made by `drafters`"""
SHARED = ("the model itself", "eagle3", "mtp")
"""One of each kind that ranks share: a model, a head, and a layer of the model's own"""


def params() -> list[SamplingParams]:
    word = StructuredOutputsParams(regex="(little |red |ball ){2,9}end")
    return [
        SamplingParams(temperature=0.0, max_tokens=40),
        SamplingParams(temperature=1.0, max_tokens=30, seed=3, top_p=0.9, logprobs=2),
        SamplingParams(temperature=0.7, max_tokens=30, seed=5, n=3, min_p=0.05, frequency_penalty=0.3),
        SamplingParams(temperature=0.0, max_tokens=30, structured_outputs=word),
        SamplingParams(temperature=0.0, max_tokens=60, stop=["little", "was"]),
        SamplingParams(temperature=1.0, max_tokens=30, seed=9, structured_outputs=word),
    ]


def answers(llm: LLM) -> list[RequestOutput]:
    return llm.generate(PROMPTS, params(), use_tqdm=False)


def written(outputs: list[RequestOutput]) -> list[list[tuple[str, list[int], Any, Any]]]:
    return [[(c.text, list(c.token_ids), c.finish_reason, c.stop_reason) for c in out.outputs] for out in outputs]


@pytest.fixture(scope="module")
def plain() -> list[RequestOutput]:
    with LLM("demo", **SMALL) as llm:
        return answers(llm)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> the model, which is always the demo model, and its speculative_config."""
    folder = tmp_path_factory.mktemp("drafts")
    model = transformers.LlamaForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    made = {**DRAFTERS, **save_demo_heads(DEMO, folder, model)}
    return {name: (str(folder / "mimo") if name == "mtp" else "demo", given) for name, given in made.items()}


@pytest.mark.parametrize("method", DRAFTERS)
def test_answers_are_those_without(
    method: str, plain: list[RequestOutput], drafters: dict[str, tuple[str, dict[str, Any]]]
) -> None:
    model, given = drafters[method]
    with LLM(model, **{**SMALL, "num_gpu_blocks_override": 13}, speculative_config=given) as llm:
        scheduler = llm._core.scheduler  # type: ignore[attr-defined]
        scheduler.config = replace(scheduler.config, look_ahead=False)  # so that some are preempted
        for _ in range(2):  # the second time, prompts are in the prefix cache
            assert written(answers(llm)) == written(plain)
        stats, shown = llm.stats(), llm.metrics.render().decode()
        facts = llm._core.facts
        predicted = predict_memory(facts.config, llm.model_config, facts.workers)
        why = next(one.reason for one in facts.decisions if one.field == "speculative_config")
    assert predicted is not None
    (rank,) = facts.workers
    assert predicted.kv_bytes_per_token == rank.layout.bytes_per_token
    rounded = 1e-3 if method == "eagle3" else 0.0  # its own vocabulary's rows, up to a multiple of 64
    assert predicted.weight_bytes == pytest.approx(rank.weight_bytes, rel=rounded, abs=0)
    assert "predicted" in why
    counts = stats.drafts
    assert 0 < counts.num_accepted < counts.num_tokens
    assert counts.num_tokens <= 4 * counts.num_drafts
    assert sum(counts.accepted_at) == counts.num_accepted
    assert list(counts.accepted_at) == sorted(counts.accepted_at, reverse=True)
    assert stats.prefix_cache_hits > 0
    assert stats.num_preemptions > 0
    assert stats.num_free_blocks == stats.num_blocks
    of = f'engine="0",model_name="{model}"'
    for name, count in (
        ("num_drafts", counts.num_drafts),
        ("num_draft_tokens", counts.num_tokens),
        ("num_accepted_tokens", counts.num_accepted),
    ):
        assert f"vllm:spec_decode_{name}_total{{{of}}} {count:.1f}" in shown
    first = f'num_accepted_tokens_per_pos_total{{{of},position="0"}} {counts.accepted_at[0]:.1f}'
    assert first in shown


class Wavering(DraftLength):
    """Guesses many, none, few, and none for long."""

    def choose(self, requests: Sequence[Request]) -> int:
        self.steps = getattr(self, "steps", 0) + 1
        return [3, 3, 3, 0, 2, 2, 0, 0, 0, 3, 0, 2, 3, *[0] * 9, 2, 2][self.steps % 24]


@pytest.mark.parametrize(("temperature", "wavers"), [(0.0, False), (1.0, False), (1.0, True)])
def test_a_model_guesses_what_it_would_write_itself(
    temperature: float, wavers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache is filled by chunks of prompts and from the prefix cache, and grows with every guess; it catches up
    where steps have gone without. What it draws are the model's own random numbers."""
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=33, ignore_eos=True)
    given = {**DRAFTERS["the model itself"], "adaptive": wavers}
    monkeypatch.setattr(draft_model, "CATCH_UP_TOKENS", 7)
    if wavers:
        monkeypatch.setattr(build, "DraftLength", Wavering)
    with LLM("demo", **{**SMALL, "max_num_batched_tokens": 24}, speculative_config=given) as llm:
        for _ in range(2):
            llm.generate(PROMPTS[:3], params, use_tqdm=False)
        counts = llm.stats().drafts
        assert llm.stats().prefix_cache_hits > 0
    assert counts.num_accepted == counts.num_tokens > 40


@pytest.mark.parametrize(
    "method",
    [pytest.param(one, marks=() if one in SHARED else pytest.mark.slow) for one in DRAFTERS],
)
def test_two_ranks_guess_alike(method: str, drafters: dict[str, tuple[str, dict[str, Any]]]) -> None:
    """On two ranks the answers, and as many right guesses, as on one."""
    model, given = drafters[method]
    params = [SamplingParams(temperature=temperature, seed=4, max_tokens=16, ignore_eos=True) for temperature in (0, 1)]
    found = []
    for ranks, guesses in ((1, {}), (1, given), (2, {**given, "draft_tensor_parallel_size": 2})):
        small = {**SMALL, "tensor_parallel_size": ranks, "enable_prefix_caching": False}
        apart = {"executor": THREADS} if ranks > 1 else {}
        with LLM(model, **small, speculative_config=guesses, **apart) as llm:
            tokens = [list(out.outputs[0].token_ids) for out in llm.generate(PROMPTS[:2], params, use_tqdm=False)]
            found.append((tokens, llm.stats().drafts))
    (plain, _), (one, alone), (two, shared) = found
    assert plain == one == two
    assert alone.num_accepted == shared.num_accepted > 0
    if method == "the model itself":
        assert shared.num_accepted == shared.num_tokens


def test_guesses_make_fewer_steps_where_an_answer_repeats_itself() -> None:
    again = SamplingParams(temperature=0.0, max_tokens=64, repetition_penalty=0.5)  # which rewards what was there
    tokens, drafts = [], []
    for given in ({}, NGRAM):
        with LLM("demo", **SMALL, speculative_config=given) as llm:
            tokens += [list(llm.generate(STORY, again, use_tqdm=False)[0].outputs[0].token_ids)]
            drafts += [llm.stats().drafts]
    assert tokens[0] == tokens[1]
    assert drafts[0].num_drafts == 0
    assert drafts[1].num_accepted > 2 * drafts[1].num_drafts


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"speculative_config": {"model": "other vocabulary", "num_speculative_tokens": 2}}, "has a vocabulary of 61"),
        ({"speculative_config": {"method": "suffix", "num_speculative_tokens": 2}}, "'suffix' is not served: ngram"),
        (
            {"speculative_config": NGRAM, "max_num_seqs": 20, "max_num_batched_tokens": 64},
            r"max_num_seqs \(20\) must be at most 12: with speculative_config every running request gets 5 tokens",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(
    given: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other vocabulary").mkdir()
    (tmp_path / "other vocabulary" / "config.json").write_text(json.dumps(LLAMA))
    save_file({}, tmp_path / "other vocabulary" / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        LLM("demo", **{**SMALL, **given})


def test_tokens_that_are_computed_alone_are_not_guessed() -> None:
    with LLM("demo", **SMALL, batch_invariant=True, speculative_config=NGRAM) as llm:
        assert llm.config.speculation is None
        assert "would only cost" in next(one.reason for one in llm.decisions if one.field == "speculative_config")
