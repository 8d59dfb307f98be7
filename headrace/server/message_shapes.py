"""Defines the shapes of Anthropic's Messages API: requests, answers, and the events of a stream."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from headrace.sampling_params import MAX_STOP_STRINGS

Block = dict[str, Any]


class MessageParam(Struct):
    role: str
    content: str | list[Block]


class CountTokensRequest(Struct, kw_only=True):
    """Requests the number of a prompt's tokens; MessagesRequest has the same fields."""

    messages: list[MessageParam]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: int
    stop_sequences: Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


class TokenCount(Struct):
    input_tokens: int


class MessageUsage(Struct):
    """Holds counts of tokens. Those of a prompt that were found in the cache are not among its other ones."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class TextBlock(Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """Holds reasoning. Clients send blocks back with their signature, which nothing here needs: it is a digest."""

    thinking: str
    signature: str


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Any


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class Message(Struct, tag_field="type", tag="message"):
    """Represents a whole answer, and the beginning of a streamed one."""

    id: str
    model: str
    content: list[ContentBlock]
    usage: MessageUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    role: str = "assistant"


class TextBlockDelta(Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


BlockDelta = TextBlockDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class MessageStart(Struct, tag_field="type", tag="message_start"):
    message: Message


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: ContentBlock


class BlockDeltaEvent(Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: BlockDelta


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    index: int


class Ending(Struct):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    delta: Ending
    usage: MessageUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    pass


StreamEvent = MessageStart | BlockStart | BlockDeltaEvent | BlockStop | MessageDelta | MessageStop
