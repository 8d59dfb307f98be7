"""Memory that ends: nothing may crash, and the log says what became smaller, or one line says why nothing starts."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from h200_cases_parts.graphs import runner_of
from h200_cases_parts.report import EIGHT_B, Report
from headrace import LLM, SamplingParams
from headrace.errors import OutOfMemoryError
from headrace.executor.uniproc import UniprocExecutor
from headrace.runner import worker

GIB = 1 << 30
TOO_MUCH = 1 << 50
"""bytes: asking for them is how an allocation is made to fail"""
TELLING = ("Memory of", "instead of", "no memory", "no room", "num_gpu_blocks", "did not fit")
"""Of the log's lines, those with one of these are shown."""


class Lines(logging.Handler):
    """What headrace has logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")

    def said(self, *words: str) -> bool:
        """one line with all of them"""
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
    """Another process holds all but so much of the GPU."""
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
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def whole(answers: list[list[int]], tokens: int = 20) -> bool:
    return all(len(answer) == tokens for answer in answers)


def equal(found: list[list[int]], expected: list[list[int]]) -> str:
    return f"{sum(a == b for a, b in zip(found, expected, strict=True))} of {len(found)} answers as without it"


class Cases:
    """Each gives (whether it went well, what to say)."""

    def __init__(self, model: str, log: Lines) -> None:
        self.model, self.log = model, log

    def engine(self, **settings: Any) -> LLM:
        return LLM(self.model, load_format="dummy", skip_tokenizer_init=True, **settings)

    def hog(self) -> tuple[bool, str]:
        """Somebody else holds most of the GPU: the plan fits into what is free."""
        with hog(12), self.engine() as llm:
            fine = whole(serve(llm))
            free = torch.cuda.mem_get_info()[0]
        return fine and free > 0 and self.log.said("num_gpu_blocks"), f"{free / GIB:.2f} of 12 GiB left"

    def tiny(self) -> tuple[bool, str]:
        """So little is free that neither the usual step nor the usual context fits."""
        with hog(7), self.engine() as llm:
            fine = whole(serve(llm, count=5, length=100, tokens=4), 4)
        smaller = [name for name in ("max_num_batched_tokens", "max_model_len") if self.log.said(name, "instead of")]
        return fine and bool(smaller), f"smaller: {', '.join(smaller) or 'nothing'}"

    def share(self) -> tuple[bool, str]:
        """A share smaller than the weights is one line."""
        return self.one_line("", gpu_memory_utilization=0.01)

    def weights(self) -> tuple[bool, str]:
        """Weights that do not fit are one line."""
        with hog(2):
            return self.one_line("the weights do not fit")

    def one_line(self, with_words: str, **settings: Any) -> tuple[bool, str]:
        try:
            self.engine(**settings).shutdown()
        except OutOfMemoryError as error:
            return with_words in str(error) and "\n" not in str(error), str(error)
        return False, "it started"

    def step(self) -> tuple[bool, str]:
        """The profiled step does not fit: fewer tokens."""
        measure = worker.measure_memory

        def tight(runner: Any, *rest: Any) -> Any:
            if runner.limits.max_num_batched_tokens > 1024:
                torch.empty(TOO_MUCH, dtype=torch.uint8, device="cuda")
            return measure(runner, *rest)

        with patch.object(worker, "measure_memory", tight), self.engine(gpu_memory_utilization=0.3) as llm:
            tokens = llm._client.facts.config.max_num_batched_tokens
            fine = whole(serve(llm))
        return fine and tokens == 1024 and self.log.said("max_num_batched_tokens = 1024"), f"{tokens} tokens a step"

    def cache(self) -> tuple[bool, str]:
        """What was free when profiled is taken when the cache is allocated."""
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
                pages = llm._client.facts.num_pages
        return fine and self.log.said("num_gpu_blocks", "did not fit"), f"{pages} pages"

    def serving(self) -> tuple[bool, str]:
        """Allocations fail in a step: whole answers, smaller steps after it."""
        with self.engine(gpu_memory_utilization=0.3, enable_prefix_caching=False) as llm:
            expected = serve(llm)
            model = runner_of(llm).model
            forward = model.forward
            failures: list[int] = []

            def failing(input_ids: Any, *rest: Any) -> Any:
                if len(input_ids) > 1500 and len(failures) < 3:
                    failures.append(len(input_ids))
                    torch.empty(TOO_MUCH, dtype=torch.uint8, device="cuda")
                return forward(input_ids, *rest)

            model.forward = failing
            found = serve(llm)
            model.forward = forward
        fine = bool(failures) and self.log.said("found no memory") and self.log.said("max_num_batched_tokens = ")
        return fine and whole(found), f"failed at {failures} tokens; {equal(found, expected)}"

    def taken(self) -> tuple[bool, str]:
        """Somebody else takes the rest while we serve: less is left than a large step needs."""
        with self.engine(gpu_memory_utilization=0.3, enable_prefix_caching=False) as llm:
            expected = serve(llm)
            with hog(0.15):
                found = serve(llm)
        return whole(found) and self.log.said("found no memory"), equal(found, expected)

    def graphs(self) -> tuple[bool, str]:
        """No room for a graph: that size stays eager, the others are captured."""
        with self.engine(gpu_memory_utilization=0.3) as llm:
            device = runner_of(llm).graphs._device
            new_graph, count = device.new_graph, itertools.count()

            def failing() -> Any:
                if next(count) < 2:
                    torch.empty(TOO_MUCH, dtype=torch.uint8, device="cuda")
                return new_graph()

            device.new_graph = failing
            answers = [serve(llm, count=6) for _ in range(3)]  # sizes come up, are captured, are replayed
        said = self.log.said("no room for a") and self.log.said("captured a")
        return said and all(map(whole, answers)), ""


def memory_cases(report: Report) -> None:
    log = Lines()
    logger = logging.getLogger("headrace")
    logger.setLevel(logging.INFO)
    logger.addHandler(log)
    logger.propagate = False
    torch.cuda.init()
    cases = Cases(report.model("8b8l", EIGHT_B | {"num_hidden_layers": 8}), log)
    each: list[Callable[[], tuple[bool, str]]] = [cases.hog, cases.tiny, cases.share, cases.weights, cases.step]
    each += [cases.cache, cases.serving, cases.taken, cases.graphs]
    for case in each:
        log.lines.clear()
        try:
            ok, said = case()
        except Exception as error:  # whatever ends an engine is what these cases look for
            ok, said = False, f"{type(error).__name__}: {str(error)[:300]}"
        report.case(case.__name__, ok, said)
        for line in log.lines:
            if any(word in line for word in TELLING):
                report.note(line)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


INSTANCE = """
import logging, sys, torch
sys.path[:0] = {path!r}
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
from headrace import LLM, SamplingParams
with LLM({model!r}, load_format="dummy", skip_tokenizer_init=True, gpu_memory_utilization=0.45) as llm:
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    for turn in range(4):
        outputs = llm.generate([[2 + i, 5, 7] * 200 for i in range(200)], params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == 30 for output in outputs)
        free = torch.cuda.mem_get_info()[0] >> 20
        print("SERVED", turn, llm._client.facts.num_pages, "pages,", free, "MiB free", flush=True)
    sys.stdin.read()
