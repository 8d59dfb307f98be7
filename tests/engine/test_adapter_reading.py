"""Ranks read adapters one at a time, keep those used last, and hold back nobody who does not wait for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.engine.adapters import AdapterReading
from headrace.engine.messages import Abort
from headrace.lora import LoRARequest
from headrace.request import EngineCoreRequest
from headrace.sampling_params import SamplingParams
from tests.runner.harness import make_core, make_runner


class Reader:
    """Notes what it is told to read; `answer` ends that."""

    def __init__(self) -> None:
        self.orders: list[tuple[int, list[int]]] = []
        self.answer: str | None = None

    def read_adapter(self, request: LoRARequest, dropped: Sequence[int]) -> None:
        self.orders.append((request.lora_int_id, [*dropped]))
        self.answer = None

    def adapter_error(self) -> str | None:
        return self.answer


def request(name: str, adapter: int) -> EngineCoreRequest:
    lora = LoRARequest(f"adapter-{adapter}", adapter, "/adapters") if adapter else None
    params = SamplingParams(max_tokens=2)
    return EngineCoreRequest(
        request_id=name, prompt_token_ids=[5, 6, 7], params=params, max_tokens=2, seed=0, lora_request=lora
    )


def test_adapters_are_read_in_turn_and_the_least_recently_used_is_dropped() -> None:
    reader, used = Reader(), {1}
    reading: Any = AdapterReading(reader, 2, lambda: used)  # type: ignore[arg-type]

    def released() -> list[tuple[str, str]]:
        return [(one.request_id, error) for one, error in reading.released()]

    assert not reading.hold(request("plain", 0))
    for name, adapter in (("a", 1), ("b", 2), ("again", 1)):
        assert reading.hold(request(name, adapter))
    assert (len(reading), reading.num_prompt_tokens) == (3, 9)
    assert released() == []
    assert reader.orders == [(1, [])]
    assert released() == []  # it is not read yet
    reader.answer = ""
    assert released() == [("a", ""), ("again", "")]
    assert reader.orders[1:] == [(2, [])]
    reader.answer = "it is broken"
    assert released() == [("b", "it is broken")]
    assert not reading.hold(request("a2", 1))
    for name, adapter in (("b2", 2), ("c", 3), ("d", 4)):
        reading.hold(request(name, adapter))
    released()
    reader.answer = ""
    assert released() == [("b2", "")]
    assert reader.orders[2:] == [(2, []), (3, [2])]  # 1 was used before 2, but by a request that is unfinished
    reader.answer = ""
    used.add(3)
    assert released() == [("c", "")]
    assert released() == []  # both are in use
    assert len(reader.orders) == 4
    used.remove(3)
    released()
    assert reader.orders[4:] == [(4, [3])]
    reading.drop("d")
    assert len(reading) == 0


def test_others_run_while_a_request_waits_for_its_adapter() -> None:
    reader = Reader()
    core = make_core(make_runner("llama", "NONE"), 26)
    core._adapters = AdapterReading(reader, 1, core._used_adapters)  # type: ignore[arg-type]
    for name, adapter in (("waits", 1), ("plain", 0), ("left", 1)):
        core.add_request(request(name, adapter))
    core.abort([Abort("left")])
    ended = set()
    for _ in range(20):
        outputs = core.step()
        assert outputs is not None
        ended |= {output.request_id for output in outputs.outputs if output.finish_reason is not None}
        assert outputs.stats.num_waiting >= 1
    assert ended == {"plain"}
    assert core.has_work()
    reader.answer = "it is broken"
    outputs = core.step()
    assert outputs is not None
    (output,) = outputs.outputs
    assert (output.request_id, output.error, output.invalid) == ("waits", "it is broken", True)
    assert not core.has_work()
