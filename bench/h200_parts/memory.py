"""Checks a GPU that runs out of memory: nothing crashes, and the log says what became smaller. Loading in fp8 must not
need much more memory than the weights."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import TestCase
from unittest.mock import patch

import torch

from h200_parts.engines import greedy_tokens
from h200_parts.models import EIGHT_B, LLAMA_8B, TOY
from h200_parts.run import Run
from headrace import LLM
from headrace.attention.table import load_backend, select_backend
from headrace.distributed.mesh import Mesh
from headrace.executor.uniproc import UniprocExecutor
from headrace.kernels.table import select_kernels
from headrace.layers.context import LayerContext
from headrace.model_config import ModelConfig
from headrace.models.loader import load_model
from headrace.models.served import attention_specs

GIB = 1 << 30
MOST = 1.1
"""times the weights, of what loading in fp8 may take"""
SHOWN = ("Memory of", "instead of", "no memory", "no room", "num_gpu_blocks", "did not fit")
"""The log's lines with one of these are printed."""


HOG = """
import sys, torch
torch.zeros(1, device="cuda")
left = torch.cuda.mem_get_info()[0] - int(float(sys.argv[1]) * 2**30)
taken = torch.empty(max(1, left), dtype=torch.uint8, device="cuda")
print("taken", flush=True)
sys.stdin.read()
"""


@contextmanager
def hog(gib_left: float) -> Iterator[None]:
    """Let another process hold all but `gib_left` of the GPU."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    command = [sys.executable, "-c", HOG, str(gib_left)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            if child.stdout.readline() != "taken\n":
                raise RuntimeError("the process that should hold the GPU's memory has ended")
            yield
        finally:
            child.kill()


def serve(llm: LLM, count: int = 40, length: int = 700, tokens: int = 20) -> list[list[int]]:
    prompts = [[2 + (i * 131 + j * 7) % 128000 for j in range(1 + (length * i) % 1500)] for i in range(count)]
    return greedy_tokens(llm, prompts, tokens)


def whole(answers: list[list[int]], tokens: int = 20) -> bool:
    return all(len(answer) == tokens for answer in answers)


def equal(answers: list[list[int]], expected: list[list[int]]) -> str:
    return f"{sum(a == b for a, b in zip(answers, expected, strict=True))} of {len(answers)} answers as without it"


class Cases:
    """Holds the cases, in all of which memory is short indeed; what follows of an allocation that fails at a certain
    place is tested without a GPU. Each returns whether it passed, and what to print."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.log: list[str] = []
        """what headrace logs during a case"""

    def said(self, *words: str) -> bool:
        """Tell whether one line of the log holds all of `words`."""
        return any(all(word in line for word in words) for line in self.log)

    def engine(self, **settings: Any) -> LLM:
        return LLM(self.model, load_format="dummy", skip_tokenizer_init=True, **settings)

    def hog(self) -> tuple[bool, str]:
        """Another process holds most of the GPU: the plan fits into the free memory."""
        with hog(12), self.engine() as llm:
            fine = whole(serve(llm))
            free = torch.cuda.mem_get_info()[0]
        return fine and free > 0 and self.said("num_gpu_blocks"), f"{free / GIB:.2f} of 12 GiB left"

    def tiny(self) -> tuple[bool, str]:
        """So little is free that neither the usual step nor the usual context length fits."""
        with hog(7), self.engine() as llm:
            fine = whole(serve(llm, count=5, length=100, tokens=4), 4)
        smaller = [name for name in ("max_num_batched_tokens", "max_model_len") if self.said(name, "instead of")]
        return fine and bool(smaller), f"smaller: {', '.join(smaller) or 'nothing'}"

    def cache(self) -> tuple[bool, str]:
        """Memory that was free when profiled is gone when the cache is allocated: the cache gets smaller."""
        initialize, hogs = UniprocExecutor.initialize_cache, [hog(8)]
        with ExitStack() as others:

            def late(executor: UniprocExecutor, num_pages: int) -> Any:
                while hogs:
                    others.enter_context(hogs.pop())
                return initialize(executor, num_pages)

            with patch.object(UniprocExecutor, "initialize_cache", late), self.engine() as llm:
                fine = whole(serve(llm))
                pages = llm._core.facts.num_pages
        return fine and self.said("num_gpu_blocks", "did not fit"), f"{pages} pages"

    def taken(self) -> tuple[bool, str]:
        """Another process takes the rest while we serve: less is left than a large step needs."""
        with self.engine(gpu_memory_utilization=0.3, enable_prefix_caching=False) as llm:
            expected = serve(llm)
            with hog(0.15):
                answers = serve(llm)
        return whole(answers) and self.said("found no memory"), equal(answers, expected)


def memory_cases(run: Run) -> None:
    """Run each of Cases. Whatever it raises, it has failed, and the next one runs."""
    torch.cuda.init()
    cases = Cases(run.settings.write_config("8b8l", EIGHT_B | {"num_hidden_layers": 8}))
    each: list[Callable[[], tuple[bool, str]]] = [cases.hog, cases.tiny, cases.cache, cases.taken]
    for case in each:
        with TestCase().assertLogs("headrace", "DEBUG") as log:
            cases.log = log.output
            try:
                ok, said = case()
            except Exception as error:
                ok, said = False, f"{type(error).__name__}: {str(error)[:300]}"
        run.case(case.__name__, ok, said)
        for line in log.output:
            if any(word in line for word in SHOWN):
                run.note(line)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def fp8_memory_cases(run: Run) -> None:
    """Load dummies of the 8B as they are and to fp8, which must peak below MOST times the weights. On a CPU nothing is
    measured."""
    device, on_gpu = torch.device(run.settings.device), run.settings.device == "cuda"
    config = ModelConfig.from_dict(LLAMA_8B | (TOY if run.smoke else {}))
    specs = attention_specs(config, tp_size=1, block_size=16, dtype="bfloat16", device_type=device.type)
    backend, kernels = load_backend(select_backend(specs).name), select_kernels(device.type)
    context = LayerContext(Mesh(), kernels, backend, specs, torch.bfloat16, device)
    for quantization in (None, "fp8", "ptpc_fp8"):
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        weights = load_model(Path("nowhere"), config, context, "dummy", 0, quantization).weight_bytes
        ratio = (torch.cuda.max_memory_allocated() - before) / weights if on_gpu else 0.0
        said = f"weights {weights / GIB:.2f} GiB, peak {ratio:.3f} x"
        run.case(f"dummy 8B {quantization or 'bf16'}", quantization is None or ratio < MOST, said)
