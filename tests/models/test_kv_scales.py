"""Scales of an fp8 KV cache: found under every name in a checkpoint, else calculated; harm is seen before serving."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import make_context
from safetensors.torch import load_file, save_file
from stored_fixtures import write
from tiny_configs import save_tiny_model
from torch import Tensor

import headrace
from headrace import LLM, SamplingParams
from headrace.distributed.mesh import Group
from headrace.errors import CheckpointError, ConfigError
from headrace.layers.stacked import InOne
from headrace.model_config import ModelConfig
from headrace.models.checkpoint import StoredTensor, unstacked
from headrace.models.loader import load_model
from headrace.models.served import describe
from headrace.quantization.checkpoint_format import holds_kv_scales
from headrace.runner.kv_cache import cache_dtype, cache_shape
from headrace.runner.kv_scales import BOUND, HEADROOM, Calibration, settle_kv_scales

CPU = torch.device("cpu")
DEMO = Path(headrace.__file__).parent / "demo_model"
FP8 = ["fp8_e4m3", "fp8_e5m2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen2")
    save_tiny_model("Qwen2ForCausalLM", "full", folder)
    return folder


def calibration(folder: Path, kind: str, load_format: str = "auto", group: Group | None = None) -> Calibration:
    config = ModelConfig.from_folder(folder)
    context = make_context(config)
    context = replace(context, specs=tuple(replace(spec, kv_cache_dtype=kind) for spec in context.specs if spec))
    model = load_model(folder, config, context, load_format)
    shape = cache_shape(describe(config), context.specs, 1, 16, cache_dtype(kind, CPU))
    return Calibration(model, config, shape, torch.float32, group or Group(), CPU)


def with_tensors(folder: Path, target: Path, tensors: dict[str, Tensor]) -> Path:
    shutil.copytree(folder, target)
    save_file(load_file(folder / "model.safetensors") | tensors, target / "model.safetensors")
    return target


def with_outliers(folder: Path, target: Path, bias: float) -> Path:
    """Two channels of every K head far from all others, as Qwen2's biases make them."""
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith("k_proj.bias"):
            tensor[::16] += bias
            tensor[7::16] -= bias
    return with_tensors(folder, target, weights)


NAMES = [
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ("k_scale", "v_scale"),
    ("kv_scale", "kv_scale"),
]


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
def test_scales_of_the_checkpoint(names: tuple[str, str], folder: Path, tmp_path: Path) -> None:
    tensors = {
        "model.layers.1.self_attn.q_scale": torch.tensor([9.0, 8.0, 7.0, 6.0]).view(4, 1, 1),
        "model.layers.0.self_attn.k_zero_point": torch.zeros(1).to(torch.float8_e4m3fn),
    }
    for layer in range(2):
        path = f"model.layers.{layer}.self_attn"
        tensors[f"{path}.{names[1]}"] = torch.tensor([0.07], dtype=torch.bfloat16)
        tensors[f"{path}.{names[0]}"] = torch.tensor(0.05 + 0.01 * layer)  # a scalar
    model = with_tensors(folder, tmp_path / "model", tensors)
    found = calibration(model, "fp8_e4m3")
    said = settle_kv_scales(found, calculate=True).note
    assert "scales the checkpoint's, the KV cache in fp8_e4m3 moves" in said
    expected = torch.tensor([[0.05, 0.07], [0.06, 0.07]])
    if names[0] == "kv_scale":
        expected[:, 1] = expected[:, 0]
    torch.testing.assert_close(torch.stack(found.scales()), expected, rtol=0.01, atol=0)
    assert calibration(model, "float32").scales() == []  # read, and of no use
    doubled = replace(calibration(model, "fp8_e4m3"), shape=replace(found.shape, dtype=torch.float8_e4m3fnuz))
    settle_kv_scales(doubled, calculate=True)  # this type reaches 240, not 448
    torch.testing.assert_close(torch.stack(doubled.scales()), 2 * expected, rtol=0.01, atol=0)


