"""Families of models as a test plays them: template, special tokens, and how each writes what it has to say."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers

TEMPLATES = Path(__file__).with_name("templates")
VOCAB_SIZE = 1536
"""Rows of the models' embeddings; the tokenizers know fewer tokens, as those of real models do."""
MERGED_TOKENS = 1200
CONTEXT = 32768


@dataclass(frozen=True)
class Call:
    """One tool call."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Said:
    """What the model says in one turn. `reasoning`: None where it does not think. `held`: what follows the reasoning is
    held to a grammar, which begins at once, without the white space that the model would like to write there."""

    content: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str | None = None
    held: bool = False


@dataclass(frozen=True)
class Family:
    """`special`: tokens that are dropped from text, those that end a turn included; `markers`: tokens that are not."""

    name: str
    template: str
    write: Callable[[Said, int], str]
    """(what is said, how many calls were made before) -> the text with the token that ends it."""
    special: tuple[str, ...]
    ends: tuple[str, ...]
    markers: tuple[str, ...] = ()
    model_type: str = "llama"
    architecture: str = "LlamaForCausalLM"
    flags: dict[str, Any] = field(default_factory=dict)
    """Flags of the server, where the family cannot be told from the template."""
    thinks: bool = False
    """Whether a turn may have reasoning with the template's defaults."""
    parallel: bool = True
    """Whether a turn may have several calls."""
    context: int = CONTEXT
    real: Path | None = None
    """A folder with the tokenizer and template of a real model of the family, in place of our own."""

    def source(self) -> str:
        return (TEMPLATES / f"{self.template}.jinja").read_text(encoding="utf-8")

    def model_folder(self, folder: Path) -> Path:
        """Write a model folder for a fake executor: config.json, tokenizer and chat template."""
        if self.real is not None:
            for file in self.real.glob("*.j*"):
                shutil.copy(file, folder)
            tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        else:
            tokenizer = _tokenizer(self.special, self.markers)
            tokenizer.save(str(folder / "tokenizer.json"))
            settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.ends[0]}
            (folder / "tokenizer_config.json").write_text(json.dumps(settings))
            (folder / "chat_template.jinja").write_text(self.source(), encoding="utf-8")
        ends = [tokenizer.token_to_id(token) for token in self.ends]
        vocab_size = max(VOCAB_SIZE, -(-tokenizer.get_vocab_size() // 512) * 512)
        config = {
            "architectures": [self.architecture], "model_type": self.model_type, "vocab_size": vocab_size,
            "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 4, "rope_theta": 10000.0,
            "max_position_embeddings": self.context, "bos_token_id": None, "eos_token_id": ends,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        return folder


@cache
def _tokenizer(special: tuple[str, ...], markers: tuple[str, ...]) -> tokenizers.Tokenizer:
    """Byte-level BPE whose merges come from JSON, tags and words, so that tokens straddle the ends of both."""
    draw = random.Random(21)
    words = "the weather in Paris is warm get_weather city days unit name arguments result true false null".split()
    lines = []
    for _ in range(300):
        some = {draw.choice(words): draw.choice([draw.choice(words), draw.randrange(100), True, [draw.choice(words)]])}
        lines.append(json.dumps({"name": draw.choice(words), "arguments": some}))
        lines.append(f"<{draw.choice(words)}={draw.choice(words)}>\n{draw.choice(words)}\n</{draw.choice(words)}>")
        lines.append(" ".join(draw.choices(words, k=8)) + ".\n\n")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=MERGED_TOKENS, initial_alphabet=alphabet, max_token_length=6, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([tokenizers.AddedToken(marker, special=False, normalized=False) for marker in markers])
    return tokenizer


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: Any) -> str:
    """A value as formats of tags write it: text is itself."""
    return value if isinstance(value, str) else _json(value)


def _python(value: Any) -> str:
    """A Python literal, text in double quotes as in JSON."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_json(key)}: {_python(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_python, value)) + "]"
    return _json(value) if isinstance(value, str) else repr(value)


def _qwen3(said: Said, before: int) -> str:
    gap = "" if said.held else "\n\n"
    thought = "" if said.reasoning is None else f"<think>\n{said.reasoning}\n</think>{gap}"
    calls = [
        f'<tool_call>\n{{"name": "{call.name}", "arguments": {_json(call.arguments)}}}\n</tool_call>'
        for call in said.calls
    ]
    return thought + "\n".join(filter(None, [said.content, *calls])) + "<|im_end|>"


def _qwen3_coder(said: Said, before: int) -> str:
    def body(call: Call) -> str:
        pairs = (f"<parameter={name}>\n{_text(value)}\n</parameter>\n" for name, value in call.arguments.items())
        return f"<tool_call>\n<function={call.name}>\n{''.join(pairs)}</function>\n</tool_call>"

    return "\n".join(filter(None, [said.content, *map(body, said.calls)])) + "<|im_end|>"


def _harmony(said: Said, before: int) -> str:
    parts = [] if said.reasoning is None else [f"<|channel|>analysis<|message|>{said.reasoning}"]
    if said.calls:
        (call,) = said.calls
        if said.content:
            parts.append(f"<|channel|>commentary<|message|>{said.content}")
        parts.append(
            f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{_json(call.arguments)}"
        )
        return "<|end|><|start|>assistant".join(parts) + "<|call|>"
    parts.append(f"<|channel|>final<|message|>{said.content}")
    return "<|end|><|start|>assistant".join(parts) + "<|return|>"


def _pythonic(said: Said, before: int) -> str:
    def body(call: Call) -> str:
        return f"{call.name}({', '.join(f'{name}={_python(value)}' for name, value in call.arguments.items())})"

    return said.content + (f"[{', '.join(map(body, said.calls))}]" if said.calls else "") + "<|eot_id|>"


def _kimi_k2(said: Said, before: int) -> str:
    calls = "".join(
        f"<|tool_call_begin|>functions.{call.name}:{index}<|tool_call_argument_begin|>{_json(call.arguments)}"
        "<|tool_call_end|>"
        for index, call in enumerate(said.calls, before)
    )
    section = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>" if calls else ""
    return said.content + section + "<|im_end|>"


def _deepseek_v31(said: Said, before: int) -> str:
    """With reasoning, for prompts that opened it."""
    thought = "" if said.reasoning is None else f"{said.reasoning}</think>"
    calls = "".join(
        f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{_json(call.arguments)}<｜tool▁call▁end｜>"
        for call in said.calls
    )
    section = f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else ""
    return thought + said.content + section + "<｜end▁of▁sentence｜>"


def _mistral(said: Said, before: int) -> str:
    return said.content + "".join(f"[TOOL_CALLS]{c.name}[ARGS]{_json(c.arguments)}" for c in said.calls) + "</s>"


def _glm45(said: Said, before: int) -> str:
    def body(call: Call) -> str:
        pairs = (
            f"<arg_key>{name}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n"
            for name, value in call.arguments.items()
        )
        return f"<tool_call>{call.name}\n{''.join(pairs)}</tool_call>"

    thought = "" if said.reasoning is None else f"\n<think>{said.reasoning}</think>"
    text = thought + "".join("\n" + part for part in filter(None, [said.content, *map(body, said.calls)]))
    if said.held:
        text = text.removeprefix("\n").replace("</think>\n", "</think>")
    return text + ("<|observation|>" if said.calls else "<|user|>")


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FAMILIES = {
    family.name: family
    for family in (
        Family(
            "qwen3", "qwen3", _qwen3, CHATML, ("<|im_end|>", "<|endoftext|>"),
            ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
            "qwen3", "Qwen3ForCausalLM", thinks=True,
        ),
        Family(
            "qwen3-coder", "qwen3_coder", _qwen3_coder, CHATML, ("<|im_end|>", "<|endoftext|>"),
            ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"), "qwen3", "Qwen3ForCausalLM",
        ),
        Family(
            "gpt-oss", "gpt_oss", _harmony,
            ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>",
             "<|endoftext|>"),
            ("<|return|>", "<|endoftext|>", "<|call|>"), model_type="gpt_oss", thinks=True, parallel=False,
        ),
        Family(
            "pythonic", "pythonic", _pythonic,
            ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), ("<|eot_id|>",),
        ),
        Family(
            "kimi-k2", "kimi_k2", _kimi_k2,
            ("<|im_end|>", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>",
             "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
             "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
            ("<|im_end|>",), model_type="kimi_k2",
        ),
        Family(
            "deepseek-v31", "deepseek_v31", _deepseek_v31,
            ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
            ("<｜end▁of▁sentence｜>",),
            ("<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
             "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
            "deepseek_v3",
        ),
        Family(
            "mistral", "mistral", _mistral,
            ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[ARGS]",
             "[TOOL_RESULTS]", "[TOOL_CONTENT]", "[/TOOL_RESULTS]"),
            ("</s>",), model_type="mistral",
        ),
        Family(
            "glm45", "glm45", _glm45,
            ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
            ("<|endoftext|>", "<|user|>", "<|observation|>"),
            ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
             "</arg_value>", "<tool_response>", "</tool_response>"),
            "glm4_moe", thinks=True,
        ),
    )
}  # fmt: skip
