"""What the made-up family computes, in plain torch: one sequence at once, nothing cached, nothing fused."""

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def rotate(x: Tensor) -> Tensor:
    """x # [tokens, heads, dim]"""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin, first, second = angles.cos(), angles.sin(), x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor | None = None) -> Tensor:
    """q, k, v # [tokens, heads, dim]; `seen` # [queries, keys]"""
    logits = torch.einsum("qhd,khd->hqk", q, k).masked_fill(~seen, -torch.inf) * q.shape[-1] ** -0.5
    if sinks is not None:
        logits = torch.cat((logits, sinks[:, None, None].expand(-1, len(q), 1)), -1)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1)[..., : len(k)], v)


def mix(kind: str, w: Weights, x: Tensor) -> Tensor:
    def project(name: str, heads: int, of: Tensor = x) -> Tensor:
        return (of @ w[f"self_attn.{name}_proj.weight"].T).view(len(x), heads, -1)

    query, key = torch.arange(len(x))[:, None], torch.arange(len(x))
    causal = key <= query
    if kind in ("full", "window", "chunk"):
        heads = 8 if kind == "full" else 4
        q, (k, v) = project("q", heads), (project(name, heads // 2).repeat_interleave(2, 1) for name in "kv")
        if kind == "chunk":
            out = attend(q, k, v, causal & (key // 24 == query // 24))
        else:
            seen = causal & (key > query - 32) if kind == "window" else causal
            out = attend(rotate(q), rotate(k), v, seen, w.get("self_attn.sinks"))
    elif kind == "state":
        q, k, v, decay = (project(name, 4) for name in ("q", "k", "v", "decay"))
        state, out = torch.zeros(4, 16, 24), torch.empty_like(v)
        for token in range(len(x)):
            state = decay[token].sigmoid()[:, :, None] * state + k[token, :, :, None] * v[token, :, None]
            out[token] = torch.einsum("hk,hkv->hv", q[token], state) / 16
    else:
        low = w.get("self_attn.q_a_layernorm.weight")
        q = project("q", 4) if low is None else project("q_b", 4, norm(project("q_a", 1)[:, 0], low))
        latent, rotated = (x @ w["self_attn.kv_a_proj_with_mqa.weight"].T)[:, None].split((80, 16), -1)
        kv = project("kv_b", 4, norm(latent, w["self_attn.kv_a_layernorm.weight"]))
        q = torch.cat((q[..., :32], rotate(q[..., 32:])), -1)
        k = torch.cat((kv[..., :32], rotate(rotated).expand(-1, 4, -1)), -1)
        out = attend(q, k, kv[..., 32:], causal)
    return out.flatten(1) @ w["self_attn.o_proj.weight"].T


def feed(w: Weights, x: Tensor) -> Tensor:
    def gated(name: str) -> Tensor:
        gate, up, down = (w[f"mlp.{name}{part}_proj.weight"] for part in ("gate", "up", "down"))
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    if "mlp.gate.weight" not in w:
        return gated("")
    scores = (x @ w["mlp.gate.weight"].T).sigmoid()
    chosen = (scores + w["mlp.gate.e_score_correction_bias"]).topk(2).indices
    shares = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
    shares *= 2.5 / shares.sum(-1, keepdim=True)
    return gated("shared_experts.") + sum(shares[:, i, None] * gated(f"experts.{i}.") for i in range(6))


def logits(weights: Weights, mixers: list[str], tokens: list[int]) -> Tensor:
    """# [tokens, vocabulary], after each token"""
    x = weights["embed_tokens.weight"][torch.tensor(tokens)]
    for index, kind in enumerate(mixers):
        prefix = f"layers.{index}."
        w = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        hidden = norm(x, w["input_layernorm.weight"])
        mixed = mix(kind, w, hidden)
        if kind == "chunk":
            x = x + mixed + feed(w, hidden)
        elif kind == "window":
            x = x + norm(mixed, w["post_attention_layernorm.weight"])
            x = x + norm(
                feed(w, norm(x, w["pre_feedforward_layernorm.weight"])), w["post_feedforward_layernorm.weight"]
            )
        else:
            x = x + mixed
            x = x + feed(w, norm(x, w["post_attention_layernorm.weight"]))
    return 3 * torch.tanh(norm(x, weights["norm.weight"]) @ weights["lm_head.weight"].T / 3)
