"""Waiting requests in turns: between clients, and within a client between its requests to the server.

Next is whoever runs the fewest, as in "Dominant Resource Fairness" (Ghodsi et al., NSDI 2011) with rows as the only
resource; among equals, whoever's last turn, or arrival, is longest ago. Requests that come one by one from one client
are therefore first come, first served. A turn of a request to the server is good for a few of its choices: were it for
one, a request for three would wait three times as long as others for as long as more come than can be served. Knows
nothing of blocks, budgets or steps.
"""

from __future__ import annotations

from headrace.request import Request
from headrace.scheduler.ordered_queue import OrderedQueue

TIMES = 2
"""One that runs at least so many times what another would run with one more makes way for it."""


class Parent:
    """What came to the server as one request (prompts x n), or the one request of somebody who said nothing of that."""

    __slots__ = ("client", "name", "num_requests", "num_running", "order", "turn", "waiting")

    def __init__(self, name: str, client: Client) -> None:
        self.name = name
        self.client = client
        self.num_requests = 0
        """ever, of those that are remembered"""
        self.num_running = 0
        self.turn: tuple[int, float, str] = (0, 0.0, "")
        """when it last began to wait: order of a request that came or was preempted, or the moment in which one was
        admitted or ended"""
        self.order: tuple[int, tuple[int, float, str], str] = (0, self.turn, name)
        self.waiting: OrderedQueue[Request] = OrderedQueue()


class Client:
    """All that came with one API key; everybody without one is one client."""

    __slots__ = ("large", "name", "num_running", "order", "parents", "turn", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_running = 0
        self.turn: tuple[int, float, str] = (0, 0.0, "")
        self.order: tuple[int, tuple[int, float, str], str] = (0, self.turn, name)
        self.waiting: OrderedQueue[Parent] = OrderedQueue()
        """those of `parents` that have something waiting"""
        self.parents: dict[str, Parent] = {}
        self.large: dict[str, Parent] = {}
        """those that run more than a turn's"""


class FairQueue:
    """Holds the waiting requests and counts the running ones, to know whose turn it is: `add`, then `take` or `remove`
    while it waits, and once taken `put_back` or `release`."""

    def __init__(self, quantum: int = 1) -> None:
        """`quantum`: requests of one parent that a turn is good for; with no more than these it makes way for nobody of
        its client."""
        self._quantum = quantum
        self._parent_of: dict[str, Parent] = {}
        """by request id, of those that wait or run"""
        self._clients: dict[str, Client] = {}
        """those that have something waiting or running"""
        self._line: OrderedQueue[Client] = OrderedQueue()
        self._size = 0
        self._clock = 0
        self.num_prompt_tokens = 0
        """of all that wait"""

    def __len__(self) -> int:
        return self._size

    @property
    def first(self) -> Request | None:
        """Whose turn it is."""
        client = self._line.first
        parent = None if client is None else client.waiting.first
        return None if parent is None else parent.waiting.first

    def tick(self) -> int:
        """Counts arrivals, admissions and ends."""
        self._clock += 1
        return self._clock

    def add(self, request: Request, client_name: str, parent_name: str) -> None:
        client = self._clients.get(client_name)
        if client is None:
            client = self._clients[client_name] = Client(client_name)
        parent = client.parents.get(parent_name)
        if parent is None:
            parent = client.parents[parent_name] = Parent(parent_name, client)
        parent.num_requests += 1
        self._parent_of[request.request_id] = parent
        self._lift(parent)
        self._enqueue(request, parent)
        self._settle(parent)

    def take(self, request: Request) -> None:
        """It runs from now on."""
        parent = self._parent_of[request.request_id]
        self._lift(parent)
        self._dequeue(request, parent)
        self._count(parent, 1)
        parent.client.turn = (0, self.tick(), "")
        if parent.num_running % self._quantum == 0:
            parent.turn = parent.client.turn
        self._settle(parent)

    def put_back(self, request: Request) -> None:
        """It runs no more, and goes first among equals."""
        parent = self._parent_of[request.request_id]
        self._lift(parent)
        self._count(parent, -1)
        self._enqueue(request, parent)
        self._settle(parent)

    def release(self, request: Request) -> None:
        """It has run to its end."""
        parent = self._parent_of.pop(request.request_id)
        self._lift(parent)
        self._count(parent, -1)
        parent.turn = parent.client.turn = (0, self.tick(), "")
        self._settle(parent)

    def remove(self, request: Request) -> None:
        """It ends while it waits."""
        parent = self._parent_of.pop(request.request_id)
        self._lift(parent)
        self._dequeue(request, parent)
        self._settle(parent)

    def shares_steps(self, under_way: Request, newcomer: Request) -> bool:
        """Whether a prompt under way leaves part of each step to the newcomer's: not where both came one by one from
        one client, which are served one after the other."""
        one, other = self._parent_of[under_way.request_id], self._parent_of[newcomer.request_id]
        return one.client is not other.client or (one is not other and one.num_requests > 1)

    def most_dispensable(self, running: list[Request]) -> Request:
        """Whom to preempt where blocks are short: of the client that runs most, of its parent that runs most, the last
        in order. `running` is in order."""
        if len(self._clients) < 2 and not any(client.large for client in self._clients.values()):
            return running[-1]  # nobody runs more than another
        return max(running, key=self._burden)

    def making_way(self, newcomer: Request, running: list[Request]) -> Request | None:
        """Who should make way for a newcomer: one of a client, or of another parent of the same client, that runs much
        more than the newcomer's. Never the only one, so that the first of all in order always goes on."""
        parent = self._parent_of[newcomer.request_id]
        rival = self._rival(parent)
        if rival is None:
            return None
        owners = ((one, self._parent_of[one.request_id]) for one in running)
        return max((one for one, owner in owners if rival in (owner, owner.client)), key=self._burden)

    def _rival(self, parent: Parent) -> Client | Parent | None:
        client = parent.client
        largest: Client | Parent = max(self._clients.values(), key=_num_running)
        if largest is not client and largest.num_running >= TIMES * (client.num_running + 1):
            return largest
        largest = max(client.large.values(), key=_num_running, default=parent)
        if largest is not parent and largest.num_running >= TIMES * (parent.num_running + 1):
            return largest
        return None

    def _burden(self, request: Request) -> tuple[int, int, tuple[int, float, str]]:
        parent = self._parent_of[request.request_id]
        return parent.client.num_running, parent.num_running // self._quantum, request.order

    @staticmethod
    def _count(parent: Parent, change: int) -> None:
        parent.num_running += change
        parent.client.num_running += change

    def _lift(self, parent: Parent) -> None:
        """Out of the queues in which it and its client stand, which are sorted by what is about to change."""
        client = parent.client
        if client.waiting.items:
            self._line.remove(client)
        if parent.waiting.items:
            client.waiting.remove(parent)

    def _settle(self, parent: Parent) -> None:
        """Undo `_lift`, and forget who has nothing any more."""
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
