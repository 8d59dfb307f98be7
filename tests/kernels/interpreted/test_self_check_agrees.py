"""The self-check finds nothing wrong with Triton's kernels, and finds one that is wrong."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.attention import triton_attn
from headrace.attention.triton_attn import TritonAttention
from headrace.distributed.mesh import Group, Mesh
from headrace.errors import ConfigError
from headrace.kernels import attention
from headrace.kernels.attention_config import PREFILL
from headrace.kernels.decode import decode_attention_reference
from headrace.kernels.latent_config import LatentSizes, plan_latent
from headrace.kernels.table import REFERENCE_KERNELS, TRITON_KERNELS
from headrace.layer_parts import Rope, Temperature
from headrace.layers import shared_experts
from headrace.layers.adapters import Adapters
from headrace.layers.attention import Attention
from headrace.layers.context import LayerContext
from headrace.model_config import Fields, ModelConfig
from headrace.models import filling, loader, registry
from headrace.models.adapters import adapted_linears
from headrace.models.descriptions import Described
from headrace.models.served import attention_specs, describe
from headrace.runner import latent_checks, layer_checks
from headrace.runner.kernel_checks import Subject, kernel_checks
from headrace.runner.kv_cache import cache_dtype, cache_shape
from headrace.runner.self_check import SelfCheck, with_switches
from tests.sampled import sampled, some_of

CPU = torch.device("cpu")
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 88,
    "eos_token_id": 60,
}
LLAMA = {**QWEN3, "architectures": ["LlamaForCausalLM"]}
MOE = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
SHARED = {**MOE, "architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 96}
LATENT = {
    **QWEN3,
    "architectures": ["YoutuForCausalLM"],
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
SPARSE = {
    **LATENT,
    "architectures": ["DeepseekV32ForCausalLM"],
    "first_k_dense_replace": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 48,
    "index_topk": 20,
    "index_head_dim": 16,
    "index_n_heads": 3,
}
FEW_DECODES = (1, 4, 16)
"""Requests of a step: keys in several parts, in two, and whole, as of all of layer_checks.DECODES"""
CACHES = ("auto", "fp8_e4m3")
either_cache = pytest.mark.parametrize("kv", some_of(CACHES, 1))


def check(
    config: dict[str, Any], kv: str, quantization: str | None, copy_engine: bool = False, only: str = "",
    adapted: bool = False, **broken: Any,
) -> SelfCheck:  # fmt: skip
    """Run the checks whose names contain `only`, with the kernels of the table that `broken` replaces. `adapted`:
    adapters may change all that they can, experts too."""
    model_config = ModelConfig.from_dict(config)
    specs = attention_specs(
        model_config, tp_size=1, block_size=16, dtype="bfloat16", device_type="cuda", kv_cache_dtype=kv
    )
    backend, kernels = TritonAttention(), with_switches(replace(TRITON_KERNELS, **broken))
    backend.copy_engine = copy_engine
    context = LayerContext(Mesh(), kernels, backend, specs, torch.bfloat16, CPU)
    described = describe(model_config)
    adapters = Adapters(1, 16, adapted_linears(described, experts=True).keys(), kernels, torch.bfloat16, CPU)
    context = replace(context, seat=adapters.seat if adapted else None)
    model = loader.load_model(Path(), model_config, context, "dummy", 0, quantization)
    kv_dtype = torch.bfloat16 if kv == "auto" else cache_dtype(kv, CPU)
    shape = cache_shape(described, specs, 1, 16, kv_dtype)
    found = SelfCheck(Group(), CPU)
    subject = Subject(model, backend, kernels, shape, 61, torch.bfloat16, CPU)
    for checks in (kernel_checks(subject), layer_checks.layer_checks(subject)):
        found.run(check for check in checks if only in check.name)
    assert all((layer.decode is None) == ("decode_attention" in found.demoted) for layer in subject.layers(Attention))
    assert backend.copy_engine == (copy_engine and "prefill_attention" not in found.demoted)
    return found


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "DUMMY_RANGE", 0.3)
    monkeypatch.setattr(layer_checks, "DECODES", FEW_DECODES)
    monkeypatch.setattr(latent_checks, "DECODES", FEW_DECODES[:2])
    for place in ("headrace.kernels.attention", "headrace.attention.triton_attn"):
        monkeypatch.setattr(f"{place}.multiprocessor_count", lambda _: 8)


@pytest.mark.parametrize("decodes", [FEW_DECODES, pytest.param(layer_checks.DECODES, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(("config", "kv", "quantization"), [(QWEN3, "fp8_e4m3", "ptpc_fp8"), (MOE, "auto", "fp8")])
def test_ours_agree(
    config: dict[str, Any], kv: str, quantization: str | None, decodes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_checks, "DECODES", decodes)
    found = check(config, kv, quantization)
    assert found.demoted == []
    assert found._count >= 11


def test_a_wrong_one_is_found() -> None:
    def wrong_angles(*arguments: Any) -> Any:
        return REFERENCE_KERNELS.rotary_and_cache(*arguments) * 1.02

    wrong = check(QWEN3, "auto", None, only="rotary", rotary_and_cache=wrong_angles)
    assert wrong.demoted == ["rotary_and_cache"]


UNLIKE: tuple[dict[str, Any], ...] = (
    {"window": 24, "sinks": True, "qk_norm": "head", "norm_last": True},
    {"sinks": True},
    {"window": 40, "chunked": True, "rope": None},
    {"rope": Rope(interleaved=True, share=0.5), "soft_cap": 1.5, "temperature": Temperature(0.3, 8)},
)
"""What sets the attention of one layer apart from the usual, layer by layer"""


@pytest.fixture(name="unlike")
def _unlike(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The config of a family like Llama but for UNLIKE."""
    llama = registry.DESCRIBED["LlamaForCausalLM"]

    def describe_unlike(fields: Fields) -> Described:
        layers = zip(llama.describe(fields).layers, UNLIKE, strict=True)
        return Described(tuple(replace(layer, mixer=replace(layer.mixer, **kind)) for layer, kind in layers))

    monkeypatch.setitem(registry.DESCRIBED, "Unlike", replace(llama, architecture="Unlike", describe=describe_unlike))
    monkeypatch.setattr(layer_checks, "DECODES", FEW_DECODES[:1])
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": len(UNLIKE)}
    return {**QWEN3, **heads, "architectures": ["Unlike"]}


