"""Checks --batch-invariant: a request's tokens and logprobs have the same bits alone and in any company."""

from __future__ import annotations

import gc
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from h200_parts.numerics import write_random_model
from h200_parts.run import Run
from headrace.config import EngineConfig
from headrace.engine.build import build_core
from headrace.engine.core import EngineCore
from headrace.hub import resolve_model_folder
from headrace.kernels.cases import relative_error
from headrace.kernels.matmul import matmul, num_parts
from headrace.request import EngineCoreRequest
from headrace.sampling_params import SamplingParams

Received = dict[str, tuple[list[int], list[Any], list[Any]]]
"""request -> its tokens, their logprobs, its prompt's logprobs"""
ROWS = 2100
SIZES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (192, 64), (100, 172), (2048, 768))
"""outputs and inputs of products"""
TOKENS = (1, 2, 3, 8, 16, 17, 33, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 300, 512, 1000, 2048, ROWS)
WORST = 4e-3
"""||product - exact|| / ||exact||"""


def invariance_cases(run: Run) -> None:
    """Compare rows of products, and whole requests on the demo model and on layers of the 8B."""
    if not run.smoke:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for n, k in SIZES:
                if dtype == torch.bfloat16 or n * k <= 6144 * 4096:
                    same_rows(run, dtype, n, k)
        torch.cuda.empty_cache()
    demo, big = resolve_model_folder("demo"), write_random_model(run.settings.work / "8b4l", run.settings)
    vocab = json.loads((big / "config.json").read_text())["vocab_size"]
    if run.smoke:
        same_requests(run, "demo", demo, 500, (1, 5, 17, 60), 120, 4)
        same_requests(run, "8B of 4 layers", big, vocab, (1, 5, 30), 120, 4)
        return
    same_requests(run, "demo", demo, 500, (1, 5, 17, 60, 200, 400), 480, 30)
    same_requests(run, "8B of 4 layers", big, vocab, (1, 5, 17, 100, 300, 700), 1024, 40)


def same_rows(run: Run, dtype: torch.dtype, n: int, k: int) -> None:
    """Add a case: rows of a product have the same bits for every number of rows, wherever they stand."""
    weight = torch.randn(n, k, device="cuda").to(dtype) * 0.02
    bias = torch.randn(n, device="cuda").to(dtype)
    x = torch.randn(ROWS, k, device="cuda").to(dtype)
    whole = matmul(x, weight, bias)
    exact = F.linear(x[:256].double(), weight[:512].double(), bias[:512].double())
    error = relative_error(whole[:256, :512], exact.to(dtype))
    unlike = [
        (count, first)
        for count in TOKENS
        for first in sorted({0, (ROWS - count) // 3, ROWS - count})
        if not torch.equal(matmul(x[first : first + count], weight, bias), whole[first : first + count])
    ]
    said = f"error {error:.1e}, {num_parts(n, k, x.element_size())} parts, (tokens, first) that differ: {unlike[:6]}"
    run.case(f"matmul {n}x{k} {str(dtype)[6:]}", not unlike and error < WORST, said)


def requests_of(
    draw: random.Random, vocab: int, lengths: tuple[int, ...], tokens: int, num: int
) -> list[EngineCoreRequest]:
    """Return `num` random requests, and a third as many again that share three quarters of another's prompt."""
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


def serve(core: EngineCore, requests: list[EngineCoreRequest], draw: random.Random | None = None) -> Received:
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


def same_requests(
    run: Run, name: str, folder: Path, vocab: int, lengths: tuple[int, ...], length: int, num: int
) -> None:
    """Add a case for each kind of traffic. Without the flag answers may differ, and it only prints how many do."""
    draw = random.Random(name)
    requests = requests_of(draw, vocab, lengths, 6 if run.smoke else 24, num)

    def start(**more: Any) -> EngineCore:
        settings: dict[str, Any] = {"num_gpu_blocks_override": 4096, "batch_invariant": True, "dtype": "bfloat16"}
        settings |= run.settings.place(0.5) | more
        core = build_core(EngineConfig(model=str(folder), max_model_len=length, **settings), folder, False)
        core.scheduler.config = replace(core.scheduler.config, look_ahead=False)  # or it would not fill a small pool
        return core

    core = start(enable_prefix_caching=False)
    alone: Received = {}
    for request in requests:
        alone |= serve(core, [request])
    core.shutdown()
    tight = {"num_gpu_blocks_override": -(-length // 16) + 4, "max_num_batched_tokens": 300, "max_num_seqs": 64}
    settings: dict[str, dict[str, Any]] = {
        "traffic": {},
        "chunks of 64": {"max_num_batched_tokens": 64, "max_num_seqs": 64},
        "preemption": tight,
        "eager": {"enforce_eager": True},
        "full graphs": {"compilation_config": {"cudagraph_mode": "FULL"}},
        "without the flag": {"batch_invariant": False},
    }
    for label, more in settings.items():
        core = start(**more)
        unlike = []
        for turn in range(3):  # cold; graphs captured and prefixes cached; all at once
            received = serve(core, requests, draw if turn < 2 else None)
            unlike += [f"request {key} in turn {turn}" for key in alone if received[key] != alone[key]]
        stats = core.scheduler.stats()
        core.shutdown()
        del core
        if not run.smoke:
            gc.collect()
            torch.cuda.empty_cache()
        happened = f"{stats.num_preemptions} preemptions, {stats.prefix_cache_hits} tokens from the cache"
        said = f"{len(unlike)} of {3 * len(requests)} answers differ: {unlike[:3]}; {happened}"
        if label == "without the flag":
            run.note(f"{name} {label}: {said}")
            continue
        shown = run.smoke or label != "preemption" or stats.num_preemptions > 0  # else nothing was preempted
        run.case(f"{name} {label}", not unlike and shown, said)
