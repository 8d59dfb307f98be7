"""Rows of the offline engine: decode steps, prefill, time to first token, throughput. One engine serves many rows."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from h200_parts.bounds import Ceilings, decode_floor, distinct_experts, enough_experts, prefill_floor, run_floor
from h200_parts.experts import mean_distinct_experts
from h200_parts.models import BenchModel
from h200_parts.rows import BATCHES, Result
from h200_parts.settings import SEED, Settings
from headrace.cli.bench.datasets import BenchRequest, PromptMaker
from headrace.cli.bench.latency import measure, summarize_latency
from headrace.cli.bench.options import LatencyOptions
from headrace.cli.bench.throughput import summarize_throughput
from headrace.sampling_params import SamplingParams

Emit = Callable[[Result], None]
INPUT, OUTPUT = 128, 128
COUNTED = 128
"""Output tokens of a run in which experts are counted, at most."""
THROUGHPUT_SHAPES = {"128x512": (1000, 128, 512), "2048x256": (500, 2048, 256)}
"""(prompts, prompt tokens, output tokens)"""


class Bench:
    """One model's engine and what the chip could give it."""

    def __init__(self, settings: Settings, model: BenchModel, ceilings: Ceilings) -> None:
        from headrace.llm import LLM

        self.settings, self.model, self.ceilings = settings, model, ceilings
        self.cost = model.cost(settings.smoke)
        self._maker = PromptMaker(SEED, settings.vocab_size(model))
        self._stream = 0
        self._uncounted: list[tuple[Result, list[list[int]], int]] = []
        start = time.perf_counter()
        self.llm: Any = LLM(**settings.engine_knobs(model), skip_tokenizer_init=True)
        print(f"engine of {model.title} loaded in {time.perf_counter() - start:.1f} s", flush=True)

    def close(self) -> None:
        """Gives the device's memory back."""
        self.llm.shutdown()
        self.llm = None
        gc.collect()
        if self.settings.device == "cuda":
            import torch

            torch.cuda.empty_cache()

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Random token ids, other ones with every call."""
        self._stream += count
        first = self._stream - count
        return [
            self._maker.token_ids(BenchRequest(prompt_len=length, output_len=1, segments=[(first + i + 1, length)]))
            for i in range(count)
        ]

    def settle(self, row: Result, prompts: list[list[int]], output_len: int, emit: Emit) -> None:
        """A row is done. Those of a mixture of experts wait until theirs have been counted."""
        if self.cost.num_experts:
            self._uncounted.append((row, prompts, output_len))
        else:
            emit(row)

    def count_experts(self, emit: Emit) -> None:
        """A row counts only where a layer read enough distinct ones."""
        waiting, self._uncounted = self._uncounted, []
        if not waiting:
            return
        cost = self.cost
        cases = [(prompts, min(output_len, COUNTED)) for _, prompts, output_len in waiting]
        try:
            means = mean_distinct_experts(self.llm, self.run, cases)
        except Exception:  # what was timed is not lost with it
            for row, *_ in waiting:
                row.valid = False
                row.notes.append("experts were not counted")
                emit(row)
            raise
        for (row, prompts, output_len), found in zip(waiting, means, strict=True):
            tokens = (
                len(prompts) if output_len > 1 else min(sum(map(len, prompts)), self.llm.config.max_num_batched_tokens)
            )
            wanted = distinct_experts(cost.num_experts, cost.experts_per_token, tokens)
            row.valid = row.valid and enough_experts(cost, tokens, found)
            row.notes.append(f"a layer reads {found:.1f} distinct experts; uniformly chosen ones would be {wanted:.1f}")
            emit(row)

    def seconds(self, prompts: list[list[int]], output_len: int) -> float:
        return self.run(prompts, output_len)[0]

    def whole_and_first(
        self, prompts: list[list[int]], output_len: int, repeats: int
    ) -> tuple[list[float], list[float]]:
        """Seconds of whole runs of a batch, and of runs of one token in between, as `headrace bench latency` has them:
        its `summarize_latency` knows what a step takes."""
        # two to warm up: a size of graph is captured at its second use
        options = LatencyOptions(num_iters_warmup=2, num_iters=repeats, disable_tqdm=True, output_len=output_len)
        run = partial(self.seconds, prompts)
        run(1)  # what the prompts alone need, which a whole run to warm up does not show
        return measure(run, options)

    def run(self, prompts: list[list[int]], output_len: int) -> tuple[float, list[Any]]:
        """(seconds, outputs) of one greedy batch."""
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_len, detokenize=False)
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start, outputs


def decode_rows(bench: Bench, emit: Emit) -> None:
    """Steps as `headrace bench latency` computes them: whole runs, and runs of one token in between."""
    settings, name = bench.settings, bench.model.name
    input_len, output_len = settings.tokens(INPUT), settings.tokens(OUTPUT)
    prompts = {batch: bench.prompts(settings.requests(batch), input_len) for batch in BATCHES}
    for batch in BATCHES:
        size = len(prompts[batch])
        whole, first = bench.whole_and_first(prompts[batch], output_len, settings.repeats)
        found = summarize_latency(whole, first, output_len)
        row = Result(
            f"decode/{name}/{batch}",
            found["decode_step_ms"],
            samples=[(end - start) / (output_len - 1) * 1000 for end, start in zip(whole, first, strict=True)],
            tokens={"prompt": size * input_len, "output": size * output_len},
            bound=1000 * decode_floor(bench.cost, bench.ceilings, size, input_len + output_len / 2),
        )
        bench.settle(row, prompts[batch], output_len, emit)
        if batch == 1:
            row = Result(
                f"ttft/{name}/1x128",
                found["ttft_ms"],
                samples=[1000 * seconds for seconds in first],
                tokens={"prompt": input_len},
                bound=1000 * prefill_floor(bench.cost, bench.ceilings, 1, input_len),
            )
            bench.settle(row, prompts[batch], 1, emit)


def prefill_rows(bench: Bench, emit: Emit) -> None:
    """From prompts to one token of each."""
    settings = bench.settings
    length = settings.tokens(2048)
    for batch in (1, 8):
        size = settings.requests(batch)
        prompts = bench.prompts(size, length)
        for _ in range(2):
            bench.run(prompts, 1)
        samples = [1000 * bench.seconds(prompts, 1) for _ in range(settings.repeats)]
        row = Result(
            f"prefill/{bench.model.name}/{batch}x2048",
            median(samples),
            samples=samples,
            tokens={"prompt": size * length},
            bound=1000 * prefill_floor(bench.cost, bench.ceilings, size, length),
        )
        bench.settle(row, prompts, 1, emit)


def throughput_rows(bench: Bench, emit: Emit) -> None:
    """Single runs, after one short prompt. 128/512 counts output tokens, 2048/256 all of them."""
    settings, name = bench.settings, bench.model.name
    for shape, (count, prompt_len, output) in THROUGHPUT_SHAPES.items():
        if shape != "128x512" and bench.cost.num_experts:
            continue  # vLLM's figure of this shape is not there
        count, input_len, output_len = settings.requests(count), settings.tokens(prompt_len), settings.tokens(output)
        prompts = bench.prompts(count, input_len)
        bench.run(bench.prompts(1, input_len), 2)
        seconds, outputs = bench.run(prompts, output_len)
        found = summarize_throughput(outputs, seconds)
        kv_tokens = kv_cache_tokens(bench)
        floor = run_floor(bench.cost, bench.ceilings, count, input_len, output_len, kv_tokens)
        short = shape == "128x512"
        tokens = found["total_num_output_tokens"] if short else found["total_num_tokens"]
        row = Result(
            f"throughput/{name}/{shape}",
            tokens / seconds,
            tokens={
                "prompt": found["total_num_tokens"] - found["total_num_output_tokens"],
                "output": found["total_num_output_tokens"],
            },
            bound=tokens / floor,
            notes=[f"{seconds:.2f} s", f"KV cache of {kv_tokens:,} tokens", f"preemptions {preemptions(bench)}"],
        )
        if found["total_num_output_tokens"] != count * output_len:
            row.valid = False
            row.notes.append(f"{count * output_len:,} output tokens were asked for")
        bench.settle(row, prompts, output_len, emit)


def kv_cache_tokens(bench: Bench) -> int:
    decisions = {decision.field: decision.value for decision in bench.llm.decisions}
    tokens: int = decisions["num_gpu_blocks"] * bench.llm.config.block_size
    return tokens


def preemptions(bench: Bench) -> int:
    count: int = bench.llm.stats().num_preemptions
    return count
