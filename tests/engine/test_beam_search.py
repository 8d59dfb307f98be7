"""Beams find what transformers' find, through the real engine in fp32; and the search by itself."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest
import torch

from headrace import LLM, BeamSearchParams
from headrace.engine.beam_search import BeamSearch
from headrace.errors import RequestError

VOCAB = 5
END = 4


def brute_force(table: dict[tuple[int, ...], list[float]], length: int) -> list[tuple[float, tuple[int, ...]]]:
    """All outputs of a model whose log-probabilities stand in a table, with their mean log-probability, best first."""
    found = []
    for size in range(1, length + 1):
        for tokens in itertools.product(range(VOCAB), repeat=size):
            if END in tokens[:-1] or (tokens[-1] != END and size < length):
                continue
            total = sum(table[tokens[:place]][token] for place, token in enumerate(tokens))
            found.append((total / size, tokens))
    return sorted(found, reverse=True)


def search(table: dict[tuple[int, ...], list[float]], width: int, length: int) -> list[tuple[int, ...]]:
    found = BeamSearch([9], BeamSearchParams(width, length), frozenset((END,)))
    while found.open:
        likely = []
        for beam in found.open:
            ranked = sorted(enumerate(table[tuple(beam.tokens[1:])]), key=lambda one: -one[1])
            likely.append(dict(ranked[: found.num_candidates]))
        found.advance(likely)
    return [tuple(one.tokens[1:]) for one in found.best(width)]


def test_as_many_beams_as_there_are_outputs_find_the_best() -> None:
    draw = random.Random(3)
    for _ in range(20):
        table = {}
        for size in range(3):
            for tokens in itertools.product(range(VOCAB), repeat=size):
                weights = [draw.random() ** 3 + 1e-3 for _ in range(VOCAB)]
                table[tokens] = [math.log(weight / sum(weights)) for weight in weights]
        best = [tokens for _, tokens in brute_force(table, 3)]
        found = search(table, 10, 3)
        assert found[0] == best[0]
        assert set(found[:3]) <= set(best[:12])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose token 3 ends a text, often enough to matter."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, eos_token_id=3, bos_token_id=1, pad_token_id=0,
        initializer_range=0.4,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[3] *= 3.0
    folder = tmp_path_factory.mktemp("beams")
    model.save_pretrained(folder)
    return folder


def until_end(tokens: list[int], start: int) -> list[int]:
    """Tokens up to the first end behind `start`; transformers fills rows up with further ones."""
    return tokens[: tokens.index(3, start) + 1] if 3 in tokens[start:] else tokens


@pytest.mark.parametrize(("width", "penalty"), [(1, 1.0), (3, 1.0), (4, 0.4), (10, 2.0)])
def test_beams_are_those_of_transformers(models: Path, llm: LLM, width: int, penalty: float) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(models)
    draw = random.Random(width)
    prompts = [[draw.randrange(4, 61) for _ in range(draw.randrange(2, 20))] for _ in range(6)]
    params = BeamSearchParams(width, 12, length_penalty=penalty)
    for prompt, output in zip(prompts, llm.beam_search(prompts, params), strict=True):
        expected = model.generate(
            torch.tensor([prompt]), num_beams=width, num_return_sequences=width, max_new_tokens=12, do_sample=False,
            length_penalty=penalty, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        theirs = [until_end(row.tolist(), len(prompt)) for row in expected.sequences]
        assert [one.tokens for one in output.sequences] == theirs
        assert {one.finish_reason for one in output.sequences} <= {"stop", "length"}


@pytest.fixture(scope="module")
def llm(models: Path) -> LLM:
    return LLM(str(models), device="cpu", dtype="float32", skip_tokenizer_init=True, cpu_kv_cache_gib=0.05)


def test_what_is_refused(llm: LLM) -> None:
    for params, name in (
        (BeamSearchParams(11, 4), "beam_width"),
        (BeamSearchParams(2, 0), "max_tokens"),
        (BeamSearchParams(2, 4, temperature=0.5), "temperature"),
    ):
        with pytest.raises(RequestError) as found:
            llm.beam_search([[5, 6]], params)
        assert found.value.param == name
