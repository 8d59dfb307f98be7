"""How each model family writes its tool calls: the data from which grammars of calls are made.

A parser takes all that a model may write; a syntax is the one way in which its family's chat template writes it. Of the
strings here, white space is optional (and may be any other white space) in the grammar, except before a letter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Pattern(NamedTuple):
    """A part of a call that the model makes up, such as the number in Kimi's ids."""

    regex: str


Written = str | tuple[str | Pattern, ...]
"""Text, or text with parts that the model makes up."""


@dataclass(frozen=True)
class Json:
    """The arguments are a JSON object."""


@dataclass(frozen=True)
class Tagged:
    """Each argument has a tag; strings are written as they are, other values as JSON."""

    before_key: str
    after_key: str
    """What stands between the key and a string."""
    after_value: str
    after_key_json: str | None = None
    """What stands between the key and a value that is not a string, where it tells the two apart."""
    stops: tuple[str, ...] = ()
    """What else, besides the tag that follows it, ends a value or the call for the parser: no string may hold it."""


@dataclass(frozen=True)
class Literals:
    """Arguments as `key=value`, in a syntax of their own for objects, lists and strings."""

    equals: str
    quote: str | None = None
    """What stands on both sides of a string, which has no escapes; None: strings and all else as in Python."""


@dataclass(frozen=True)
class CallSyntax:
    """One way of writing calls: `open`, calls with separators between them, `close`."""

    before_name: Written
    after_name: Written
    after_arguments: Written
    arguments: Json | Tagged | Literals = Json()
    open: str = ""
    separator: str = ""
    close: str = ""
    single: bool = False
    """A turn has one call at most."""
    needs: tuple[str, ...] = ()
    """Special tokens without which the model writes otherwise."""


def _json_call(name: str = "name", arguments: str = "arguments") -> tuple[str, str, str]:
    return f'{{"{name}": "', f'", "{arguments}": ', "}"


def _in_list(open: str, close: str, name: str = "name", arguments: str = "arguments") -> CallSyntax:
    """Calls as objects of one JSON list."""
    return CallSyntax(*_json_call(name, arguments), open=open, separator=", ", close=close)


def _each_in(open: str, close: str, arguments: str = "arguments") -> CallSyntax:
    """Each call as a JSON object within tags of its own."""
    before, middle, after = _json_call(arguments=arguments)
    return CallSyntax(open + before, middle, after + close, separator="\n")


_QWEN_CODER = CallSyntax(
    before_name="<tool_call>\n<function=",
    after_name=">\n",
    after_arguments="</function>\n</tool_call>",
    arguments=Tagged(
        "<parameter=", ">\n", "\n</parameter>\n", stops=("</parameter>", "<parameter=", "</function>", "</tool_call>")
    ),
    separator="\n",
)
_GLM = CallSyntax(
    before_name="<tool_call>",
    after_name="\n",
    after_arguments="</tool_call>",
    arguments=Tagged("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", stops=("<arg_key>", "</tool_call>")),
    separator="\n",
)


def _dsml(section: str) -> CallSyntax:
    return CallSyntax(
        before_name='<｜DSML｜invoke name="',
        after_name='">\n',
        after_arguments="</｜DSML｜invoke>\n",
        arguments=Tagged(
            '<｜DSML｜parameter name="',
            '" string="true">',
            "</｜DSML｜parameter>\n",
            after_key_json='" string="false">',
            stops=("</｜DSML｜invoke>", f"</｜DSML｜{section}>"),
        ),
        open=f"<｜DSML｜{section}>\n",
        close=f"</｜DSML｜{section}>",
    )


