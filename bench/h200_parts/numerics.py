"""Are the fast path's numbers the reference's? Logits teacher-forced on the reference's own tokens, and graph modes.

The reference is headrace itself by torch's plain operations, without graphs. Both round to bf16, each in its own
places, so both are held against the same in fp32 too. Models: the demo model, and a few layers of the 8B shape whose
random weights make it prefer some token over the others, as trained models do (its output layer knows the embeddings):
among 128k logits of pure noise the best two are so close that rounding decides.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from h200_parts.forced import Sequence, reference_path, run, stepped_core
from h200_parts.models import LLAMA_8B, TOY
from h200_parts.offline import Emit
from h200_parts.rows import Result
from h200_parts.settings import SEED, Settings
from headrace.config import EngineConfig
from headrace.hub import resolve_model_folder

LAYERS = 4
GAP = 4.0
"""A position is covered where the reference's two best logits lie this many times the largest difference apart."""
BATCHES, NEW_TOKENS = (1, 5, 32), 24
MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
VARIANTS: dict[str, dict[str, Any]] = {
    "fp8": {"quantization": "fp8"},
    "ptpc_fp8": {"quantization": "ptpc_fp8"},
    "kv-fp8-e4m3": {"kv_cache_dtype": "fp8_e4m3"},
    "kv-fp8-e5m2": {"kv_cache_dtype": "fp8_e5m2"},
}
OPENINGS = ("Once upon a time", "One day, a little girl", "The dog was", "Tom and Sue", "In the garden", "It was late")


@dataclass(frozen=True)
class Comparison:
    error: float
    """||found - reference|| / ||reference||"""
    largest: float
    """difference of any one logit"""
    covered: float
    """share of positions whose gap is GAP times `largest` or more"""
    unlike: int
    """covered positions whose best token is another"""
    perplexity_change: float
    """relative, of the reference's tokens"""
    positions: int


def compare(found: list[Sequence], reference: list[Sequence]) -> Comparison:
    """Both on the same tokens. Works on the logits' device, a sequence at a time."""
    difference = norm = largest = 0.0
    gaps: list[Tensor] = []
    same: list[Tensor] = []
    nll = [0.0, 0.0]
    for a, b in zip(found, reference, strict=True):
        one, two = a.logits.float(), b.logits.float()
        difference += float((one - two).double().square().sum())
        norm += float(two.double().square().sum())
        largest = max(largest, float((one - two).abs().max()))
        best = two.topk(2, dim=-1).values
        gaps.append(best[:, 0] - best[:, 1])
        same.append(one.argmax(-1) == two.argmax(-1))
        targets = torch.tensor(b.tokens, device=two.device)[:, None]
        for which, logits in enumerate((one, two)):
            nll[which] -= float(logits.log_softmax(-1).gather(-1, targets).sum())
    covered = torch.cat(gaps) >= GAP * largest
    positions = len(covered)
    change = torch.tensor((nll[0] - nll[1]) / positions).exp().item() - 1
    return Comparison(
        error=(difference / norm) ** 0.5,
        largest=largest,
        covered=float(covered.float().mean()),
        unlike=int((covered & ~torch.cat(same)).sum()),
        perplexity_change=change,
        positions=positions,
    )


