"""Says how each model family writes its tool calls, for the grammars of calls.

A parser takes all that a model may write; a syntax is the one way in which its family's chat template writes it. Of the
strings here, white space is optional (and may be any other white space) in the grammar, except before a letter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


class Pattern(NamedTuple):
    """Stands for a part of a call that the model makes up, such as the number in Kimi's ids."""

    regex: str


class Maybe(NamedTuple):
    """Stands for a part of a call that may be left out."""

    parts: tuple[str | Pattern, ...]


Markup = str | tuple[str | Pattern | Maybe, ...]
"""Text, or text with parts that the model makes up."""


@dataclass(frozen=True)
class Json:
    """The arguments are a JSON object."""


@dataclass(frozen=True)
class Tagged:
    """Each argument has a tag; strings are written as they are, other values as JSON."""

    before: str
    """What stands before the key; a string that holds it would be read as two."""
    middle: str
    """What stands between the key and a string."""
    after: str
    """What stands behind a value; `{key}` in it is the key again."""
    middle_json: str | None = None
    """What stands between the key and a value that is not a string, where it tells the two apart."""


@dataclass(frozen=True)
class Literals:
    """Arguments are written as `key=value`, in a syntax of their own for objects, lists and strings."""

    equals: str
    quote: str | None = None
    """What stands on both sides of a string, which has no escapes; None: strings and all else as in Python."""


@dataclass(frozen=True)
class Written:
    """Describes one way of writing calls: `begin`, calls joined by `between`, `end`."""

    before: Markup
    middle: Markup
    after: Markup
    arguments: Json | Tagged | Literals = Json()
    begin: Markup = ""
    between: Markup = ""
    end: Markup = ""
    single: bool = False
    """A turn has one call at most."""
    mark: str = ""
    """May stand before the calls."""
    needs: tuple[str, ...] = ()
    """Special tokens without which the model writes calls as `instead` says."""
    instead: Written | None = None
    """Another way, for a tokenizer without these tokens; of answers in channels, another one that models use too."""


def _json_call(arguments: str = "arguments") -> tuple[str, str, str]:
    return '{"name": "', f'", "{arguments}": ', "}"


def _in_list(open: str, close: str) -> Written:
    """Calls as objects of one JSON list."""
    return Written(*_json_call(), begin=open, between=", ", end=close)


def _each_in(open: str, close: str) -> Written:
    """Each call as a JSON object within tags of its own."""
    before, middle, after = _json_call()
    return Written(open + before, middle, after + close, between="\n")


def _python(begin: str, end: Markup, between: Markup = ", ", mark: str = "") -> Written:
    """Calls as Python writes them."""
    return Written("", "(", ")", Literals("="), begin=begin, between=between, end=end, mark=mark)


def _dsml(section: str) -> Written:
    return Written(
        '<｜DSML｜invoke name="', '">\n', "</｜DSML｜invoke>\n",
        Tagged('<｜DSML｜parameter name="', '" string="true">', "</｜DSML｜parameter>\n", '" string="false">'),
        begin=f"<｜DSML｜{section}>\n", end=f"</｜DSML｜{section}>",
    )  # fmt: skip


def _hy(suffix: str, instead: Written | None = None) -> Written:
    return Written(
        f"<tool_call{suffix}>", f"<tool_sep{suffix}>\n", f"</tool_call{suffix}>\n",
        Tagged(f"<arg_key{suffix}>", f"</arg_key{suffix}>\n<arg_value{suffix}>", f"</arg_value{suffix}>\n"),
        begin=f"<tool_calls{suffix}>\n", end=f"</tool_calls{suffix}>",
        needs=(f"<tool_calls{suffix}>",) if suffix else (), instead=instead,
    )  # fmt: skip


