"""Quantized checkpoints that guides name: each is planned, explained and served, or refused for a reason that is true.

Their config.json is made here after the published ones.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.advice.explain.explain import explain
from headrace.distributed.mesh import Group, Mesh
from headrace.errors import ConfigError
from headrace.model_config import ModelConfig
from headrace.models.loader import attach_schemes, build_model, slots_of
from headrace.models.registry import SERVED
from headrace.planner.catalogue import catalogue, find_config, find_model
from headrace.planner.chips import CHIPS
from headrace.planner.engines import model_gaps
from headrace.planner.parallel import Parallel
from headrace.planner.plan import make_plan
from headrace.planner.plan_request import PlanRequest
from headrace.planner.shapes import shape_of
from headrace.quantization.formats import UNQUANTIZED
from headrace.quantization.table import resolve_format
from tests.models.driver import make_context
from tests.planner.planner_cases import mapped


def quark_tensor(dtype: str = "fp8_e4m3", **changes: Any) -> dict[str, Any]:
    usual = {
        "dtype": dtype, "is_dynamic": False, "qscheme": "per_tensor", "ch_axis": None, "group_size": None,
        "symmetric": True, "round_method": "half_even", "scale_type": "float", "scale_format": None,
        "scale_calculation_mode": None, "observer_cls": "PerTensorMinMaxObserver",
    }  # fmt: skip
    return {**usual, **changes}


def quark(weight: dict[str, Any], inputs: dict[str, Any], cache: bool = False, *exclude: str) -> dict[str, Any]:
    def linears(outputs: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"weight": weight, "input_tensors": inputs, "output_tensors": outputs, "bias": None}

    keys = {f"*{name}_proj": linears(quark_tensor()) for name in "kv"} if cache else {}
    return {
        "quant_method": "quark", "quant_mode": "eager_mode", "algo_config": None, "softmax_quant_spec": None,
        "global_quant_config": linears(), "layer_quant_config": keys, "layer_type_quant_config": {},
        "exclude": ["lm_head", *exclude],
        "export": {
            "kv_cache_group": ["*k_proj", "*v_proj"] if cache else [], "min_kv_scale": 0.0, "pack_method": "reorder",
            "weight_format": "real_quantized", "weight_merge_groups": None,
        },
    }  # fmt: skip


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None, *ignore: str) -> dict[str, Any]:
    usual = {
        "actorder": None, "block_structure": None, "dynamic": False, "observer": "minmax", "observer_kwargs": {},
        "symmetric": True, "group_size": None,
    }  # fmt: skip
    described = None if inputs is None else {**usual, "dynamic": True, "observer": None, **inputs}
    group = {
        "targets": ["Linear"], "weights": {**usual, **weights}, "input_activations": described,
        "output_activations": None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head", *ignore], "kv_cache_scheme": None, "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
    }  # fmt: skip


FP8_KV = quark(quark_tensor(), quark_tensor(), cache=True)
OF_GROUPS = {"qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0"}
FP4_TENSORS = quark_tensor("fp4", **OF_GROUPS), quark_tensor("fp4", is_dynamic=True, **OF_GROUPS)
MXFP4 = quark(*FP4_TENSORS, cache=True)
QUARK_INT8 = quark(
    quark_tensor("int8", qscheme="per_channel", ch_axis=0), quark_tensor("int8", is_dynamic=True, qscheme="per_channel")
)
OLD_FP8_KV = {
    "quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"], "kv_cache_scheme": "static"
}  # fmt: skip
AWQ = {
    "quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True,
    "modules_to_not_convert": None,
}  # fmt: skip
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
W4A16 = compressed("pack-quantized", W4, None)
GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 128, "damp_percent": 0.1, "desc_act": True, "sym": True,
    "true_sequential": True, "exllama_config": {"version": 1}, "modules_in_block_to_quantize": None, "tokenizer": None,
    "use_cuda_fp16": False, "batch_size": 1, "block_name_to_quantize": None, "cache_block_outputs": True,
}  # fmt: skip
W8A8 = compressed(
    "int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"},
    {"num_bits": 8, "type": "int", "strategy": "token"},
)  # fmt: skip
DEEPSEEK = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]
}  # fmt: skip
QWEN_FP8 = {**DEEPSEEK, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]}
GPT_OSS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
    ],
}  # fmt: skip
KIMI_LEFT_ALONE = ("re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*")
KIMI = compressed("pack-quantized", {**W4, "group_size": 32}, None, *KIMI_LEFT_ALONE)
MAVERICK = compressed(
    "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"},
    {"num_bits": 8, "type": "float", "strategy": "token"}, "re:.*self_attn", "re:.*router", "re:vision_model.*",
)  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """One that a guide names, and what is true of it."""

    model: str
    """of the catalogue"""
    quantization: dict[str, Any]
    held: str
    """the format of most linears"""
    tensors: tuple[str, ...] = ()
    """of the first layer's linears in attention, or of experts, in its files; empty: headrace lacks the architecture"""
    flags: tuple[str, ...] = ()
    """values of --quantization beside it, in guides or in vLLM's own words"""
    tp: int = 8
    kv_scales: bool = False
    dtype: str = "bfloat16"

    @property
    def config(self) -> dict[str, Any]:
        return {
            **catalogue()[self.model].config, "quantization_config": self.quantization, "torch_dtype": self.dtype
        }  # fmt: skip

    @property
    def served(self) -> bool:
        return bool(self.tensors)


