"""Tiny models of gpt-oss give transformers' tokens, from plain and from MXFP4 checkpoints, however work is cut up."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import make_context
from mxfp4_experts import to_mxfp4
from safetensors.torch import load_file, save_file
from tiny_configs import VARIANTS, save_tiny_model, shard
from torch import Tensor

from headrace import LLM, SamplingParams
from headrace.distributed.mesh import Group
from headrace.errors import CheckpointError, ConfigError
from headrace.feed_forwards import Experts
from headrace.layers.moe import SparseMoE, expert_specs
from headrace.model_config import ModelConfig
from headrace.models.loader import load_model
from tests.distributed.thread_ranks import THREADS

ARCHITECTURE = "GptOssForCausalLM"
NEW_TOKENS = 16
FORMATS: dict[str, tuple[int, ...] | None] = {"plain": None, "mxfp4": (), "mixed": (1,)}
"""name -> the layers whose experts are plain in an MXFP4 checkpoint; None: the checkpoint is plain"""
CHUNKS = {"max_num_batched_tokens": 24}
TWO_RANKS = {"tensor_parallel_size": 2, "executor": THREADS}
"""Of a width of 96 they hold 48 each, but 32 and 64 where 32 share a scale."""
BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"
SCALES = "model.layers.1.mlp.experts.gate_up_proj_scales"


def prompts() -> list[list[int]]:
    """Most are longer than the window, and begin alike."""
    random = torch.Generator().manual_seed(1)
    shared = torch.randint(3, 128, (40,), generator=random).tolist()
    return [[5, 9], shared[:20], shared, [*shared[:33], 7, 8], [*shared, *range(20, 50)]]


@torch.inference_mode()
def reference_greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    tokens, cache, inputs = [], None, torch.tensor([prompt])
    for _ in range(NEW_TOKENS):
        output = model(inputs, past_key_values=cache, use_cache=True)
        cache, inputs = output.past_key_values, output.logits[:, -1:].argmax(-1)
        tokens.append(int(inputs))
    return tokens


Checkpoint = tuple[Path, list[list[int]]]
"""(a folder, the greedy tokens that transformers gives for its model)"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    made = {}
    for name, plain_layers in FORMATS.items():
        folder = tmp_path_factory.mktemp("gpt_oss")
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(VARIANTS[ARCHITECTURE], "odd", VARIANTS[ARCHITECTURE]["sliding"] | {"intermediate_size": 96})
            reference = save_tiny_model(ARCHITECTURE, "odd", folder)
        if plain_layers is not None:
            to_mxfp4(reference, folder, plain_layers)
        made[name] = folder, [reference_greedy(reference, prompt) for prompt in prompts()]
    return made


@pytest.mark.parametrize(
    ("checkpoint", "options"),
    [pytest.param("plain", {}, marks=pytest.mark.slow), ("plain", CHUNKS), ("mxfp4", CHUNKS), ("mixed", TWO_RANKS)],
    ids=["plain", "plain in chunks", "mxfp4 in chunks", "mixed on two ranks"],
)
def test_tokens_are_transformers(checkpoint: str, options: dict[str, Any], checkpoints: dict[str, Checkpoint]) -> None:
    folder, expected = checkpoints[checkpoint]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts()]
    with LLM(str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=128, **options) as llm:
        for _ in range(2):  # cold, then with prefixes from the cache
            found = [output.outputs[0].token_ids for output in llm.generate(asked, params, use_tqdm=False)]
            assert found == expected
        assert llm.stats().prefix_cache_hits > 0


def test_generation_ends_at_any_of_the_stop_tokens_of_generation_config(
    checkpoints: dict[str, Checkpoint], tmp_path: Path
) -> None:
    """Harmony ends an answer by <|return|> or by <|call|>."""
    folder, expected = checkpoints["plain"]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    stops = [expected[1][5], expected[3][7]]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, *stops]}))
    asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts()]
    with LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True, max_model_len=128) as llm:
        outputs = llm.generate(asked, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS), use_tqdm=False)
    for output, greedy in zip(outputs, expected, strict=True):
        end = next((i for i, token in enumerate(greedy, 1) if token in (2, *stops)), NEW_TOKENS)
        assert output.outputs[0].token_ids == greedy[:end]
        assert output.outputs[0].finish_reason == ("stop" if greedy[end - 1] in (2, *stops) else "length")


def load(folder: Path, load_format: str = "auto") -> Any:
    config = ModelConfig.from_folder(folder)
    return load_model(folder, config, make_context(config), load_format)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    to_mxfp4(save_tiny_model(ARCHITECTURE, "sliding", tmp_path), tmp_path)
    return tmp_path


