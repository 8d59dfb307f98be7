"""Checks that answers do not depend on how steps run: with --batch-invariant a request's tokens and logprobs have the
same bits alone and in any company, and in fp32 all graph modes give the same tokens without it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from h200_parts.forced import stepped_core
from h200_parts.numerics import write_random_model
from h200_parts.run import Run
from headrace.config import GRAPH_MODES
from headrace.engine.core import EngineCore
from headrace.hub import resolve_model_folder
from headrace.model_config import ModelConfig
from headrace.request import EngineCoreRequest
from headrace.sampling_params import SamplingParams

Requests = list[EngineCoreRequest]
Received = dict[str, tuple[list[int], list[Any], list[Any]]]
"""request -> its tokens, their logprobs, its prompt's logprobs"""


@dataclass(frozen=True)
class Subject:
    """Holds a model, the longest sequence that it is served with, and requests to it."""

    name: str
    folder: Path
    length: int
    requests: Requests


def subjects(run: Run) -> list[Subject]:
    """Return the demo model, and layers of the 8B; of toys requests are fewer and shorter."""
    big = write_random_model(run.settings.work / "8b4l", run.settings)
    made = []
    for name, folder, lengths, length, num in (
        ("demo", resolve_model_folder("demo"), (1, 5, 17, 60, 200, 400), 480, 30),
        ("8B of 4 layers", big, (1, 5, 17, 100, 300, 700), 1024, 40),
    ):
        vocab = ModelConfig.from_folder(folder).vocab_size
        if run.smoke:
            made.append(Subject(name, folder, 120, requests_of(name, vocab, lengths[:3], 6, 4)))
        else:
            made.append(Subject(name, folder, length, requests_of(name, vocab, lengths, 24, num)))
    return made


def requests_of(name: str, vocab: int, lengths: tuple[int, ...], tokens: int, num: int) -> Requests:
    """Return `num` random requests, and a third as many again that share three quarters of another's prompt."""
    draw = random.Random(name)
    prompts = [[draw.randrange(3, vocab) for _ in range(draw.choice(lengths))] for _ in range(num)]
    prompts += [[*prompt[: len(prompt) * 3 // 4], 5, i % 200] for i, prompt in enumerate(prompts[: num // 3])]
    made = []
    for i, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=tokens,
            temperature=draw.choice((0.0, 0.0, 0.8, 1.3)),
            top_p=draw.choice((1.0, 0.9)),
            top_k=draw.choice((0, 20)),
            repetition_penalty=draw.choice((1.0, 1.2)),
            logprobs=3,
            prompt_logprobs=draw.choice((None, None, None, 1)),
            ignore_eos=True,
        )
        name, seed = f"{i:03}", draw.getrandbits(60)
        made.append(
            EngineCoreRequest(request_id=name, prompt_token_ids=prompt, params=params, max_tokens=tokens, seed=seed)
        )
    return made


def serve(core: EngineCore, requests: Requests, draw: random.Random | None = None) -> Received:
    """Run requests that arrive all at once, or, with `draw`, at random moments."""
    received: Received = {request.request_id: ([], [], []) for request in requests}
    upcoming = list(requests)
    while upcoming or core.has_work():
        for _ in range(len(upcoming) if draw is None else draw.choice((0, 0, 1, 2, 5))):
            if upcoming:
                core.add_request(upcoming.pop(0))
        done = core.step()
        for output in done.outputs if done is not None else ():
            if output.error:
                raise RuntimeError(f"request {output.request_id} failed: {output.error}")
            tokens, logprobs, of_prompt = received[output.request_id]
            tokens += output.new_token_ids
            for into, new in ((logprobs, output.new_logprobs), (of_prompt, output.new_prompt_logprobs)):
                into += [(tuple(entry.token_ids), tuple(entry.logprobs), entry.rank) for entry in new]
    return received


def answers(
    run: Run, subject: Subject, turns: list[tuple[Requests, random.Random | None]], **settings: Any
) -> tuple[list[Received], Any]:
    """Return what one engine answers in each turn (requests, when they arrive), and the scheduler's counts."""
    knobs = {
        "max_model_len": subject.length,
        "num_gpu_blocks_override": 4096,
        "enable_prefix_caching": True,
        **settings,
    }
    with stepped_core(run.settings, subject.folder, **knobs) as core:
        core.scheduler.config = replace(core.scheduler.config, look_ahead=False)  # or it would not fill a small pool
        return [serve(core, requests, draw) for requests, draw in turns], core.scheduler.stats()


def invariance_cases(run: Run) -> None:
    """Add a case for each kind of traffic. Without the flag answers may differ, and it only prints how many do."""
    for subject in subjects(run):
        flags: dict[str, Any] = {"batch_invariant": True, "dtype": "bfloat16"}
        one_by_one: Any = [([request], None) for request in subject.requests]
        each, _ = answers(run, subject, one_by_one, enable_prefix_caching=False, **flags)
        alone = {key: found for one in each for key, found in one.items()}
        tight = {"num_gpu_blocks_override": -(-subject.length // 16) + 4, "max_num_batched_tokens": 300}
        settings: dict[str, dict[str, Any]] = {
            "traffic": {},
            "chunks of 64": {"max_num_batched_tokens": 64, "max_num_seqs": 64},
            "preemption": {**tight, "max_num_seqs": 64},
            "eager": {"enforce_eager": True},
            "full graphs": {"compilation_config": {"cudagraph_mode": "FULL"}},
            "without the flag": {"batch_invariant": False},
        }
        draw = random.Random(subject.name)
        for label, more in settings.items():
            # cold; graphs captured and prefixes cached; all at once
            found, stats = answers(
                run, subject, [(subject.requests, arrive) for arrive in (draw, draw, None)], **flags | more
            )
            unlike = [
                f"request {key} in turn {turn}"
                for turn, one in enumerate(found)
                for key in alone
                if one[key] != alone[key]
            ]
            happened = f"{stats.num_preemptions} preemptions, {stats.prefix_cache_hits} tokens from the cache"
            said = f"{len(unlike)} of {3 * len(alone)} answers differ: {unlike[:3]}; {happened}"
            if label == "without the flag":
                run.note(f"{subject.name} {label}: {said}")
                continue
            shown = run.smoke or label != "preemption" or stats.num_preemptions > 0  # else nothing was preempted
            run.case(f"{subject.name} {label}", not unlike and shown, said)


def graph_cases(run: Run) -> None:
    """Add a case for each graph mode: in the same traffic its tokens are those of NONE."""
    torch.backends.cuda.matmul.allow_tf32 = False
    few: dict[str, Any] = {"num_gpu_blocks_override": 200, "max_num_batched_tokens": 300, "max_num_seqs": 24}
    for subject in subjects(run):
        expected: list[list[int]] = []
        for mode in GRAPH_MODES:
            # graph sizes are met, captured and replayed
            turns: Any = [(subject.requests, random.Random(turn)) for turn in range(3)]
            graphs = {"compilation_config": {"cudagraph_mode": mode}}
            found, stats = answers(run, subject, turns, dtype="float32", **few, **graphs)
            tokens = [tokens for one in found for tokens, _, _ in one.values()]
            expected = expected or tokens
            equal = sum(a == b for a, b in zip(tokens, expected, strict=True))
            said = f"{equal} of {len(tokens)} requests as with NONE, {stats.num_preemptions} preemptions"
            run.case(f"{subject.name} {mode}", equal == len(tokens), said)
