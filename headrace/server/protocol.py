"""Defines the shapes of requests and answers: OpenAI's, with vLLM's extra fields.

Every optional field of a request may be null, which means its default. fields.py decides about fields that no shape
has. Limits on lengths stand here, so that a value that is too long is not even converted. Limits on values stand where
these are used: in sampling_params.py, requests.py and chat.py.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from headrace.planner.predict import Prediction, Workload
from headrace.planner.record import Decision
from headrace.planner.served import MemoryReport
from headrace.request import Logprob
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
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[PastToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


ToolType = Annotated[str, Meta(extra_json_schema={"enum": ("function",)})]


class Tool(Struct):
    function: dict[str, Any]
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


class DetokenizeRequest(Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


PromptLogprobs = list[dict[int, Logprob] | None]


class CompletionLogprobs(Struct):
    """Holds parallel lists with an entry for each token. The first token of an echoed prompt has null: nothing precedes
    it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct):
    """Holds a whole answer, or one chunk of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]


class FunctionCall(Struct):
    name: str
    arguments: str


class ToolCall(Struct):
    id: str
    function: FunctionCall
    type: str = "function"


class AssistantMessage(Struct):
    """Holds an answer. Its reasoning has two names, of which clients read one; null where the model has not reasoned,
    and absent where nothing looks for reasoning."""

    content: str | None
    role: str = "assistant"
    refusal: str | None = None
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    object: str = "chat.completion"
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class FunctionDelta(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """Holds the beginning of a call, with id, type and name, or a piece of its arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Delta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ParsedCall(Struct):
    name: str
    parameters: str


class ParseFunctionCallAnswer(Struct):
    normal_text: str
    calls: list[ParsedCall]


class SeparateReasoningAnswer(Struct):
    reasoning_text: str
    text: str


class ModelCard(Struct):
    id: str
    created: int
    root: str
    max_model_len: int
    object: str = "model"
    owned_by: str = "headrace"
    parent: str | None = None


class ModelList(Struct):
    data: list[ModelCard]
    object: str = "list"


class PlanAnswer(Struct):
    """Tells how the server runs, why, and what its planner expects of it."""

    model: str
    objective: str
    decisions: list[Decision]
    kv_cache_tokens: int
    memory: MemoryReport | None
    """Null: nothing was measured."""
    workload: Workload | None
    """The workload that is planned for; null: nothing can be predicted for this GPU or model."""
    workload_source: str | None
    """Where the workload comes from: flags, or the usual lengths."""
    prediction: Prediction | None
    """Times in ms and s, rates in tokens/s, as `headrace plan --json` has them."""


class TokenizeAnswer(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(Struct):
    prompt: str
