"""Outputs of the engine core -> RequestOutputs: text, logprobs, finish reasons, and n choices merged into one request.

A stop string is found here, one step or more after the core sampled its last token: what came later is dropped, and
the core is told how many tokens count. Knows nothing of sockets or event loops.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, overload

from headrace.engine.detokenizer import Detokenizer
from headrace.engine.messages import Abort
from headrace.engine.metrics import EngineMetrics, RequestTimes
from headrace.engine.tokenizer import Tokenizer
from headrace.errors import HeadraceError, RequestError
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


class Sink(Protocol):
    """Where a request's outputs go."""

    def put(self, output: RequestOutput) -> None: ...

    def fail(self, error: HeadraceError) -> None: ...


class PromptLogprobs(Sequence[dict[int, Logprob] | None]):
    """Of each prompt token, made when it is looked at: as dictionaries, those of a long prompt would take five times
    the memory for as long as others of its request compute."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.entries: list[Logprobs] = []
        """of the second token and those behind it"""
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
    """One of a request's n outputs. The lists hold what has not been handed out yet."""

    index: int
    core_id: str
    detokenizer: Detokenizer | None
    times: RequestTimes
    text_at_end: bool = False
    """Nobody looks at the text before the end, so it is made in one go."""
    num_tokens: int = 0
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def close_text(self, last_is_stop_token: bool) -> None:
        """No token comes any more: add what the detokenizer has held back."""
        if self.detokenizer is not None:
            if self.text_at_end:
                self.texts.append(self.detokenizer.append(self.token_ids, last_is_stop_token=last_is_stop_token)[0])
            self.texts.append(self.detokenizer.finish())

    def hand_out(self) -> CompletionOutput:
        output = CompletionOutput(
            self.index,
            "".join(self.texts),
            self.token_ids,
            self.cumulative_logprob,
            self.logprobs,
            None if self.finish_reason is None else self.finish_reason.value,
            self.stop_reason,
        )
        self.texts, self.token_ids = [], []
        self.logprobs = None if self.logprobs is None else []
        return output


