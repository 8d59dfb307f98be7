"""Compares the fast path's logits with a reference's, teacher-forced on the reference's own tokens.

The reference is headrace by torch's plain operations, without graphs. Both round to bf16, each in its own places, so
both are also compared with the same in fp32; and with transformers, which shares no code.
Models: the demo model, and a few layers of the 8B shape whose random weights prefer some token over the others, as
trained models do (its output layer knows the embeddings): among 128k logits of pure noise the best two are so close
that rounding decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from h200_parts.forced import Sequence, decode, reference_path, stepped_core
from h200_parts.models import LLAMA_8B, TOY
from h200_parts.rows import Result
from h200_parts.run import Run
from h200_parts.settings import SEED, Settings
from headrace.engine.tokenizer import Tokenizer
from headrace.hub import resolve_model_folder
from headrace.model_config import ModelConfig

GAP = 4.0
"""A position is covered where the reference's two best logits lie this many times the largest difference apart."""
BATCHES, NEW_TOKENS = (1, 5, 32), 24
LAYERS = 4
"""of the 8B"""
VARIANTS: dict[str, dict[str, Any]] = {
    "fp8": {"quantization": "fp8"},
    "ptpc_fp8": {"quantization": "ptpc_fp8"},
    "kv-fp8-e4m3": {"kv_cache_dtype": "fp8_e4m3"},
    "kv-fp8-e5m2": {"kv_cache_dtype": "fp8_e5m2"},
}
OPENINGS = ("Once upon a time", "One day, a little girl", "The dog was", "Tom and Sue", "In the garden", "It was late")
PLAIN: dict[str, Any] = {"enforce_eager": True, "attention_backend": "TORCH_SDPA"}
Prompts = list[list[int]]


@dataclass(frozen=True)
class Comparison:
    """Says how far logits are from a reference's."""

    error: float
    """||logits - reference|| / ||reference||"""
    middle_error: float
    """that of the middle one of the positions, each by itself"""
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
    """Compare logits on the same tokens, on their device, a sequence at a time."""
    difference = norm = largest = 0.0
    gaps: list[Tensor] = []
    same: list[Tensor] = []
    errors: list[Tensor] = []
    nll = [0.0, 0.0]
    for a, b in zip(found, reference, strict=True):
        one, two = a.logits.float(), b.logits.float()
        difference += float((one - two).double().square().sum())
        norm += float(two.double().square().sum())
        largest = max(largest, float((one - two).abs().max()))
        errors.append((one - two).norm(dim=-1) / two.norm(dim=-1))
        best = two.topk(2, dim=-1).values
        gaps.append(best[:, 0] - best[:, 1])
        same.append(one.argmax(-1) == two.argmax(-1))
        targets = torch.tensor(b.tokens, device=two.device)[:, None]
        for which, logits in enumerate((one, two)):
            nll[which] -= float(logits.log_softmax(-1).gather(-1, targets).sum())
    covered = torch.cat(gaps) >= GAP * largest
    positions = len(covered)
    return Comparison(
        error=(difference / norm) ** 0.5,
        middle_error=float(torch.cat(errors).quantile(0.5)),
        largest=largest,
        covered=float(covered.float().mean()),
        unlike=int((covered & ~torch.cat(same)).sum()),
        perplexity_change=torch.tensor((nll[0] - nll[1]) / positions).exp().item() - 1,
        positions=positions,
    )


def numerics_rows(run: Run) -> None:
    """Emit the rows of both models."""
    run.measure_chip()
    logging.getLogger().setLevel(logging.WARNING)  # many engines start: only their warnings are of interest
    settings = run.settings
    check_model(run, "demo", resolve_model_folder("demo"), _demo_prompts, 256)
    folder = write_random_model(settings.work / "8b4l", settings)
    vocab_size = ModelConfig.from_folder(folder).vocab_size

    def random_prompts(batch: int) -> Prompts:
        generator = torch.Generator().manual_seed(batch)
        lengths = torch.randint(1, settings.tokens(512), (batch,), generator=generator).tolist()
        return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]

    check_model(run, "8b4l", folder, random_prompts, 1024)


