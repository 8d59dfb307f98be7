"""Takes the result of a step with drafts: which of them were accepted, and what each request got. Takes new tokens
through a request's grammar."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from headrace.request import DraftCounts, EngineCoreOutput, Request
from headrace.scheduler.draft_length import DraftLength
from headrace.step import Logprobs, RunnerOutput


class Accepted(NamedTuple):
    """Holds the new tokens of one request of a step with drafts, in order; there is at least one."""

    token_ids: list[int]
    logprobs: list[Logprobs]
    """Parallel to `token_ids`, or empty."""

    def complete(self, output: EngineCoreOutput, request: Request) -> None:
        """Put all new tokens into an output that was made for the last one."""
        output.new_token_ids, output.new_logprobs = self.token_ids, self.logprobs
        if request.num_output_tokens == len(self.token_ids):
            output.num_cached_tokens = request.num_cached_tokens


def accept_drafts(
    requests: Sequence[Request], num_drafts: Sequence[int], result: RunnerOutput, counts: DraftCounts,
    length: DraftLength | None = None,
) -> tuple[list[Accepted], DraftCounts]:  # fmt: skip
    """Correct the counts of a step's requests, and append all their new tokens but the last; return what each got, and
    `counts` with theirs. When the step was scheduled, all drafts counted as accepted. `requests` and `num_drafts` are
    parallel; the list returned has one entry for each request that sampled. `length` learns how many were right."""
    accepted, verified = [], []
    first = 0
    for request, drafts, count in zip(requests, num_drafts, result.num_sampled, strict=True):
        if not count:
            continue
        if drafts and request.finish_reason is None:
            counts = counts.after(drafts, count - 1)
            verified.append((request, drafts, count - 1))
        request.num_inflight -= drafts
        request.num_computed_tokens -= 1 + drafts - count  # meaningless, and not read, if it was preempted meanwhile
        new = [0] if request.finish_reason else _up_to_end(request, result.token_ids[first : first + count])
        if request.matcher is not None:
            new = new[: max(1, follow_grammar(request, new))]
        logprobs = [entry for entry in result.logprobs[first : first + len(new)] if entry is not None]
        accepted.append(Accepted(new, logprobs))
        request.token_ids += new[:-1]
        first += count
    if length is not None:
        length.learn(verified)
    return accepted, counts


def _up_to_end(request: Request, new: list[int]) -> list[int]:
    """Return the new tokens up to the first that ends the request: a stop token, or the last that its length allows."""
    new = new[: request.max_total_tokens - request.num_tokens]
    num_protected = request.core_request.params.min_tokens - request.num_output_tokens - 1
    if request.matcher is not None:
        num_protected = 0
    ends = (place + 1 for place, token in enumerate(new) if token in request.stop_set and place >= num_protected)
    return new[: next(ends, len(new))]


def follow_grammar(request: Request, new: list[int]) -> int:
    """Take new tokens of a request with a grammar through it; return how many there are up to the one that ends the
    request. A stop token ends it and is no part of what the grammar describes; negative ids are no tokens."""
    assert request.matcher is not None
    text = list(takewhile(lambda token: token >= 0 and token not in request.stop_set, new))
    taken = request.matcher.advance(text)
    return len(new) if taken == len(text) and not request.matcher.finished else taken
