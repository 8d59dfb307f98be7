"""Random histories of requests for every way to guess: added, aborted, preempted, found in the prefix cache and taken
up again where they ended, while the number of guesses wavers and is 0 for long. What a head guesses is what it would
guess in plain torch from the whole sequence, whatever steps it has left out; answers are those without guesses, and
nothing is leaked."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.engine import build
from headrace.engine.messages import Abort
from headrace.request import EngineCoreRequest, Request
from headrace.runner import guesses
from headrace.scheduler.draft_length import DraftLength
from tests.runner.test_drafts import Late
from tests.spec_decode import heads
from tests.spec_decode.test_heads import GUESSES, SIZES, SMALL, Watched, save_target, with_head

REQUESTS, LONGEST = 12, 110


class Wavering(DraftLength):
    """Guesses many, few, and none, for one step or for many."""

    def choose(self, requests: Sequence[Request]) -> int:
        self.left = getattr(self, "left", 0) - 1
        if self.left < 0:
            self.rng = getattr(self, "rng", random.Random(3))
            self.left, self.length = self.rng.choice((0, 1, 2, 9)), self.rng.choice((0, 0, *self.lengths))
        return self.length


@dataclass
class Turn:
    """A request, and what it got."""

    prompt: list[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    aborted: bool = False


def history(llm: LLM, rng: random.Random) -> list[Turn]:
    """Serve random requests, some of whom go on where another has ended."""
    core: Any = llm._core
    execute = core._executor.execute
    core._executor.execute = lambda step: Late(execute(step))  # so that steps run ahead of results
    core.scheduler.config = replace(core.scheduler.config, look_ahead=False)  # some are to be preempted
    shared = [rng.randrange(SIZES["v"]) for _ in range(37)]  # not whole blocks: what ends one is in its hash
    waiting = deque([*shared[: rng.choice((3, 21, 37))], rng.randrange(SIZES["v"])] for _ in range(REQUESTS))
    turns: list[Turn] = []
    while waiting or core.has_work():
        drawn = rng.random()
        if waiting and drawn < 0.25:
            number, prompt = len(turns), waiting.popleft()
            most = min(LONGEST - len(prompt), rng.choice((4, 20, 40)))
            wishes = {"temperature": number % 2, "max_tokens": most, "ignore_eos": True, "detokenize": False}
            params = SamplingParams(seed=number, **wishes)
            turns.append(Turn(prompt, params))
            request = {"prompt_token_ids": prompt, "params": params, "max_tokens": most, "seed": number}
            core.add_request(EngineCoreRequest(request_id=str(number), **request))
        elif core.scheduler.requests and drawn > 0.985:
            aborted = rng.choice(list(core.scheduler.requests))
            core.abort([Abort(aborted)])
            turns[int(aborted)].aborted = True
        elif core.has_work() and (stepped := core.step()) is not None:
            for output in stepped.outputs:
                turn = turns[int(output.request_id)]
                turn.tokens += output.new_token_ids
                if output.finish_reason is not None and len(turns) < 2 * REQUESTS and rng.random() < 0.4:
                    again = turn.prompt + turn.tokens + [rng.randrange(SIZES["v"])]
                    if len(again) < LONGEST - 4:
                        waiting.appendleft(again)
    return turns


def served(target: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[Turn]:
    """Serve a history with guesses; its answers are those without, and nothing is leaked."""
    monkeypatch.setattr(build, "DraftLength", Wavering)
    tight = {**SMALL, "num_gpu_blocks_override": 10, "speculative_config": {**given, "adaptive": True}}
    with LLM(target, **tight) as llm:
        turns, stats = history(llm, random.Random(5)), llm.stats()
    assert stats.num_preemptions > 2
    assert stats.prefix_cache_hits > 50
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.drafts.num_tokens > 50
    assert any(turn.aborted for turn in turns)
    with LLM(target, **SMALL) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": turn.prompt} for turn in turns], [turn.params for turn in turns], use_tqdm=False
        )
    for turn, output in zip(turns, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        assert turn.tokens == (tokens[: len(turn.tokens)] if turn.aborted else tokens)
    return turns


@pytest.mark.parametrize(
    ("name", "layout", "kept"),
    [
        ("llama", "eagle3", 1024), ("llama", "eagle", 9), ("mimo", "mimo", 20),
        pytest.param("glm", "behind the layers", 9, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_whatever_is_left_out_guesses_are_those_of_a_plain_head(
    name: str, layout: str, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain, given = with_head(name, layout, tmp_path)
    monkeypatch.setattr(guesses, "KEPT_TOKENS", kept)
    watched = Watched(monkeypatch)
    served(str(tmp_path / "target"), given, monkeypatch)
    checked = [one for one in watched.guesses if one[0] and one[1]]
    assert {len(guessed) for _, guessed, *_ in checked} == {2, GUESSES}
    for known, guessed, temperature, seed in checked[:: max(1, len(checked) // 40)]:
        assert guessed == heads.plain_guesses(model, plain, known, len(guessed), temperature, seed)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_answers_are_those_without_in_any_history(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model guesses by itself too: what it has caught up with it knows."""
    target = str(tmp_path / "target")
    save_target("llama", Path(target))
    model = {} if method == "ngram" else {"model": target}
    served(target, {"method": method, "num_speculative_tokens": GUESSES, **model}, monkeypatch)
