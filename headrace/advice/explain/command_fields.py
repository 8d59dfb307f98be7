"""Reads what a command line asks for as plain fields, with the names that a plan has for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.advice.explain.command_line import CommandLine
from headrace.advice.explain.setting import object_of
from headrace.advice.flags.table import human_int
from headrace.errors import ConfigError
from headrace.knobs import knob_types

AUTO = ("auto", "none", "")
AUTO_LENGTH = ("auto", "-1")
"""Values of --max-model-len that ask for what fits."""
DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True, kw_only=True)
class CommandFields:
    """Holds what a command line asks for; None is what it leaves open."""

    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    enable_expert_parallel: bool | None = None
    dtype: str | None = None
    quantization: str | None = None
    """As it is typed: awq, gptq, fp8, ..."""
    kv_cache_dtype: str | None = None
    block_size: int | None = None
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    """None also where the engine is to take what fits."""
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool | None = None
    attention_backend: str | None = None
    compilation_config: dict[str, Any] | None = None
    input_len: int | None = None
    output_len: int | None = None
    num_prompts: int | None = None
    request_rate: float | None = None
    concurrency: int | None = None
    """Requests in flight that a benchmark keeps up."""
    speculative_tokens: int | None = None
    visible_gpus: int | None = None
    """How many GPUs a variable leaves visible."""


COMPUTED = ("concurrency", "speculative_tokens", "visible_gpus")
"""Fields that no flag of their name gives."""


def fields_of(line: CommandLine) -> CommandFields:
    """Return the fields of a command line. Raises ConfigError naming the flag whose value cannot be read."""
    kinds = knob_types(CommandFields)
    names = [field.name for field in dataclasses.fields(CommandFields) if field.name not in COMPUTED]
    asked = {name: _read(line, "--" + name.replace("_", "-"), kinds[name][0]) for name in names}
    asked["attention_backend"] = asked["attention_backend"] or _read(line, "VLLM_ATTENTION_BACKEND", str)
    asked["concurrency"] = _read(line, "--batch-size" if line.program == "bench latency" else "--max-concurrency", int)
    if line.program == "bench throughput" and (prompts := asked["num_prompts"]) is not None:
        asked["concurrency"] = min(prompts, asked["max_num_seqs"] or prompts)
    if asked["request_rate"] == float("inf"):
        asked["request_rate"] = None
    devices = next(filter(None, map(line.value, DEVICES)), None)
    if devices is not None:
        asked["visible_gpus"] = sum(bool(device.strip()) for device in devices.split(","))
    return CommandFields(**asked, speculative_tokens=_speculative_tokens(line))


READERS: dict[type, tuple[Callable[[str], Any], str]] = {
    int: (human_int, "a whole number"),
    float: (float, "a number"),
    str: (lambda text: None if text.lower() in AUTO else text, "text"),
}


def _read(line: CommandLine, key: str, kind: type) -> Any:
    setting = line.find(key)
    if setting is None or (key == "--max-model-len" and setting.value in AUTO_LENGTH):
        return None
    if kind is bool:
        return setting.on
    if kind is dict:  # given key by key it is several settings
        objects = [object_of(other) for other in line.settings if other.key == key]
        return {name: value for given in objects for name, value in given.items()} or None
    read, wanted = READERS[kind]
    try:
        return read(setting.value)
    except (ValueError, OverflowError):
        raise ConfigError(f"{key} must be {wanted}, got {setting.value!r}") from None


def _speculative_tokens(line: CommandLine) -> int | None:
    given = _read(line, "--speculative-config", dict)
    if given is None:
        return _read(line, "--num-speculative-tokens", int)
    tokens = given.get("num_speculative_tokens", 1)
    if type(tokens) is not int or tokens < 0:
        raise ConfigError(f"num_speculative_tokens of --speculative-config must be a whole number, got {tokens!r}")
    return tokens
