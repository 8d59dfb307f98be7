"""Checks a GPU that runs out of memory: nothing crashes, and the log says what became smaller, or an error of one line
says why nothing starts."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from server_process import Server, serving

from h200_parts.engines import greedy_tokens
from h200_parts.models import EIGHT_B
from h200_parts.run import Run
from h200_parts.serving import START_SECONDS, run_load
from headrace import LLM
from headrace.errors import OutOfMemoryError
from headrace.executor.uniproc import UniprocExecutor

GIB = 1 << 30
SHOWN = ("Memory of", "instead of", "no memory", "no room", "num_gpu_blocks", "did not fit")
"""The log's lines with one of these are printed."""


class LogLines(logging.Handler):
    """Keeps what headrace logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")

    def said(self, *words: str) -> bool:
        """Tell whether one line holds all of `words`."""
        return any(all(word in line for word in words) for line in self.lines)


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

    def __init__(self, model: str, log: LogLines) -> None:
        self.model, self.log = model, log

    def engine(self, **settings: Any) -> LLM:
        return LLM(self.model, load_format="dummy", skip_tokenizer_init=True, **settings)

    def hog(self) -> tuple[bool, str]:
        """Another process holds most of the GPU: the plan fits into the free memory."""
        with hog(12), self.engine() as llm:
            fine = whole(serve(llm))
            free = torch.cuda.mem_get_info()[0]
        return fine and free > 0 and self.log.said("num_gpu_blocks"), f"{free / GIB:.2f} of 12 GiB left"

    def tiny(self) -> tuple[bool, str]:
        """So little is free that neither the usual step nor the usual context length fits."""
        with hog(7), self.engine() as llm:
            fine = whole(serve(llm, count=5, length=100, tokens=4), 4)
        smaller = [name for name in ("max_num_batched_tokens", "max_model_len") if self.log.said(name, "instead of")]
        return fine and bool(smaller), f"smaller: {', '.join(smaller) or 'nothing'}"

    def share(self) -> tuple[bool, str]:
        """A share smaller than the weights gives an error of one line."""
        return self.one_line("", gpu_memory_utilization=0.01)

    def weights(self) -> tuple[bool, str]:
        """Weights that do not fit give an error of one line."""
        with hog(2):
            return self.one_line("the weights do not fit")

    def one_line(self, with_words: str, **settings: Any) -> tuple[bool, str]:
        """Start an engine, which must raise an OutOfMemoryError of one line."""
        try:
            self.engine(**settings).shutdown()
        except OutOfMemoryError as error:
            return with_words in str(error) and "\n" not in str(error), str(error)
        return False, "it started"

    def cache(self) -> tuple[bool, str]:
        """Memory that was free when profiled is gone when the cache is allocated: the cache gets smaller."""
        initialize = UniprocExecutor.initialize_cache
        with ExitStack() as others:
            taken: list[bool] = []

            def late(executor: UniprocExecutor, num_pages: int) -> Any:
                if not taken:
                    taken.append(True)
                    others.enter_context(hog(8))
                return initialize(executor, num_pages)

            with patch.object(UniprocExecutor, "initialize_cache", late), self.engine() as llm:
                fine = whole(serve(llm))
                pages = llm._core.facts.num_pages
        return fine and self.log.said("num_gpu_blocks", "did not fit"), f"{pages} pages"

    def taken(self) -> tuple[bool, str]:
        """Another process takes the rest while we serve: less is left than a large step needs."""
        with self.engine(gpu_memory_utilization=0.3, enable_prefix_caching=False) as llm:
            expected = serve(llm)
            with hog(0.15):
                answers = serve(llm)
        return whole(answers) and self.log.said("found no memory"), equal(answers, expected)


def memory_cases(run: Run) -> None:
    """Run each of Cases. Whatever it raises, it has failed, and the next one runs."""
    log = LogLines()
    logger = logging.getLogger("headrace")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(log)
    logger.propagate = False
    torch.cuda.init()
    cases = Cases(run.settings.write_config("8b8l", EIGHT_B | {"num_hidden_layers": 8}), log)
    each: list[Callable[[], tuple[bool, str]]] = [cases.hog, cases.tiny, cases.share, cases.weights, cases.cache]
    for case in (*each, cases.taken):
        log.lines.clear()
        try:
            ok, said = case()
        except Exception as error:
            ok, said = False, f"{type(error).__name__}: {str(error)[:300]}"
        run.case(case.__name__, ok, said)
        for line in log.lines:
            if any(word in line for word in SHOWN):
                run.note(line)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def two_instances(run: Run) -> None:
    """Serve from two engines, each with 0.45 of the GPU: the second starts after the first, or both start at once."""
    model = run.settings.write_config("8b", EIGHT_B | {"num_hidden_layers": 32})
    flags = [model, "--load-format", "dummy", "--skip-tokenizer-init", "--gpu-memory-utilization", "0.45"]
    for name in ("one after the other", "at once"):
        with ExitStack() as stack:
            servers: list[Server] = []
            for _ in range(2):
                servers.append(stack.enter_context(serving(flags)))
                if name != "at once":
                    servers[-1].wait_for_url(START_SECONDS)
            urls = [server.wait_for_url(START_SECONDS) for server in servers]
            failed = [run_load(run, url, 200, 600, 30)[0]["failed"] for url in urls]
            codes = [server.stop() for server in servers]
        run.case(name, not any(failed + codes), f"failed requests {failed}, exit codes {codes}")
        for number, server in enumerate(servers):
            for line in server.lines:
                if any(word in line for word in (*SHOWN, "Error")):
                    run.note(f"[{number}] {line}")