@either_cache
def test_sinks_windows_and_chunks_agree(kv: str, unlike: dict[str, Any]) -> None:
    found = check(unlike, kv, None, only="attention")
    assert found.demoted == []
    assert found._count == 2 * len(UNLIKE)


def changed(**changes: Any) -> Any:
    """Return a fault: a kernel with other values for some of its arguments."""

    def plant(kernel: Any) -> Any:
        signature = inspect.signature(kernel)

        def faulty(*given: Any, **keywords: Any) -> Any:
            bound = signature.bind(*given, **keywords)
            for name, change in changes.items():
                if bound.arguments.get(name) is not None:
                    bound.arguments[name] = change(bound.arguments[name])
            return kernel(*bound.args, **bound.kwargs)

        return faulty

    return plant


NONE = changed()


def plainly(reference: Any, kernel: Any) -> Any:
    """Return the reference in the place of a kernel, with its arguments: faults in them show with both alike, and here
    without a minute of the interpreter."""
    signature, known = inspect.signature(kernel), inspect.signature(reference).parameters

    @wraps(kernel)
    def stands_in(*given: Any, **keywords: Any) -> Any:
        arguments = signature.bind(*given, **keywords).arguments
        return reference(**{name: value for name, value in arguments.items() if name in known})

    return stands_in


