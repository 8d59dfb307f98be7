"""A rank that dies or hangs, whichever it is and whatever it does, takes its group along within seconds, and the error
names it; the next start works."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace import LLM, SamplingParams
from headrace.distributed.progress import Progress, RankProgress, blame
from headrace.errors import EngineDeadError
from headrace.executor import multiproc
from headrace.process import Child, spawn
from headrace.request import EngineCoreRequest
from tests.speed import wait_until

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "max_num_seqs": 4, "max_model_len": 512,
    "cpu_threads": 1, "pipeline_parallel_size": 2,
}  # fmt: skip
PARAMS = SamplingParams(max_tokens=450, temperature=0.0, ignore_eos=True)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    """The ranks that the test starts."""
    started: list[Child] = []

    def noting(module: str, config: bytes, environment: dict[str, str]) -> Child:
        started.append(spawn(module, config, environment))
        return started[-1]

    monkeypatch.setattr(multiproc, "spawn", noting)
    return started


def signal_mid_step(llm: LLM, child: Child, number: int, stall: float = multiproc.STALL_SECONDS) -> str:
    """Send a signal to a rank once steps are under way, and let it stall for so long; return the error that ends the
    engine."""
    core = llm._core
    for name in ("a", "b", "c"):
        core.add_request(
            EngineCoreRequest(request_id=name, prompt_token_ids=[5, 6, 7], params=PARAMS, max_tokens=450, seed=0)
        )
    for _ in range(12):
        core.step()
    assert core.busy
    os.kill(child.process.pid, number)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiproc, "STALL_SECONDS", stall)
        patch.setattr(multiproc, "SLOWEST", 3)
        with pytest.raises(EngineDeadError) as caught:
            run_on(llm)
    return str(caught.value)


def run_on(llm: LLM) -> None:
    while llm._core.has_work():
        llm._core.step()


def gone(children: list[Child]) -> None:
    wait_until(lambda: not any(child.is_alive() for child in children))


KINDS = {"first of the first stage": 0, "tensor rank": 1, "answering": 2, "last of the last stage": 3}


@pytest.mark.slow  # `make test` kills one of a server (tests/e2e) and one of two machines (test_nodes.py)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_killed_mid_step(children: list[Child], kind: str) -> None:
    """The others wait for it inside collectives, and hear only that nobody answers."""
    llm = LLM("demo", **SETTINGS, tensor_parallel_size=2)
    said = signal_mid_step(llm, children[KINDS[kind]], signal.SIGKILL)
    assert said == f"rank {KINDS[kind]} died (exit code -9)"
    gone(children)
    llm.shutdown()


def test_a_rank_that_hangs_is_noticed_and_named(children: list[Child]) -> None:
    llm = LLM("demo", **SETTINGS)
    said = signal_mid_step(llm, children[1], signal.SIGSTOP, stall=2.0)
    assert "no rank has moved for" in said
    assert "rank 1 has not moved since command" in said
    gone(children)
    llm.shutdown()
    assert not [child for child in psutil.Process().children() if child.pid in {one.process.pid for one in children}]


@pytest.mark.parametrize(
    ("number", "victim", "said"),
    [
        pytest.param(signal.SIGKILL, 0, r"rank 0 died \(exit code -9\)", marks=pytest.mark.slow),
        (signal.SIGKILL, 1, r"rank 1 died \(exit code -9\)"),
        (signal.SIGSTOP, 1, r"rank 1 has not moved since command 0, .*; rank 0 in rendezvous \(1\) waits"),
    ],
)
def test_a_rank_that_dies_or_hangs_while_it_loads(
    children: list[Child], monkeypatch: pytest.MonkeyPatch, number: int, victim: int, said: str
) -> None:
    """Before the others have met it."""

    def signalling(module: str, config: bytes, environment: dict[str, str]) -> Child:
        child = spawn(module, config, environment)
        if len(children) == victim:
            os.kill(child.process.pid, number)
        children.append(child)
        return child

    monkeypatch.setattr(multiproc, "spawn", signalling)
    monkeypatch.setattr(multiproc, "START_SECONDS", 1.0)
    with pytest.raises(EngineDeadError, match=said):
        LLM("demo", **SETTINGS)
    gone(children)


def test_what_ranks_count_is_read_by_whoever_waits(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    seen, first, second = Progress(path, 2), Progress(path, 2, 0), Progress(path, 2, 1)
    first.take()
    first.enter("tp.all_reduce")
    second.take()
    second.enter("tp.all_gather of a name that is long")
    second.leave()
    assert seen.read() == [
        RankProgress(0, 1, 1, 0, "tp.all_reduce"),
        RankProgress(1, 1, 1, 1, "tp.all_gather of a name "),
    ]
    assert blame(seen.read()) == (
        "rank 1 has not moved since command 1, after 1 collectives; rank 0 in tp.all_reduce (1) waits"
    )
