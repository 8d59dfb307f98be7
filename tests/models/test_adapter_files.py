"""What is read of an adapter's folder, and what is said of one that cannot be served."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.errors import UserError
from headrace.lora import LowRank
from headrace.model_config import ModelConfig
from headrace.models.adapters import adapted_linears, read_adapter
from headrace.models.served import describe

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "eos_token_id": 2,
}  # fmt: skip
MIXTRAL = {**LLAMA, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
FRONT = "base_model.model."
Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"
SHAPES = {Q: (16, 16), DOWN: (16, 24)}
FIELDS: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}


def tensors_of(shapes: dict[str, tuple[int, int]], rank: int = 4) -> dict[str, np.ndarray]:
    made = {}
    for name, (outputs, inputs) in shapes.items():
        made[f"{FRONT}{name}.lora_A.weight"] = np.zeros((rank, inputs), np.float32)
        made[f"{FRONT}{name}.lora_B.weight"] = np.zeros((outputs, rank), np.float32)
    return made


def save(folder: Path, tensors: dict[str, np.ndarray] | None = None, **fields: Any) -> Path:
    given = {name: value for name, value in (FIELDS | fields).items() if value is not None}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    save_file(tensors_of(SHAPES) if tensors is None else tensors, folder / "adapter_model.safetensors")
    return folder


def changes(folder: Path, config: dict[str, Any] = LLAMA, experts: bool = True) -> dict[str, LowRank]:
    return read_adapter(folder, ModelConfig.from_dict(config), 16, experts).changes


def test_scales_follow_ranks_and_patterns(tmp_path: Path) -> None:
    file = f"{FRONT}{Q}.lora_A.weight", f"{FRONT}{Q}.lora_B.weight"
    found = changes(save(tmp_path))
    assert found == {Q: LowRank(1.5, 4, *file), DOWN: LowRank(1.5, 4, *(name.replace(Q, DOWN) for name in file))}
    found = changes(save(tmp_path, use_rslora=True, alpha_pattern={"layers.0.*": 9, "0.mlp.down_proj": 7}))
    assert [found[Q].scale, found[DOWN].scale] == [6 / math.sqrt(4), 9 / math.sqrt(4)]
    tensors = tensors_of({Q: (16, 16)}, 8) | tensors_of({DOWN: (16, 24)})
    found = changes(save(tmp_path, tensors, rank_pattern={"q_proj": 8, "_proj": 3}, target_modules=r".*_proj"))
    assert [(found[name].rank, found[name].scale) for name in (Q, DOWN)] == [(8, 0.75), (4, 1.5)]


def test_linears_that_files_hold_as_one_the_embedding_and_the_head_are_known(tmp_path: Path) -> None:
    fused = {"model.layers.0.self_attn.qkv_proj": (32, 16), "model.layers.1.mlp.gate_up_proj": (48, 16)}
    tensors = tensors_of(fused | {"lm_head": (40, 16)})
    tensors[f"{FRONT}model.embed_tokens.lora_embedding_A"] = np.zeros((4, 40), np.float32)
    tensors[f"{FRONT}model.embed_tokens.lora_embedding_B"] = np.zeros((16, 4), np.float32)
    copies = ("model.embed_tokens.base_layer.weight", "lm_head.weight")
    tensors |= {FRONT + name: np.zeros((40, 16), np.float32) for name in copies}
    found = changes(save(tmp_path, tensors, target_modules="all-linear"))
    assert found.keys() == {*fused, "lm_head", "model.embed_tokens"}


@pytest.mark.parametrize("front", ["model.language_model.", "language_model.model."])
def test_the_text_part_of_a_model_of_more_counts_under_either_name(front: str, tmp_path: Path) -> None:
    tensors = {name.replace(f"{FRONT}model.", FRONT + front): one for name, one in tensors_of(SHAPES).items()}
    tensors |= tensors_of({"vision_tower.layers.0.q_proj": (8, 8)})
    text = {**LLAMA, "model_type": "llama"}
    config = {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}, "text_config": text}
    assert changes(save(tmp_path, tensors), config).keys() == SHAPES.keys()


def test_experts_and_routers_are_no_linears_that_adapters_change() -> None:
    found = adapted_linears(describe(ModelConfig.from_dict(MIXTRAL)))
    assert not [name for name in found if "block_sparse_moe" in name]
    assert "model.layers.1.self_attn.o_proj" in found


EXPERTS, OURS = "model.layers.1.mlp.experts", "model.layers.1.block_sparse_moe.experts"
"""as transformers calls what checkpoints call otherwise"""
BOTH: dict[str, Any] = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "down_proj"]}


def of_all(inner: str, outputs: int, inputs: int, rank: int = 4) -> dict[str, np.ndarray]:
    """The tensors of all four experts, given what PEFT takes for their outputs and inputs."""
    shapes = {"A": (4 * rank, inputs), "B": (outputs, 4 * rank)}
    return {f"{FRONT}{EXPERTS}{inner}.lora_{one}.weight": np.zeros(shape, np.float32) for one, shape in shapes.items()}


def test_tensors_of_all_experts_are_told_apart_by_their_targets_and_shapes(tmp_path: Path) -> None:
    tensors = of_all(".base_layer", 48, 16, 8) | of_all("", 16, 24)
    found = changes(save(tmp_path, tensors, rank_pattern={r".*\.gate_up_proj": 8}, **BOTH), MIXTRAL)
    seen = {name: (one.rank, one.scale, one.experts, one.turned, "base_layer" in one.a) for name, one in found.items()}
    assert seen == {
        f"{OURS}.gate_up_proj": (8, 0.75, 4, False, True), f"{OURS}.down_proj": (4, 1.5, 4, False, False)
    }  # fmt: skip
    found = changes(save(tmp_path, of_all(".base_layer", 16, 48) | of_all("", 24, 16), **BOTH), MIXTRAL)
    assert [one.turned for one in found.values()] == [True, True]
    alone = BOTH | {"target_parameters": ["gate_up_proj"]}
    assert changes(save(tmp_path, of_all("", 48, 16), **alone), MIXTRAL).keys() == {f"{OURS}.gate_up_proj"}
    square = MIXTRAL | {"intermediate_size": 16}
    for shape, turned in (((32, 16), False), ((16, 32), True)):
        found = changes(save(tmp_path, of_all(".base_layer", *shape) | of_all("", 16, 16), **BOTH), square)
        assert [one.turned for one in found.values()] == [turned, turned]
    save(tmp_path, of_all("", 16, 16), **BOTH | {"target_parameters": ["down_proj"]})
    with pytest.raises(UserError, match="may be of inputs or of outputs, as versions of PEFT have it"):
        changes(tmp_path, square)


LATENT: dict[str, Any] = MIXTRAL | {
    "architectures": ["DeepseekV2ForCausalLM"], "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 8,
}  # fmt: skip


def test_of_experts_and_latents_what_is_not_served_is_named(tmp_path: Path) -> None:
    shared = {"model.layers.1.mlp.shared_experts.up_proj": (8, 16), "model.layers.1.self_attn.q_b_proj": (48, 8)}
    fields = {"target_modules": "all-linear"}
    assert changes(save(tmp_path, tensors_of(shared), **fields), LATENT, experts=False).keys() == shared.keys()
    one = {f"{EXPERTS}.3.up_proj": (8, 16)}
    assert changes(save(tmp_path, tensors_of(one), **fields), LATENT).keys() == one.keys()
    with pytest.raises(UserError, match=r"experts\.3\.up_proj', which needs lora_experts \(--lora-experts\)"):
        changes(tmp_path, LATENT, experts=False)
    for name in ("self_attn.kv_b_proj", "mlp.gate", "mlp.experts.4.up_proj"):
        save(tmp_path, tensors_of({f"model.layers.1.{name}": (8, 8)}), **fields)
        with pytest.raises(UserError, match=rf"{name}', which is no .* can change \(there are down_proj, .*q_b_proj"):
            changes(tmp_path, LATENT)


def edited(change: Callable[[dict[str, np.ndarray]], Any]) -> dict[str, np.ndarray]:
    tensors = tensors_of(SHAPES)
    change(tensors)
    return tensors


A, B = f"{FRONT}{Q}.lora_A.weight", f"{FRONT}{Q}.lora_B.weight"


@pytest.mark.parametrize(
    ("tensors", "fields", "message"),
    [
        (None, {"r": 32}, "`r` is 32; must be an integer from 1 to max_lora_rank (16)"),
        (None, {"r": 0}, "`r` is 0; must be an integer from 1"),
        (None, {"rank_pattern": {"q_proj": 17}}, "`rank_pattern.q_proj` is 17; must be an integer from 1 to max_lora"),
        (None, {"alpha_pattern": {"q_proj": "x"}}, '`alpha_pattern.q_proj` is "x"; must be a finite number'),
        (None, {"lora_alpha": "x"}, '`lora_alpha` is "x"; must be a finite number'),
        (None, {"peft_type": "IA3"}, '`peft_type` is "IA3"; must be LORA'),
        (None, {"use_dora": True}, "`use_dora` is true; must be left out, since headrace does not serve DoRA"),
        (None, {"modules_to_save": ["lm_head"]}, '`modules_to_save` is ["lm_head"]; must be left out'),
        (None, {"bias": "all"}, '`bias` is "all"; must be none'),
        (None, {"init_lora_weights": "pissa"}, '`init_lora_weights` is "pissa"; must be one that leaves the model'),
        (None, {"target_modules": ["k_proj"]}, f"changes '{DOWN}', which neither target_modules nor target_param"),
        (None, {"target_modules": "("}, "'(' is no regular expression"),
        (edited(lambda held: held.pop(B)), {}, f"lacks lora_B of {Q}"),
        (edited(lambda held: held.update({A: held[B]})), {}, "has shape [16, 4], model and adapter_config.json ask"),
        (edited(lambda held: held.update({A: held[A].astype(np.int8)})), {}, "is of type I8; accepted: F16, BF16, F32"),
        (edited(lambda held: held.update({f"{FRONT}x.y": held[A]})), {}, f"'{FRONT}x.y' is none of an adapter's"),
        (edited(lambda held: held.clear()), {}, "holds no adapter"),
        (tensors_of({"model.layers.7.self_attn.q_proj": (16, 16)}), {}, "'model.layers.7.self_attn.q_proj', which is"),
        (tensors_of({"model.norm.q_proj": (16, 16)}), {}, "which is no linear of this model that adapters can change"),
    ],
)  # fmt: skip
def test_each_bad_adapter_is_one_clear_line(
    tensors: dict[str, np.ndarray] | None, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        changes(save(tmp_path, tensors, **fields))
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_not_there_or_broken(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing is no folder; accepted: one with"):
        changes(tmp_path / "nothing")
    with pytest.raises(UserError, match="cannot be read: No such file"):
        changes(tmp_path)
    weights = save(tmp_path) / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4])
    with pytest.raises(UserError, match=r"adapter_model\.safetensors cannot be read"):
        changes(tmp_path)
    weights.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(UserError, match=r"lacks adapter_model\.safetensors \(adapter_model\.bin is pickled"):
        changes(tmp_path)
