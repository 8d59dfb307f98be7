"""Decodes with drafts give the tokens and scores of decodes without, through the real sampler, runner, scheduler and
core: right, wrong and random drafts, steps that run ahead of results, preemption, prefix hits, stops, grammars, and
graphs."""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.engine.core import EngineCore
from headrace.request import EngineCoreRequest
from headrace.runner.input_batch import Batch
from headrace.runner.model_runner import ModelRunner
from headrace.runner.pending import FinishedStep, MaskedStep
from headrace.runner.request_state import RequestState
from headrace.runner.step_parts import execute_token_by_token, execute_with_less_memory
from headrace.sampling_params import SamplingParams
from headrace.step import Masks, RunnerOutput, SchedulerOutput
from headrace.structured_outputs.matcher import GrammarCompiler
from tests.runner.fakes import shapes_of
from tests.runner.test_cuda_graph import LIMITS, InThisProcess, make_core, make_runner
from tests.structured_outputs.grammars import EOS, VOCAB_SIZE, byte_vocabulary, decode, regex

VOCAB, STOP = VOCAB_SIZE, EOS
WORD = "[0-9a-p]{8,20}"
MASKED = (2, 5, 9, 10, 14)
"""Requests that write such a word"""
Answers = dict[int, tuple[list[int], list[float]]]
"""seed -> (tokens, their log-probabilities)"""


class ScriptedDrafter:
    """Knows what each request will get, and guesses that, something else, or either."""

    def __init__(self, kind: str, num_drafts: int, sequences: dict[int, list[int]]) -> None:
        self.kind, self.num_drafts, self.sequences = kind, num_drafts, sequences
        self.rng = random.Random(5)

    def propose(self, batch: Batch, state: RequestState, hidden: Tensor) -> None:
        assert hidden.shape[0] >= batch.num_samples
        assert state.num_known is not None
        for row in set(batch.sample_rows.tolist()) - {LIMITS.max_num_seqs}:  # warmup_sizes have the last
            seed = int(state.sampling.gather(torch.tensor([row])).seed)
            known = int(state.num_known[row])
            guesses = (self.sequences[seed][known:] + [0] * self.num_drafts)[: self.num_drafts]
            is_right = {"right": 1.0, "random": 0.6, "wrong": 0.0}[self.kind]
            guesses = [token if self.rng.random() < is_right else (token + 1) % VOCAB for token in guesses]
            state.token_table[row, known : known + self.num_drafts] = torch.tensor(guesses, dtype=torch.int32)


class Late:
    """A step whose result is not there before it is waited for, so that the next one is scheduled without it."""

    def __init__(self, pending: Any) -> None:
        self.pending = pending

    def done(self) -> bool:
        return False

    def result(self) -> RunnerOutput:
        return self.pending.result()


class RunsAhead(InThisProcess):
    def execute(self, step: SchedulerOutput) -> Any:
        return Late(super().execute(step))


def traffic() -> list[EngineCoreRequest]:
    """All that a token may depend on: seeds, penalties, rules, filters, masks; ends by stops, length and context."""
    rng = random.Random(3)
    shared = [rng.randrange(VOCAB) for _ in range(21)]
    wishes: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
        {"temperature": 1.5, "top_p": 0.9, "top_k": 20, "min_tokens": 6},
        {"temperature": 0.0, "logit_bias": {7: 2.5, 11: -3.0}, "min_tokens": 4},
        {"temperature": 1.0, "allowed_token_ids": [1, 2, 3, 5, 8, 13, 21, 34]},
    ]
    requests = []
    for number in range(16):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, 5, 11, 30)))]
        if number % 3 == 0:
            prompt = shared + prompt[:9]
        if number == 7:
            prompt = [rng.randrange(VOCAB) for _ in range(85)]  # runs into max_model_len
        params = SamplingParams(
            max_tokens=rng.randrange(12, 30),
            logprobs=2 if number % 2 else None,
            prompt_logprobs=1 if number == 5 else None,
            **wishes[number % len(wishes)],
        )
        bad_words = [[4], [9, 5], [3, 1, 2]] if number % 4 == 0 else []
        requests.append(
            EngineCoreRequest(
                request_id=str(number),
                prompt_token_ids=prompt,
                params=params,
                max_tokens=params.max_tokens or 1,
                seed=number,
                stop_token_ids=[STOP, 17] if number % 3 and number != 7 else [],
                bad_words_token_ids=bad_words,
                grammar=regex(WORD) if number in MASKED else "",
            )
        )
    return requests


def serve(core: EngineCore) -> Answers:
    found: Answers = {}
    arriving = deque(traffic())
    for turn in range(3000):
        if arriving and turn % 2 == 0:
            core.add_request(arriving.popleft())
        stepped = core.step() if core.has_work() else None
        for output in stepped.outputs if stepped else ():
            assert output.error is None
            tokens, scores = found.setdefault(int(output.request_id), ([], []))
            tokens += output.new_token_ids
            for token, entry in zip(output.new_token_ids, output.new_logprobs, strict=False):
                assert entry.token_ids[0] == token
                scores += entry.logprobs
        if not arriving and not core.has_work():
            return found
    raise AssertionError("never done")


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(byte_vocabulary, threads=1)
    yield made
    made.shutdown()