SCHEME = {"num_bits": 8, "type": "float", "dynamic": False}
NVFP4 = [
    ("modelopt", {"kv_cache_scheme": SCHEME}, ("k_proj.k_scale", "v_proj.v_scale")),
    ("modelopt", {"kv_cache_scheme": "FP8"}, ("k_proj.k_scale", "v_proj.v_scale")),
    ("modelopt, a file beside", {}, ("k_proj.k_scale", "v_proj.v_scale")),
    ("compressed-tensors", {"kv_cache_scheme": {**SCHEME, "strategy": "tensor"}}, ("k_scale", "v_scale")),
    ("compressed-tensors", {"kv_cache_scheme": {**SCHEME, "strategy": "attn_head"}}, ("k_scale", "v_scale")),
]


def nvfp4_with_scales(tool: str, folder: Path, names: tuple[str, str], **fields: Any) -> Path:
    """A model in NVFP4 that a tool made, with scales of the cache under such names; 0.07 and 0.03."""
    tool, _, beside = tool.partition(", ")
    write(tool, {"modelopt": "dense"}.get(tool, "nvfp4-dense"), folder, **fields)
    tensors = load_file(folder / "model.safetensors")
    heads = fields.get("kv_cache_scheme") and "attn_head" in str(fields)
    for name, scale in zip(names, (0.07, 0.03), strict=True):
        held = torch.tensor([scale / 2, scale]).view(2, 1, 1) if heads else torch.tensor(scale)
        tensors[f"model.layers.0.self_attn.{name}"] = held
    save_file(tensors, folder / "model.safetensors")
    if beside:
        raw = json.loads((folder / "config.json").read_text())
        del raw["quantization_config"]
        (folder / "config.json").write_text(json.dumps(raw))
        said = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
        about = {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": said}
        (folder / "hf_quant_config.json").write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize(("tool", "fields", "names"), NVFP4)
def test_scales_beside_weights_in_nvfp4(
    tool: str, fields: dict[str, Any], names: tuple[str, str], tmp_path: Path
) -> None:
    model = nvfp4_with_scales(tool, tmp_path / "model", names, **fields)
    assert holds_kv_scales(ModelConfig.from_folder(model).quantization)
    found = calibration(model, "fp8_e4m3")
    assert "scales the checkpoint's" in settle_kv_scales(found, calculate=True).note
    torch.testing.assert_close(torch.stack(found.scales()), torch.tensor([[0.07, 0.03]]))


def test_scales_of_a_cache_in_another_type_are_not_used(tmp_path: Path) -> None:
    """Those of NVFP4 make numbers up to 2688, six times what fp8 reaches."""
    names = ("k_proj.k_scale", "v_proj.v_scale")
    model = nvfp4_with_scales("modelopt", tmp_path / "model", names, kv_cache_scheme="NVFP4")
    found = calibration(model, "fp8_e4m3")
    assert torch.stack(found.scales()).isnan().all()
    assert "calculated from 256 made-up tokens" in settle_kv_scales(found, calculate=True).note


def test_scales_beside_biases_are_not_used(folder: Path, tmp_path: Path) -> None:
    """ModelOpt's affine caches hold K and V less a bias, of which the scales alone tell nothing."""
    layers = [f"model.layers.{layer}.self_attn" for layer in (0, 1)]
    tensors = {f"{path}.{kind}_proj.{kind}_scale": torch.tensor(1e-4) for path in layers for kind in "kv"}
    tensors |= {f"{layers[0]}.{kind}_proj.{kind}_bias": torch.randn(1, 2, 1, 16).bfloat16() for kind in "kv"}
    tensors[f"{layers[1]}.k_proj.k_bias"] = torch.zeros(1, 2, 1, 16)
    model = with_tensors(folder, tmp_path / "model", tensors)
    found = calibration(model, "fp8_e4m3")
    first, second = found.scales()
    assert first.isnan().all()
    assert second.tolist() == [pytest.approx(1e-4)] * 2
    assert any("KV cache is affine in 1 layers" in note for note in found.model.notes)
    assert not any("affine" in note for note in calibration(model, "float32").model.notes)


def test_a_checkpoint_of_which_only_the_cache_is_quantized(folder: Path, tmp_path: Path) -> None:
    tensors = {
        f"model.layers.{layer}.self_attn.{kind}_scale": torch.tensor([0.05]) for layer in (0, 1) for kind in "kv"
    }
    model = with_tensors(folder, tmp_path / "model", tensors)
    raw = json.loads((model / "config.json").read_text())
    scheme = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
    raw["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    (model / "config.json").write_text(json.dumps(raw))
    with LLM(str(model), dtype="float32", skip_tokenizer_init=True) as llm:
        assert llm.config.kv_cache_dtype == "fp8_e4m3"
        assert any("scales the checkpoint's" in note for note in llm._core.facts.workers[0].notes)
        (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize("kind", FP8)
def test_calculated_scales_leave_headroom_and_follow_from_the_weights(kind: str, folder: Path) -> None:
    found = calibration(folder, kind)
    said = settle_kv_scales(found, calculate=True).note
    assert "calculated from 512 made-up tokens" in said
    _, caches = found.run(found.shape.dtype)
    for cache in caches:
        for largest in cache.float().abs().amax(dim=(1, 2, 3, 4)).tolist():
            reach = torch.finfo(found.shape.dtype).max / largest
            assert reach == pytest.approx(HEADROOM.get(found.shape.dtype, 16.0), rel=0.35)
    again = calibration(folder, kind)
    settle_kv_scales(again, calculate=True)
    assert torch.equal(torch.stack(again.scales()), torch.stack(found.scales()))


def test_what_a_checkpoint_lacks_is_calculated_or_one(folder: Path, tmp_path: Path) -> None:
    model = with_tensors(folder, tmp_path / "model", {"model.layers.0.self_attn.k_scale": torch.tensor(0.5)})
    found = calibration(model, "fp8_e4m3")
    assert "the checkpoint's, and calculated" in settle_kv_scales(found, calculate=True).note
    first, second = found.scales()
    assert first[0] == 0.5
    assert 0 < float(first[1]) < 1
    assert 0 < float(second.max()) < 1
    found = calibration(model, "fp8_e4m3")
    assert "the checkpoint's, and 1.0" in settle_kv_scales(found, calculate=False).note
    assert torch.stack(found.scales()).tolist() == [[0.5, 1.0], [1.0, 1.0]]


def test_ranks_agree_on_the_largest(folder: Path) -> None:
    alone = calibration(folder, "fp8_e4m3")
    settle_kv_scales(alone, calculate=True)
    other_rank_has_more = Group(0, 2, all_gather=lambda mine: torch.cat((mine, 1.5 * mine), dim=-1))
    both = calibration(folder, "fp8_e4m3", group=other_rank_has_more)
    settle_kv_scales(both, calculate=True)
    torch.testing.assert_close(torch.stack(both.scales()), 1.5 * torch.stack(alone.scales()))


def test_ranks_agree_on_what_is_bearable(folder: Path) -> None:
    """Else one rank alone would look for a remedy, and wait for the other in its collectives for ever."""

    def gather(mine: Tensor) -> Tensor:
        theirs = mine if mine.numel() > 1 else torch.tensor([[0.9]])  # the largest numbers of caches, else an error
        return torch.cat((mine, theirs), dim=-1)

    settled = settle_kv_scales(calibration(folder, "fp8_e5m2", group=Group(0, 2, all_gather=gather)), calculate=True)
    assert settled.error == pytest.approx(0.9)
    assert settled.remedy == "float32"


@pytest.mark.parametrize("kind", FP8)
def test_dummy_weights_are_served(kind: str, folder: Path) -> None:
    found = calibration(folder, kind, load_format="dummy")
    assert "moves hidden states by 0.0%" in settle_kv_scales(found, calculate=True).note


@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 1, 1)])
def test_of_scales_a_head_the_largest_counts(shape: tuple[int, ...], folder: Path, tmp_path: Path) -> None:
    scales = {"k_scale": torch.tensor([0.05, 0.08]).view(shape), "v_scale": torch.tensor([0.03, 0.02]).view(shape)}
    tensors = {
        f"model.layers.{layer}.self_attn.{name}": one.clone() for layer in (0, 1) for name, one in scales.items()
    }
    found = calibration(with_tensors(folder, tmp_path / "model", tensors), "fp8_e4m3")
    torch.testing.assert_close(torch.stack(found.scales()), torch.tensor([[0.08, 0.03]] * 2))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
