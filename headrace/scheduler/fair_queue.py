"""Sorts waiting requests so that clients, and the HTTP requests of one client, take turns.

Next is the client (and within it the HTTP request) with the fewest running requests, as in "Dominant Resource Fairness"
(Ghodsi et al., NSDI 2011) with rows as the only resource; among equals, the one whose last turn or arrival is longest
ago. Requests that come one by one from one client are therefore served first come, first served.

One turn admits several choices of an HTTP request (the quantum). If it admitted one, an HTTP request for three choices
would wait three times as long as others whenever more requests come than can be served. Knows nothing of blocks,
budgets or steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.request import Request
from headrace.scheduler.ordered_queue import OrderedQueue

Turn = tuple[int, float, str]
"""A moment, comparable with `Request.order`."""
PREEMPT_RATIO = 2
"""A client or parent with at least this many times the running requests that another would have with one more loses a
request to it."""


@dataclass(slots=True, eq=False)
class Parent:
    """Counts the requests that came in one HTTP request (prompts x n)."""

    name: str
    client: Client
    num_requests: int = 0
    """Requests that were ever added."""
    num_running: int = 0
    turn: Turn = (0, 0.0, "")
    """When it last began to wait: the order of a request that arrived or was preempted, or the moment in which one was
    admitted or ended."""
    order: tuple[int, Turn, str] = (0, (0, 0.0, ""), "")
    waiting: OrderedQueue[Request] = field(default_factory=OrderedQueue)


@dataclass(slots=True, eq=False)
class Client:
    """Counts the requests that came with one API key. All requests without a key are those of one client."""

    name: str
    num_running: int = 0
    turn: Turn = (0, 0.0, "")
    order: tuple[int, Turn, str] = (0, (0, 0.0, ""), "")
    waiting: OrderedQueue[Parent] = field(default_factory=OrderedQueue)
    """Those of `parents` that have waiting requests."""
    parents: dict[str, Parent] = field(default_factory=dict)
    large: dict[str, Parent] = field(default_factory=dict)
    """Those of `parents` that run more requests than one turn admits."""


class FairQueue:
    """Holds the waiting requests, and counts the running ones to know whose turn it is. `add` a request, then `take` it
    when it is admitted or `remove` it while it waits. One that was taken is `put_back` when it is preempted, and
    `release`d when it ends."""

    def __init__(self, quantum: int = 1) -> None:
        """`quantum`: requests of one parent that a turn admits. No parent is preempted for another of its client while
        it runs no more than these."""
        self._quantum = quantum
        self._parent_of: dict[str, Parent] = {}
        """Request id -> parent, of requests that wait or run."""
        self._clients: dict[str, Client] = {}
        """Clients with waiting or running requests."""
        self._line: OrderedQueue[Client] = OrderedQueue()
        """Clients with waiting requests; the first has the next turn."""
        self._size = 0
        self._clock = 0
        self.num_prompt_tokens = 0
        """Prompt tokens of all waiting requests."""

    def __len__(self) -> int:
        return self._size

    @property
    def first(self) -> Request | None:
        """The request whose turn it is."""
        client = self._line.first
        parent = None if client is None else client.waiting.first
        return None if parent is None else parent.waiting.first

    def tick(self) -> int:
        """Advance the queue's clock, which counts arrivals, admissions and ends, and return it."""
        self._clock += 1
        return self._clock

    def add(self, request: Request, client_name: str, parent_name: str) -> None:
        """Add a new request of a client's HTTP request."""
        client = self._clients.get(client_name)
        if client is None:
            client = self._clients[client_name] = Client(client_name)
        parent = client.parents.get(parent_name)
        if parent is None:
            parent = client.parents[parent_name] = Parent(parent_name, client)
        parent.num_requests += 1
        self._parent_of[request.request_id] = parent
        self._unqueue(parent)
        self._enqueue(request, parent)
        self._requeue(parent)

    def take(self, request: Request) -> None:
        """Count a waiting request as running."""
        parent = self._parent_of[request.request_id]
        self._unqueue(parent)
        self._dequeue(request, parent)
        self._count(parent, 1)
        parent.client.turn = (0, self.tick(), "")
        if parent.num_running % self._quantum == 0:
            parent.turn = parent.client.turn
        self._requeue(parent)

    def put_back(self, request: Request) -> None:
        """Let a running request wait again, first among equals."""
        parent = self._parent_of[request.request_id]
        self._unqueue(parent)
        self._count(parent, -1)
        self._enqueue(request, parent)
        self._requeue(parent)

    def release(self, request: Request) -> None:
        """Remove a running request that has ended."""
        parent = self._parent_of.pop(request.request_id)
        self._unqueue(parent)
        self._count(parent, -1)
        parent.turn = parent.client.turn = (0, self.tick(), "")
        self._requeue(parent)

    def remove(self, request: Request) -> None:
        """Remove a waiting request."""
        parent = self._parent_of.pop(request.request_id)
        self._unqueue(parent)
        self._dequeue(request, parent)
        self._requeue(parent)

    def shares_steps(self, under_way: Request, waiting: Request) -> bool:
        """Return whether a prompt that is partly computed leaves part of each step to a waiting one. It does not where
        both came one by one from one client: those are served one after the other."""
        one, other = self._parent_of[under_way.request_id], self._parent_of[waiting.request_id]
        return one.client is not other.client or (one is not other and one.num_requests > 1)

    def victim(self, running: list[Request]) -> Request:
        """Return the request to preempt when blocks are short. `running` is in order. It is the last in order of the
        parent that runs most, of the client that runs most."""
        if len(self._clients) < 2 and not any(client.large for client in self._clients.values()):
            return running[-1]  # nobody runs more than another
        return max(running, key=self._share)

    def victim_for(self, waiting: Request, running: list[Request]) -> Request | None:
        """Return the request to preempt so that a waiting one can run, if its client or parent has too small a share.
        It belongs to a client, or to another parent of the same client, that runs far more. It is never the only one of
        that, so the first of all requests in order always goes on."""
        parent = self._parent_of[waiting.request_id]
        largest = self._far_larger(parent)
        if largest is None:
            return None
        owners = ((one, self._parent_of[one.request_id]) for one in running)
        return max((one for one, owner in owners if largest in (owner, owner.client)), key=self._share)

    def _far_larger(self, parent: Parent) -> Client | Parent | None:
        """Return the client, or the parent of the same client, that runs far more than this one's, if there is one."""
        client = parent.client
        largest: Client | Parent = max(self._clients.values(), key=_num_running)
        if largest is not client and largest.num_running >= PREEMPT_RATIO * (client.num_running + 1):
            return largest
        largest = max(client.large.values(), key=_num_running, default=parent)
        if largest is not parent and largest.num_running >= PREEMPT_RATIO * (parent.num_running + 1):
            return largest
        return None

    def _share(self, request: Request) -> tuple[int, int, tuple[int, float, str]]:
        parent = self._parent_of[request.request_id]
        return parent.client.num_running, parent.num_running // self._quantum, request.order

    @staticmethod
    def _count(parent: Parent, change: int) -> None:
        parent.num_running += change
        parent.client.num_running += change

    def _unqueue(self, parent: Parent) -> None:
        """Take a parent and its client out of the queues they stand in, whose sort keys are about to change."""
        client = parent.client
        if client.waiting.items:
            self._line.remove(client)
        if parent.waiting.items:
            client.waiting.remove(parent)

    def _requeue(self, parent: Parent) -> None:
        """Put a parent and its client back with their new sort keys, and drop those that have no request any more."""
        client = parent.client
        parent.order = (parent.num_running // self._quantum, parent.turn, parent.name)
        client.order = (client.num_running, client.turn, client.name)
        if parent.num_running > self._quantum:
            client.large[parent.name] = parent
        else:
            client.large.pop(parent.name, None)
        if parent.waiting.items:
            client.waiting.add(parent)
        elif not parent.num_running:
            del client.parents[parent.name]
        if client.waiting.items:
            self._line.add(client)
        elif not client.num_running:
            del self._clients[client.name]

    def _enqueue(self, request: Request, parent: Parent) -> None:
        client = parent.client
        has_waiting = bool(parent.waiting.items)
        parent.turn = min(parent.turn, request.order) if has_waiting else request.order
        client.turn = min(client.turn, request.order) if has_waiting or client.waiting.items else request.order
        parent.waiting.add(request)
        self._size += 1
        self.num_prompt_tokens += request.num_prompt_tokens

    def _dequeue(self, request: Request, parent: Parent) -> None:
        parent.waiting.remove(request)
        self._size -= 1
        self.num_prompt_tokens -= request.num_prompt_tokens


def _num_running(share: Client | Parent) -> int:
    return share.num_running
