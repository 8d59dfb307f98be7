"""The same predictions scored by lm_eval and here: prompts, hashes and figures are equal.

lm_eval.json says how lm_eval's side was made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.evaluate.data import hash_of
from headrace.evaluate.report import results_json
from headrace.evaluate.rolling import Likelihood, windows
from headrace.evaluate.samples import Samples
from headrace.evaluate.session import items_of, run
from headrace.evaluate.tasks import TASKS, as_text
from tests.evaluate.fake_model import FakeModel

GIVEN: dict[str, Any] = json.loads(Path(__file__).with_name("lm_eval.json").read_text(encoding="utf-8"))


def same_figures(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Every figure of theirs is among ours."""
    names = [name for name in theirs if "," in name and theirs[name] != "N/A"]
    assert names
    for name in names:
        # sums of a few numbers of the size of one, in another order
        assert ours[name] == pytest.approx(theirs[name], rel=1e-12), name


@pytest.mark.parametrize("name", ["gsm8k", "mmlu_pro", "humaneval"])
async def test_prompts_and_figures(name: str, tmp_path: Path) -> None:
    of, task = GIVEN[name], TASKS[name]
    answers = dict(zip(of["prompts"], of["predictions"], strict=True))
    model = FakeModel(answers)
    items = items_of(task, of["docs"], of["fewshot"], of["num_fewshot"], "", 60.0)
    with Samples(tmp_path / "samples.jsonl", {}) as samples:
        await run(items, model, samples, lambda done: None)
        records = [samples.done[n] for n in range(len(items))]
    assert model.prompts == of["prompts"]
    ours = results_json(name, {}, records, len(records), 0.0, 0.0)["results"]
    for part, figures in of["results"].items():
        same_figures(ours[part], figures)
    if len(of["results"]) > 1:
        sizes = {part: figures["sample_len"] for part, figures in of["results"].items()}
        means = [figures[f"{task.metric},custom-extract"] * sizes[part] for part, figures in of["results"].items()]
        assert ours[name][f"{task.metric},custom-extract"] == pytest.approx(sum(means) / sum(sizes.values()))


def test_perplexity() -> None:
    of = GIVEN["perplexity"]
    texts = [doc["page"] for doc in of["docs"]]
    records = [
        {"loglikelihood": sum, "tokens": 1, "words": one.words, "bytes": one.bytes}
        for one, sum in ((Likelihood.of(text, []), sum) for text, sum in zip(texts, of["predictions"], strict=True))
    ]
    same_figures(
        results_json("perplexity", {}, records, 3, 0.0, 0.0)["results"]["perplexity"], of["results"]["wikitext"]
    )


def test_hashes_of_items() -> None:
    assert [*map(hash_of, GIVEN["gsm8k"]["docs"])] == GIVEN["gsm8k"]["doc_hashes"]


@pytest.mark.parametrize(("count", "length", "theirs"), GIVEN["windows"])
def test_windows(count: int, length: int, theirs: list[list[list[int]]]) -> None:
    """Theirs are inputs, without the last token, and the tokens to predict."""
    ours = [*windows([*range(10, 10 + count)], 1, length)]
    assert [[one.ids[:-1], one.ids[-one.num_scored :]] for one in ours] == theirs


def test_a_prompt_is_a_conversation_written_down() -> None:
    doc, shots = GIVEN["gsm8k"]["docs"][0], GIVEN["gsm8k"]["fewshot"][:1]
    turns = TASKS["gsm8k"].conversation(doc, shots, "Answer in English.")
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "user"]
    assert as_text(turns[1:]) == as_text(TASKS["gsm8k"].conversation(doc, shots))
    assert as_text(turns).startswith("Answer in English.Question: ")


def test_examples_must_be_enough() -> None:
    with pytest.raises(ConfigError, match="--num-fewshot is 4, and the few-shot data have 3 examples"):
        items_of(TASKS["gsm8k"], GIVEN["gsm8k"]["docs"], GIVEN["gsm8k"]["fewshot"], 4, "", 5.0)
