"""Engines that share their experts: rounds in which each hears what all have told, and facts of all ranks for each."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.cache_groups import same_layout
from headrace.errors import OutOfMemoryError
from headrace.executor.together import Peers, Together
from headrace.step import WorkerFacts

ENGINES = 3
ROUNDS = 60


def test_all_hear_the_same_whoever_is_late(tmp_path: Path) -> None:
    """One runs ahead of another by a round at most, and what it tells there is not lost."""
    engines = [Peers(str(tmp_path), place, ENGINES) for place in range(ENGINES)]

    def run(place: int) -> list[list[int]]:
        delay, peers, heard = random.Random(place), engines[place], []
        for number in range(ROUNDS):
            time.sleep(delay.choice((0, 0, 0.002)))
            peers.offer(100 * number + place)
            while (tokens := peers.agreed(1)) is None:
                pass
            heard.append(tokens)
        return heard

    with ThreadPoolExecutor(ENGINES) as threads:
        for heard in threads.map(run, range(ENGINES)):
            assert heard == [[100 * number + place for place in range(ENGINES)] for number in range(ROUNDS)]
    for peers in engines:
        peers.close()


def test_whoever_has_told_nothing_sees_that_others_wait(tmp_path: Path) -> None:
    first, second = (Peers(str(tmp_path), place, 2) for place in (0, 1))
    assert not second.wait_for_us
    assert first.agreed(0) is None
    first.offer(7)
    assert second.socket.poll(10_000)
    assert second.wait_for_us
    assert not first.wait_for_us
    assert first.agreed(1) is None
    second.offer(1)
    assert not second.wait_for_us
    assert first.agreed() == second.agreed() == [7, 1]
    for peers in (first, second):
        peers.close()


def facts(name: str, shortfall: str = "") -> WorkerFacts:
    layout = same_layout(block_size=16)
    return WorkerFacts("cpu", name, 1, 1, layout, 1, "x", shortfall=shortfall)


def test_each_gets_the_facts_of_all_ranks(tmp_path: Path) -> None:
    def run(place: int) -> list[WorkerFacts]:
        executor = SimpleNamespace(load=lambda: [facts(f"{place}-{rank}") for rank in (0, 1)])
        return Together(executor, Peers(str(tmp_path), place, 2)).load()  # type: ignore[arg-type]

    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(run, range(2)):
            assert [each.device_name for each in found] == ["0-0", "0-1", "1-0", "1-1"]
            assert found[0] == facts("0-0")


def test_one_without_memory_ends_at_once(tmp_path: Path) -> None:
    """Others may wait inside its step for ever, so it must not wait for their facts."""
    executor = SimpleNamespace(profile=lambda config: [facts("GPU 0"), facts("GPU 1", "none left")])
    with pytest.raises(
        OutOfMemoryError, match=r"the largest step on GPU 1: lower --max-num-batched-tokens .*none left"
    ):
        Together(executor, Peers(str(tmp_path), 0, 2)).profile(None)  # type: ignore[arg-type]
