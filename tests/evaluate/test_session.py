"""A run: all items at once, what fails harms no other, and what was answered is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError, EngineDeadError, HeadraceError, RequestError
from headrace.evaluate.rolling import windows
from headrace.evaluate.samples import Samples, read_samples
from headrace.evaluate.session import Item, items_of, run, texts_of
from headrace.evaluate.tasks import GSM8K, HUMANEVAL_INSTRUCT, MMLU_PRO
from tests.evaluate.fake_model import FakeModel

DOCS = [{"question": f"What is {n} + {n}?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"} for n in range(5)]
ANSWERS = {f"What is {n} + {n}?\nAnswer:": f" It is {2 * n}.\n#### {2 * n + (n == 3)}" for n in range(5)}


def items(docs: list[dict[str, Any]] = DOCS, num_fewshot: int = 0) -> list[Item]:
    return items_of(GSM8K, docs, DOCS, num_fewshot, "", 60.0)


async def test_all_are_asked_at_once_and_kept(tmp_path: Path) -> None:
    model, told = FakeModel(ANSWERS), []
    with Samples(tmp_path / "samples.jsonl", {}) as samples:
        await run(items(), model, samples, told.append)
    assert model.most_open == 5
    assert told == [0, 1, 2, 3, 4, 5]
    records = read_samples(tmp_path / "samples.jsonl")[1]
    assert [records[n]["scores"]["exact_match,strict-match"] for n in range(5)] == [1, 1, 1, 0, 1]
    assert records[3]["filtered_resps"] == {"strict-match": "7", "flexible-extract": "7"}
    assert records[3]["resps"] == [[ANSWERS["What is 3 + 3?\nAnswer:"]]]


async def test_what_cannot_be_answered_harms_no_other_and_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    refused = FakeModel(ANSWERS | {"What is 2 + 2?\nAnswer:": RequestError("too long")})
    with Samples(path, {}) as samples, pytest.raises(HeadraceError) as error:
        await run(items(), refused, samples, lambda done: None)
    assert str(error.value) == (
        "1 items could not be answered, the first of them 2: too long; 4 of 5 items are kept in "
        f"{path}, and the same command goes on from there"
    )
    model = FakeModel(ANSWERS)
    with Samples(path, {}) as samples:
        await run(items(), model, samples, lambda done: None)
    assert model.prompts == ["Question: What is 2 + 2?\nAnswer:"]
    assert read_samples(path)[1].keys() == {*range(5)}


async def test_a_server_that_is_gone_ends_the_run_at_once(tmp_path: Path) -> None:
    model = FakeModel(ANSWERS | {"What is 0 + 0?\nAnswer:": EngineDeadError("it is gone")})
    gone = pytest.raises(HeadraceError, match=r"^it is gone; [0-4] of 5 items are kept in ")
    with Samples(tmp_path / "samples.jsonl", {}) as samples, gone:
        await run(items(), model, samples, lambda done: None)
    assert model.open == 0


async def test_what_is_wrong_with_all_is_said_alone(tmp_path: Path) -> None:
    model = FakeModel(dict.fromkeys(ANSWERS, ConfigError("give --tokenizer")))
    with Samples(tmp_path / "samples.jsonl", {}) as samples, pytest.raises(ConfigError, match=r"^give --tokenizer$"):
        await run(items(), model, samples, lambda done: None)


def test_examples_are_the_first_others_of_the_group() -> None:
    def doc(n: int, group: str) -> dict[str, Any]:
        return {"question": f"{n}?", "options": ["a", "b"], "answer": "A", "category": group}

    pool = [doc(0, "x"), doc(1, "y"), doc(2, "x"), doc(3, "y")]
    assert MMLU_PRO.examples_of(doc(2, "x"), pool, 1) == [pool[0]]
    assert MMLU_PRO.examples_of(pool[0], pool, 1) == [pool[2]]
    with pytest.raises(ConfigError, match="--num-fewshot is 2, and the few-shot data have 1 examples of y"):
        MMLU_PRO.examples_of(pool[1], pool, 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"answer": "C"}, "item 0 of mmlu_pro: answer must be the letter or the number of an option, got 'C'"),
        ({"answer": 2}, "answer must be"),
        ({"options": ["a"]}, "options must be a list of 2 to 10 texts"),
        ({"options": ["a", 3]}, "options must be a list of 2 to 10 texts"),
    ],
)
def test_items_that_are_none_are_named(change: dict[str, Any], said: str) -> None:
    doc = {"question": "?", "options": ["a", "b"], "answer": 1, "category": "x"}
    items_of(MMLU_PRO, [doc], [], 0, "", 1.0)
    with pytest.raises(ConfigError, match=said):
        items_of(MMLU_PRO, [doc | change], [], 0, "", 1.0)


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("Here:\n```python\ndef one():\n    return 1\n```\nDone.", True),
        ("```\nx = 1\n```\nthen\n```py\ndef one():\n    return x\nx = 1\n```", True),
        ("```python\n    return 1\n```", True),
        ("    return 1\n", True),
        ("```python\ndef one():\n    return 2\n```", False),
        ("I cannot.", False),
    ],
)
async def test_programs_of_chats(tmp_path: Path, text: str, passes: bool) -> None:
    doc = {"prompt": 'def one():\n    """One."""\n', "test": "def check(f):\n    assert f() == 1", "entry_point": "one"}
    with Samples(tmp_path / "samples.jsonl", {}) as samples:
        made = items_of(HUMANEVAL_INSTRUCT, [doc], [], 0, "", 60.0)
        await run(made, FakeModel({"": text}), samples, lambda done: None)
        assert samples.done[0]["scores"] == {"pass@1,create_test": float(passes)}
        assert ("failed" in samples.done[0]) is not passes


async def test_texts_are_scored_token_by_token_whatever_the_windows(tmp_path: Path) -> None:
    text = "One two three four five six."
    with Samples(tmp_path / "samples.jsonl", {}) as samples:
        await run(texts_of([{"text": text}]), FakeModel({}), samples, lambda done: None)
        record = samples.done[0]
    assert record["loglikelihood"] == pytest.approx(-sum(map(ord, text)) / 1000)
    assert (record["tokens"], record["words"], record["bytes"]) == (28, 6, 28)
    with pytest.raises(ConfigError, match="item 1 of perplexity needs a text"):
        texts_of([{"page": "x"}, {"text": " "}])


@pytest.mark.parametrize(("count", "length"), [(0, 4), (1, 4), (4, 4), (5, 4), (11, 4), (3, 1)])
def test_windows_score_each_token_once(count: int, length: int) -> None:
    ids = [*range(10, 10 + count)]
    parts = [*windows(ids, 0, length)]
    assert [id for part in parts for id in part.ids[-part.num_scored :]] == ids
    assert all(part.num_scored < len(part.ids) <= length + 1 for part in parts)
    if count > length:
        assert len(parts[-1].ids) == length + 1
