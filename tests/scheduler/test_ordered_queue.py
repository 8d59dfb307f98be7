"""A queue keeps its items in their order, whatever the order of arrival."""

from __future__ import annotations

from headrace.request import Request
from headrace.scheduler.ordered_queue import OrderedQueue

from .support import make_request


def request_of_rank(rank: int) -> Request:
    request = Request(make_request(f"r{rank}", rank + 1))
    request.order = (rank, 0.0, request.request_id)
    return request


def test_order_first_and_removal() -> None:
    queue: OrderedQueue[Request] = OrderedQueue()
    assert queue.first is None
    requests = [request_of_rank(rank) for rank in range(4)]
    for rank in (2, 0, 3, 1):
        queue.add(requests[rank])
    assert queue.items == requests
    assert queue.first is requests[0]
    queue.remove(requests[2])
    queue.remove(requests[0])
    assert queue.items == [requests[1], requests[3]]
    assert len(queue) == 2
