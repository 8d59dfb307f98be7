"""Every scheme's checkpoint gives what its weights stand for; a run that is killed goes on to the same bytes."""

from __future__ import annotations

import functools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver
from safetensors.torch import load_file, save_file
from tiny_configs import save_tiny_model, shard
from torch import Tensor

from headrace import LLM, SamplingParams
from headrace.convert import quantize as job
from headrace.convert.pieces import KEPT
from headrace.convert.quantize import RECORD, Outcome, quantize
from headrace.convert.schemes import SCHEMES, find_scheme
from headrace.convert.styles import STYLES
from headrace.convert.texts import Texts, read_texts
from headrace.engine.tokenizer import Tokenizer
from headrace.errors import CheckpointError, ConfigError
from headrace.hub import DEMO_FOLDER
from headrace.kernels.coded import E2M1
from headrace.quantization.checkpoint_format import holds_kv_scales
from tests.sampled import sampled, some_of

CPU = torch.device("cpu")
PROMPT = list(range(20, 60))
MODELS = {"dense": ("LlamaForCausalLM", "wide-heads"), "experts": ("Qwen3MoeForCausalLM", "full")}
WEIGHTS_ALONE = ("w4a16", "w4a16_gptq", "w4a16_awq", "mxfp4")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, (architecture, variant) in MODELS.items():
        save_tiny_model(architecture, variant, root / name)
    shard(root / "experts")
    return root


def convert(
    folder: Path, output: Path, scheme: str, group_size: int | None = None, style: str = "compressed-tensors",
    kv_scales: bool = False, measured: bool = False,
) -> Outcome:  # fmt: skip
    found = find_scheme(scheme, group_size, style, kv_scales)
    texts = texts_for(folder) if found.calibrated or measured else None
    return quantize(folder, output, found, CPU, texts)


@functools.cache
def texts_for(folder: Path) -> Texts:
    """The sample for the demo model, random tokens for others, whose folders have no tokenizer."""
    if folder == DEMO_FOLDER:
        return read_texts(None, Tokenizer.from_folder(folder), 2048, 256, rows=12, held_out=8)
    tokens = torch.randint(3, 128, (10, 48), generator=torch.Generator().manual_seed(7))
    return Texts(tokens[:8], tokens[8:])


def logits(folder: Path, tokens: list[int] = PROMPT) -> Tensor:
    return Driver(folder, max_len=512).logits(tokens)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def nibbles(packed: Tensor) -> Tensor:
    """Codes of 4 bits, the first in the lowest bits of its word."""
    words = torch.from_numpy(packed.numpy().view("uint8").copy())
    return torch.stack((words & 15, words >> 4), -1).flatten(-2)


def widened(folder: Path, plain: Path) -> None:
    """Write what the tensors of a quantized checkpoint stand for as an unquantized one, read as the format's papers
    and compressed-tensors say."""
    tensors, found = tensors_of(folder), {}
    for name, tensor in tensors.items():
        linear, _, kind = name.rpartition(".")
        if kind in ("weight_scale", "weight_shape"):
            continue
        scale = tensors.get(f"{linear}.weight_scale")
        if scale is None or kind == "bias":
            found[name] = tensor
            continue
        if kind == "weight":
            codes = tensor.float()
        elif tensor.dtype == torch.int32:
            codes = nibbles(tensor).float() - 8
        else:
            codes, scale = torch.tensor(E2M1)[nibbles(tensor).int()], 2.0 ** (scale.int() - 127)
        if scale.dim() == 2:  # of blocks, groups, or outputs
            blocks = [codes.shape[1] if scale.shape[1] == 1 else -(-codes.shape[1] // scale.shape[1])]
            rows = 1 if scale.shape[0] == codes.shape[0] else 128
            columns = 128 if rows == 128 else blocks[0]
            scale = scale.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            scale = scale[: codes.shape[0], : codes.shape[1]]
        found[f"{linear}.weight"] = codes * scale.float()
    plain.mkdir()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, plain / "model.safetensors")


@sampled(("model", "scheme"), MODELS, SCHEMES)
def test_the_checkpoint_gives_what_its_weights_stand_for(model: str, scheme: str, models: Path, tmp_path: Path) -> None:
    outcome = convert(models / model, tmp_path / "made", scheme, 16 if "w4a16" in scheme else None)
    widened(tmp_path / "made", tmp_path / "plain")
    found, exact = logits(tmp_path / "made"), logits(tmp_path / "plain")
    if scheme in WEIGHTS_ALONE:
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)
    else:  # activations are rounded too
        assert (found - exact).norm() < 0.25 * exact.norm()
    kept, made = tensors_of(models / model), tensors_of(tmp_path / "made")
    assert outcome.errors
    assert all(0 < error < 0.25 for error in outcome.errors.values())
    for name, tensor in kept.items():
        if name.removesuffix(".weight") not in outcome.errors and not (scheme == "w4a16_awq" and ".layers." in name):
            assert torch.equal(made[name], tensor), name
    assert outcome.bytes_after == sum(one.numel() * one.element_size() for one in made.values())
    assert outcome.bytes_before == sum(one.numel() * one.element_size() for one in kept.values())


