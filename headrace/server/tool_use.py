"""Reads what a chat request says about tools: which there are, which may be called, and whether one must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.errors import RequestError, quoted
from headrace.parsers.tools import FunctionTool
from headrace.server.body import check_depth
from headrace.server.protocol import ChatCompletionRequest, Tool

MAX_TOOLS = 1024
MAX_TOOL_NAME_CHARS = 256
INSTEAD_OF_CUSTOM = (
    ": models write calls of functions; give one with a string parameter (its `pattern` holds it to a regular "
    "expression, with strict: true)"
)
"""What may be done without a tool of type `custom`, whose input is free text or follows a grammar."""
CHOICES = "'auto', 'required', 'none', or {'type': 'function', 'function': {'name': ...}}"


@dataclass(frozen=True)
class ToolUse:
    """Holds the tools that the model is shown and may call."""

    tools: tuple[FunctionTool, ...]
    shown: list[dict[str, Any]]
    """The tools as the chat template takes them."""
    forced: bool = False
    """The model must call at least one."""
    named: str | None = None
    """The one that it must call, and no other."""
    parallel: bool = True
    """It may call several at once."""


def read_tool_use(request: ChatCompletionRequest) -> ToolUse | None:
    """Return how a request uses tools; None if it has none, or forbids calls. Raises RequestError for a tool that is
    not a function, or a choice that is not possible."""
    shown = template_tools(request.tools)
    choice = request.tool_choice
    if choice is not None and not isinstance(choice, dict) and choice not in ("auto", "required", "none"):
        raise RequestError(f"tool_choice must be {CHOICES}, got {quoted(choice)}", "tool_choice")
    if choice == "none" or (not shown and choice in (None, "auto")):
        return None
    if not shown:
        raise RequestError(f"tool_choice is {quoted(choice)}, but the request has no tools", "tool_choice")
    forced, named = choice == "required", None
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        shown, forced = _allowed(choice, shown)
    elif isinstance(choice, dict):
        named = _name_in(choice, "tool_choice")
        if named not in _names(shown):
            raise RequestError(f"tool_choice names {quoted(named)}, {_but(shown)}", "tool_choice")
    tools = tuple(_function(tool["function"]) for tool in shown)
    return ToolUse(tools, shown, forced or named is not None, named, request.parallel_tool_calls is not False)


def may_hold_calls(request: ChatCompletionRequest) -> bool:
    """Return whether a grammar may have to hold a request's calls, which takes time to make."""
    if request.tool_choice not in (None, "auto", "none"):
        return True
    return any(tool.function is not None and tool.function.get("strict") is True for tool in request.tools or ())


def template_tools(tools: list[Tool] | None) -> list[dict[str, Any]]:
    """Return the tools of a request as chat templates take them. Raises RequestError for one that is no function."""
    given = tools or []
    if len(given) > MAX_TOOLS:
        raise RequestError(f"tools may hold at most {MAX_TOOLS} entries, got {len(given)}", "tools")
    return [{"type": "function", "function": _checked(tool, f"tools[{index}]")} for index, tool in enumerate(given)]


def _checked(tool: Tool, where: str) -> dict[str, Any]:
    """Return the function that a tool is. Raises RequestError for one that is none, or not as it must be."""
    if tool.type != "function":
        hint = INSTEAD_OF_CUSTOM if tool.type == "custom" else ""
        raise RequestError(f"{where}.type must be 'function', got {quoted(tool.type)}{hint}", "tools")
    function = tool.function
    if function is None:
        raise RequestError(f"{where}.function is required, with the function's name and parameters in it", "tools")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.function.name is required", "tools")
    if len(name) > MAX_TOOL_NAME_CHARS:
        raise RequestError(f"{where}.function.name may have at most {MAX_TOOL_NAME_CHARS} characters", "tools")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(
            f"{where}.function.parameters must be a JSON Schema (an object), got {quoted(parameters)}", "tools"
        )
    if not isinstance(function.get("strict"), bool | None):
        raise RequestError(f"{where}.function.strict must be true or false, got {quoted(function['strict'])}", "tools")
    check_depth("tools", function)
    return function


def function_tools(tools: list[Tool] | None) -> tuple[FunctionTool, ...]:
    """Return the tools of a request as parsers take them. Raises RequestError for one that is no function."""
    return tuple(_function(tool["function"]) for tool in template_tools(tools))


def _function(given: dict[str, Any]) -> FunctionTool:
    description = given.get("description")
    return FunctionTool(
        given["name"],
        given.get("parameters") or {},
        given.get("strict") is True,
        description if isinstance(description, str) else "",
    )


def _allowed(choice: dict[str, Any], shown: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """Return the tools to which an `allowed_tools` choice restricts a request, and whether one must be called. The
    model is not shown the others, so that it calls none of them."""
    where = "tool_choice.allowed_tools"
    given = choice.get("allowed_tools", choice)  # /v1/responses has its fields beside the type
    mode = given.get("mode", "auto") if isinstance(given, dict) else None
    if mode not in ("auto", "required"):
        raise RequestError(f"{where}.mode must be 'auto' or 'required', got {quoted(mode)}", "tool_choice")
    allowed = given.get("tools")
    if not isinstance(allowed, list) or not allowed:
        raise RequestError(f"{where}.tools must be a list of tools, got {quoted(allowed)}", "tool_choice")
    names = {_name_in(tool, f"{where}.tools[{index}]") for index, tool in enumerate(allowed)}
    if missing := sorted(names - set(_names(shown))):
        raise RequestError(f"{where}.tools names {quoted(missing[0])}, {_but(shown)}", "tool_choice")
    return [tool for tool in shown if tool["function"]["name"] in names], mode == "required"


def _name_in(choice: Any, where: str) -> str:
    """Return the name in a choice of one function: below `function`, or beside the type as /v1/responses has it."""
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise RequestError(f"{where} must be {{'type': 'function', ...}}, got {quoted(choice)}", "tool_choice")
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError(f"{where}.function.name must be the name of a tool, got {quoted(name)}", "tool_choice")
    return name


def _names(shown: list[dict[str, Any]]) -> list[str]:
    return [tool["function"]["name"] for tool in shown]


def _but(shown: list[dict[str, Any]]) -> str:
    names = _names(shown)
    more = ", ..." if len(names) > 8 else ""
    return f"but the request has the tools {', '.join(map(quoted, names[:8]))}{more}"
