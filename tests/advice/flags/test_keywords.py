"""Keyword arguments as vLLM's documentation gives them to `LLM`: taken, said to have no effect, or refused by name."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from headrace.advice.flags.keywords import engine_keywords
from headrace.advice.flags.table import flags_by_name
from headrace.config import EngineConfig
from headrace.errors import ConfigError

Q = "meta-llama/Llama-3.1-8B-Instruct"
TAKEN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"model": Q, "tensor_parallel_size": 4}, {"model": Q, "tensor_parallel_size": 4}),
    ({"model": Path("/models/a")}, {"model": "/models/a"}),
    ({"model": Q, "tokenizer": None, "revision": None, "seed": None, "quantization": None}, {"model": Q}),
    ({"dtype": "half", "enforce_eager": True}, {"dtype": "half", "enforce_eager": True}),
    ({"max_model_len": 2048, "max_num_seqs": 2}, {"max_model_len": 2048, "max_num_seqs": 2}),
    (
        {"enable_prefix_caching": True, "gpu_memory_utilization": 0.4},
        {"enable_prefix_caching": True, "gpu_memory_utilization": 0.4},
    ),
    (
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 64},
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 64},
    ),
    ({"kv_cache_dtype": "fp8", "calculate_kv_scales": True}, {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}),
    ({"quantization": "awq"}, {"quantization": "awq"}),
    ({"quantization": "fp8", "load_format": "dummy"}, {"quantization": "fp8", "load_format": "dummy"}),
    ({"skip_tokenizer_init": True, "generation_config": "vllm"},) * 2,
    ({"served_model_name": "name"}, {"served_model_name": ["name"]}),
    ({"disable_log_stats": False, "async_scheduling": False},) * 2,
    ({"block_size": 32, "num_gpu_blocks_override": 500},) * 2,
    ({"compilation_config": {"cudagraph_mode": "PIECEWISE"}},) * 2,
    ({"compilation_config": None, "hf_overrides": None, "swap_space": None}, {}),
    (
        {"max_cudagraph_capture_size": 8, "compilation_config": {"cudagraph_mode": "FULL"}},
        {"compilation_config": {"cudagraph_mode": "FULL", "max_cudagraph_capture_size": 8}},
    ),
    ({"cudagraph_capture_sizes": [1, 2, 4]}, {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]}}),
    (
        {"speculative_model": "facebook/opt-125m", "num_speculative_tokens": 5},
        {"speculative_config": {"model": "facebook/opt-125m", "num_speculative_tokens": 5}},
    ),
    ({"enable_lora_bias": False, "rope_scaling": {}, "logits_processors": [], "cpu_offload_gb": 0}, {}),
    ({"task": "embed", "tokenizer_mode": "auto"}, {"task": "embed"}),
    ({"pooler_config": {"normalize": False}}, {"pooler_config": {"normalize": False}}),
    ({"model_impl": "vllm", "config_format": "hf"}, {}),
    ({"distributed_executor_backend": "mp"}, {"distributed_executor_backend": "mp"}),
]
INERT: list[tuple[dict[str, Any], str]] = [
    ({"swap_space": 4}, "recomputed, not swapped"),
    ({"trust_remote_code": True}, "never run"),
    ({"attention_backend": "FLASH_ATTN"}, "a kernel of vLLM's"),
    ({"compilation_config": 3}, "nothing is compiled"),
    ({"limit_mm_per_prompt": {"image": 3, "video": 1}}, "text alone"),
    ({"mm_processor_kwargs": {"max_pixels": 589824}}, "text alone"),
    ({"max_logprobs": 20}, "the limit is fixed"),
    ({"enable_sleep_mode": True}, "no such mode"),
    ({"guided_decoding_backend": "xgrammar"}, "llguidance holds outputs to grammars"),
    ({"max_seq_len_to_capture": 8192}, "do not depend on sequence length"),
    ({"num_scheduler_steps": 8}, "every step is scheduled"),
    ({"lora_dtype": "auto"}, "adapters have the model's type"),
    ({"use_tqdm_on_load": False}, "where somebody watches"),
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"enable_lora_bias": True}, "enable_lora_bias=True is not supported: adapters are low-rank ones"),
    ({"cpu_offload_gb": 10}, "cpu_offload_gb must be 0, got '10'"),
    ({"tokenizer_mode": "mistral"}, "tokenizer_mode must be auto or hf or slow, got 'mistral'"),
    ({"model_impl": "transformers"}, "model_impl must be auto or vllm"),
    ({"rope_scaling": {"factor": 1.0}}, "--hf-overrides has fields of config.json"),
    ({"kv_transfer_config": {"kv_connector": "x"}}, "kv_transfer_config must be {}"),
    ({"hf_token": "hf_secret"}, "hf_token=*** is not supported"),
    ({"logits_processors": ["my.module:Processor"]}, "logits_processors="),
    ({"swap_space": "much"}, "swap_space must be a number, got 'much'"),
    ({"enable_sleep_mode": "perhaps"}, "enable_sleep_mode must be 1, 0, true or false, got 'perhaps'"),
    ({"tensor_paralel_size": 2}, "LLM has no keyword 'tensor_paralel_size'; did you mean tensor_parallel_size"),
    ({"max_tokens_per_day": 2}, "LLM has no keyword 'max_tokens_per_day'"),
    ({"port": 8000}, "LLM has no keyword 'port'"),
    ({"help": True}, "LLM has no keyword 'help'"),
]


@pytest.mark.parametrize(("given", "config"), TAKEN, ids=lambda entry: ",".join(entry))
def test_what_is_taken(given: dict[str, Any], config: dict[str, Any]) -> None:
    assert engine_keywords(given) == (config, [])
    EngineConfig(**config)


@pytest.mark.parametrize(("given", "why"), INERT, ids=lambda entry: ",".join(entry) if isinstance(entry, dict) else "")
def test_what_has_no_effect_is_named_with_the_reason(given: dict[str, Any], why: str) -> None:
    kept, (note,) = engine_keywords(given)
    assert kept == {}
    assert note.setting.startswith(f"{next(iter(given))}=")
    assert why in note.why


@pytest.mark.parametrize(
    ("given", "message"), REFUSED, ids=lambda entry: ",".join(entry) if isinstance(entry, dict) else ""
)
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        engine_keywords(given)
    assert message in str(caught.value)
    assert "hf_secret" not in str(caught.value)
    assert "--" not in str(caught.value).partition(":")[0], "keywords are called as Python calls them"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size must be of type int, got '2'"),
        ({"compilation_config": True}, "compilation_config must be of type dict, got True"),
        ({"compilation_config": "x", "cudagraph_capture_sizes": [1]}, "compilation_config must be of type dict"),
        ({"gpu_memory_utilization": 2}, "gpu_memory_utilization must be at most 1.0, got 2"),
        ({"load_format": "runai_streamer"}, "load_format must be one of auto"),
    ],
    ids=lambda entry: ",".join(entry) if isinstance(entry, dict) else "",
)
def test_knobs_are_checked_by_the_config(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**engine_keywords(given)[0])


def test_a_dtype_of_torch_is_its_name() -> None:
    torch = pytest.importorskip("torch")
    assert engine_keywords({"dtype": torch.bfloat16}) == ({"dtype": "bfloat16"}, [])


@pytest.mark.parametrize(
    "value", [True, 1, "x", 0.5, {"a": 1}, ["a"], object()], ids=lambda value: type(value).__name__
)
def test_any_value_of_any_flag_is_taken_or_refused(value: object) -> None:
    """What flags/table.py says of text holds for Python's values: nothing else is ever raised."""
    for flag in flags_by_name("engine"):
        name = flag.lstrip("-").replace("-", "_")
        with contextlib.suppress(ConfigError):
            kept, _ = engine_keywords({name: value})
            assert not kept or name in kept or kept.keys() & {"compilation_config", "speculative_config"}
