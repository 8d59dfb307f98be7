"""What lm_eval's `local-completions` sends, once as token ids and once as text, against transformers.

For a loglikelihood it asks for echo, one token and logprobs=1, and reads `token_logprobs[len(context):-1]`. The command
line of lm_eval itself is in docs/serving.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace.cli.main import main
from headrace.evaluate.rolling import windows
from tests.e2e.conftest import KEY
from tests.serving import DEMO, Serve

CONTEXTS = (
    "Once upon a time, there was a little boy named Ben. He loved to explore the world.",
    "The dog was sad because it was raining. Then the rain stopped and the sun came out.",
)
ENDINGS = (" The dog was happy and ran outside.", " It was a zebra, 42 euros, naïve!", " Ben smiled.")


@pytest.fixture(scope="module")
def reference() -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(DEMO)


def by_transformers(model: Any, ids: list[int], start: int) -> tuple[float, bool]:
    """Loglikelihood of ids[start:] after ids[:start], and whether each of them is the likeliest."""
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    rows, targets = logprobs[start - 1 : -1], torch.tensor(ids[start:])
    return float(rows.gather(1, targets[:, None]).sum()), bool((rows.argmax(-1) == targets).all())


def by_lm_eval(choice: dict[str, Any], start: int) -> tuple[float, bool]:
    """As its `parse_logprobs` reads the answer."""
    values = choice["logprobs"]["token_logprobs"][start:-1]
    tops = choice["logprobs"]["top_logprobs"][start:-1]
    return sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))


@pytest.mark.parametrize("tokenized_requests", [True, False])
def test_loglikelihoods(server: Serve, reference: Any, tokenizer: Any, tokenized_requests: bool) -> None:
    greedy = server.complete(prompt=CONTEXTS[0], max_tokens=12)
    pairs = [(context, ending) for context in CONTEXTS for ending in (*ENDINGS, greedy)]
    starts = [len(tokenizer(context)["input_ids"]) for context, _ in pairs]
    texts = [context + ending for context, ending in pairs]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    body = {
        "model": "demo",
        "prompt": ids if tokenized_requests else texts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer = server.post("/v1/completions", body).json()
    assert len(answer["choices"]) == len(pairs)
    found_greedy = set()
    for choice in answer["choices"]:
        index = choice["index"]
        logprob, is_greedy = by_lm_eval(choice, starts[index])
        expected, expected_greedy = by_transformers(reference, ids[index], starts[index])
        assert logprob == pytest.approx(expected, abs=1e-3)
        assert is_greedy == expected_greedy
        found_greedy.add(is_greedy)
    assert found_greedy == {True, False}


def test_generation(server: Serve, reference: Any, tokenizer: Any) -> None:
    """Its generate_until: stop strings cut the text, the rest is what transformers generates."""
    prompts = [tokenizer(context)["input_ids"] for context in CONTEXTS]
    body = {"model": "demo", "prompt": prompts, "max_tokens": 40, "temperature": 0, "stop": ["<|end|>", "."], "seed": 1}
    answer = server.post("/v1/completions", body).json()
    for choice in answer["choices"]:
        ids = torch.tensor([prompts[choice["index"]]])
        with torch.no_grad():
            whole = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
        text = tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)
        assert choice["text"] == text.partition(".")[0]
        assert choice["finish_reason"] == ("stop" if "." in text else "length")


def test_perplexity_of_headrace_eval(server: Serve, reference: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Its windows, over a text longer than one."""
    (tmp_path / "story.txt").write_text(" ".join(CONTEXTS))
    flags = ["--task", "perplexity", "--data", str(tmp_path / "story.txt"), "--max-length", "32", "--tokenizer", "demo"]
    flags += ["--base-url", server.url, "--api-key", KEY, "--output-path", str(tmp_path / "run")]
    assert main(["eval", *flags]) == 0
    figures = json.loads((tmp_path / "run" / "results_perplexity.json").read_text())["results"]["perplexity"]
    ids = tokenizer(" ".join(CONTEXTS), add_special_tokens=False)["input_ids"]
    parts = [*windows(ids, tokenizer.bos_token_id, 32)]
    assert len(parts) > 1
    total = sum(by_transformers(reference, part.ids, len(part.ids) - part.num_scored)[0] for part in parts)
    # the sum may be off by 1e-3, as above, for each of the windows
    assert math.log(figures["token_perplexity,none"]) == pytest.approx(-total / len(ids), abs=1e-3)
