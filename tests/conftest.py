"""How the suite is shared among processes (`make test`, pytest -n): file by file, what takes longest first.

A file stays in one process, so that what its tests share is started once. Tests of several files run at the same time:
ports, folders, and processes that a test looks for must be its own.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import uvloop

ROOT = Path(__file__).parents[1]

CORES = len(os.sched_getaffinity(0))
MOST_WORKERS = 8
WORKER_BYTES = 3 * 2**30
"""torch, transformers, and the servers that a test starts"""
ONE_BY_ONE = ("tests/kernels/test_interpreted.py", "tests/kernels/test_compiled.py")
"""Each of their tests is a process of its own, and may run wherever there is room."""
LONGEST_FIRST = (
    *ONE_BY_ONE,
    "tests/kernels/",
    "tests/e2e/",
    "tests/runner/",
    "tests/unlike/",
    "tests/spec_decode/",
    "tests/distributed/",
    "tests/convert/test_quantize.py",
    "tests/engine/test_replicas.py",
    "tests/executor/",
    "tests/test_",
)
"""Beginnings of paths, in this order"""

MANY_MODULES = 300
_known = {"modules": 0}
"""as many as there were when garbage was last looked for in all that there is"""

os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
"""children of the tests find what is in `tests` too, though they search no working directory"""

THREADS = max(1, CORES // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
"""Of torch, in each process that shares the tests: more than there are cores for spin at OpenMP's barriers, which made
some tests ten times as long."""
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # before torch is imported, and for children
    os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without workers the longest come last, so that what is wrong is heard of early."""
    last = len(LONGEST_FIRST) if "PYTEST_XDIST_WORKER" in os.environ else -1

    def place(item: pytest.Item) -> int:
        matches = [number for number, start in enumerate(LONGEST_FIRST) if item.nodeid.startswith(start)]
        return matches[0] if matches else last

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What collection makes stays, so that looking for garbage while it runs takes a fifth of its time for nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What was collected is no garbage: to look through it takes 0.4 s, and each LLM of this process would do so, as it
    would through all that tests have imported. Nor does such an LLM have all cores of the machine, which others share.
    """
    from headrace import llm
    from headrace.planner import decisions

    gc.collect()
    gc.freeze()
    _known["modules"] = len(sys.modules)
    llm.gc = SimpleNamespace(collect=lambda: gc.collect(1), freeze=lambda: None, unfreeze=lambda: None)
    threads_of = decisions._cpu_threads

    def cpu_threads(ranks: int, beside_server: bool) -> tuple[int, str]:
        count, reason = threads_of(ranks, beside_server)
        return min(count, max(1, THREADS // ranks)), reason

    decisions._cpu_threads = cpu_threads


def pytest_runtest_setup() -> None:
    """Nor is what a file imports before its first test garbage: transformers and what it needs are half a million
    objects, and to look through them takes a second."""
    if len(sys.modules) > _known["modules"] + MANY_MODULES:
        _known["modules"] = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine on an event loop of its own, of the kind that serves."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    uvloop.run(pyfuncitem.obj(**arguments))
    return True


def pytest_unconfigure() -> None:
    gc.unfreeze()  # what ends with the process ends as usual


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return max(1, min(CORES, MOST_WORKERS, psutil.virtual_memory().available // WORKER_BYTES))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if nodeid.startswith(ONE_BY_ONE) else nodeid.split("::")[0]

    config.option.loadscopereorder = False  # in the order of collection
    return ByFile(config, log)