@pytest.mark.parametrize(
    "fault",
    [
        NONE,
        changed(sinks=lambda _: None),
        changed(sinks=lambda sinks: sinks.roll(1)),
        changed(sliding_window=lambda keys: keys + 1),
        changed(chunked=lambda _: False),
        changed(cos_sin=lambda table: None),
        changed(soft_cap=lambda cap: 2 * cap),
        changed(interleaved=lambda _: False),
        changed(temperature=lambda factors: None),
        changed(q_weight=lambda weight: None),
    ],
)
def test_so_is_a_fused_decode_that_does_not_know_them(
    fault: Any, unlike: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = plainly(decode_attention_reference, triton_attn.decode_attention)
    monkeypatch.setattr(triton_attn, "decode_attention", fault(plain))
    demoted = [] if fault is NONE else ["decode_attention"]
    assert check(unlike, "auto", None, only="decode_attention").demoted == demoted


@pytest.mark.parametrize(
    "fault",
    [
        NONE,
        changed(sinks=lambda _: None),
        changed(sliding_window=lambda keys: keys + 1),
        changed(chunked=lambda _: False),
        changed(soft_cap=lambda cap: 2 * cap),
    ],
)
def test_so_is_attention_that_does_not_know_them(
    fault: Any, unlike: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = plainly(attention.paged_attention_reference, triton_attn.paged_attention)
    monkeypatch.setattr(triton_attn, "paged_attention", fault(plain))
    refused = pytest.raises(ConfigError, match="TRITON_ATTN disagrees with its reference")
    with nullcontext() if fault is NONE else refused:
        check(unlike, "auto", None, only="attention backend")


def test_so_are_wrong_experts_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    def lies(*arguments: Any) -> Any:
        out, ids = REFERENCE_KERNELS.fused_moe(*arguments)
        return out * 1.1, ids

    monkeypatch.setattr(layer_checks, "DECODES", FEW_DECODES[:1])
    assert check(MOE, "auto", "fp8", only="fused_moe", fused_moe=lies).demoted == ["fused_moe"]


def test_adapters_of_experts_agree_and_that_they_are_forgotten_is_found() -> None:
    def forgets(*arguments: Any) -> Any:
        return REFERENCE_KERNELS.fused_moe(*arguments[:5])

    assert check(MOE, "auto", None, only="fused_moe", adapted=True).demoted == []
    assert check(MOE, "auto", None, only="fused_moe", adapted=True, fused_moe=forgets).demoted == ["fused_moe"]


def test_shared_experts_behind_the_others_agree_and_that_they_are_forgotten_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forgets(x: Any, experts: Any, *more: Any) -> Any:
        return REFERENCE_KERNELS.fused_moe(x, replace(experts, joined=None), *more)

    monkeypatch.setattr(shared_experts, "OWN_FORMS", ())
    assert check(SHARED, "auto", None, only="fused_moe").demoted == []
    assert check(SHARED, "auto", None, only="fused_moe", fused_moe=forgets).demoted == ["fused_moe"]


@sampled(("kv", "factor"), CACHES, [1.0, 1.04])
def test_so_is_a_wrong_kernel_of_long_prompts(kv: str, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs a GPU: in its place the kernel of short ones, or that one wrong. Of an fp8 cache both read what was
    unpacked."""

    monkeypatch.setattr(layer_checks, "DECODES", FEW_DECODES[:1])
    ran = set()

    def stands_in(out: torch.Tensor, *inputs: Any) -> None:
        ran.add(inputs[1].element_size())
        *inputs, sinks, qk_scale, first_req, end_req = inputs[:-2]
        tiles = (len(out) - first_req) // 32 + end_req - first_req
        like, seen = replace(PREFILL["cuda", 2, 64], block_m=64), attention.Seen(None, False, sinks)
        attention._run(out, *inputs, None, qk_scale, seen, first_req, end_req, tiles, like, 1, False)
        out *= factor

    monkeypatch.setattr("headrace.kernels.prefill.prefill_attention", stands_in)
    heads = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    found = check({**LLAMA, **heads}, kv, None, copy_engine=True, only="prefill_attention")
    assert found.demoted == ([] if factor == 1.0 else ["prefill_attention"])
    assert ran == {2}


@either_cache
def test_latents_agree(kv: str) -> None:
    found = check(LATENT, kv, None, only="_attention")
    assert found.demoted == []
    assert found._count == 2 + 2
    assert check(LATENT, kv, None, only="latent_rotary_and_cache").demoted == []


def test_prompts_are_checked_where_the_other_form_is_cheaper_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LatentSizes, "expands", lambda *_: False)
    plan_latent.cache_clear()
    found = check(LATENT, "auto", None, only="expanded_attention")
    plan_latent.cache_clear()
    assert (found.demoted, found._count) == ([], 1)


def test_so_are_wrong_kernels_of_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    rotates = REFERENCE_KERNELS.latent_rotary_and_cache
    wrong = check(LATENT, "auto", None, only="latent_rotary", latent_rotary_and_cache=lambda *a: rotates(*a) * 1.02)
    assert wrong.demoted == ["latent_rotary_and_cache"]
    fault = changed(scale=lambda factor: 1.3 * factor)
    monkeypatch.setattr(triton_attn, "expanded_attention", fault(triton_attn.expanded_attention))
    assert check(LATENT, "auto", None, only="expanded_attention").demoted == ["expanded_attention"]
    monkeypatch.setattr(triton_attn, "latent_attention", fault(triton_attn.latent_attention))
    with pytest.raises(ConfigError, match="attention over latents by TRITON_ATTN disagrees"):
        check(LATENT, "auto", None, only="latent_attention")


def test_an_index_and_what_it_chooses_agree() -> None:
    found = check(SPARSE, "fp8_e4m3", None, only="latent_attention")
    assert (found.demoted, found._count) == ([], 3 + 2)
    for name in ("rotary_and_cache", "index_scores", "top_keys"):
        found = check(SPARSE, "fp8_e4m3", None, only=name)
        assert found.demoted == []
        assert found._count >= 1


def test_so_is_attention_to_all_keys_in_place_of_those_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = changed(chosen=lambda _: None)
    monkeypatch.setattr(triton_attn, "latent_attention", fault(triton_attn.latent_attention))
    monkeypatch.setattr(latent_checks, "DECODES", (1, 2))
    with pytest.raises(ConfigError, match="attention over latents by TRITON_ATTN disagrees"):
        check(SPARSE, "auto", None, only="latent_attention")