@dataclass
class _Parent:
    """One request as the user made it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    kind: OutputKind
    sink: Sink
    arrival_time: float
    choices: list[_Choice] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int = 0
    num_open: int = 0
    """choices that have not ended"""

    @property
    def finished(self) -> bool:
        return not self.num_open


class OutputProcessor:
    def __init__(self, tokenizer: Tokenizer | None, metrics: EngineMetrics) -> None:
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._parents: dict[str, _Parent] = {}
        self._by_core_id: dict[str, tuple[_Parent, _Choice]] = {}

    @property
    def num_requests(self) -> int:
        return len(self._parents)

    def add(
        self,
        request_id: str,
        prompt: str | None,
        requests: list[EngineCoreRequest],
        params: SamplingParams,
        kind: OutputKind,
        sink: Sink,
    ) -> None:
        """Expect outputs for `requests`, the choices of one request. Raises RequestError if its id is in use."""
        if request_id in self._parents:
            raise RequestError(f"request_id {request_id!r} is in use by an unfinished request", "request_id")
        first = requests[0]
        parent = _Parent(request_id, prompt, first.prompt_token_ids, params, kind, sink, first.arrival_time)
        if params.prompt_logprobs is not None:
            parent.prompt_logprobs = PromptLogprobs(self._tokenizer)
        with_text = self._tokenizer is not None and params.detokenize
        for index, request in enumerate(requests):
            choice = _Choice(
                index,
                request.request_id,
                Detokenizer(self._tokenizer, first.prompt_token_ids, params)
                if with_text and self._tokenizer is not None
                else None,
                RequestTimes(request.arrival_time),
                text_at_end=kind == "final" and not params.stop,
            )
            if params.logprobs is not None:
                choice.logprobs, choice.cumulative_logprob = [], 0.0
            parent.choices.append(choice)
            parent.num_open += 1
            self._by_core_id[request.request_id] = (parent, choice)
        self._parents[request_id] = parent

    def process(self, outputs: EngineCoreOutputs) -> list[Abort]:
        """Hand out what a step brought; returns what the core must stop computing."""
        aborts: list[Abort] = []
        changed: dict[str, tuple[_Parent, dict[int, _Choice]]] = {}
        """by request; each choice once, however many steps these outputs are of"""
        iteration = self._metrics.begin_iteration(outputs)
        for output in outputs.outputs:
            entry = self._by_core_id.get(output.request_id)
            if entry is None:  # it ended here while the step was under way
                continue
            parent, choice = entry
            if output.finish_reason is FinishReason.ERROR:
                changed.pop(parent.request_id, None)
                self._count_ended(parent, FinishReason.ERROR)
                aborts.extend(Abort(core_id) for core_id in self._forget(parent) if core_id != output.request_id)
                parent.sink.fail(HeadraceError(output.error or "the request failed in the engine"))
                continue
            num_before = choice.num_tokens
            if self._take(parent, choice, output):
                aborts.append(Abort(choice.core_id, choice.num_tokens))
            num_prompt = len(parent.prompt_token_ids)
            iteration.record(choice.times, output, num_prompt, choice.num_tokens - num_before)
            if choice.finish_reason is not None:
                parent.num_open -= 1
                del self._by_core_id[output.request_id]
                self._metrics.request_finished(
                    choice.finish_reason, choice.times, num_prompt, choice.num_tokens, parent.params
                )
            changed.setdefault(parent.request_id, (parent, {}))[1][choice.index] = choice
        iteration.end()
        for parent, choices in changed.values():
            self._emit(parent, [*choices.values()])
        return aborts

    def abort(self, request_id: str, sink: Sink | None = None) -> list[Abort]:
        """Forget a request nobody waits for any more; returns what the core must stop computing.

        `sink`: only if it is still the request of this sink, as its id may be another's by now.
        """
        parent = self._parents.get(request_id)
        if parent is None or (sink is not None and parent.sink is not sink):
            return []
        self._count_ended(parent, FinishReason.ABORT)
        return [Abort(core_id) for core_id in self._forget(parent)]

    def finish_aborted(self, request_id: str) -> list[Abort]:
        """As `abort`, for a request somebody else ended: who waits for it gets what there is, finish_reason `abort`."""
        parent = self._parents.get(request_id)
        aborts = self.abort(request_id)
        if parent is not None:
            ended = [choice for choice in parent.choices if choice.finish_reason is None]
            for choice in ended:
                parent.num_open -= 1
                choice.finish_reason = FinishReason.ABORT
                choice.close_text(last_is_stop_token=False)
            parent.sink.put(self._request_output(parent, parent.choices if parent.kind == "final" else ended))
        return aborts

    def fail_all(self, error: HeadraceError) -> None:
        """The core is gone: every open request gets the error."""
        for parent in list(self._parents.values()):
            self._count_ended(parent, FinishReason.ERROR)
            self._forget(parent)
            parent.sink.fail(error)

    def _count_ended(self, parent: _Parent, reason: FinishReason) -> None:
        """For /metrics: each choice that has not ended by itself ends like this."""
        for choice in parent.choices:
            if choice.finish_reason is None:
                self._metrics.request_finished(
                    reason, choice.times, len(parent.prompt_token_ids), choice.num_tokens, parent.params
                )

    def _forget(self, parent: _Parent) -> list[str]:
        """Returns the ids that the core may still be working on."""
        del self._parents[parent.request_id]
        open_ids = [choice.core_id for choice in parent.choices if choice.core_id in self._by_core_id]
        for core_id in open_ids:
            del self._by_core_id[core_id]
        return open_ids

    def _take(self, parent: _Parent, choice: _Choice, output: EngineCoreOutput) -> bool:
        """One step's addition to one choice. True if a stop string ended it, so that the core must be told."""
        token_ids = output.new_token_ids
        stop: str | None = None
        by_token = output.finish_reason is FinishReason.STOP
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
        if parent.prompt_logprobs is not None:
            parent.prompt_logprobs.entries.extend(output.new_prompt_logprobs)
        if output.num_cached_tokens and choice.index == 0:
            parent.num_cached_tokens = output.num_cached_tokens
        if stop is not None:
            choice.finish_reason, choice.stop_reason = FinishReason.STOP, stop
        elif output.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_token_id
        return stop is not None

    def _emit(self, parent: _Parent, choices: list[_Choice]) -> None:
        finished = parent.finished
        if finished:
            del self._parents[parent.request_id]
        if parent.kind == "final":
            if finished:
                parent.sink.put(self._request_output(parent, parent.choices))
        elif any(choice.token_ids or choice.finish_reason is not None for choice in choices):
            parent.sink.put(self._request_output(parent, choices))

    def _request_output(self, parent: _Parent, choices: list[_Choice]) -> RequestOutput:
        """Prompt logprobs are complete with the first choice's first token, and go out with it alone."""
        prompt_logprobs = None
        first = parent.choices[0]
        if parent.prompt_logprobs is not None and first in choices and first.num_tokens:
            prompt_logprobs, parent.prompt_logprobs = parent.prompt_logprobs, None
        finished = parent.finished
        return RequestOutput(
            request_id=parent.request_id,
            prompt=parent.prompt,
            prompt_token_ids=parent.prompt_token_ids,
            outputs=[choice.hand_out() for choice in choices],
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=parent.num_cached_tokens,
            metrics=_request_metrics(parent) if finished else None,
        )


def _logprobs(entry: Logprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The token itself first, with its rank; then the best ones, ranked 1, 2, ..."""
    found: dict[int, Logprob] = {}
    for position, (token_id, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
        if token_id not in found:
            text = None if tokenizer is None else tokenizer.token_text(token_id)
            found[token_id] = Logprob(logprob, position or entry.rank, text)
    return found


def _request_metrics(parent: _Parent) -> RequestMetrics:
    """Of a request that ends now: the earliest and the latest of its choices."""
    times = [choice.times for choice in parent.choices]
    now = time.monotonic()
    return RequestMetrics(
        arrival_time=time.time() - (now - parent.arrival_time),
        queued_ts=parent.arrival_time,
        scheduled_ts=min(filter(None, (entry.scheduled for entry in times)), default=0.0),
        first_token_ts=min(filter(None, (entry.first_token for entry in times)), default=0.0),
        last_token_ts=max(entry.last_token for entry in times),
        finished_ts=now,
        num_generation_tokens=sum(choice.num_tokens for choice in parent.choices),
    )
