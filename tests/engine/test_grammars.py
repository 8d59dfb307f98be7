"""Requests with grammars through the core: those whose grammars compile hold nobody up, steps sample under the masks
that their outputs so far call for, and whatever fails takes only its own request along."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLTokenizer

from headrace.cache_groups import same_layout
from headrace.config import EngineConfig
from headrace.engine import grammars as grammars_module
from headrace.engine.core import EngineCore
from headrace.engine.messages import Abort, CoreFacts
from headrace.errors import HeadraceError
from headrace.request import EngineCoreOutput, EngineCoreRequest, FinishReason
from headrace.sampling_params import SamplingParams
from headrace.scheduler.config import SchedulerConfig
from headrace.scheduler.scheduler import Scheduler
from headrace.step import Masks, RunnerOutput, SchedulerOutput
from headrace.structured_outputs.matcher import GrammarCompiler, Matcher, Wanted
from tests.runner.harness import make_core as make_real_core
from tests.runner.harness import make_runner
from tests.speed import PATIENCE
from tests.structured_outputs.grammars import (
    EOS,
    VOCAB_SIZE,
    byte_vocabulary,
    choice,
    decode,
    encode,
    regex,
    schema,
)

OBJECT = schema(
    {
        "type": "object",
        "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)
TEXTS = {f'{{"a":"{a}","b":{b}}}' for a in ("x", "yy") for b in ("true", "false")}


@dataclass(eq=False)
class Sampled:
    """A step that is done now and then; one that is masked cannot be before its masks came."""

    is_done: Callable[[], bool]
    output: RunnerOutput | Exception | None = None

    def done(self) -> bool:
        return self.output is not None and self.is_done()

    def result(self) -> RunnerOutput:
        assert self.output is not None, "waited for a step that has no masks yet"
        if isinstance(self.output, Exception):
            raise self.output
        return self.output


@dataclass
class Device:
    """Samples any token that is allowed. `done`: how often a result is there before it is waited for."""

    done: float = 0.0
    seed: int = 0
    fails: dict[str, set[int]] = field(default_factory=dict)
    """execute | sample | result -> numbers of the steps that fail there"""
    steps: list[SchedulerOutput] = field(default_factory=list)
    num_masked: int = 0
    waiting: Sampled | None = None

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def execute(self, step: SchedulerOutput) -> Sampled:
        assert self.waiting is None, "a step was executed before the one ahead of it had sampled"
        self.steps.append(step)
        if step.step in self.fails.get("execute", ()):
            raise HeadraceError("out of luck")
        handle = Sampled(lambda: self.rng.random() < self.done)
        if step.masked:
            self.waiting = handle
        else:
            handle.output = self._sample(step, Masks(step.step))
        return handle

    def sample(self, masks: Masks) -> None:
        step, handle = self.steps[-1], self.waiting
        self.waiting = None
        assert handle is not None
        assert (step.masked, step.step) == (True, masks.step)
        self.num_masked += 1
        if step.step in self.fails.get("sample", ()):
            raise HeadraceError("out of luck")
        handle.output = self._sample(step, masks)

    def _sample(self, step: SchedulerOutput, masks: Masks) -> RunnerOutput | Exception:
        if step.step in self.fails.get("result", ()):
            return HeadraceError("out of luck")
        lines = np.frombuffer(masks.bits, np.uint8).reshape(-1, max(1, 4 * masks.num_words))
        tokens = []
        for row, samples in zip(step.rows, step.samples, strict=True):
            if samples:
                line = masks.first_lines.get(row)
                may = [*range(VOCAB_SIZE)]
                if line is not None:
                    may = np.flatnonzero(np.unpackbits(lines[line], bitorder="little")).tolist()
                tokens.append(self.rng.choice(may) if may else -1)
        return RunnerOutput(step.step, tokens)

    def check(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(byte_vocabulary, threads=2)
    yield made
    made.shutdown()


def make_core(
    device: Device, compiler: GrammarCompiler | None, overlap: bool = True, num_pages: int = 64, **more: Any
) -> EngineCore:
    limits = SchedulerConfig(
        max_num_seqs=6, max_num_batched_tokens=24, max_model_len=96, layout=same_layout(4), num_pages=num_pages,
        look_ahead=False,
    )  # fmt: skip
    facts = CoreFacts(EngineConfig(async_scheduling=overlap), [], [], num_pages)
    return EngineCore(facts, Scheduler(limits), device, compiler=compiler, **more)  # type: ignore[arg-type]


def request(
    name: str, grammar: str = "", max_tokens: int = 40, prompt: int = 3, client: str = "", **params: Any
) -> EngineCoreRequest:
    given = SamplingParams(max_tokens=max_tokens, **params)
    stops = [] if given.ignore_eos else [EOS]
    return EngineCoreRequest(
        request_id=name, prompt_token_ids=[5] * prompt, params=given, max_tokens=max_tokens, seed=0,
        stop_token_ids=[*stops, *given.stop_token_ids], grammar=grammar, client=client,
    )  # fmt: skip


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    invalid: bool = False
    retry_after: int = 0

    @property
    def text(self) -> str:
        return decode(self.token_ids)

    def add(self, output: EngineCoreOutput) -> None:
        assert self.finish_reason is None
        self.token_ids += output.new_token_ids
        self.finish_reason, self.error, self.invalid = output.finish_reason, output.error, output.invalid
        self.retry_after = output.retry_after


def drain(core: EngineCore, answers: dict[str, Answer] | None = None) -> dict[str, Answer]:
    found = {} if answers is None else answers
    for _ in range(20_000):
        if not core.has_work():
            return found
        stepped = core.step()
        assert stepped is not None
        for output in stepped.outputs:
            found.setdefault(output.request_id, Answer()).add(output)
    raise AssertionError("never done")


def run(core: EngineCore, *requests: EngineCoreRequest) -> dict[str, Answer]:
    for one in requests:
        core.add_request(one)
    return drain(core)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("done", [0.0, 0.5, 1.0])
def test_outputs_follow_their_grammars_however_steps_overlap(
    compiler: GrammarCompiler, overlap: bool, done: float
) -> None:
    device = Device(done, seed=random.randrange(10**6))
    core = make_core(device, compiler, overlap)
    answers = run(
        core,
        *(request(f"object {number}", OBJECT, prompt=1 + 9 * number) for number in range(5)),
        *(request(f"digits {number}", regex("[0-9]{3}x"), ignore_eos=number > 1) for number in range(4)),
        *(request(f"plain {number}", max_tokens=7, ignore_eos=True) for number in range(4)),
    )
    for name, answer in answers.items():
        assert answer.error is None
        if name.startswith("object"):
            assert answer.text in TEXTS
        elif name.startswith("digits"):
            assert len(answer.text) == 4
            assert answer.text.endswith("x")
        assert answer.finish_reason == ("length" if name.startswith("plain") else "stop")
    assert len(answers) == 13
    assert device.num_masked > 0


def test_plain_steps_are_executed_in_one_call(compiler: GrammarCompiler) -> None:
    device = Device()
    core = make_core(device, compiler)
    run(core, request("a", OBJECT))
    masked = device.num_masked
    run(core, *(request(f"plain {number}", max_tokens=5) for number in range(3)))
    assert device.num_masked == masked > 0
    assert core.scheduler._num_matched == 0


def test_masked_steps_run_ahead_too(compiler: GrammarCompiler) -> None:
    """While step N is still computed, step N + 1 is executed up to where it samples."""
    device = Device(done=0.0)
    core = make_core(device, compiler)
    core.add_request(request("a", regex("[0-9]{20}"), ignore_eos=True))
    depths = Counter[int]()
    while core.has_work():
        core.step()
        depths[len(core._inflight)] += 1
    assert depths[1] > 15
    assert len(device.steps) == 21  # one is thrown away: it ran while the last token was on its way


def test_a_complete_output_that_fills_max_tokens_says_stop(compiler: GrammarCompiler) -> None:
    answers = run(make_core(Device(), compiler), request("a", choice(["abc"]), max_tokens=3))
    assert (answers["a"].finish_reason, answers["a"].text) == ("stop", "abc")


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_holds_as_long_as_the_grammar_allows(compiler: GrammarCompiler, ignore_eos: bool) -> None:
    core = make_core(Device(seed=random.randrange(10**6)), compiler)
    params: dict[str, Any] = {"min_tokens": 12, "ignore_eos": ignore_eos, "max_tokens": 20}
    answers = run(
        core,
        *(request(f"free {number}", regex("[0-9]+"), **params) for number in range(4)),
        *(request(f"short {number}", choice(["ab", "abcd"]), **params) for number in range(4)),
    )
    for name, answer in answers.items():
        if name.startswith("free"):
            assert len(answer.text) >= 12
        else:
            assert (answer.text, answer.finish_reason) == ("abcd", "stop")


def test_a_stop_token_of_the_users_ends_what_the_grammar_would_go_on_with(compiler: GrammarCompiler) -> None:
    (stop,) = encode("7")
    answers = run(
        make_core(Device(seed=3), compiler),
        request("a", regex("[0-9]+"), max_tokens=80, ignore_eos=True, stop_token_ids=[stop]),
    )
    assert answers["a"].token_ids[-1] == stop
    assert answers["a"].finish_reason == "stop"


class TestWhileGrammarsCompile:
    """Here the vocabulary, and so every grammar, waits until the test says so."""

    @pytest.fixture
    def ready(self) -> Iterator[threading.Event]:
        event = threading.Event()
        yield event
        event.set()

    @pytest.fixture
    def slow(self, ready: threading.Event) -> Iterator[GrammarCompiler]:
        def read() -> LLTokenizer:
            assert ready.wait(PATIENCE)
            return byte_vocabulary()

        made = GrammarCompiler(read, threads=1)
        yield made
        ready.set()
        made.shutdown()

    def test_others_do_not_wait(self, slow: GrammarCompiler, ready: threading.Event) -> None:
        core, answers = make_core(Device(), slow), {}
        core.add_request(request("held", OBJECT))
        core.add_request(request("plain", max_tokens=5, ignore_eos=True))
        while "plain" not in answers or answers["plain"].finish_reason is None:
            stepped = core.step()
            assert stepped is not None
            for output in stepped.outputs:
                answers.setdefault(output.request_id, Answer()).add(output)
        assert "held" not in answers
        assert core.has_work()
        assert not core.may_warm_up
        ready.set()
        assert drain(core)["held"].text in TEXTS

    def test_one_whose_turn_does_not_come_is_told_when_to_come_back(self, slow: GrammarCompiler) -> None:
        core = make_core(Device(), slow, turn_seconds=0.05)
        answers = run(core, request("held", OBJECT), request("plain", max_tokens=5))
        assert answers["held"].error == (
            "the engine did not come to the request's grammar within 0.05 seconds: 1 wait to be compiled; please try "
            "again later"
        )
        assert (answers["held"].invalid, answers["held"].retry_after) == (False, 1)
        assert answers["plain"].error is None
        assert core.snapshot([]).stats.num_received == 2

    def test_an_abort_leaves_nothing(self, slow: GrammarCompiler, ready: threading.Event) -> None:
        core = make_core(Device(), slow)
        for name in ("a", "b"):
            core.add_request(request(name, OBJECT))
        stats = core.snapshot([]).stats
        assert (stats.num_waiting, stats.num_waiting_tokens) == (2, 6)
        core.abort([Abort("a")])
        assert core.snapshot([]).stats.num_waiting == 1
        ready.set()
        answers = drain(core)
        assert set(answers) == {"b"}
        stats = core.snapshot([]).stats
        assert (stats.num_received, stats.num_received_tokens, stats.num_waiting) == (2, 6, 0)
        assert not len(core._grammars)

    def test_an_id_in_use_is_refused(self, slow: GrammarCompiler, ready: threading.Event) -> None:
        core = make_core(Device(), slow)
        core.add_request(request("a", OBJECT))
        core.add_request(request("a", choice(["b"])))
        stepped = core.step()
        assert stepped is not None
        assert "is in use" in str(stepped.outputs[0].error)
        ready.set()
        assert drain(core)["a"].text in TEXTS


class TestTurnsAtTheCompiler:
    """One thread compiles, and the test sees in which order."""

    @pytest.fixture
    def compiled(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        found: list[str] = []
        compile = GrammarCompiler._compile

        def noted(self: GrammarCompiler, grammar: str) -> Matcher:
            found.append(grammar)
            return compile(self, grammar)

        monkeypatch.setattr(GrammarCompiler, "_compile", noted)
        return found

    @pytest.fixture
    def one_thread(self) -> Iterator[GrammarCompiler]:
        made = GrammarCompiler(byte_vocabulary, threads=1)
        yield made
        made.shutdown()

    def test_many_grammars_of_one_client_hardly_delay_anothers(
        self, one_thread: GrammarCompiler, compiled: list[str]
    ) -> None:
        many = [request(f"many {number}", choice([f"{number}"]), client="greedy") for number in range(9)]
        answers = run(make_core(Device(), one_thread), *many, request("one", choice(["x"]), client="modest"))
        assert compiled.index(choice(["x"])) <= 1
        assert [answers[f"many {number}"].text for number in range(9)] == [*map(str, range(9))]
        assert [grammar for grammar in compiled if grammar != choice(["x"])] == [one.grammar for one in many]

    def test_a_grammar_is_compiled_once_for_all_who_want_it(
        self, one_thread: GrammarCompiler, compiled: list[str]
    ) -> None:
        core = make_core(Device(), one_thread)
        answers = run(core, *(request(f"{client} {n}", OBJECT, client=client) for n in range(4) for client in "ab"))
        assert {answer.text for answer in answers.values()} <= TEXTS
        assert run(core, request("later", OBJECT))["later"].text in TEXTS
        assert compiled == [OBJECT]

    def test_one_that_is_aborted_takes_nobodys_turn(self, one_thread: GrammarCompiler, compiled: list[str]) -> None:
        core = make_core(Device(), one_thread)
        for name in ("first", "left", "last"):
            core.add_request(request(name, choice([name])))
        core.abort([Abort("left")])
        core.add_request(request("left", choice(["again"])))
        assert {name: answer.text for name, answer in drain(core).items()} == {
            "first": "first", "last": "last", "left": "again",
        }  # fmt: skip
        assert choice(["left"]) not in compiled

    def test_one_that_takes_too_long_ends_its_own_request(
        self, one_thread: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its thread is busy until it ends; then it is the next one's turn."""
        done = threading.Event()
        compile = GrammarCompiler._compile

        def slow(self: GrammarCompiler, grammar: str) -> Matcher:
            assert grammar != OBJECT or done.wait(PATIENCE)
            return compile(self, grammar)

        monkeypatch.setattr(GrammarCompiler, "_compile", slow)
        monkeypatch.setattr(grammars_module, "COMPILE_SECONDS", 0.05)
        core, answers = make_core(Device(), one_thread), {}
        core.add_request(request("slow", OBJECT))
        core.add_request(request("next", choice(["x"])))
        while not answers:
            for output in core.step().outputs:  # type: ignore[union-attr]
                answers.setdefault(output.request_id, Answer()).add(output)
        monkeypatch.setattr(grammars_module, "COMPILE_SECONDS", 30)
        assert answers["slow"].error == (
            "the grammar was not compiled within 0.05 seconds, which is the limit: it is too complex"
        )
        assert answers["slow"].invalid
        done.set()
        assert drain(core, answers)["next"].text == "x"


