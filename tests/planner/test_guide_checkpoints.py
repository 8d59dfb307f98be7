"""Quantized checkpoints that guides name: each is planned, explained and served, or refused for a reason that is true.

Their quantization_config stands in guide_checkpoints.json, after the published ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
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


class Checkpoint(msgspec.Struct, frozen=True):
    """One that a guide names, and what is true of it."""

    model: str
    """of the catalogue"""
    quantization: str
    """its quantization_config, by the name that it has in the file"""
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
        held = {"quantization_config": QUANTIZATIONS[self.quantization], "torch_dtype": self.dtype}
        return catalogue()[self.model].config | held

    @property
    def served(self) -> bool:
        return bool(self.tensors)


DATA = json.loads(Path(__file__).with_name("guide_checkpoints.json").read_text())
QUANTIZATIONS: dict[str, dict[str, Any]] = DATA["quantizations"]
GUIDES = msgspec.convert(DATA["checkpoints"], dict[str, Checkpoint])
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
    config = GUIDES[name].config
    if "*self_attn*" in config["quantization_config"].get("exclude", ()):  # what stays plain is in no name
        config["quantization_config"] = config["quantization_config"] | {"exclude": ["lm_head"]}
    sizes = [
        mapped(shape, CHIPS["mi300x"], Parallel(tp=GUIDES[name].tp), max_num_seqs=1).weight_bytes
        for shape in (find_model(name), shape_of(config, name))
    ]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.03)


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
        assert plan.command is not None


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
        contradicts = (flag, QUANTIZATIONS[checkpoint.quantization]["quant_method"]) == ("gptq", "compressed-tensors")
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
    small = {"num_hidden_layers": 2, "max_position_embeddings": 8192}
    found = {**checkpoint.config, **small}
    if "text_config" in found:
        found["text_config"] = {**found["text_config"], **small}
    config = ModelConfig.from_dict(found)
    context = make_context(config, Mesh(Group(checkpoint.tp - 1, checkpoint.tp)), torch.bfloat16)
    model = build_model(config, context)
    layers = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, torch.nn.Module)]
    layers = [(path, layer) for path, layer in layers if hasattr(layer, "slots")]
    attach_schemes(config, layers, context, None)
    slots = slots_of(layers, torch.device("meta"))
    assert {f"model.layers.1.{tensor}" for tensor in checkpoint.tensors} <= slots.keys()
    assert resolve_format(config).format_for("lm_head") == UNQUANTIZED
