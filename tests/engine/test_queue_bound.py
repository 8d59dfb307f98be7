"""What may wait for the core, and when somebody who is refused should come back."""

from __future__ import annotations

import pytest

from headrace.config import EngineConfig
from headrace.engine.metrics import EngineMetrics
from headrace.engine.queue_bound import QueueBound
from headrace.errors import ConfigError, QueueFullError, RequestError
from headrace.request import EngineCoreOutputs, SchedulerStats


class Bench:
    """A queue of 10 requests and 100 tokens, a clock, and what the core says."""

    def __init__(self, requests: int = 10, tokens: int = 100) -> None:
        self.now = 1000.0
        self.metrics = EngineMetrics("m", 64, {})
        config = EngineConfig(max_queued_requests=requests, max_queued_tokens=tokens)
        self.queue = QueueBound(config, [self.metrics], lambda: self.now)

    def send(self, requests: int, tokens: int) -> None:
        with self.queue.reserve(requests, tokens) as reservation:
            self.queue.sent(requests, tokens, reservation)

    def core_says(self, received: int, received_tokens: int, waiting: int, waiting_tokens: int) -> None:
        stats = SchedulerStats(
            num_received=received,
            num_received_tokens=received_tokens,
            num_waiting=waiting,
            num_waiting_tokens=waiting_tokens,
        )
        self.metrics.begin_iteration(EngineCoreOutputs(outputs=[], stats=stats)).end()
        self.queue.observe()

    @property
    def waiting(self) -> tuple[int, int]:
        return self.queue.num_requests, self.queue.num_tokens

    def shown(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"headrace:{name}", {"model_name": "m", "engine": "0"})


def test_what_was_sent_counts_before_the_core_has_said_a_word() -> None:
    bench = Bench()
    bench.send(4, 30)
    bench.send(5, 20)
    assert bench.waiting == (9, 50)
    bench.core_says(received=4, received_tokens=30, waiting=1, waiting_tokens=7)
    assert bench.waiting == (6, 27)
    assert (bench.shown("queued_requests"), bench.shown("queued_tokens")) == (6, 27)
    assert (bench.shown("max_queued_requests"), bench.shown("max_queued_tokens")) == (10, 100)


@pytest.mark.parametrize(("requests", "tokens", "bound"), [(2, 2, "requests"), (1, 51, "tokens")])
def test_one_that_does_not_fit_is_refused_as_a_whole(requests: int, tokens: int, bound: str) -> None:
    bench = Bench()
    bench.send(9, 50)
    with pytest.raises(QueueFullError, match=f"--max-queued-{bound}") as caught, bench.queue.reserve(requests, tokens):
        pass
    assert caught.value.http_status == 429
    assert bench.waiting == (9, 50)
    labels = {"model_name": "m", "engine": "0", "reason": f"queued_{bound}"}
    assert bench.metrics.registry.get_sample_value("headrace:requests_rejected_total", labels) == 1
    bench.send(1, 50)


@pytest.mark.parametrize(("requests", "tokens"), [(11, 11), (1, 101)])
def test_one_that_never_fits_is_told_so(requests: int, tokens: int) -> None:
    with pytest.raises(RequestError, match="in parts"), Bench().queue.reserve(requests, tokens):
        pass


def test_zero_is_no_bound() -> None:
    bench = Bench(0, 0)
    bench.send(10**6, 10**9)
    bench.send(10**6, 10**9)
    with pytest.raises(ConfigError, match="max_queued_requests must be at least 0"):
        EngineConfig(max_queued_requests=-1)


def test_a_place_that_is_not_used_up_falls_free() -> None:
    bench = Bench()
    with bench.queue.reserve(6, 60) as reservation:
        assert bench.waiting == (6, 60), "others may not take it meanwhile"
        bench.queue.sent(2, 20, reservation)
    assert bench.waiting == (2, 20)


def test_who_asks_for_no_place_counts_all_the_same() -> None:
    bench = Bench()
    bench.queue.sent(20, 200, None)
    assert bench.waiting == (20, 200)


def test_the_wait_is_what_is_queued_at_the_pace_of_late() -> None:
    bench = Bench()
    assert bench.queue.predicted_wait() == 1, "nothing was seen yet"
    bench.queue.sent(100, 1000, None)
    for second in range(11):  # 20 tokens leave each second
        bench.core_says(100, 1000, 100 - 2 * second, 1000 - 20 * second)
        bench.now += 1.0
    assert bench.waiting == (80, 800)
    assert bench.queue.predicted_wait() == 40
    bench.core_says(100, 1000, 0, 0)
    bench.now += 600.0  # a quiet time says nothing of the pace
    bench.core_says(100, 1000, 0, 0)
    bench.queue.sent(10, 500, None)
    assert bench.queue.predicted_wait() == 6
