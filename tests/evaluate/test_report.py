"""Figures, their picture, and two runs compared item by item."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.evaluate.report import Figure, bar, compare, figures, results_json, table


def answered(scores: list[int], group: str = "", start: int = 0) -> list[dict[str, Any]]:
    return [
        {"doc_id": start + n, "doc_hash": f"{group}{n}", "group": group, "scores": {"exact_match,none": float(score)}}
        for n, score in enumerate(scores)
    ]


def read(lls: list[float], bytes: int = 10) -> list[dict[str, Any]]:
    return [
        {"doc_id": n, "doc_hash": str(n), "loglikelihood": ll, "tokens": 4, "words": 2, "bytes": bytes}
        for n, ll in enumerate(lls)
    ]


def test_result_file_has_lm_evals_names() -> None:
    records = answered([1, 0, 1, 1], "computer science") + answered([0, 1], "law", 4)
    result = results_json("mmlu_pro", {"num_fewshot": 5, "model": "demo"}, records, 9, 1.5, 0.0)
    assert result["results"].keys() == {"mmlu_pro", "mmlu_pro_computer_science", "mmlu_pro_law"}
    assert result["results"]["mmlu_pro_law"] == {
        "alias": "law", "exact_match,none": 0.5, "exact_match_stderr,none": 0.5
    }  # fmt: skip
    assert result["results"]["mmlu_pro"]["exact_match,none"] == pytest.approx(4 / 6)
    assert result["n-samples"]["mmlu_pro"] == {"original": 9, "effective": 6}
    assert result["n-samples"]["mmlu_pro_law"] == {"original": 2, "effective": 2}
    assert result["n-shot"]["mmlu_pro_law"] == 5
    assert result["higher_is_better"] == {"mmlu_pro": {"exact_match": True}}
    single = results_json("gsm8k", {}, answered([1]), 1, 0.0, 0.0)["results"]["gsm8k"]
    assert single["exact_match_stderr,none"] == "N/A"


def test_perplexities_and_their_errors() -> None:
    found = figures(read([-8.0, -12.0]))
    assert found["token_perplexity,none"].value == pytest.approx(math.exp(20 / 8))
    assert found["word_perplexity,none"].value == pytest.approx(math.exp(20 / 4))
    assert found["byte_perplexity,none"].value == pytest.approx(math.e)
    assert found["bits_per_byte,none"].value == pytest.approx(1 / math.log(2))
    assert found["bits_per_byte,none"].stderr == pytest.approx(0.2 / math.log(2))  # of 0.8 and 1.2
    assert found["byte_perplexity,none"].stderr == pytest.approx(0.2 * math.e)
    assert figures(read([-8.0]))["byte_perplexity,none"].stderr is None


def test_bars() -> None:
    assert bar(Figure(0.5, 0.05), 1.0, 21) == "████████├─┼─┤        "
    assert bar(Figure(0.5, None), 1.0, 21) == "███████████          "
    assert bar(Figure(0.0, 0.0), 1.0, 5) == "█    "
    assert bar(Figure(1.0, 0.2), 1.0, 11) == "██████├───┼"
    assert bar(Figure(0.0, None), 0.0, 3) == "█  "
    lines = table({"bf16": {"a": Figure(0.5, 0.1)}, "fp8-block": {"a": Figure(0.25, None), "perplexity": Figure(9, 1)}})
    assert [line.split("|")[0].rstrip() for line in lines] == [
        "a", "  bf16         0.5000 ± 0.1000", "  fp8-block    0.2500", "perplexity", "  fp8-block    9.0000 ± 1.0000"
    ]  # fmt: skip
    assert len({len(line) for line in lines if "|" in line}) == 1


def test_two_runs_on_the_same_items() -> None:
    before, after = answered([1, 1, 1, 0, 0, 1, 1]), answered([1, 0, 0, 1, 0, 1])
    ((record, lines),) = compare(before, after, ("a", "b"))
    assert lines[0] == "exact_match,none: b against a, 6 items, 1 items of one run alone left out"
    assert record["right_in_first_only"] == [1, 2]
    assert record["right_in_second_only"] == [3]
    assert record["difference"] == pytest.approx(-1 / 6)
    assert record["exact_p"] == 1.0
    low, high = record["interval_95"]
    assert low < -1 / 6 < high
    assert "no longer right: 2 items (1, 2)" in lines[-2]
    assert "newly right: 1 items (3)" in lines[-1]
    with pytest.raises(ConfigError, match="a and b have no item in common"):
        compare(before, answered([1], "other"), ("a", "b"))


def test_items_are_paired_by_what_they_say() -> None:
    before, after = answered([1, 0, 1]), answered([1, 0, 1])
    after = [{**record, "doc_id": 2 - record["doc_id"]} for record in reversed(after)]
    ((record, _),) = compare(before, after, ("a", "b"))
    assert record["first_only"] == record["second_only"] == 0
    twice = [{**record, "doc_hash": "same"} for record in before]
    assert compare(twice, twice, ("a", "b"))[0][0]["items"] == 3


def test_two_runs_on_the_same_texts() -> None:
    ((record, _),) = compare(read([-8.0, -12.0]), read([-8.8, -13.2]), ("a", "b"))
    assert record["ratio"] == pytest.approx(math.exp(0.1))
    low, high = record["interval_95"]
    assert low < math.exp(0.1) < high
    assert compare(read([-8.0]), read([-8.8]), ("a", "b"))[0][0]["interval_95"] is None