STATIC = ("self_attn.q_proj.weight", "self_attn.q_proj.weight_scale", "self_attn.q_proj.input_scale")
WORDS = ("self_attn.o_proj.qweight", "self_attn.o_proj.scales", "self_attn.o_proj.qzeros")
INVERSE = "mlp.experts.7.down_proj.weight_scale_inv"
GUIDES: dict[str, Checkpoint] = {
    "amd/Llama-3.1-8B-Instruct-FP8-KV": Checkpoint(
        "llama-3.1-8b", FP8_KV, "fp8", (*STATIC, "self_attn.k_proj.output_scale"), ("fp8", "quark"), 1, True
    ),
    "amd/Llama-3.1-70B-Instruct-FP8-KV": Checkpoint(
        "llama-3.1-70b", FP8_KV, "fp8", STATIC, ("fp8", "quark"), kv_scales=True
    ),
    "amd/Llama-3.1-405B-Instruct-FP8-KV": Checkpoint(
        "llama-3.1-405b", OLD_FP8_KV, "fp8", (*STATIC, "self_attn.attn.k_scale"), ("fp8",), kv_scales=True
    ),
    "amd/Llama-3.3-70B-Instruct-FP8-KV": Checkpoint("llama-3.3-70b", FP8_KV, "fp8", STATIC, ("fp8",), 4, True),
    "amd/Mixtral-8x7B-Instruct-v0.1-FP8-KV": Checkpoint(
        "mixtral-8x7b", {**FP8_KV, "exclude": ["lm_head", "*.gate"]}, "fp8",
        ("block_sparse_moe.experts.3.w2.input_scale",), ("fp8",), kv_scales=True,
    ),
    "amd/Mixtral-8x22B-Instruct-v0.1-FP8-KV": Checkpoint(
        "mixtral-8x22b", {**FP8_KV, "exclude": ["lm_head", "*.gate"]}, "fp8",
        ("block_sparse_moe.experts.3.w1.weight_scale",), ("fp8",), kv_scales=True,
    ),
    "./Meta-Llama-3-8B-Instruct-FP8-KV": Checkpoint("llama-3-8b", OLD_FP8_KV, "fp8", STATIC, ("fp8",), 1, True),
    "amd/Llama-3.3-70B-Instruct-MXFP4-Preview": Checkpoint(
        "llama-3.3-70b", MXFP4, "mxfp4", STATIC[:2], ("quark", "mxfp4"), kv_scales=True
    ),
    "amd/Llama-3.1-405B-Instruct-MXFP4-Preview": Checkpoint(
        "llama-3.1-405b", MXFP4, "mxfp4", STATIC[:2], ("quark",), kv_scales=True
    ),
    "amd/DeepSeek-R1-0528-MXFP4-Preview": Checkpoint(
        "deepseek-r1", quark(*FP4_TENSORS, False, "*self_attn*"), "mxfp4"
    ),
    "hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4": Checkpoint(
        "llama-3.1-70b", AWQ, "int4", WORDS, ("awq", "awq_marlin"), 1, dtype="float16"
    ),
    "RedHatAI/Meta-Llama-3.1-70B-Instruct-quantized.w4a16": Checkpoint(
        "llama-3.1-70b", W4A16, "int4", ("self_attn.q_proj.weight_packed", "self_attn.q_proj.weight_shape"),
        ("gptq", "compressed-tensors"), 1,
    ),
    "the same by GPTQ's tools": Checkpoint(
        "llama-3.1-70b", GPTQ, "int4", (*WORDS, "self_attn.o_proj.g_idx"), ("gptq", "gptq_marlin"), 1
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8": Checkpoint(
        "llama-3.1-8b", W8A8, "int8", STATIC[:2], ("compressed-tensors",), 1
    ),
    "Llama-3.1-8B-Instruct-w_int8_a_int8 by Quark": Checkpoint("llama-3.1-8b", QUARK_INT8, "int8", STATIC[:2], tp=2),
    "openai/gpt-oss-20b": Checkpoint(
        "gpt-oss-20b", GPT_OSS, "mxfp4", ("mlp.experts.gate_up_proj_blocks", "mlp.experts.down_proj_scales"), tp=1
    ),
    "openai/gpt-oss-120b": Checkpoint(
        "gpt-oss-120b", GPT_OSS, "mxfp4", ("mlp.experts.gate_up_proj_scales", "mlp.experts.down_proj_bias"),
        ("mxfp4",), 1,
    ),
    "Qwen/Qwen3-30B-A3B-FP8": Checkpoint("qwen3-30b-a3b", QWEN_FP8, "fp8", (INVERSE,), ("fp8",), 2),
    "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8": Checkpoint("qwen3-235b-a22b", QWEN_FP8, "fp8", (INVERSE,), ("fp8",), 4),
    "deepseek-ai/DeepSeek-R1-0528": Checkpoint("deepseek-r1", DEEPSEEK, "fp8", flags=("fp8",)),
    "deepseek-ai/DeepSeek-V3": Checkpoint("deepseek-v3", DEEPSEEK, "fp8", flags=("fp8",)),
    "deepseek-ai/DeepSeek-V3.2": Checkpoint("deepseek-v3.2", DEEPSEEK, "fp8"),
    "moonshotai/Kimi-K2.5": Checkpoint("kimi-k2.5", KIMI, "int4"),
    "MiniMaxAI/MiniMax-M2.5": Checkpoint(
        "minimax-m2.5",
        {**DEEPSEEK, "fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
        "fp8", tp=4,
    ),
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8": Checkpoint("llama-4-maverick", MAVERICK, "fp8"),
}  # fmt: skip
NAMED = [name for name in GUIDES if "/" in name]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The folder of each checkpoint, with its config.json alone."""
    made = {}
    for number, (name, checkpoint) in enumerate(GUIDES.items()):
        folder = tmp_path_factory.mktemp(f"checkpoint-{number}")
        (folder / "config.json").write_text(json.dumps(checkpoint.config))
        made[name] = str(Path(folder))
    return made


@pytest.mark.parametrize("name", GUIDES)
def test_it_is_counted_in_its_own_format(name: str) -> None:
    checkpoint = GUIDES[name]
    found = shape_of(checkpoint.config, name)
    assert (found.weight_format, found.fp8_kv_cache) == (checkpoint.held, checkpoint.kv_scales)
    spread = Parallel(tp=checkpoint.tp)
    quantized = mapped(found, CHIPS["mi300x"], spread, max_num_seqs=1).weight_bytes
    plain = found.in_format("bf16")
    share = {"fp8": 1 / 2, "int8": 1 / 2, "int4": 4.25 / 16, "mxfp4": 4.25 / 16}[checkpoint.held]
    bound = mapped(plain, CHIPS["mi300x"], spread, max_num_seqs=1).weight_bytes
    assert share * bound < quantized < (share + 0.13) * bound  # embedding and head, and what was left alone


@pytest.mark.parametrize("name", NAMED)
def test_its_name_alone_tells_about_the_same(name: str) -> None:
    sizes = [
        mapped(shape, CHIPS["mi300x"], Parallel(tp=GUIDES[name].tp), max_num_seqs=1).weight_bytes
        for shape in (find_model(name), shape_of(GUIDES[name].config, name))
    ]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.04 if GUIDES[name].served else 0.1)


@pytest.mark.parametrize("name", GUIDES)
def test_it_is_planned_and_the_plan_says_whether_headrace_serves_it(name: str, folders: dict[str, str]) -> None:
    checkpoint = GUIDES[name]
    plan = make_plan(
        PlanRequest(model=folders[name], gpu="mi325x", num_gpus=8, tensor_parallel_size=checkpoint.tp, concurrency=8)
    )
    assert plan.feasible or not checkpoint.served, plan.problems
    assert plan.shape.weight_format == checkpoint.held
    gaps = model_gaps(find_config(folders[name]).config)
    architecture = checkpoint.config["architectures"][0]
    assert (architecture in SERVED) == checkpoint.served == (not gaps)
    if gaps:
        assert gaps[0].startswith(f"headrace has no {architecture} yet")
        assert not plan.feasible or any(gaps[0] in notice for notice in plan.notices)
    else:
        assert any(command.engine == "headrace" for command in plan.commands)


@pytest.mark.parametrize("name", [name for name, checkpoint in GUIDES.items() if checkpoint.flags])
def test_the_flags_that_guides_give_beside_it_are_taken(name: str, folders: dict[str, str]) -> None:
    checkpoint = GUIDES[name]
    for flag in checkpoint.flags:
        planned = PlanRequest(model=folders[name], quantization=flag)
        assert planned.weight_format(checkpoint.held) is None
        (found,) = explain(f"headrace serve {folders[name]} --quantization {flag} -tp {checkpoint.tp}")
        (said,) = [answer for answer in found.answers if answer.setting.name == "--quantization"]
        assert said.verdict in ("not needed", "fine"), said
        assert bool(found.gaps) != checkpoint.served
        (found,) = explain(f"vllm serve {folders[name]} --quantization {flag} -tp {checkpoint.tp}")
        (said,) = [answer for answer in found.answers if answer.setting.name == "--quantization"]
        contradicts = (flag, checkpoint.quantization["quant_method"]) == ("gptq", "compressed-tensors")
        assert said.verdict == ("wrong" if contradicts else "not needed"), "vLLM compares the names of tools"
        if checkpoint.served:
            resolve_format(ModelConfig.from_dict(checkpoint.config), flag)


@pytest.mark.parametrize("flag", ["awq", "gptq", "modelopt_fp4"])
def test_a_flag_for_another_format_is_refused_by_serving_and_planning(flag: str, folders: dict[str, str]) -> None:
    name = "amd/Llama-3.1-8B-Instruct-FP8-KV"
    with pytest.raises(ConfigError, match=r"contradicts config\.json: the checkpoint is quark, fp8"):
        resolve_format(ModelConfig.from_dict(GUIDES[name].config), flag)
    (found,) = explain(f"headrace serve {folders[name]} --quantization {flag}")
    assert next(answer for answer in found.answers if answer.setting.name == "--quantization").verdict == "wrong"
    if flag != "modelopt_fp4":
        assert not make_plan(PlanRequest(model=folders[name], gpu="h200", num_gpus=1, quantization=flag)).feasible
        return
    with pytest.raises(ConfigError, match="'modelopt_fp4' is for checkpoints in nvfp4; this one is in fp8"):
        make_plan(PlanRequest(model=folders[name], gpu="h200", num_gpus=1, quantization=flag))


@pytest.mark.parametrize("name", [name for name, checkpoint in GUIDES.items() if checkpoint.served])
def test_serving_reads_its_tensors_on_as_many_ranks_as_guides_give_it(name: str) -> None:
    """Two layers without memory: shapes and names alone, on the last rank."""
    checkpoint = GUIDES[name]
    config = ModelConfig.from_dict({**checkpoint.config, "num_hidden_layers": 2})
    context = make_context(config, Mesh(Group(checkpoint.tp - 1, checkpoint.tp)), torch.bfloat16)
    model = build_model(config, context)
    layers = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, torch.nn.Module)]
    layers = [(path, layer) for path, layer in layers if hasattr(layer, "slots")]
    attach_schemes(config, layers, context, None)
    slots = slots_of(layers, torch.device("meta"))
    assert {f"model.layers.1.{tensor}" for tensor in checkpoint.tensors} <= slots.keys()
    assert resolve_format(config).format_for("lm_head") == UNQUANTIZED