def test_without_a_tokenizer_a_grammar_is_refused() -> None:
    core = make_core(Device(), None)
    answers = run(core, request("a", OBJECT), request("b", max_tokens=4))
    assert core.snapshot([]).stats.num_received == 2  # else the front would take one for queued, for ever
    assert "needs a tokenizer" in str(answers["a"].error)
    assert answers["b"].error is None


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(compiler: GrammarCompiler) -> None:
    answers = run(make_core(Device(), compiler), request("bad", "start: ("), request("good", OBJECT))
    assert "cannot be compiled" in str(answers["bad"].error)
    assert answers["bad"].invalid
    assert answers["good"].text in TEXTS


def test_a_request_that_cannot_run_is_refused_once_its_grammar_is_there(compiler: GrammarCompiler) -> None:
    answers = run(make_core(Device(), compiler, num_pages=2), request("big", OBJECT, prompt=90, max_tokens=2))
    assert "pages of KV cache" in str(answers["big"].error)


@pytest.mark.parametrize("when", ["mask", "advance"])
def test_a_grammar_that_fails_midway_ends_its_request_alone(
    compiler: GrammarCompiler, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 4

    def fails(self: Matcher) -> None:
        if self.inner in broken:
            self.error = "too complex"

    broken: list[object] = []
    core = make_core(Device(seed=5), compiler)
    core.add_request(request("bad", regex("[0-9]+"), ignore_eos=True))
    core.add_request(request("good", OBJECT))
    advance = Matcher.advance

    def advanced(self: Matcher, token_ids: list[int]) -> int:
        taken = advance(self, token_ids)
        bad = core.scheduler.requests.get("bad")
        if bad is not None and bad.matcher is self and bad.num_output_tokens >= limit:
            broken.append(self.inner)
            if when == "advance":
                self.error = "too complex"
        return taken

    monkeypatch.setattr(Matcher, "advance", advanced)
    monkeypatch.setattr(Matcher, "note_error", fails)
    answers = drain(core)
    assert answers["bad"].error == "too complex"
    assert len(answers["bad"].token_ids) in (limit, limit + 1)
    assert answers["good"].text in TEXTS


@pytest.mark.parametrize("where", ["execute", "sample", "result"])
def test_a_masked_step_that_fails_ends_its_requests_alone(compiler: GrammarCompiler, where: str) -> None:
    device = Device(fails={where: {2}})
    core = make_core(device, compiler)
    answers = run(core, *(request(f"first {number}", regex("[0-9]{9}")) for number in range(3)))
    answers |= run(core, request("later", OBJECT))
    assert answers.pop("later").text in TEXTS
    assert {answer.error for answer in answers.values()} == {"the step failed: HeadraceError: out of luck"}
    stats = core.snapshot([]).stats
    assert stats.num_free_blocks == stats.num_blocks


def test_masks_that_cannot_be_made_end_the_requests_with_grammars_alone(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, count = compiler.fill, itertools.count()

    def fails_once(wanted: list[Wanted]) -> tuple[int, memoryview]:
        if next(count) == 3:
            raise RuntimeError("a secret path")
        return fill(wanted)

    monkeypatch.setattr(compiler, "fill", fails_once)
    core = make_core(Device(), compiler)
    answers = run(
        core,
        *(request(f"held {number}", regex("[0-9]{9}")) for number in range(2)),
        request("plain", max_tokens=9, ignore_eos=True),
    )
    assert (answers["plain"].error, len(answers["plain"].token_ids)) == (None, 9)
    for number in range(2):
        held = answers[f"held {number}"]
        assert (held.error, held.invalid) == ("its masks failed: RuntimeError", False)
        assert 0 < len(held.token_ids) < 9
    assert run(core, request("later", OBJECT))["later"].text in TEXTS
    stats = core.snapshot([]).stats
    assert stats.num_free_blocks == stats.num_blocks


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Matcher]]:
    """Every matcher that a request got."""
    found: list[weakref.ref[Matcher]] = []
    copy = Matcher.copy

    def copied(self: Matcher) -> Matcher:
        found.append(weakref.ref(other := copy(self)))
        return other

    monkeypatch.setattr(Matcher, "copy", copied)
    return found