def make_drafting(
    kind: str, num_drafts: int, answers: Answers, compiler: GrammarCompiler, mode: str = "NONE",
    executor: type[InThisProcess] = RunsAhead,
) -> tuple[ModelRunner, EngineCore]:  # fmt: skip
    sequences = {r.seed: r.prompt_token_ids + answers[r.seed][0] for r in traffic()}
    drafter = ScriptedDrafter(kind, num_drafts, sequences)
    runner = make_runner("llama", mode, drafter=drafter)
    return runner, make_core(runner, num_blocks=30, executor=executor, compiler=compiler)


@pytest.fixture(scope="module")
def expected(compiler: GrammarCompiler) -> tuple[Answers, int]:
    """Without drafts, and in how many steps."""
    core = make_core(make_runner("llama", "NONE"), num_blocks=30, executor=RunsAhead, compiler=compiler)
    answers = serve(core)
    assert core.scheduler.stats().num_preemptions > 0
    assert core.scheduler.stats().prefix_cache_hits > 0
    assert any(tokens[-1] in (STOP, 17) for tokens, _ in answers.values()), "nothing stops"
    assert len(answers[7][0]) == LIMITS.max_model_len - 85
    assert all(re.fullmatch(WORD, decode(answers[number][0])) for number in MASKED)
    return answers, len(core._executor.steps)  # type: ignore[attr-defined]


def check(got: Answers, answers: Answers) -> None:
    assert {seed: tokens for seed, (tokens, _) in got.items()} == {s: tokens for s, (tokens, _) in answers.items()}
    for seed, (_, scores) in got.items():
        assert scores == pytest.approx(answers[seed][1], abs=1e-3)


@pytest.mark.parametrize(
    ("kind", "num_drafts", "mode"),
    [
        ("right", 4, "NONE"),
        ("wrong", 2, "NONE"),
        ("random", 1, "NONE"),
        ("random", 3, "FULL"),
        ("right", 2, "PIECEWISE"),
        ("random", 4, "FULL_AND_PIECEWISE"),
    ],
)
def test_tokens_are_those_without_drafts(
    kind: str, num_drafts: int, mode: str, expected: tuple[Answers, int], compiler: GrammarCompiler
) -> None:
    answers, num_steps = expected
    runner, core = make_drafting(kind, num_drafts, answers, compiler, mode)
    check(serve(core), answers)
    assert core.scheduler.stats().num_preemptions > 0
    assert core.scheduler.stats().prefix_cache_hits > 0
    if kind == "right":
        assert len(core._executor.steps) < num_steps * 0.75  # type: ignore[attr-defined]
    if mode.startswith("FULL"):
        decodes = {shape for shape in shapes_of(runner.graphs) if shape.decode}
        assert decodes
        assert all(shape.num_tokens == shape.num_reqs * (1 + num_drafts) for shape in decodes)


class InParts(InThisProcess):
    """As a worker does it where steps are computed in parts: a masked one waits for its masks as a whole."""

    def parts(self, step: SchedulerOutput, masks: Masks | None) -> FinishedStep:
        raise NotImplementedError

    def execute(self, step: SchedulerOutput) -> Any:
        self.steps.append(step)
        if not step.masked:
            return self.parts(step, None)
        self.masked = MaskedStep(step)
        return self.masked

    def sample(self, masks: Masks) -> None:
        self.masked.sampled = self.parts(self.steps[-1], masks)


class TokenByToken(InParts):
    def parts(self, step: SchedulerOutput, masks: Masks | None) -> FinishedStep:
        return execute_token_by_token(self.runner, step, masks)


class NoMemory:
    def empty_cache(self) -> None:
        pass


class LessMemory(InParts):
    """Every third step finds no memory at first, and no more than three tokens at once after that."""

    def parts(self, step: SchedulerOutput, masks: Masks | None) -> FinishedStep:
        if step.step % 3:
            return FinishedStep(self.runner.execute(step, masks).result())
        forward = self.runner.forward

        def short(batch: Batch, cut: Any = None) -> Any:
            if batch.num_tokens > 3:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
            return forward(batch, cut)

        self.runner.forward = short  # type: ignore[method-assign]
        try:
            return execute_with_less_memory(self.runner, NoMemory(), step, "no memory", masks)  # type: ignore[arg-type]
        finally:
            self.runner.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize("executor", [TokenByToken, LessMemory])
def test_where_a_step_is_cut_into_parts_its_drafts_are_left_out(
    executor: type[InThisProcess], expected: tuple[Answers, int], compiler: GrammarCompiler
) -> None:
    answers, _ = expected
    _, core = make_drafting("random", 3, answers, compiler, executor=executor)
    check(serve(core), answers)
