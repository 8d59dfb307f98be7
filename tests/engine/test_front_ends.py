"""Several front ends of one core: each gets what it asked for, and knows of the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from headrace.config import EngineConfig
from headrace.engine.front_ends import FrontEnds
from headrace.engine.messages import Abort, AbortMany, Add, Command, Failed, Join, Reply, Stepped
from headrace.engine.metrics import EngineMetrics
from headrace.engine.queue_bound import QueueBound
from headrace.engine.router import EngineLoad, Speed, choose
from headrace.errors import QueueFullError
from headrace.request import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, OtherFrontEnds
from headrace.request import SchedulerStats as Stats
from headrace.sampling_params import SamplingParams


class Door:
    """One front end's ends of the sockets."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], name: str) -> None:
        self.join = Join(f"inproc://{name}-requests", f"inproc://{name}-replies")
        self.sender, self.receiver = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        self.sender.bind(self.join.requests)
        self.receiver.bind(self.join.replies)

    def say(self, command: Command) -> None:
        self.sender.send(msgspec.msgpack.encode(command))

    def add(self, *names: str, tokens: int) -> None:
        prompt = [1] * tokens
        self.say(Add.of([
            EngineCoreRequest(request_id=name, prompt_token_ids=prompt, params=SamplingParams(), max_tokens=4, seed=0)
            for name in names
        ]))  # fmt: skip

    def heard(self) -> list[Any]:
        """(ids of outputs, what is said of other front ends) of each step, or another message as it is."""
        found: list[Any] = []
        while self.receiver.poll(0):
            reply = msgspec.msgpack.decode(self.receiver.recv(), type=Reply)
            if isinstance(reply, Stepped):
                found.append(([one.request_id for one in reply.outputs.outputs], reply.outputs.stats.others))
            else:
                found.append(reply)
        return found


@pytest.fixture
def core() -> Iterator[tuple[FrontEnds, Door, Door]]:
    """A core's side, its first front end and one that has joined."""
    context = zmq.Context()
    one, other = Door(context, "one"), Door(context, "other")
    front_ends = FrontEnds(context, one.join.requests, one.join.replies)
    one.add("early", tokens=10)
    one.say(other.join)
    commands = [*front_ends.commands()]
    assert isinstance(commands[1], Join)
    front_ends.join(commands[1], Failed("Ready", "stands for it"))
    assert one.heard() == []
    assert other.heard() == [Failed("Ready", "stands for it")]
    yield front_ends, one, other
    context.destroy(linger=0)


def send(front_ends: FrontEnds, *names: str, ended: bool = False) -> None:
    reason = FinishReason.STOP if ended else None
    outputs = [EngineCoreOutput(request_id=name, new_token_ids=[7], finish_reason=reason) for name in names]
    front_ends.send_outputs(EngineCoreOutputs(outputs=outputs, stats=Stats()), busy=True)


def test_each_gets_its_own(core: tuple[FrontEnds, Door, Door]) -> None:
    front_ends, one, other = core
    one.add("a", "b", tokens=20)
    other.add("c", tokens=50)
    assert len([*front_ends.commands()]) == 2
    send(front_ends, "early", "a", "c")
    assert one.heard() == [(["early", "a"], OtherFrontEnds(1, 0, 1, 50))]
    assert other.heard() == [(["c"], OtherFrontEnds(2, 20, 3, 50))]
    send(front_ends, "a", "b", "c", ended=True)
    assert one.heard() == [(["a", "b"], OtherFrontEnds(0, 0, 1, 50))]
    assert other.heard() == [(["c"], OtherFrontEnds(0, 0, 3, 50))]


def test_one_that_has_no_outputs_is_told_the_load_but_not_every_time(
    core: tuple[FrontEnds, Door, Door], monkeypatch: pytest.MonkeyPatch
) -> None:
    front_ends, one, other = core
    one.add("a", tokens=20)
    assert len([*front_ends.commands()]) == 1
    began = time.monotonic() + 1000
    now = [began]
    monkeypatch.setattr("headrace.engine.front_ends.time.monotonic", lambda: now[0])
    for _ in range(6):
        send(front_ends, "a")
        now[0] += 0.02
    assert [names for names, _ in one.heard()] == [["a"]] * 6
    assert other.heard() == [([], OtherFrontEnds(1, 0, 2, 30))] * 2
    assert began + 0.05 < front_ends.last_sent < began + 0.07


