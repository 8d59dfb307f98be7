"""Measures the offline engine: decode steps, prefill, time to first token, throughput. One engine serves many rows."""

from __future__ import annotations

import gc
import time
from functools import partial
from statistics import median
from typing import Any

from h200_parts.bounds import (
    Ceilings,
    decode_floor,
    distinct_experts,
    enough_experts,
    prefill_floor,
    run_floor,
)
from h200_parts.experts import mean_distinct_experts, spread_tokens
from h200_parts.models import BenchModel
from h200_parts.rows import SPECS, Result
from h200_parts.run import Run
from h200_parts.settings import SEED
from headrace.cli.bench.datasets import BenchRequest, PromptMaker
from headrace.cli.bench.latency import measure, summarize_latency
from headrace.cli.bench.options import LatencyOptions
from headrace.cli.bench.throughput import summarize_throughput
from headrace.sampling_params import SamplingParams

INPUT, OUTPUT = 128, 128
THROUGHPUT_SHAPES = {"128x512": (1000, 128, 512), "2048x256": (500, 2048, 256), "1000x1000": (1000, 1000, 1000)}
"""(prompts, prompt tokens, output tokens)"""


class Bench:
    """Holds one model's engine, and what is known about the chip."""

    def __init__(self, run: Run, model: BenchModel, ceilings: Ceilings, **knobs: Any) -> None:
        """`knobs`: engine settings beside those that all rows share."""
        from headrace.llm import LLM

        self.emit, self.settings, self.model, self.ceilings = run.emit, run.settings, model, ceilings
        self.cost = model.cost(run.smoke)
        self._maker = PromptMaker(SEED, self.settings.vocab_size(model))
        self._stream = 0
        self._experts: dict[int, float] = {}
        """batch size -> distinct experts that a layer reads"""
        start = time.perf_counter()
        self.llm: Any = LLM(**self.settings.engine_knobs(model) | knobs, skip_tokenizer_init=True)
        if self.cost.num_experts:
            spread_tokens(self.llm, SEED)
            self.count_experts()
        print(f"engine of {model.title} loaded in {time.perf_counter() - start:.1f} s", flush=True)

    @property
    def core(self) -> Any:
        """The engine core, which runs in this process."""
        return self.llm._core

    def close(self) -> None:
        """Free the device's memory."""
        self.llm.shutdown()
        self.llm = None
        gc.collect()
        if self.settings.device == "cuda":
            import torch

            torch.cuda.empty_cache()

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Return random token ids, different ones with every call."""
        self._stream += count
        first = self._stream - count
        return [
            self._maker.token_ids(BenchRequest(prompt_len=length, output_len=1, segments=[(first + i + 1, length)]))
            for i in range(count)
        ]

    def count_experts(self) -> None:
        """Count the experts that a layer reads in decode steps of each batch size."""
        length = self.settings.tokens(INPUT), self.settings.tokens(OUTPUT)
        for batch in map(self.settings.requests, self.model.batches):
            prompts = self.prompts(batch, length[0])
            mean = mean_distinct_experts(self.llm, batch, partial(self.run, prompts, length[1]))
            self._experts[batch] = mean

    def finish_row(self, row: Result, batch: int) -> None:
        """Emit a finished row. One of a mixture of experts is valid only where decode steps of as many requests, or of
        the next smaller batch that was counted, or else of the smallest, read enough distinct ones."""
        if self._experts:
            counted = max((size for size in self._experts if size <= batch), default=min(self._experts))
            cost = self.cost
            mean, uniform = self._experts[counted], distinct_experts(cost.num_experts, cost.experts_per_token, counted)
            row.valid = row.valid and enough_experts(cost, counted, mean)
            row.notes.append(
                f"a layer reads {mean:.1f} distinct experts at batch {counted}; uniform choices {uniform:.1f}"
            )
        self.emit(row)

    def seconds(self, prompts: list[list[int]], output_len: int) -> float:
        return self.run(prompts, output_len)[0]

    def run(self, prompts: list[list[int]], output_len: int, **requests: Any) -> tuple[float, list[Any]]:
        """Run one greedy batch; return its seconds and outputs. `requests`: what `LLM.generate` is told of them
        besides."""
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_len, detokenize=False)
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False, **requests)
        return time.perf_counter() - start, outputs


def decode_rows(bench: Bench) -> None:
    """Measure steps as `headrace bench latency` does: whole runs, and runs of one token in between."""
    settings, name = bench.settings, bench.model.name
    input_len, output_len = settings.tokens(INPUT), settings.tokens(OUTPUT)
    # two to warm up: a graph size is captured at its second use
    options = LatencyOptions(num_iters_warmup=2, num_iters=settings.repeats, disable_tqdm=True, output_len=output_len)
    for batch in bench.model.batches:
        size = settings.requests(batch)
        prompts = bench.prompts(size, input_len)
        run = partial(bench.seconds, prompts)
        run(1)  # warms up what prompts alone need, which a whole run does not
        whole, first = measure(run, options)
        summary = summarize_latency(whole, first, output_len)
        row = Result(
            f"decode/{name}/{batch}",
            summary["decode_step_ms"],
            samples=[(end - start) / (output_len - 1) * 1000 for end, start in zip(whole, first, strict=True)],
            tokens={"prompt": size * input_len, "output": size * output_len},
            bound=1000 * decode_floor(bench.cost, bench.ceilings, size, input_len + output_len / 2),
        )
        bench.finish_row(row, size)
        if batch == 1:
            row = Result(
                f"ttft/{name}/1x128",
                summary["ttft_ms"],
                samples=[1000 * seconds for seconds in first],
                tokens={"prompt": input_len},
                bound=1000 * prefill_floor(bench.cost, bench.ceilings, 1, input_len),
            )
            bench.finish_row(row, 1)


def prefill_rows(bench: Bench) -> None:
    """Measure the time from prompts to one token of each, of the sizes that the table has rows of."""
    settings = bench.settings
    for name in [name for name in SPECS if name.startswith(f"prefill/{bench.model.name}/")]:
        batch, tokens = map(int, name.split("/")[-1].split("x"))
        size, length = settings.requests(batch), settings.tokens(tokens)
        prompts = bench.prompts(size, length)
        for _ in range(2):
            bench.run(prompts, 1)
        samples = [1000 * bench.seconds(prompts, 1) for _ in range(settings.repeats)]
        row = Result(
            name,
            median(samples),
            samples=samples,
            tokens={"prompt": size * length},
            bound=1000 * prefill_floor(bench.cost, bench.ceilings, size, length),
        )
        bench.finish_row(row, size)


def throughput_rows(bench: Bench) -> None:
    """Measure single runs, after one short prompt. 128/512 counts output tokens, 2048/256 all of them."""
    settings, name = bench.settings, bench.model.name
    for shape, (count, prompt_len, output) in THROUGHPUT_SHAPES.items():
        if f"throughput/{name}/{shape}" not in SPECS:
            continue
        count, input_len, output_len = settings.requests(count), settings.tokens(prompt_len), settings.tokens(output)
        prompts = bench.prompts(count, input_len)
        bench.run(bench.prompts(1, input_len), 2)
        seconds, outputs = bench.run(prompts, output_len)
        summary = summarize_throughput(outputs, seconds)
        total, made = summary["total_num_tokens"], summary["total_num_output_tokens"]
        tokens = total if shape == "2048x256" else made
        kv_tokens = kv_cache_tokens(bench, input_len + output_len)
        floor = run_floor(bench.cost, bench.ceilings, count, input_len, output_len, kv_tokens)
        preemptions = bench.llm.stats().num_preemptions
        row = Result(
            f"throughput/{name}/{shape}",
            tokens / seconds,
            tokens={"prompt": total - made, "output": made},
            bound=tokens / floor,
            notes=[f"{seconds:.2f} s", f"KV cache of {kv_tokens:,} tokens", f"preemptions {preemptions}"],
        )
        if made != count * output_len:
            row.valid = False
            row.notes.append(f"{count * output_len:,} output tokens were asked for")
        bench.finish_row(row, count)


def kv_cache_tokens(bench: Bench, length: int) -> int:
    """Return how many tokens of requests of so many the cache should hold."""
    facts = bench.core.facts
    tokens: int = facts.workers[0].layout.tokens_in(facts.num_pages, length)
    return tokens
