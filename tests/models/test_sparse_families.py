"""Indexes that choose keys: which layers have their own, what they choose, and of what they cannot be made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver
from safetensors.torch import load_file, save_file
from tiny_configs import save_tiny_model

from headrace import LLM, SamplingParams
from headrace.errors import UnsupportedModelError
from headrace.layers import latent_attention
from headrace.mixers import LatentAttention
from headrace.model_config import ModelConfig
from headrace.models.served import describe
from headrace.runner import kv_scales

PROMPT = torch.randint(3, 101, (90,), generator=torch.Generator().manual_seed(2)).tolist()


def test_what_an_index_leaves_out_matters(tmp_path: Path) -> None:
    """So that whoever compares tokens would find an index that chooses others, or one that chooses nothing."""
    save_tiny_model("DeepseekV32ForCausalLM", "sparse-groups", tmp_path)
    right, tensors = Driver(tmp_path).logits(PROMPT), load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.indexer.weights_proj.weight"
    save_file({**tensors, name: tensors[name] * -1}, tmp_path / "model.safetensors")
    wrong, seen = Driver(tmp_path).logits(PROMPT), 7
    torch.testing.assert_close(wrong[:seen], right[:seen])
    assert (wrong[seen:] - right[seen:]).abs().max() > 0.01 * right.abs().max()


class Kept:
    """Stands in for transformers' cache: gives an index's keys back as another type holds them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        return keys.to(self.dtype).float()


def test_keys_of_an_index_in_fp8_choose_what_transformers_index_chooses_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first layer, prompt and answer, in chunks; and of keys in float32 it would choose others."""
    theirs: Any = save_tiny_model("DeepseekV32ForCausalLM", "sparse-groups", tmp_path)
    monkeypatch.setattr(kv_scales, "BOUND", 9.0)  # one of seven keys that is another changes a random model much
    seen: list[torch.Tensor] = []
    chosen: list[set[int]] = []
    forward = latent_attention.LatentAttention.forward

    def recording(self: Any, x: torch.Tensor, angles: Any, metadata: Any, *rest: Any) -> Any:
        out = forward(self, x, angles, metadata, *rest)
        if self is layers[0]:
            seen.append(x)
            rows = metadata.plan[latent_attention.CHOSEN]
            chosen.extend([set()] * len(x) if rows is None else [{*row} - {-1} for row in rows.tolist()])
        return out

    settings: Any = {"dtype": "float32", "kv_cache_dtype": "fp8_e4m3", "max_num_batched_tokens": 16, "max_num_seqs": 4}
    with LLM(str(tmp_path), skip_tokenizer_init=True, max_model_len=128, **settings) as llm:
        model: Any = llm._core._executor._worker.model
        layers = [layer for layer in model.modules() if isinstance(layer, latent_attention.LatentAttention)]
        monkeypatch.setattr(latent_attention.LatentAttention, "forward", recording)
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        llm.generate([{"prompt_token_ids": PROMPT[:40]}], params, use_tqdm=False)
    x, attention = torch.cat(seen)[None], theirs.model.layers[0].self_attn
    count = x.shape[1]
    places = torch.arange(count)[None]
    hidden = torch.full((1, count, count), -torch.inf).triu(1)
    with torch.inference_mode():
        given = x, attention.q_a_layernorm(attention.q_a_proj(x)), theirs.model.rotary_emb(x, places), hidden, places
        narrow, wide = (
            [{*row} for row in attention.indexer(*given, cache=Kept(dtype))[0].tolist()]
            for dtype in (torch.float8_e4m3fn, torch.float32)
        )
    top_k = theirs.config.index_topk
    assert count == 40 + 5
    assert chosen[top_k:] == narrow[top_k:]
    assert narrow[top_k:] != wide[top_k:]


GLM: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"], "vocab_size": 101, "hidden_size": 64, "intermediate_size": 72,
    "num_hidden_layers": 7, "num_attention_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 40, "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12, "v_head_dim": 28, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 24, "index_topk": 7, "index_head_dim": 16, "index_n_heads": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "own"),
    [
        ({}, "FFFFFFF"),
        ({"index_topk_freq": 3}, "FFSSFSS"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, "FSFSFSF"),
        ({"index_topk_freq": 3, "index_topk_pattern": "FSSSFSS"}, "FSSSFSS"),
        ({"indexer_types": ["full"] * 6 + ["shared"]}, "FFFFFFS"),
    ],
)
def test_config_json_says_which_layers_share_an_index(fields: dict[str, Any], own: str) -> None:
    mixers = [layer.mixer for layer in describe(ModelConfig.from_dict({**GLM, **fields})).layers]
    kept = [mixer for mixer in mixers if isinstance(mixer, LatentAttention)]
    assert [(mixer.index_heads, mixer.cached_values) for mixer in kept] == [
        (3, 52 + 16) if letter == "F" else (0, 52) for letter in own
    ]
    assert {mixer.sparse_top_k for mixer in kept} == {7}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"index_topk_pattern": "SFFFFFF"}, r"`index_topk_pattern` is \"SFFFFFF\"; must be full or shared for each"),
        ({"indexer_types": ["full"]}, "`indexer_types` .* each of the 7 layers"),
        ({"index_head_dim": 8}, "`index_head_dim` is 8; must be an integer from 12"),
        ({"attention_bias": True}, "`attention_bias` is true; must be false"),
        ({"q_lora_rank": None}, "`q_lora_rank`"),
    ],
)
def test_an_index_that_cannot_be_is_refused_by_field(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        describe(ModelConfig.from_dict({**GLM, **fields}))
