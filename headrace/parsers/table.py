"""Every format by name: vLLM's names, and SGLang's where they differ."""

from __future__ import annotations

from headrace.parsers.formats import ReasoningFormat, ToolFormat, Written
from headrace.parsers.json_calls import JsonCalls
from headrace.parsers.named_calls import NamedCalls

_OBJECT = Written(before='{"name": "', middle='", "arguments": ', after="}")

TOOL_FORMATS: dict[str, ToolFormat] = {
    format.name: format
    for format in (
        ToolFormat("hermes", JsonCalls(closers=("</tool_call>",)), openers=("<tool_call>",),
                   written=Written('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between="\n")),
        ToolFormat("llama3_json", JsonCalls(argument_keys=("parameters", "arguments"), bare=True),
                   openers=("<|python_tag|>",), at_start=("{",),
                   written=Written('{"name": "', '", "parameters": ', "}", between="; ")),
        ToolFormat("deepseek_v31", NamedCalls(separators=("<｜tool▁sep｜>",), begin=("<｜tool▁call▁begin｜>",),
                                              end=("<｜tool▁call▁end｜>",), closers=("<｜tool▁calls▁end｜>",)),
                   openers=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")),
    )
}  # fmt: skip

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    format.name: format
    for format in (
        ReasoningFormat("deepseek_r1", ("<think>",), ("</think>",)),
        ReasoningFormat("qwen3", ("<think>",), ("</think>",), unmarked="undecided", call_openers=("<tool_call>",),
                        switch="enable_thinking"),
    )
}  # fmt: skip
