"""What a start prints: a few lines, each with a value and its reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from headrace.config import EngineConfig
from headrace.planner.record import Decision
from headrace.server.output_formats import OutputFormats
from headrace.server.startup import startup_lines

FORMATS = OutputFormats(line="tool calls: hermes")
REASONS = {
    "dtype": ("bfloat16", "the checkpoint's"),
    "max_num_seqs": (1024, "what a GPU serves before latency suffers"),
    "max_num_batched_tokens": (8192, "a prefill chunk that fills a GPU"),
    "max_model_len": (131072, "the model's max_position_embeddings"),
    "kv_cache_dtype": ("bfloat16", "the model's"),
    "num_gpu_blocks": (50_000, "what memory leaves: 800,000 tokens"),
    "attention_backend": ("TRITON_ATTN", "runs everywhere"),
    "cudagraph_mode": ("FULL_AND_PIECEWISE", "decodes are whole graphs"),
}


def engine(**changes: Any) -> Any:
    decisions = [Decision(field, value, reason) for field, (value, reason) in REASONS.items()]
    settings: dict[str, Any] = {
        "config": EngineConfig(),
        "num_engines": 1,
        "decisions": decisions,
        "model_config": SimpleNamespace(architecture="LlamaForCausalLM"),
        "device_name": "NVIDIA H200",
        "max_model_len": 131072,
        "kv_cache_tokens": 800_000,
        "memory": None,
        "expected": None,
        "default_sampling": {},
        "demoted": [],
    }
    return SimpleNamespace(**settings | changes)


def test_values_have_reasons() -> None:
    lines = startup_lines(engine(), FORMATS, 12.34)
    assert lines[0].endswith("in 12.3 s on NVIDIA H200; computes in bfloat16 (the checkpoint's)")
    assert lines[1].startswith(
        "at most 1,024 requests at once (what a GPU serves before latency suffers), 8,192 tokens"
    )
    assert "KV cache: 800,000 tokens (what memory leaves) in bfloat16 (the model's)" in lines
    assert "attention: TRITON_ATTN (runs everywhere)" in lines
    assert "tool calls: hermes" in lines
    assert "/v1/plan" in lines[-1]
    assert not any(line.startswith(("set by you", "sampling defaults", "not used")) for line in lines)


def test_what_the_user_should_know_is_added() -> None:
    given = [*engine().decisions, Decision("block_size", 32, "given", source="user")]
    lines = startup_lines(
        engine(
            config=EngineConfig(tensor_parallel_size=2, quantization="fp8"),
            decisions=given,
            default_sampling={"temperature": 0.6},
            demoted=["rms_norm"],
            memory="memory of NVIDIA H200 in GiB",
            expected="expected on NVIDIA H200",
        ),
        FORMATS,
        1.0,
    )
    assert lines[0].endswith("on NVIDIA H200, 2 GPUs; computes in bfloat16 (the checkpoint's), weights in fp8")
    assert "set by you: block_size = 32" in lines
    assert any(line.startswith("sampling defaults: temperature=0.6") for line in lines)
    assert any("failed the self-check: rms_norm" in line for line in lines)
    assert len(lines) <= 16 - 4, "loading, a warning, ready and the address come besides"
