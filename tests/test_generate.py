"""`headrace generate` end to end: the same greedy tokens however the work is cut up.

The reference is transformers on the embedded demo model; where the folder of golden outputs is present beside the
repository, its recorded tokens are held too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from headrace import LLM, SamplingParams
from headrace.cli.main import main
from headrace.hub import resolve_model_folder

GOLDEN = Path(__file__).parents[2] / "shared" / "models" / "stories260K"
PROMPTS = [
    "Once upon a time",
    "One day, a little bird",
    "Tom and Lily went to the park. They saw a big dog and a small cat, and the cat said",
    "The",
    "There was a girl named Mia who had a red ball. " * 4,
]
NEW_TOKENS = 48
NEVER = [0]
"""Not among the answers. One that could end at any token is expected to be short, so that a small pool is filled."""
VARIANTS = {
    "as it comes": {},
    "no prefix caching": {"enable_prefix_caching": False},
    "no chunked prefill": {"enable_chunked_prefill": False},
}
MORE_VARIANTS = {
    "two stages of two ranks": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "pp_layer_partition": "2,3"},
    "a budget of 16 tokens": {"max_num_batched_tokens": 16},
    "blocks of 1": {"block_size": 1},
    "a pool that forces preemption": {"num_gpu_blocks_override": 14, "max_model_len": 192},
    "blocks of 64": {"block_size": 64},
    "no async scheduling": {"async_scheduling": False},
    "one at a time": {"max_num_seqs": 1},
}
"""Chunks, small blocks and preemption are test_windows.py's too, for families that keep each kind of thing; stages of
ranks are distributed/test_pipeline.py's."""


@cache
def expected() -> list[list[int]]:
    """Greedy tokens by transformers in fp32, one prompt at a time."""
    folder = resolve_model_folder("demo")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for ids in prompt_ids():
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids)),  # else transformers takes ids equal to pad_token_id for padding
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                pad_token_id=0,
                eos_token_id=-1,
            )
        found.append(output[0, len(ids) :].tolist())
    return found


@cache
def prompt_ids() -> list[list[int]]:
    from headrace.engine.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(resolve_model_folder("demo"))
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "variant", [*VARIANTS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_VARIANTS)]
)
def test_greedy_tokens_equal_transformers(variant: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, stop_token_ids=NEVER)
    llm = LLM(model="demo", dtype="float32", **(VARIANTS | MORE_VARIANTS)[variant])
    try:
        for _ in range(2):  # cold, then warm
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected()
            assert [output.prompt_token_ids for output in outputs] == prompt_ids()
        stats = llm.stats()
    finally:
        llm.shutdown()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.num_free_blocks == stats.num_blocks
    if "preemption" in variant:
        assert stats.num_preemptions > 0
    if variant == "as it comes":
        assert stats.prefix_cache_hits > 0


def test_a_request_alone_gives_what_it_gives_in_a_batch_when_sampling() -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=24, ignore_eos=True)
    llm = LLM(model="demo", dtype="float32")
    try:
        together = llm.generate(PROMPTS, params, use_tqdm=False)
        alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in PROMPTS]
    finally:
        llm.shutdown()
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]


def test_the_command_writes_one_json_line_a_completion() -> None:
    command = [sys.executable, "-m", "headrace.cli.main", "generate", "demo", "--dtype", "float32", "--json"]
    command += ["--temperature", "0", "--max-tokens", "8", "--ignore-eos", "--prompt", PROMPTS[0], "--prompt"]
    done = subprocess.run([*command, PROMPTS[3]], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == [PROMPTS[0], PROMPTS[3]]
    assert [line["token_ids"] for line in lines] == [expected()[0][:8], expected()[3][:8]]
    assert set(lines[0]) == {"prompt", "text", "token_ids", "finish_reason", "logprobs"}
    assert lines[0]["finish_reason"] == "length"


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="the folder of golden outputs is not beside this repository")
def test_golden_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    cases = json.loads((GOLDEN / "golden.json").read_text())["cases"]
    prompts = [word for case in cases for word in ("--prompt", case["prompt"])]
    asked = ["--dtype", "float32", "--temperature", "0", "--max-tokens", "100", "--json", *prompts]
    assert main(["generate", os.fspath(GOLDEN), *asked]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["token_ids"] for line in lines] == [case["output_ids"] for case in cases]
    # The recorded texts were decoded by themselves, which drops the space between prompt and continuation.
    assert [str(line["text"]).strip() for line in lines] == [case["output_text"].strip() for case in cases]
