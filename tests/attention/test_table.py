"""Choosing an attention backend: by reasons, by force, and without loading torch."""

from dataclasses import replace

import pytest

from headrace.attention.spec import AttentionSpec
from headrace.attention.table import BACKENDS, load_backend, select_backend
from headrace.errors import ConfigError

GPU = AttentionSpec(32, 8, 128, 128**-0.5, 16, "bfloat16")
CPU = replace(GPU, device_type="cpu")


def test_the_gpu_gets_triton_and_passes_over_nothing():
    chosen = select_backend([GPU])
    assert chosen.name == "TRITON_ATTN"
    assert chosen.passed_over == []


def test_the_cpu_gets_torch_and_says_what_it_passed_over():
    chosen = select_backend([CPU])
    assert chosen.name == "TORCH_SDPA"
    assert chosen.passed_over == ["TRITON_ATTN: runs on GPUs, not on cpu"]


def test_heads_too_wide_for_triton():
    chosen = select_backend([replace(GPU, head_dim=512)])
    assert chosen.name == "TORCH_SDPA"
    assert "head_dim 512 is over 256" in chosen.passed_over[0]


def test_a_forced_backend_in_any_case():
    assert select_backend([GPU], "torch_sdpa").name == "TORCH_SDPA"


@pytest.mark.parametrize(
    ("spec", "forced", "words"),
    [
        (CPU, "TRITON_ATTN", ["TRITON_ATTN cannot serve", "runs on GPUs, not on cpu", "choose from TORCH_SDPA"]),
        (GPU, "FLASHINFER", ["FLASHINFER", "unknown", "TRITON_ATTN, TORCH_SDPA"]),
        (replace(GPU, num_heads=30), None, ["no attention backend", "30 query heads are no multiple of 8"]),
        (
            replace(GPU, num_kv_heads=1, latent_dim=80, batch_invariant=True),
            None,
            ["TRITON_ATTN: batch invariance: latents", "TORCH_SDPA: batch invariance"],
        ),
        (
            replace(CPU, causal=False, soft_cap=30.0),
            None,
            ["no attention backend", "TORCH_SDPA: attends over a cache", "come later", "TORCH_WHOLE: knows no sinks"],
        ),
    ],
)
def test_impossible_choices_name_reasons_and_remedies(spec, forced, words):
    with pytest.raises(ConfigError) as caught:
        select_backend([spec], forced)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_caches_change_no_choice(kind):
    for spec in (GPU, CPU):
        quantized = replace(spec, kv_cache_dtype=kind)
        assert quantized.quantized_cache
        assert not spec.quantized_cache
        assert select_backend([quantized]).name == select_backend([spec]).name


@pytest.mark.parametrize("entry", BACKENDS, ids=lambda entry: entry.name)
def test_every_entry_loads_under_its_name(entry):
    if entry.name == "TRITON_ATTN":
        pytest.importorskip("triton", reason="this backend's kernels need Triton")
    backend = load_backend(entry.name)
    assert backend.name == entry.name
    assert entry.full_graphs in ("any", "decode", "none")


def test_loading_an_unknown_backend():
    with pytest.raises(ConfigError, match="unknown"):
        load_backend("NONE_SUCH")


def test_torch_serves_batch_invariance_only_where_tokens_run_one_at_a_time():
    assert select_backend([replace(CPU, batch_invariant=True)]).name == "TORCH_SDPA"
    with pytest.raises(ConfigError, match="batch invariance"):
        select_backend([replace(GPU, head_dim=512, batch_invariant=True)])


def test_one_layer_that_triton_cannot_serve_decides_for_all():
    chosen = select_backend([GPU, None, replace(GPU, head_dim=512)])
    assert chosen.name == "TORCH_SDPA"
    assert chosen.passed_over == ["TRITON_ATTN: head_dim 512 is over 256"]


@pytest.mark.parametrize("kv", ["auto", "fp8_e4m3"])
def test_triton_serves_latents_beside_keys_and_values(kv):
    latent = replace(GPU, num_kv_heads=1, head_dim=576, latent_dim=512, kv_cache_dtype=kv)
    assert select_backend([replace(GPU, kv_cache_dtype=kv), None, latent]).name == "TRITON_ATTN"
    assert "latents of 1024 numbers" in select_backend([replace(latent, latent_dim=1024)]).passed_over[0]


@pytest.mark.parametrize("kv", ["auto", "fp8_e4m3"])
def test_triton_serves_windows_chunks_sinks_and_soft_caps(kv):
    gpt_oss = AttentionSpec(64, 8, 64, 64**-0.5, 16, "bfloat16", sinks=True, kv_cache_dtype=kv)
    llama4 = replace(GPU, chunked=True, sliding_window=8192, kv_cache_dtype=kv)
    others = (replace(gpt_oss, sliding_window=128, group=1), replace(llama4, soft_cap=50.0, chunked=False))
    assert select_backend([gpt_oss, llama4, *others]).name == "TRITON_ATTN"