@pytest.mark.parametrize(
    ("architecture", "variant", "said"),
    [
        ("Phi3ForCausalLM", "fused", ""),
        ("DeepseekV3ForCausalLM", "queries-too", "attention multiplies with parts of it"),
        ("Cohere2MoeForCausalLM", "average", ""),  # a gate that no file holds
        ("Qwen3_5MoeForConditionalGeneration", "text", ""),
        ("FalconForCausalLM", "two-norms", "queries, keys and values are in turn in it"),
        ("GraniteMoeForCausalLM", "multipliers", "it holds all experts in a form that has no linears for each"),
    ],
)
def test_families_whose_tensors_have_their_own_ways(architecture: str, variant: str, said: str, tmp_path: Path) -> None:
    save_tiny_model(architecture, variant, tmp_path / "model")
    outcome = convert(tmp_path / "model", tmp_path / "made", "w4a16", -1)
    widened(tmp_path / "made", tmp_path / "plain")
    torch.testing.assert_close(logits(tmp_path / "made"), logits(tmp_path / "plain"), rtol=1e-4, atol=1e-4)
    assert {*outcome.kept.values()} - {KEPT} == ({said} if said else set())


def test_weights_that_a_scheme_cannot_hold_keep_their_type(models: Path, tmp_path: Path) -> None:
    """Experts of 24 inputs in groups of 32."""
    outcome = convert(models / "experts", tmp_path / "made", "mxfp4")
    down = [name for name in outcome.kept if name.endswith("down_proj")]
    assert down
    assert {outcome.kept[name] for name in down} == {"24 inputs are no multiple of 32"}
    ignored = json.loads((tmp_path / "made/config.json").read_text())["quantization_config"]["ignore"]
    assert {*down, "lm_head", "model.layers.0.mlp.gate"} <= {*ignored}


def test_experts_in_one_tensor_are_taken_apart(models: Path, tmp_path: Path) -> None:
    """As transformers' modules hold them: gates above ups, of all experts."""
    tensors, folder = tensors_of(models / "experts"), tmp_path / "stacked"
    folder.mkdir()
    shutil.copy(models / "experts/config.json", folder)
    for layer in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:

        def all_of(part: str, layer: str = layer) -> Tensor:
            own = [name for name in tensors if name.startswith(f"{layer}.experts.") and name.endswith(f"{part}.weight")]
            return torch.stack([tensors.pop(f"{layer}.experts.{number}.{part}.weight") for number in range(len(own))])

        tensors[f"{layer}.experts.gate_up_proj"] = torch.cat((all_of("gate_proj"), all_of("up_proj")), 1)
        tensors[f"{layer}.experts.down_proj"] = all_of("down_proj")
    save_file(tensors, folder / "model.safetensors")
    convert(folder, tmp_path / "made", "int8")
    convert(models / "experts", tmp_path / "expected", "int8")
    made, expected = tensors_of(tmp_path / "made"), tensors_of(tmp_path / "expected")
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("model", "scheme", "style"),
    [
        ("dense", "w4a16_gptq", "gptq"), ("experts", "w4a16", "gptq"), ("dense", "w4a16_gptq", "awq"),
        ("experts", "w4a16", "awq"), ("dense", "fp8", "quark"), ("experts", "fp8_channel", "quark"),
        ("dense", "mxfp4", "quark"),
    ],
)  # fmt: skip
def test_every_style_says_the_same(model: str, scheme: str, style: str, models: Path, tmp_path: Path) -> None:
    for each in (style, "compressed-tensors"):
        convert(models / model, tmp_path / each, scheme, 16 if "w4a16" in scheme else None, each)
    stated = json.loads((tmp_path / style / "config.json").read_text())["quantization_config"]
    assert stated["quant_method"] == style
    assert torch.equal(logits(tmp_path / style), logits(tmp_path / "compressed-tensors"))


