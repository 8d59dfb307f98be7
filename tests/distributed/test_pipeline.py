"""Pipeline stages, alone and with each layer split too, give the tokens of one rank, which are transformers' own: from
a cache of prefixes, in chunks, after preemption, under grammars; no token reaches another request. Ranks are threads
here, which takes no time to start; processes are in tests/test_generate.py and test_killed_ranks.py."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_configs import BASE, best_tokens, save_tiny_model

from headrace import LLM, SamplingParams
from headrace.distributed.mesh import Group, Mesh
from headrace.engine.messages import Abort
from headrace.errors import ConfigError
from headrace.request import EngineCoreRequest
from headrace.runner.pipeline import Pipeline
from headrace.stages import Stage
from headrace.step import NewRow, SchedulerOutput
from tests.distributed.thread_ranks import THREADS

NEW_TOKENS = 14
EOS = BASE["eos_token_id"]
SMALL: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 24, "max_model_len": 96,
    "num_gpu_blocks_override": 9,
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "two uneven stages": {"pipeline_parallel_size": 2, "pp_layer_partition": "1,2"},
    "three stages": {"pipeline_parallel_size": 3},
    "two stages of two shares": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "four shares": {"tensor_parallel_size": 4},
}
FAMILIES: dict[tuple[str, str], tuple[str, ...]] = {
    ("OlmoForCausalLM", "clipped"): ("two uneven stages", "two stages of two shares"),
    ("YoutuForCausalLM", "dense"): ("two uneven stages",),
    ("GptOssForCausalLM", "sliding"): ("two stages of two shares",),
    ("DeepseekV2ForCausalLM", "queries-too"): ("three stages",),
    ("Qwen3_5ForCausalLM", "two-kv-heads"): ("three stages",),
}
"""dense; a tied head, over latents; windows with sinks, and experts; latents and experts; states"""


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, name, marks=() if name in chosen else pytest.mark.slow)
        for family, chosen in FAMILIES.items()
        for name in LAYOUTS
        if name != "four shares" or family[0] in ("OlmoForCausalLM", "YoutuForCausalLM")
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else value,
)
def test_tokens_are_transformers_own(family: tuple[str, str], name: str, tmp_path: Path) -> None:
    reference = save_tiny_model(*family, tmp_path)
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(3, 100, (40,), generator=generator).tolist()
    prompts = [torch.randint(3, 100, (length,), generator=generator).tolist() for length in (3, 50, 33)]
    prompts += [shared + [place] * place for place in range(1, 4)]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS)
    layout = {**SMALL, **LAYOUTS[name]}
    if family[0] == "OlmoForCausalLM":  # whose requests are preempted
        layout["num_gpu_blocks_override"], params = 8, SamplingParams(temperature=0.0, max_tokens=30, min_tokens=30)
    if "pp_layer_partition" in layout and "Qwen" in family[0]:
        layout["pp_layer_partition"] = "1,4"
    with LLM(str(tmp_path), executor=THREADS, skip_tokenizer_init=True, **layout) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        assert all(len(tokens) == params.max_tokens for tokens in found)
        assert found == [best_tokens(reference, *both, never=EOS) for both in zip(prompts, found, strict=True)]
        again = [output.outputs[0].token_ids for output in llm.generate(prompts[-1:], params, use_tqdm=False)]
        assert again == found[-1:]
        assert llm.stats().prefix_cache_hits > 0
        assert llm.stats().num_preemptions > 0 or family[0] != "OlmoForCausalLM"


def test_penalties_logprobs_and_grammars_go_through_stages() -> None:
    """What the last stage keeps of a request (counts, logprobs, masks) is what one rank keeps."""
    asked = [
        SamplingParams(temperature=0.0, max_tokens=16, repetition_penalty=1.3, logprobs=2),
        SamplingParams(temperature=0.9, seed=5, max_tokens=16, presence_penalty=0.5, prompt_logprobs=1),
        SamplingParams(temperature=0.0, max_tokens=16, structured_outputs={"regex": "(no|yes)( and (no|yes)){3}"}),
        SamplingParams(temperature=0.8, seed=7, max_tokens=16, min_p=0.1, stop=["."]),
    ]
    prompts = ["Once upon a time", "The little dog", "Is it so?", "There was a girl"]

    def answers(**layout: Any) -> list[Any]:
        with LLM("demo", dtype="float32", device="cpu", **layout) as llm:
            return [
                (output.outputs[0].token_ids, rounded(output.outputs[0].logprobs), rounded(output.prompt_logprobs))
                for output in llm.generate(prompts, asked, use_tqdm=False)
            ]

    assert answers(executor=THREADS, pipeline_parallel_size=2) == answers()


def rounded(entries: Any) -> Any:
    """Logprobs to four digits: the sum of a stage's residual is made in another pass."""
    return entries and [
        entry and {token: (round(one.logprob, 4), one.rank) for token, one in entry.items()} for entry in entries
    ]


