"""Tiny heads in the layouts in which they are published (layouts.json), and what they guess, in plain torch.

Sizes in layouts.json: h hidden, q and k of queries and keys, f of the feed-forward, v vocabulary, r a head's own;
block: the tensors of a whole layer of the model's family, as transformers names them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.kernels.sampling import gumbel_argmax_reference

LAYOUTS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("layouts.json").read_text())
Weights = dict[str, Tensor]
EPS, THETA = 1e-5, 10000.0


def shapes(layout: str, sizes: dict[str, int], **numbers: int) -> dict[str, list[int]]:
    """Name -> shape of each tensor of a layout but those of a block."""
    return {
        name.format(**numbers): [int(one[:-1] or 1) * sizes[one[-1]] for one in shape]
        for name, shape in LAYOUTS[layout].items()
        if shape != ["block"]
    }


def block_name(layout: str, **numbers: int) -> str:
    return next(name.format(**numbers) for name, shape in LAYOUTS[layout].items() if shape == ["block"])


def random_weights(names: dict[str, list[int]], seed: int = 0) -> Weights:
    """Every tensor far from what could be left out unseen."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in names.items():
        drawn = torch.randn(shape, generator=generator)
        made[name] = 1.5 * drawn * shape[-1] ** -0.5 if len(shape) > 1 else 1 + 0.2 * drawn
    return made


def own_tokens(vocab: int, reduced: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """d2t and t2d of a reduced vocabulary of tokens in no order of their own."""
    chosen = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:reduced].sort().values
    known = torch.zeros(vocab, dtype=torch.bool)
    known[chosen] = True
    return chosen - torch.arange(reduced), known


def save_head(folder: Path, config: dict[str, Any], weights: Weights) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: one.clone() for name, one in weights.items()}, folder / "model.safetensors")
    return folder


def add_tensors(folder: Path, weights: Weights, fields: dict[str, Any]) -> None:
    """Add tensors, and fields of config.json, to a model's folder."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name: one.contiguous() for name, one in weights.items()}, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


# ---- what heads guess, from the papers


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


def rotated(x: Tensor) -> Tensor:
    """x [heads, tokens, dim]"""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * THETA ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def behind_attention(x: Tensor, residual: Tensor, w: Weights, of: str, heads: int, kv_heads: int) -> Tensor:
    """A layer of Llama whose queries, keys and values are projected from x."""
    q, k, v = (
        F.linear(x, w[f"{of}.self_attn.{name}_proj.weight"]).view(len(x), count, -1).transpose(0, 1)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    k, v = (one.repeat_interleave(heads // kv_heads, 0) for one in (rotated(k), v))
    scores = rotated(q) @ k.mT / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    hidden = residual + F.linear(attended, w[f"{of}.self_attn.o_proj.weight"])
    normed = rms(hidden, w[f"{of}.post_attention_layernorm.weight"])
    gate, up = (F.linear(normed, w[f"{of}.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    return hidden + F.linear(F.silu(gate) * up, w[f"{of}.mlp.down_proj.weight"])


@dataclass(frozen=True)
class PlainHead:
    """A head as a function over whole sequences."""

    of_model: Callable[[Any], Tensor]
    """transformers' output with all hidden states -> the hidden states that the head begins with"""
    layer: Callable[[Tensor, Tensor], Tensor]
    """(embeddings, hidden states) of all pairs -> new hidden states"""
    logits: Callable[[Tensor], Tensor]


def eagle(model: Any, w: Weights, heads: int, kv_heads: int) -> PlainHead:
    def layer(embedded: Tensor, hidden: Tensor) -> Tensor:
        x = F.linear(torch.cat((embedded, hidden), -1), w["fc.weight"], w.get("fc.bias"))
        return behind_attention(x, x, w, "layers.0", heads, kv_heads)

    return PlainHead(lambda out: out.hidden_states[-1][0], layer, model.lm_head)


def eagle3(model: Any, w: Weights, heads: int, kv_heads: int, taps: tuple[int, ...]) -> PlainHead:
    def of_model(out: Any) -> Tensor:
        return F.linear(torch.cat([out.hidden_states[tap][0] for tap in taps], -1), w["fc.weight"])

    def layer(embedded: Tensor, hidden: Tensor) -> Tensor:
        pair = rms(embedded, w["midlayer.input_layernorm.weight"]), rms(hidden, w["midlayer.hidden_norm.weight"])
        return behind_attention(torch.cat(pair, -1), hidden, w, "midlayer", heads, kv_heads)

    def logits(hidden: Tensor) -> Tensor:
        own = F.linear(rms(hidden, w["norm.weight"]), w["lm_head.weight"])
        whole = torch.full((len(hidden), model.config.vocab_size), -torch.inf)
        whole[:, torch.arange(own.shape[1]) + w["d2t"]] = own
        return whole

    return PlainHead(of_model, layer, logits)