def test_an_abort_is_forgotten(core: tuple[FrontEnds, Door, Door]) -> None:
    front_ends, one, other = core
    other.add("c", tokens=50)
    other.say(AbortMany([Abort("c"), Abort("unknown")]))
    assert len([*front_ends.commands()]) == 2
    send(front_ends, "c", "early")
    assert one.heard() == [(["c", "early"], OtherFrontEnds(0, 0, 1, 50))], "what nobody asks for goes to the first"
    front_ends.send_snapshot(EngineCoreOutputs(outputs=[], stats=Stats()), busy=False)
    assert other.heard()[-1] == ([], OtherFrontEnds(0, 0, 1, 10))


def metrics_of(first: bool, demoted: tuple[str, ...] = ("norm",)) -> EngineMetrics:
    return EngineMetrics("m", 64, {}, demoted, first=first)


def test_counts_add_up_and_what_the_core_counts_is_shown_once() -> None:
    one, other = metrics_of(first=True), metrics_of(first=False)
    stats = Stats(num_running=3, num_preemptions=2, num_blocks=4, num_free_blocks=1)
    for metrics, tokens in ((one, 5), (other, 8)):
        metrics.generation_tokens.inc(tokens)
        metrics.first_token.observe(0.5)
        metrics.show_engine()
        metrics.begin_iteration(EngineCoreOutputs(outputs=[], stats=stats)).end()
    other.show_queue({})("queued_tokens")
    one.show_queue({})
    shown = one.render([other.samples()]).decode()
    labels = 'engine="0",model_name="m"'
    for line in (
        f"vllm:generation_tokens_total{{{labels}}} 13.0", f"vllm:num_requests_running{{{labels}}} 3.0",
        f"vllm:num_preemptions_total{{{labels}}} 2.0", f"vllm:kv_cache_usage_perc{{{labels}}} 0.75",
        f"headrace:kernels_demoted{{{labels}}} 1.0", f"headrace:engine_up{{{labels}}} 1.0",
        f'headrace:requests_rejected_total{{{labels},reason="queued_tokens"}} 1.0',
        f"vllm:time_to_first_token_seconds_count{{{labels}}} 2.0",
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.5",model_name="m"} 2.0',
    ):  # fmt: skip
        assert f"\n{line}\n" in f"\n{shown}", line
    assert one.render().decode().count("13.0") == 0, "nothing is kept of what was added"


@pytest.mark.parametrize("first", [True, False])
def test_the_bound_of_the_queue_counts_what_others_have_sent(first: bool) -> None:
    metrics = metrics_of(first)
    queue = QueueBound(EngineConfig(max_queued_requests=10, max_queued_tokens=100), [metrics])
    queue.sent(2, 20, None)
    others = OtherFrontEnds(num_received=7, num_received_tokens=70)
    metrics.stats = Stats(num_received=8, num_received_tokens=80, num_waiting=6, num_waiting_tokens=60, others=others)
    assert (queue.num_requests, queue.num_tokens) == (7, 70), "six wait, and one of our own is on its way"
    with pytest.raises(QueueFullError, match="7 requests wait, this request adds 4"), queue.reserve(4, 1):
        pass
    shown = metrics.render().decode()
    for name, value in (("queued_requests", 7 if first else 1), ("max_queued_requests", 10 if first else 0)):
        assert f'headrace:{name}{{engine="0",model_name="m"}} {value:.1f}\n' in shown


def test_a_router_counts_what_others_have_sent() -> None:
    speed = Speed()
    busy, idle = (EngineLoad(speed, 1024, 64, lambda: 1) for _ in range(2))
    busy.took([], Stats(others=OtherFrontEnds(num_open=3)), 0.0)
    idle.took([], Stats(), 0.0)
    assert choose([busy, idle], [], 10, 1.0) == 1
    idle.took([], Stats(others=OtherFrontEnds(num_pending_tokens=500)), 0.0)
    assert choose([busy, idle], [], 10, 1.0) == 0
