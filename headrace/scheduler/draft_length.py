"""Chooses step by step how many tokens are guessed behind each request, from how many guesses were right and what steps
cost; 0 is among the choices, so that guessing is never slower than not guessing.

One length holds for all requests of a step, so that a step of decodes is one graph. A length is worth the tokens that a
step is expected to give, over the seconds that it takes (the goodput of Liu 2024). Expected tokens follow from the
rates at which the first guess is right, the second where the first was, and so on; each request's own record raises or
lowers them. Seconds are those predicted, corrected by those observed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.request import Request
from headrace.step import SchedulerOutput

Costs = Callable[[int, float, int, int], float]
"""(requests, mean context, length, lag) -> predicted seconds of a step that verifies `length` guesses of each request
and makes as many, what guesses lagging `lag` tokens behind"""
ASSUMED, ASSUMED_WEIGHT = 0.6, 4.0
"""How often a guess is taken to be right where none was verified, and how many verified ones this counts for."""
OWN_WEIGHT, MOST_OWN = 4.0, 128.0
"""Right guesses that all requests' rates count for beside a request's own record, and the most that this holds."""
FEWEST_STEPS, FEWEST_GUESSES = 32, 512
"""What is verified is forgotten over so many steps, or so many guesses if those are more."""
MOST_RATE = 0.98
MARGIN = 0.25
"""A length is left where another is better by this share over the square root of the guesses known."""
PROBE_GUESSES, PROBE_MANY = 8, 64
"""Another length is tried for a step more than it takes to verify the guesses of so many requests; where many run, and
nothing is to catch up with, for one step alone."""
PROBE_EVERY, PROBE_EVERY_REQUEST = 64, 4
"""Fewest steps before a trial, and for each request that runs but for the first one: all wait for its slow steps."""
PROBE_MEMORY = 16.0
"""Guesses that all of what was verified before counts for, when a trial begins after steps without guesses."""
PROBE_SHARE = 0.005
"""Share of all time that may be lost by trials, where guesses would pay if as many as usual were right; else less."""
SKIPPED, WEIGHT, TRIAL_WEIGHT = 1, 0.125, 0.25
"""Observed times of a length that are not counted, since kernels load, and the least weight of later ones while it runs
or is tried."""
SETTLED, PACE_WEIGHT = 32, 0.5
"""Observed times of a length that runs after which a change of them is taken for one of the machine, which other
lengths would show too, and the weight of each."""
PLAIN_STEPS = SKIPPED + 2
"""Steps without guesses that are looked at where a number of requests is new."""
EVERY = 4
"""The choice is made anew every so many steps, or when the number of requests changes."""


@dataclass
class _Observed:
    """Compares observed seconds with predicted ones."""

    steps: int = 0
    ratio: float = 1.0

    def add(self, ratio: float, most: float, weight: float) -> None:
        """Take in one of a step, with at least that weight; what is beyond `most` met something else."""
        self.steps += 1
        if self.steps > SKIPPED:
            self.ratio += max(weight, 1 / (self.steps - SKIPPED)) * (min(ratio, most) - self.ratio)


class DraftLength:
    """Keeps what is known of guesses and of the costs of steps, and the length that holds. Call `choose` for each step
    and `learn` with what a step's result says; `observe` takes the times of steps."""

    def __init__(self, lengths: Sequence[int], costs: Costs) -> None:
        """`lengths`: those that a step may have, 0 included, in ascending order."""
        self.lengths = tuple(lengths)
        self.current = 0
        """The best length, as far as is known; steps have another while that is tried."""
        self._costs = costs
        self._right, self._tried = [0.0] * self.lengths[-1], [0.0] * self.lengths[-1]
        """by place among a step's guesses: those that were right, and those whose predecessors all were"""
        self._rates = [ASSUMED] * self.lengths[-1]
        self._usual = _sums(self._rates)
        self._observed: dict[tuple[int, int], _Observed] = {}
        """(length, bits of the number of requests) -> how predictions compare"""
        self._pace = 1.0
        """how much slower than when lengths were compared the machine is now"""
        self._plain_left: dict[int, int] = {}
        """bits of the number of requests -> how many more of their steps may be without guesses to see their cost"""
        self._count = self._since_choice = self._idle = 0
        self._trial: int | None = None
        """the length that is tried, for `_trial_left` steps more"""
        self._trial_left = 0
        self._since_trial = 0
        self._tried_last = 0
        self._allowance = math.inf
        """seconds that a trial may lose, less what earlier ones have lost; the first one may lose any"""
        self._token_seconds = 0.0
        """that a token of each request takes with the current length"""
        self._uncharged = 0
        """steps of the last trial of whose seconds the allowance does not know"""
        self._first_seconds = math.nan
        """of the step that began a trial; NaN: it did more than compute, or further ones made as many guesses"""

    def choose(self, requests: Sequence[Request]) -> int:
        """Return how many tokens to guess behind each of `requests`, those of a step that will go on."""
        count = len(requests)
        if not count:
            return self.current
        self._since_choice += 1
        if count != self._count or self._since_choice >= EVERY:
            self._choose(requests)
        length = self.current if self._trial is None else self._trial
        if self._looks_at_plain_steps(count):
            length = 0
        elif self._trial is not None:
            self._trial_left -= 1
            if not self._trial_left:
                self._trial = None
        self._idle = 0 if length else self._idle + 1
        return length

    def _looks_at_plain_steps(self, count: int) -> bool:
        """Tell whether steps of about so many requests begin without guesses, so that it is known what these cost."""
        bits = count.bit_length()
        left = self._plain_left.get(bits, 2 * PLAIN_STEPS)
        known = self._observed.get((0, bits))
        if not left or (known is not None and known.steps >= PLAIN_STEPS):
            return False
        self._plain_left[bits] = left - 1
        return True

    def _choose(self, requests: Sequence[Request]) -> None:
        count, steps, same = len(requests), self._since_choice, len(requests) == self._count
        self._count, self._since_choice = count, 0
        context = sum(request.num_computed_tokens for request in requests) / count
        tokens, known = self._expected_tokens(requests)
        seconds = {length: self.seconds(count, context, length) for length in self.lengths}
        values = {length: tokens[length] / seconds[length] for length in self.lengths}
        best = max(values, key=lambda length: values[length])
        if values[best] > values[self.current] * (1 + MARGIN / math.sqrt(known)):
            self.current = best
        self._token_seconds = 1 / values[self.current]
        if self._trial is not None:
            return
        self._since_trial += steps
        usual = {length: count * (1 + self._usual[length]) for length in self.lengths}
        others = [length for length in self.lengths if length != self.current]
        promise = max(max(tokens[one], usual[one]) / seconds[one] for one in others) * self._token_seconds
        self._allowance += PROBE_SHARE * min(1.0, promise) ** 4 * steps * seconds[self.current]
        least = PROBE_EVERY if math.isinf(self._allowance) else max(PROBE_EVERY, PROBE_EVERY_REQUEST * count)
        if same and self._since_trial >= least:  # where prompts begin, a step's time tells little
            self._begin_trial(requests, context, seconds)

    def _begin_trial(self, requests: Sequence[Request], context: float, seconds: dict[int, float]) -> None:
        """Begin to try another length, if the allowance is enough. `seconds`: what a step of each length takes."""
        count, other = len(requests), self._next_trial()
        lag = 0 if self.current or not other else self._idle
        catching_up = self.seconds(count, context, other, lag) - seconds[other]
        probe_steps = 1 if count >= PROBE_MANY and not catching_up else 1 + -(-PROBE_GUESSES // count)
        lost = probe_steps * (seconds[other] - count * self._token_seconds) + catching_up
        if self._allowance < lost:
            return
        self._trial, self._trial_left, self._tried_last = other, probe_steps, other
        self._since_trial, self._uncharged = 0, probe_steps + 1
        self._allowance = min(self._allowance, max(0.0, lost))
        if not self.current:
            self._forget(requests)

    def _forget(self, requests: Sequence[Request]) -> None:
        """Let what was verified before count for little, so that a trial shows what holds now."""
        kept = min(1.0, PROBE_MEMORY / max(self._tried[0], PROBE_MEMORY))
        self._right = [kept * count for count in self._right]
        self._tried = [kept * count for count in self._tried]
        for request in requests:
            request.guesses_right = request.guesses_expected = 0.0

    def _next_trial(self) -> int:
        """Return the length after the one that was tried last, other than the current one."""
        others = [length for length in self.lengths if length != self.current]
        return next((length for length in others if length > self._tried_last), others[0])

    def seconds(self, count: int, context: float, length: int, lag: int = 0) -> float:
        """Return what a step costs: as predicted, corrected by what was observed."""
        return self._ratio(length, count.bit_length()) * self._costs(count, context, length, lag)

    def _ratio(self, length: int, bits: int) -> float:
        """Return how predictions compare: of such steps, or else of others with as many requests, or of the length."""
        known = {key: one.ratio for key, one in self._observed.items() if one.steps > SKIPPED}
        ratio = known.get((length, bits))
        if ratio is None:
            alike = [value for (_, other), value in known.items() if other == bits]
            alike = alike or [value for (other, _), value in known.items() if other == length]
            ratio = sum(alike) / len(alike) if alike else 1.0
        return ratio

    def _expected_tokens(self, requests: Sequence[Request]) -> tuple[dict[int, float], float]:
        """Return the tokens that a step of each length is expected to give, and how many guesses this is known by."""
        sums = [0.0] * (self.lengths[-1] + 1)
        known = ASSUMED_WEIGHT
        for request in requests:
            known += request.guesses_expected
            strength = (OWN_WEIGHT + request.guesses_right) / (OWN_WEIGHT + request.guesses_expected)
            chance = 1.0
            for place, rate in enumerate(self._rates, start=1):
                chance *= min(MOST_RATE, rate * strength)
                sums[place] += chance
        totals, total = {}, float(len(requests))
        for length in range(self.lengths[-1] + 1):
            total += sums[length]
            if length in self.lengths:
                totals[length] = total
        return totals, known

    def learn(self, verified: Sequence[tuple[Request, int, int]]) -> None:
        """Take in a step's result: requests with the numbers of their guesses that were verified and accepted. A little
        of all before is forgotten."""
        kept = 1 - min(1 / FEWEST_STEPS, len(verified) / FEWEST_GUESSES)
        right, tried = ([kept * count for count in counts] for counts in (self._right, self._tried))
        for _, guesses, accepted in verified:
            for place in range(min(accepted + 1, guesses)):
                tried[place] += 1
                right[place] += place < accepted
        self._right, self._tried = right, tried
        self._rates = [
            (one + ASSUMED_WEIGHT * ASSUMED) / (all_ + ASSUMED_WEIGHT) for one, all_ in zip(right, tried, strict=True)
        ]
        expected = _sums(self._rates)
        for request, guesses, accepted in verified:
            request.guesses_right += accepted
            request.guesses_expected += expected[guesses]
            if request.guesses_expected > MOST_OWN:
                request.guesses_right /= 2
                request.guesses_expected /= 2

    def observe(self, step: SchedulerOutput, seconds: float, counts: bool = True) -> None:
        """Take in the seconds of a step of decodes. It tells what a length costs if all verify as many guesses as are
        made behind them; else a trial begins or ends, and where it was so short both steps together tell that. Trials
        are charged with what they have lost. `counts`: False if the step did more than compute, such as capture a
        graph: its time tells nothing of others, but is lost."""
        count, length = len(step.rows), step.num_guesses
        drafts = step.num_drafts[0] if step.num_drafts else 0
        if step.new_rows or not all(step.samples) or step.num_scheduled_tokens != [1 + drafts] * count:
            return
        context, tried, paced = sum(step.num_computed_tokens) / count, self._tried_last, seconds / self._pace
        if self._uncharged and tried != self.current and tried in (drafts, length):
            self._uncharged -= 1
            self._allowance -= max(0.0, paced - count * self._token_seconds)
            if length == tried:
                self._first_seconds = paced if counts and drafts == self.current else math.nan
            elif counts:  # first and last step together compute what one of each length does
                self._compare(tried, count, context, self._first_seconds + paced - self.seconds(count, context, length))
        if drafts == length and counts:
            self._compare(length, count, context, paced)

    def _compare(self, length: int, count: int, context: float, paced: float) -> None:
        """Compare what a step took with what is predicted. `paced`: its seconds at the pace at which lengths are
        compared; NaN: they are unknown."""
        if not paced > 0:
            return
        ratio, bits = paced / self._costs(count, context, length, 0), count.bit_length()
        believed, one = self._ratio(length, bits), self._observed.setdefault((length, bits), _Observed())
        most = 2 * believed if any(other.steps > SKIPPED for other in self._observed.values()) else math.inf
        if length == self.current and one.steps > SETTLED:
            self._pace *= 1 + PACE_WEIGHT * (min(ratio / believed, 2) - 1)
        else:
            one.add(ratio, most, WEIGHT if length == self.current else TRIAL_WEIGHT)


def _sums(rates: Sequence[float]) -> list[float]:
    """Return how many of the first 0, 1, 2, ... guesses are expected to be right."""
    sums, chance = [0.0], 1.0
    for rate in rates:
        chance *= rate
        sums.append(sums[-1] + chance)
    return sums
