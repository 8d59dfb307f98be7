"""Trains the draft model of the embedded demo model: a Llama of one layer that learns the demo model's distributions.

    python bench/train_demo_draft.py --output headrace/demo_draft

Needs `transformers` and some fifteen minutes on two CPU cores. The demo model writes stories; the draft begins with its
embedding and its first layer, and is fitted to its probabilities at every token of the stories (Hinton 2015), as drafts
of language models are (Zhou 2023, DistillSpec). It shares the demo model's tokenizer, so its folder has none. Prints on
held-out text how often both choose the same token, and the share of the two distributions that overlaps.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax
from train_demo_model import BEGIN, CONTEXT, DEMO, END, OPENINGS, REQUESTS, TOPICS

TEMPERATURES = (0.5, 0.8, 1.0)
ROWS = 192
"""stories that are written at once"""
HELD_OUT = 16
"""rows of text that are not trained on"""


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


@torch.no_grad()
def hidden_states(model: Any, rows: Tensor, batch: int = 16) -> Tensor:
    """Return what the head of `model` reads at every token of `rows` # [rows, CONTEXT, hidden_size] bfloat16."""
    parts = [model.model(input_ids=part).last_hidden_state.bfloat16() for part in rows.split(batch)]
    return torch.cat(parts)


@torch.no_grad()
def agreement(theirs: Tensor, ours: Tensor) -> tuple[float, float]:
    """Return how often both logits have the same token as most likely, and the mean overlap of their distributions,
    which is how often a draw by rejection sampling would be accepted."""
    same = (theirs.argmax(-1) == ours.argmax(-1)).float().mean()
    overlap = torch.minimum(theirs.softmax(-1), ours.softmax(-1)).sum(-1).mean()
    return float(same), float(overlap)


def distill(model: Any, draft: Any, rows: Tensor, steps: int, batch: int, peak: float) -> None:
    """Fit `draft` to the probabilities of `model`, by AdamW with a cosine schedule."""
    hidden, start = hidden_states(model, rows), time.monotonic()
    optimizer = torch.optim.AdamW(draft.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.01)

    def both(chosen: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = model.lm_head(hidden[chosen].float())
        return wanted, draft(input_ids=rows[chosen]).logits

    def report(step: int) -> None:
        same, overlap = agreement(*both(torch.arange(HELD_OUT)))
        seconds = time.monotonic() - start
        print(f"step {step} of {steps}, {seconds:.0f} s  same token {same:.1%}  overlap {overlap:.1%}", flush=True)

    for step in range(steps):
        warmup, progress = min(1.0, (step + 1) / 50), step / steps
        for group in optimizer.param_groups:
            group["lr"] = peak * warmup * (0.02 + 0.49 * (1 + math.cos(math.pi * progress)))
        wanted, ours = both(torch.randint(HELD_OUT, len(rows), (batch,)))
        target = log_softmax(wanted, dim=-1)
        loss = kl_div(log_softmax(ours, dim=-1), target, reduction="sum", log_target=True) / (batch * CONTEXT)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            report(step)
    report(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
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
    draft = first_layer(model)
    print(f"parameters: {sum(one.numel() for one in draft.parameters()):,}")
    distill(model, draft, rows, args.steps, args.batch, args.rate)
    args.output.mkdir(parents=True, exist_ok=True)
    draft.to(torch.bfloat16).save_pretrained(args.output, safe_serialization=True)
    (args.output / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
