"""Writes calls as families' chat templates do."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from headrace.parsers.tools import FunctionTool

Written = dict[str, str]
"""A call's parameters as the model writes them."""


def qwen(name: str, values: Written, around: str = "") -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<{around}tool_call>\n<function={name}>\n{parameters}</function>\n</{around}tool_call>"


def seed(name: str, values: Written) -> str:
    return qwen(name, values, "seed:")


def glm(name: str, values: Written) -> str:
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def hy(name: str, values: Written, mark: str = "") -> str:
    pairs = "".join(
        f"<arg_key{mark}>{key}</arg_key{mark}>\n<arg_value{mark}>{value}</arg_value{mark}>\n"
        for key, value in values.items()
    )
    call = f"<tool_call{mark}>{name}<tool_sep{mark}>\n{pairs}</tool_call{mark}>\n"
    return f"<tool_calls{mark}>\n{call}</tool_calls{mark}>"


def invoke(name: str, values: Written, mark: str = "", extra: str = "") -> str:
    parameters = "".join(
        f'<{mark}parameter name="{key}"{extra}>{value}</{mark}parameter>\n' for key, value in values.items()
    )
    return f'<{mark}invoke name="{name}">\n{parameters}</{mark}invoke>\n'


def minimax(name: str, values: Written) -> str:
    return f"<minimax:tool_call>\n{invoke(name, values)}</minimax:tool_call>"


def dsml(name: str, values: Written) -> str:
    body = invoke(name, values, "｜DSML｜", ' string="false"')
    return f"<｜DSML｜function_calls>\n{body}</｜DSML｜function_calls>"


def step(name: str, values: Written) -> str:
    body = invoke(name, values, "steptml:")
    call = f"<｜tool_call_begin｜>function<｜tool_sep｜>{body}<｜tool_call_end｜>\n"
    return f"<｜tool_calls_begin｜>\n{call}<｜tool_calls_end｜>"


def minicpm(name: str, values: Written) -> str:
    parameters = "".join(f'<param name="{key}">{value}</param>' for key, value in values.items())
    return f'<function name="{name}">{parameters}</function>'


WRITERS: dict[str, Callable[[str, Written], str]] = {
    "qwen3_coder": qwen,
    "seed_oss": seed,
    "glm45": glm,
    "hy_v3": hy,
    "hunyuan": lambda name, values: hy(name, values, ":opensource"),
    "minimax_m2": minimax,
    "deepseek_v32": dsml,
    "step3": step,
    "minicpm5": minicpm,
}


def typed(**properties: Any) -> FunctionTool:
    """The tool f, with the types of its parameters."""
    return FunctionTool("f", {"type": "object", "properties": properties})


def random_value(rng: random.Random, depth: int = 0) -> Any:
    """A JSON value."""
    kind = rng.randrange(7 if depth < 3 else 5)
    if kind == 0:
        return rng.choice([True, False, None])
    if kind == 1:
        return rng.randint(-(10**20), 10**20)
    if kind == 2:
        return rng.uniform(-1e6, 1e6)
    if kind in (3, 4):
        return "".join(rng.choices("ab \n\t\"'\\{}[],:=|&é🎉1", k=rng.randrange(9)))
    items = [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return items if kind == 5 else {f"k{place}": item for place, item in enumerate(items)}


def type_of(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


QUOTE = '<|"|>'


def gemma(name: str, body: str) -> str:
    return f"<|tool_call>call:{name}{{{body}}}<tool_call|>"


def function(name: str, body: str) -> str:
    return f"<start_function_call>call:{name}{{{body}}}<end_function_call>"


def gemma_value(value: Any) -> str:
    """A value as Gemma writes it."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma_value(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


AROUND = {
    "pythonic": ("[", "]"),
    "llama4_pythonic": ("<|python_start|>[", "]<|python_end|>"),
    "olmo3": ("<function_calls>", "</function_calls>"),
    "lfm2": ("<|tool_call_start|>[", "]<|tool_call_end|>"),
}
"""What stands before and behind calls in Python."""


def v3(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def kimi(head: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{head}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def deepseek(calls: str) -> str:
    return f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"


def kimi_section(calls: str) -> str:
    return f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"
