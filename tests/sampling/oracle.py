"""What sampling must do to one request, in plain Python and numpy, and the bench on which batches are set up.

Written from the meaning of the parameters, one request and one token at a time; shares no code with the package.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch

from headrace.kernels.table import select_kernels
from headrace.sampling.sampler import Sampler, SampleResult
from headrace.sampling.state import SamplingState
from headrace.sampling.transfer import TableWriter
from headrace.sampling_params import SamplingParams
from headrace.step import NewRow

CPU = torch.device("cpu")


def invalid(result: SampleResult) -> torch.Tensor:
    """Rows with nothing to sample from, as commit_tokens tells them. [n] bool"""
    return ~((result.best > float("-inf")) & result.raw_best.isfinite())


@dataclass
class Case:
    """One request in the middle of its life."""

    params: SamplingParams
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)
    seed: int = 0

    def new_row(self, row: int) -> NewRow:
        return NewRow(row, self.prompt, self.params, self.stop_token_ids, self.bad_words, self.seed)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class Bench:
    """A SamplingState with its sampler and token table; cases come, run any number of steps and go."""

    def __init__(self, vocab_size: int, max_rows: int = 32, max_model_len: int = 64) -> None:
        self.vocab_size = vocab_size
        shapes = {SamplingState.TABLE: SamplingState.table_shape(max_rows)}
        self.writer = TableWriter(CPU, shapes)
        self.state = SamplingState(max_rows, vocab_size, CPU, self.writer)
        self.sampler = Sampler(self.state, select_kernels("cpu"))
        # What earlier owners of a row left behind must not matter.
        self.token_table = torch.randint(vocab_size, (max_rows + 1, max_model_len + 1), dtype=torch.int32)
        self.cases: dict[int, Case] = {}

    def add(self, cases: dict[int, Case]) -> None:
        self.state.add([case.new_row(row) for row, case in cases.items()])
        self.writer.flush()
        self.cases |= cases
        for row, case in cases.items():
            self.token_table[row, : len(case.tokens)] = torch.tensor(case.tokens, dtype=torch.int32)

    def remove(self, rows: list[int]) -> None:
        self.state.remove(rows)
        for row in rows:
            del self.cases[row]

    def sample(self, logits: torch.Tensor, rows: list[int], max_num_tokens: int | None = None) -> SampleResult:
        num_tokens = torch.tensor([len(self.cases[row].tokens) for row in rows])
        return self.sampler.sample(logits, torch.tensor(rows), num_tokens, self.token_table, max_num_tokens)

    def append(self, rows: list[int], token_ids: list[int]) -> None:
        """As the runner does after a step."""
        for row, token in zip(rows, token_ids, strict=True):
            case = self.cases[row]
            self.token_table[row, len(case.tokens)] = token
            case.output.append(token)


def forbidden_tokens(case: Case, vocab_size: int) -> set[int]:
    forbidden = set()
    if case.params.allowed_token_ids is not None:
        forbidden |= set(range(vocab_size)) - set(case.params.allowed_token_ids)
    if len(case.output) < case.params.min_tokens:
        forbidden |= set(case.stop_token_ids)
    for word in case.bad_words:
        prefix = word[:-1]
        if not prefix or case.tokens[-len(prefix) :] == prefix:
            forbidden.add(word[-1])
    return forbidden


def processed_logits(case: Case, logits: np.ndarray) -> np.ndarray:
    """float64 logits after allowed ids, rules and penalties."""
    result = logits.astype(np.float64)
    forbidden = forbidden_tokens(case, len(logits))
    params, seen, counts = case.params, set(case.tokens), Counter(case.output)
    for token in range(len(result)):
        if token in forbidden:
            result[token] = -math.inf
            continue
        result[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in seen:
            value = result[token]
            result[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        result[token] -= params.frequency_penalty * counts[token]
        result[token] -= params.presence_penalty * (counts[token] > 0)
    return result


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max())
    return shifted / shifted.sum()


def kept_tokens(params: SamplingParams, logits: np.ndarray) -> tuple[set[int], set[int]]:
    """Of processed logits without ties: (tokens that may be drawn, tokens so close to the edge of top_p or min_p that
    rounding decides)."""
    scaled = logits / params.temperature
    probs = softmax(scaled)
    order = [int(token) for token in np.argsort(-scaled, kind="stable")]
    close = {t for t in order if math.isclose(probs[t], params.min_p * probs[order[0]], rel_tol=1e-5)}
    order = [t for t in order if probs[t] >= params.min_p * probs[order[0]] and probs[t] > 0]
    if params.top_k > 0:
        order = order[: params.top_k]
    total = sum(probs[t] for t in order)
    kept, mass = set(), 0.0
    for token in order:
        share = mass / total
        if abs(share - params.top_p) < 1e-5:
            close.add(token)
        if share >= params.top_p:
            break
        kept.add(token)
        mass += probs[token]
    return kept, close


def random_case(rng: np.random.Generator, vocab_size: int, greedy: bool | None = None) -> Case:
    """A request that uses each feature with a fair chance."""

    def maybe(value: object, default: object) -> object:
        return value if rng.random() < 0.5 else default

    def ids(low: int, high: int) -> list[int]:
        return [int(t) for t in rng.integers(vocab_size, size=rng.integers(low, high))]

    prompt, output = ids(1, 20), ids(0, 20)
    tokens = prompt + output
    end = [tokens[-n:] for n in (1, 2, 3) if n <= len(tokens)]
    words = [ids(1, 2), ids(2, 5), *([*prefix, *ids(1, 2)] for prefix in end)]
    greedy = rng.random() < 0.5 if greedy is None else greedy
    params = SamplingParams(
        temperature=0.0 if greedy else float(rng.uniform(0.2, 2.0)),
        top_p=maybe(float(rng.uniform(0.1, 1.0)), 1.0),
        top_k=maybe(int(rng.integers(1, vocab_size + 5)), 0),
        min_p=maybe(float(rng.uniform(0.0, 0.3)), 0.0),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
        logit_bias=maybe({t: float(rng.uniform(-5, 5)) for t in ids(1, 8)}, None),
        allowed_token_ids=maybe(sorted({*ids(vocab_size // 2, vocab_size), 0}), None),
        min_tokens=maybe(int(rng.integers(0, 16)), 0),
        logprobs=maybe(int(rng.integers(0, 6)), None),
        max_tokens=64,
    )
    return Case(params, prompt, output, ids(0, 4), maybe(words, []), int(rng.integers(2**63)))
