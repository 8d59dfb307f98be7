"""Has the ranks read adapters, and holds requests back whose adapter is not read yet. Others never wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headrace.executor.base import Executor
from headrace.lora import LoRARequest
from headrace.request import EngineCoreRequest


class AdapterReading:
    """Decides which adapters the ranks keep on their hosts: those used last, of which one is read at a time."""

    def __init__(self, executor: Executor, most: int, used: Callable[[], set[int]]) -> None:
        """`most`: how many adapters a rank keeps; `used`: tells those of unfinished requests, which are not dropped."""
        self._executor, self._most, self._used = executor, most, used
        self._kept: dict[int, LoRARequest] = {}
        """the least recently used first"""
        self._held: dict[str, EngineCoreRequest] = {}
        """requests that wait, in the order in which they came"""
        self._under_way: LoRARequest | None = None

    def __len__(self) -> int:
        """Return how many requests wait for their adapters."""
        return len(self._held)

    @property
    def num_prompt_tokens(self) -> int:
        """Return how many prompt tokens those requests have."""
        return sum(len(request.prompt_token_ids) for request in self._held.values())

    def hold(self, request: EngineCoreRequest) -> bool:
        """Hold a request back until its adapter is there; return False if nothing keeps it from running."""
        wanted = request.lora_request
        if wanted is None:
            return False
        if (kept := self._kept.pop(wanted.lora_int_id, None)) is not None:
            self._kept[wanted.lora_int_id] = kept
            return False
        self._held[request.request_id] = request
        return True

    def drop(self, request_id: str) -> None:
        """Forget a request, if it is held back. An adapter that is being read is read to its end."""
        self._held.pop(request_id, None)

    def released(self) -> Iterator[tuple[EngineCoreRequest, str]]:
        """Yield the requests that wait no longer, each with why its adapter cannot be used, or nothing."""
        error = ""
        if self._under_way is not None:
            if (found := self._executor.adapter_error()) is None:
                return
            read, self._under_way, error = self._under_way, None, found
            if not error:
                self._kept[read.lora_int_id] = read
            for request in [one for one in self._held.values() if one.adapter == read.lora_int_id]:
                del self._held[request.request_id]
                yield request, error
        if self._held:
            self._begin()

    def _begin(self) -> None:
        """Let the ranks read the adapter of the request that waits longest, once there is room for it."""
        wanted = next(iter(self._held.values())).lora_request
        assert wanted is not None
        dropped = []
        if len(self._kept) >= self._most:
            used = self._used()
            unused = next((number for number in self._kept if number not in used), None)
            if unused is None:
                return
            del self._kept[unused]
            dropped.append(unused)
        self._executor.read_adapter(wanted, dropped)
        self._under_way = wanted
