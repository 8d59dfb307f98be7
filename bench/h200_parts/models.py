"""Describes the measured models as config.json, at full or toy size, by the planner's catalogue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from h200_parts.bounds import Cost
from headrace.planner.catalogue import catalogue
from headrace.planner.shapes import shape_of
from headrace.quantization.checkpoint_format import read_format
from headrace.quantization.formats import find_format


def in_catalogue(name: str, model_type: str) -> dict[str, Any]:
    """Return config.json of a model of the planner's catalogue."""
    return catalogue()[name].config | {"model_type": model_type}


LLAMA_8B = in_catalogue("llama-3.1-8b", "llama")
EIGHT_B = LLAMA_8B | {"max_position_embeddings": 32768, "rope_scaling": None}
"""The 8B of the cases, which give it as many layers as they need"""
QWEN3_30B_A3B = in_catalogue("qwen3-30b-a3b", "qwen3_moe")
GPT_OSS_20B, GPT_OSS_120B = (in_catalogue(f"gpt-oss-{size}", "gpt_oss") for size in ("20b", "120b"))
DEEPSEEK_V2_LITE = in_catalogue("deepseek-v2-lite", "deepseek_v2")
TOY = {  # sizes that groups of 128 divide
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "torch_dtype": "float32",
}
TOY_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
BATCHES = (1, 8, 32, 128)


def compressed(format: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the quantization_config that compressed-tensors writes for all linears but the head."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }  # fmt: skip


def integers(bits: int, strategy: str, group_size: int | None = None, **more: Any) -> dict[str, Any]:
    """Return what compressed-tensors says of weights or activations in symmetric integers."""
    return {
        "num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, "group_size": group_size,
        "dynamic": False, **more,
    }  # fmt: skip


def floats(strategy: str, dynamic: bool = False) -> dict[str, Any]:
    """Return what compressed-tensors says of weights or activations in fp8."""
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": dynamic}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
STATIC_FP8 = compressed("float-quantized", floats("tensor"), floats("tensor"))
INT8 = compressed("int-quantized", integers(8, "channel"), integers(8, "token", dynamic=True))
W4A16 = compressed("pack-quantized", integers(4, "group", 128))
W8A16 = compressed("pack-quantized", integers(8, "channel"))
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
NVFP4_TENSOR = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
NVFP4 = compressed("nvfp4-pack-quantized", NVFP4_TENSOR)


@dataclass(frozen=True)
class BenchModel:
    """Names a model and the format of its linear layers: one that it is rounded to at load, or the checkpoint's."""

    name: str
    title: str
    config: dict[str, Any]
    quantization: str | None = None
    checkpoint: dict[str, Any] | None = None
    """quantization_config, where it is not part of `config`"""
    batches: tuple[int, ...] = BATCHES
    """of which a decode step is measured"""

    def shape(self, toy: bool = False) -> dict[str, Any]:
        """Return config.json."""
        config = self.config | ({"quantization_config": self.checkpoint} if self.checkpoint else {})
        if not toy:
            return config
        counts = {name: 8 for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in config}
        return config | TOY | ({**TOY_EXPERTS, **counts} if counts else {})

    def cost(self, toy: bool = False) -> Cost:
        """Return the bytes and operations of a token."""
        config = self.shape(toy)
        spec = shape_of(config, self.name).spec
        if self.quantization:
            dense = experts = find_format(self.quantization)
        else:
            held = read_format(config.get("quantization_config"))
            dense = held.format_for("model.layers.1.self_attn.q_proj").format
            experts = held.format_for("model.layers.1.mlp.experts.0.gate_proj", "model.layers.1.mlp.experts").format
        return Cost.of(spec, dense, experts)


LISTED = (
    BenchModel("bf16", "Llama-3.1-8B bf16", LLAMA_8B),
    BenchModel("fp8", "Llama-3.1-8B fp8", LLAMA_8B, quantization="fp8"),
    BenchModel("moe", "Qwen3-30B-A3B bf16", QWEN3_30B_A3B),
    BenchModel("moe-fp8", "Qwen3-30B-A3B fp8", QWEN3_30B_A3B, quantization="fp8"),
    BenchModel("awq", "Llama-3.1-8B AWQ, group 128", LLAMA_8B, checkpoint=AWQ),
    BenchModel("moe-int4", "Qwen3-30B-A3B W4A16, group 128", QWEN3_30B_A3B, checkpoint=W4A16),
    BenchModel("fp8-static", "Llama-3.1-8B FP8, static scales", LLAMA_8B, checkpoint=STATIC_FP8),
    BenchModel("fp8-block", "Llama-3.1-8B FP8, 128 x 128 blocks", LLAMA_8B, checkpoint=BLOCKS),
    BenchModel("int8", "Llama-3.1-8B W8A8 INT8", LLAMA_8B, checkpoint=INT8, batches=(1,)),
    BenchModel("v2-lite", "DeepSeek-V2-Lite bf16", DEEPSEEK_V2_LITE),
    BenchModel("gpt-oss-20b", "gpt-oss-20b MXFP4", GPT_OSS_20B),
    BenchModel("gpt-oss-120b", "gpt-oss-120b MXFP4", GPT_OSS_120B, batches=(1, 32)),
    *(
        BenchModel(name, f"Llama-3.1-8B {title}", LLAMA_8B, checkpoint=held, batches=(1,))
        for name, title, held in (
            ("gptq", "GPTQ, group 128", GPTQ),
            ("gptq-8bit", "GPTQ 8 bit", GPTQ | {"bits": 8}),
            ("gptq-desc-act", "GPTQ desc_act", GPTQ | {"desc_act": True}),
            ("w4a16", "W4A16, group 128", W4A16),
            ("w8a16", "W8A16", W8A16),
            ("nvfp4", "NVFP4", NVFP4),
        )
    ),
)  # fmt: skip
MODELS = {model.name: model for model in LISTED}
