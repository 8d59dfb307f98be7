"""Turns the engine core's outputs into RequestOutputs: text, logprobs, finish reasons, and n choices in one request.

A stop string is found here, one step or more after the core sampled its last token. What came after it is dropped, and
the core is told how many tokens count. Knows nothing of sockets or event loops.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal, overload

from headrace.engine.detokenizer import Detokenizer
from headrace.engine.messages import Abort
from headrace.engine.metrics import EngineMetrics, RequestTimes
from headrace.engine.tokenizer import Tokenizer
from headrace.errors import HeadraceError, RequestError
from headrace.lora import LoRARequest
from headrace.pooling import Pooled
from headrace.request import (
    CompletionOutput,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from headrace.sampling_params import SamplingParams
from headrace.step import Logprobs

OutputKind = Literal["delta", "final"]


class PromptLogprobs(Sequence[dict[int, Logprob] | None]):
    """Holds the logprobs of a prompt, and makes the dictionary of a position when it is read. As dictionaries from the
    start they would take five times the memory while other choices still compute."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.entries: list[Logprobs] = []
        """Entries of the second prompt token and those after it; nothing precedes the first."""
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return 1 + len(self.entries)

    @overload
    def __getitem__(self, place: int) -> dict[int, Logprob] | None: ...
    @overload
    def __getitem__(self, place: slice) -> list[dict[int, Logprob] | None]: ...
    def __getitem__(self, place: int | slice) -> dict[int, Logprob] | list[dict[int, Logprob] | None] | None:
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(len(self)))]
        index = range(len(self))[place]
        return _logprobs(self.entries[index - 1], self._tokenizer) if index else None


@dataclass
class _Choice:
    """Holds one of a request's n choices. Its lists hold what the reader has not taken yet."""

    index: int
    core_id: str
    detokenizer: Detokenizer | None
    times: RequestTimes
    text_at_end: bool = False
    """The text is made at the end, in one go, because nobody reads it before."""
    changed: bool = False
    """There are new tokens, or the choice has ended, since the reader last took it."""
    num_tokens: int = 0
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    pooled: list[Pooled] = field(default_factory=list)
    lora_request: LoRARequest | None = None

    def close_text(self, last_is_stop_token: bool) -> None:
        """Add the text that the detokenizer has held back, as no more tokens will come."""
        if self.detokenizer is not None:
            if self.text_at_end:
                self.texts.append(self.detokenizer.append(self.token_ids, last_is_stop_token=last_is_stop_token)[0])
            self.texts.append(self.detokenizer.finish())

    def take(self) -> CompletionOutput:
        output = CompletionOutput(
            self.index,
            "".join(self.texts),
            self.token_ids,
            self.cumulative_logprob,
            self.logprobs,
            None if self.finish_reason is None else self.finish_reason.value,
            self.stop_reason,
            self.pooled,
            self.lora_request,
        )
        self.texts, self.token_ids, self.changed = [], [], False
        self.logprobs = None if self.logprobs is None else []
        return output


