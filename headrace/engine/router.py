"""Chooses, of several engines, the one that is expected to send a request's first token first, at least cost to others.

What an engine will do is predicted from what it was sent and when its first tokens came: how much of a prompt it has
cached and would have to drop, what waits before it, how fast it has been, and when its KV cache will have room. Pure
arithmetic: no I/O, and the clock is handed in. A request is never moved once it is sent.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice

from headrace.engine.messages import CoreFacts
from headrace.request import EngineCoreOutput, SchedulerStats

CHUNK = 64
"""Tokens of a prompt that are remembered together. Engines share blocks of 16; a hash for each would take longer here
than the tokens of a block do there."""
REQUEST_TOKENS = 16
"""A request that decodes is taken to delay a new one as so many prompt tokens do, so that decodes are balanced too."""
AT_STAKE = 8
"""What a request adds to a full cache is taken to drop, with equal chance, any of the chunks next to go, of which there
are so many times as many as it adds."""
USUAL_RATE = 1e-4
"""Seconds a prompt token before anything was measured. Engines are compared with each other, so its size is no
matter."""
KEEP = 0.98
"""How much of what was measured before stays with each new measurement of any engine."""
KEEP_PACE = 0.95
"""The same for one engine compared with the others."""
FINISH_SECONDS = 30.0
"""Over how long requests that finish are counted."""
FORGET_SECONDS = 60.0
"""After about so long without a measurement an engine counts as one like the others again."""


def chunk_keys(token_ids: Sequence[int], salt: str | None) -> list[bytes]:
    """Return a key for each beginning of a prompt that is a multiple of CHUNK long, the last token not counted, which
    no engine finds cached. Prompts with different salts share none."""
    key, keys = b"" if salt is None else blake2b(salt.encode("utf-8", "surrogatepass")).digest(), []
    packed = array("q", token_ids[: (len(token_ids) - 1) // CHUNK * CHUNK]).tobytes()
    for start in range(0, len(packed), CHUNK * 8):
        key = blake2b(key + packed[start : start + CHUNK * 8], digest_size=16).digest()
        keys.append(key)
    return keys


@dataclass
class Speed:
    """Predicts the seconds until a prompt's first token: those of a step, and those of its tokens. It is fitted to all
    engines together (least squares), as each sees few sizes; how much slower one of them is, its EngineLoad knows."""

    _n: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    @property
    def measured(self) -> bool:
        return self._n > 0

    def observe(self, tokens: float, seconds: float) -> None:
        """Add what an engine of usual pace took."""
        values = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        sums = (self._n, self._x, self._y, self._xx, self._xy)
        self._n, self._x, self._y, self._xx, self._xy = (KEEP * a + b for a, b in zip(sums, values, strict=True))

    def seconds(self, tokens: float) -> float:
        """Return the predicted seconds for so many prompt tokens."""
        if not self._n:
            return tokens * USUAL_RATE
        x, y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - x * x
        slope = (self._xy / self._n - x * y) / spread if spread > 0.01 * x * x else y / max(1.0, x)
        slope = min(max(slope, 0.1 * y / max(1.0, x)), y / max(1.0, x))  # neither part may be negative
        return y + slope * (tokens - x)


@dataclass
class EngineLoad:
    """Holds what the front end knows of one engine's work."""

    speed: Speed
    """shared by all engines"""
    cache_tokens: int
    """Tokens that its KV cache holds."""
    max_num_seqs: int
    num_open: Callable[[], int]
    """Tells how many choices were sent and have not ended."""
    pace: float = 1.0
    """How many times the usual seconds it takes."""
    sent: int = 0
    """Choices that were sent since it started, and their prompt tokens."""
    sent_tokens: int = 0
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    """What it said last."""
    last_sent: float = -math.inf
    _pending: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Request id -> prompt tokens to compute and when it was sent, until its first token comes. In order."""
    _pending_tokens: int = 0
    _last_first: float = 0.0
    """When a first token last came."""
    _measured: float = 0.0
    _predicted: float = 0.0
    """Sums of seconds whose ratio is the pace."""
    _finishes: float = 0.0
    """Choices that ended, those of FINISH_SECONDS before `_finishes_at` counted as 1/e."""
    _finishes_at: float = 0.0
    _cached: OrderedDict[bytes, bool] = field(default_factory=OrderedDict)
    """Keys of the chunks that it has computed, the longest unused first, and whether a second prompt had them."""

    @staticmethod
    def of(facts: CoreFacts, speed: Speed, num_open: Callable[[], int]) -> EngineLoad:
        """Return the load of an engine that has just started."""
        layout, longest = facts.workers[0].layout, facts.config.max_model_len or 1
        return EngineLoad(speed, layout.tokens_in(facts.num_pages, longest), facts.config.max_num_seqs or 1, num_open)

    def cached_tokens(self, keys: Sequence[bytes]) -> int:
        """Return how many tokens of a prompt's beginning it is thought to have cached."""
        count = 0
        while count < len(keys) and keys[count] in self._cached:
            count += 1
        return count * CHUNK

    def evicted_tokens(self, new: int) -> float:
        """Return how many shared tokens are expected to be computed again if so many chunks are added to its cache.

        Without this cost (Preble, arXiv:2407.00023) a quick engine gets nearly all requests, and drops beginnings that
        the cache of a slow one would have kept."""
        if len(self._cached) + new <= self.cache_tokens // CHUNK:
            return 0.0
        return CHUNK / AT_STAKE * sum(islice(self._cached.values(), AT_STAKE * new))

    def expected_wait(self, keys: Sequence[bytes], prompt_tokens: int, now: float) -> float:
        """Return the expected seconds until a request's first token, a little for each request that runs, and what
        later requests lose by it."""
        if prompt_tokens > self.cache_tokens:
            return math.inf
        cached, others = self.cached_tokens(keys), self.stats.others
        work = self._pending_tokens + others.num_pending_tokens + prompt_tokens - cached
        decodes = REQUEST_TOKENS * (self.num_open() + others.num_open)
        until = self.speed.seconds(work + decodes + self.evicted_tokens(len(keys) - cached // CHUNK))
        return max(until * self._pace_at(now), self._room_wait(prompt_tokens, now))

    def add(self, request_id: str, keys: Sequence[bytes], prompt_tokens: int, choices: int, now: float) -> None:
        """Count a request that was sent. `request_id`: the one of its first choice."""
        work = max(1, prompt_tokens - self.cached_tokens(keys))
        self._pending[request_id] = (work, now)
        self._pending_tokens += work
        self.sent += choices
        self.sent_tokens += choices * prompt_tokens
        self.last_sent = now
        for key in keys:
            self._cached[key] = key in self._cached
            self._cached.move_to_end(key)
        while len(self._cached) > self.cache_tokens // CHUNK:
            self._cached.popitem(last=False)

    def drop(self, request_id: str) -> None:
        """Forget a request that was aborted."""
        self._pending_tokens -= self._pending.pop(request_id, (0, 0.0))[0]

    def took(self, outputs: Iterable[EngineCoreOutput], stats: SchedulerStats, now: float) -> None:
        """Take in what the engine sent, and measure it by the first tokens among it."""
        self.stats = stats
        work, since, finished = 0, math.inf, 0
        for output in outputs:
            if self._pending and (found := self._pending.pop(output.request_id, None)) is not None:
                work, since = work + found[0], min(since, found[1])
            finished += output.finish_reason is not None
        self._finishes, self._finishes_at = self._recent_finishes(now) + finished, now
        if work:
            self._pending_tokens -= work
            self._measure(work, now - max(since, self._last_first))
            self._last_first = now

    def _measure(self, tokens: int, seconds: float) -> None:
        """Take in how long it computed prompts of so many tokens in all."""
        usual = self.speed.seconds(tokens)
        if not self.speed.measured:
            usual = seconds
        if not self._predicted:
            self._measured = self._predicted = usual
        self._measured = KEEP_PACE * self._measured + seconds
        self._predicted = KEEP_PACE * self._predicted + usual
        self.pace = min(max(self._measured / max(self._predicted, 1e-9), 0.02), 50.0)
        self.speed.observe(tokens, seconds / self.pace)

    def _pace_at(self, now: float) -> float:
        """Return its pace, nearer to 1 the longer ago it was measured: a bad one would never be measured again."""
        return self.pace ** math.exp(-max(0.0, now - self._last_first) / FORGET_SECONDS)

    def _recent_finishes(self, now: float) -> float:
        return self._finishes * math.exp(-max(0.0, now - self._finishes_at) / FINISH_SECONDS)

    def _room_wait(self, prompt_tokens: int, now: float) -> float:
        """Return the seconds until enough running requests have ended for one more to be admitted."""
        stats = self.stats
        if not stats.num_blocks or not stats.num_running:
            return 0.0
        page = self.cache_tokens / stats.num_blocks
        free, used = stats.num_free_blocks * page, (stats.num_blocks - stats.num_free_blocks) * page
        sent, sent_tokens = self.sent + stats.others.num_received, self.sent_tokens + stats.others.num_received_tokens
        ahead = max(0, sent - stats.num_received) + stats.num_waiting
        ahead_tokens = max(0, sent_tokens - stats.num_received_tokens) + stats.num_waiting_tokens
        short = max(0.0, ahead_tokens + prompt_tokens - free) / max(1.0, used / stats.num_running)
        ends = max(short, ahead + 1 + stats.num_running - self.max_num_seqs)
        rate = max(self._recent_finishes(now), 0.1) / FINISH_SECONDS
        return max(0.0, ends) / rate


def choose(loads: Sequence[EngineLoad], keys: Sequence[bytes], prompt_tokens: int, now: float) -> int:
    """Return the place of the engine with the shortest expected wait; among equals the one that was sent less."""
    waits = [(load.expected_wait(keys, prompt_tokens, now), load.sent_tokens) for load in loads]
    return waits.index(min(waits))
