"""Defines the shapes of OpenAI's Responses API: requests, answers, and the events of a stream."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from headrace.sampling_params import MAX_STOP_STRINGS
from headrace.server.answers import TokenLogprob

Item = dict[str, Any]


class ResponsesRequest(Struct, kw_only=True):
    """Requests an answer to `input`. Behind OpenAI's fields are those of vLLM's that mean the same as elsewhere."""

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    truncation: str | None = None
    top_logprobs: int | None = None
    prompt: Any = None
    conversation: Any = None
    user: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class InputTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0
    """Nobody pays for what is written to a cache here."""


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(Struct, tag_field="type", tag="summary_text"):
    text: str


class OutputMessage(Struct, tag_field="type", tag="message"):
    id: str
    content: list[OutputText]
    status: str = "in_progress"
    role: str = "assistant"


class ReasoningItem(Struct, tag_field="type", tag="reasoning"):
    """Holds reasoning: as `content`, or as `summary` where the request asks for one, which is then all of it."""

    id: str
    summary: list[SummaryText]
    content: list[ReasoningText]
    status: str = "in_progress"


class FunctionCallItem(Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET
    status: str = "in_progress"


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class ResponseError(Struct):
    code: str
    message: str


class IncompleteDetails(Struct):
    reason: str


class ResponseObject(Struct, kw_only=True):
    """Represents an answer, finished or not, with what its request asked for."""

    id: str
    created_at: int
    model: str
    status: str
    object: str = "response"
    output: list[OutputItem] = []
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    text: dict[str, Any] = {}
    reasoning: dict[str, Any] = {}
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int = 0
    store: bool = True
    background: bool = False
    metadata: dict[str, str] = {}
    truncation: str = "disabled"
    user: str | None = None


class Deleted(Struct):
    id: str
    object: str = "response"
    deleted: bool = True


class ResponseEvent(Struct, kw_only=True, tag_field="type"):
    """Represents an event of a stream. The answer numbers its events as it gives them out."""

    sequence_number: int = 0


class Created(ResponseEvent, tag="response.created"):
    response: ResponseObject


class InProgress(ResponseEvent, tag="response.in_progress"):
    response: ResponseObject


class Completed(ResponseEvent, tag="response.completed"):
    response: ResponseObject


class Incomplete(ResponseEvent, tag="response.incomplete"):
    response: ResponseObject


class Failed(ResponseEvent, tag="response.failed"):
    response: ResponseObject


class ItemAdded(ResponseEvent, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(ResponseEvent, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class ItemEvent(ResponseEvent, kw_only=True):
    """Represents an event within an item."""

    item_id: str
    output_index: int


class PartAdded(ItemEvent, tag="response.content_part.added"):
    part: OutputText | ReasoningText
    content_index: int = 0


class PartDone(ItemEvent, tag="response.content_part.done"):
    part: OutputText | ReasoningText
    content_index: int = 0


class TextDelta(ItemEvent, tag="response.output_text.delta"):
    delta: str
    content_index: int = 0
    logprobs: list[TokenLogprob] = []


class TextDone(ItemEvent, tag="response.output_text.done"):
    text: str
    content_index: int = 0
    logprobs: list[TokenLogprob] = []


class ReasoningDelta(ItemEvent, tag="response.reasoning_text.delta"):
    delta: str
    content_index: int = 0


class ReasoningDone(ItemEvent, tag="response.reasoning_text.done"):
    text: str
    content_index: int = 0


class SummaryPartAdded(ItemEvent, tag="response.reasoning_summary_part.added"):
    part: SummaryText
    summary_index: int = 0


class SummaryPartDone(ItemEvent, tag="response.reasoning_summary_part.done"):
    part: SummaryText
    summary_index: int = 0


class SummaryDelta(ItemEvent, tag="response.reasoning_summary_text.delta"):
    delta: str
    summary_index: int = 0


class SummaryDone(ItemEvent, tag="response.reasoning_summary_text.done"):
    text: str
    summary_index: int = 0


class ArgumentsDelta(ItemEvent, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(ItemEvent, tag="response.function_call_arguments.done"):
    arguments: str
    name: str


EVENTS = (
    Created, InProgress, Completed, Incomplete, Failed, ItemAdded, ItemDone, PartAdded, PartDone, TextDelta, TextDone,
    ReasoningDelta, ReasoningDone, SummaryPartAdded, SummaryPartDone, SummaryDelta, SummaryDone, ArgumentsDelta,
    ArgumentsDone,
)  # fmt: skip
"""what a stream may hold"""