@dataclass
class OpenRequest:
    """Collects the output of one request, with all its choices, until the reader takes it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    kind: OutputKind
    on_change: Callable[[], None]
    """Called when there is something to take, or an error."""
    arrival_time: float
    choices: list[_Choice] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int = 0
    num_open: int = 0
    """Choices that have not ended."""
    finished_ts: float = 0.0
    """When the last choice ended, in seconds of time.monotonic()."""
    error: HeadraceError | None = None
    """Why the request failed. What came before can still be taken."""
    core_requests: list[EngineCoreRequest] = field(default_factory=list)
    """What was sent to the core, one for each choice."""
    kept: Set[int] = frozenset()
    """See Detokenizer."""
    taken: bool = False
    """Whether the reader has had any of its output."""
    num_lost: int = 0
    """How many engines have died with it."""

    @property
    def finished(self) -> bool:
        return not self.num_open

    @property
    def failed(self) -> bool:
        """True if there is an error, and nothing from before it is left to take."""
        return self.error is not None and (self.kind == "final" or not any(one.changed for one in self.choices))

    def take(self) -> RequestOutput | None:
        """Return what came since the last call, of however many steps; None if there is nothing. A request of kind
        `final` has one output, once all its choices have ended."""
        choices = [choice for choice in self.choices if choice.changed]
        if self.kind == "final":
            choices = self.choices if choices and self.finished else []
        if not choices:
            return None
        self.taken = True
        prompt_logprobs, first = None, self.choices[0]
        if self.prompt_logprobs is not None and first in choices and first.num_tokens:
            # They are complete with the first choice's first token, and are handed out once.
            prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[choice.take() for choice in choices],
            finished=self.finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self._metrics() if self.finished else None,
            lora_request=first.lora_request,
        )

    def _metrics(self) -> RequestMetrics:
        """Return the moments of a request that has ended: the earliest or latest of its choices."""
        times = [choice.times for choice in self.choices]
        return RequestMetrics(
            arrival_time=time.time() - (time.monotonic() - self.arrival_time),
            queued_ts=self.arrival_time,
            scheduled_ts=min(filter(None, (entry.scheduled for entry in times)), default=0.0),
            first_token_ts=min(filter(None, (entry.first_token for entry in times)), default=0.0),
            last_token_ts=max(entry.last_token for entry in times),
            finished_ts=self.finished_ts,
            num_generation_tokens=sum(choice.num_tokens for choice in self.choices),
        )


class OutputProcessor:
    """Holds the open requests and hands each its part of what the core sends."""

    def __init__(self, tokenizer: Tokenizer | None, metrics: EngineMetrics) -> None:
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._requests: dict[str, OpenRequest] = {}
        self._by_core_id: dict[str, tuple[OpenRequest, _Choice]] = {}
        """Core request id -> the choice that it computes, of choices that have not ended."""

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_choices(self) -> int:
        """Choices that have not ended."""
        return len(self._by_core_id)

    def add(
        self,
        request_id: str,
        prompt: str | None,
        choices: list[EngineCoreRequest],
        params: SamplingParams,
        kind: OutputKind,
        on_change: Callable[[], None],
        kept: Set[int] = frozenset(),
    ) -> OpenRequest:
        """Expect outputs for `choices`, the core's requests of one request. `kept`: see Detokenizer. Raises
        RequestError if the id is in use."""
        if request_id in self._requests:
            raise RequestError(f"request_id {request_id!r} is in use by an unfinished request", "request_id")
        first = choices[0]
        request = OpenRequest(
            request_id, prompt, first.prompt_token_ids, params, kind, on_change, first.arrival_time,
            core_requests=choices, kept=kept,
        )  # fmt: skip
        self.begin(request)
        return request

    def begin(self, request: OpenRequest) -> None:
        """Expect the outputs of a request from its first token on, whatever had come of it before."""
        params, tokenizer = request.params, self._tokenizer if request.params.detokenize else None
        request.choices, request.num_cached_tokens = [], 0
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = PromptLogprobs(self._tokenizer)
        for index, core_request in enumerate(request.core_requests):
            choice = _Choice(
                index,
                core_request.request_id,
                None if tokenizer is None else Detokenizer(tokenizer, request.prompt_token_ids, params, request.kept),
                RequestTimes(core_request.arrival_time),
                text_at_end=request.kind == "final" and not params.stop,
                lora_request=core_request.lora_request,
            )
            if params.logprobs is not None:
                choice.logprobs, choice.cumulative_logprob = [], 0.0
            request.choices.append(choice)
            self._by_core_id[core_request.request_id] = (request, choice)
        request.num_open = len(request.core_requests)
        self._requests[request.request_id] = request

    def process(self, outputs: EngineCoreOutputs) -> list[Abort]:
        """Hand out what one or more steps brought; return what the core must stop computing."""
        aborts: list[Abort] = []
        changed: dict[str, OpenRequest] = {}
        iteration = self._metrics.begin_iteration(outputs)
        for output in outputs.outputs:
            entry = self._by_core_id.get(output.request_id)
            if entry is None:  # it ended here while the step was under way
                continue
            request, choice = entry
            if output.finish_reason is FinishReason.ERROR:
                changed.pop(request.request_id, None)
                self._count_ended(request, FinishReason.ERROR)
                aborts.extend(Abort(core_id) for core_id in self._forget(request) if core_id != output.request_id)
                self._fail(request, output.exception())
                continue
            num_before = choice.num_tokens
            if self._add_output(request, choice, output):
                aborts.append(Abort(choice.core_id, choice.num_tokens))
            num_prompt = len(request.prompt_token_ids)
            iteration.record(choice.times, output, num_prompt, choice.num_tokens - num_before)
            if choice.finish_reason is not None:
                request.num_open -= 1
                del self._by_core_id[output.request_id]
                self._metrics.request_finished(
                    choice.finish_reason, choice.times, num_prompt, choice.num_tokens, request.params
                )
            if choice.token_ids or choice.finish_reason is not None:
                choice.changed = True
                changed[request.request_id] = request
        iteration.end()
        for request in changed.values():
            if request.finished:
                request.finished_ts = time.monotonic()
                del self._requests[request.request_id]
            if request.finished or request.kind == "delta":
                request.on_change()
        return aborts

    def abort(self, request: OpenRequest) -> list[Abort]:
        """Forget a request that nobody waits for any more; return what the core must stop computing. A request that has
        ended is left alone: another one may have its id by now."""
        if self._requests.get(request.request_id) is not request:
            return []
        self._count_ended(request, FinishReason.ABORT)
        return [Abort(core_id) for core_id in self._forget(request)]

    def finish_aborted(self, request_id: str) -> list[Abort]:
        """End a request for somebody other than its reader, who still gets what there is, with finish_reason `abort`.
        Returns what the core must stop computing."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        aborts = self.abort(request)
        for choice in request.choices:
            if choice.finish_reason is None:
                choice.finish_reason, choice.changed = FinishReason.ABORT, True
                choice.close_text(last_is_stop_token=False)
        request.num_open, request.finished_ts = 0, time.monotonic()
        request.on_change()
        return aborts

    def take_unanswered(self) -> list[OpenRequest]:
        """Forget the requests of whose output their readers have had nothing, and return them, because the core is
        gone and another may answer them."""
        found = [request for request in self._requests.values() if not request.taken and request.error is None]
        for request in found:
            self._forget(request)
        return found

    def fail(self, request: OpenRequest, error: HeadraceError) -> None:
        """End a request that was forgotten with an error."""
        self._count_ended(request, FinishReason.ERROR)
        self._fail(request, error)

    def fail_all(self, error: HeadraceError) -> None:
        """End every open request with an error, because the core is gone."""
        for request in list(self._requests.values()):
            self._count_ended(request, FinishReason.ERROR)
            self._forget(request)
            self._fail(request, error)

    @staticmethod
    def _fail(request: OpenRequest, error: HeadraceError) -> None:
        request.error = error
        request.on_change()

    def _count_ended(self, request: OpenRequest, reason: FinishReason) -> None:
        """Count each choice that has not ended by itself in /metrics."""
        for choice in request.choices:
            if choice.finish_reason is None:
                self._metrics.request_finished(
                    reason, choice.times, len(request.prompt_token_ids), choice.num_tokens, request.params
                )

    def _forget(self, request: OpenRequest) -> list[str]:
        """Forget a request; return the ids that the core may still be working on."""
        del self._requests[request.request_id]
        open_ids = [choice.core_id for choice in request.choices if choice.core_id in self._by_core_id]
        for core_id in open_ids:
            del self._by_core_id[core_id]
        return open_ids

    def _add_output(self, request: OpenRequest, choice: _Choice, output: EngineCoreOutput) -> bool:
        """Add what a step brought to a choice. Returns True if a stop string ended it, which the core must be told."""
        token_ids = output.new_token_ids
        choice.pooled += output.pooled
        stop: str | None = None
        by_token = output.finish_reason is FinishReason.STOP and not output.completes_grammar
        if choice.detokenizer is not None and not choice.text_at_end:
            text, num_kept, stop = choice.detokenizer.append(token_ids, last_is_stop_token=by_token)
            choice.texts.append(text)
            token_ids = token_ids[:num_kept]
        choice.token_ids.extend(token_ids)
        if stop is None and output.finish_reason is not None:
            choice.close_text(by_token)
        choice.num_tokens += len(token_ids)
        if choice.logprobs is not None:
            for entry in output.new_logprobs[: len(token_ids)]:
                choice.logprobs.append(_logprobs(entry, self._tokenizer))
                choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + entry.logprobs[0]
        if request.prompt_logprobs is not None:
            request.prompt_logprobs.entries.extend(output.new_prompt_logprobs)
        if output.num_cached_tokens and choice.index == 0:
            request.num_cached_tokens = output.num_cached_tokens
        if stop is not None:
            choice.finish_reason, choice.stop_reason = FinishReason.STOP, stop
        elif output.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_token_id
        return stop is not None


def _logprobs(entry: Logprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Return the logprobs of one position by token id: the token itself with its rank, then the best, ranked 1, 2,
    ..."""
    found: dict[int, Logprob] = {}
    for position, (token_id, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
        if token_id not in found:
            text = None if tokenizer is None else tokenizer.token_text(token_id)
            found[token_id] = Logprob(logprob, position or entry.rank, text)
    return found