WRITTEN: dict[str, Written] = {
    "hermes": _each_in("<tool_call>\n", "\n</tool_call>"),
    "llama3_json": Written(*_json_call(arguments="parameters"), between="; ", mark="<|python_tag|>"),
    "pythonic": _python("[", "]"),
    "llama4_pythonic": _python("[", ("]", Maybe(("<|python_end|>",))), mark="<|python_start|>"),
    "olmo3": _python("<function_calls>", "</function_calls>", between=(Pattern("[ ]{0,4}\\n"),)),
    "lfm2": _python("<|tool_call_start|>[", "]<|tool_call_end|>"),
    "mistral": Written("[TOOL_CALLS]", (Maybe(("[CALL_ID]", Pattern("[A-Za-z0-9]{9}"))), "[ARGS]"), "",
                       needs=("[TOOL_CALLS]", "[ARGS]"), instead=_in_list("[TOOL_CALLS] [", "]")),
    "qwen3_coder": Written("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>",
                           Tagged("<parameter=", ">\n", "\n</parameter>\n"), between="\n"),
    "deepseek_v3": Written("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>",
                           begin="<｜tool▁calls▁begin｜>", between="\n", end="<｜tool▁calls▁end｜>"),
    "deepseek_v31": Written("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
                            begin="<｜tool▁calls▁begin｜>", end="<｜tool▁calls▁end｜>"),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "kimi_k2": Written("<|tool_call_begin|>functions.",
                       (":", Pattern("0|[1-9][0-9]{0,3}"), " <|tool_call_argument_begin|>"), "<|tool_call_end|>",
                       begin="<|tool_calls_section_begin|>", end="<|tool_calls_section_end|>"),
    "glm45": Written("<tool_call>", "\n", "</tool_call>",
                     Tagged("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"), between="\n"),
    "minimax_m2": Written('<invoke name="', '">\n', "</invoke>\n", Tagged('<parameter name="', '">', "</parameter>\n"),
                          begin="<minimax:tool_call>\n", end="</minimax:tool_call>"),
    "minimax_m3": Written(']<]minimax[>[<invoke name="', '">', "]<]minimax[>[</invoke>\n",
                          Tagged("]<]minimax[>[<", ">", "]<]minimax[>[</{key}>"),
                          begin="]<]minimax[>[<tool_call>\n", end="]<]minimax[>[</tool_call>"),
    "hy_v3": _hy(":opensource", instead=_hy("")),
    "minicpm5": Written('<function name="', '">', "</function>", Tagged('<param name="', '">', "</param>"),
                        between="\n"),
    "seed_oss": Written("<seed:tool_call>\n<function=", ">\n", "</function>\n</seed:tool_call>",
                        Tagged("<parameter=", ">", "</parameter>\n"), between="\n"),
    "step3": Written('<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="', '">',
                     "</steptml:invoke><｜tool_call_end｜>",
                     Tagged('<steptml:parameter name="', '">', "</steptml:parameter>"),
                     begin="<｜tool_calls_begin｜>", end="<｜tool_calls_end｜>"),
    "openai": Written("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>",
                      between="<|start|>assistant", instead=Written(
                          " to=functions.",
                          ("<|channel|>commentary", Pattern(" "), Maybe(("<|constrain|>",)), "json<|message|>"),
                          "<|call|>", between="<|start|>assistant")),
    "granite": _in_list("<|tool_call|> [", "]"),
    "granite-20b-fc": _each_in("<function_call> ", ""),
    "phi4_mini_json": replace(_in_list("<|tool_call|>[", "]<|/tool_call|>"),
                              needs=("<|tool_call|>", "<|/tool_call|>"), instead=_in_list("functools[", "]")),
    "internlm": Written('<|action_start|><|plugin|>\n{"name": "', '", "parameters": ', "}<|action_end|>", single=True),
    "jamba": _in_list("<tool_calls>[\n", "\n]</tool_calls>"),
    "xlam": _in_list("[", "]"),
    "ernie45": _each_in("<tool_call>\n", "\n</tool_call>\n"),
    "hunyuan_a13b": _in_list("<tool_calls>[", "]</tool_calls>"),
    "gemma4": Written("<|tool_call>call:", "{", "}<tool_call|>", Literals(":", '<|"|>')),
    "functiongemma": Written("<start_function_call>call:", "{", "}<end_function_call>", Literals(":", "<escape>")),
    "cohere_command3": Written(('{"tool_call_id": "', Pattern("0|[1-9][0-9]{0,3}"), '", "tool_name": "'),
                               '", "parameters": ', "}", begin="<|START_ACTION|>[\n", between=",\n",
                               end="\n]<|END_ACTION|>"),
    "longcat": _each_in("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
    "gigachat3": Written(*_json_call(), begin="<|function_call|>", single=True, needs=("<|function_call|>",),
                         instead=Written(*_json_call(), begin="<|message_sep|>\n\nfunction call<|role_sep|>\n",
                                         single=True)),
    "minimax": Written(*_json_call(), begin="<tool_calls>\n", between="\n", end="\n</tool_calls>"),
    "apertus": Written('{"', '": ', "}", begin="<|tools_prefix|>[", between=", ", end="]<|tools_suffix|>"),
}  # fmt: skip
"""By the name of the format."""
