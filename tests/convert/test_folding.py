"""A model stays the same where linears' inputs are divided, and their columns multiplied, by the same numbers."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver
from safetensors.torch import save_file
from tiny_configs import save_tiny_model

from headrace.convert import awq
from headrace.convert.folding import Fold
from headrace.convert.pieces import plan_shards
from headrace.convert.schemes import find_scheme
from headrace.convert.watch import Watch
from headrace.model_config import ModelConfig
from headrace.models.served import describe

CPU = torch.device("cpu")
TOKENS = list(range(20, 60))
NORMS, VALUES, UPS = {"input_layernorm", "post_attention_layernorm"}, {"self_attn.v_proj"}, {"mlp.up_proj"}
EXPERTS = {"mlp.experts.*.up_proj"}
BESIDE = {"input_layernorm", "pre_feedforward_layernorm", "mlp.up_proj", "moe.experts.*.up_proj"}
MODELS = [
    ("LlamaForCausalLM", "wide-heads", NORMS | VALUES | UPS),
    ("Qwen2ForCausalLM", "full", NORMS | VALUES | UPS),  # biases of q, k, v
    ("GemmaForCausalLM", "one-kv-head", NORMS | VALUES | UPS),  # norms less one
    ("Phi3ForCausalLM", "fused", NORMS),
    ("PhiForCausalLM", "biased", {"input_layernorm", *VALUES}),  # one norm for both, with a bias
    ("OlmoForCausalLM", "clipped", UPS),
    ("Olmo2ForCausalLM", "one-kv-head", VALUES | UPS),  # norms behind
    ("Qwen3MoeForCausalLM", "full", NORMS | VALUES | EXPERTS),
    ("Qwen2MoeForCausalLM", "full", NORMS | VALUES | EXPERTS | {"mlp.shared_expert.up_proj"}),
    ("DeepseekV3ForCausalLM", "queries-too", NORMS | UPS | EXPERTS | {"mlp.shared_experts.up_proj"}),
    ("Gemma4ForConditionalGeneration", "experts", BESIDE),
    ("Qwen3_5MoeForConditionalGeneration", "text", NORMS | VALUES | EXPERTS | {"mlp.shared_expert.up_proj"}),
]


def logits(folder: Path) -> torch.Tensor:
    return Driver(folder).logits(TOKENS)


@pytest.mark.parametrize(("architecture", "variant", "folds"), MODELS)
def test_folding_changes_no_logits(
    architecture: str, variant: str, folds: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    used: set[str] = set()

    def random(fold: Fold, readers: Any, *rest: Any) -> Any:
        used.add(fold.maker)
        weight = next(iter(readers.values())).read()
        heads, times = fold.heads
        made = torch.exp(torch.randn(heads, weight.shape[1] // heads // times, generator=generator))
        return made.flatten(), made[:, None].expand(heads, times, -1).flatten()

    monkeypatch.setattr(awq, "_search", random)
    folder, other = tmp_path / "model", tmp_path / "folded"
    save_tiny_model(architecture, variant, folder)
    config = ModelConfig.from_folder(folder)
    spec, scheme = describe(config), find_scheme("w4a16_awq", -1)
    tensors = {}
    for shard in plan_shards(folder, config, spec, scheme):
        scalings = {}
        if shard.layer >= 0:
            pieces = {piece.own: piece for piece in shard.pieces}
            prefix = f"model.layers.{shard.layer}."
            scalings = awq.find_scalings(spec.layers[shard.layer], prefix, pieces, Watch(), scheme, CPU)
        for piece in shard.pieces:
            values = piece.read()
            tensors[piece.name] = scalings[piece.own].applied(values) if piece.own in scalings else values
    assert {re.sub(r"\.\d+\.", ".*.", name) for name in used} == folds
    other.mkdir()
    shutil.copy(folder / "config.json", other)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, other / "model.safetensors")
    found, exact = logits(other), logits(folder)
    # float32, whose relative errors of some 1e-6 add up over two layers of sums of about a hundred terms
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))