def test_no_token_reaches_another_request() -> None:
    """Rows pass from request to request while tokens are on their way back to the first of three stages: requests
    end, are aborted and preempted at random, and each gets the tokens it gets alone."""
    choose = random.Random(7)
    prompts = [[1, *(choose.randrange(3, 500) for _ in range(choose.randrange(1, 30)))] for _ in range(28)]
    lengths = [choose.randrange(1, 24) for _ in prompts]
    small = {**SMALL, "max_num_seqs": 5}
    stop_at: dict[str, int] = {}

    def run(aborted: list[int], **layout: Any) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
        with LLM("demo", **small, **layout) as llm:
            core, waiting = llm._core, deque(enumerate(zip(prompts, lengths, strict=True)))
            while waiting or core.has_work():
                for _ in range(min(len(waiting), choose.randrange(3))):
                    index, (prompt, length) = waiting.popleft()
                    params = SamplingParams(temperature=1.0, seed=index)
                    core.add_request(
                        EngineCoreRequest(
                            request_id=str(index), prompt_token_ids=prompt, params=params, max_tokens=length, seed=index
                        )
                    )
                for output in getattr(core.step(), "outputs", ()):
                    tokens = found[output.request_id]
                    tokens += output.new_token_ids
                    if int(output.request_id) in aborted and len(tokens) == 2 and output.finish_reason is None:
                        core.abort([Abort(output.request_id)])
                        stop_at[output.request_id] = len(tokens)
            return found

    expected = run([])
    found = run([index for index in range(len(prompts)) if index % 3 == 1], executor=THREADS, pipeline_parallel_size=3)
    assert len(stop_at) > 5
    for name, tokens in expected.items():
        assert found[name] == tokens[: stop_at.get(name, len(tokens))], name


def test_a_token_on_its_way_does_not_reach_the_next_request_of_its_row() -> None:
    """The first stage receives what a step reads before it, and throws away what its row's new request did not ask
    for."""
    sent: deque[list[int]] = deque()
    back = Group(0, 2, receive=lambda tensor, other: tensor.copy_(torch.tensor(sent.popleft())))
    first = Pipeline(Stage(0, (1, 1)), Mesh(pp=Group(0, 2), back=back))
    table = torch.zeros(4, 8, dtype=torch.int32)
    decodes = {"rows": [0, 2], "num_computed_tokens": [2, 4], "num_scheduled_tokens": [1, 1], "samples": [True, True]}
    first.expect(SchedulerOutput(0, **decodes))
    sent.append([70, 71])
    first.settle(SchedulerOutput(1, rows=[1], samples=[True]), table)
    assert len(sent) == 1  # nothing of it is read yet, and one step may be under way
    first.expect(SchedulerOutput(1, rows=[1], num_computed_tokens=[0], num_scheduled_tokens=[3], samples=[True]))
    sent.append([72])
    new = NewRow(0, [9, 9, 9, 9], SamplingParams(), [])
    first.settle(SchedulerOutput(2, freed_rows=[0], new_rows=[new], rows=[0], samples=[False]), table)
    assert len(sent) == 1  # two steps were under way, as many as there are stages
    assert table[0].tolist() == [0] * 8
    assert table[2].tolist() == [0, 0, 0, 0, 0, 71, 0, 0]
    first.settle(SchedulerOutput(3, rows=[1], samples=[True]), table)
    assert not sent
    assert table[1].tolist() == [0, 0, 0, 72, 0, 0, 0, 0]


def test_what_does_not_go_with_stages_is_refused() -> None:
    guesses = {"method": "ngram", "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match=r"ngram.* does not go with pipeline_parallel_size 2"):
        LLM("demo", pipeline_parallel_size=2, speculative_config=guesses)
    with pytest.raises(ConfigError, match=r"pp_layer_partition must be 2 numbers .*got '1,2,2'"):
        LLM("demo", pipeline_parallel_size=2, pp_layer_partition="1,2,2")
    with pytest.raises(ConfigError, match="must add up to the model's 5 layers, got 1,2, which are 3"):
        LLM("demo", pipeline_parallel_size=2, pp_layer_partition="1,2")
    with pytest.raises(ConfigError, match="pipeline_parallel_size must be at most 5, got 6"):
        LLM("demo", pipeline_parallel_size=6)
