"""Defines what may be asked of a plan: model, GPUs, traffic, and every setting that the user pins.

One annotated field is flag, help and Python keyword, as in config.py.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from headrace.config import CHECKPOINT_WORDS, OBJECTIVES, QUANTIZATIONS, EngineConfig
from headrace.errors import ConfigError
from headrace.knobs import check_knobs, knob
from headrace.quantization.formats import FORMATS

ENGINES = ("headrace", "vllm")
PLAN_FORMATS = {
    **QUANTIZATIONS,
    **{word: one.name for one in FORMATS.values() if one.scale_bytes for word in (one.name, *one.words)},
}
"""The weight format that values of `quantization` mean where the checkpoint is in another. Names of tools are not among
them: they are for checkpoints that these tools wrote."""
USUAL_INPUT, USUAL_OUTPUT = 1024, 256
MOST_GPUS, MOST = 1024, 10**9
"""More than any deployment has, and more than any count of tokens or requests."""


def _count(help: str, group: str, most: int = MOST, **more: Any) -> Any:
    return knob(None, help, minimum=1, maximum=most, group=group, **more)


def _pin(name: str, default: Any = None, **changes: Any) -> Any:
    """A setting of an engine as config.py describes it, but for `changes`; left open unless it has a default."""
    described = next(field.metadata for field in dataclasses.fields(EngineConfig) if field.name == name)
    return knob(default, **{**described, **changes})


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Holds what is asked of a plan; None in a field leaves it to the planner."""

    model: str = knob(
        "demo",
        "A name of the catalogue (llama-3.1-405b), a folder, a config.json, or a Hugging Face id whose config.json is "
        "in the local cache.",
        group="model",
    )
    gpu: str = knob("auto", "Kind of GPU (mi300x, h200, ...), or `cpu`; `auto` reads this machine.", group="hardware")
    num_gpus: int | None = _count("GPUs to plan for.", "hardware", MOST_GPUS)
    price_per_gpu_hour: float | None = knob(
        None,
        "What one GPU costs an hour; gives the cost of a million tokens.",
        minimum=0.0,
        maximum=1e9,
        group="hardware",
    )
    input_len: int | None = _count("Tokens of a prompt; default: 1024, or half the model's context.", "workload")
    output_len: int | None = _count(
        "Tokens of an answer; default: 256, or a quarter of the model's context.", "workload"
    )
    concurrency: int | None = _count(
        "Requests in flight at once, over all GPUs; default: 1 for latency, 32 for interactive, as many as the KV "
        "cache holds (up to 1024 an instance) for throughput.",
        "workload",
        aliases=("--max-concurrency",),
    )
    num_prompts: int | None = _count("Requests in all; default: as many as keep the load up.", "workload")
    request_rate: float | None = knob(
        None,
        "Requests that arrive in a second; default: each client sends the next at once.",
        maximum=1e6,
        group="workload",
    )
    objective: str = knob(
        "interactive",
        "What to plan for: the shortest answer (latency), most tokens at a pace that people read along with "
        "(interactive), or most tokens (throughput).",
        choices=OBJECTIVES,
        group="workload",
    )
    engine: str = knob("headrace", "Whose speed is predicted, and whose command is written.", choices=ENGINES)
    simulate: bool = knob(False, "Run the whole workload through the scheduler, for percentiles.", group="output")
    json: bool = knob(False, "Print the plan as JSON.", group="output")

    tensor_parallel_size: int | None = _pin("tensor_parallel_size", maximum=MOST_GPUS)
    pipeline_parallel_size: int | None = _pin("pipeline_parallel_size", maximum=MOST_GPUS)
    data_parallel_size: int | None = _pin("data_parallel_size", maximum=MOST_GPUS)
    enable_expert_parallel: bool | None = _pin("enable_expert_parallel")
    enable_dp_attention: bool | None = knob(
        None, "Data-parallel ranks share the experts, and each keeps the cache of its own requests.", group="parallel"
    )
    speculative_config: dict[str, Any] = _pin("speculative_config", {})
    attention_backend: str | None = _pin("attention_backend", help="Attention backend, by the engine's name for it.")
    dtype: str = _pin("dtype", "auto")
    quantization: str | None = _pin(
        "quantization",
        help="Weight format: fp8 and ptpc_fp8 are made of a plain checkpoint at load; mxfp4, int4 and int8 stand for a "
        "checkpoint that holds them; a tool's name keeps what its checkpoint holds. Default: the checkpoint's.",
        choices=tuple(dict.fromkeys((*PLAN_FORMATS, *CHECKPOINT_WORDS))),
    )
    kv_cache_dtype: str = _pin("kv_cache_dtype", "auto")
    block_size: int | None = _pin("block_size")
    gpu_memory_utilization: float = _pin("gpu_memory_utilization", 0.9)
    max_model_len: int | None = _pin("max_model_len")
    max_num_seqs: int | None = _pin("max_num_seqs", maximum=2**15)
    max_num_batched_tokens: int | None = _pin("max_num_batched_tokens")
    enable_chunked_prefill: bool = _pin("enable_chunked_prefill", True)
    async_scheduling: bool = _pin("async_scheduling", True)
    enforce_eager: bool = _pin("enforce_eager", False)
    compilation_config: dict[str, Any] = _pin("compilation_config", {})

    def __post_init__(self) -> None:
        check_knobs(self)
        if self.request_rate is not None and not self.request_rate > 0:
            raise ConfigError(f"request_rate must be above 0, got {self.request_rate!r}")
        pins = (self.tensor_parallel_size, self.pipeline_parallel_size, self.data_parallel_size)
        if math.prod(pin or 1 for pin in pins) > MOST_GPUS:
            raise ConfigError(
                "tensor_parallel_size x pipeline_parallel_size x data_parallel_size must be at most "
                f"{MOST_GPUS} GPUs, got {' x '.join(str(pin or 1) for pin in pins)}"
            )
        seqs, budget = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and budget is not None and seqs > budget:
            raise ConfigError(
                f"max_num_seqs ({seqs}) must not exceed max_num_batched_tokens ({budget}): "
                "every running request gets a token in every step"
            )

    @property
    def prompt_len(self) -> int:
        return self.input_len or USUAL_INPUT

    @property
    def answer_len(self) -> int:
        return self.output_len or USUAL_OUTPUT

    def filled(self, context: int) -> PlanRequest:
        """Return the request with lengths that fit into the context, where none are given."""
        return self.replace(
            input_len=self.input_len or min(USUAL_INPUT, max(1, context // 2)),
            output_len=self.output_len or min(USUAL_OUTPUT, max(1, context // 4)),
        )

    def replace(self, **changes: Any) -> PlanRequest:
        return dataclasses.replace(self, **changes)

    def weight_format(self, own: str) -> str | None:
        """Return the format that `quantization` asks for of a checkpoint in format `own`; None: the checkpoint's.

        Raises ConfigError for a tool that writes no such checkpoint.
        """
        word = self.quantization
        if word is None or own in CHECKPOINT_WORDS.get(word, ()):
            return None
        if word not in PLAN_FORMATS:
            raise ConfigError(
                f"quantization {word!r} is for checkpoints in {' or '.join(CHECKPOINT_WORDS[word])}; this one is in "
                f"{own}; accepted: {', '.join(PLAN_FORMATS)}"
            )
        return PLAN_FORMATS[word]
