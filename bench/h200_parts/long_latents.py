"""Compares prompts of 128k tokens over latents, in one piece and in chunks, with a reference in float64.

The model has two layers of DeepSeek-V2-Lite's sizes but for fewer heads, experts and tokens to choose from, and YaRN.
Its scores are spread so wide that a query reads few of its keys, anywhere in the context: means over all keys would
hide what a piece, a chunk or a merge did to some.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from h200_parts.forced import Sequence, continued, stepped_core
from h200_parts.format_numerics import unmeasured
from h200_parts.models import in_catalogue
from h200_parts.numerics import compare
from h200_parts.run import Run
from h200_parts.settings import SEED
from headrace.config import EngineConfig
from headrace.layers.rotary import rope_table
from headrace.mixers import LatentAttention
from headrace.model_config import ModelConfig
from headrace.models.served import describe

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
ROWS = 8192
"""of the residual that feed-forwards of the reference compute at once"""


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
    folder, device = run.settings.work / f"long-latents-{dtype}", run.settings.device
    write_model(folder, config, device)
    generator = torch.Generator().manual_seed(SEED)
    sequences = [torch.randint(0, config["vocab_size"], (length,), generator=generator).tolist() for length in lengths]
    began = time.monotonic()
    exact = [Exact(folder, device).sequence(tokens, NEW_TOKENS) for tokens in sequences]
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
        "model": str(folder), "dtype": dtype, "kv_cache_dtype": dtype, "max_model_len": max(map(len, sequences)),
        "max_num_seqs": 4, "max_num_batched_tokens": total, "enable_prefix_caching": False, "enforce_eager": True,
        "skip_tokenizer_init": True, **run.settings.place(0.6), **({"cpu_kv_cache_gib": 0.2} if run.smoke else {}),
    }  # fmt: skip
    found, began = {}, time.monotonic()
    with unmeasured(), stepped_core(EngineConfig(**(knobs | run.settings.engine)), folder) as core:
        run.note(f"{dtype}: the start took {time.monotonic() - began:.0f} s")
        for size in (total, *chunks):
            began = time.monotonic()
            core.scheduler.config = replace(core.scheduler.config, max_num_batched_tokens=size)
            name = "one piece" if size == total else f"chunks of {size}"
            found[name] = continued(core, [sequences], NEW_TOKENS)
            run.note(f"{dtype}: {name} took {time.monotonic() - began:.1f} s")
        return core.facts.workers[0].demoted, found


def write_model(folder: Path, config: dict[str, Any], device: str) -> None:
    """Write a checkpoint of random numbers that bfloat16 holds, with the names of DeepSeek's own."""
    from safetensors.torch import save_file

    generator = torch.Generator(device).manual_seed(SEED)
    tensors = {}
    for name, shape in shapes(config).items():
        made = torch.empty(shape, device=device).normal_(generator=generator)
        if len(shape) == 1:
            made = 1 + 0.1 * made
        elif "embed_tokens" not in name:
            made *= (SPREAD if "q_proj" in name else 1.0) * shape[-1] ** -0.5
        tensors[f"{name}.weight"] = made.bfloat16().cpu()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a checkpoint, without `.weight`."""
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (config["vocab_size"], hidden), "lm_head": (config["vocab_size"], hidden),
        "model.norm": (hidden,),
    }  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        found |= {
            f"{prefix}.input_layernorm": (hidden,), f"{prefix}.post_attention_layernorm": (hidden,),
            f"{prefix}.self_attn.q_proj": (heads * (nope + rope), hidden),
            f"{prefix}.self_attn.kv_a_proj_with_mqa": (latent + rope, hidden),
            f"{prefix}.self_attn.kv_a_layernorm": (latent,),
            f"{prefix}.self_attn.kv_b_proj": (heads * (nope + value), latent),
            f"{prefix}.self_attn.o_proj": (hidden, heads * value),
        }  # fmt: skip
        blocks = {f"{prefix}.mlp": config["intermediate_size"]}
        if layer >= config["first_k_dense_replace"]:
            experts, width = config["n_routed_experts"], config["moe_intermediate_size"]
            blocks = {f"{prefix}.mlp.experts.{expert}": width for expert in range(experts)}
            blocks[f"{prefix}.mlp.shared_experts"] = config["n_shared_experts"] * width
            found[f"{prefix}.mlp.gate"] = (experts, hidden)
        for block, width in blocks.items():
            found |= {f"{block}.gate_proj": (width, hidden), f"{block}.up_proj": (width, hidden)}
            found[f"{block}.down_proj"] = (hidden, width)
    return found


class Exact:
    """Computes a model of DeepSeek-V2's form in float64, in blocks that fit beside each other at any length.

    Angles are rounded to float32 as the family defines them: at a position of 131,071 that is by up to 0.004.
    """

    def __init__(self, folder: Path, device: str) -> None:
        from safetensors.torch import load_file

        self.config = ModelConfig.from_folder(folder)
        self.layers = describe(self.config).layers
        self.weights = load_file(folder / "model.safetensors", device=device)

    def sequence(self, tokens: list[int], behind: int) -> Sequence:
        """Return the last `behind` tokens, and the logits that they would be chosen from."""
        x = F.embedding(
            torch.tensor(tokens[:-1]).to(self.weights["lm_head.weight"].device), self.of("model.embed_tokens")
        )
        for layer in range(len(self.layers)):
            first = 0 if layer + 1 < len(self.layers) else len(x) - behind  # nothing reads the others of the last layer
            x = x[first:] + self.attention(layer, x, first)
            x = torch.cat([rows + self.feed_forward(layer, rows) for rows in x.split(ROWS)])
        return Sequence(tokens[-behind:], self.norm("model.norm", x) @ self.of("lm_head").T)

    def of(self, name: str) -> Tensor:
        return self.weights[f"{name}.weight"].double()

    def norm(self, name: str, x: Tensor) -> Tensor:
        eps = self.config.fields.number("rms_norm_eps", 1e-6)
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * self.of(name)

    def attention(self, layer: int, x: Tensor, first: int) -> Tensor:
        """Return attention's output for the tokens from `first` on # [tokens, hidden_size]."""
        mixer, prefix = self.layers[layer].mixer, f"model.layers.{layer}.self_attn"
        assert isinstance(mixer, LatentAttention)
        table = rope_table(mixer.rope, mixer.rope_dim, len(x), x.device).double()
        angles = torch.complex(*table.chunk(2, dim=-1))
        x = self.norm(f"model.layers.{layer}.input_layernorm", x)
        q = (x[first:] @ self.of(f"{prefix}.q_proj").T).unflatten(-1, (mixer.num_heads, -1))
        latent, key = (x @ self.of(f"{prefix}.kv_a_proj_with_mqa").T).split((mixer.latent_dim, mixer.rope_dim), dim=-1)
        both = self.norm(f"{prefix}.kv_a_layernorm", latent) @ self.of(f"{prefix}.kv_b_proj").T
        keys, values = both.unflatten(-1, (mixer.num_heads, -1)).split((mixer.nope_dim, mixer.v_head_dim), dim=-1)
        q_plain, q_turned = q.split((mixer.nope_dim, mixer.rope_dim), dim=-1)
        q = torch.cat((q_plain, turned(q_turned, angles[first:, None])), dim=-1).transpose(0, 1)
        key = turned(key, angles)[:, None].expand(-1, mixer.num_heads, -1)
        keys, values = torch.cat((keys, key), dim=-1).transpose(0, 1), values.transpose(0, 1)
        step, out = max(1, MOST_SCORES // (mixer.num_heads * len(x))), []
        for start in range(0, q.shape[1], step):
            some, seen = q[:, start : start + step], min(len(x), first + start + step)
            own = torch.arange(first + start, first + start + some.shape[1], device=x.device)
            scores = some @ keys[:, :seen].transpose(1, 2) * (mixer.scale or mixer.head_dim**-0.5)
            scores.masked_fill_(torch.arange(seen, device=x.device) > own[:, None], -torch.inf)
            out.append(scores.softmax(-1) @ values[:, :seen])
        return torch.cat(out, dim=1).transpose(0, 1).flatten(1) @ self.of(f"{prefix}.o_proj").T

    def feed_forward(self, layer: int, x: Tensor) -> Tensor:
        prefix, fields = f"model.layers.{layer}", self.config.fields
        x = self.norm(f"{prefix}.post_attention_layernorm", x)
        if f"{prefix}.mlp.gate.weight" not in self.weights:
            return self.mlp(f"{prefix}.mlp", x)
        shares = (x @ self.of(f"{prefix}.mlp.gate").T).softmax(-1)
        best = shares.topk(fields.integer("num_experts_per_tok"), dim=-1)
        shares = torch.zeros_like(shares).scatter_(1, best.indices, best.values)
        out = self.mlp(f"{prefix}.mlp.shared_experts", x)
        for expert, share in enumerate(shares.T):
            out += share[:, None] * self.mlp(f"{prefix}.mlp.experts.{expert}", x)
        return out

    def mlp(self, prefix: str, x: Tensor) -> Tensor:
        gate, up = x @ self.of(f"{prefix}.gate_proj").T, x @ self.of(f"{prefix}.up_proj").T
        return (F.silu(gate) * up) @ self.of(f"{prefix}.down_proj").T


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate neighbouring numbers of x # [..., rope_dim] by angles # [..., rope_dim / 2] complex."""
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * angles).flatten(-2)
