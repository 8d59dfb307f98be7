"""--batch-invariant: a request's tokens and logprobs have the same bits alone and in any company; and what it costs."""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from graph_timing import graph_seconds
from h200_parts.numerics import write_random_model
from h200_parts.settings import Settings

from h200_cases_parts.report import EIGHT_B, Report
from headrace import LLM, SamplingParams
from headrace.config import EngineConfig
from headrace.engine.build import build_core
from headrace.hub import resolve_model_folder
from headrace.kernels.matmul import matmul, num_parts
from headrace.request import EngineCoreRequest

Got = dict[str, tuple[list[int], list[Any], list[Any]]]
"""request -> its tokens, their logprobs, its prompt's logprobs"""
ROWS = 2100
SIZES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (192, 64), (100, 172), (2048, 768))
TOKENS = (1, 2, 3, 8, 16, 17, 33, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 300, 512, 1000, 2048, ROWS)
WORST = 4e-3
"""||product - exact|| / ||exact||"""


def invariance_cases(report: Report) -> None:
    if not report.smoke:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for n, k in SIZES:
                if dtype == torch.bfloat16 or n * k <= 6144 * 4096:
                    same_rows(report, dtype, n, k)
        torch.cuda.empty_cache()
    big = write_random_model(report.work / "8b4l", Settings(report.work, smoke=report.smoke))
    vocab = json.loads((big / "config.json").read_text())["vocab_size"]
    if report.smoke:
        same_requests(report, "demo", resolve_model_folder("demo"), 500, (1, 5, 17, 60), 120, 4)
        same_requests(report, "8B of 4 layers", big, vocab, (1, 5, 30), 120, 4)
        return
    same_requests(report, "demo", resolve_model_folder("demo"), 500, (1, 5, 17, 60, 200, 400), 480, 30)
    same_requests(report, "8B of 4 layers", big, vocab, (1, 5, 17, 100, 300, 700), 1024, 40)