def test_scales_that_cannot_be(bad: float, folder: Path, tmp_path: Path) -> None:
    model = with_tensors(folder, tmp_path / "model", {"model.layers.1.self_attn.v_scale": torch.tensor(bad)})
    with pytest.raises(CheckpointError, match=rf"'model.layers.1.self_attn.v_scale' .*finite, got \[{bad}\]"):
        calibration(model, "fp8_e4m3")


def test_outliers_in_k_are_refused_naming_what_can_hold_them(folder: Path, tmp_path: Path) -> None:
    some, many = with_outliers(folder, tmp_path / "some", 10), with_outliers(folder, tmp_path / "many", 100)
    fine, coarse = (settle_kv_scales(calibration(some, kind), calculate=True) for kind in FP8)
    assert fine.error <= BOUND < coarse.error
    assert fine.remedy == ""
    assert re.fullmatch(r"fp8_e4m3 \(2.*%\) or float32", coarse.remedy)
    for kind in FP8:
        assert settle_kv_scales(calibration(many, kind), calculate=True).remedy == "float32"
        with pytest.raises(ConfigError, match=f"kv_cache_dtype {kind}: .*outliers.* use float32"):
            LLM(str(many), dtype="float32", kv_cache_dtype=kind, skip_tokenizer_init=True)