@pytest.mark.parametrize("style", ["compressed-tensors", "quark"])
def test_scales_of_a_cache_fit_what_the_text_leaves_in_it(style: str, models: Path, tmp_path: Path) -> None:
    outcome = convert(models / "dense", tmp_path / "made", "fp8", None, style, kv_scales=True)
    tensors = tensors_of(tmp_path / "made")
    assert outcome.bytes_after == sum(one.numel() * one.element_size() for one in tensors.values())
    config = json.loads((tmp_path / "made/config.json").read_text())["quantization_config"]
    assert holds_kv_scales(config)
    driver, found = Driver(models / "dense", max_len=512), texts_for(models / "dense").calibration.tolist()
    driver.start(len(found))
    driver.step(found)
    names = find_scheme("fp8", None, style, True).style.kv_scales or ()
    for layer, cache in enumerate(driver.kv_caches):
        for name, plane in zip(names, cache, strict=True):
            # the second layer's are from text that went through a first one in fp8
            exact = float(plane.abs().max()) / 448
            scale = float(tensors[f"model.layers.{layer}.self_attn.{name}"])
            assert scale == pytest.approx(exact, rel=1e-4 if layer == 0 else 0.3)


def test_experts_that_no_text_reaches_are_named(models: Path, tmp_path: Path) -> None:
    """Two tokens, of which each goes to three of ten experts."""
    texts = Texts(torch.tensor([[5, 6]]), torch.tensor([[7, 8]]))
    outcome = quantize(models / "experts", tmp_path / "made", find_scheme("w4a16_gptq", 16), CPU, texts)
    for layer in range(2):
        reached = [name for name in outcome.unreached if f"layers.{layer}." in name]
        assert 4 <= len(reached) <= 7
    linears = {name.rpartition(".")[0] for name in outcome.nearest}
    assert linears == {*outcome.unreached}


def test_what_was_lost_is_measured_in_both_models(models: Path, tmp_path: Path) -> None:
    outcome = convert(models / "dense", tmp_path / "made", "int8", measured=True)
    held_out = texts_for(models / "dense").held_out.tolist()
    before, after = (math.exp(log_perplexity(place, held_out)) for place in (models / "dense", tmp_path / "made"))
    assert outcome.perplexity == pytest.approx((before, after), rel=1e-3)  # four digits, and other orders of sums
    assert {*outcome.moved} == {0, 1}
    assert 0 < outcome.moved[0] < outcome.moved[1] < 0.2
    again = convert(models / "dense", tmp_path / "made", "int8", measured=True)
    assert (again.made, again.perplexity, again.moved) == (0, outcome.perplexity, outcome.moved)


# ---- the demo model


@pytest.fixture(scope="module")
def stories() -> list[list[int]]:
    """Texts that the demo model tells."""
    params = [SamplingParams(temperature=1.0, max_tokens=120, seed=seed, ignore_eos=True) for seed in range(16)]
    prompts = ["Once upon a time", "One day, a little girl", "Tom had a big dog.", "The sun was hot."] * 4
    with LLM(str(DEMO_FOLDER), device="cpu") as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in outputs]


@pytest.fixture(scope="module")
def before(stories: list[list[int]]) -> float:
    return log_perplexity(DEMO_FOLDER, stories)


def log_perplexity(folder: Path, stories: list[list[int]]) -> float:
    driver = Driver(folder, max_len=256)
    driver.start(len(stories))
    found = driver.step(stories).split([len(one) for one in stories])
    losses = [
        torch.nn.functional.cross_entropy(one[:-1], torch.tensor(story[1:]), reduction="sum")
        for one, story in zip(found, stories, strict=True)
    ]
    return float(sum(losses)) / sum(len(story) - 1 for story in stories)


MOST_LOST = {
    "fp8": 0.01, "fp8_channel": 0.01, "fp8_block": 0.01, "int8": 0.01, "w4a16": 0.1, "mxfp4": 0.1,
    "w4a16_gptq": 0.03, "w4a16_awq": 0.0346,
}  # fmt: skip
CALIBRATED = [name for name, scheme in SCHEMES.items() if scheme.calibrated]


@pytest.mark.parametrize("scheme", [*(name for name in MOST_LOST if name not in CALIBRATED), *some_of(CALIBRATED, 1)])
def test_perplexity_of_the_demo_model(scheme: str, stories: list[list[int]], before: float, tmp_path: Path) -> None:
    convert(DEMO_FOLDER, tmp_path / "made", scheme)
    after = log_perplexity(tmp_path / "made", stories)
    print(f"{scheme}: {math.exp(before):.4f} -> {math.exp(after):.4f}")
    assert abs(after - before) < MOST_LOST[scheme]
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "made" / name).read_bytes() == (DEMO_FOLDER / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "style"), [(scheme, one.name) for one in STYLES.values() for scheme in one.holds or SCHEMES]
)
def test_transformers_reads_it(scheme: str, style: str, tmp_path: Path) -> None:
    """With the library of the format, where that is installed."""
    pytest.importorskip({"compressed-tensors": "compressed_tensors", "quark": "quark"}.get(style, "gptqmodel"))
    import transformers

    convert(DEMO_FOLDER, tmp_path / "made", scheme, None, style)
    # compressed-tensors widens mxfp4 to bfloat16 in a model of any type
    dtype = torch.bfloat16 if (scheme, style) == ("mxfp4", "compressed-tensors") else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=dtype, device_map="cpu")
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0].float()
    assert (logits(tmp_path / "made") - expected).norm() < 0.1 * expected.norm()


