"""Says what a parser makes of a text, without the model: /parse_function_call and /separate_reasoning."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import RequestError
from headrace.parsers.output_parser import Answer, parse
from headrace.parsers.table import REASONING_FORMATS, TOOL_FORMATS
from headrace.server.answers import ParsedCall, ParseFunctionCallAnswer, SeparateReasoningAnswer
from headrace.server.generation import PARSED_INLINE_CHARS
from headrace.server.output_formats import named_format
from headrace.server.protocol import ParseFunctionCallRequest, SeparateReasoningRequest
from headrace.server.replies import json_response
from headrace.server.requests import receive
from headrace.server.serving import Serving
from headrace.server.tool_use import function_tools

MAX_TEXT_CHARS = 2**20
"""Longest text. An answer of a model is much shorter."""


async def parse_function_call(serving: Serving, http: Request) -> Response:
    """Answer with the calls in a text, and the text around them."""
    request = (await receive(serving, http, ParseFunctionCallRequest)).fields
    form = named_format("tool_call_parser", request.tool_call_parser, TOOL_FORMATS, serving.formats.tool)
    tools = function_tools(request.tools)
    answer = await _parsed(serving, http, request.text, lambda: parse(request.text, form, None, tools))
    calls = [ParsedCall(call.name, call.arguments) for call in answer.calls]
    return json_response(ParseFunctionCallAnswer(answer.content or "", calls))


async def separate_reasoning(serving: Serving, http: Request) -> Response:
    """Answer with the reasoning in a text, and the rest."""
    request = (await receive(serving, http, SeparateReasoningRequest)).fields
    form = named_format("reasoning_parser", request.reasoning_parser, REASONING_FORMATS, serving.formats.reasoning)
    answer = await _parsed(serving, http, request.text, lambda: parse(request.text, None, form))
    return json_response(SeparateReasoningAnswer(answer.reasoning or "", answer.content or ""))


async def _parsed(serving: Serving, http: Request, text: str, work: Callable[[], Answer]) -> Answer:
    if len(text) > MAX_TEXT_CHARS:
        raise RequestError(f"text may have at most {MAX_TEXT_CHARS} characters, got {len(text)}", "text")
    return await serving.work(http, len(text), work, PARSED_INLINE_CHARS)
