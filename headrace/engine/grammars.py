"""Holds requests back while their grammars are compiled, and makes the masks of a step. Others never wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import lru_cache
from typing import NamedTuple

from headrace.errors import HeadraceError, RequestError
from headrace.request import EngineCoreRequest
from headrace.scheduler.plan import MaskedRequest
from headrace.step import Masks
from headrace.structured_outputs.matcher import GrammarCompiler, Matcher, Wanted

COMPILE_SECONDS = 10.0
"""How long a request waits for its grammar, including the time in which those of others are compiled before it."""

NO_TOKENS: frozenset[int] = frozenset()


class _Held(NamedTuple):
    request: EngineCoreRequest
    compiled: Future[Matcher]
    deadline: float


class Grammars:
    """Compiles the grammars of requests, and makes masks for those that run."""

    def __init__(self, compiler: GrammarCompiler | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`compiler`: None where there is no tokenizer, and therefore no grammar."""
        self._compiler = compiler
        self._clock = clock
        self._held: dict[str, _Held] = {}
        self.mask_seconds = 0.0
        """Time in which masks were made."""

    def __len__(self) -> int:
        """Return how many requests wait for their grammars."""
        return len(self._held)

    @property
    def num_prompt_tokens(self) -> int:
        """Return how many prompt tokens those requests have."""
        return sum(len(held.request.prompt_token_ids) for held in self._held.values())

    @property
    def num_compiled(self) -> int:
        return 0 if self._compiler is None else self._compiler.num_compiled

    def hold(self, request: EngineCoreRequest) -> None:
        """Hold a request back until its grammar is compiled. Raises RequestError if there is no tokenizer, or if its id
        is that of another such request."""
        if self._compiler is None:
            raise RequestError("structured_outputs needs a tokenizer, but the server runs without one")
        if request.request_id in self._held:
            raise RequestError(f"request_id {request.request_id!r} is in use by an unfinished request")
        held = _Held(request, self._compiler.start(request.grammar), self._clock() + COMPILE_SECONDS)
        self._held[request.request_id] = held

    def drop(self, request_id: str) -> None:
        """Forget a request, if it is held back."""
        held = self._held.pop(request_id, None)
        if held is not None and not any(other.compiled is held.compiled for other in self._held.values()):
            held.compiled.cancel()

    def released(self) -> Iterator[tuple[EngineCoreRequest, Matcher | HeadraceError]]:
        """Yield the requests that wait no longer, each with its matcher or the error with which it ends."""
        for name, held in list(self._held.items()):
            if held.compiled.done():
                del self._held[name]
                yield held.request, _outcome(held.compiled)
            elif self._clock() > held.deadline:
                self.drop(name)
                seconds = f"within {COMPILE_SECONDS:g} seconds"
                late = f"the grammar was not compiled {seconds}: it is too complex, or many are compiled at once"
                yield held.request, RequestError(late, "structured_outputs")

    def wait(self, seconds: float) -> None:
        """Return when a grammar is compiled, or so many seconds have passed."""
        wait([held.compiled for held in self._held.values()], seconds, return_when=FIRST_COMPLETED)

    def masks(self, step: int, requests: Sequence[MaskedRequest]) -> Masks:
        """Return the masks of a step's requests. Those whose grammars fail now have a matcher with an error."""
        began = self._clock()
        first_lines: dict[int, int] = {}
        wanted, line = [], 0
        for one in requests:
            first_lines[one.row] = line
            line += 1 + len(one.drafts)
            wanted.append(self._wanted(one))
        if not wanted:
            return Masks(step)
        assert self._compiler is not None
        num_words, bits = self._compiler.fill(wanted)
        self.mask_seconds += self._clock() - began
        return Masks(step, first_lines, num_words, bits)

    def shutdown(self) -> None:
        """Stop compiling; requests that wait are dropped."""
        self._held.clear()
        if self._compiler is not None:
            self._compiler.shutdown()

    def _wanted(self, one: MaskedRequest) -> Wanted:
        """Ask for a request's masks. A stop token before min_tokens, and eos with ignore_eos, are allowed only where
        the grammar allows nothing else."""
        request, matcher = one.request, one.request.matcher
        assert isinstance(matcher, Matcher)
        assert self._compiler is not None
        params = request.core_request.params
        first, reluctant = request.num_output_tokens, list[frozenset[int]]()
        if params.ignore_eos or first < params.min_tokens:
            eos, stops = _ends(self._compiler.eos_token_ids() if params.ignore_eos else NO_TOKENS, request.stop_set)
            outputs = range(first, first + 1 + len(one.drafts))
            reluctant = [stops if count < params.min_tokens else eos for count in outputs]
        return Wanted(matcher, one.drafts, reluctant)


@lru_cache
def _ends(eos: frozenset[int], stop_set: frozenset[int]) -> tuple[frozenset[int], frozenset[int]]:
    """Return what no output shall end with: tokens of `eos` that are no stop tokens, and, before min_tokens, all."""
    return eos - stop_set, eos | stop_set


def _outcome(compiled: Future[Matcher]) -> Matcher | HeadraceError:
    """Return a copy of what was compiled, or why there is none."""
    if compiled.cancelled():
        return RequestError("the grammar was not compiled: the engine is stopping", "structured_outputs")
    error = compiled.exception()
    if error is None:
        return compiled.result().copy()
    return error if isinstance(error, HeadraceError) else HeadraceError(f"the grammar failed: {type(error).__name__}")
