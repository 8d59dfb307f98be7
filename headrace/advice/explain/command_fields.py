"""What a command line asks for, as plain fields with the names of a plan's: model, GPUs, lengths, load, settings.

Only what stands there: None is what the line leaves open. Knows nothing of what is good.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from headrace.advice.explain.command_line import CommandLine
from headrace.advice.explain.setting import object_of
from headrace.advice.flags.table import human_int
from headrace.config import QUANTIZATIONS
from headrace.errors import ConfigError

AUTO = ("auto", "none", "")
AUTO_LENGTH = ("auto", "-1")
"""values of --max-model-len that ask for what fits"""


@dataclass(frozen=True, kw_only=True)
class CommandFields:
    program: str
    model: str | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    enable_expert_parallel: bool | None = None
    visible_gpus: int | None = None
    """how many a variable leaves visible"""
    dtype: str | None = None
    quantization: str | None = None
    """as it is typed: awq, gptq, fp8, ..."""
    kv_cache_dtype: str | None = None
    block_size: int | None = None
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool | None = None
    async_scheduling: bool | None = None
    enforce_eager: bool | None = None
    attention_backend: str | None = None
    compilation_config: dict[str, Any] | None = None
    speculative_tokens: int | None = None
    input_len: int | None = None
    output_len: int | None = None
    num_prompts: int | None = None
    concurrency: int | None = None
    """requests at once that a benchmark keeps up"""
    request_rate: float | None = None

    @property
    def num_gpus(self) -> int:
        return (self.tensor_parallel_size or 1) * (self.pipeline_parallel_size or 1) * (self.data_parallel_size or 1)

    def plan_keywords(self) -> dict[str, Any]:
        """What of this a plan can be asked for, by the names of PlanRequest; formats that a checkpoint brings, and
        whatever is left open, are not among it."""
        found = {name: value for name, value in asdict(self).items() if value is not None and name not in NOT_PLANNED}
        if self.quantization not in QUANTIZATIONS:
            found.pop("quantization", None)
        return found | {"num_gpus": self.num_gpus}


NOT_PLANNED = ("program", "visible_gpus", "attention_backend", "speculative_tokens")
WHOLE = (
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "block_size", "max_num_seqs",
    "max_num_batched_tokens", "input_len", "output_len", "num_prompts",
)  # fmt: skip
SWITCHES = ("enable_expert_parallel", "enable_chunked_prefill", "async_scheduling", "enforce_eager")
TEXTS = ("dtype", "quantization", "kv_cache_dtype", "attention_backend")


def fields_of(line: CommandLine) -> CommandFields:
    """Raises ConfigError naming the flag whose value cannot be read."""
    read = _Reader(line)
    found: dict[str, Any] = {
        **{name: read.whole(_flag(name)) for name in WHOLE},
        "max_model_len": read.length("--max-model-len"),
        **{name: read.switch(_flag(name)) for name in SWITCHES},
        **{name: read.text(_flag(name)) for name in TEXTS},
        "gpu_memory_utilization": read.number("--gpu-memory-utilization"),
        "request_rate": read.number("--request-rate"),
        "compilation_config": read.json("--compilation-config"),
        "speculative_tokens": _speculative_tokens(read),
        "visible_gpus": _visible(line),
    }
    found["concurrency"] = read.whole("--batch-size" if line.program == "bench latency" else "--max-concurrency")
    if line.program == "bench throughput" and (prompts := found["num_prompts"]) is not None:
        found["concurrency"] = min(prompts, found["max_num_seqs"] or prompts)
    if found["request_rate"] == float("inf"):
        found["request_rate"] = None
    found["attention_backend"] = found["attention_backend"] or read.text("VLLM_ATTENTION_BACKEND")
    return CommandFields(program=line.program, model=line.model, **found)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class _Reader:
    line: CommandLine

    def _read(self, key: str, kind: Any, wanted: str) -> Any:
        found = self.line.find(key)
        if found is None:
            return None
        try:
            return kind(found.value)
        except (ValueError, OverflowError):
            raise ConfigError(f"{key} must be {wanted}, got {found.value!r}") from None

    def whole(self, key: str) -> int | None:
        value: int | None = self._read(key, human_int, "a whole number")
        return value

    def length(self, key: str) -> int | None:
        """None also where the engine is told to find it."""
        return None if self.line.value(key) in AUTO_LENGTH else self.whole(key)

    def number(self, key: str) -> float | None:
        value: float | None = self._read(key, float, "a number")
        return value

    def text(self, key: str) -> str | None:
        value = self.line.value(key)
        return None if value is None or value.lower() in AUTO else value

    def switch(self, key: str) -> bool | None:
        found = self.line.find(key)
        return None if found is None else found.on

    def json(self, key: str) -> dict[str, Any] | None:
        """All the parts of it, where it is given key by key."""
        merged: dict[str, Any] = {}
        for setting in self.line.settings:
            if setting.key == key:
                merged |= object_of(setting)
        return merged or None


def _visible(line: CommandLine) -> int | None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        text = line.value(name)
        if text:
            return len([device for device in text.split(",") if device.strip()])
    return None


def _speculative_tokens(read: _Reader) -> int | None:
    given = read.json("--speculative-config")
    if given is None:
        return read.whole("--num-speculative-tokens")
    tokens = given.get("num_speculative_tokens", 1)
    if type(tokens) is not int or tokens < 0:
        raise ConfigError(f"num_speculative_tokens of --speculative-config must be a whole number, got {tokens!r}")
    return tokens
