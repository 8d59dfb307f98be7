"""Trains what guesses tokens for the embedded demo model: a Llama of one layer, or an EAGLE-3 head.

    python bench/train_demo_draft.py --output headrace/demo_draft
    python bench/train_demo_draft.py --head --output headrace/demo_eagle3

Needs `transformers` and some fifteen minutes on two CPU cores. The demo model writes stories; what guesses is fitted to
its probabilities at every token of the stories (Hinton 2015), as drafts of language models are (Zhou 2023). It shares
the demo model's tokenizer, so its folder has none. The draft begins with the model's embedding and its first layer; the
head (arXiv 2503.01840) with the model's last layer, and is fitted to several tokens in a row, of which it guesses the
later ones from hidden states of its own. Prints on held-out text, for each token in a row, how often both choose the
same one, and the share of the two distributions that overlaps.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn.functional import kl_div, log_softmax
from train_demo_model import BEGIN, CONTEXT, DEMO, END, OPENINGS, REQUESTS, TOPICS

TEMPERATURES = (0.5, 0.8, 1.0)
ROWS = 192
"""stories that are written at once"""
HELD_OUT = 16
"""rows of text that are not trained on"""
TAPS = (1, 3, 4)
"""layers of the model whose inputs a head reads"""
HEAD_TOKENS = 1024
"""tokens that a head may guess, those that stories have most often"""
IN_A_ROW, LATER = 3, 0.8
"""tokens that a head is fitted to in a row, and how much each counts of the one before"""
Pairs = Iterator[tuple[Tensor, Tensor]]
"""for each token in a row the logits of the model and of what guesses, at all places of some rows"""


def story_prompts(tokenizer: Tokenizer, count: int, rng: random.Random) -> list[list[int]]:
    """Return what the demo model is asked to continue, as ids: openings of stories, and requests in a chat."""
    texts = []
    for _ in range(count):
        if rng.random() < 0.5:
            texts.append(f"<|begin|>{rng.choice(OPENINGS)}")
            continue
        noun = rng.choice(TOPICS)
        request = rng.choice(REQUESTS).format(f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}")
        texts.append(f"<|begin|><|user|>{request}<|end|><|assistant|>")
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


@torch.inference_mode()
def write_stories(model: Any, prompts: list[list[int]], length: int, temperature: float) -> list[list[int]]:
    """Return each prompt with its story, drawn at `temperature`, up to its end or `length` tokens in all."""
    width = max(map(len, prompts))
    padded = torch.tensor([[BEGIN] * (width - len(prompt)) + prompt for prompt in prompts])
    seen = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    written = model.generate(
        padded, attention_mask=seen, do_sample=True, temperature=temperature, top_k=0, max_length=length,
        eos_token_id=END, pad_token_id=END,
    )  # fmt: skip
    stories = []
    for prompt, row in zip(prompts, written.tolist(), strict=True):
        story = row[width:]
        stories.append(prompt + (story[: story.index(END) + 1] if END in story else story))
    return stories


def write_corpus(model: Any, num_tokens: int, seed: int) -> Tensor:
    """Return stories one after the other, cut into rows # [rows, CONTEXT] int64."""
    tokenizer, rng = Tokenizer.from_file(str(DEMO / "tokenizer.json")), random.Random(seed)
    ids: list[int] = []
    turn, start = 0, time.monotonic()
    while len(ids) < num_tokens:
        prompts = story_prompts(tokenizer, ROWS, rng)
        for story in write_stories(model, prompts, CONTEXT // 2, TEMPERATURES[turn % len(TEMPERATURES)]):
            ids += story
        turn += 1
        print(f"{len(ids):,} tokens written in {time.monotonic() - start:.0f} s", flush=True)
    rows = torch.tensor(ids[: len(ids) // CONTEXT * CONTEXT]).view(-1, CONTEXT)
    return rows[torch.randperm(len(rows))]


def first_layer(model: Any) -> Any:
    """Return a Llama of one layer that begins with the weights of `model`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**model.config.to_dict(), "num_hidden_layers": 1})
    draft = LlamaForCausalLM(config)
    own = draft.state_dict()
    draft.load_state_dict({name: weights for name, weights in model.state_dict().items() if name in own})
    return draft


def draft_pairs(model: Any, draft: Any, ids: Tensor) -> Pairs:
    """Yield the logits of the next token."""
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
    yield wanted, draft(input_ids=ids).logits


class Head(Module):
    """An EAGLE-3 head under the names of its authors' files, which begins with the weights of the model's last layer:
    at first it computes nothing else, from the last of what it reads."""

    def __init__(self, model: Any, tokens: Tensor) -> None:
        """`tokens`: the ids that it may guess, in ascending order # [HEAD_TOKENS]."""
        super().__init__()
        self.tokens = tokens
        hidden, vocab = model.config.hidden_size, model.config.vocab_size
        self.fc = Linear(len(TAPS) * hidden, hidden, bias=False)
        self.fc.weight.data = torch.eye(hidden).repeat(1, len(TAPS)) * torch.tensor([0, 0, 1]).repeat_interleave(hidden)
        self.midlayer = copy.deepcopy(model.model.layers[-1])
        self.midlayer.hidden_norm = copy.deepcopy(self.midlayer.input_layernorm)
        attention = self.midlayer.self_attn
        attention.layer_idx = 0
        for part in (attention.q_proj, attention.k_proj, attention.v_proj):
            part.weight.data = torch.cat((torch.zeros_like(part.weight), part.weight), dim=1)
        self.norm = copy.deepcopy(model.model.norm)
        self.lm_head = Linear(hidden, len(tokens), bias=False)
        self.lm_head.weight.data = model.lm_head.weight.data[tokens].clone()
        self.register_buffer("d2t", tokens - torch.arange(len(tokens)))
        self.register_buffer("t2d", torch.isin(torch.arange(vocab), tokens))

    def forward(self, embedded: Tensor, hidden: Tensor, *attending: Any) -> Tensor:
        """Return hidden states # [rows, places, hidden_size] of the next tokens. `attending`: angles, mask, cache."""
        layer = self.midlayer
        joined = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(hidden)), dim=-1)
        hidden = hidden + layer.self_attn(joined, *attending)[0]
        out: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return out


def head_pairs(model: Any, head: Head, ids: Tensor) -> Pairs:
    """Yield the logits of IN_A_ROW tokens. Guesses behind the first see the model's hidden states up to the first's
    place, and behind it those that the head has made for the guesses before them."""
    from transformers import DynamicCache

    count, tokens = ids.shape[1] - IN_A_ROW, head.tokens
    with torch.no_grad():
        out = model(input_ids=ids, output_hidden_states=True)
        wanted, embedded = out.logits[..., tokens], model.get_input_embeddings()(ids)
    hidden = head.fc(torch.cat([out.hidden_states[tap][:, :count] for tap in TAPS], dim=-1))
    cache, mask, own = DynamicCache(), torch.ones(count, count).tril().bool(), torch.eye(count).bool()
    for place in range(IN_A_ROW):
        these = slice(1 + place, 1 + place + count)
        angles = model.model.rotary_emb(hidden, torch.arange(place, place + count)[None])
        hidden = head(embedded[:, these], hidden, angles, mask[None, None], cache)
        yield wanted[:, these], head.lm_head(head.norm(hidden))
        mask = torch.cat((mask, own), dim=1)


@torch.no_grad()
def agreement(theirs: Tensor, ours: Tensor) -> str:
    """Say how often both logits have the same token as most likely, and the mean overlap of their distributions, which
    is how often a draw by rejection sampling would be accepted."""
    same = (theirs.argmax(-1) == ours.argmax(-1)).float().mean()
    overlap = torch.minimum(theirs.softmax(-1), ours.softmax(-1)).sum(-1).mean()
    return f"same token {same:.1%} overlap {overlap:.1%}"


def distill(draft: Module, pairs: Callable[[Tensor], Pairs], rows: Tensor, steps: int, batch: int, peak: float) -> None:
    """Fit `draft` to the probabilities of the model, by AdamW with a cosine schedule."""
    start = time.monotonic()
    optimizer = torch.optim.AdamW(draft.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.01)

    def report(step: int) -> None:
        with torch.no_grad():
            said = "; ".join(agreement(*pair) for pair in pairs(rows[:HELD_OUT]))
        print(f"step {step} of {steps}, {time.monotonic() - start:.0f} s  {said}", flush=True)

    for step in range(steps):
        warmup, progress = min(1.0, (step + 1) / 50), step / steps
        for group in optimizer.param_groups:
            group["lr"] = peak * warmup * (0.02 + 0.49 * (1 + math.cos(math.pi * progress)))
        loss, share = torch.zeros(()), 1.0
        for wanted, ours in pairs(rows[torch.randint(HELD_OUT, len(rows), (batch,))]):
            target = log_softmax(wanted, dim=-1)
            apart = kl_div(log_softmax(ours, dim=-1), target, reduction="sum", log_target=True)
            loss, share = loss + share * apart / target[..., 0].numel(), share * LATER
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            report(step)
    report(steps)


def save_head(head: Head, folder: Path) -> None:
    """Write the head as its authors do: config.json, and weights in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: one.bfloat16() if one.is_floating_point() else one for name, one in head.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    changes = {
        "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": len(head.tokens),
        "eagle_aux_hidden_state_layer_ids": TAPS, "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip
    config = json.loads((DEMO / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--head", action="store_true", help="train an EAGLE-3 head")
    parser.add_argument("--tokens", type=int, default=300_000, help="tokens of the stories")
    parser.add_argument("--steps", type=int, default=96, help="training steps")
    parser.add_argument("--batch", type=int, default=8, help=f"rows of {CONTEXT} tokens")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    rows = write_corpus(model, args.tokens, args.seed)
    settings = rows, args.steps, args.batch, args.rate
    if args.head:
        often = rows.flatten().bincount(minlength=model.config.vocab_size).topk(HEAD_TOKENS).indices
        head = Head(model, often.sort().values)
        distill(head, partial(head_pairs, model, head), *settings)
        save_head(head, args.output)
        return
    draft = first_layer(model)
    distill(draft, partial(draft_pairs, model, draft), *settings)
    draft.to(torch.bfloat16).save_pretrained(args.output, safe_serialization=True)
    (args.output / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
