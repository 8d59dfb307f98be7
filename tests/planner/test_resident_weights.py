"""Weights as the memory map counts them: what layers of tiny, odd sizes hold, once they are made for a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.distributed.mesh import Group, Mesh
from headrace.kernels import fp8, tiled
from headrace.layers.latent_attention import HeadsOfLatents
from headrace.layers.layer import Layer
from headrace.layers.linear import Linear
from headrace.layers.moe import SparseMoE
from headrace.model_config import ModelConfig
from headrace.models.loader import attach_schemes, build_model, weight_bytes
from headrace.planner.chips import CHIPS
from headrace.planner.parallel import Parallel
from headrace.planner.shapes import shape_of
from headrace.quantization import checkpoint_fields, gpu_linear, packed_layouts, resident
from headrace.quantization.scheme import LinearSpec, Weights
from tests.models.driver import make_context
from tests.planner.planner_cases import mapped
from tests.sampled import sampled

MODEL: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 100, "hidden_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "num_experts": 2, "num_experts_per_tok": 2,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [0],
}  # fmt: skip
"""a layer with a dense feed-forward, then one with experts"""


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ["lm_head"]
    }  # fmt: skip


def integers(bits: int, group_size: int, **more: Any) -> dict[str, Any]:
    strategy = "group" if group_size > 0 else "channel"
    return compressed("pack-quantized", {"num_bits": bits, "strategy": strategy, "group_size": group_size, **more})


LATENT: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"], "vocab_size": 100, "hidden_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "tie_word_embeddings": False, "first_k_dense_replace": 1,
    "intermediate_size": 512, "moe_intermediate_size": 512, "n_routed_experts": 2, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 96, "kv_lora_rank": 64,
    "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 64, "index_topk": 8, "index_head_dim": 32,
    "index_n_heads": 8,
}  # fmt: skip
"""latents and an index; of its attention the linear that makes keys and values is widened"""
MIDDLES = {3: [-613566757, -1227133514, 1840700269], 4: [0x77777777]}
"""words of GPTQ's zeros that are all the middle less one, by bits"""
ACT_ORDER = 64
"""inputs that share a scale where they are in an order of their own"""
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
INT8_TOKEN = {**TOKEN, "type": "int"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    # name: (quantization_config, width of the feed-forward)
    "int4, groups of 128": (integers(4, 128), 768),
    "int4, groups of 128, with zeros": (integers(4, 128, symmetric=False), 768),
    "int4, groups of 64": (integers(4, 64), 640),
    "int4, groups of 64, with zeros": (integers(4, 64, symmetric=False), 640),
    "int4, groups of 32": (integers(4, 32), 320),
    "int4, groups of 32, with zeros": (integers(4, 32, symmetric=False), 320),
    "int4, groups of 16, with zeros": (integers(4, 16, symmetric=False), 352),
    "int4, groups of 256": (integers(4, 256), 1024),
    "int4, a channel": (integers(4, -1), 304),
    "int4, a channel, with zeros": (integers(4, -1, symmetric=False), 320),
    "int4, act-order": (integers(4, ACT_ORDER, actorder="group"), 640),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, 640),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}, 768),
    "gptq of 3 bits": ({"quant_method": "gptq", "bits": 3, "group_size": 32, "sym": True}, 320),
    "int8, groups of 128": (integers(8, 128), 768),
    "int8, groups of 32, with zeros": (integers(8, 32, symmetric=False), 320),
    "mxfp4": (compressed("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 32}), 320),
    "nvfp4": (compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 16}), 352),
    "fp8, a tensor, static": ({"quant_method": "fp8", "activation_scheme": "static"}, 304),
    "fp8, a channel": (
        compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, TOKEN), 304
    ),
    "fp8, activations in 16 bits": (
        compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}), 304
    ),
    "fp8, blocks": (BLOCKS, 768),
    "fp8, blocks that ranks cut": (BLOCKS, 640),
    "mxfp8": ({"quant_method": "mxfp8"}, 320),
    "w8a8 in integers": (compressed("int-quantized", {"num_bits": 8, "strategy": "channel"}, INT8_TOKEN), 304),
    "w8a16 in integers": (compressed("int-quantized", {"num_bits": 8, "strategy": "channel"}), 304),
}  # fmt: skip
NUMBERS = 64
"""bytes of all single numbers beside fp8 weights, as static scales of activations"""


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let products do on a CPU's memory what they do on an H200: nothing here launches a kernel."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(gpu_linear, "plan_all", lambda *_: {})
    monkeypatch.setattr(gpu_linear, "plan_tiled", lambda *_: [None])


def filled(spec: LinearSpec, weights: Weights, layout: Any) -> Weights:
    """Give each tensor values as a checkpoint has them: scales that 16 bits hold, zeros in the middle of GPTQ's range,
    which its symmetric weights have, and where act-order is asked for inputs in an order of their own."""
    for name, tensor in weights.items():
        if tensor.is_floating_point():
            tensor.view(torch.uint8).zero_() if tensor.itemsize == 1 else tensor.fill_(2.0**-7)
        elif name == "scale_types":
            tensor.fill_(1)
        elif name.endswith("g_idx"):
            part = spec.parts[0]
            order = torch.randperm(part.shape[1], generator=torch.Generator().manual_seed(0))
            groups = order[part.columns] // ACT_ORDER
            tensor.copy_(groups if layout.act_order else torch.full_like(groups, packed_layouts.UNKNOWN))
        elif name.endswith("qzeros"):
            tensor.copy_(torch.tensor(MIDDLES[layout.bits]).repeat(tensor.shape[-1])[: tensor.shape[-1]])
        else:
            tensor.random_(0, 100)
    return weights


