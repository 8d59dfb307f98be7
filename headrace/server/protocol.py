"""Defines the shapes of requests: OpenAI's, with vLLM's extra fields. Those of answers are in answers.py.

Every optional field of a request may be null, which means its default. fields.py decides about fields that no shape
has. Limits on lengths stand here, so that a value that is too long is not even converted. Limits on values stand where
these are used: in sampling_params.py, requests.py and chat.py.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from headrace.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

PROMPT_SCHEMA = {
    "oneOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}
Prompt = Annotated[
    Any, Meta(description="Text, texts, token ids, or lists of token ids.", extra_json_schema=PROMPT_SCHEMA)
]

ReasoningEffort = Annotated[
    str,
    Meta(max_length=32, description="Passed to the chat template, if it reads it. `none` also turns thinking off."),
]
Thinking = Annotated[
    Any, Meta(description="true, false, {'type': 'enabled'} or {'type': 'disabled'}: whether the model is to think.")
]


ResponseFormat = Annotated[
    Any,
    Meta(
        description="What the answer must be.",
        extra_json_schema={
            "type": "object",
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema", "structural_tag", "json", "regex", "ebnf"]}
            },
            "required": ["type"],
        },
    ),
]
JsonOrText = Annotated[
    Any, Meta(description="An object, or its text.", extra_json_schema={"type": ["object", "string", "null"]})
]


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerateRequest(Struct, kw_only=True):
    """Holds the fields that completions and chat completions have in common."""

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    bad_words: Annotated[list[str], Meta(max_length=MAX_BAD_WORDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: Annotated[dict[int, float], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    allowed_token_ids: Annotated[list[int], Meta(max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat = None
    structured_outputs: dict[str, Any] | None = None
    structural_tag: JsonOrText = None
    guided_json: JsonOrText = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: JsonOrText = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None


class CompletionRequest(GenerateRequest, kw_only=True):
    prompt: Prompt
    logprobs: int | None = None


class ContentPart(Struct, omit_defaults=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class PastFunctionCall(Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class PastToolCall(Struct):
    """Represents a call in the history that a request brings."""

    function: PastFunctionCall
    id: str | None = None
    type: str = "function"


ROLES = ("system", "developer", "user", "assistant", "tool")
Role = Annotated[str, Meta(extra_json_schema={"enum": ROLES})]  # of a Literal's wrong value msgspec would quote all


class ChatMessage(Struct):
    role: Role
    content: str | list[ContentPart | str] | None = None
    name: str | None = None
    tool_calls: list[PastToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


ToolType = Annotated[str, Meta(extra_json_schema={"enum": ("function",)})]


class Tool(Struct):
    function: dict[str, Any] | None = None
    """Required; tool_use.py says so, as a tool of another type has none."""
    type: ToolType = "function"


class ChatCompletionRequest(GenerateRequest, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = None
    thinking: Thinking = None
    thinking_token_budget: int | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(Struct, kw_only=True):
    """Requests the token ids of `prompt` or of `messages`, of which one must be given."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = None
    thinking: Thinking = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ParseFunctionCallRequest(Struct, kw_only=True):
    """Requests what a parser makes of a text. Without the name of one it is the served model's."""

    text: str
    tools: list[Tool] | None = None
    tool_call_parser: str | None = None


class SeparateReasoningRequest(Struct, kw_only=True):
    """Requests the reasoning and the rest of a text. Without the name of a parser it is the served model's."""

    text: str
    reasoning_parser: str | None = None


class LoadAdapterRequest(Struct, kw_only=True):
    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterRequest(Struct, kw_only=True):
    lora_name: str
    lora_int_id: int | None = None
    """As in vLLM; the name says all."""


class DetokenizeRequest(Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]
