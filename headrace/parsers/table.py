"""Lists every format by name: vLLM's names, and SGLang's where they differ."""

from __future__ import annotations

from dataclasses import replace

from headrace.parsers.formats import ByOpener, ReasoningFormat, ToolFormat
from headrace.parsers.gemma import GemmaCalls
from headrace.parsers.harmony import HarmonyCalls
from headrace.parsers.json_calls import JsonCalls
from headrace.parsers.named_calls import NamedCalls
from headrace.parsers.pythonic import PythonicCalls
from headrace.parsers.tagged import TaggedCalls

_THINK, _END_THINK = ("<think>",), ("</think>",)

_JSON = (
    ToolFormat("hermes", JsonCalls(closers=("</tool_call>",)), ("<tool_call>",)),
    ToolFormat("llama3_json", JsonCalls(argument_keys=("parameters", "arguments"),
                                        closers=("<|eom_id|>", "<|eot_id|>")),
               ("<|python_tag|>", "{"), bare=("{",)),
    ToolFormat("granite", JsonCalls(closers=("</tool_call>",)), ("<|tool_call|>", "<tool_call>"), bare=("[",)),
    ToolFormat("granite-20b-fc", JsonCalls(), ("<function_call>",)),
    ToolFormat("phi4_mini_json", JsonCalls(closers=("<|/tool_call|>",)), ("functools[", "<|tool_call|>")),
    ToolFormat("internlm", JsonCalls(argument_keys=("parameters", "arguments"), before=("<|plugin|>",),
                                     closers=("<|action_end|>",)), ("<|action_start|>",)),
    ToolFormat("jamba", JsonCalls(closers=("</tool_calls>",)), ("<tool_calls>",)),
    ToolFormat("minimax", JsonCalls(closers=("</tool_calls>",)), ("<tool_calls>",)),
    ToolFormat("hunyuan_a13b", JsonCalls(closers=("</tool_calls>",)), ("<tool_calls>",), silent=("助手：",)),
    ToolFormat("xlam", JsonCalls(before=("```json", "```"), closers=("</tool_call>", "```"),
                                 bare=("[", "{", "```json", "```")),
               ("[TOOL_CALLS]", "<tool_call>", "```json", "```"), bare=("[", "{"), beginnings=_END_THINK),
    ToolFormat("ernie45", JsonCalls(closers=("</tool_call>",)), ("<tool_call>",),
               silent=("<response>\n", "<response>", "\n</response>\n", "</response>")),
    ToolFormat("longcat", JsonCalls(closers=("</longcat_tool_call>",)), ("<longcat_tool_call>",)),
    ToolFormat("gigachat3", JsonCalls(closers=("</s>", "<|message_sep|>")),
               ("<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>\n", "function call<|role_sep|>\n"),
               silent=("</s>",)),
    ToolFormat("apertus", JsonCalls(name_is_key=True, closers=("<|tools_suffix|>",)), ("<|tools_prefix|>",)),
    ToolFormat("cohere_command3", JsonCalls(name_keys=("tool_name", "name"), argument_keys=("parameters", "arguments"),
                                            closers=("<|END_ACTION|>",)), ("<|START_ACTION|>",),
               silent=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")),
)  # fmt: skip

_NAMED = (
    ToolFormat("mistral", NamedCalls(separators=("[ARGS]", "{"), id_separator="[CALL_ID]", or_json=JsonCalls()),
               ("[TOOL_CALLS]",), ids="mistral", silent=("[/TOOL_CALLS]",)),
    ToolFormat("deepseek_v3", NamedCalls(
                   separators=("\n", "{"), begin=("<｜tool▁call▁begin｜>",), prefix=("function<｜tool▁sep｜>",),
                   fences=("```json", "```"), end=("<｜tool▁call▁end｜>",), closers=("<｜tool▁calls▁end｜>",)),
               ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")),
    ToolFormat("deepseek_v31", NamedCalls(
                   separators=("<｜tool▁sep｜>",), begin=("<｜tool▁call▁begin｜>",), fences=("```json", "```"),
                   end=("<｜tool▁call▁end｜>",), closers=("<｜tool▁calls▁end｜>",)),
               ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")),
    ToolFormat("kimi_k2", NamedCalls(
                   separators=("<|tool_call_argument_begin|>",), begin=("<|tool_call_begin|>",),
                   end=("<|tool_call_end|>",), closers=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
                   numbered=True),
               ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>"), ids="kimi"),
)  # fmt: skip

_QWEN_TAGS = TaggedCalls(
    "<function=", "</function>", "<parameter=", "</parameter>", section_close="</tool_call>", newlines=True
)
_GLM_TAGS = TaggedCalls(
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_value>",
    name_close=("\n", "\\n", "<arg_key>", "</tool_call>"),
    key_close="</arg_key>",
    value_open="<arg_value>",
    guess=True,
)
_DSML_TAGS = TaggedCalls(
    "<｜DSML｜invoke",
    "</｜DSML｜invoke>",
    "<｜DSML｜parameter",
    "</｜DSML｜parameter>",
    section_close="</｜DSML｜function_calls>",
    in_attribute=True,
)


def _hy_tags(suffix: str) -> tuple[str, TaggedCalls]:
    """The opener and the syntax of Hy3, whose checkpoints write a suffix in all of their tags, or none."""
    return f"<tool_calls{suffix}>", TaggedCalls(
        f"<tool_call{suffix}>",
        f"</tool_call{suffix}>",
        f"<arg_key{suffix}>",
        f"</arg_value{suffix}>",
        name_close=(f"<tool_sep{suffix}>", f"<arg_key{suffix}>", f"</tool_call{suffix}>"),
        key_close=f"</arg_key{suffix}>",
        value_open=f"<arg_value{suffix}>",
        section_close=f"</tool_calls{suffix}>",
    )


_M3 = "]<]minimax[>["
_HY_WAYS = (_hy_tags(""), _hy_tags(":opensource"))
_TAGGED = (
    ToolFormat("qwen3_coder", _QWEN_TAGS, ("<tool_call>", "<function=")),
    ToolFormat("seed_oss", replace(_QWEN_TAGS, section_close="</seed:tool_call>"),
               ("<seed:tool_call>", "<function=")),
    ToolFormat("glm45", _GLM_TAGS, ("<tool_call>",)),
    ToolFormat("hy_v3", ByOpener(_HY_WAYS), tuple(opener for opener, _ in _HY_WAYS)),
    ToolFormat("minimax_m2", TaggedCalls("<invoke", "</invoke>", "<parameter", "</parameter>",
                                         section_close="</minimax:tool_call>", in_attribute=True),
               ("<minimax:tool_call>",)),
    ToolFormat("deepseek_v32", _DSML_TAGS, ("<｜DSML｜function_calls>",)),
    ToolFormat("deepseek_v4", replace(_DSML_TAGS, section_close="</｜DSML｜tool_calls>"), ("<｜DSML｜tool_calls>",)),
    ToolFormat("step3", TaggedCalls("<steptml:invoke", "</steptml:invoke>", "<steptml:parameter",
                                    "</steptml:parameter>", section_close="<｜tool_calls_end｜>", in_attribute=True,
                                    lead="function<｜tool_sep｜>"),
               ("<｜tool_calls_begin｜>",), keeps_text_after=True),
    # SGLang and vLLM's stream keep the text around calls, which vLLM's whole answer drops.
    ToolFormat("minicpm5", TaggedCalls("<function", "</function>", "<param", "</param>", in_attribute=True, guess=True,
                                       cdata=True, checked=True), ("<function",), keeps_text_after=True),
    ToolFormat("minimax_m3", TaggedCalls(f"{_M3}<invoke", f"{_M3}</invoke>", f"{_M3}<", "", in_attribute=True,
                                         section_close=f"{_M3}</tool_call>", element_mark=_M3),
               (f"{_M3}<tool_call>", f"{_M3}<invoke"), silent=(f"{_M3}</tool_call>",)),
)  # fmt: skip

_PYTHONIC = (
    ToolFormat("pythonic", PythonicCalls(closers=("<|python_end|>",)), ("[", "<|python_start|>"),
               silent=("<|python_end|>",), keeps_text_after=True),
    ToolFormat("llama4_pythonic", PythonicCalls(closers=("<|python_end|>",)), ("<|python_start|>", "["),
               silent=("<|python_end|>", "<|eom|>", "<|eot|>"), keeps_text_after=True),
    ToolFormat("olmo3", PythonicCalls(closers=("</function_calls>",)), ("<function_calls>",)),
    ToolFormat("lfm2", PythonicCalls(closers=("<|tool_call_end|>",),
                                     or_json=JsonCalls(closers=("<|tool_call_end|>",))),
               ("<|tool_call_start|>",), silent=("<|tool_call_end|>",), keeps_text_after=True),
)  # fmt: skip

_OTHER = (
    ToolFormat("gemma4", GemmaCalls('<|"|>', ("<tool_call|>",), thought=("<|channel>", "<channel|>")),
               ("<|tool_call>", "<|channel>")),
    ToolFormat("functiongemma", GemmaCalls("<escape>", ("<end_function_call>",), guess=True),
               ("<start_function_call>",)),
    ToolFormat("openai", HarmonyCalls(), (), whole_answer=True),
)  # fmt: skip

_COHERE = ReasoningFormat(
    "cohere_command3",
    ("<|START_THINKING|>",),
    ("<|END_THINKING|>",),
    unmarked="content",
    anywhere=True,
    silent=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)
_REASONING = (
    ReasoningFormat("openai_gptoss", (), (), whole_answer=HarmonyCalls(calls=False)),
    ReasoningFormat("deepseek_r1", _THINK, _END_THINK),
    ReasoningFormat("deepseek_v3", _THINK, _END_THINK, unmarked="content"),
    ReasoningFormat("qwen3", _THINK, _END_THINK, unmarked="undecided", call_openers=("<tool_call>",),
                    switch="enable_thinking"),
    ReasoningFormat("glm45", _THINK, _END_THINK, unmarked="undecided", call_openers=("<tool_call>",),
                    switch="enable_thinking"),
    ReasoningFormat("holo2", _THINK, _END_THINK),
    ReasoningFormat("kimi_k2", _THINK, _END_THINK,
                    call_openers=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")),
    ReasoningFormat("kimi", ("◁think▷",), ("◁/think▷",), unmarked="undecided"),
    ReasoningFormat("minimax_m2", _THINK, _END_THINK),
    ReasoningFormat("minimax_m3", ("<mm:think>",), ("</mm:think>",), unmarked="content", anywhere=True,
                    silent=("</mm:think>",)),
    ReasoningFormat("minimax_m2_append_think", _THINK, _END_THINK, as_content=True),
    ReasoningFormat("granite", ("Here is my thought process:", "Here's my thought process:", "<think>"),
                    ("Here is my response:", "Here's my response:", "</think>"), unmarked="content",
                    silent=("<response>", "</response>")),
    ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",), unmarked="content", anywhere=True,
                    silent=("[/THINK]",)),
    ReasoningFormat("olmo3", _THINK, _END_THINK, unmarked="undecided"),
    ReasoningFormat("seed_oss", ("<seed:think>",), ("</seed:think>",)),
    ReasoningFormat("step3", _THINK, _END_THINK),
    ReasoningFormat("step3p5", _THINK, ("</think>", "\n</think>", "</think>\n", "\n</think>\n")),
    ReasoningFormat("hunyuan_a13b", ("<think>\n", "<think>"),
                    ("\n</think>\n<answer>\n", "\n</think>\n", "</think>"), unmarked="content",
                    silent=("<answer>\n", "<answer>", "\n</answer>", "</answer>")),
    ReasoningFormat("hy_v3", ("<think>", "<think:opensource>"), ("</think>", "</think:opensource>"),
                    unmarked="undecided"),
    ReasoningFormat("ernie45", _THINK, ("\n</think>\n\n", "</think>", "\n</think>"),
                    silent=("<response>\n", "<response>", "\n</response>\n", "</response>")),
    _COHERE,
    replace(_COHERE, name="cohere_command4", unmarked="undecided"),
    ReasoningFormat("nemotron_v3", _THINK, _END_THINK, unmarked="undecided", unclosed="content"),
    ReasoningFormat("gemma4", ("<|channel>thought\n", "<|channel>"), ("<channel|>",), unmarked="undecided",
                    anywhere=True),
)  # fmt: skip

_TOOL_ALIASES = {
    "granite4": "hermes", "qwen": "hermes", "qwen25": "hermes", "qwen3": "hermes", "trinity": "hermes",
    "llama4_json": "llama3_json", "llama3": "llama3_json", "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31",
    "deepseekv3.1": "deepseek_v31", "hunyuan": "hy_v3", "interns1": "internlm", "apertus2509": "apertus",
    "deepseekv32": "deepseek_v32", "deepseekv4": "deepseek_v4", "glm": "glm45", "gpt-oss": "openai",
    "mimo": "qwen3_coder", "minicpm5xml": "minicpm5", "minimax-m2": "minimax_m2", "minimax-m3": "minimax_m3",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder", "glm47": "glm45", "poolside_v1": "glm45", "cohere_command4": "cohere_command3",
}  # fmt: skip
_REASONING_ALIASES = {
    "deepseek-r1": "deepseek_r1", "deepseek-v3": "deepseek_v3", "deepseek_v4": "deepseek_v3",
    "deepseek-v4": "deepseek_v3", "hunyuan": "hy_v3", "interns1": "qwen3", "mimo": "qwen3",
    "qwen3-thinking": "deepseek_r1", "minimax": "minimax_m2", "minimax-append-think": "minimax_m2_append_think",
    "minimax-m3": "minimax_m3",
    "nemotron_3": "nemotron_v3", "gpt-oss": "openai_gptoss", "poolside_v1": "deepseek_v3",
}  # fmt: skip

_TOOLS = (*_JSON, *_NAMED, *_TAGGED, *_PYTHONIC, *_OTHER)
TOOL_FORMATS: dict[str, ToolFormat] = {format.name: format for format in _TOOLS}
"""By every name that `--tool-call-parser` takes."""
TOOL_FORMATS |= {alias: TOOL_FORMATS[name] for alias, name in _TOOL_ALIASES.items()}
REASONING_FORMATS: dict[str, ReasoningFormat] = {format.name: format for format in _REASONING}
"""By every name that `--reasoning-parser` takes."""
REASONING_FORMATS |= {alias: REASONING_FORMATS[name] for alias, name in _REASONING_ALIASES.items()}