# ---- runs that end early


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


class Killed(BaseException):
    pass


def killed_at(count: int, act: Callable[..., Any]) -> Callable[..., Any]:
    calls = [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == count:
            raise Killed
        return act(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("where", "model", "scheme"), [("fsync", "experts", "w4a16"), ("replace", "dense", "w4a16_gptq")]
)
def test_ended_between_any_two_writes_it_goes_on_to_the_same_bytes(
    where: str, model: str, scheme: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(models / model, tmp_path / "whole", scheme, 16)
    expected, act = contents(tmp_path / "whole"), getattr(os, where)
    for count in range(1, 100):
        output = tmp_path / str(count)
        monkeypatch.setattr(job.os, where, killed_at(count, act))
        try:
            convert(models / model, output, scheme, 16)
        except Killed:
            assert not (output / "config.json").exists() or where == "fsync"
        else:
            break
        finally:
            monkeypatch.setattr(job.os, where, act)
        convert(models / model, output, scheme, 16)
        assert contents(output) == expected
        shutil.rmtree(output)
    assert count > 8


@pytest.mark.slow  # `make test` ends it between any two writes
def test_killed_at_random_moments_it_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    convert(DEMO_FOLDER, tmp_path / "whole", "int8")
    output, chance = tmp_path / "made", random.Random(6)
    command = [sys.executable, "-m", "headrace.cli.main", "quantize", "demo", "--output-dir", str(output)]
    command += ["--num-eval-data", "0"]
    for seen in (1, 3, 5):
        child = subprocess.Popen([*command, "--quant-scheme", "int8", "--device", "cpu"], stderr=subprocess.DEVNULL)
        while child.poll() is None and len([*output.glob("model-*")] if output.exists() else []) < seen:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.03))
        child.send_signal(signal.SIGKILL)
        child.wait()
    convert(DEMO_FOLDER, output, "int8")
    assert contents(output) == contents(tmp_path / "whole")


def test_what_is_done_is_not_done_again(models: Path, tmp_path: Path) -> None:
    first = convert(models / "dense", tmp_path / "made", "fp8")
    before = contents(tmp_path / "made")
    again = convert(models / "dense", tmp_path / "made", "fp8")
    assert (first.made > 1, again.made, again.errors) == (True, 0, first.errors)
    assert contents(tmp_path / "made") == before


def test_a_begun_folder_is_no_model(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_finish", killed_at(1, job._finish))
    with pytest.raises(Killed):
        convert(models / "dense", tmp_path / "made", "fp8")
    assert (tmp_path / "made" / RECORD).exists()
    with pytest.raises(Exception, match=r"has no config\.json"):
        LLM(str(tmp_path / "made"))


# ---- refusals


def test_a_small_disk_is_told_before_anything_is_written(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(job.shutil, "disk_usage", lambda place: full)
    with pytest.raises(ConfigError, match=r"needs 0\.0 GB, and its disk has 0\.0 GB left; nothing was written"):
        convert(models / "dense", tmp_path / "made", "fp8")
    assert not (tmp_path / "made").exists()


def test_a_disk_that_fills_up_is_told(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(job.os, "fsync", fail)
    with pytest.raises(ConfigError, match=r"cannot be written: .*No space left.*the same command goes on from here"):
        convert(models / "dense", tmp_path / "made", "fp8")


def test_folders_that_hold_something_else_are_left_alone(models: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds other files"):
        convert(models / "dense", tmp_path / "other", "fp8")
    convert(models / "dense", tmp_path / "made", "fp8")
    with pytest.raises(ConfigError, match="was begun with another scheme; accepted"):
        convert(models / "dense", tmp_path / "made", "int8")
    with pytest.raises(ConfigError, match="is quantized already"):
        convert(tmp_path / "made", tmp_path / "again", "fp8")


def test_a_bad_weight_is_named(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "dense", tmp_path / "bad")
    tensors, name = load_file(tmp_path / "bad/model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    tensors[name][0, 0] = torch.nan
    save_file(tensors, tmp_path / "bad/model.safetensors")
    with pytest.raises(CheckpointError, match=rf"^{name} in model\.safetensors: holds NaN"):
        convert(tmp_path / "bad", tmp_path / "made", "fp8")


@pytest.mark.parametrize(("scheme", "size", "said"), [("fp8", 64, "is for w4a16"), ("w4a16", 12, "a multiple of 8")])
def test_groups_that_no_scheme_has(scheme: str, size: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_scheme(scheme, size)
