"""Chooses the formats of a model by what its chat template writes, and by its family where several write alike."""

from __future__ import annotations

_TOOL_MARKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("｜DSML｜", "｜DSML｜tool_calls"), "deepseek_v4"),
    (("｜DSML｜",), "deepseek_v32"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|channel|>", "<|start|>"), "openai"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_call>",), "gemma4"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("]<]minimax[>[",), "minimax_m3"),
    (("<tool_sep",), "hy_v3"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<steptml:invoke",), "step3"),
    (("<longcat_tool_call>",), "longcat"),
    (("<|START_ACTION|>",), "cohere_command3"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|action_start|>",), "internlm"),
    (("<|tools_prefix|>",), "apertus"),
    (("<function_calls>",), "olmo3"),
    (("<tool_call>{function-name}\\n<arg_key>",), "glm45"),
    (("<tool_call>{function-name}\n<arg_key>",), "glm45"),
    (("<arg_key>",), "glm47"),
    (("<function=",), "qwen3_coder"),
    (('<function name="', '<param name="'), "minicpm5"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|function_call|>",), "gigachat3"),
    (("function call<|role_sep|>",), "gigachat3"),
    (("functools",), "phi4_mini_json"),
    (("<|tool|>",), "phi4_mini_json"),
    (("<function_call>",), "granite-20b-fc"),
    (("<tool_calls>",), "jamba"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), "hermes"),
    (("<|header_start|>", "tools"), "llama4_pythonic"),
    (("[func_name1(",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (("<|start_header_id|>", '"parameters"'), "llama3_json"),
)
"""What a template has of a format's markup, every string of a row; the first row that fits."""
_TOOLS_OF_FAMILY = {
    "ernie4_5": "ernie45", "ernie4_5_moe": "ernie45", "granitemoehybrid": "granite4", "hunyuan_v1_moe": "hunyuan_a13b",
    "hunyuan_v1_dense": "hunyuan_a13b", "minimax": "minimax", "minimax_text_01": "minimax", "step3p5": "step3p5",
}  # fmt: skip
"""Families whose markup is also another format's."""
_REASONING_MARKS: tuple[tuple[str, str], ...] = (
    ("<|channel|>analysis", "openai_gptoss"),
    ("[THINK]", "mistral"),
    ("<seed:think>", "seed_oss"),
    ("<mm:think>", "minimax_m3"),
    ("<tool_sep", "hy_v3"),
    ("◁think▷", "kimi"),
    ("<|START_TEXT|>", "cohere_command4"),
    ("<|START_THINKING|>", "cohere_command3"),
    ("<|channel>", "gemma4"),
    ("Here is my thought process", "granite"),
)
_THINKERS = {
    "deepseek_v3": "deepseek_r1", "deepseek_v32": "deepseek_v3", "deepseek_v4": "deepseek_v3", "ernie4_5": "ernie45",
    "ernie4_5_moe": "ernie45", "glm4_moe": "glm45", "glm4_moe_lite": "glm45", "glm_moe_dsa": "glm45",
    "granite": "granite", "granitemoehybrid": "granite", "hunyuan_v1_dense": "hunyuan_a13b",
    "hunyuan_v1_moe": "hunyuan_a13b", "kimi_k2": "kimi_k2", "kimi_linear": "kimi_k2", "minimax_m2": "minimax_m2",
    "nemotron_h": "nemotron_v3", "olmo3": "olmo3", "step3": "step3", "step3_text": "step3", "step3p5": "step3p5",
}  # fmt: skip
"""Families that reason between <think> and </think>. Any other is read as qwen3, which takes nothing for reasoning that
is neither marked nor opened by the prompt."""


def choose(model_type: str, template: str) -> tuple[str | None, str | None]:
    """Return the names of a model's tool format and reasoning format, None where its template has neither."""
    found = (name for marks, name in _TOOL_MARKS if all(mark in template for mark in marks))
    tool = next(found, None)
    if tool:
        tool = _TOOLS_OF_FAMILY.get(model_type, tool)
    reasoning = next((name for mark, name in _REASONING_MARKS if mark in template), None)
    if not reasoning and "</think>" in template:
        reasoning = _THINKERS.get(model_type, "qwen3")
        # R1's template opens the thought. V3.1's does so by its keyword `thinking`, off by default, and V3's never.
        if reasoning == "deepseek_r1" and ("<think>" not in template or "thinking" in template):
            reasoning = "deepseek_v3"
    return tool, reasoning
