"""Quantized checkpoints of every format in which one tensor is not as it should be: missing, one too many, of another
shape or type, or with scales that are no numbers. One line names the tensor, and what headers tell is told before any
memory is taken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from driver import make_context
from safetensors.torch import load_file, save_file
from stored_fixtures import CASES, W8A8, unpack, write
from torch import Tensor

from headrace.distributed.mesh import Group, Mesh
from headrace.errors import CheckpointError, ConfigError
from headrace.layers.layer import Layer
from headrace.layers.linear import Linear
from headrace.model_config import ModelConfig
from headrace.models.checkpoint import StoredTensor, stored_tensors
from headrace.models.filling import match_checkpoint
from headrace.models.loader import attach_schemes, build_model, load_model, slots_of, tensors_not_needed
from headrace.models.schemes import linears_in_files
from headrace.quantization.scheme import Slot

MODELS = [*(f"{tool}/{name}" for tool, name in CASES), *W8A8]
each_model = pytest.mark.parametrize("model", MODELS)
CACHES = ("k_scale", "v_scale", "output_scale")
CODES = ("qweight", "weight_packed", "weight")
INTEGERS = ("I8", "I32")
"""types of integers' codes, but for those of OF_BYTES"""
OF_BYTES = "modelopt/int4-awq-moe"


@dataclass(frozen=True)
class Checkpoint:
    """A model's folder, what its file's header says, and where the tensors go."""

    folder: Path
    tensors: list[StoredTensor]
    slots: dict[str, Slot]
    not_needed: re.Pattern[str]

    def match(self, tensors: list[StoredTensor]) -> None:
        match_checkpoint(self.slots, self.folder, self.not_needed, lambda _: tensors)

    def of_each_kind(self) -> Iterator[StoredTensor]:
        """Yield a layer's tensor of each name and type."""
        kinds = {(one.name.rpartition(".")[2], one.dtype): one for one in self.tensors if "layers.0" in one.name}
        yield from kinds.values()


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    @cache
    def one(model: str) -> Checkpoint:
        folder = written(model, tmp_path_factory.mktemp("bad"))
        config, tensors = ModelConfig.from_folder(folder), stored_tensors(folder / "model.safetensors")
        built = build_model(config, context := make_context(config))
        layers = [(path, layer) for path, layer in built.named_modules() if isinstance(layer, Layer)]
        attach_schemes(config, layers, context, None, linears_in_files(folder, stored_tensors))
        slots = slots_of(layers, torch.device("meta"))
        return Checkpoint(folder, tensors, slots, tensors_not_needed(config))

    return one


def written(model: str, folder: Path) -> Path:
    tool, _, name = model.rpartition("/")
    if tool:
        write(tool, name, folder / "model")
        return folder / "model"
    unpack(name, folder)
    return folder


def refusal(checkpoint: Checkpoint, tensors: list[StoredTensor]) -> str:
    with pytest.raises(CheckpointError) as raised:
        checkpoint.match(tensors)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@each_model
def test_a_header_that_is_not_as_it_should_be(model: str, opened: Callable[[str], Checkpoint]) -> None:
    checkpoint = opened(model)
    checkpoint.match(checkpoint.tensors)
    for one in checkpoint.of_each_kind():
        others = [other for other in checkpoint.tensors if other is not one]
        if checkpoint.slots[one.name].optional:
            checkpoint.match(others)
        else:
            assert f"lacks {one.name} (read model.safetensors)" in refusal(checkpoint, others)
        longer = (*one.shape[:-1], one.shape[-1] + 5) if one.shape else (5,)
        said = refusal(checkpoint, [*others, replace(one, shape=longer)])
        assert f"tensor {one.name!r} in model.safetensors has shape {list(longer)}, config.json asks for [" in said
        said = refusal(checkpoint, [*others, replace(one, dtype="BOOL")])
        assert f"tensor {one.name!r} in model.safetensors is of type BOOL; accepted: " in said
        extra = replace(one, name=f"{one.name}_of_nothing")
        assert f"holds tensor {extra.name!r}, which this model does not have" in refusal(
            checkpoint, [*checkpoint.tensors, extra]
        )