def nan_at(scales: Tensor, place: int) -> Tensor:
    scales.view(-1)[place] = 255
    return scales


SPOILT = {
    "no scales": (SCALES, lambda scales: None, rf"lacks {SCALES}"),
    "no blocks": (BLOCKS, lambda blocks: None, rf"lacks {BLOCKS}"),
    "narrow": (BLOCKS, lambda blocks: blocks[..., :8], rf"{BLOCKS}.*\[8, 96, 2, 8\], config.json .*\[8, 96, 2, 16\]"),
    "few scales": (SCALES, lambda scales: scales[:, :64], rf"{SCALES}.*\[8, 64, 3\], config.json .*\[8, 128, 3\]"),
    "floats": (SCALES, lambda scales: scales.float(), rf"{SCALES}.*of type F32; accepted: U8, F8_E8M0"),
    "NaN": (SCALES, lambda scales: nan_at(scales, 77), rf"{SCALES}.*\(1 of 3072 values are NaN or Inf"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_spoilt_checkpoint_is_refused_by_name(case: str, packed: Path) -> None:
    name, spoil, message = SPOILT[case]
    tensors = load_file(packed / "model.safetensors")
    spoilt = spoil(tensors.pop(name))
    save_file({**tensors, **({} if spoilt is None else {name: spoilt.contiguous()})}, packed / "model.safetensors")
    with pytest.raises(CheckpointError, match=message) as error:
        load(packed)
    assert "\n" not in str(error.value)


def test_experts_that_the_files_hold_plain_are_so_whatever_config_says(tmp_path: Path) -> None:
    """An export of the dequantized model may keep the format's fields."""
    save_tiny_model(ARCHITECTURE, "sliding", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not any(note.startswith("Quantization") for note in load(tmp_path).notes)


@pytest.mark.parametrize("left_out", ["names", "everything", "everything, in several files"])
def test_experts_alone_are_packed_whatever_config_json_leaves_out(left_out: str, packed: Path) -> None:
    """Tensors' names tell what an export without `quantization_config` holds."""
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"} if left_out == "names" else None
    (packed / "config.json").write_text(json.dumps(config))
    if left_out.endswith("files"):
        shard(packed)
    (note, *_) = load(packed).notes
    assert note.startswith("Quantization mxfp4: 0 linears and the experts of 3 layers. Unquantized: ")
    for kept in ("self_attn.qkv_proj x 3", "self_attn.o_proj x 3", "mlp (router) x 3", "lm_head"):
        assert kept in note


def test_a_width_without_whole_groups_is_refused(packed: Path) -> None:
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "intermediate_size": 72}))
    with pytest.raises(
        ConfigError, match=r"model\.layers\.0\.mlp: down_proj has 72 inputs in groups of 32; accepted: a multiple"
    ):
        load(packed)


def test_dummies_of_packed_experts_are_small_numbers(packed: Path) -> None:
    model = load(packed, load_format="dummy")
    for layer in (layer for layer in model.modules() if isinstance(layer, SparseMoE)):
        assert layer.experts.w13.isfinite().all()
        assert 1e-4 < layer.experts.w13.abs().max() < 1e-2


@pytest.mark.parametrize(("ranks", "widths"), [(2, {1440}), (4, {704, 736}), (8, {352, 384}), (64, {32, 64})])
def test_ranks_share_the_real_experts_by_whole_groups(ranks: int, widths: set[int]) -> None:
    """An expert of gpt-oss is 2880 wide: 90 groups of 32."""
    experts = Experts(2880, 32, 4, 2880, bias=True)
    found = [expert_specs(experts, Group(rank, ranks), torch.bfloat16, 32) for rank in range(ranks)]
    columns = [down.parts[0].columns for _, down in found]
    assert [one.start for one in columns] == [0, *(one.stop for one in columns[:-1])]
    assert columns[-1].stop == 2880
    assert {one.stop - one.start for one in columns} == widths
    assert all(one.start % 32 == 0 for one in columns)
    for (gate_up, down), own in zip(found, columns, strict=True):
        assert [part.rows for part in gate_up.parts] == [own, own]
        assert down.adds_bias == (own.start == 0)


def test_more_ranks_than_groups_are_refused(packed: Path) -> None:
    config = ModelConfig.from_folder(packed)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 4 .* groups of 32 inputs .* intermediate size \(64\)"):
        expert_specs(Experts(config.hidden_size, 8, 4, 64), Group(0, 4), torch.float32, 32)
