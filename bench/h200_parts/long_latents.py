"""Compares prompts of 128k tokens over latents, in one piece and in chunks, with transformers' model in float64.

The model has two layers of DeepSeek-V2-Lite's sizes but for fewer heads, experts and tokens to choose from, and YaRN.
Its scores are spread so wide that a query reads few of its keys, anywhere in the context: means over all keys would
hide what a piece, a chunk or a merge did to some.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from h200_parts.forced import Sequence, continued, stepped_core
from h200_parts.format_numerics import unmeasured
from h200_parts.models import in_catalogue
from h200_parts.numerics import compare, transformers_logits
from h200_parts.run import Run
from h200_parts.settings import SEED, Settings

LENGTHS, NEW_TOKENS = (131_072, 4_099), 16
"""tokens of the sequences, the last of which are compared one by one"""
CHUNKS = {"bfloat16": (8192, 3000), "float32": (8192,)}
"""tokens of a step, beside all at once; a prompt's chunks begin in the middle of a block too"""
HEADS = {"bfloat16": 8, "float32": 1}
"""Our kernel of prompts in float32 is slow, and serves none on a GPU unasked."""
SMALLER = {"num_hidden_layers": 2, "vocab_size": 4096, "n_routed_experts": 4, "num_experts_per_tok": 4}
"""than V2-Lite; every token goes to all experts, since one that rounding sends elsewhere says nothing of latents"""
TOY = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "vocab_size": 512}
TOY_HEADS = {"kv_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24}
SPREAD = 3.0
"""deviation of a query's numbers"""
BOUND = {"bfloat16": 5e-2, "float32": 5e-5}
"""||logits - exact|| / ||exact||. A score of 25 is made of numbers rounded by 2e-3 in bfloat16, and is itself off by
1e-6 in float32; that is what its weight is off by."""
GROWTH = 1.3
"""times the error of the prompt in one piece"""
MOST_SCORES = 1 << 28
"""of the reference at once"""


def config_of(toy: bool, heads: int) -> dict[str, Any]:
    """Return config.json."""
    changes = SMALLER | {"num_attention_heads": heads, "num_key_value_heads": heads} | (TOY | TOY_HEADS if toy else {})
    return in_catalogue("deepseek-v2-lite", "deepseek_v2") | changes


def long_latents_cases(run: Run) -> None:
    """Add a case for each type, at full size or, as a toy, a 64th of it."""
    for dtype, bound in BOUND.items():
        lengths, chunks = ([run.settings.tokens(size) for size in sizes] for sizes in (LENGTHS, CHUNKS[dtype]))
        compare_chunks(run, config_of(run.smoke, HEADS[dtype]), lengths, chunks, dtype, bound)


def compare_chunks(
    run: Run, config: dict[str, Any], lengths: list[int], chunks: list[int], dtype: str, bound: float
) -> None:
    """Add a case. It passes where logits are within `bound` of the reference's with prompts in one piece, within GROWTH
    times that error in chunks, and the best tokens are the reference's: all of them in float32, else those that it is
    sure of."""
    folder = run.settings.work / f"long-latents-{dtype}"
    write_model(folder, config)
    generator = torch.Generator().manual_seed(SEED)
    sequences = [torch.randint(0, config["vocab_size"], (length,), generator=generator).tolist() for length in lengths]
    began = time.monotonic()
    exact = exact_logits(run.settings, folder, sequences, NEW_TOKENS)
    run.note(f"float64 took {time.monotonic() - began:.0f} s")
    demoted, found = by_chunks(run, folder, sequences, chunks, dtype)
    compared = {name: compare(logits, exact) for name, logits in found.items()}
    whole, others = compared["one piece"], 0
    for name, logits in found.items():
        pairs = zip(logits, exact, strict=True)
        unlike = sum(int((one.logits.argmax(-1) != two.logits.argmax(-1)).sum()) for one, two in pairs)
        others += unlike if dtype == "float32" else compared[name].unlike
    errors = [one.error for one in compared.values()]
    said = ", ".join(f"{name} {error:.2e}" for name, error in zip(compared, errors, strict=True))
    said = f"errors against float64: {said}; {others} best tokens are others, {whole.covered:.0%} are sure"
    said += "".join(f"; {name} demoted" for name in demoted)
    right = whole.error <= bound and max(errors) <= GROWTH * whole.error and not others
    run.case(f"{dtype}, {max(lengths):,} tokens", right and not demoted, said)


def by_chunks(
    run: Run, folder: Path, sequences: list[list[int]], chunks: list[int], dtype: str
) -> tuple[list[str], dict[str, list[Sequence]]]:
    """Return what one engine demoted, and its logits with prompts in one piece and then with each number of tokens a
    step."""
    total = sum(map(len, sequences))
    knobs: dict[str, Any] = {
        "dtype": dtype, "kv_cache_dtype": dtype, "max_model_len": max(map(len, sequences)), "max_num_seqs": 4,
        "max_num_batched_tokens": total, "enforce_eager": True, **({"cpu_kv_cache_gib": 0.2} if run.smoke else {}),
    }  # fmt: skip
    found, began = {}, time.monotonic()
    with unmeasured(), stepped_core(run.settings, folder, 0.6, **knobs) as core:
        run.note(f"{dtype}: the start took {time.monotonic() - began:.0f} s")
        for size in (total, *chunks):
            began = time.monotonic()
            core.scheduler.config = replace(core.scheduler.config, max_num_batched_tokens=size)
            name = "one piece" if size == total else f"chunks of {size}"
            found[name] = continued(core, [sequences], NEW_TOKENS)
            run.note(f"{dtype}: {name} took {time.monotonic() - began:.1f} s")
        return core.facts.workers[0].demoted, found


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """Write a checkpoint of random numbers that bfloat16 holds."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    made = torch.Generator().manual_seed(SEED)
    model: Any = DeepseekV2ForCausalLM(DeepseekV2Config(**config))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(generator=made)
            if weight.dim() == 1:
                weight.mul_(0.1).add_(1)
            elif "embed_tokens" not in name:
                weight.mul_((SPREAD if "q_proj" in name else 1.0) * weight.shape[-1] ** -0.5)
    model.bfloat16().save_pretrained(folder)


def exact_logits(settings: Settings, folder: Path, sequences: list[list[int]], behind: int) -> list[Sequence]:
    """Return what transformers' model in float64 makes of whole sequences. Norms, angles and what they turn it computes
    in float32, in which a number is off by 6e-8: a thousandth of what is allowed."""
    from transformers import AttentionInterface

    AttentionInterface.register("in_blocks", in_blocks)
    ways = {"attn_implementation": "in_blocks", "experts_implementation": "eager"}
    return transformers_logits(settings, "DeepseekV2ForCausalLM", folder, "float64", sequences, behind, **ways)


def in_blocks(
    layer: Any, q: Tensor, keys: Tensor, values: Tensor, mask: None, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    """Attend as transformers' layers ask, q and the others # [1, heads, tokens, dim], some queries at a time: scores of
    all would not fit."""
    tokens, out = q.shape[2], []
    step = max(1, MOST_SCORES // (q.shape[1] * tokens))
    for start in range(0, tokens, step):
        end = min(tokens, start + step)
        later = torch.ones(end - start, end, dtype=torch.bool, device=q.device).triu(start + 1)
        scores = q[:, :, start:end] @ keys[:, :, :end].transpose(2, 3) * scaling
        out.append(scores.masked_fill_(later, -torch.inf).softmax(-1) @ values[:, :, :end])
    return torch.cat(out, dim=2).transpose(1, 2), None
