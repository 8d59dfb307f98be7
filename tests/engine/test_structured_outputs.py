"""The demo model writes what grammars describe, alone and with all else that sampling offers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import pytest
import torch

from headrace.config import EngineConfig
from headrace.engine.build import build_core
from headrace.engine.core import EngineCore
from headrace.engine.input_processor import eos_token_ids
from headrace.engine.tokenizer import Tokenizer
from headrace.hub import DEMO_FOLDER
from headrace.model_config import ModelConfig
from headrace.request import EngineCoreRequest
from headrace.sampling_params import SamplingParams
from headrace.step import Logprobs
from tests.distributed.thread_ranks import THREADS
from tests.structured_outputs.grammars import choice, regex, schema

TOKENIZER = Tokenizer.from_folder(DEMO_FOLDER)
STOPS = list(eos_token_ids(ModelConfig.from_folder(DEMO_FOLDER), TOKENIZER))
PROMPT = TOKENIZER.encode("Once upon a time, there was a")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 3},
        "kind": {"type": "boolean"},
    },
    "required": ["name", "age", "pets", "kind"],
    "additionalProperties": False,
}
WORDS = ["little girl", "little dog", "big tree", "princess"]


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    @property
    def text(self) -> str:
        return TOKENIZER.decode(self.token_ids)


def ask(
    number: int, grammar: str, max_tokens: int = 120, prompt: list[int] = PROMPT, bad_words: list[str] | None = None,
    **params: Any,
) -> EngineCoreRequest:  # fmt: skip
    given = SamplingParams(max_tokens=max_tokens, **params)
    words = [TOKENIZER.encode(word, add_special_tokens=False) for word in bad_words or []]
    return EngineCoreRequest(
        request_id=str(number), prompt_token_ids=prompt, params=given, max_tokens=max_tokens, seed=number,
        stop_token_ids=[] if given.ignore_eos else STOPS, bad_words_token_ids=words, grammar=grammar,
    )  # fmt: skip


def run(core: EngineCore, *requests: EngineCoreRequest) -> list[Answer]:
    answers = {request.request_id: Answer() for request in requests}
    for request in requests:
        core.add_request(request)
    while core.has_work():
        stepped = core.step()
        for output in stepped.outputs if stepped else ():
            answer = answers[output.request_id]
            answer.token_ids += output.new_token_ids
            answer.logprobs += output.new_logprobs
            answer.finish_reason, answer.error = output.finish_reason, output.error
    return [*answers.values()]


@pytest.fixture(scope="module")
def core() -> Iterator[EngineCore]:
    made = build_core(EngineConfig(dtype="float32", max_num_seqs=8), DEMO_FOLDER, False, tokenizer=TOKENIZER)
    yield made
    made.shutdown()


def is_valid(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


KINDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "schema": (schema(SCHEMA), is_valid),
    "regex": (regex("[A-Z][a-z]{3,8} [0-9]{2}"), re.compile("[A-Z][a-z]{3,8} [0-9]{2}").fullmatch),
    "choice": (choice(WORDS), WORDS.__contains__),
}


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_what_the_grammar_describes(core: EngineCore, kind: str) -> None:
    """Greedy, and from three seeds; all at once, beside requests without a grammar that get what they get alone."""
    grammar, holds = KINDS[kind]
    seeds = random.Random().sample(range(2, 10**6), 3)  # 1 is the greedy one's
    plain = [ask(0, "", 20, temperature=0.0, ignore_eos=True), ask(-1, "", 20, ignore_eos=True)]
    alone = run(core, *plain)
    greedy, *drawn = run(core, ask(1, grammar, temperature=0.0), *(ask(seed, grammar) for seed in seeds), *plain)
    assert [answer.token_ids for answer in drawn[3:]] == [answer.token_ids for answer in alone]
    for answer in (greedy, *drawn[:3]):
        assert (answer.error, answer.finish_reason) == (None, "stop"), answer
        assert holds(answer.text)
    assert core.snapshot([]).stats.mask_seconds > 0


def test_what_is_cut_says_length(core: EngineCore) -> None:
    (answer,) = run(core, ask(3, schema(SCHEMA), 7))
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 7)
    assert answer.text.startswith('{"name":')


def test_a_grammar_holds_with_all_that_sampling_offers(core: EngineCore) -> None:
    digits = [token for token in range(TOKENIZER.vocab_size) if re.fullmatch("[0-9]", TOKENIZER.token_text(token))]
    assert len(digits) == 10
    few = random.Random().sample(digits, 3)
    allowed, penalized, banned, pushed, filtered = run(
        core,
        ask(1, regex("[0-9]{12}"), allowed_token_ids=few),
        ask(2, regex("[0-9]{12}"), presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=1.5),
        ask(3, regex("[0-9]{12}"), bad_words=[str(number) for number in range(9)]),
        ask(4, regex("[0-9]{12}"), logit_bias={digits[4]: 100.0}, temperature=0.0),
        ask(5, regex("[0-9]{12}"), top_k=2, top_p=0.9, min_p=0.01, min_tokens=3, ignore_eos=True),
    )
    for answer in (allowed, penalized, banned, pushed, filtered):
        assert (answer.error, answer.finish_reason) == (None, "stop")
        assert re.fullmatch("[0-9]{12}", answer.text)
    assert {*allowed.text} <= {TOKENIZER.token_text(token) for token in few}
    assert len({*penalized.text}) > 3
    assert banned.text == "9" * 12
    assert pushed.text == TOKENIZER.token_text(digits[4]) * 12


def test_where_a_grammar_and_allowed_token_ids_leave_nothing_the_request_fails(core: EngineCore) -> None:
    letter = TOKENIZER.encode("a", add_special_tokens=False)[-1:]
    (answer,) = run(core, ask(1, regex("[0-9]{4}"), allowed_token_ids=letter))
    assert "no token may be sampled" in str(answer.error)


def test_logprobs_are_those_of_the_models_own_distribution(core: EngineCore) -> None:
    held, free = run(
        core, ask(1, choice(["zebra"]), logprobs=4, temperature=0.0), ask(2, "", 4, logprobs=4, temperature=0.0)
    )
    assert held.text == "zebra"
    first, expected = held.logprobs[0], free.logprobs[0]
    assert first.token_ids[1:] == expected.token_ids[1:]
    assert first.logprobs[1:] == pytest.approx(expected.logprobs[1:], abs=1e-4)
    assert first.rank > 1
    assert first.logprobs[0] < first.logprobs[1]


@pytest.mark.parametrize("where", ["begin", "finish"])
def test_a_masked_step_that_finds_no_memory_is_computed_again(
    core: EngineCore, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [ask(seed, schema(SCHEMA)) for seed in range(3)]
    expected = [answer.token_ids for answer in run(core, *requests)]
    runner = core._executor._worker.runner  # type: ignore[attr-defined]
    launch, calls = getattr(runner, where), iter(range(10**6))

    def short(*arguments: Any) -> Any:
        if next(calls) % 3 == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return launch(*arguments)

    monkeypatch.setattr(runner, where, short)
    config, limits = core._config, core.scheduler.config
    answers = run(core, *requests)
    core._config, core.scheduler.config = config, limits
    assert [answer.token_ids for answer in answers] == expected
    assert core.snapshot([]).stats.num_short_steps > 0


@pytest.mark.parametrize("settings", [{"async_scheduling": False}, {"batch_invariant": True}], ids=str)
def test_answers_do_not_depend_on_how_steps_run(core: EngineCore, settings: dict[str, Any]) -> None:
    requests = [ask(seed, schema(SCHEMA)) for seed in range(3)] + [ask(9, "", 9, ignore_eos=True)]
    expected = run(core, *requests)
    other = build_core(EngineConfig(dtype="float32", **settings), DEMO_FOLDER, False, tokenizer=TOKENIZER)
    answers = run(other, *requests)
    other.shutdown()
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]


def test_two_ranks_give_what_one_does(core: EngineCore) -> None:
    requests = [ask(seed, schema(SCHEMA)) for seed in range(4)] + [ask(9, "", 20, temperature=0.0)]
    expected = run(core, *requests)
    config = EngineConfig(dtype="float32", tensor_parallel_size=2, num_gpu_blocks_override=60)
    ranks = build_core(config, DEMO_FOLDER, False, executor=THREADS)
    try:
        answers = run(ranks, *requests)
    finally:
        ranks.shutdown()
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
