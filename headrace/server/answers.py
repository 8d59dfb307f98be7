"""Defines the shapes of answers: OpenAI's, with vLLM's extra fields, and those of other routes."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from headrace.planner.predict import Prediction, Workload
from headrace.planner.record import Decision
from headrace.planner.served import MemoryReport
from headrace.request import Logprob


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
