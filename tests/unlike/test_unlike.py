"""A family in which no two layers are alike gives the tokens of a plain reference, however its work is cut up: from a
cache of prefixes, in chunks, after preemption, on two ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from headrace import LLM, SamplingParams
from headrace.attention.table import select_backend
from headrace.cache_groups import cache_layout
from headrace.errors import ConfigError
from headrace.model_config import ModelConfig
from headrace.models.loader import build_model
from headrace.models.served import attention_specs, describe
from headrace.stages import Stage
from tests.models.driver import make_context
from tests.models.mixed_format import quantize
from tests.unlike import reference
from tests.unlike.family import ARCHITECTURE, CONFIG

INT8 = r"layers\.3\.mlp\.experts\.\d+\.\w+"
"""one layer's experts; all else is plain"""
NEW_TOKENS = 20
NEVER = [0]
"""Not among the answers. One that could end at any token is expected to be short, so that few pages are filled."""
SEED = 3
"""of weights and prompts with which the reference is never near a tie"""
VARIANTS: dict[str, dict[str, Any]] = {
    "chunks of at most 24 tokens": {"max_num_batched_tokens": 24},
    "few pages": {"max_num_batched_tokens": 32, "num_gpu_blocks_override": 12},
    "two ranks": {"tensor_parallel_size": 2, "max_num_batched_tokens": 48},
}


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A package that brings the family, here and in the processes of ranks."""
    place = tmp_path_factory.mktemp("site-packages")
    (place / "unlike-1.dist-info").mkdir()
    (place / "unlike-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: unlike\nVersion: 1\n")
    points = f"[headrace.models]\n{ARCHITECTURE} = tests.unlike.family:ENTRY\n"
    (place / "unlike-1.dist-info" / "entry_points.txt").write_text(points)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place)
        patch.setenv("PYTHONPATH", f"{place}{os.pathsep}{os.environ['PYTHONPATH']}")
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """(its folder, its weights as the reference takes them), the tensors being those that the description lists."""
    spec, random = describe(ModelConfig.from_dict(CONFIG)), torch.Generator().manual_seed(SEED)
    table = (spec.vocab_size, spec.hidden_size)
    shapes = {"embed_tokens.weight": table, "lm_head.weight": table, "norm.weight": table[1:]}
    shapes |= {f"layers.{i}.{p.name}": p.shape for i, layer in enumerate(spec.layers) for p in layer.parameters}
    weights = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    for name, weight in weights.items():
        weights[name] = weight * 1.5 * weight.shape[-1] ** -0.5 if weight.dim() > 1 else 1 + 0.2 * weight
    weights["lm_head.weight"][NEVER] = 0
    folder = tmp_path_factory.mktemp("unlike")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights, folder / "model.safetensors")
    return folder, quantize(folder, INT8)


def prompts() -> list[list[int]]:
    """Longer than window and chunk, but for two; most begin alike, in whole blocks and in parts of them."""
    random = torch.Generator().manual_seed(SEED)
    sizes = ((0, 3), (0, 20), (70, 1), (40, 5), (70, 30), (64, 60))
    shared = torch.randint(0, CONFIG["vocab_size"], (70,), generator=random).tolist()
    own = [torch.randint(0, CONFIG["vocab_size"], (count,), generator=random).tolist() for _, count in sizes]
    return [shared[:begin] + rest for (begin, _), rest in zip(sizes, own, strict=True)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_are_the_references(variant: str, model: tuple[Path, dict[str, Tensor]]) -> None:
    folder, weights = model

    @cache
    def expected(prompt: tuple[int, ...], ids: tuple[int, ...]) -> Tensor:
        """# [len(ids), vocabulary] log-probabilities; `ids` are greedy where each is the best after those before it."""
        logits = reference.logits(weights, CONFIG["mixers"], [*prompt, *ids][:-1])[len(prompt) - 1 :]
        best = logits.topk(2).values
        assert float((best[:, 0] - best[:, 1]).min()) > 1e-3, "the reference is near a tie: take another seed"
        return logits.log_softmax(-1)

    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, stop_token_ids=NEVER, logprobs=0)
    asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts()]
    with LLM(str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=160, **VARIANTS[variant]) as llm:
        for _ in range(2):  # cold, then warm
            for prompt, output in zip(prompts(), llm.generate(asked, params, use_tqdm=False), strict=True):
                found = output.outputs[0]
                scores = expected(tuple(prompt), tuple(found.token_ids))
                assert found.token_ids == scores.argmax(-1).tolist()
                assert found.logprobs is not None
                ours = [entry[token].logprob for entry, token in zip(found.logprobs, found.token_ids, strict=True)]
                torch.testing.assert_close(torch.tensor(ours), scores.amax(-1), rtol=0, atol=1e-3)
        stats = llm.stats()
    assert stats.prefix_cache_hits > 0
    assert stats.num_free_blocks == stats.num_blocks
    assert (stats.num_preemptions > 0) == (variant == "few pages")


def test_each_kind_of_layer_has_a_group_and_one_backend_serves_all() -> None:
    config = ModelConfig.from_dict(CONFIG)
    layout = cache_layout(describe(config), 1, 4, 16)
    kinds = {group.kind: group.layers for group in layout.groups}
    assert kinds == {"full": (0,), "window": (1, 5), "chunk": (2,), "latent": (3, 6), "state": (4, 7)}
    chosen = select_backend(attention_specs(config, tp_size=2, block_size=16, dtype="bfloat16", device_type="cuda"))
    assert chosen.name == "TRITON_ATTN"


def test_a_family_that_does_not_say_in_stages_is_not_divided_into_them() -> None:
    config = ModelConfig.from_dict(CONFIG)
    context = replace(make_context(config), stage=Stage(0, (4, 4)))
    with pytest.raises(
        ConfigError, match=r"pipeline_parallel_size must be 1 for UnlikeForCausalLM, got 2: .*in_stages"
    ):
        build_model(config, context)


def test_a_family_with_states_of_its_own_is_served_without_guesses() -> None:
    config = ModelConfig.from_dict(CONFIG)
    with pytest.raises(ConfigError, match=r"speculative_config is not served with .* keeps one recurrent state"):
        build_model(config, replace(make_context(config), kept_states=3))