def memory_of(tensors: list[Tensor]) -> int:
    """The bytes that are allocated for them, with what lies behind a tensor in its own memory."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def held(layer: Layer) -> int:
    """The bytes of one layer's weights in the form that a GPU multiplies."""
    if isinstance(layer, SparseMoE):
        layout = layer.scheme.layout
        filled(layer.gate_up_spec, layer.w13, layout)
        filled(layer.down_spec, layer.w2, layout)
        layer.finalize()
        assert layer.w13 == layer.w2 == layer.router_weights == {}
        return memory_of([*layer.tensors(), *layer.parameters(recurse=False)])
    if isinstance(layer, HeadsOfLatents):
        filled(layer.spec, layer.weights, layer.scheme.layout)
        layer.finalize()
        return memory_of([*layer.weights.values()])
    if isinstance(layer, Linear):
        filled(layer.spec, layer.weights, layer.scheme.layout)
        layer.scheme.product.finalize(layer.spec, layer.weights, layer.fused)
        return memory_of([*layer.weights.values(), *layer.parameters(recurse=False)])
    return weight_bytes(layer)


def model(quantization: dict[str, Any], width: int) -> dict[str, Any]:
    widths = {"intermediate_size": width, "moe_intermediate_size": width}
    return {**MODEL, **widths, "quantization_config": quantization}


def built(config: dict[str, Any], rank: int, ranks: int) -> int:
    """The bytes of a model on one rank."""
    model_config = ModelConfig.from_dict(config)
    context = make_context(model_config, Mesh(Group(rank, ranks)), torch.bfloat16)
    model = build_model(model_config, context)
    layers = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, Layer)]
    attach_schemes(model_config, layers, context, None)
    linears = [layer for _, layer in layers if isinstance(layer, Linear | SparseMoE)]
    for product in {one.scheme.product for one in linears}:
        product.prepare([], torch.device("cuda"), context.kernels)
    for _, layer in layers:
        layer.create_weights(torch.device("cpu"))
    return sum(held(layer) for _, layer in layers)


@sampled(("name", "ranks"), CASES, [1, 2])
def test_the_fullest_rank_holds_what_the_map_says(name: str, ranks: int) -> None:
    quantization, width = CASES[name]
    config = model(quantization, width)
    counted = mapped(shape_of(config, name), CHIPS["h200"], Parallel(tp=ranks), max_num_seqs=1).weight_bytes
    assert counted == pytest.approx(max(built(config, rank, ranks) for rank in range(ranks)), abs=NUMBERS)


EXPERTS_ALONE = {"ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp.(gate|up|down)_proj.*"]}
OF_LATENTS = {
    "unquantized": {},
    "DeepSeek's blocks": {"quantization_config": BLOCKS},
    "Kimi's integers": {"quantization_config": integers(4, 32) | EXPERTS_ALONE},
}


@sampled(("name", "ranks"), OF_LATENTS, [1, 2])
def test_latents_and_an_index_are_held_as_the_map_says(name: str, ranks: int) -> None:
    config = LATENT | OF_LATENTS[name]
    counted = mapped(shape_of(config, name), CHIPS["h200"], Parallel(tp=ranks), max_num_seqs=1).weight_bytes
    assert counted == max(built(config, rank, ranks) for rank in range(ranks))


@pytest.mark.parametrize(("ranks", "width"), [(1, 96), (2, 128), (2, 96)])
def test_biases_and_experts_in_uneven_shares_are_counted_too(ranks: int, width: int) -> None:
    """gpt-oss's experts, three groups of which two ranks share. The bias behind attention is on the first rank, and
    counted on the fullest."""
    config = {
        **MODEL, "architectures": ["GptOssForCausalLM"], "attention_bias": True, "num_local_experts": 2,
        "intermediate_size": width, "swiglu_limit": 7.0, "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    counted = mapped(shape_of(config, "oss"), CHIPS["h200"], Parallel(tp=ranks), max_num_seqs=1).weight_bytes
    uneven = width % (32 * ranks) > 0
    biases = 2 * config["num_hidden_layers"] * config["hidden_size"] if uneven else 0
    assert counted - biases == max(built(config, rank, ranks) for rank in range(ranks))


def test_a_head_that_is_quantized_is_counted_so() -> None:
    config = model({**integers(4, 32), "ignore": []}, 320)
    counted = mapped(shape_of(config, "head"), CHIPS["h200"], Parallel(), max_num_seqs=1).weight_bytes
    assert counted == built(config, 0, 1)


def test_sizes_of_tiles_and_groups_are_those_of_kernels() -> None:
    assert (resident.ROWS, resident.BLOCK, resident.MOST_BLOCKS) == (tiled.ROWS, tiled.BLOCK, tiled.MOST_BLOCKS)
    assert resident.LEAST_GROUP == packed_layouts.LEAST_GROUP
    assert checkpoint_fields.LEAST_BLOCK == fp8.LEAST_GROUP