def check_model(run: Run, name: str, folder: Path, prompts: Callable[[int], Prompts], length: int) -> None:
    """Emit one model's rows. `prompts` gives those of a batch size, `length` is the model's longest sequence."""
    settings = run.settings
    batches = [prompts(settings.requests(batch)) for batch in BATCHES]
    dtype = "float32" if settings.smoke else "bfloat16"
    base: dict[str, Any] = {"max_model_len": length, "dtype": dtype, "kv_cache_dtype": dtype}
    base |= {"num_gpu_blocks_override": 512 if settings.smoke else 4096}

    def sequences(changes: dict[str, Any], forced: list[Sequence] | None = None) -> list[Sequence]:
        made: list[Sequence] = []
        with stepped_core(settings, folder, 0.3, **base | changes) as core:
            for batch in batches:
                tokens = None if forced is None else [one.tokens for one in forced[len(made) : len(made) + len(batch)]]
                made += decode(core, batch, NEW_TOKENS, tokens)
        return made

    def emit(row: str, value: float, *notes: str) -> None:
        run.emit(Result(f"numerics/{name}/{row}", value, notes=list(notes)))

    chunked = {"max_num_batched_tokens": 1024}  # prompts are split, and share steps with decodes
    with reference_path():
        reference = sequences(chunked | PLAIN)
    logits = sequences(chunked, reference)
    fast = compare(logits, reference)
    change = f"perplexity {fast.perplexity_change:+.2%}"
    emit("error", fast.error, f"{fast.positions} positions, largest difference {fast.largest:.3g}, {change}")
    with reference_path():
        exact = sequences({"dtype": "float32", "kv_cache_dtype": "float32", **PLAIN}, reference)
    ours, theirs = compare(logits, exact), compare(reference, exact)
    emit("covered", 100 * fast.covered)
    emit("argmax", fast.unlike)
    emit("exact", ours.error, f"the reference's own is {theirs.error:.2e}")
    emit("exact-covered", 100 * ours.covered, f"the reference's own {theirs.covered:.1%}")
    emit("exact-argmax", ours.unlike)
    prompts_of_all = [prompt for batch in batches for prompt in batch]
    whole = [[*prompt, *one.tokens] for prompt, one in zip(prompts_of_all, reference, strict=True)]
    plain, exact = (
        transformers_logits(settings, "LlamaForCausalLM", folder, which, whole, NEW_TOKENS)
        for which in (dtype, "float32")
    )
    ours, theirs = compare(logits, exact), compare(plain, exact)
    error = f"ours is {ours.error:.2e}, transformers' own {theirs.error:.2e}"
    emit("transformers", ours.error / max(theirs.error, 1e-6), error)
    del plain, exact
    for variant, changes in VARIANTS.items():
        lossy = compare(sequences(changes, reference), reference)
        emit(f"{variant}/error", lossy.error)
        emit(f"{variant}/perplexity", 100 * lossy.perplexity_change)


@torch.inference_mode()
def transformers_logits(
    settings: Settings, name: str, folder: Path, dtype: str, sequences: Prompts, behind: int, **options: Any
) -> list[Sequence]:
    """Run transformers' model `name` over whole sequences; return the last `behind` tokens of each, and the logits that
    they would be chosen from."""
    import transformers

    model = getattr(transformers, name).from_pretrained(folder, dtype=getattr(torch, dtype), **options)
    model = model.to(settings.device).eval()
    made = []
    for tokens in sequences:
        ids = torch.tensor([tokens[:-1]], device=settings.device)
        made.append(Sequence(tokens[-behind:], model(ids).logits[0, -behind:].clone()))
    return made


def _demo_prompts(batch: int) -> Prompts:
    """Return openings of stories, each continued a little further."""
    tokenizer = Tokenizer.from_folder(resolve_model_folder("demo"))
    texts = [OPENINGS[i % len(OPENINGS)] + " there was a big red dog" * (i // len(OPENINGS)) for i in range(batch)]
    return [list(tokenizer.encode(text)) for text in texts]


def write_random_model(folder: Path, settings: Settings) -> Path:
    """Write a checkpoint of some layers of the 8B.

    Weights are normal with a deviation of 0.02, those that add to the residual scaled down by depth as GPT-2's;
    embeddings have a deviation of 1, and the output layer prefers after each token a certain other one.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = LLAMA_8B | (TOY if settings.smoke else {}) | {"num_hidden_layers": LAYERS}
    generator, small = torch.Generator(settings.device).manual_seed(SEED), 0.02 / (2 * LAYERS) ** 0.5
    with torch.device(settings.device), torch.no_grad():
        model: Any = LlamaForCausalLM(LlamaConfig(**fields))
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.normal_(1.0, 0.1, generator=generator)
            else:
                ends = name.split(".")[-2]
                std = {"embed_tokens": 1.0, "o_proj": small, "down_proj": small}.get(ends, 0.02)
                weight.normal_(0.0, std, generator=generator)
        after = torch.randperm(fields["vocab_size"], generator=generator)
        model.lm_head.weight[after] += model.model.embed_tokens.weight * 20 / fields["hidden_size"]
    model.to(getattr(torch, fields["torch_dtype"])).save_pretrained(folder)
    return folder