def further(model: Any, w: Weights, block: Any, layout: str) -> PlainHead:
    """A layer for further tokens; `block`: the family's layer as transformers has it."""
    eps = model.config.rms_norm_eps

    def norm(x: Tensor, name: str) -> Tensor:
        weight = next(one for held, one in w.items() if held.endswith(name))
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * (weight + (layout == "qwen"))

    names = {
        "behind the layers": ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"),
        "mimo": ("token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight", "final_layernorm.weight"),
        "ernie": ("mtp_emb_norm.0.weight", "mtp_hidden_norm.0.weight", "mtp_linear_proj.0.weight", ""),
        "qwen": ("norm_embedding.weight", "norm_hidden.weight", "mtp.fc.weight", "mtp.norm.weight"),
    }[layout]
    joining = next(one for held, one in w.items() if held.endswith(names[2]))

    def layer(embedded: Tensor, hidden: Tensor) -> Tensor:
        pair = [norm(embedded, names[0]), norm(hidden, names[1])]
        x = F.linear(torch.cat(pair[::-1] if layout == "mimo" else pair, -1), joining)[None]
        count = x.shape[1]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        places = torch.arange(count)[None]
        turned = model.model.rotary_emb(x, places)
        out = block(x, attention_mask=mask, position_ids=places, position_embeddings=turned)
        out = (out if isinstance(out, Tensor) else out[0])[0]
        return norm(out, names[3]) if layout in ("mimo", "qwen") else out

    def logits(hidden: Tensor) -> Tensor:
        normed: Tensor = model.lm_head(norm(hidden, names[3]) if layout == "behind the layers" else hidden)
        return normed

    return PlainHead(lambda out: out.hidden_states[-1][0], layer, logits)


@torch.inference_mode()
def plain_guesses(
    model: Any, head: PlainHead, tokens: list[int], count: int, temperature: float = 0.0, seed: int = 0
) -> list[int]:
    """What a head guesses behind `tokens`, drawn with the random numbers of tokens."""
    out = model(torch.tensor([tokens[:-1]]), output_hidden_states=True)
    hidden, guesses = head.of_model(out), list[int]()
    for _ in range(count):
        behind = torch.tensor([*tokens, *guesses][1:])
        made = head.layer(model.get_input_embeddings()(behind), hidden)
        place = torch.tensor([len(tokens) + len(guesses)])
        noise = torch.tensor([temperature]), torch.tensor([seed]), place
        guesses.append(int(gumbel_argmax_reference(head.logits(made[-1:]), *noise)))
        hidden = torch.cat((hidden, made[-1:]))
    return guesses


# ---- heads that guess right now and then: what they join is fitted to what a model of words computes, and their layers
# add nothing


@torch.no_grad()
def heard(model: Any, count: int = 8, length: int = 120) -> tuple[Tensor, list[Tensor], Tensor]:
    """Ids of texts that a model writes # [texts, tokens], all hidden states of each, and what its last norm reads."""
    kept: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, given: kept.append(given[0]))
    torch.manual_seed(0)
    begins = torch.full((count, 1), model.config.bos_token_id)
    ids = model.generate(begins, do_sample=True, min_new_tokens=length, max_new_tokens=length)
    kept.clear()
    out = model(ids, output_hidden_states=True)
    return ids, list(out.hidden_states), kept[0]


def fitted(inputs: Tensor, wanted: Tensor) -> Tensor:
    """The linear # [outputs, inputs] that comes nearest to `wanted`."""
    x, y = inputs.flatten(0, 1).double(), wanted.flatten(0, 1).double()
    found: Tensor = torch.linalg.solve(x.mT @ x + torch.eye(x.shape[1]), x.mT @ y).mT.float()
    return found


def normed(x: Tensor) -> Tensor:
    return rms(x, torch.ones(x.shape[-1]))


def quiet(weights: Weights) -> Weights:
    """The same, whose layers add nothing to their inputs."""
    silent = ("o_proj.weight", "down_proj.weight")
    return {name: torch.zeros_like(one) if name.endswith(silent) else one for name, one in weights.items()}


@torch.no_grad()
def save_demo_heads(demo: Path, folder: Path, model: Any) -> dict[str, dict[str, Any]]:
    """Write a head of each kind for the demo model, `model` in transformers; return name -> speculative_config. The one
    for further tokens comes with the model, as MiMo has it: `mimo` in `folder`."""
    ids, states, unnormed = heard(model)
    config = json.loads((demo / "config.json").read_text())
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    sizes = {"h": hidden, "q": hidden, "k": kv, "f": config["intermediate_size"], "v": vocab}
    embedded = model.get_input_embeddings()(ids)[:, 1:-1]
    last, wanted = states[-1][:, :-2], unnormed[:, 1:-1]
    own = {**config, "num_hidden_layers": 1, "dtype": "float32"}
    norm = model.model.norm.weight.float()

    w = quiet(random_weights(shapes("eagle", sizes)))
    w["fc.weight"] = fitted(torch.cat((embedded, last), -1), states[-1][:, 1:-1])
    save_head(folder / "eagle", {**own, "bias": False}, w)

    w = quiet(random_weights(shapes("mimo", sizes)))
    of = block_name("mimo")
    w["model.mtp_layers.0.input_proj.weight"] = fitted(torch.cat((normed(last), normed(embedded)), -1), wanted)
    w["model.mtp_layers.0.final_layernorm.weight"] = norm
    for part in ("token", "hidden"):
        w[f"model.mtp_layers.0.{part}_layernorm.weight"] = torch.ones(hidden)
    tensors = load_file(demo / "model.safetensors")
    block = {name.replace("model.layers.0.", of): one for name, one in tensors.items() if ".layers.0." in name}
    w = quiet(block) | w
    sizes_of_bias = {"q": hidden, "k": kv, "v": kv}
    layers = [f"model.layers.{layer}." for layer in range(config["num_hidden_layers"])]
    biases = {
        f"{layer}self_attn.{name}_proj.bias": torch.zeros(size)
        for layer in (*layers, of)
        for name, size in sizes_of_bias.items()
    }
    fields = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    save_head(folder / "mimo", {**config, **fields}, tensors | w | biases)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / "mimo" / file).write_bytes((demo / file).read_bytes())
    count = {"num_speculative_tokens": 2}
    return {
        "eagle": {"method": "eagle", "model": str(folder / "eagle"), **count},
        "mtp": {"method": "mimo_mtp", **count},
    }
