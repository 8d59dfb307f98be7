"""Measures what adapters (LoRA) cost: steps whose requests have them beside those of an engine without, taken in turn,
and what it does to running requests that another's adapter has to be loaded."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from safetensors.torch import save_file

from h200_parts.models import MODELS
from h200_parts.offline import INPUT, OUTPUT, Bench
from h200_parts.profile import idle_row
from h200_parts.rows import Result
from h200_parts.run import Run
from headrace.lora import LoRARequest
from headrace.models.adapters import CONFIG, EMBEDDING, HEAD, WEIGHTS, adapted_linears
from headrace.planner.shapes import shape_of
from headrace.request import EngineCoreRequest
from headrace.sampling_params import SamplingParams

RANK, SLOTS = 16, 32
STEPS = {"none": (32, 0), "32x8": (32, 8), "128x32": (128, 32)}
"""row -> requests, and adapters among them"""
LOADS, APART = 8, 24
"""Adapters that are loaded in a run, and steps from one to the next."""
RUNNING, USED = 31, 7
"""Requests that run meanwhile, and adapters among them."""


def adapter_rows(run: Run) -> None:
    """Measure steps, loads, and a profile of the steps that have most for adapters to do."""
    ceilings, settings, model = run.measure_chip(), run.settings, MODELS["bf16"]
    file, size = write_adapter(settings.work / "adapter", model.shape(run.smoke))
    linked = partial(link_adapter, settings.work, file)
    plain = Bench(run, model, ceilings, gpu_memory_utilization=0.4)
    slots = 4 if run.smoke else SLOTS
    seats = {"enable_lora": True, "max_loras": slots, "max_cpu_loras": 2 * slots, "max_lora_rank": RANK}
    adapted = Bench(run, model, ceilings, gpu_memory_utilization=0.85, **seats)
    try:
        adapters = [linked(number) for number in range(1, slots + 1)]
        for name, (batch, used) in STEPS.items():
            chosen = adapters[:used]
            times = step_times(plain, adapted, settings.requests(batch), chosen)
            without, with_adapters = (1000 * median(one) for one in times)
            run.emit(
                Result(
                    f"adapters/{name}",
                    with_adapters / without,
                    samples=[b / a for a, b in zip(*times, strict=True)],
                    bound=1 + 1000 * used * size / ceilings.read / without,
                    notes=[f"{with_adapters:.3f} ms against {without:.3f} ms of {batch} requests"],
                )
            )
        load_rows(run, adapted, adapters[: min(USED, slots - 1)], linked)
        for name, (batch, used) in STEPS.items():
            given = shared(adapters[:used], settings.requests(batch))
            run.emit(idle_row(adapted, f"adapters/{name}/idle", batch, lora_request=given))
    finally:
        plain.close()
        adapted.close()


def write_adapter(folder: Path, config: dict[str, Any]) -> tuple[Path, int]:
    """Write a random adapter of every linear in the layers; return its folder and the bytes of its matrices."""
    made, tensors = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    for name, (outputs, inputs) in adapted_linears(shape_of(config, "adapted").spec).items():
        if name in (EMBEDDING, HEAD) or name.endswith(("qkv_proj", "gate_up_proj")):
            continue
        for which, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
            values = torch.empty(shape).normal_(0, 1e-3, generator=made).to(torch.bfloat16)
            tensors[f"base_model.model.{name}.lora_{which}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    modules = sorted({name.split(".")[-3] for name in tensors})
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": modules}
    (folder / CONFIG).write_text(json.dumps(fields))
    return folder, sum(2 * one.numel() for one in tensors.values())


def link_adapter(work: Path, folder: Path, number: int) -> LoRARequest:
    """Return an adapter of its own that has the file of another one."""
    own = work / f"adapter-{number}"
    own.mkdir()
    for name in (CONFIG, WEIGHTS):
        os.link(folder / name, own / name)
    return LoRARequest(own.name, number, str(own))


def shared(adapters: list[LoRARequest], count: int) -> list[LoRARequest] | None:
    """Return the adapter of each of `count` requests, in turn; None: none has one."""
    return [adapters[place % len(adapters)] for place in range(count)] if adapters else None


def step_times(
    plain: Bench, adapted: Bench, batch: int, adapters: list[LoRARequest]
) -> tuple[list[float], list[float]]:
    """Return the seconds of decode steps without adapters and with them, of runs in turn."""
    settings, given = plain.settings, shared(adapters, batch)
    input_len, output_len = settings.tokens(INPUT), settings.tokens(OUTPUT)
    times: tuple[list[float], list[float]] = [], []
    for repeat in range(2 + settings.repeats):  # two to warm up
        prompts = plain.prompts(batch, input_len)
        for own, bench, requests in zip(times, (plain, adapted), (None, given), strict=True):
            first, whole = (bench.run(prompts, length, lora_request=requests)[0] for length in (1, output_len))
            if repeat >= 2:
                own.append((whole - first) / (output_len - 1))
    return times


def load_rows(run: Run, bench: Bench, resident: list[LoRARequest], linked: Any) -> None:
    """Let requests with adapters that are not loaded come in between, and in turn such whose adapters are."""
    delays, gaps = defaultdict[bool, list[float]](list), defaultdict[bool, list[float]](list)
    number = SLOTS
    for repeat in range(1 + run.settings.repeats):  # one to warm up
        for is_new in (False, True):
            newcomers = shared(resident, LOADS) or []
            if is_new:
                newcomers = [linked(number := number + 1) for _ in range(LOADS)]
            first, between = traffic(bench, resident, newcomers)
            if repeat:
                delays[is_new] += first
                gaps[is_new] += between
    of_new, of_resident = (1000 * median(delays[is_new]) for is_new in (True, False))
    slowest, usual = (1000 * quantiles(gaps[is_new], n=100)[-1] for is_new in (True, False))
    notes = [f"first token after {of_new:.1f} ms, at most {1000 * max(delays[True]):.1f}; {of_resident:.1f} if loaded"]
    run.emit(Result("adapters/load", of_new - of_resident, notes=notes))
    notes = [f"p99 {slowest:.2f} ms against {usual:.2f} ms, at most {1000 * max(gaps[True]):.2f} ms"]
    run.emit(Result("adapters/load-itl", slowest / usual, notes=notes))


def traffic(bench: Bench, resident: list[LoRARequest], newcomers: list[LoRARequest]) -> tuple[list[float], list[float]]:
    """Run long requests, and a short one more every so many steps; return the seconds to the first token of each short
    one, and those between two tokens of long ones."""
    core, apart = bench.core, 3 if bench.settings.smoke else APART
    length = apart * (len(newcomers) + 2)

    def request(name: str, prompt: list[int], tokens: int, adapter: LoRARequest) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        core.add_request(
            EngineCoreRequest(
                request_id=name, prompt_token_ids=prompt, params=params, max_tokens=tokens, seed=0, lora_request=adapter
            )
        )

    for number, prompt in enumerate(bench.prompts(RUNNING, bench.settings.tokens(INPUT))):
        request(f"long-{number}", prompt, length, resident[number % len(resident)])
    waiting, asked, delays, gaps, seen = list(newcomers), dict[str, float](), [], [], dict[str, float]()
    made = 0
    while core.has_work():
        if waiting and made >= apart * (1 + len(newcomers) - len(waiting)):
            name = f"short-{len(waiting)}"
            asked[name] = time.perf_counter()
            request(name, bench.prompts(1, 8)[0], 2, waiting.pop(0))
        outputs = core.step()
        now = time.perf_counter()
        for output in [] if outputs is None else outputs.outputs:
            name = output.request_id
            if output.error:
                raise RuntimeError(f"{name} failed: {output.error}")
            if name in asked:
                delays.append(now - asked.pop(name))
            elif name.startswith("long"):
                if made >= apart:
                    gaps.append(now - seen[name])
                seen[name] = now
                made += name == "long-0"
    return delays, gaps
