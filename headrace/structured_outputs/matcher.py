"""Compiles grammars on threads, follows outputs through them, and makes the masks of a whole batch.

A grammar is compiled for all requests that bring it; each of them gets a copy of the matcher. Copies share a lexer and
its lock: their masks are made one after the other. So a grammar of many outputs is compiled several times. Whatever
takes long happens in llguidance, which needs no lock of Python's (GIL) for it. Knows nothing of requests, steps or
devices.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakSet

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from headrace.errors import ConfigError, HeadraceError, RequestError, clip
from headrace.structured_outputs.limits import LIMITS

MAX_THREADS = 32
"""Masks are made on all cores, since the engine waits for them; grammars are compiled on three of four."""
MAX_CACHED = 256
"""Compiled grammars that are kept for later requests, some of which take megabytes."""
OUTPUTS_A_LEXER = 4
"""Beyond so many, a grammar is compiled once more for further outputs, up to once for each thread that makes masks. On
16 cores 128 outputs of one schema took 15 ms a step with one lexer."""
FURTHER_SECONDS = 0.05
"""A grammar that took longer to compile is compiled once."""
ANY_TOKEN = 0xFFFFFFFF


class Matcher:
    """Follows one output through its grammar."""

    __slots__ = ("__weakref__", "compiled", "copies", "error", "finished", "inner", "seconds", "spent")

    def __init__(
        self,
        inner: LLMatcher,
        compiled: Matcher | None = None,
        seconds: float = 0.0,
    ) -> None:
        """`seconds`: in which it was compiled."""
        self.inner = inner
        self.seconds = seconds
        self.compiled = compiled or self
        """What this is a copy of, at first hand or not. All of them share one lexer."""
        self.copies: WeakSet[Matcher] = WeakSet() if compiled is None else compiled.copies
        """All matchers that share that lexer, but for the one that was compiled."""
        if compiled is not None:
            self.copies.add(self)
        self.spent = False
        """True once that lexer has taken all that LIMITS allow: no copy can go on."""
        self.finished = False
        """True once the output is complete and nothing may follow."""
        self.error = ""
        """Why the grammar cannot be followed any further; empty while it can."""

    def advance(self, token_ids: Sequence[int]) -> int:
        """Take new tokens in, up to the one with which the output is complete; return how many were taken."""
        for place, token in enumerate(token_ids):
            if self.finished or not self.inner.consume_token(token):
                self.note_error()
                return place
            self.finished = self.inner.is_stopped()
        return len(token_ids)

    def note_error(self) -> None:
        """Set `error` if the grammar could not be followed."""
        if self.inner.is_error() and not self.error:
            again = self.compiled.inner.deep_copy()
            again.compute_bitmask()
            self.compiled.spent = again.is_error()
            self.error = f"the output cannot follow its grammar any further: {_first_line(self.inner)}"

    def copy(self) -> Matcher:
        """Return a matcher at the same place, which goes on by itself."""
        other = Matcher(self.inner.deep_copy(), self.compiled)
        other.finished, other.error = self.finished, self.error
        return other


class Wanted(NamedTuple):
    """Names an output whose masks are wanted: one for its next token, and one behind each of `drafts`."""

    matcher: Matcher
    drafts: Sequence[int] = ()
    reluctant: Sequence[frozenset[int]] = ()
    """For each mask, tokens that it allows only if the grammar allows no others; empty: there are none."""


class GrammarCompiler:
    """Compiles grammars for one vocabulary, and makes masks of their matchers."""

    def __init__(self, make_vocabulary: Callable[[], LLTokenizer], threads: int | None = None) -> None:
        """Begin to make the vocabulary, on a thread; whatever is compiled waits for it."""
        threads = threads or min(MAX_THREADS, os.cpu_count() or 1)
        self.num_threads = max(1, threads * 3 // 4)
        """Of those that compile."""
        self._threads = ThreadPoolExecutor(self.num_threads, thread_name_prefix="grammars")
        self._masks = LLExecutor(threads)
        self._lines = np.empty((0, 0), dtype=np.uint32)
        """Where masks are made, again and again: to touch fresh memory for them takes half a millisecond."""
        self._cache: OrderedDict[str, list[Future[Matcher]]] = OrderedDict()
        """Grammar -> what it was compiled to, each time with a lexer of its own."""
        self._most_lexers = threads
        self._vocabulary = self._threads.submit(_prepared, make_vocabulary)
        self._eos: frozenset[int] | None = None
        self.num_compiled = 0

    @property
    def vocabulary(self) -> Future[LLTokenizer]:
        """Return what every grammar waits for."""
        return self._vocabulary

    def found(self, grammar: str) -> Future[Matcher] | None:
        """Return what `start` has returned for a grammar, if it is still there."""
        lexers = [one for one in self._cache.pop(grammar, ()) if not _is_spent(one)]
        if not lexers:
            return None
        self._cache[grammar] = lexers
        return lexers[0]

    def start(self, grammar: str) -> Future[Matcher]:
        """Return a matcher to ask for copies with, once it is compiled. Its future raises RequestError for a grammar
        that cannot be, and another error if none can."""
        found = self.found(grammar)
        if found is None:
            found = self._threads.submit(self._compile, grammar)
            self._cache[grammar] = [found]
        while len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)
        return found

    def copy(self, grammar: str, compiled: Matcher, crowded: bool) -> Matcher | None:
        """Return a matcher for one output, at the grammar's beginning. None: all lexers have OUTPUTS_A_LEXER, and
        another is being made or may be; with `crowded` they take more than that. `compiled`: of the future that was
        waited for."""
        lexers = self._cache.get(grammar, [])
        free = [one.result() for one in lexers if one.done() and one.exception() is None and not one.result().spent]
        best = min(free, key=lambda one: len(one.copies), default=compiled)
        if crowded or len(best.copies) < OUTPUTS_A_LEXER or not self._may_grow(lexers):
            return best.copy()
        return None

    def make_room(self, grammar: str, outputs: int) -> None:
        """Begin to make the lexers that so many outputs wait for, for which there was no `copy`."""
        lexers = self._cache.get(grammar, [])
        wanted = -(-outputs // OUTPUTS_A_LEXER) - sum(not one.done() for one in lexers)
        for _ in range(min(wanted, self._most_lexers - len(lexers))):
            lexers.append(self._threads.submit(self._compile, grammar, again=True))

    def _may_grow(self, lexers: list[Future[Matcher]]) -> bool:
        """Tell whether a further lexer may come, or is on its way."""
        if not lexers or not lexers[0].done() or lexers[0].exception() is not None:
            return False
        quick = lexers[0].result().seconds < FURTHER_SECONDS
        return quick and (len(lexers) < self._most_lexers or not all(one.done() for one in lexers))

    def fill(self, wanted: Sequence[Wanted]) -> tuple[int, memoryview]:
        """Make masks on several threads, line after line. Return the words of 32 bits in a line, and the bytes of the
        lines, which are overwritten by the next call: bit t % 32 of word t // 32, little-endian, allows token t. A
        matcher that fails notes its error, and its lines mean nothing."""
        words = -(-self._vocabulary.result().vocab_size // 32)
        lines = self._room_for(sum(1 + len(one.drafts) for one in wanted), words)
        plain: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        for first, one in sorted(_placed(wanted), key=lambda placed: id(placed[1].matcher.compiled)):
            # Neighbours are made by one thread as a rule: those that share a lexer shall be neighbours.
            if one.drafts:
                drafted.append((one.matcher.inner, first, list(one.drafts)))
                lines[first : first + 1 + len(one.drafts)] = ANY_TOKEN  # none is made behind a draft that is forbidden
            else:
                plain.append((one.matcher.inner, first))
        where = lines.ctypes.data, 4 * words, len(lines)
        if plain:
            self._masks.unsafe_compute_mask_ptr(plain, *where)
        if drafted:
            self._masks.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        reluctant = dict[frozenset[int], list[int]]()
        for first, one in _placed(wanted):
            one.matcher.note_error()
            for place, tokens in enumerate(one.reluctant, first):
                reluctant.setdefault(tokens, []).append(place)
        for tokens, places in reluctant.items():
            _forbid_unless_alone(lines, np.array(places), tokens)
        return words, lines.data.cast("B")

    def _room_for(self, num_lines: int, words: int) -> np.ndarray:
        """Return memory for so many lines # [num_lines, words] uint32, as a rule that of the call before."""
        if len(self._lines) < num_lines:
            self._lines = np.empty((1 << (num_lines - 1).bit_length(), words), dtype=np.uint32)
        return self._lines[:num_lines]

    def eos_token_ids(self) -> frozenset[int]:
        """Return the tokens that end a text of this vocabulary, once it is made."""
        if self._eos is None:
            self._eos = frozenset(self._vocabulary.result().eos_tokens)
        return self._eos

    def shutdown(self) -> None:
        """Stop the threads. What is being compiled is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str, again: bool = False) -> Matcher:
        try:
            vocabulary = self._vocabulary.result()
        except HeadraceError:
            raise
        except Exception as error:
            raise ConfigError(f"output cannot be held to a grammar: no vocabulary: {type(error).__name__}") from error
        began = time.perf_counter()
        inner = LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
        if not inner.is_error():
            inner.compute_bitmask()  # which makes the first parts of its automata; copies have them too
        if inner.is_error():
            raise RequestError(f"the grammar cannot be compiled: {_first_line(inner)}", "structured_outputs")
        self.num_compiled += not again
        return Matcher(inner, seconds=time.perf_counter() - began)


def _placed(wanted: Sequence[Wanted]) -> Iterator[tuple[int, Wanted]]:
    """Yield each output with its first line."""
    first = 0
    for one in wanted:
        yield first, one
        first += 1 + len(one.drafts)


def _is_spent(found: Future[Matcher]) -> bool:
    return found.done() and found.exception() is None and found.result().spent


def _prepared(make_vocabulary: Callable[[], LLTokenizer]) -> LLTokenizer:
    """Make the vocabulary, and a first mask with it, so that no request waits for what only the first one takes."""
    vocabulary = make_vocabulary()
    LLMatcher(vocabulary, LLMatcher.grammar_from_json_schema({"type": "object"}), log_level=0).compute_bitmask()
    return vocabulary


def _first_line(inner: LLMatcher) -> str:
    return clip((inner.get_error() or "no reason is known").strip().splitlines()[0])


def _forbid_unless_alone(lines: np.ndarray, places: np.ndarray, tokens: frozenset[int]) -> None:
    """Forbid tokens in the masks at `places` of lines # [num_lines, words] uint32, but not where a mask allows no
    others. Most masks allow none of the tokens, so only the words that have them are looked at first."""
    words, bits = _words_of(tokens, lines.shape[1])
    places = places[(lines[places[:, None], words] & bits).any(axis=1)]
    if len(places):
        kept = lines[places]
        kept[:, words] &= ~bits
        others = kept.any(axis=1)
        lines[places[others]] = kept[others]


@lru_cache
def _words_of(tokens: frozenset[int], num_words: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which words of a line have tokens, and the bits of those in each # [words] int64, uint32."""
    ids = np.array([token for token in tokens if token < 32 * num_words], dtype=np.int64)
    words, first = np.unique(ids >> 5, return_inverse=True)
    bits = np.zeros(len(words), dtype=np.uint32)
    np.bitwise_or.at(bits, first, np.uint32(1) << (ids & 31).astype(np.uint32))
    return words, bits