def serve_under_aborts(core: EngineCore, number: int, most: int) -> None:
    """Half of the requests have grammars, one of five is aborted; none may be lost, and each answer be what its grammar
    describes. `most`: prompt and output tokens of a request."""
    rng = random.Random()
    answers: dict[str, Answer] = {}
    aborted: set[str] = set()
    kinds = {"object": OBJECT, "digits": regex("[0-9]{2,6}x"), "plain": "", "bad": "start: ("}
    for place in range(number):
        kind = rng.choices([*kinds], [10, 10, 20, 1])[0]
        name = f"{kind} {place}"
        answers[name] = Answer()
        core.add_request(
            request(name, kinds[kind], rng.randint(1, most), rng.randint(1, most), ignore_eos=rng.random() < 0.3)
        )
        for _ in range(rng.randint(0, 3)):
            if (stepped := core.step()) is not None:
                for output in stepped.outputs:
                    answers[output.request_id].add(output)
        if rng.random() < 0.2:
            victim = rng.choice([*answers])
            if answers[victim].finish_reason is None:
                aborted.add(victim)
                core.abort([Abort(victim)])
    drain(core, answers)
    for name, answer in answers.items():
        if name in aborted:
            continue
        assert answer.finish_reason is not None, f"{name} is lost"
        if answer.finish_reason == "stop" and name.startswith("object"):
            assert answer.text in TEXTS
        elif answer.finish_reason == "stop" and name.startswith("digits"):
            assert answer.text[:-1].isdigit()
            assert answer.text[-1] == "x"
        if answer.finish_reason == "error":
            said = "cannot be compiled" if name.startswith("bad") else "luck"
            assert said in str(answer.error)
    stats = core.snapshot([]).stats
    assert stats.num_received == number
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)
    assert stats.num_preemptions > 0
    assert core.scheduler._num_matched == len(core._grammars) == 0


def check_none_leaked(made: list[weakref.ref[Matcher]]) -> None:
    gc.collect()
    assert made
    assert [one for one in made if one() is not None] == []


def test_requests_under_aborts_and_failing_steps_are_neither_lost_nor_leaked(
    compiler: GrammarCompiler, made: list[weakref.ref[Matcher]]
) -> None:
    rng = random.Random()
    fails = {where: {rng.randrange(1250) for _ in range(3)} for where in ("execute", "sample", "result")}
    core = make_core(Device(done=0.4, seed=rng.randrange(10**6), fails=fails), compiler, num_pages=28)
    serve_under_aborts(core, 500, most=40)
    check_none_leaked(made)


def test_requests_of_a_real_model_are_neither_lost_nor_leaked(
    compiler: GrammarCompiler, made: list[weakref.ref[Matcher]]
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    core = make_real_core(make_runner("llama", "NONE"), num_blocks=10, compiler=compiler)
    serve_under_aborts(core, 200, most=12)
    torch.set_num_threads(threads)
    check_none_leaked(made)