def numerics_rows(settings: Settings, emit: Emit) -> None:
    logging.getLogger().setLevel(logging.WARNING)  # many engines start: only what they complain of
    check_model(settings, "demo", resolve_model_folder("demo"), _demo_prompts(), emit, 256)
    folder = write_random_model(settings.work / "8b4l", settings)
    config = json.loads((folder / "config.json").read_text())
    longest = settings.tokens(512)

    def random_prompts(batch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(batch)
        lengths = torch.randint(1, longest, (batch,), generator=generator).tolist()
        return [torch.randint(0, config["vocab_size"], (n,), generator=generator).tolist() for n in lengths]

    check_model(settings, "8b4l", folder, random_prompts, emit, 1024)


def check_model(
    settings: Settings, name: str, folder: Path, prompts: Callable[[int], list[list[int]]], emit: Emit, length: int
) -> None:
    batches = [prompts(settings.requests(batch)) for batch in BATCHES]
    knobs: dict[str, Any] = {"model": str(folder), "max_model_len": length, "enable_prefix_caching": False}
    dtype = "float32" if settings.smoke else "bfloat16"
    knobs |= {"num_gpu_blocks_override": 4096, "gpu_memory_utilization": 0.3, "dtype": dtype, "kv_cache_dtype": dtype}
    knobs |= {"device": "cpu", "num_gpu_blocks_override": 512} if settings.smoke else {}
    base = EngineConfig(**knobs).replace(**settings.engine)

    def sequences(config: EngineConfig, forced: list[Sequence] | None = None) -> list[Sequence]:
        found: list[Sequence] = []
        with stepped_core(config, folder) as core:
            for batch in batches:
                tokens = (
                    None if forced is None else [one.tokens for one in forced[len(found) : len(found) + len(batch)]]
                )
                found += run(core, batch, NEW_TOKENS, tokens)
        return found

    chunked = base.replace(max_num_batched_tokens=1024)  # prompts are split, and share steps with decodes
    with reference_path():
        reference = sequences(chunked.replace(enforce_eager=True, attention_backend="TORCH_SDPA"))
    found = sequences(chunked, reference)
    fast = compare(found, reference)
    notes = [
        f"{fast.positions} positions, largest difference {fast.largest:.3g}, perplexity {fast.perplexity_change:+.2%}"
    ]
    emit(Result(f"numerics/{name}/error", fast.error, notes=notes))
    with reference_path():
        plain = base.replace(
            dtype="float32", kv_cache_dtype="float32", enforce_eager=True, attention_backend="TORCH_SDPA"
        )
        exact = sequences(plain, reference)
    ours, theirs = compare(found, exact), compare(reference, exact)
    del exact
    emit(Result(f"numerics/{name}/covered", 100 * fast.covered))
    emit(Result(f"numerics/{name}/argmax", fast.unlike))
    emit(Result(f"numerics/{name}/exact", ours.error, notes=[f"the reference's own is {theirs.error:.2e}"]))
    emit(
        Result(
            f"numerics/{name}/exact-covered", 100 * ours.covered, notes=[f"the reference's own {theirs.covered:.1%}"]
        )
    )
    emit(Result(f"numerics/{name}/exact-argmax", ours.unlike))
    with patch("headrace.runner.worker.measure_step_times", return_value=[]):  # chunks must not depend on what it finds
        tokens = {
            mode: [one.tokens for one in sequences(base.replace(compilation_config={"cudagraph_mode": mode}))]
            for mode in MODES
        }
    unlike = {mode: _unlike(found, tokens["NONE"]) for mode, found in tokens.items()}
    emit(Result(f"numerics/{name}/modes", max(unlike.values()), notes=[f"{mode} {n}" for mode, n in unlike.items()]))
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    for variant, changes in VARIANTS.items():
        if changes.keys() <= fields:
            lossy = compare(sequences(base.replace(**changes), reference), reference)
            emit(Result(f"numerics/{name}/{variant}/error", lossy.error))
            emit(Result(f"numerics/{name}/{variant}/perplexity", 100 * lossy.perplexity_change))


def _unlike(found: list[list[int]], wanted: list[list[int]]) -> int:
    return sum(a != b for one, two in zip(found, wanted, strict=True) for a, b in zip(one, two, strict=True))


def _demo_prompts() -> Callable[[int], list[list[int]]]:
    """Batch size -> openings of stories, each told up to another word."""
    from headrace.engine.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(resolve_model_folder("demo"))

    def prompts(batch: int) -> list[list[int]]:
        texts = [OPENINGS[i % len(OPENINGS)] + " there was a big red dog" * (i // len(OPENINGS)) for i in range(batch)]
        return [list(tokenizer.encode(text)) for text in texts]

    return prompts


def write_random_model(folder: Path, settings: Settings) -> Path:
    """Normal weights of 0.02, those that add to the residual scaled down by depth as GPT-2's, embeddings of 1, and an
    output layer that prefers after each token a certain other one."""
    from safetensors.torch import save_file

    config = LLAMA_8B | {"num_hidden_layers": LAYERS} | (TOY if settings.smoke else {})
    hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    dtype = getattr(torch, config["torch_dtype"])
    generator = torch.Generator(settings.device).manual_seed(SEED)

    def normal(*shape: int, std: float = 0.02, mean: float = 0.0) -> Tensor:
        drawn = torch.empty(*shape, device=settings.device).normal_(mean, std, generator=generator)
        return drawn.to(dtype).cpu()

    embeddings = torch.empty(vocab, hidden, device=settings.device).normal_(generator=generator)
    after = torch.randperm(vocab, device=settings.device, generator=generator)
    head = torch.empty_like(embeddings).normal_(0.0, 0.02, generator=generator)
    head[after] += embeddings * 20 / hidden
    weights = {
        "model.embed_tokens.weight": embeddings.to(dtype).cpu(),
        "lm_head.weight": head.to(dtype).cpu(),
        "model.norm.weight": normal(hidden, std=0.1, mean=1.0),
    }
    del embeddings, head
    for layer in range(layers):
        prefix, small = f"model.layers.{layer}", 0.02 / (2 * layers) ** 0.5
        wide = config["intermediate_size"]
        weights |= {
            f"{prefix}.input_layernorm.weight": normal(hidden, std=0.1, mean=1.0),
            f"{prefix}.post_attention_layernorm.weight": normal(hidden, std=0.1, mean=1.0),
            f"{prefix}.self_attn.q_proj.weight": normal(q, hidden),
            f"{prefix}.self_attn.k_proj.weight": normal(kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": normal(kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": normal(hidden, q, std=small),
            f"{prefix}.mlp.gate_proj.weight": normal(wide, hidden),
            f"{prefix}.mlp.up_proj.weight": normal(wide, hidden),
            f"{prefix}.mlp.down_proj.weight": normal(hidden, wide, std=small),
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