SYNTAX: dict[str, tuple[CallSyntax, ...]] = {
    "hermes": (_each_in("<tool_call>\n", "\n</tool_call>"),),
    "llama3_json": (CallSyntax(*_json_call(arguments="parameters"), separator="; "),),
    "pythonic": (CallSyntax("", "(", ")", Literals("="), open="[", separator=", ", close="]"),),
    "olmo3": (
        CallSyntax("", "(", ")", Literals("="), open="<function_calls>", separator="\n", close="</function_calls>"),
    ),
    "lfm2": (
        CallSyntax(
            "", "(", ")", Literals("="), open="<|tool_call_start|>[", separator=", ", close="]<|tool_call_end|>"
        ),
    ),
    "mistral": (
        CallSyntax("[TOOL_CALLS]", "[ARGS]", "", needs=("[TOOL_CALLS]", "[ARGS]")),
        _in_list("[TOOL_CALLS] [", "]"),
    ),
    "qwen3_coder": (_QWEN_CODER,),
    "deepseek_v3": (
        CallSyntax(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            open="<｜tool▁calls▁begin｜>",
            separator="\n",
            close="<｜tool▁calls▁end｜>",
        ),
    ),
    "deepseek_v31": (
        CallSyntax(
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            open="<｜tool▁calls▁begin｜>",
            close="<｜tool▁calls▁end｜>",
        ),
    ),
    "deepseek_v32": (_dsml("function_calls"),),
    "deepseek_v4": (_dsml("tool_calls"),),
    "kimi_k2": (
        CallSyntax(
            "<|tool_call_begin|>functions.",
            (":", Pattern("0|[1-9][0-9]{0,3}"), " <|tool_call_argument_begin|>"),
            "<|tool_call_end|>",
            open="<|tool_calls_section_begin|>",
            close="<|tool_calls_section_end|>",
        ),
    ),
    "glm45": (_GLM,),
    "minimax_m2": (
        CallSyntax(
            before_name='<invoke name="',
            after_name='">\n',
            after_arguments="</invoke>\n",
            arguments=Tagged(
                '<parameter name="', '">', "</parameter>\n", stops=("</invoke>", "</minimax:tool_call>")
            ),
            open="<minimax:tool_call>\n",
            close="</minimax:tool_call>",
        ),
    ),
    "seed_oss": (
        CallSyntax(
            before_name="<seed:tool_call>\n<function=",
            after_name=">\n",
            after_arguments="</function>\n</seed:tool_call>",
            arguments=Tagged("<parameter=", ">", "</parameter>\n", stops=("</function>", "</seed:tool_call>")),
            separator="\n",
        ),
    ),
    "step3": (
        CallSyntax(
            before_name='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
            after_name='">',
            after_arguments="</steptml:invoke><｜tool_call_end｜>",
            arguments=Tagged(
                '<steptml:parameter name="', '">', "</steptml:parameter>", stops=("</steptml:invoke>",)
            ),
            open="<｜tool_calls_begin｜>",
            close="<｜tool_calls_end｜>",
        ),
    ),
    "openai": (
        CallSyntax(
            "<|channel|>commentary to=functions.",
            " <|constrain|>json<|message|>",
            "<|call|>",
            separator="<|start|>assistant",
        ),
    ),
    "granite": (_in_list("<|tool_call|>[", "]"),),
    "granite-20b-fc": (_each_in("<function_call> ", ""),),
    "phi4_mini_json": (_in_list("functools[", "]"),),
    "internlm": (
        CallSyntax(
            '<|action_start|><|plugin|>\n{"name": "', '", "parameters": ', "}<|action_end|>", single=True
        ),
    ),
    "jamba": (_in_list("<tool_calls>[\n", "\n]</tool_calls>"),),
    "xlam": (_in_list("[", "]"),),
    "ernie45": (_each_in("<tool_call>\n", "\n</tool_call>\n"),),
    "hunyuan_a13b": (_in_list("<tool_calls>[", "]</tool_calls>"),),
    "gemma4": (CallSyntax("<|tool_call>call:", "{", "}<tool_call|>", Literals(":", '<|"|>')),),
    "functiongemma": (
        CallSyntax("<start_function_call>call:", "{", "}<end_function_call>", Literals(":", "<escape>")),
    ),
    "cohere_command3": (
        CallSyntax(
            ('{"tool_call_id": "', Pattern("0|[1-9][0-9]{0,3}"), '", "tool_name": "'),
            '", "parameters": ',
            "}",
            open="<|START_ACTION|>[\n",
            separator=",\n",
            close="\n]<|END_ACTION|>",
        ),
    ),
    "longcat": (_each_in("<longcat_tool_call>\n", "\n</longcat_tool_call>"),),
    "gigachat3": (CallSyntax(*_json_call(), open="<|function_call|>", single=True),),
    "minimax": (CallSyntax(*_json_call(), open="<tool_calls>\n", separator="\n", close="\n</tool_calls>"),),
    "apertus": (CallSyntax('{"', '": ', "}", open="<|tools_prefix|>[", separator=", ", close="]<|tools_suffix|>"),),
}
"""By vLLM's name of the parser; of several the first whose special tokens the tokenizer has."""

SYNTAX |= {
    "granite4": SYNTAX["hermes"],
    "llama4_pythonic": SYNTAX["pythonic"],
    "qwen3_xml": SYNTAX["qwen3_coder"],
    "glm47": SYNTAX["glm45"],
    "step3p5": SYNTAX["qwen3_coder"],
}
