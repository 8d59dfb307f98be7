"""In which format each linear of a checkpoint is, for configs as the tools write them; none is needed here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError, UnsupportedModelError
from headrace.model_config import ModelConfig
from headrace.quantization.checkpoint_format import METHODS, holds_kv_scales, read_format
from headrace.quantization.formats import UNQUANTIZED, LinearFormat
from headrace.quantization.table import SCHEMES, resolve_format

LAYER = "model.layers.1"
Q, K, OUT = (f"{LAYER}.self_attn.{name}_proj" for name in "qko")
DOWN, GATE, ROUTER = f"{LAYER}.mlp.down_proj", f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.gate"
EXPERT, HEAD = f"{LAYER}.mlp.experts.0.up_proj", "lm_head"
PLAIN: tuple[str, dict[str, Any]] = ("plain", {})


def group(weights: dict[str, Any], inputs: dict[str, Any] | None = None, *targets: str, **more: Any) -> dict[str, Any]:
    weights = {"type": "int", "symmetric": True, "dynamic": False, "observer": "minmax", **weights}
    return {
        "targets": [*(targets or ("Linear",))], "weights": weights, "input_activations": inputs,
        "output_activations": None, **more,
    }  # fmt: skip


def compressed(kind: str, *groups: dict[str, Any], ignore: tuple[str, ...] = (HEAD,), **more: Any) -> dict[str, Any]:
    named = {f"group_{number}": one for number, one in enumerate(groups)}
    return {
        "quant_method": "compressed-tensors", "format": kind, "config_groups": named, "ignore": [*ignore],
        "quantization_status": "compressed", "global_compression_ratio": None, "kv_cache_scheme": None,
        "sparsity_config": {}, "transform_config": {}, **more,
    }  # fmt: skip


def floats(strategy: str, **more: Any) -> dict[str, Any]:
    return {"type": "float", "num_bits": 8, "strategy": strategy, **more}


TOKEN = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
STATIC = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
W4 = {"num_bits": 4, "strategy": "group", "group_size": 128}
STORED = {"activations": "token", "scale": "tensor", "scale_name": "weight_scale"}
BLOCKS = {"activations": "block", "block": (128, 128), "scale": "block"}
GPTQ = {"bits": 4, "group_size": 128, "act_order": False, "symmetric": True, "zeros_plus_one": True}
AWQ = {"bits": 4, "group_size": 128, "zero_point": True}
PACKED = {"bits": 4, "group_size": 128, "symmetric": True, "act_order": False}
QUARK_FP8 = {
    "weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True},
    "input_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False},
    "output_tensors": None,
    "bias": None,
}
MX8 = {"activations": "block", "block": (1, 32), "scale": "block"}
QUARK_MX = {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}}

ROUNDED = ("NVFP4_AWQ", "MXFP4", "W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8", "W4A8_AWQ", "W8A8_SQ_PER_CHANNEL")
"""what ModelOpt rounds activations for"""
CASES: dict[str, tuple[dict[str, Any], dict[str, tuple[str, dict[str, Any]]]]] = {
    "w4a16": (compressed("pack-quantized", group(W4)), {Q: ("pack_quantized", PACKED), HEAD: PLAIN}),
    "w4a16 a channel, asymmetric": (
        compressed("pack-quantized", group({"num_bits": 4, "strategy": "channel", "symmetric": False})),
        {DOWN: ("pack_quantized", {**PACKED, "group_size": 0, "symmetric": False})},
    ),
    "w8a16 with an order of inputs": (
        compressed("pack-quantized", group({**W4, "num_bits": 8, "actorder": "group"})),
        {Q: ("pack_quantized", {**PACKED, "bits": 8, "act_order": True})},
    ),
    "an order that the file does not need": (
        compressed("pack-quantized", group({**W4, "actorder": "weight"}), ignore=("re:.*mlp.gate$", HEAD)),
        {Q: ("pack_quantized", PACKED), GATE: ("pack_quantized", PACKED), ROUTER: PLAIN},
    ),
    "w8a8 in integers": (
        compressed("int-quantized", group({"num_bits": 8, "strategy": "channel"}, {**TOKEN, "type": "int"})),
        {Q: ("int8", {"scale": "channel", "activations": "token", "symmetric": True})},
    ),
    "w8a8 in integers, static and asymmetric": (
        compressed(
            "int-quantized",
            group({"num_bits": 8, "strategy": "tensor"}, {**STATIC, "type": "int", "symmetric": False}),
        ),
        {Q: ("int8", {"scale": "tensor", "activations": "tensor", "symmetric": False})},
    ),
    "w4a8, a byte for every code": (
        compressed("int-quantized", group(W4, {**TOKEN, "type": "int"})),
        {Q: ("int_quantized", {"bits": 4, "group_size": 128, "symmetric": True})},
    ),
    "w8a8 in groups with zero points": (
        compressed("int-quantized", group({**W4, "num_bits": 8, "symmetric": False}, {**TOKEN, "type": "int"})),
        {Q: ("int_quantized", {"bits": 8, "group_size": 128, "symmetric": False})},
    ),
    "w4afp8, packed": (compressed("pack-quantized", group(W4, TOKEN)), {Q: ("pack_quantized", PACKED)}),
    "fp8 dynamic": (
        compressed("float-quantized", group(floats("channel"), TOKEN), ignore=("re:.*lm_head", f"{LAYER}.mlp")),
        {Q: ("fp8_stored", {**STORED, "scale": "channel"}), DOWN: PLAIN, HEAD: PLAIN},
    ),
    "fp8 static": (
        compressed("float-quantized", group(floats("tensor"), STATIC)),
        {Q: ("fp8_stored", {**STORED, "activations": "tensor"})},
    ),
    "fp8 beside 16-bit activations": (
        compressed("naive-quantized", group(floats("channel"))),
        {Q: ("fp8_stored", {**STORED, "scale": "channel", "activations": "none"})},
    ),
    "fp8 blocks": (
        compressed(
            "float-quantized",
            group(floats("block", block_structure=[128, 128]), {**TOKEN, "strategy": "group", "group_size": 128}),
        ),
        {Q: ("fp8_stored", {**BLOCKS, "scale_name": "weight_scale"})},
    ),
    "fp8 blocks in words": (
        compressed("float-quantized", group(floats("block", block_structure="64x128"), TOKEN)),
        {Q: ("fp8_stored", {**BLOCKS, "block": (64, 128), "scale_name": "weight_scale"})},
    ),
    "nvfp4": (
        compressed(
            "nvfp4-pack-quantized",
            group(
                {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
                {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
            ),
        ),
        {Q: ("nvfp4", {"names": "compressed-tensors"})},
    ),
    "mxfp4": (
        compressed(
            "mxfp4-pack-quantized",
            group({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
             "scale_dtype": "torch.uint8"}),
        ),
        {Q: ("mxfp4", {"names": "compressed-tensors"})},
    ),
    "mxfp8": (
        compressed(
            "mxfp8-quantized",
            group(
                floats("group", group_size=32, scale_dtype="torch.uint8"),
                floats("group", group_size=32, scale_dtype="torch.uint8", dynamic=True),
                format="mxfp8-quantized",
            ),
        ),
        {Q: ("fp8_stored", {**MX8, "scale_name": "weight_scale"})},
    ),
    "attention with scales of its own": (
        compressed(
            "mixed-precision",
            {"targets": ["LlamaAttention"], "weights": None, "input_activations": STATIC, "format": "dense"},
            group(W4, format="pack-quantized"),
            {"targets": ["Linear"], "weights": None, "output_activations": STATIC, "format": "dense"},
            kv_cache_scheme=STATIC,
        ),
        {Q: ("pack_quantized", PACKED), HEAD: PLAIN},
    ),
    "several groups": (
        compressed(
            "mixed-precision",
            group(W4, None, r"re:.*mlp\..*", format="pack-quantized"),
            group(floats("channel"), TOKEN, "re:.*self_attn.*", format="float-quantized"),
            group({**W4, "num_bits": 8}, None, OUT, format="pack-quantized"),
            ignore=(HEAD, "re:.*gate$"),
        ),
        {
            Q: ("fp8_stored", {**STORED, "scale": "channel"}), EXPERT: ("pack_quantized", PACKED), ROUTER: PLAIN,
            OUT: ("pack_quantized", {**PACKED, "bits": 8}), HEAD: PLAIN,
        },
    ),
    "deepseek": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
        {EXPERT: ("fp8_stored", {**BLOCKS, "scale_name": "weight_scale_inv"}), HEAD: PLAIN},
    ),
    "autofp8": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": [HEAD, OUT],
         "kv_cache_scheme": "static"},
        {Q: ("fp8_stored", {**STORED, "activations": "tensor"}), OUT: PLAIN},
    ),
    "transformers' fp8": (
        {
            "quant_method": "fp8", "activation_scheme": "static", "dequantize": False, "weight_block_size": None,
            "modules_to_not_convert": [r"model\.layers\.\d+\.mlp"],
        },
        {Q: ("fp8_stored", {**STORED, "activations": "tensor", "scale_name": "weight_scale_inv"}), DOWN: PLAIN},
    ),
    "transformers' mxfp8": (
        {"quant_method": "mxfp8", "modules_to_not_convert": ["gate", HEAD], "weight_block_size": [1, 32]},
        {EXPERT: ("fp8_stored", {**MX8, "scale_name": "weight_scale_inv"}), ROUTER: PLAIN},
    ),
    "fbgemm": (
        {
            "quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0,
            "modules_to_not_convert": [HEAD, "model.layers.0.self_attn", f"{LAYER}.self_attn"],
        },
        {DOWN: ("fp8_stored", {**STORED, "scale": "channel", "bound": 1200.0}), Q: PLAIN, HEAD: PLAIN},
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True,
         "modules_to_not_convert": None},
        {Q: ("awq", AWQ), HEAD: PLAIN},
    ),
    "awq in AutoAWQ's own words": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": -1, "version": "GEMM", "zero_point": True,
         "modules_to_not_convert": ["self_attn.k", "mlp.gate."]},
        {Q: ("awq", {**AWQ, "group_size": 0}), K: PLAIN, GATE: ("awq", {**AWQ, "group_size": 0})},
    ),
    "awq in GPTQModel's words": (
        {"quant_method": "awq", "method": "awq", "bits": 4, "group_size": 32, "format": "gemm", "version": "gemm",
         "checkpoint_format": "gemm", "zero_point": False, "desc_act": False, "lm_head": True, "pack_dtype": "int32",
         "dynamic": {r"-:.*\.o_proj": {}, r"+:.*down_proj": {"group_size": 64}}},
        {Q: ("awq", {**AWQ, "group_size": 32, "zero_point": False}), OUT: PLAIN,
         DOWN: ("awq", {**AWQ, "group_size": 64, "zero_point": False}),
         HEAD: ("awq", {**AWQ, "group_size": 32, "zero_point": False})},
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True, "lm_head": False},
        {Q: ("gptq", {**GPTQ, "act_order": True}), HEAD: PLAIN},
    ),
    "gptq v2 of 3 bits with its head": (
        {"quant_method": "gptq", "bits": 3, "group_size": 32, "desc_act": False, "sym": False, "lm_head": True,
         "checkpoint_format": "gptq_v2"},
        {name: ("gptq", {**GPTQ, "bits": 3, "group_size": 32, "symmetric": False, "zeros_plus_one": False})
         for name in (Q, HEAD)},
    ),
    "gptq v2 under the other name": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "format": "gptq_v2", "meta": {}},
        {Q: ("gptq", {**GPTQ, "zeros_plus_one": False})},
    ),
    "gptq's rules": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False,
         "dynamic": {r"+:.*\.1\..*q_proj.*": {"bits": 8, "group_size": 64, "desc_act": True}, r"-:.*\.1\..*_proj": {}}},
        {Q: ("gptq", {**GPTQ, "bits": 8, "group_size": 64, "act_order": True}), OUT: PLAIN,
         "model.layers.0.mlp.up_proj": ("gptq", GPTQ)},
    ),
    "optimum's gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False,
         "modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.down_proj"]]},
        {Q: ("gptq", GPTQ), DOWN: ("gptq", GPTQ), OUT: PLAIN, HEAD: PLAIN},
    ),
    "autoround as gptq": (
        {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": True, "data_type": "int", "iters": 200,
         "packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers",
         "extra_config": {OUT: {"bits": 16, "data_type": "fp"}, r"model\.layers\.\d\.mlp\.down_proj": {"bits": 8}}},
        {Q: ("gptq", {**GPTQ, "group_size": 64}), OUT: PLAIN, DOWN: ("gptq", {**GPTQ, "group_size": 64, "bits": 8}),
         HEAD: PLAIN},
    ),
    "autoround of its own": (
        {"quant_method": "intel/auto-round", "bits": 2, "group_size": 32, "sym": False, "packing_format": "auto_round"},
        {Q: ("gptq", {**GPTQ, "bits": 2, "group_size": 32, "symmetric": False, "zeros_plus_one": False}), HEAD: PLAIN},
    ),
    "autoround as awq": (
        {"quant_method": "auto-round", "bits": 4, "group_size": 128, "packing_format": "auto_round:auto_awq"},
        {Q: ("awq", AWQ)},
    ),
    "autoround's mxfp4, with a layer in mxfp8": (
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "mx_fp", "act_bits": 4,
         "act_data_type": "mx_fp_rceil", "packing_format": "auto_round:llm_compressor",
         "block_name_to_quantize": "model.layers",
         "extra_config": {OUT: {"bits": 16, "group_size": None}, DOWN: {"bits": 8, "act_bits": 8}}},
        {Q: ("mxfp4", {"names": "compressed-tensors"}), OUT: PLAIN, HEAD: PLAIN,
         DOWN: ("fp8_stored", {**MX8, "scale_name": "weight_scale"})},
    ),
    "autoround's nvfp4": (
        {"quant_method": "auto-round", "bits": 4, "group_size": 16, "data_type": "nv_fp", "act_bits": 4,
         "act_data_type": "nv_fp4_with_static_gs", "packing_format": "auto_round:llm_compressor"},
        {Q: ("nvfp4", {"names": "auto-round"}), HEAD: PLAIN},
    ),
    "autoround's static fp8": (
        {"quant_method": "auto-round", "bits": 8, "group_size": -1, "data_type": "fp", "act_bits": 8, "fmt": "e4m3",
         "act_data_type": "fp", "act_dynamic": False, "packing_format": "auto_round:fp8_static"},
        {Q: ("fp8_stored", {**STORED, "scale": "channel", "activations": "tensor"}), HEAD: PLAIN},
    ),
    "autoround's fp8 in blocks": (
        {"quant_method": "auto-round", "bits": 8, "group_size": [128, 128], "data_type": "fp", "act_bits": 8,
         "act_dynamic": True, "packing_format": "auto_round"},
        {Q: ("fp8_stored", {**BLOCKS, "scale_name": "weight_scale_inv"})},
    ),
    "quark fp8": (
        {"quant_method": "quark", "global_quant_config": QUARK_FP8, "exclude": ["*lm_head"],
         "layer_type_quant_config": {}, "layer_quant_config": {"*o_proj": {"weight": None}},
         "export": {"kv_cache_group": ["*k_proj", "*v_proj"], "pack_method": "reorder",
                    "weight_format": "real_quantized"}},
        {Q: ("fp8_stored", {**STORED, "activations": "tensor"}), OUT: PLAIN, HEAD: PLAIN},
    ),
    "quark mxfp4, and fp8 by name": (
        {"quant_method": "quark", "global_quant_config": {"weight": [QUARK_MX["weight"]]}, "exclude": [HEAD, "*.gate"],
         "layer_quant_config": {"model.layers.*.self_attn.*": {
             "weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"},
             "input_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_token", "is_dynamic": True}}}},
        {Q: ("fp8_stored", {**STORED, "scale": "channel"}), EXPERT: ("mxfp4", {"names": "quark"}), ROUTER: PLAIN},
    ),
    "quark mxfp8": (
        {"quant_method": "quark", "global_quant_config": {
            "weight": {"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"},
            "input_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 32, "is_dynamic": True}}},
        {Q: ("fp8_stored", {**MX8, "scale_name": "weight_scale"})},
    ),
    "quark fp8 in blocks": (
        {"quant_method": "quark", "global_quant_config": {
            "weight": {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [128, 64]}, "input_tensors": None}},
        {Q: ("fp8_stored", {**BLOCKS, "block": (128, 64), "activations": "none", "scale_name": "weight_scale"})},
    ),
    "quark int8 by type": (
        {"quant_method": "quark", "global_quant_config": {"weight": None}, "layer_type_quant_config": {"nn.Linear": {
            "weight": {"dtype": "int8", "qscheme": "per_channel"},
            "input_tensors": {"dtype": "int8", "qscheme": "per_tensor", "symmetric": True}}}},
        {Q: ("int8", {"scale": "channel", "activations": "tensor", "symmetric": True})},
    ),
    "modelopt fp8": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [HEAD, "model.layers.1.mlp*"],
         "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}, "producer": {"name": "modelopt"}},
        {Q: ("fp8_stored", {**STORED, "activations": "tensor"}), EXPERT: PLAIN},
    ),
    "modelopt's older file": (
        {"quant_method": "modelopt", "producer": {"name": "modelopt", "version": "0.23"},
         "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
                          "exclude_modules": [HEAD, "model.layers.*.self_attn.o_proj"]}},
        {Q: ("nvfp4", {"names": "modelopt"}), OUT: PLAIN, HEAD: PLAIN},
    ),
    "modelopt mixed": (
        {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {
            Q: {"quant_algo": "FP8"}, EXPERT: {"quant_algo": "NVFP4", "group_size": 16}}}, "producer": {}},
        {Q: ("fp8_stored", {**STORED, "activations": "tensor"}), EXPERT: ("nvfp4", {"names": "modelopt"}), OUT: PLAIN},
    ),
    "modelopt's awq": (
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 64, "has_zero_point": False,
         "pre_quant_scale": True, "ignore": [HEAD]},
        {Q: ("modelopt_awq", {"bits": 4, "group_size": 64}), HEAD: PLAIN},
    ),
    "gpt-oss": (
        {"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", HEAD]},
        {f"{LAYER}.mlp.experts.0.gate_proj": ("mxfp4", {"names": "blocks"}), Q: PLAIN, HEAD: PLAIN},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_configs_as_tools_write_them(name: str) -> None:
    quantization, expected = CASES[name]
    found = read_format(quantization)
    for linear, (layout, settings) in expected.items():
        one = found.format_for(linear)
        assert (one.layout, dict(one.settings)) == (layout, settings), linear
        assert one.layout in SCHEMES


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nvfp4", True),
        ("modelopt's older file", True),
        ("modelopt mixed", True),
        ("w4a8, a byte for every code", True),
        ("w8a8 in groups with zero points", True),
        ("w4afp8, packed", True),
        ("w8a8 in integers", False),
        ("modelopt's awq", False),
        ("mxfp4", False),
        ("mxfp8", False),
    ],
)
def test_activations_that_keep_16_bits_are_a_note(name: str, says: bool) -> None:
    assert any("they keep 16 bits here" in note for note in read_format(CASES[name][0]).notes) == says


@pytest.mark.parametrize("bits", [4, 8])
def test_activations_of_quarks_mxfp4(bits: int) -> None:
    inputs = {"dtype": "fp4" if bits == 4 else "fp8_e4m3", "is_dynamic": bits == 4}
    (note,) = read_format({"quant_method": "quark", "global_quant_config": {**QUARK_MX, "input_tensors": inputs}}).notes
    assert f"asks for activations of {bits} bits beside weights of 4" in note


@pytest.mark.parametrize(
    ("algorithm", "layout", "settings"),
    [
        ("fp8_pb_wo", "fp8_stored", {**BLOCKS, "activations": "none", "scale_name": "weight_scale"}),
        ("MXFP8", "fp8_stored", {**MX8, "scale_name": "weight_scale"}),
        ("NVFP4_AWQ", "nvfp4", {"names": "modelopt-awq"}),
        ("W4A16_NVFP4", "nvfp4", {"names": "modelopt"}),
        ("W4A8_NVFP4_FP8", "nvfp4", {"names": "modelopt", "group_size": 32}),
        ("MXFP4", "mxfp4", {"names": "quark"}), ("W4A8_MXFP4_FP8", "mxfp4", {"names": "quark"}),
        ("W4A8_AWQ", "modelopt_awq", {"bits": 4, "group_size": 128}),
        ("W8A16", "modelopt_int8", {"bits": 8, "group_size": 0}),
        ("W8A8_SQ_PER_CHANNEL", "modelopt_int8", {"bits": 8, "group_size": 0}),
    ],
)  # fmt: skip
def test_modelopts_further_algorithms(algorithm: str, layout: str, settings: dict[str, Any]) -> None:
    found = read_format({"quant_method": "modelopt", "quant_algo": algorithm, "ignore": [HEAD]})
    assert (found.default.layout, dict(found.default.settings)) == (layout, settings)
    assert any("they keep 16 bits here" in note for note in found.notes) == (algorithm in ROUNDED)


@pytest.mark.parametrize(
    ("packing", "layout", "plus_one"),
    [
        ("auto_round:auto_gptq", "gptq", True), ("auto_round:gptq:exllamav2", "gptq", True),
        ("auto_gptq", "gptq", True), ("auto_round", "gptq", False), ("auto_round:gptqmodel", "gptq", False),
        ("auto_round:exllamav2", "gptq", False),
        ("auto_round:auto_awq", "awq", None), ("auto_round:awq:gemm", "awq", None), (None, "gptq", True),
    ],
)  # fmt: skip
def test_whose_packing_autoround_took(packing: str | None, layout: str, plus_one: bool | None) -> None:
    found = read_format({"quant_method": "auto-round", "bits": 4, "packing_format": packing}).default
    assert (found.layout, dict(found.settings).get("zeros_plus_one")) == (layout, plus_one)


@pytest.mark.parametrize(
    ("name", "linear", "bits"),
    [
        ("w4a16", Q, 4 + 16 / 128), ("w8a16 with an order of inputs", Q, 8 + 16 / 128),
        ("awq", Q, 4 + 20 / 128), ("gptq v2 of 3 bits with its head", Q, 4 + 20 / 32),
        ("nvfp4", Q, 4.5), ("mxfp4", Q, 4.25), ("deepseek", Q, 8 + 32 / 128**2), ("fp8 dynamic", Q, 8 + 32 / 4096),
        ("w8a8 in integers", Q, 8 + 32 / 4096), ("gpt-oss", EXPERT, 4.25), ("gpt-oss", Q, 16),
    ],
)  # fmt: skip
def test_bits_of_a_weight_with_its_scales(name: str, linear: str, bits: float) -> None:
    one = read_format(CASES[name][0]).format_for(linear)
    assert one.format.bytes_per_weight * 8 == pytest.approx(bits)


def test_our_fused_linears_may_be_named_too() -> None:
    found = read_format(compressed("pack-quantized", group(W4), ignore=("qkv_proj", "model.layers.2.mlp.experts")))
    assert found.format_for(Q, f"{LAYER}.self_attn.qkv_proj") == UNQUANTIZED
    assert found.format_for(f"{LAYER}.mlp.experts.0.up_proj", f"{LAYER}.mlp.experts") != UNQUANTIZED
    assert found.format_for("model.layers.2.mlp.experts.0.up_proj", "model.layers.2.mlp.experts") == UNQUANTIZED


def test_a_name_is_whole_parts() -> None:
    found = read_format({"quant_method": "fp8", "modules_to_not_convert": [ROUTER, "model.layers.1"]})
    assert found.format_for("model.layers.11.mlp.gate_proj") != UNQUANTIZED
    assert found.format_for("model.layers.1.mlp.gate_proj") == UNQUANTIZED


def test_thousands_of_names_take_one_look_up_each() -> None:
    layers = {f"model.layers.{n}.mlp.experts.{e}.up_proj": {"quant_algo": "FP8"} for n in range(48) for e in range(128)}
    found = read_format({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    assert all(found.format_for(name) != UNQUANTIZED for name in list(layers)[:3000])
    assert found.format_for(Q) == UNQUANTIZED


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"quant_method": name}, f"quant_method '{name}' is not served; served: compressed-tensors, fp8, mxfp8, fbgemm")
      for name in ("bitsandbytes", "torchao", "gguf", "hqq", "aqlm")),
    ({}, "quant_method 'unnamed' is not served"),
    ({"quant_method": 8}, "`quantization_config.quant_method` is 8; must be a text"),
    (compressed("marlin-24", group(W4)), 'format` is "marlin-24"; must be one of pack-quantized'),
    (compressed("pack-quantized", group(W4), sparsity_config={"format": "sparse-24-bitmask"}),
     '`quantization_config.sparsity_config.format` is "sparse-24-bitmask"; must be dense'),
    (compressed("pack-quantized", group({**W4, "num_bits": 3})), r"weights.num_bits` is 3; must be one of 4, 8"),
    (compressed("pack-quantized", group({**W4, "group_size": -2})), r"group_size` is -2; must be an integer from -1"),
    (compressed("pack-quantized", group({"num_bits": 8, "strategy": "tensor"})),
     '"tensor"; must be one of channel, gro'),
    (compressed("pack-quantized", group(W4, None, "LlamaMLP")), r'targets` is \["LlamaMLP"\]; must be Linear, names'),
    (compressed("pack-quantized", group(W4), ignore=("re:(",)), "ignore` is .*regular expressions after `re:`"),
    (compressed("float-quantized", group(floats("block"))),
     "lacks `quantization_config.config_groups.group_0.weights.bl"),
    (compressed("float-quantized", group(floats("channel"), {**STATIC, "strategy": "token"})),
     "dynamic` is false; must"),
    (compressed("x", group({"type": "float", "num_bits": 4, "group_size": 64}), format=None),
     "16 .nvfp4. or 32 .mxfp4."),
    (compressed("pack-quantized", {"targets": ["Linear"], "weights": 4}), "weights` is 4; must be an object"),
    ({"quant_method": "compressed-tensors", "config_groups": {"g": 1}}, "`quantization_config.config_groups.g` is 1"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, '`quantization_config.fmt` is "e5m2"; must be one of e4m3'),
    ({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 128]},
     '"static"; must be one of dy'),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size` is .128.; must be a list of at least 2"),
    ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, '"lm_head"; must be a list of texts'),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"},
     '`quantization_config.version` is "gemv"; must be one of gemm'),
    ({"quant_method": "awq", "bits": 4, "format": "gemv_fast"}, '`quantization_config.format` is "gemv_fast"; must be'),
    ({"quant_method": "awq", "bits": 4, "pack_method": "order"}, 'pack_method` is "order"; must be one of reorder'),
    ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, 'backend` is "llm-awq"; must be autoawq: llm-awq packs'),
    ({"quant_method": "gptq", "bits": 4, "format": "gptq_p"}, 'format` is "gptq_p"; must be one of gptq, gptq_v2'),
    ({"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"}, '"fp4"; must be one of fp8'),
    ({"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 16}, "group_size` is 16; must be 32"),
    ({"quant_method": "quark", "global_quant_config": {
        "weight": {"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 32},
        "input_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}}, '"per_tensor"; must be one of per_group'),
    ({"quant_method": "awq", "bits": "4"}, '`quantization_config.bits` is "4"; must be an integer'),
    ({"quant_method": "awq", "bits": 4, "group_size": []}, r"group_size` is \[\]; must be an integer"),
    ({"quant_method": "gptq", "bits": 5, "group_size": 128},
     "`quantization_config.bits` is 5; must be one of 2, 3, 4, 8"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, '"marlin"; must be one of gptq, gptq_v2'),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {}}}, r"dynamic` is .*regular expressions"),
    ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_int"}, '"mx_int"; must be int, or what begins with mx'),
    ({"quant_method": "auto-round", "bits": 8, "data_type": "fp8_e5m2"}, 'data_type` is "fp8_e5m2"; must be'),
    ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp", "group_size": 64},
     "group_size` is 64; must be 32"),
    ({"quant_method": "auto-round", "bits": 8, "act_bits": 8}, "act_bits` is 8; must be 16 or more beside integers"),
    ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp", "extra_config": {"x": {"data_type": "int"}}},
     'data_type` is "int"; must be one of mx_fp'),
    ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:llm_compressor"},
     "must be one of auto_gptq"),
    ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "uint4"}}},
     '"uint4"; must be one of fp8_e4m3'),
    ({"quant_method": "quark", "global_quant_config": {"weight": [{}, {}]}},
     "`.*weight` rounds in 2 stages; accepted: one"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"},
     '"NVFP4_SVD"; must be one of FP8, FP8_PER_CHANNEL_PER_TOKEN'),
    ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "has_zero_point": True},
     "has_zero_point` is true; must be false for W4A16_AWQ"),
    (compressed("int-quantized", group({"num_bits": 4, "strategy": "tensor"}, TOKEN)),
     '"tensor"; must be one of channel, group'),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size` is 32; must be 16"),
]  # fmt: skip


@pytest.mark.parametrize(("quantization", "message"), REFUSED)
def test_what_no_layout_holds_is_refused_by_name(quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as raised:
        read_format(quantization or {"bits": 4})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", CASES)
def test_any_value_of_any_field_is_read_or_refused_in_one_line(name: str) -> None:
    said = []
    for changed in spoiled(CASES[name][0]):
        if not isinstance(changed, dict):
            continue
        assert holds_kv_scales(changed) in (True, False)
        try:
            found = read_format(changed)
        except UnsupportedModelError as error:
            said.append(str(error))
        else:
            assert found.format_for(Q).format.bits in (4, 8, 16)
    assert said
    assert not [line for line in said if "\n" in line or len(line) > 400]


def spoiled(fields: Any) -> Iterator[Any]:
    """Yield the fields with another value in one place, for every place."""
    yield from (0, -7, 3, 1e300, True, None, "", "x", "re:(", [], [[]], ["re:("], {}, {"x": 1})
    for key, value in (
        fields.items() if isinstance(fields, dict) else enumerate(fields) if isinstance(fields, list) else ()
    ):
        for other in spoiled(value):
            copied = fields.copy()
            copied[key] = other
            yield copied


@pytest.mark.parametrize(
    ("quantization", "holds"),
    [
        (None, False), (CASES["w4a16"][0], False), (CASES["autofp8"][0], True), (CASES["quark fp8"][0], True),
        (CASES["modelopt fp8"][0], True), (CASES["modelopt's older file"][0], True), (CASES["modelopt mixed"][0],
         False),
        (compressed("pack-quantized", group(W4), kv_cache_scheme=floats("tensor")), True),
        (compressed("pack-quantized", group(W4), kv_cache_scheme={"type": "int", "num_bits": 8}), False),
        ({"quant_method": "quark", "kv_cache_quant_config": {"*k_proj": {"output_tensors": {"dtype": "fp8_e4m3"}}}},
         True),
        ({"quant_method": "quark", "layer_quant_config": {"*v_proj": {"output_tensors": {"dtype": "fp8_e4m3"}}}}, True),
        ({"quant_method": "modelopt", "kv_cache_scheme": "NVFP4"}, False),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": "FP8"}, True),
        (CASES["attention with scales of its own"][0], True),
    ],
)  # fmt: skip
def test_scales_of_the_kv_cache(quantization: dict[str, Any] | None, holds: bool) -> None:
    assert holds_kv_scales(quantization) is holds


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": {"type": "int", "num_bits": 8}}, "int8"),
        (compressed("pack-quantized", group(W4), kv_cache_scheme={"type": "float", "num_bits": 4}), "float4"),
        ({"quant_method": "quark", "global_quant_config": QUARK_FP8,
          "kv_cache_quant_config": {"*k_proj": {"output_tensors": {"dtype": "int8"}}}}, "int8"),
        (CASES["quark fp8"][0], ""), (CASES["autofp8"][0], ""), (CASES["w4a16"][0], ""),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None}, ""),
    ],
)  # fmt: skip
def test_a_kv_cache_that_is_not_served_is_a_note(fields: dict[str, Any], kind: str) -> None:
    notes = [note for note in read_format(fields).notes if "KV cache" in note]
    assert len(notes) == bool(kind)
    assert not kind or f"asks for a KV cache in {kind}, which is not served" in notes[0]


def test_a_config_about_the_kv_cache_alone_leaves_the_weights_plain() -> None:
    for quantization in (
        compressed("dense", kv_cache_scheme=floats("tensor")),
        {"quant_method": "modelopt", "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}},
    ):
        assert read_format(quantization).method == ""
        assert holds_kv_scales(quantization)


# ---- --quantization, which names what the checkpoint is


def model(quantization: dict[str, Any] | None) -> ModelConfig:
    sizes = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"), 16)
    return ModelConfig.from_dict({"architectures": ["LlamaForCausalLM"], "quantization_config": quantization, **sizes})


@pytest.mark.parametrize(
    ("name", "word", "says"),
    [
        ("w4a16", "gptq", r"--quantization gptq: the checkpoint is compressed-tensors, int4 \(.*group_size 128"),
        ("w4a16", "compressed-tensors", ""), ("w4a16", "awq", "is compressed-tensors"), ("awq", "awq_marlin", "is awq"),
        ("gptq", "gptq_marlin", "is gptq"), ("fp8 static", "fp8", "is compressed-tensors, fp8"),
         ("deepseek", "fp8", ""),
        ("modelopt fp8", "modelopt", ""), ("modelopt's older file", "modelopt_fp4", "is modelopt, nvfp4"),
        ("quark fp8", "fp8", "is quark"), ("gpt-oss", "mxfp4", ""), ("several groups", "fp8", "is compressed-tensors"),
    ],
)  # fmt: skip
def test_another_word_for_the_same_is_taken_with_a_line(name: str, word: str, says: str) -> None:
    found, bare = (resolve_format(model(CASES[name][0]), quantization) for quantization in (word, None))
    assert (found.default, found.rules) == (bare.default, bare.rules)
    lines = found.notes[: len(found.notes) - len(bare.notes)]
    assert len(lines) == bool(says)
    if says:
        assert re.search(says, lines[0])


@pytest.mark.parametrize(
    ("name", "word", "held"),
    [
        ("w4a16", "fp8", "is compressed-tensors, int4"), ("awq", "fp8", "is awq, int4"), ("gptq", "mxfp4", "is gptq"),
        ("w8a8 in integers", "fp8", "compressed-tensors, int8"), ("deepseek", "gptq", "is fp8, fp8"),
        ("nvfp4", "ptpc_fp8", "nvfp4"),
         ("fp8 static", "awq_marlin", "accepted: no --quantization, or fp8, fp8_per_tens"),
    ],
)  # fmt: skip
def test_a_word_for_something_else_is_refused(name: str, word: str, held: str) -> None:
    with pytest.raises(ConfigError, match=f"'{word}' contradicts config.json: .*{held}"):
        resolve_format(model(CASES[name][0]), word)


def test_a_word_on_an_unquantized_checkpoint() -> None:
    assert resolve_format(model(None), "ptpc_fp8").default.format.name == "ptpc_fp8"
    with pytest.raises(
        ConfigError, match=r"'gptq' contradicts the checkpoint, .* unquantized \(float32\); accepted: fp8"
    ):
        resolve_format(model(None), "gptq")


def test_every_method_is_tried() -> None:
    tried = {case.get("quant_method") for case, _ in CASES.values()}
    words = {"gptq_v2", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8"}
    assert {*METHODS} - tried == words, "for others' fields"
    assert LinearFormat() == UNQUANTIZED


@pytest.mark.parametrize(
    ("name", "fields", "layout"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 64, "desc_act": True, "sym": True}, "gptq"),
        ("quant_config.json", {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}, "awq"),
    ],
)
def test_files_beside_that_old_tools_write(name: str, fields: dict[str, Any], layout: str, tmp_path: Path) -> None:
    raw = {name: value for name, value in model(None).raw.items() if name != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / name).write_text(json.dumps(fields))
    found = read_format(ModelConfig.from_folder(tmp_path).quantization).default
    assert (found.layout, dict(found.settings)["group_size"]) == (layout, 64)


def test_modelopts_older_exports_keep_it_in_a_file_beside(tmp_path: Path) -> None:
    raw = {name: value for name, value in model(None).raw.items() if name != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert read_format(ModelConfig.from_folder(tmp_path).quantization).default.layout == "fp8_stored"
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": CASES["awq"][0]}))
    assert read_format(ModelConfig.from_folder(tmp_path).quantization).method == "awq"


def test_modelopts_size_of_groups_is_in_the_file_beside(tmp_path: Path) -> None:
    """Its config.json repeats the name of the algorithm, and not that."""
    own = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "ignore": [HEAD], "producer": {"name": "modelopt"}}
    beside = {"quant_algo": "W4A16_AWQ", "group_size": 32, "exclude_modules": [HEAD]}
    (tmp_path / "config.json").write_text(json.dumps({**model(None).raw, "quantization_config": own}))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": beside}))
    found = read_format(ModelConfig.from_folder(tmp_path).quantization)
    assert dict(found.default.settings) == {"bits": 4, "group_size": 32}
    beside["quant_algo"] = "NVFP4"  # of another checkpoint
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": beside}))
    found = read_format(ModelConfig.from_folder(tmp_path).quantization)
    assert dict(found.default.settings) == {"bits": 4, "group_size": 128}


def test_the_old_name_of_the_field() -> None:
    raw = {name: value for name, value in model(None).raw.items() if name != "quantization_config"}
    old_name = {**raw, "compression_config": CASES["w4a16"][0]}
    assert read_format(ModelConfig.from_dict(old_name).quantization).method == "compressed-tensors"
