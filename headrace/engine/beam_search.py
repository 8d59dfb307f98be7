"""Searches for the likeliest outputs with beams, as transformers' `generate(num_beams=...)` does it.

The search asks for one token of each open beam at a time, as requests like any other: the prefix cache keeps what they
share. It knows no engine: callers run what `open` names, and give back what the model found likely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.engine.tokenizer import Tokenizer
from headrace.errors import RequestError
from headrace.request import CompletionOutput, RequestOutput
from headrace.sampling_params import MAX_LOGPROBS, SamplingParams, check_integer


@dataclass
class BeamSearchParams:
    """Says how to search. Names are vLLM's."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    """the power of a length by which the sum of an output's log-probabilities is divided"""


@dataclass
class BeamSearchSequence:
    """Represents one output."""

    tokens: list[int]
    """of the prompt, then of the output; one that ended by itself ends with that token"""
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """Holds the best outputs of one prompt, the best first."""

    sequences: list[BeamSearchSequence]


@dataclass
class BeamSearch:
    """Represents the search for one prompt."""

    prompt: Sequence[int]
    params: BeamSearchParams
    ends: frozenset[int]
    """tokens that end an output"""
    open: list[BeamSearchSequence] = field(init=False)
    """beams that a token is wanted for, the best first"""
    found: list[tuple[float, BeamSearchSequence]] = field(init=False, default_factory=list)
    """finished outputs with their scores, the best first"""

    def __post_init__(self) -> None:
        params = self.params
        if params.ignore_eos:
            self.ends = frozenset()
        most = MAX_LOGPROBS // max(2, 1 + len(self.ends))
        check_integer("beam_width", params.beam_width, 1, most)
        check_integer("max_tokens", params.max_tokens, 1, 2**31 - 1)
        if params.temperature != 0.0:
            raise RequestError(f"temperature must be 0 with beams, got {params.temperature}", "temperature")
        self.open = [BeamSearchSequence([*self.prompt])]

    @property
    def num_candidates(self) -> int:
        """Return how many of a beam's likeliest next tokens are wanted: enough where every end is among them."""
        return max(2, 1 + len(self.ends)) * self.params.beam_width

    def step(self) -> SamplingParams:
        """Return the parameters with which the open beams run next."""
        return SamplingParams(
            max_tokens=1, temperature=0.0, logprobs=self.num_candidates, ignore_eos=True, detokenize=False
        )

    def advance(self, likely: Sequence[Mapping[int, float]]) -> None:
        """Go on by a token. `likely`: for each open beam the log-probabilities of its likeliest next tokens."""
        width, length = self.params.beam_width, len(self.open[0].tokens) + 1 - len(self.prompt)
        candidates = [
            (beam.cum_logprob + logprob, beam, token)
            for beam, tokens in zip(self.open, likely, strict=True)
            for token, logprob in tokens.items()
        ]
        candidates = sorted(candidates, key=lambda one: -one[0])[: self.num_candidates]
        divisor, last = length**self.params.length_penalty, length >= self.params.max_tokens
        self.open, kept = [], self.found
        for place, (total, beam, token) in enumerate(candidates):
            is_end = token in self.ends
            sequence = BeamSearchSequence([*beam.tokens, token], total)
            if not (is_end or last):
                self.open.append(sequence)
            elif place < width:  # an end that is less likely than so many candidates counts for nothing
                sequence.finish_reason, sequence.stop_reason = ("stop", token) if is_end else ("length", None)
                kept = [*kept, (total / divisor, sequence)]
        self.open = self.open[:width]
        self.found = sorted(kept, key=lambda one: -one[0])[:width]
        full = len(self.found) == width
        if self.open and full and self.open[0].cum_logprob / divisor <= self.found[-1][0]:
            self.open = []  # none of them can become better than what is found

    def best(self, count: int) -> list[BeamSearchSequence]:
        """Return the best finished outputs."""
        return [sequence for _, sequence in self.found[:count]]


def likely_next(output: RequestOutput) -> dict[int, float]:
    """Return the log-probabilities that a request of `BeamSearch.step` has brought."""
    (entry,) = output.outputs[0].logprobs or [{}]
    return {token: logprob.logprob for token, logprob in entry.items()}


def beam_output(
    search: BeamSearch, params: SamplingParams, tokenizer: Tokenizer | None, num_cached_tokens: int
) -> RequestOutput:
    """Return what a search has found as the output of one request with `params.n` choices."""
    choices = []
    for index, sequence in enumerate(search.best(params.n)):
        new = sequence.tokens[len(search.prompt) :]
        shown = new[:-1] if sequence.finish_reason == "stop" else new
        text = "" if tokenizer is None else tokenizer.decode(shown, params.skip_special_tokens)
        total = sequence.cum_logprob
        choices.append(CompletionOutput(index, text, new, total, finish_reason=sequence.finish_reason))
    prompt = [*search.prompt]
    return RequestOutput("", None, prompt, choices, True, num_cached_tokens=num_cached_tokens)
