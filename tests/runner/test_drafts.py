"""Decodes with drafts give the tokens and scores of decodes without, through the real sampler, runner, scheduler and
core: right, wrong and random drafts, steps that run ahead of results, preemption, prefix hits, stops, grammars, and
graphs."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.attention.batch import Batch
from headrace.attention.metadata import AttentionMetadata
from headrace.engine.core import EngineCore
from headrace.runner.cuda_graph import Shape
from headrace.runner.model_runner import ModelRunner
from headrace.runner.pending import FinishedStep, MaskedStep
from headrace.runner.step_parts import execute_token_by_token, execute_with_less_memory
from headrace.scheduler.draft_length import DraftLength
from headrace.spec_decode.drafter import Tables, rows_of
from headrace.step import Masks, RunnerOutput, SchedulerOutput
from headrace.structured_outputs.matcher import GrammarCompiler
from tests.runner.fakes import shapes_of
from tests.runner.harness import (
    LIMITS,
    MASKED,
    STOP,
    VOCAB,
    WORD,
    Answers,
    InThisProcess,
    check,
    make_core,
    make_runner,
    serve,
    traffic,
)
from tests.structured_outputs.grammars import byte_vocabulary, decode


class ScriptedDrafter:
    """Knows what each request will get, and guesses that, something else, or either."""

    def __init__(self, kind: str, num_drafts: int, sequences: dict[int, list[int]]) -> None:
        self.kind, self.num_drafts, self.sequences = kind, num_drafts, sequences
        self.rng = random.Random(5)
        self.num_layers = 0
        self.taps = False

    def hidden_states(self, num_tokens: int, device: torch.device) -> None:
        pass

    def fill(self, input_ids: Tensor, metadata: AttentionMetadata, tables: Tables) -> None:
        pass

    def propose(self, tables: Tables, batch: Batch, sampled: Tensor | None) -> None:
        for row in set(rows_of(batch, sampled).tolist()) - {LIMITS.max_num_seqs}:  # padding has the last
            seed = int(tables.sampling.gather(torch.tensor([row])).seed)
            known = int(tables.num_known[row])
            assert known <= batch.max_seq_len + 1
            guesses = (self.sequences[seed][known:] + [0] * self.num_drafts)[: self.num_drafts]
            is_right = {"right": 1.0, "random": 0.6, "wrong": 0.0}[self.kind]
            guesses = [token if self.rng.random() < is_right else (token + 1) % VOCAB for token in guesses]
            tables.token_table[row, known : known + self.num_drafts] = torch.tensor(guesses, dtype=torch.int32)


TAPS: dict[str, tuple[int, ...]] = {"eagle": (), "eagle3": (1, 3, 2)}
"""Kind of head -> the layers of the model whose inputs it reads; none: the last hidden states"""


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


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(byte_vocabulary, threads=1)
    yield made
    made.shutdown()


def make_drafting(
    kind: str, num_drafts: int, answers: Answers, compiler: GrammarCompiler, mode: str = "NONE",
    executor: type[InThisProcess] = RunsAhead, wavers: bool = False,
) -> tuple[ModelRunner, EngineCore]:  # fmt: skip
    """`wavers`: the number of drafts changes all the time."""
    if kind == "own":
        runner = make_runner("llama", mode, own_drafts=num_drafts)
    elif kind in TAPS:
        runner = make_runner("llama", mode, head_drafts=num_drafts, taps=TAPS[kind])
    else:
        sequences = {r.seed: r.prompt_token_ids + answers[r.seed][0] for r in traffic()}
        runner = make_runner("llama", mode, drafter=ScriptedDrafter(kind, num_drafts, sequences))
    costs = random.Random(3)
    length = DraftLength((0, 1, num_drafts), lambda *_: 0.5 + costs.random()) if wavers else None
    return runner, make_core(runner, 30, executor=executor, compiler=compiler, draft_length=length)


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


@pytest.mark.parametrize(
    ("kind", "num_drafts", "mode"),
    [
        ("right", 4, "NONE"),
        ("wrong", 2, "NONE"),
        ("right", 2, "PIECEWISE"),
        ("random", 4, "FULL_AND_PIECEWISE"),
        ("own", 3, "FULL"),
        ("eagle", 2, "FULL_AND_PIECEWISE"),
        ("eagle3", 2, "PIECEWISE"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)  # the same kinds and modes in other company
            for one in (
                ("random", 1, "NONE"), ("random", 3, "FULL"), ("own", 2, "NONE"), ("own", 2, "FULL_AND_PIECEWISE"),
                ("eagle", 2, "NONE"), ("eagle3", 3, "FULL"),
            )
        ),
    ],
)  # fmt: skip
def test_tokens_are_those_without_drafts(
    kind: str, num_drafts: int, mode: str, expected: tuple[Answers, int], compiler: GrammarCompiler
) -> None:
    answers, num_steps = expected
    runner, core = make_drafting(kind, num_drafts, answers, compiler, mode)
    check(serve(core), answers)
    assert core.scheduler.stats().num_preemptions > 0
    assert core.scheduler.stats().prefix_cache_hits > 0
    if kind in ("right", "own"):
        assert len(core._executor.steps) < num_steps * 0.75  # type: ignore[attr-defined]
    if mode.startswith("FULL"):
        decodes = {shape for shape in shapes_of(runner.graphs) if shape.decode and shape.num_tokens > shape.num_reqs}
        assert decodes
        assert all(shape.num_tokens == shape.num_reqs * (1 + num_drafts) for shape in decodes)


def test_steps_without_guesses_are_computed_as_without_a_drafter(
    expected: tuple[Answers, int], compiler: GrammarCompiler
) -> None:
    """No length is corrected on the device, and the kernel that writes tokens gets what it gets without drafts."""
    runner, core = make_drafting("own", 2, expected[0], compiler, wavers=True)
    core.scheduler.draft_length.choose = lambda requests: 0  # type: ignore[union-attr, method-assign]
    committed = []

    def commit(*arguments: Any) -> None:
        committed.append(arguments[9:12])
        kernels.commit_tokens(*arguments)

    kernels = runner.kernels
    runner.kernels = replace(kernels, settle_lengths=None, commit_tokens=commit)  # type: ignore[arg-type]
    check(serve(core), expected[0])
    assert set(committed) == {(None, None, 1)}


def watched_guesses(kind: str, mode: str, answers: Answers, compiler: GrammarCompiler) -> dict[tuple[int, ...], Any]:
    """(seed, tokens known) -> what is guessed behind them, where the number of guesses changes all the time."""
    runner, core = make_drafting(kind, 3, answers, compiler, mode, wavers=True)
    assert runner.guesses is not None
    make, found = runner.guesses.make, {}

    def watched(step: SchedulerOutput, batch: Batch, shape: Shape | None) -> None:
        make(step, batch, shape)
        table, num_known = runner.state.token_table, runner.state.num_known
        assert num_known is not None
        for row, samples in zip(step.rows, step.samples, strict=True):
            known = int(num_known[row])
            if samples and step.num_guesses and known + 3 < LIMITS.max_model_len:
                seed = int(runner.state.sampling.gather(torch.tensor([row])).seed)
                found[seed, known] = table[row, : known + step.num_guesses].tolist()

    runner.guesses.make = watched  # type: ignore[method-assign]
    check(serve(core), answers)
    captured = runner.guesses._graphs.items()
    assert all(shape.decodes_with(count) for count, graphs in captured for shape in shapes_of(graphs))
    return found


@pytest.mark.parametrize("kind", ["own", "eagle3"])
def test_what_graphs_guess_is_what_is_guessed_without(
    kind: str, expected: tuple[Answers, int], compiler: GrammarCompiler
) -> None:
    eager, graphs = (watched_guesses(kind, mode, expected[0], compiler) for mode in ("NONE", "FULL_AND_PIECEWISE"))
    assert eager == graphs
    assert len(eager) > 60


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


@pytest.mark.parametrize(("kind", "mode"), [("random", "NONE"), ("right", "FULL")])
def test_the_number_of_drafts_may_change_from_step_to_step(
    kind: str, mode: str, expected: tuple[Answers, int], compiler: GrammarCompiler
) -> None:
    runner, core = make_drafting(kind, 3, expected[0], compiler, mode, wavers=True)
    check(serve(core), expected[0])
    steps = core._executor.steps  # type: ignore[attr-defined]
    assert {max(step.num_drafts, default=0) for step in steps} == {0, 1, 3}
    assert {step.num_guesses for step in steps} == {0, 1, 3}
    if mode == "FULL":
        shapes = {shape.num_tokens // shape.num_reqs for shape in shapes_of(runner.graphs) if shape.decode}
        assert {1, 4} <= shapes


@pytest.mark.parametrize("executor", [TokenByToken, LessMemory])
def test_where_a_step_is_cut_into_parts_its_drafts_are_left_out(
    executor: type[InThisProcess], expected: tuple[Answers, int], compiler: GrammarCompiler
) -> None:
    answers, _ = expected
    _, core = make_drafting("random", 3, answers, compiler, executor=executor)
    check(serve(core), answers)
