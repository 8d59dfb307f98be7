"""Trains the embedded demo model: samples stories from teacher models with headrace, then fits a small Llama to them.

    python bench/train_demo_model.py --teacher DIR [--teacher DIR ...] --output headrace/demo_model

Needs one GPU and a few minutes, and `transformers` for the model that is trained. Teachers are folders of tiny story
models; the student sees their text alone, so it has a byte-level BPE tokenizer and a chat template of its own. Prints
the loss on held-out text.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIALS = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
BEGIN, END = 0, 1
DEMO = Path(__file__).parent.parent / "headrace" / "demo_model"
"""the folder that is shipped, whose sizes and chat template a model that is trained anew keeps"""
VOCAB_SIZE = 2048
CONTEXT = 512
OPENINGS = ["", "", "Once upon a time", "Once upon a time, there was a", "One day,", "There was a", "Once there was a"]
TOPICS = (
    "dog cat bird ball park tree flower car truck doll bear rabbit frog fish boat kite cake cookie apple garden forest "
    "house box book toy train bike hat rain snow sun moon star river lake bug bee butterfly duck cow horse pig mouse "
    "lion monkey elephant dragon princess king queen friend mom dad grandma brother sister farm beach school store"
).split()
REQUESTS = [
    "Tell me a story about {}.",
    "Tell me a story about {}",
    "Write a short story about {}.",
    "Can you tell me a story about {}?",
    "I want a story about {}.",
    "Please write a story about {}.",
]


def sample_stories(teacher: Path, count: int, seed: int) -> list[str]:
    """Return whole stories as plain text: those that the teacher ended by itself, with bos or eos."""
    from headrace import LLM, SamplingParams

    llm = LLM(model=str(teacher), dtype="float32", max_num_seqs=1024, max_num_batched_tokens=8192, seed=seed)
    rng = random.Random(seed)
    ends = llm.model_config.bos_token_id, *llm.model_config.eos_token_ids
    stop_ids = [token for token in ends if token is not None]
    prompts = [rng.choice(OPENINGS) for _ in range(count)]
    params = [
        SamplingParams(
            temperature=rng.uniform(0.4, 0.8), top_p=0.95, max_tokens=None, stop_token_ids=stop_ids, seed=seed + i
        )
        for i in range(count)
    ]
    outputs = llm.generate(prompts, params)
    llm.shutdown()
    stories = []
    for prompt, output in zip(prompts, outputs, strict=True):
        choice = output.outputs[0]
        story = (prompt + choice.text).strip()
        if choice.finish_reason == "stop" and len(story) > 200 and story[-1] in ".!?\"'":
            stories.append(story)
    return stories


def topic_of(story: str, rng: random.Random) -> str:
    """Return what a person might have asked for to get this story."""
    words = re.findall(r"[a-z]+", story.lower())
    nouns = sorted({word for word in TOPICS if word in words}, key=lambda noun: -words.count(noun))[:3]
    names = re.findall(r"\b(?:named|called) ([A-Z][a-z]+)", story)
    parts = [f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}" for noun in rng.sample(nouns, min(len(nouns), 2))]
    if names and rng.random() < 0.6:
        parts.insert(0, names[0])
    return " and ".join(parts[:2]) or "anything"


def train_tokenizer(stories: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer on the stories."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(stories, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", BEGIN)]
    )
    return tokenizer


def encode_corpus(tokenizer: Tokenizer, stories: list[str], rng: random.Random) -> torch.Tensor:
    """Return one stream of ids: every story plain, and half of them again as the answer in a chat."""
    texts = []
    for story in stories:
        texts.append(f"<|begin|>{story}<|end|>")
        if rng.random() < 0.5:
            request = rng.choice(REQUESTS).format(topic_of(story, rng))
            system = "<|system|>You are a storyteller.<|end|>" if rng.random() < 0.2 else ""
            texts.append(f"<|begin|>{system}<|user|>{request}<|end|><|assistant|>{story}<|end|>")
    rng.shuffle(texts)
    ids: list[int] = []
    for start in range(0, len(texts), 10_000):
        for encoding in tokenizer.encode_batch(texts[start : start + 10_000], add_special_tokens=False):
            ids.extend(encoding.ids)
    return torch.tensor(ids, dtype=torch.int64)


def train(stream: torch.Tensor, minutes: float, batch: int) -> torch.nn.Module:
    """Train with AdamW and a cosine schedule over a fixed wall-clock budget; print the held-out loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model: Any = LlamaForCausalLM(LlamaConfig.from_pretrained(DEMO))
    model.cuda()
    print(f"parameters: {sum(p.numel() for p in model.parameters()):,}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    usable = (len(stream) - 1) // CONTEXT * CONTEXT
    rows = stream[:usable].view(-1, CONTEXT)
    held_out, rows = rows[-256:].cuda(), rows[:-256].cuda()
    start = time.monotonic()
    budget, step, peak = minutes * 60, 0, 2e-3
    while (elapsed := time.monotonic() - start) < budget:
        progress = elapsed / budget
        warmup = min(1.0, (step + 1) / 200)
        for group in optimizer.param_groups:
            group["lr"] = peak * warmup * (0.02 + 0.98 * 0.5 * (1 + torch.cos(torch.tensor(progress * 3.14159)).item()))
        chosen = rows[torch.randint(len(rows), (batch,), device="cuda")]
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=chosen, labels=chosen).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 500 == 0:
            with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
                held_out_loss = model(input_ids=held_out, labels=held_out).loss.item()
            print(f"step {step}  loss {loss.item():.3f}  held out {held_out_loss:.3f}")
        step += 1
    print(f"{step} steps, {step * batch * CONTEXT / 1e6:.0f}M tokens")
    return model


def save(model: Any, tokenizer: Tokenizer, output: Path) -> None:
    """Write the folder of the trained model, with the chat template of the one that is shipped."""
    output.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(output, safe_serialization=True)
    tokenizer.save(str(output / "tokenizer.json"))
    (output / "tokenizer_config.json").write_text((DEMO / "tokenizer_config.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, action="append", required=True, help="folder of a teacher (repeatable)")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--stories", type=int, default=120_000, help="stories sampled from each teacher")
    parser.add_argument("--minutes", type=float, default=1.0, help="training time")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)
    stories: list[str] = []
    for index, teacher in enumerate(args.teacher):
        start = time.monotonic()
        whole = sample_stories(teacher, args.stories, args.seed + index * 1_000_003)
        print(f"{teacher}: kept {len(whole):,} of {args.stories:,} stories in {time.monotonic() - start:.0f} s")
        stories += whole
    rng.shuffle(stories)
    tokenizer = train_tokenizer(stories)
    stream = encode_corpus(tokenizer, stories, rng)
    print(f"corpus: {len(stream) / 1e6:.1f}M tokens")
    save(train(stream, args.minutes, args.batch), tokenizer, args.output)


if __name__ == "__main__":
    main()
