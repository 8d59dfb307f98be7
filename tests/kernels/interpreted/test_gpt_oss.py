"""A whole tiny gpt-oss in Triton's kernels, its experts tiled as on a GPU, computes what transformers does."""

from __future__ import annotations

from pathlib import Path

import driver
import pytest
import torch
from mxfp4_experts import to_mxfp4
from tiny_configs import VARIANTS, save_tiny_model

from headrace.attention.triton_attn import TritonAttention
from headrace.distributed.mesh import Mesh
from headrace.kernels.table import TRITON_KERNELS
from headrace.kernels.tiled import TiledWeight
from headrace.layers.context import LayerContext
from headrace.layers.moe import SparseMoE
from headrace.model_config import ModelConfig
from headrace.models.served import attention_specs
from headrace.quantization.packed import PackedProduct

ARCHITECTURE = "GptOssForCausalLM"
PROMPTS = [[5], list(range(20, 39))]
"""the second longer than the window"""


def as_on_a_gpu(config: ModelConfig, mesh: Mesh | None = None) -> LayerContext:
    specs = attention_specs(config, tp_size=1, block_size=16, dtype="float16", device_type="cuda")
    return LayerContext(mesh or Mesh(), TRITON_KERNELS, TritonAttention(), specs, torch.float16, torch.device("cpu"))


def test_logits_are_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("headrace.kernels.attention", "headrace.attention.triton_attn"):
        monkeypatch.setattr(f"{place}.multiprocessor_count", lambda _: 8)
    monkeypatch.setattr(PackedProduct, "widens", False, raising=False)
    monkeypatch.setattr(PackedProduct, "prepare", lambda *arguments: None)
    monkeypatch.setattr(driver, "make_context", as_on_a_gpu)
    two_layers = VARIANTS[ARCHITECTURE]["sliding"] | {"num_hidden_layers": 2, "num_local_experts": 4}
    monkeypatch.setitem(VARIANTS[ARCHITECTURE], "short", two_layers | {"num_experts_per_tok": 2})
    reference = save_tiny_model(ARCHITECTURE, "short", tmp_path)
    to_mxfp4(reference, tmp_path)
    ours = driver.Driver(tmp_path)
    experts = [layer.experts for layer in ours.model.modules() if isinstance(layer, SparseMoE)]
    assert [type(one.w13) for one in experts] == [TiledWeight] * 2
    ours.start(len(PROMPTS))
    found = [ours.step(PROMPTS), ours.step([[7] for _ in PROMPTS])]
    with torch.inference_mode():
        theirs = [reference(torch.tensor([[*prompt, 7]])).logits[0] for prompt in PROMPTS]
    expected = torch.cat([one[:-1] for one in theirs]), torch.stack([one[-1] for one in theirs])
    for step, wanted in zip(found, expected, strict=True):
        errors = (step.float() - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert errors.median() <= 1e-2  # not of all: a close call of a router in float16 may choose another expert