print("DONE", flush=True)
"""


class Instance:
    """A whole engine in a process of its own, which keeps its memory until told to end."""

    def __init__(self, model: str) -> None:
        code = INSTANCE.format(path=sys.path, model=model)
        command = [sys.executable, "-c", code]
        self.lines: list[str] = []
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.served = threading.Event()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self.lines.append(line.rstrip())
            if line.startswith("SERVED 3"):
                self.served.set()
        self.served.set()  # it has ended

    def end(self) -> bool:
        """Whether all went well."""
        assert self.child.stdin is not None
        self.served.wait(80)
        self.child.stdin.close()
        try:
            self.child.wait(20)
        except subprocess.TimeoutExpired:
            self.child.kill()
        self.reader.join(5)
        return self.child.returncode == 0 and "DONE" in self.lines


def two_instances(report: Report) -> None:
    model = report.model("8b", EIGHT_B | {"num_hidden_layers": 32})
    for name in ("one after the other", "at once"):
        instances = [Instance(model)]
        if name != "at once":
            instances[0].served.wait(80)
        time.sleep(0.1)
        instances.append(Instance(model))
        instances[1].served.wait(80)
        ends = [instance.end() for instance in instances]
        report.case(name, all(ends), "" if all(ends) else f"ended well: {ends}")
        for number, (instance, fine) in enumerate(zip(instances, ends, strict=True)):
            wanted = (*TELLING, "SERVED 3", "Error")
            for line in instance.lines if fine else instance.lines[-15:]:
                if not fine or any(word in line for word in wanted):
                    report.note(f"[{number}] {line}")
