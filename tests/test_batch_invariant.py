"""`batch_invariant`: a request gets the same tokens and logprobs, bit for bit, alone and in random traffic.

Batches come and go, prompts are cut anywhere, prefixes come from the cache, requests are preempted or aborted.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.engine.build import build_core
from headrace.engine.core import EngineCore
from headrace.engine.messages import Abort
from headrace.hub import resolve_model_folder
from headrace.request import EngineCoreRequest
from headrace.runner.step_parts import single_tokens
from headrace.sampling_params import SamplingParams
from headrace.step import BlockUpdate, Logprobs, NewRow, SchedulerOutput

MAX_TOKENS = 8
TRAFFIC: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "prompts in chunks of 16 and less": {"max_num_batched_tokens": 16},
    "a pool that forces preemption": {
        "num_gpu_blocks_override": 9,
        "max_model_len": 96,
        "max_num_batched_tokens": 40,
    },
    "no prefix caching, five at once": {"enable_prefix_caching": False, "max_num_seqs": 5},
}


@dataclass
class Received:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)


def start(dtype: str, **settings: Any) -> EngineCore:
    config = EngineConfig(dtype=dtype, batch_invariant=True, cpu_threads=1, **settings)
    core = build_core(config, resolve_model_folder("demo"), beside_server=False)
    core.scheduler.config = replace(core.scheduler.config, look_ahead=False)  # a small pool is to be filled
    return core


def make_requests(draw: random.Random) -> list[EngineCoreRequest]:
    """Prompts of which some share a beginning, and every kind of sampling."""
    prompts = [[draw.randrange(3, 500) for _ in range(length)] for length in (40, 23, 11, 60, 1)]
    prompts += [[*prompt[: len(prompt) * 3 // 4], 5, index] for index, prompt in enumerate(prompts[:3])]
    requests = []
    for index, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=MAX_TOKENS,
            temperature=draw.choice((0.0, 0.0, 0.8, 1.3)),
            top_p=draw.choice((1.0, 0.9)),
            top_k=draw.choice((0, 20)),
            repetition_penalty=draw.choice((1.0, 1.2)),
            logprobs=2,
            prompt_logprobs=draw.choice((None, None, 1)),
        )
        requests.append(
            EngineCoreRequest(
                request_id=str(index),
                prompt_token_ids=prompt,
                params=params,
                max_tokens=MAX_TOKENS,
                seed=draw.getrandbits(60),
            )
        )
    return requests


def collect(core: EngineCore, received: dict[str, Received]) -> None:
    done = core.step()
    for output in done.outputs if done is not None else ():
        seen = received[output.request_id]
        seen.token_ids += output.new_token_ids
        seen.logprobs += output.new_logprobs
        seen.prompt_logprobs += output.new_prompt_logprobs


def run_alone(core: EngineCore, request: EngineCoreRequest) -> Received:
    received = {request.request_id: Received()}
    core.add_request(request)
    while core.has_work():
        collect(core, received)
    return received[request.request_id]


def run_together(core: EngineCore, requests: list[EngineCoreRequest], draw: random.Random) -> dict[str, Received]:
    """Requests come at random moments, beside others that are aborted half way."""
    received = {request.request_id: Received() for request in requests}
    upcoming, passing = list(requests), 0
    while upcoming or core.has_work():
        for _ in range(draw.choice((0, 0, 1, 1, 3))):
            if upcoming:
                core.add_request(upcoming.pop(0))
        if draw.random() < 0.1 and upcoming:
            passing += 1
            other = EngineCoreRequest(
                request_id=f"x{passing}", prompt_token_ids=upcoming[0].prompt_token_ids, params=SamplingParams(),
                max_tokens=MAX_TOKENS, seed=passing,
            )  # fmt: skip
            received[other.request_id] = Received()
            core.add_request(other)
        if passing and draw.random() < 0.1:
            core.abort([Abort(f"x{passing}")])
        collect(core, received)
    return received


@pytest.mark.parametrize(
    ("dtype", "kinds"),
    [
        ("float32", [*TRAFFIC][:2]),
        ("bfloat16", [*TRAFFIC][2:]),
        pytest.param("float32", [*TRAFFIC][2:], marks=pytest.mark.slow),
        pytest.param("bfloat16", [*TRAFFIC][:2], marks=pytest.mark.slow),
    ],
)
def test_tokens_and_logprobs_are_the_same_alone_and_in_traffic(dtype: str, kinds: list[str]) -> None:
    draw = random.Random(dtype)
    requests = make_requests(draw)
    core = start(dtype, enable_prefix_caching=False)
    alone = {request.request_id: run_alone(core, request) for request in requests}
    core.shutdown()
    assert all(len(seen.token_ids) == len(seen.logprobs) >= 1 for seen in alone.values())
    for name in kinds:
        core = start(dtype, **TRAFFIC[name])
        together = run_together(core, requests, draw)
        for request in requests:
            assert together[request.request_id] == alone[request.request_id], (name, request)
        stats = core.scheduler.stats()
        assert (stats.num_preemptions > 0) == ("preemption" in name)
        if "preemption" not in name:  # which may leave nothing to hit
            assert (stats.prefix_cache_hits > 0) == ("no prefix caching" not in name)
        core.shutdown()


def test_a_step_falls_apart_into_single_tokens() -> None:
    new, update = NewRow(3, [5, 6, 7], SamplingParams(), []), BlockUpdate(3, 0, [1])
    step = SchedulerOutput(9, [new], [4], [update], [1, 3], [40, 1], [1, 2], [True, True])
    assert list(single_tokens(step)) == [
        SchedulerOutput(9, [new], [4], [update], [1], [40], [1], [True]),
        SchedulerOutput(9, [], [], [], [3], [1], [1], [False]),
        SchedulerOutput(9, [], [], [], [3], [2], [1], [True]),
    ]
    nothing = SchedulerOutput(9, [], [4], [], [], [], [], [])
    assert list(single_tokens(nothing)) == [nothing]
