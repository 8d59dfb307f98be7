"""Which adapter lies in which slot, how many different ones a step has, and that none reads another's blocks."""

from __future__ import annotations

import msgspec
import pytest

from headrace.errors import RequestError
from headrace.lora import LoRARequest
from headrace.request import EngineCoreRequest
from headrace.scheduler.adapter_slots import AdapterSlots
from headrace.step import AdapterLoad

from .support import batch, make_request, make_scheduler, run_step, run_to_end


def adapted(name: str, adapter: int, prompt: int | list[int] = 3, **fields: object) -> EngineCoreRequest:
    lora = LoRARequest(f"adapter-{adapter}", adapter, "/adapters") if adapter else None
    return msgspec.structs.replace(make_request(name, prompt, **fields), lora_request=lora)


def test_the_least_recently_used_of_those_without_requests_gives_its_slot() -> None:
    slots = AdapterSlots(2)
    assert [slots.take(one) for one in (0, 5, 6, 5)] == [-1, 0, 1, 0]
    assert slots.take_loads() == [AdapterLoad(0, 5), AdapterLoad(1, 6)]
    assert not slots.has_room(7)
    slots.release(5)
    assert not slots.has_room(7)  # another request has it
    slots.release(6)
    slots.release(5)
    assert slots.take(6) == 1
    assert slots.take_loads() == []
    slots.release(6)
    assert slots.take(7) == 0  # 6 was used later than 5
    assert slots.take_loads() == [AdapterLoad(0, 7)]


def test_what_a_failed_step_may_not_have_loaded_is_loaded_again_for_others_alone() -> None:
    slots = AdapterSlots(2)
    for adapter in (5, 6, 6):
        slots.take(adapter)
    loads = slots.take_loads()
    for adapter in (5, 6):  # the step's own requests end
        slots.release(adapter)
    slots.load_again(loads)
    assert slots.take_loads() == [AdapterLoad(1, 6)]
    assert slots.take(5) == 0
    assert slots.take_loads() == [AdapterLoad(0, 5)]


def test_a_step_has_at_most_so_many_adapters_and_nobody_overtakes_who_waits_for_one() -> None:
    scheduler = make_scheduler(max_loras=2, max_num_seqs=8)
    for name, adapter in (("a", 1), ("b", 2), ("plain", 0), ("also a", 1), ("c", 3), ("late a", 1)):
        scheduler.add_request(adapted(name, adapter, max_tokens=3))
    step, _ = run_step(scheduler)
    assert batch(scheduler, step).keys() == {"a", "b", "plain", "also a"}
    assert step.adapter_loads == [AdapterLoad(0, 1), AdapterLoad(1, 2)]
    assert [new.adapter_slot for new in step.new_rows] == [0, 1, -1, 0]
    for _ in range(2):
        step, _ = run_step(scheduler)
        assert not step.new_rows
    step, _ = run_step(scheduler)  # a and b have ended
    assert batch(scheduler, step).keys() == {"c", "late a"}
    assert [new.adapter_slot for new in step.new_rows] == [1, 0]
    assert step.adapter_loads == [AdapterLoad(1, 3)]


def test_a_preempted_request_takes_its_adapter_up_again() -> None:
    scheduler = make_scheduler(max_loras=1, look_ahead=False, num_blocks=3)
    scheduler.add_request(adapted("a", 1))
    scheduler.add_request(adapted("b", 1))
    outputs = run_to_end(scheduler)
    assert scheduler.stats().num_preemptions
    assert sum(output.finish_reason is not None for output in outputs) == 2
    scheduler.add_request(adapted("c", 2))
    step, _ = run_step(scheduler)
    assert step.adapter_loads == [AdapterLoad(0, 2)]


def test_blocks_are_shared_under_one_adapter_alone() -> None:
    scheduler = make_scheduler(max_loras=3)
    found = []
    for number, adapter in enumerate((1, 2, 0, 1, 2, 0)):
        scheduler.add_request(adapted(str(number), adapter, 13, max_tokens=1))
        found += [output.num_cached_tokens for output in run_to_end(scheduler)]
    assert found == [0, 0, 0, 12, 12, 12]


def test_an_engine_without_adapters_refuses_them() -> None:
    with pytest.raises(RequestError, match="start it with --enable-lora"):
        make_scheduler().add_request(adapted("a", 1))
