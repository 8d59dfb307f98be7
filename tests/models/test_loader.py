"""What the loader reads, and what it says of a checkpoint that is not as it should be."""

from __future__ import annotations

import gc
import json
import math
import weakref
from pathlib import Path

import pytest
import torch
from driver import Driver, make_context
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_configs import save_tiny_model, shard
from torch import Tensor

from headrace.distributed.mesh import Group, Mesh
from headrace.errors import CheckpointError
from headrace.layers.linear import Linear
from headrace.model_config import ModelConfig
from headrace.models import filling, loader
from headrace.models.checkpoint import checkpoint_files, stored_tensors
from headrace.models.filling import fill_from_checkpoint
from headrace.models.finite import CHUNK, FiniteCheck
from headrace.models.loader import load_model
from headrace.quantization.scheme import Slot

PROMPT = [5, 9, 33, 2, 71]
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny_model("LlamaForCausalLM", "gqa", tmp_path)
    return tmp_path


def logits(folder: Path) -> Tensor:
    return Driver(folder).logits(PROMPT)


def edit(folder: Path, **changes: Tensor | None) -> None:
    """Rewrite model.safetensors with tensors replaced, added or (None) taken out."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


def test_sharded_equals_single_file(folder: Path) -> None:
    expected = logits(folder)
    shard(folder)
    torch.testing.assert_close(logits(folder), expected)
    (folder / "model.safetensors.index.json").unlink()
    torch.testing.assert_close(logits(folder), expected)


def test_names_without_prefix_and_superfluous_tensors_are_read(folder: Path) -> None:
    expected = logits(folder)
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    bare["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(bare, folder / "model.safetensors")
    torch.testing.assert_close(logits(folder), expected)


@pytest.mark.parametrize("front", ["model.language_model.", "language_model.model."])
def test_the_text_part_of_a_model_of_more_is_read_under_either_name(front: str, folder: Path) -> None:
    """What text does not use is skipped and counted, layers that draft further tokens too."""
    expected, tensors = logits(folder), load_file(folder / "model.safetensors")
    own = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
    moved = {front + name.removeprefix("model."): tensor for name, tensor in own.items()}
    head = "language_model.lm_head.weight" if front.startswith("language") else "lm_head.weight"
    moved |= {head: tensors["lm_head.weight"], "vision_tower.a.weight": torch.zeros(3), "visual.b": torch.zeros(2)}
    moved[f"{front}layers.2.eh_proj.weight"] = torch.zeros(2, 2)
    save_file(moved, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    outer = {"architectures": config.pop("architectures"), "vision_config": {"depth": 1}}
    (folder / "config.json").write_text(json.dumps({**outer, "text_config": {**config, "num_nextn_predict_layers": 1}}))
    driver = Driver(folder)
    assert torch.equal(driver.logits(PROMPT), expected)
    skipped = [note for note in driver.model.notes if note.startswith("Skipped")]
    assert sorted(skipped) == [
        "Skipped: 1 tensors of layers that draft further tokens.",
        "Skipped: 2 tensors of other parts than text.",
    ]


def test_tensors_of_drafts_by_another_name_are_skipped_with_a_line(tmp_path: Path) -> None:
    save_tiny_model("Qwen3NextForCausalLM", "hybrid", tmp_path)
    edit(tmp_path, **{"mtp.fc.weight": torch.zeros(3, 3)})
    assert "Skipped: 1 tensors of layers that draft further tokens." in Driver(tmp_path).model.notes


def test_linears_that_a_checkpoint_holds_as_one_are_split(folder: Path) -> None:
    expected, tensors = logits(folder), load_file(folder / "model.safetensors")
    for layer in ("model.layers.0", "model.layers.1"):
        for block, whole, parts in (("self_attn", "qkv_proj", "qkv"), ("mlp", "gate_up_proj", ("gate", "up"))):
            names = [f"{layer}.{block}.{part}_proj.weight" for part in parts]
            tensors[f"{layer}.{block}.{whole}.weight"] = torch.cat([tensors.pop(name) for name in names])
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(logits(folder), expected)


def test_tied_head_in_the_checkpoint_is_ignored(tmp_path: Path) -> None:
    save_tiny_model("LlamaForCausalLM", "mha-tied", tmp_path)
    expected = logits(tmp_path)
    edit(tmp_path, **{"lm_head.weight": torch.zeros(128, 64)})
    torch.testing.assert_close(logits(tmp_path), expected)


def test_weights_are_converted_to_the_model_dtype(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    model = load_model(folder, config, make_context(config, dtype=torch.bfloat16))
    assert model.model.norm.weight.dtype == torch.bfloat16
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16


def test_missing_tensor_is_named(folder: Path) -> None:
    edit(folder, **{K_PROJ: None})
    with pytest.raises(CheckpointError, match=f"lacks {K_PROJ}"):
        logits(folder)


def test_shape_mismatch_names_tensor_and_both_shapes(folder: Path) -> None:
    edit(folder, **{K_PROJ: torch.zeros(16, 64)})
    with pytest.raises(CheckpointError, match=rf"{K_PROJ}.*\[16, 64\].*\[32, 64\]"):
        logits(folder)


def test_all_headers_are_checked_before_weights_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(folder, **{K_PROJ: torch.zeros(16, 64)})
    shard(folder)
    monkeypatch.setattr(filling, "read_slices", lambda wanted: pytest.fail("it reads"))
    with pytest.raises(CheckpointError, match=K_PROJ):
        logits(folder)


def test_one_tensor_at_a_time_is_in_memory_beside_the_model(tmp_path: Path) -> None:
    """Where slots store values themselves, as a format that rounds them does."""
    save_file({f"t{number}": torch.randn(8, 8) for number in range(4)}, tmp_path / "model.safetensors")
    seen: list[weakref.ref[Tensor]] = []

    def store(values: Tensor) -> None:
        assert not any(other() is not None for other in seen)
        seen.append(weakref.ref(values))

    whole = (slice(0, 8), slice(0, 8))
    slots = {f"t{number}": Slot((8, 8), whole, torch.empty(8, 8), store=store) for number in range(4)}
    fill_from_checkpoint(slots, tmp_path)
    assert len(seen) == 4


def test_weights_as_loaded_are_free_once_a_layer_holds_another_form(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots refer to them."""
    config = ModelConfig.from_folder(folder)
    finalize, checked = Linear.finalize, []

    def spy(linear: Linear) -> None:
        if not checked:
            gc.collect()
            assert not any(type(one) is Slot for one in gc.get_objects())
        checked.append(linear)
        finalize(linear)

    monkeypatch.setattr(Linear, "finalize", spy)
    load_model(folder, config, make_context(config))
    assert checked


