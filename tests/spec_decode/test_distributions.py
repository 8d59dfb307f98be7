"""What is sampled with guesses has the distribution of what is sampled without, over many seeds. For one seed both give
the same answer, since the model and its drafter draw with the same random numbers; that answers to all seeds together
are distributed as the model says is another question, which equal answers do not settle.

The model has 13 tokens, so the second and third token of an answer are a table of 169 outcomes, whose chances follow
from the model's logits (chi-square test, Pearson 1900).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from itertools import count, product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from headrace import LLM, SamplingParams
from headrace.models import filling
from headrace.models.drafters import TAPS
from headrace.scheduler.draft_length import DraftLength
from tests.runner.harness import LLAMA
from tests.sampled import cases

VOCAB = 13
PROMPT = [3, 1, 4, 1, 5, 1, 4]
DRAWS = 900
FEWEST = 5
"""Outcomes that are expected less often are taken together."""
SETTINGS: dict[str, Any] = {
    "device": "cpu", "cpu_threads": 1, "dtype": "float32", "max_model_len": 32, "max_num_seqs": 64,
    "max_num_batched_tokens": 512, "num_gpu_blocks_override": 400, "skip_tokenizer_init": True, "load_format": "dummy",
}  # fmt: skip
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 2},
    "eagle, adaptive": {"method": "eagle", "num_speculative_tokens": 2, "adaptive": True},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 2},
    "mtp": {"method": "mimo_mtp", "num_speculative_tokens": 2},
}
MIMO: dict[str, Any] = {"architectures": ["MiMoForCausalLM"]}  # which brings a layer for further tokens
HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"architectures": ["LlamaForCausalLM"]},
    "eagle3": {
        "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 10, TAPS: [1, 2, 3],
    },
}  # fmt: skip
FILTERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 1.0, "top_k": 4},
    "top_p": {"temperature": 0.9, "top_p": 0.7},
    "min_p": {"temperature": 1.0, "min_p": 0.25},
}
ADAPTIVE = "eagle, adaptive"
Chances = dict[tuple[int, ...], list[float]]
"""tokens behind the prompt -> chance of each token that may follow"""


def write_config(folder: Path, **changes: object) -> str:
    folder.mkdir()
    config = {**LLAMA, "vocab_size": VOCAB, "eos_token_id": 0, "tie_word_embeddings": False, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The model (""), and by method another whose first layer is alike, and heads; of weights with which tokens differ
    in chance."""
    where = tmp_path_factory.mktemp("small vocabulary")
    of_one = {"draft_model": MIMO, **HEADS}
    made = {method: write_config(where / method, num_hidden_layers=1, **one) for method, one in of_one.items()}
    with mock.patch.object(filling, "DUMMY_RANGE", 0.8):
        yield {"": write_config(where / "model", num_nextn_predict_layers=1, **MIMO), **made}


@pytest.fixture(scope="module")
def raw(folders: dict[str, str]) -> Chances:
    """The model's own distributions behind up to two tokens."""
    behind = [(), *product(range(VOCAB)), *product(range(VOCAB), repeat=2)]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=VOCAB, detokenize=False)
    with LLM(folders[""], **SETTINGS) as llm:
        outputs = llm.generate([PROMPT + list(tokens) for tokens in behind], params, use_tqdm=False)
    found = {}
    for tokens, output in zip(behind, outputs, strict=True):
        logprobs = (output.outputs[0].logprobs or [])[0]
        found[tokens] = [math.exp(logprobs[token].logprob) for token in range(VOCAB)]
    return found


def filtered(chances: list[float], params: dict[str, Any]) -> list[float]:
    """Return what temperature and then the filter make of them, written from the definitions."""
    powers = [chance ** (1 / params["temperature"]) for chance in chances]
    best_first = sorted(range(VOCAB), key=lambda token: -powers[token])
    kept = set(best_first[: params.get("top_k", VOCAB)])
    if "top_p" in params:
        seen, kept = 0.0, set()
        for token in best_first:
            if seen < params["top_p"] * sum(powers):
                kept.add(token)
            seen += powers[token]
    if "min_p" in params:
        kept = {token for token in kept if powers[token] >= params["min_p"] * max(powers)}
    total = sum(powers[token] for token in kept)
    return [powers[token] / total if token in kept else 0.0 for token in range(VOCAB)]


def expected(raw: Chances, params: dict[str, Any]) -> dict[tuple[int, int], float]:
    """The chance of each second and third token of an answer."""
    chances = {tokens: filtered(values, params) for tokens, values in raw.items()}
    return {
        (second, third): sum(
            chances[()][first] * chances[first,][second] * chances[first, second][third] for first in range(VOCAB)
        )
        for second, third in product(range(VOCAB), repeat=2)
    }


def surprise(seen: Counter[tuple[int, int]], chances: dict[tuple[int, int], float]) -> float:
    """How far the chi-square statistic is above what is usual, in standard deviations (Wilson and Hilferty 1931)."""
    draws = sum(seen.values())
    often = [outcome for outcome, chance in chances.items() if chance * draws >= FEWEST]
    cells = [(seen[outcome], chances[outcome] * draws) for outcome in often]
    rest = draws - sum(count for count, _ in cells), draws - sum(mean for _, mean in cells)
    if rest[1] >= FEWEST:
        cells.append((int(rest[0]), rest[1]))
    freedom, statistic = len(cells) - 1, sum((count - mean) ** 2 / mean for count, mean in cells)
    return ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom))


@pytest.mark.parametrize(
    ("drafter", "names"),
    [
        *cases([one for one in DRAFTERS if one != ADAPTIVE], FILTERS),
        (ADAPTIVE, ", ".join(FILTERS)),
    ],
)
def test_answers_with_guesses_are_distributed_as_the_model_says(
    drafter: str, names: str, folders: dict[str, str], raw: Chances
) -> None:
    given = DRAFTERS[drafter]
    if given["method"] in folders:
        given = {**given, "model": folders[given["method"]]}
    turns = count()
    in_turn = mock.patch.object(  # what pays depends on how fast the machine is
        DraftLength, "choose", lambda self, requests: self.lengths[next(turns) % len(self.lengths)]
    )
    with in_turn, LLM(folders[""], **SETTINGS, speculative_config=given) as llm:
        for number, name in enumerate(names.split(", ")):
            filters = FILTERS[name]
            seeds = range(number * DRAWS, (number + 1) * DRAWS)
            params = [
                SamplingParams(**filters, max_tokens=3, ignore_eos=True, seed=1_000_003 * seed, detokenize=False)
                for seed in seeds
            ]
            outputs = llm.generate([PROMPT] * DRAWS, params, use_tqdm=False)
            seen: Counter[tuple[int, int]] = Counter()
            for output in outputs:
                _, second, third = output.outputs[0].token_ids
                seen[second, third] += 1
            assert surprise(seen, expected(raw, filters)) < 4, name
            assert not seen.keys() - {outcome for outcome, chance in expected(raw, filters).items() if chance}, name
            hotter = {**filters, "temperature": 2 * filters["temperature"]}
            assert surprise(seen, expected(raw, hotter)) > 5, name  # what is wrong would be seen
        counts = llm.stats().drafts
    assert 0 < counts.num_accepted < counts.num_tokens