def test_a_cache_that_makes_numbers_of_none_is_not_served(folder: Path) -> None:
    found = calibration(folder, "fp8_e4m3")
    with torch.no_grad():
        next(iter(found.model.parameters())).fill_(math.nan)
    settled = settle_kv_scales(found, calculate=True)
    assert math.isnan(settled.error)
    assert settled.remedy == "float32"


def test_outliers_end_a_cache_that_the_objective_alone_asked_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headrace.planner.decisions.runs_fp8_cache_here", lambda *_: True)
    caplog.set_level(logging.INFO)
    said, tokens = {}, {}
    for name, model in (("calm", DEMO), ("wild", with_outliers(folder, tmp_path / "wild", 30))):
        caplog.clear()
        with LLM(str(model), dtype="float32", skip_tokenizer_init=True, objective="throughput") as llm:
            facts = llm._core.facts
            said[name] = next(entry for entry in facts.decisions if entry.field == "kv_cache_dtype")
            assert llm.config.kv_cache_dtype == said[name].value
            assert bool(facts.workers[0].kv_cache_error) == (name == "calm")
            assert ("The KV cache is lossy: fp8_e4m3 holds" in caplog.text) == (name == "calm")
            warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
            assert warned == [str(said[name])] * (name == "wild")
            (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
            tokens[name] = output.outputs[0].token_ids
    assert (said["calm"].value, said["calm"].runner_up) == ("fp8_e4m3", "float32, which rounds nothing")
    assert (said["wild"].value, said["wild"].source) == ("float32", "measured")
    assert re.fullmatch(
        r"the cache in fp8_e4m3 moves hidden states by \d+\.\d%, and 10% is the most that --objective throughput takes "
        "by itself; "
        "--kv-cache-dtype float32 saves the next start the second load",
        said["wild"].reason,
    )
    monkeypatch.undo()
    with LLM(str(tmp_path / "wild"), dtype="float32", skip_tokenizer_init=True) as llm:
        (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
        assert tokens["wild"] == output.outputs[0].token_ids


@pytest.mark.parametrize(("kind", "error", "agreeing"), [("fp8_e4m3", 0.05, 0.9), ("fp8_e5m2", 0.1, 0.85)])
@torch.inference_mode()
def test_logits_of_the_demo_model(kind: str, error: float, agreeing: float) -> None:
    """Measured: 0.037 and 0.94 with e4m3, 0.070 and 0.92 with e5m2, on random tokens."""
    found = calibration(DEMO, kind)
    settle_kv_scales(found, calculate=True)
    expected, logits = (found.model.compute_logits(found.run(dtype)[0]) for dtype in (torch.float32, found.shape.dtype))
    assert (logits - expected).norm() <= error * expected.norm()
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() >= agreeing


def test_of_a_linear_in_one_only_its_own_tensors_are_shared_out() -> None:
    parts = tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
    whole = "model.layers.0.self_attn.qkv_proj"
    tensors = [StoredTensor(f"{whole}.{name}", Path("f"), (1,), "F32", 0) for name in ("k_scale", "output_scale")]
    found = [one.name for one in unstacked(tensors, {whole: InOne(parts)})]
    assert found == [f"{whole}.k_scale", *(f"{part}.output_scale" for part in parts)]