def same_rows(report: Report, dtype: torch.dtype, n: int, k: int) -> None:
    """Rows of a product have the same bits for every number of rows, wherever they stand."""
    weight = torch.randn(n, k, device="cuda").to(dtype) * 0.02
    bias = torch.randn(n, device="cuda").to(dtype)
    x = torch.randn(ROWS, k, device="cuda").to(dtype)
    whole = matmul(x, weight, bias)
    exact = F.linear(x[:256].double(), weight[:512].double(), bias[:512].double())
    error = float((whole[:256, :512].double() - exact).norm() / exact.norm())
    unlike = [
        (count, first)
        for count in TOKENS
        for first in sorted({0, (ROWS - count) // 3, ROWS - count})
        if not torch.equal(matmul(x[first : first + count], weight, bias), whole[first : first + count])
    ]
    said = f"error {error:.1e}, {num_parts(n, k, x.element_size())} parts, (tokens, first) that differ: {unlike[:6]}"
    report.case(f"matmul {n}x{k} {str(dtype)[6:]}", not unlike and error < WORST, said)


def requests_of(draw: random.Random, vocab: int, lengths: tuple[int, ...], tokens: int, num: int) -> list[Any]:
    """A third again as many share three quarters of another's prompt."""
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


def run(core: Any, requests: list[Any], draw: random.Random | None = None) -> Got:
    """All come at once, or, with `draw`, at random moments."""
    got: Got = {request.request_id: ([], [], []) for request in requests}
    upcoming = list(requests)
    while upcoming or core.has_work():
        for _ in range(len(upcoming) if draw is None else draw.choice((0, 0, 1, 2, 5))):
            if upcoming:
                core.add_request(upcoming.pop(0))
        done = core.step()
        for output in done.outputs if done is not None else ():
            if output.error:
                raise RuntimeError(f"request {output.request_id} failed: {output.error}")
            tokens, logprobs, of_prompt = got[output.request_id]
            tokens += output.new_token_ids
            logprobs += [(tuple(e.token_ids), tuple(e.logprobs), e.rank) for e in output.new_logprobs]
            of_prompt += [(tuple(e.token_ids), tuple(e.logprobs), e.rank) for e in output.new_prompt_logprobs]
    return got


def same_requests(
    report: Report, name: str, folder: Path, vocab: int, lengths: tuple[int, ...], length: int, num: int
) -> None:
    draw = random.Random(name)
    requests = requests_of(draw, vocab, lengths, 6 if report.smoke else 24, num)
    place: dict[str, Any] = {"device": "cuda", "gpu_memory_utilization": 0.5}
    if report.smoke:
        place = {"device": "cpu", "cpu_threads": 1}

    def start(**more: Any) -> Any:
        settings = {"num_gpu_blocks_override": 4096, "batch_invariant": True, **place, **more}
        settings |= {"dtype": "bfloat16"}
        config = EngineConfig(model=str(folder), max_model_len=length, **settings)
        core = build_core(config, folder, False)
        core.scheduler.config = replace(core.scheduler.config, look_ahead=False)  # a small pool is to be filled
        return core

    core = start(enable_prefix_caching=False)
    alone: Got = {}
    for request in requests:
        alone |= run(core, [request])
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
        unlike, said = [], []
        for turn in range(3):  # cold; graphs captured and prefixes cached; all at once
            got = run(core, requests, draw if turn < 2 else None)
            unlike += [(turn, key) for key in alone if got[key] != alone[key]]
            said += [first_difference(key, turn, alone, got) for at, key in unlike[:1] if at == turn]
        stats = core.scheduler.stats()
        core.shutdown()
        del core
        if not report.smoke:
            gc.collect()
            torch.cuda.empty_cache()
        happened = f"{stats.num_preemptions} preemptions, {stats.prefix_cache_hits} tokens from the cache"
        line = f"{len(unlike)} of {3 * len(requests)} answers differ; {happened}"
        if label == "without the flag":
            report.note(f"{name} {label}: {line}")
            continue
        seen = report.smoke or label != "preemption" or stats.num_preemptions > 0  # else it has shown nothing
        report.case(f"{name} {label}", not unlike and seen, "; ".join([line, *said]))


def first_difference(key: str, turn: int, alone: Got, got: Got) -> str:
    (_, wanted, of_prompt), (_, found, found_of_prompt) = alone[key], got[key]
    place = next((i for i, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b), None)
    values = "" if place is None else f": {wanted[place]} alone, {found[place]}"
    same = "equal" if of_prompt == found_of_prompt else "not equal"
    return f"first: request {key} in turn {turn} at output {place}{values}; prompt logprobs {same}"


def invariance_cost(report: Report) -> None:
    """A case fails only where it does not run; what it says is to be read."""
    for n, k in SIZES[:5]:
        weight_bytes = n * k * 2
        weights = [
            torch.randn(n, k, device="cuda").bfloat16() for _ in range(max(2, (256 << 20) // weight_bytes))
        ]  # more than the caches hold
        line = []
        for count in (1, 32, 128, 256, 512, 2048):
            x = torch.randn(count, k, device="cuda").bfloat16()
            ours = graph_seconds([lambda w=w, x=x: matmul(x, w) for w in weights])  # type: ignore[misc]
            theirs = graph_seconds([lambda w=w, x=x: F.linear(x, w) for w in weights])  # type: ignore[misc]
            line.append(f"{count}: {1e6 * ours:.0f}/{1e6 * theirs:.0f}")
        report.case(f"matmul {n}x{k}", True, f"us by tokens, ours/torch: {', '.join(line)}")
        del weights
    torch.cuda.empty_cache()
    model = report.model("8b", EIGHT_B | {"num_hidden_layers": 32})
    for flag in (False, True):
        report.case("8B with the flag" if flag else "8B without the flag", True, engine_times(model, flag))
        gc.collect()
        torch.cuda.empty_cache()


def engine_times(model: str, flag: bool) -> str:
    draw = random.Random(0)
    with LLM(
        model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=8192,
        enable_prefix_caching=False,
        batch_invariant=flag,
    ) as llm:

        def seconds(batch: int, output: int, prompt: int = 128) -> float:
            prompts = [[draw.randrange(1000, 100000) for _ in range(prompt)] for _ in range(batch)]
            params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - began

        def step_ms(batch: int, prompt: int = 128) -> float:
            seconds(batch, 8, prompt)
            each = (seconds(batch, 129, prompt) - seconds(batch, 1, prompt) for _ in range(3))
            return statistics.median(each) / 128 * 1000

        steps = ", ".join(f"{batch}: {step_ms(batch):.2f}" for batch in (1, 32, 128))
        long = step_ms(1, 4096)
        prefill = statistics.median([seconds(1, 1, 2048) for _ in range(7)][2:]) * 1000
        rate = 1000 * 128 / seconds(1000, 128)
    return (
        f"decode step ms by batch {steps}; 1 at 4096 keys: {long:.2f}; prefill of 2048: {prefill:.1f} ms; "
        f"1000 x 128/128: {rate:.0f} output tok/s"
    )
