"""Writes the answers of the Responses API: items as they come, and the object that holds them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import UNSET
from msgspec.structs import replace as changed

from headrace.parsers.events import Arguments, CallStart, Content, Event, Reasoning
from headrace.request import RequestOutput
from headrace.server.answers import TokenLogprob
from headrace.server.chat import ChatPlan
from headrace.server.chat_parsing import ChoiceParser, merged, read_new
from headrace.server.generation import ReasoningCount, UsageCount
from headrace.server.logprobs import TextLogprobs
from headrace.server.replies import OPENAI, ErrorObject, Wire, named_event
from headrace.server.response_items import namespaces
from headrace.server.response_shapes import (
    ArgumentsDelta,
    ArgumentsDone,
    Completed,
    Created,
    Failed,
    FunctionCallItem,
    Incomplete,
    IncompleteDetails,
    InProgress,
    InputTokensDetails,
    ItemAdded,
    ItemDone,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
    SummaryDelta,
    SummaryDone,
    SummaryPartAdded,
    SummaryPartDone,
    SummaryText,
    TextDelta,
    TextDone,
)
from headrace.server.serving import new_id


class ResponseAnswer:
    """Implements generation.Answer for responses. `shown` is the answer as it is so far."""

    def __init__(
        self,
        plan: ChatPlan,
        shown: ResponseObject,
        counted: ReasoningCount | None,
        ended: Callable[[ResponseObject], None],
        logprobs: TextLogprobs | None = None,
    ) -> None:
        """`ended`: called with the finished answer. `logprobs`: finds those of its text, where they are wanted."""
        self.parser = None if plan.parsing is None else ChoiceParser(plan.parsing)
        self.shown = shown
        self.count = UsageCount(None)
        self.count.reasoning = counted
        self.wire: Wire = replace(OPENAI, event=named_event, done=b"", failed=self._failed)
        self._ended = ended
        self._logprobs = logprobs
        self._found: list[TokenLogprob] = []
        """logprobs of the open item's text"""
        self._namespaces = namespaces(shown.tools)
        self._numbered = 0
        self._open: OutputItem | None = None
        self._texts: list[str] = []
        """the pieces of the open item"""

    @property
    def parses(self) -> bool:
        """Return whether text is read for reasoning and calls."""
        return self.parser is not None

    def whole(self, outputs: list[RequestOutput]) -> ResponseObject:
        self.events(0, outputs[0])
        return self.shown

    def events(self, prompt_index: int, output: RequestOutput) -> list[ResponseEvent]:
        self.count.add(0, output)
        events: list[ResponseEvent] = []
        if not self._numbered:
            self.shown = changed(self.shown, status="in_progress")
            events += [Created(response=self.shown), InProgress(response=self.shown)]
        for new in output.outputs:
            self.count.add_tokens(0, new.token_ids)
            if self._logprobs is not None:
                self._logprobs.add(new.token_ids, new.logprobs or [])
            for event in merged(read_new(self.parser, new)):
                events += self._part(event)
            if new.finish_reason is not None:
                events += self._end(new.finish_reason)
        for one in events:
            one.sequence_number = self._numbered
            self._numbered += 1
        return events

    def last_events(self) -> list[ResponseEvent]:
        return []

    def fail(self, error: ErrorObject) -> ResponseObject:
        """Return the answer as one that an error has ended."""
        code = error.error.code or error.error.type
        self.shown = changed(self.shown, status="failed", error=ResponseError(code, error.error.message))
        return self.shown

    def _failed(self, error: Any) -> bytes:
        return named_event(Failed(response=self.fail(error), sequence_number=self._numbered))

    def _part(self, event: Event) -> Iterator[ResponseEvent]:
        """Yield the events for a part of the answer; a part of another kind than the one before begins an item."""
        match event:
            case Content(text):
                if not isinstance(self._open, OutputMessage):
                    yield from self._begin(OutputMessage(new_id("msg"), []))
                    yield PartAdded(**self._place(), part=OutputText(""))
                self._texts.append(text)
                found = self._logprobs_of(text)
                self._found += found
                yield TextDelta(**self._place(), delta=text, logprobs=found)
            case Reasoning(text):
                summary = bool(self.shown.reasoning.get("summary"))
                if not isinstance(self._open, ReasoningItem):
                    yield from self._begin(ReasoningItem(new_id("rs"), [], []))
                    if summary:
                        yield SummaryPartAdded(**self._place(), part=SummaryText(""))
                    else:
                        yield PartAdded(**self._place(), part=ReasoningText(""))
                self._texts.append(text)
                self._logprobs_of(text)
                yield (SummaryDelta if summary else ReasoningDelta)(**self._place(), delta=text)
            case CallStart(_, name, id):
                namespace, name = self._namespaces.get(name, (UNSET, name))
                yield from self._begin(FunctionCallItem(new_id("fc"), id or new_id("call"), name, "", namespace))
            case Arguments(_, text):
                self._texts.append(text)
                yield ArgumentsDelta(**self._place(), delta=text)

    def _begin(self, item: OutputItem) -> Iterator[ResponseEvent]:
        yield from self._close("completed")
        self._open, self._texts, self._found = item, [], []
        yield ItemAdded(output_index=len(self.shown.output), item=item)

    def _close(self, status: str) -> Iterator[ResponseEvent]:
        """Yield the events that end the open item, if there is one."""
        item, text, place = self._open, "".join(self._texts), self._place()
        done: OutputItem
        match item:
            case OutputMessage():
                part = OutputText(text, logprobs=self._found)
                yield TextDone(**place, text=text, logprobs=self._found)
                yield PartDone(**place, part=part)
                done = changed(item, content=[part], status=status)
            case ReasoningItem():
                if self.shown.reasoning.get("summary"):
                    yield SummaryDone(**place, text=text)
                    yield SummaryPartDone(**place, part=SummaryText(text))
                    done = changed(item, summary=[SummaryText(text)], status=status)
                else:
                    yield ReasoningDone(**place, text=text)
                    yield PartDone(**place, part=ReasoningText(text))
                    done = changed(item, content=[ReasoningText(text)], status=status)
            case FunctionCallItem():
                yield ArgumentsDone(**place, arguments=text, name=item.name)
                done = changed(item, arguments=text, status=status)
            case None:
                return
        yield ItemDone(output_index=len(self.shown.output), item=done)
        self.shown = changed(self.shown, output=[*self.shown.output, done])
        self._open = None

    def _end(self, finish_reason: str) -> Iterator[ResponseEvent]:
        status = "incomplete" if finish_reason == "length" else "completed"
        yield from self._close(status)
        details = IncompleteDetails("max_output_tokens") if status == "incomplete" else None
        self.shown = changed(self.shown, status=status, usage=self._usage(), incomplete_details=details)
        self._ended(self.shown)
        yield (Incomplete if details else Completed)(response=self.shown)

    def _logprobs_of(self, text: str) -> list[TokenLogprob]:
        return [] if self._logprobs is None else self._logprobs.take(text)

    def _place(self) -> dict[str, Any]:
        return {"item_id": "" if self._open is None else self._open.id, "output_index": len(self.shown.output)}

    def _usage(self) -> ResponseUsage:
        total, cached = self.count.total(), self.count.cached_tokens.get(0, 0)
        thought = 0 if self.count.reasoning is None else self.count.reasoning.tokens
        return ResponseUsage(
            total.prompt_tokens,
            InputTokensDetails(cached),
            total.completion_tokens,
            OutputTokensDetails(thought),
            total.total_tokens,
        )


def items_of(shown: ResponseObject) -> list[dict[str, Any]]:
    """Return an answer's output as the items of a later request's input."""
    found: list[dict[str, Any]] = msgspec.to_builtins(shown.output)
    return found