@pytest.mark.parametrize(
    ("spoil", "said"), [("NaN", r"{}.* (NaN|nan)"), ("negative", r"{}.* (holds the scale -|is -0|goes from -)")]
)
@each_model
def test_scales_that_are_no_scales(
    model: str, spoil: str, said: str, opened: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    checkpoint = opened(model)
    for one in checkpoint.of_each_kind():
        kind = one.name.rpartition(".")[2]
        if "scale" not in kind or kind in CACHES or checkpoint.slots[one.name].destination is None:
            continue
        tensors = load_file(checkpoint.folder / "model.safetensors")
        if spoil == "negative" and tensors[one.name].dtype == torch.uint8:  # powers of two
            continue
        SPOILT[spoil](tensors[one.name])
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((checkpoint.folder / "config.json").read_text())
        config = ModelConfig.from_folder(tmp_path)
        if spoil == "negative" and is_of_integers(one, checkpoint, model):  # whose sign AutoRound chooses
            load_model(tmp_path, config, make_context(config))
            continue
        with pytest.raises(CheckpointError, match=said.format(kind)) as raised:
            load_model(tmp_path, config, make_context(config))
        assert "\n" not in str(raised.value)


def is_of_integers(scale: StoredTensor, checkpoint: Checkpoint, model: str) -> bool:
    linear, _, kind = scale.name.rpartition(".")
    types = {one.name: one.dtype for one in checkpoint.tensors}
    codes = next((types[f"{linear}.{name}"] for name in CODES if f"{linear}.{name}" in types), "")
    return kind in ("scales", "weight_scale") and (codes in INTEGERS or model == OF_BYTES)


def last_is_nan(scale: Tensor) -> None:
    if scale.itemsize == 1:
        scale.view(torch.uint8).view(-1)[-1] = 255 if scale.dtype == torch.uint8 else 127
    else:
        scale.view(-1)[-1] = torch.nan


def last_is_negative(scale: Tensor) -> None:
    scale.view(-1)[-1] = -0.25


SPOILT = {"NaN": last_is_nan, "negative": last_is_negative}


@pytest.mark.parametrize(
    ("tool", "name", "said"),
    [
        (
            "autoawq",
            "dense",
            r"groups of 32 inputs do not divide the inputs \[16, 32\) that a rank holds of 64; accepted",
        ),
        (
            "auto-gptq",
            "3-bit-dense",
            r"groups of 32 inputs do not divide the inputs \[16, 32\) .* accepted: a tensor_par",
        ),
        ("compressed-tensors", "w4a16-dense", r"groups of 32 inputs do not divide the inputs \[16, 32\)"),
        ("quark", "dense", r"groups of 32 inputs do not divide the inputs \[16, 32\)"),
    ],
)
def test_groups_that_a_rank_would_cut(tool: str, name: str, said: str, tmp_path: Path) -> None:
    write(tool, name, tmp_path / "model")
    config = ModelConfig.from_folder(tmp_path / "model")
    context = make_context(config, Mesh(Group(1, 4)))
    with pytest.raises(ConfigError, match=rf"^model\.layers\.0\.self_attn\.o_proj: .*{said}") as raised:
        load_model(tmp_path / "model", config, context)
    assert "\n" not in str(raised.value)


def test_headers_are_checked_before_memory_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of config.json may be beyond any memory."""
    folder = tmp_path / "model"
    write("compressed-tensors", "w4a16-dense", folder)
    raw = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 1 << 30}
    (folder / "config.json").write_text(json.dumps(raw))
    devices: set[str] = set()
    create = Linear.create_weights

    def spy(layer: Linear, device: torch.device) -> None:
        devices.add(device.type)
        create(layer, device)

    monkeypatch.setattr(Linear, "create_weights", spy)
    config = ModelConfig.from_folder(folder)
    with pytest.raises(CheckpointError, match=r"down_proj.weight_packed' .* has shape .* asks for \[64, 134217728\]"):
        load_model(folder, config, make_context(config))
    assert devices == {"meta"}