def test_unexpected_tensor_is_named(folder: Path) -> None:
    edit(folder, **{"model.layers.0.self_attn.sinks": torch.zeros(4)})
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.sinks"):
        logits(folder)


def test_integer_weights_are_refused(folder: Path) -> None:
    edit(folder, **{K_PROJ: torch.zeros(32, 64, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match=f"{K_PROJ}.*I8.*accepted"):
        logits(folder)


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_finite_numbers_are_named(folder: Path, value: float, quantization: str | None) -> None:
    shard(folder)
    config = ModelConfig.from_folder(folder)
    load_model(folder, config, make_context(config), quantization=quantization)
    file = next(path for path in folder.glob("*.safetensors") if K_PROJ in load_file(path))
    tensors = load_file(file)
    tensors[K_PROJ][3, 5] = tensors[K_PROJ][-1, -1] = value
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=rf"^{file.name} .*{K_PROJ}' \(2 of 2048 values are NaN or Inf"):
        load_model(folder, config, make_context(config), quantization=quantization)


def test_weights_that_overflow_the_model_dtype_are_named(folder: Path) -> None:
    edit(folder, **{K_PROJ: torch.full((32, 64), 1e5)})
    config = ModelConfig.from_folder(folder)
    with pytest.raises(CheckpointError, match=rf"{K_PROJ}' \(values up to 100000 overflow.*--dtype bfloat16"):
        load_model(folder, config, make_context(config, dtype=torch.float16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_file_is_read_for_its_weights_in_any_type(folder: Path, dtype: torch.dtype) -> None:
    """The rest of the file beside one bad value at its very end, in a tensor longer than what is converted at once."""
    stored = next(tensor for tensor in stored_tensors(folder / "model.safetensors") if tensor.name == K_PROJ)
    good, bad = torch.zeros(2, CHUNK - 1).to(dtype), torch.zeros(2, CHUNK - 1)
    bad[-1, -1] = math.nan
    check = FiniteCheck()
    check.add(stored, (slice(0, 32), slice(0, 64)), good)
    check.add(stored, (slice(0, 32), slice(0, 64)), torch.zeros(3, dtype=torch.int32))
    check.finish()
    check.add(stored, (slice(0, 32), slice(0, 64)), bad.to(dtype))
    with pytest.raises(CheckpointError, match=K_PROJ):
        check.finish()


@pytest.mark.parametrize("keep", [4, 3000, -1000], ids=["in the length", "in the header", "in the data"])
def test_truncated_file_is_named(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*truncated"):
        logits(folder)


def test_index_that_names_a_missing_file(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors.*does not exist"):
        logits(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "must hold a JSON object, got list"),
        ("{", "is not valid JSON"),
        ("{}", "is not a safetensors index: `weight_map` must name a file for each tensor"),
        ('{"weight_map": {"a": 1}}', "is not a safetensors index"),
        ('{"weight_map": {"a": 1, "b": "c"}}', "is not a safetensors index"),
        ('{"weight_map": ["a"]}', "is not a safetensors index"),
        (json.dumps({"weight_map": {"a": "x" * 300}}), "names xxx.*does not exist"),
    ],
)
def test_index_that_is_no_index(folder: Path, content: str, message: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors\.index\.json {message}"):
        logits(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors", "other.safetensors"])
def test_a_link_to_a_blob_that_is_gone(folder: Path, name: str) -> None:
    shard(folder)
    if name == "other.safetensors":
        (folder / "model.safetensors.index.json").unlink()
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(folder / "blobs" / "abc")
    with pytest.raises(
        CheckpointError, match=rf"{name} cannot be read: No such file.*link to .*abc; download"
    ) as caught:
        logits(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_in_place_of_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no file"):
        logits(folder)


def test_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "tiny-Q4_K_M.gguf").touch()
    with pytest.raises(CheckpointError, match=r"no \.safetensors file \(found tiny-Q4_K_M\.gguf: GGUF is not read"):
        checkpoint_files(tmp_path)


def test_pickled_weights_are_never_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"no \.safetensors.*pytorch_model\.bin.*pickled"):
        logits(folder)


def rank_mesh(rank: int, size: int) -> Mesh:
    return Mesh(Group(rank, size))


def slots_of(config: ModelConfig, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """What a dummy load puts where, by checkpoint name."""
    seen: dict[str, Tensor] = {}
    fill = loader.fill_with_dummies

    def spy(slots: dict[str, loader.Slot], seed: int) -> None:
        fill(slots, seed)
        seen.update({name: slot.destination.clone() for name, slot in slots.items() if slot.destination is not None})

    with monkeypatch.context() as patch:
        patch.setattr(loader, "fill_with_dummies", spy)
        load_model(Path("nowhere"), config, make_context(config, mesh), "dummy", seed=3)
    return seen


def test_dummy_weights_fill_everything_alike_on_any_mesh(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.from_folder(folder)
    whole = slots_of(config, Mesh(), monkeypatch)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(whole) == set(file.keys())
    for name, tensor in whole.items():
        assert 0 < tensor.abs().max() <= 1e-3, name
        assert tensor.std() > 4e-4, name
    assert not torch.equal(whole[K_PROJ], whole[K_PROJ.replace("k_proj", "v_proj")])
    halves = [slots_of(config, rank_mesh(rank, 2), monkeypatch) for rank in (0, 1)]
    for name in (K_PROJ, "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"):
        torch.testing.assert_close(torch.cat([half[name] for half in halves]), whole[name])
    name = "model.layers.0.mlp.down_proj.weight"
    torch.testing.assert_close(torch.cat([half[name] for half in halves], dim=1), whole[name])
