"""The loop: steps overlap, results are collected as they come, and a step that fails takes only its requests along."""

from pathlib import Path

import pytest

from headrace.cache_groups import same_layout
from headrace.config import EngineConfig
from headrace.engine.build import build_core
from headrace.engine.core import EngineCore
from headrace.engine.messages import CoreFacts
from headrace.errors import ConfigError, EngineDeadError, OutOfMemoryError
from headrace.request import EngineCoreOutput, EngineCoreRequest, FinishReason
from headrace.sampling_params import SamplingParams
from headrace.scheduler.config import SchedulerConfig
from headrace.scheduler.scheduler import Scheduler
from tests.engine.fakes import DEAD_TOKEN, FAIL_TOKEN, FakeExecutor, model_folder


def make_core(executor: FakeExecutor, *, overlap: bool = True, num_blocks: int = 64) -> EngineCore:
    limits = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=32, max_model_len=128, layout=same_layout(4), num_pages=num_blocks
    )
    facts = CoreFacts(EngineConfig(async_scheduling=overlap), [], [], num_blocks)
    return EngineCore(facts, Scheduler(limits), executor)


def request(name: str, prompt: list[int], max_tokens: int = 6, **more: object) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=max_tokens),
        max_tokens=max_tokens,
        seed=0,
        **more,  # type: ignore[arg-type]
    )


def drain(core: EngineCore) -> list[EngineCoreOutput]:
    outputs = []
    while core.has_work():
        stepped = core.step()
        assert stepped is not None
        outputs.extend(stepped.outputs)
    return outputs


def tokens_of(outputs: list[EngineCoreOutput], name: str) -> list[int]:
    return [token for output in outputs if output.request_id == name for token in output.new_token_ids]


def test_the_next_step_is_submitted_before_the_last_one_is_collected() -> None:
    executor = FakeExecutor(late=True)
    core = make_core(executor)
    core.add_request(request("a", [10, 11, 12]))
    assert core.step() is not None
    assert len(executor.steps) == 2  # one came back, the next is running
    assert core.busy


def test_without_async_scheduling_each_step_is_waited_for() -> None:
    executor = FakeExecutor(late=True)
    core = make_core(executor, overlap=False)
    core.add_request(request("a", [10, 11, 12]))
    for number in (1, 2, 3):
        assert core.step() is not None
        assert len(executor.steps) == number
        assert not core.busy


def test_a_result_that_is_there_is_used_before_deciding() -> None:
    """An executor that computes at once never computes a token beyond the end."""
    executor = FakeExecutor()
    core = make_core(executor)
    core.add_request(request("a", [10, 2, 12], max_tokens=50, stop_token_ids=[2]))
    assert tokens_of(drain(core), "a") == [10, 2]
    assert len(executor.steps) == 2


def test_steps_beyond_a_stop_are_dropped() -> None:
    executor = FakeExecutor(late=True)
    core = make_core(executor)
    core.add_request(request("a", [10, 2, 12], max_tokens=50, stop_token_ids=[2]))
    assert tokens_of(drain(core), "a") == [10, 2]
    assert len(executor.steps) == 3  # one was under way when the stop came back


@pytest.mark.parametrize("late", [False, True])
def test_a_failed_step_ends_its_requests_alone(late: bool) -> None:
    """Where steps overlap, one with the same requests is under way by then: who joined in it goes on."""
    executor = FakeExecutor(late=late)
    core, outputs = make_core(executor), []
    for name, prompt in (("old", [20, 21]), ("bad", [FAIL_TOKEN, 1]), ("good", [10, 11])):
        core.add_request(request(name, prompt))
        step = core.step()
        assert step is not None
        outputs += step.outputs
    assert any(len(step.rows) == 3 for step in executor.steps) == late
    outputs += drain(core)
    ends = {o.request_id: o.finish_reason for o in outputs if o.finish_reason is not None}
    assert ends == {"old": FinishReason.ERROR, "bad": FinishReason.ERROR, "good": FinishReason.LENGTH}
    assert tokens_of(outputs, "good") == [10, 11, 10, 11, 10, 11]


def test_a_failure_of_others_is_named_but_not_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = FakeExecutor()
    core = make_core(executor)
    core.add_request(request("bad", [10]))

    def fail(step: object) -> None:
        raise RuntimeError("process 1234 has 77 GiB of GPU 0 in use")

    monkeypatch.setattr(executor, "execute", fail)
    (output,) = drain(core)
    assert output.error == "the step failed: RuntimeError"


def test_a_request_that_can_never_run_is_answered_not_raised() -> None:
    core = make_core(FakeExecutor(), num_blocks=2)
    core.add_request(request("big", list(range(10, 40))))
    (output,) = drain(core)
    assert output.finish_reason is FinishReason.ERROR
    assert "pages of KV cache" in (output.error or "")


def test_a_dead_executor_ends_the_core() -> None:
    core = make_core(FakeExecutor())
    core.add_request(request("a", [DEAD_TOKEN]))
    with pytest.raises(EngineDeadError):
        drain(core)


def test_a_failed_step_that_broke_the_device_ends_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = FakeExecutor()
    core = make_core(executor)
    core.add_request(request("bad", [FAIL_TOKEN, 1]))

    def broken() -> None:
        raise EngineDeadError("the device can compute no more")

    monkeypatch.setattr(executor, "check", broken)
    with pytest.raises(EngineDeadError, match="can compute no more"):
        drain(core)


def test_first_outputs_say_when_they_were_scheduled() -> None:
    core = make_core(FakeExecutor())
    core.add_request(request("a", [10, 11]))
    outputs = drain(core)
    assert outputs[0].scheduled_time > 0
    assert all(output.scheduled_time == 0 for output in outputs[1:])


class TestBuild:
    def test_decides_loads_and_allocates(self, tmp_path: Path) -> None:
        config = EngineConfig(num_gpu_blocks_override=7)
        core = build_core(config, model_folder(tmp_path), False, "tests.engine.fakes:make_echo")
        assert core.facts.num_pages == 7
        assert core.facts.config.max_model_len == 256
        assert {"max_model_len", "max_num_seqs", "num_gpu_blocks"} <= {d.field for d in core.facts.decisions}

    def test_bad_settings_are_user_errors(self, tmp_path: Path) -> None:
        folder = model_folder(tmp_path)
        with pytest.raises(ConfigError, match="max_model_len"):
            build_core(EngineConfig(max_model_len=999), folder, False, "tests.engine.fakes:make_echo")

    def test_a_start_that_fails_closes_the_executor(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        executor = FakeExecutor()
        monkeypatch.setattr("tests.engine.fakes.make_echo", lambda *_: executor)

        def no_room(*_: object) -> None:
            raise OutOfMemoryError("no room")

        monkeypatch.setattr("headrace.engine.build.decide_num_pages", no_room)
        with pytest.raises(OutOfMemoryError):
            build_core(EngineConfig(), model_folder(tmp_path), False, "tests.engine.fakes:make_echo")
        assert executor.closed
