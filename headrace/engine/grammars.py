"""Holds requests back while their grammars are compiled, and makes the masks of a step. Others never wait for it.

Clients take turns at the compiler, by the rule by which they take turns at the device.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from headrace.errors import HeadraceError, QueueFullError, RequestError
from headrace.request import EngineCoreRequest
from headrace.scheduler.fair_queue import FairQueue, Turn
from headrace.scheduler.plan import MaskedRequest
from headrace.step import Masks
from headrace.structured_outputs.matcher import GrammarCompiler, Matcher, Wanted

TURN_SECONDS = 10.0
"""How long a request of a server may wait until the compiler begins with its grammar."""
COMPILE_SECONDS = 10.0
"""How long it may wait for its grammar from then on."""
LEXER_SECONDS = 0.05
"""How long it waits for a lexer of its own where those of its grammar have many outputs, before it shares one."""

NO_TOKENS: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class _Held:
    """A request that waits for its grammar; what a FairQueue needs of it stands first."""

    request_id: str
    """Not the request's own: that may come again while the grammar of one that was aborted is still being compiled."""
    order: Turn
    num_prompt_tokens: int
    request: EngineCoreRequest
    deadline: float
    compiled: Future[Matcher] | None
    """None until the compiler begins with it."""
    shares_at: float = math.inf
    """When it takes a lexer that has many outputs; set once it waits for another."""


class _Compiling(NamedTuple):
    """A grammar that the compiler has begun with."""

    compiled: Future[Matcher]
    whose_turn: _Held
    """Others may wait for the same grammar."""
    began: float


class Grammars:
    """Compiles the grammars of requests, and makes masks for those that run."""

    def __init__(
        self,
        compiler: GrammarCompiler | None,
        turn_seconds: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`compiler`: None where there is no tokenizer, and therefore no grammar. `turn_seconds`: how long a request
        may wait until the compiler begins with its grammar."""
        self._compiler = compiler
        self._turn_seconds = turn_seconds
        self._clock = clock
        self._held: dict[str, _Held] = {}
        self._turns: FairQueue[_Held] = FairQueue()
        """Those of the held requests that wait for their turn; those whose turn it was count as running."""
        self._waiting: dict[str, list[_Held]] = {}
        """Grammar -> the requests that wait until the compiler begins with it."""
        self._compiling: dict[str, _Compiling] = {}
        """By the grammar; no more than the compiler has threads."""
        self._num_ended = 0
        self._seconds = 0.0
        """In which grammars were compiled, of those that came to an end."""
        self.mask_seconds = 0.0
        """Time in which masks were made."""

    def __len__(self) -> int:
        """Return how many requests wait for their grammars."""
        return len(self._held)

    @property
    def num_prompt_tokens(self) -> int:
        """Return how many prompt tokens those requests have."""
        return sum(held.num_prompt_tokens for held in self._held.values())

    @property
    def adapters(self) -> set[int]:
        """Return the adapters of those requests."""
        return {held.request.adapter for held in self._held.values()}

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
        under_way = self._compiling.get(request.grammar)
        compiled = self._compiler.found(request.grammar) if under_way is None else under_way.compiled
        deadline = self._clock() + (self._turn_seconds if compiled is None else COMPILE_SECONDS)
        moment = self._turns.tick()
        held = _Held(str(moment), (0, moment, ""), len(request.prompt_token_ids), request, deadline, compiled)
        if compiled is None:
            self._turns.add(held, request.client, request.parent or request.request_id)
            self._waiting.setdefault(request.grammar, []).append(held)
        self._held[request.request_id] = held

    def drop(self, request_id: str) -> None:
        """Forget a request, if it is held back. A grammar that is being compiled is compiled to its end."""
        held = self._held.pop(request_id, None)
        if held is not None and held.compiled is None:
            self._turns.remove(held)
            same = self._waiting[held.request.grammar]
            same.remove(held)
            if not same:
                del self._waiting[held.request.grammar]

    def released(self) -> Iterator[tuple[EngineCoreRequest, Matcher | HeadraceError]]:
        """Yield the requests that wait no longer, each with its matcher or the error with which it ends."""
        self._begin()
        now = self._clock()
        crowded = Counter[str]()
        for name, held in list(self._held.items()):
            if held.compiled is not None and held.compiled.done():
                outcome = self._outcome(held, held.compiled, now)
                if outcome is None:
                    crowded[held.request.grammar] += 1
                    continue
                del self._held[name]
                yield held.request, outcome
            elif now > held.deadline:
                self.drop(name)
                yield held.request, self._late(held)
        for grammar, outputs in crowded.items():
            assert self._compiler is not None
            self._compiler.make_room(grammar, outputs)

    def wait(self, seconds: float) -> None:
        """Return when a grammar is compiled, or so many seconds have passed."""
        assert self._compiler is not None
        under_way: list[Future[Any]] = [one.compiled for one in self._compiling.values()]
        wait(under_way or [self._compiler.vocabulary], seconds, return_when=FIRST_COMPLETED)

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
        """Stop compiling. Requests that wait get no answer."""
        self._held.clear()
        if self._compiler is not None:
            self._compiler.shutdown()

    def _begin(self) -> None:
        """Let the compiler begin with as many grammars as it has threads, of those whose turn it is."""
        assert self._compiler is not None
        now = self._clock()
        for grammar, ended in [(name, one) for name, one in self._compiling.items() if one.compiled.done()]:
            del self._compiling[grammar]
            self._turns.release(ended.whose_turn)
            self._num_ended += 1
            self._seconds += min(now - ended.began, COMPILE_SECONDS)
        while len(self._compiling) < self._compiler.num_threads and self._compiler.vocabulary.done():
            first = self._turns.first
            if first is None:
                break
            self._turns.take(first)
            grammar = first.request.grammar
            compiled = self._compiler.start(grammar)
            self._compiling[grammar] = _Compiling(compiled, first, now)
            for held in self._waiting.pop(grammar):
                held.compiled, held.deadline = compiled, now + COMPILE_SECONDS
                if held is not first:
                    self._turns.remove(held)

    def _outcome(self, held: _Held, compiled: Future[Matcher], now: float) -> Matcher | HeadraceError | None:
        """Return a matcher for a request whose grammar is compiled, or why there is none. None: it waits for a lexer
        that fewer outputs share."""
        assert self._compiler is not None
        error = compiled.exception()
        if error is None:
            held.shares_at = min(held.shares_at, now + LEXER_SECONDS)
            return self._compiler.copy(held.request.grammar, compiled.result(), now >= held.shares_at)
        return (
            error if isinstance(error, HeadraceError) else HeadraceError(f"the grammar failed: {type(error).__name__}")
        )

    def _late(self, held: _Held) -> HeadraceError:
        """Return the error of a request that has waited for too long: for its turn, or for the grammar itself."""
        assert self._compiler is not None
        if held.compiled is not None:
            limit = f"{COMPILE_SECONDS:g} seconds, which is the limit"
            return RequestError(f"the grammar was not compiled within {limit}: it is too complex", "structured_outputs")
        others = 1 + len(self._waiting)
        ahead = others * self._seconds / max(1, self._num_ended) / self._compiler.num_threads
        return QueueFullError(
            f"the engine did not come to the request's grammar within {self._turn_seconds:g} seconds: {others} wait to "
            "be compiled; please try again later",
            max(1, math.ceil(ahead)),
        )

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
