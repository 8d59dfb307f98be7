"""States have snapshots where a prompt ends. What windows have passed, and what of a prefix is found where layers keep
unlike things, is what test_traffic.py asserts of random histories."""

from __future__ import annotations

from typing import Any

from headrace.cache_groups import CacheGroup, CacheKind, CacheLayout
from headrace.scheduler.scheduler import Scheduler

from .support import FakeDevice, Script, make_request, make_scheduler

BLOCK = 4


def layout(*kinds: tuple[CacheKind, int | None]) -> CacheLayout:
    groups = [CacheGroup((index,), kind, window, BLOCK, 1, 1, 1) for index, (kind, window) in enumerate(kinds)]
    return CacheLayout(tuple(groups), 1)


FULL, STATE = ("full", None), ("state", None)


PROMPT = list(range(41))  # 10 full blocks, and a token


class Run:
    """A scheduler and the device that knows what every read must find."""

    def __init__(self, cache: CacheLayout, prompts: dict[str, list[int]], max_tokens: int = 1, **changes: Any) -> None:
        self.scheduler: Scheduler = make_scheduler(layout=cache, max_model_len=1000, **changes)
        requests = [
            make_request(name, prompt, max_tokens, seed=seed) for seed, (name, prompt) in enumerate(prompts.items())
        ]
        self.scripts = {one.request_id: Script(one, outcome=0, max_model_len=1000) for one in requests}
        self.device = FakeDevice(cache, list(self.scripts.values()))
        self.hits: dict[str, int] = {}

    def add(self, *names: str) -> None:
        for name in names:
            self.scheduler.add_request(self.scripts[name].request)

    def step(self) -> None:
        step = self.scheduler.schedule()
        assert step is not None
        for output in self.scheduler.update(step, self.device.execute(step)):
            self.hits.setdefault(output.request_id, output.num_cached_tokens)
        self.scheduler.kv_cache.pages.check_invariant()

    def to_end(self, *names: str) -> None:
        self.add(*names)
        while self.scheduler.has_work():
            self.step()


def test_a_state_is_kept_where_the_last_block_of_a_prompt_ends() -> None:
    run = Run(layout(FULL, STATE), {"a": PROMPT, "b": PROMPT, "c": PROMPT[:30]}, num_pages=60)
    for name in "abc":
        run.to_end(name)
    assert run.hits == {"a": 0, "b": 40, "c": 0}, "c's tokens are cached, but no state that has seen only them"


def test_without_a_block_for_it_there_is_no_snapshot() -> None:
    run = Run(layout(FULL, STATE), {"a": PROMPT, "b": PROMPT}, num_pages=12)
    run.to_end("a")
    run.to_end("b")
    assert run.hits == {"a": 0, "b": 0}


def test_a_snapshot_is_not_taken_away_in_the_step_that_reads_it() -> None:
    prompts = {"a": PROMPT[:9], "b": PROMPT[:9], "c": [50, 51, 52], "d": [60, 61, 62]}
    run = Run(layout(STATE, FULL), prompts, num_pages=8, look_ahead=False)  # d's tokens would get the page, cleared
    run.to_end("a")
    run.to_end("b", "c", "d")
    assert run.hits == {"a": 0, "b": 8, "c": 0, "d": 0}
