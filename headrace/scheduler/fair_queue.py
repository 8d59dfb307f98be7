"""Determines the order of waiting requests: clients take turns, and so do the HTTP requests of one client.

Next is the client (and within it the HTTP request) with the fewest running requests, as in "Dominant Resource Fairness"
(Ghodsi et al., NSDI 2011) with rows as the only resource; among equals, the one whose last turn or arrival is longest
ago. Requests that come one by one from one client are therefore served first come, first served.

One turn admits several choices of an HTTP request (the quantum). If it admitted one, an HTTP request for three choices
would wait three times as long as others whenever more requests come than can be served. Knows nothing of blocks,
budgets or steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from headrace.scheduler.ordered_queue import OrderedQueue

Turn = tuple[int, float, str]
"""A moment, comparable with `Waiter.order`."""
PREEMPT_RATIO = 2
"""A client or parent is preempted for another if it runs at least this many times what that would run with one more."""


class Waiter(Protocol):
    """Represents what waits for its turn: a request, or what has to be done before it can run."""

    request_id: str
    order: Turn
    """Unique among those that wait, and from `FairQueue.tick` if they take turns as they come."""
    num_prompt_tokens: int


T = TypeVar("T", bound=Waiter)


@dataclass(slots=True, eq=False)
class Share:
    """Counts the requests of one client, or of one of its HTTP requests (prompts x n), which is then a *parent*.

    A client is everybody who uses one API key; all requests without a key are those of one client.
    """

    name: str
    quantum: int = 1
    """Requests that one turn admits."""
    num_requests: int = 0
    """Requests that were ever added; counted for parents only."""
    num_running: int = 0
    turn: Turn = (0, 0.0, "")
    """When it last began to wait: the order of a request that arrived or was preempted, or the moment in which one was
    admitted or ended."""
    order: tuple[int, Turn, str] = (0, (0, 0.0, ""), "")
    waiting: OrderedQueue[Any] = field(default_factory=OrderedQueue)
    """The waiting requests of a parent; those parents of a client that have some."""
    members: dict[str, Share] = field(default_factory=dict)
    """The parents of a client that have waiting or running requests, by name."""
    large: dict[str, Share] = field(default_factory=dict)
    """Those of `members` that run more requests than one turn admits."""

    def member(self, name: str, quantum: int) -> Share:
        """Return a member, which is made if there is none of that name."""
        if name not in self.members:
            self.members[name] = Share(name, quantum)
        return self.members[name]


class FairQueue(Generic[T]):
    """Holds the waiting requests, and counts the running ones to know whose turn it is.

    `add` a request, then `take` it when it is admitted or `remove` it while it waits. One that was taken is `put_back`
    when it is preempted, and `release`d when it ends.
    """

    def __init__(self, quantum: int = 1) -> None:
        """`quantum`: requests of one parent that a turn admits. No parent is preempted for another of its client while
        it runs no more than these."""
        self._quantum = quantum
        self._all = Share("")
        """The share of all clients together, which are its members."""
        self._shares_of: dict[str, tuple[Share, Share]] = {}
        """Request id -> parent and client, of requests that wait or run."""
        self._size = 0
        self._clock = 0
        self.num_prompt_tokens = 0
        """Prompt tokens of all waiting requests."""

    def __len__(self) -> int:
        return self._size

    @property
    def first(self) -> T | None:
        """The request whose turn it is."""
        client = self._all.waiting.first
        return None if client is None else client.waiting.first.waiting.first

    def tick(self) -> int:
        """Advance the queue's clock, which counts arrivals, admissions and ends, and return it."""
        self._clock += 1
        return self._clock

    def add(self, request: T, client_name: str, parent_name: str) -> None:
        """Add a new request of a client's HTTP request."""
        client = self._all.member(client_name, 1)
        parent = client.member(parent_name, self._quantum)
        parent.num_requests += 1
        self._shares_of[request.request_id] = parent, client
        self._update(request, waiting=1, running=0)

    def take(self, request: T) -> None:
        """Count a waiting request as running."""
        self._update(request, waiting=-1, running=1)

    def put_back(self, request: T) -> None:
        """Let a running request wait again, first among equals."""
        self._update(request, waiting=1, running=-1)

    def release(self, request: T) -> None:
        """Remove a running request that has ended."""
        self._update(request, waiting=0, running=-1)
        del self._shares_of[request.request_id]

    def remove(self, request: T) -> None:
        """Remove a waiting request."""
        self._update(request, waiting=-1, running=0)
        del self._shares_of[request.request_id]

    def shares_steps(self, under_way: T, waiting: T) -> bool:
        """Return whether a prompt that is partly computed leaves part of each step to a waiting one. It does not where
        both came one by one from one client: those are served one after the other."""
        (one, client), (other, others_client) = (self._shares_of[item.request_id] for item in (under_way, waiting))
        return client is not others_client or (one is not other and one.num_requests > 1)

    def victim(self, running: list[T]) -> T:
        """Return the request to preempt when blocks are short. `running` is in order. It is the last in order of the
        parent that runs most, of the client that runs most."""
        clients = self._all.members
        if len(clients) < 2 and not any(client.large for client in clients.values()):
            return running[-1]  # nobody runs more than another
        return max(running, key=self._load)

    def victim_for(self, waiting: T, running: list[T]) -> T | None:
        """Return the request to preempt so that a waiting one can run, if its client or parent has too small a share.
        It belongs to a client, or to another parent of the same client, that runs far more. It is never the only one of
        that, so the first of all requests in order always goes on."""
        parent, client = self._shares_of[waiting.request_id]
        for share, members in ((client, self._all), (parent, client)):
            largest = max(members.large.values(), key=attrgetter("num_running"), default=share)
            if largest is not share and largest.num_running >= PREEMPT_RATIO * (share.num_running + 1):
                return max((one for one in running if largest in self._shares_of[one.request_id]), key=self._load)
        return None

    def _load(self, request: T) -> tuple[int, int, Turn]:
        parent, client = self._shares_of[request.request_id]
        return client.num_running, parent.num_running // self._quantum, request.order

    def _update(self, request: T, waiting: int, running: int) -> None:
        """Change the counts of a request's parent and client by -1, 0 or 1, and sort both into the queues anew."""
        parent, client = self._shares_of[request.request_id]
        levels = ((parent, client), (client, self._all))
        for share, above in reversed(levels):
            if share.waiting.items:
                above.waiting.remove(share)
        if waiting < 0:
            parent.waiting.remove(request)
        now = (0, self.tick(), "") if running and waiting <= 0 else request.order
        others_wait = False
        for share, _ in levels:
            share.num_running += running
            if waiting > 0:
                others_wait = others_wait or bool(share.waiting.items)
                share.turn = min(share.turn, now) if others_wait else now
            elif running < 0 or (running and share.num_running % share.quantum == 0):
                share.turn = now
        if waiting > 0:
            parent.waiting.add(request)
        for share, above in levels:
            share.order = (share.num_running // share.quantum, share.turn, share.name)
            if share.num_running > share.quantum:
                above.large[share.name] = share
            else:
                above.large.pop(share.name, None)
            if share.waiting.items:
                above.waiting.add(share)
            elif not share.num_running:
                del above.members[share.name]
        self._size += waiting
        self.num_prompt_tokens += waiting * request.num_prompt_tokens
