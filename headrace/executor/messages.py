"""Defines the messages between an executor, its ranks and other machines, as msgspec structs."""

from __future__ import annotations

import msgspec

from headrace.config import EngineConfig
from headrace.distributed.network import Keys
from headrace.lora import LoRARequest
from headrace.step import Masks, RunnerOutput, SchedulerOutput, WorkerFacts


class RankConfig(msgspec.Struct, frozen=True):
    """Holds what a rank's process needs to start."""

    config: EngineConfig
    folder: str
    rank: int
    rendezvous: str
    """path of a file that every rank of the group can open; with `keys`, address of the store that they share"""
    progress: str
    """path of a file in which all ranks of this machine count what they do"""
    commands: str
    """zmq address on which the rank receives commands"""
    replies: str
    """zmq address to which the rank sends replies"""
    keys: Keys | None = None
    """of all these addresses; None: the ranks are on one machine"""
    group: int = 0
    """which of the groups that the executor has started this is"""
    address: str = "127.0.0.1"
    """where this machine listens for ranks of the others"""


class Load(msgspec.Struct, frozen=True, tag=True):
    """Calls `Worker.load`."""


class Profile(msgspec.Struct, frozen=True, tag=True):
    """Calls `Worker.profile`."""

    config: EngineConfig


class InitializeCache(msgspec.Struct, frozen=True, tag=True):
    """Calls `Worker.initialize_cache`."""

    num_pages: int


class Execute(msgspec.Struct, frozen=True, tag=True):
    """Calls `Worker.execute`."""

    step: SchedulerOutput


class Sample(msgspec.Struct, frozen=True, tag=True):
    """Calls `Worker.sample`."""

    masks: Masks


class ReadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Calls `Worker.read_adapter`, beside whose work the rank takes further commands."""

    request: LoRARequest
    dropped: list[int]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Ends the rank's process."""


Command = Load | Profile | InitializeCache | Execute | Sample | ReadAdapter | Stop


class Facts(msgspec.Struct, frozen=True, tag=True):
    """Answers a Load, Profile or InitializeCache; every rank sends one."""

    rank: int
    facts: WorkerFacts


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """Answers Execute, or Sample where the step was masked; the first rank of the last stage alone sends it."""

    output: RunnerOutput


class AdapterRead(msgspec.Struct, frozen=True, tag=True):
    """Answers a ReadAdapter; every rank sends one."""

    error: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Reports the error that ended a rank or a step."""

    rank: int
    error_class: str
    message: str


Reply = Facts | StepDone | AdapterRead | Failed


class Join(msgspec.Struct, frozen=True, tag=True):
    """Says that a node is there, and what it would run."""

    node: int
    alike: dict[str, str]
    """versions and files, which must be the first node's"""
    given: dict[str, str]
    """settings that the node was given, which must be the first node's too"""
    engines: int = 0
    """how many whole engines it runs, of which `node` is the first; 0: it runs ranks of one"""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Says that a node is still there, and how far its ranks have come."""

    group: int = 0
    progress: bytes = b""


class RankEnded(msgspec.Struct, frozen=True, tag=True):
    """Says that the process of a rank, or of an engine's core, has ended by itself."""

    group: int
    rank: int
    exit_code: int


NodeReply = Join | Beat | RankEnded


class StartRanks(msgspec.Struct, frozen=True, tag=True):
    """Tells a node to run ranks, in place of those that it runs."""

    group: int
    config: EngineConfig
    commands: dict[int, int]
    """rank -> the first node's port on which it receives commands"""
    replies: int
    store: int = 0
    """the first node's ports"""


class StartCore(msgspec.Struct, frozen=True, tag=True):
    """Tells a node to run the core of one of its engines, in place of an earlier one."""

    group: int
    rank: int
    config: EngineConfig
    requests: int
    replies: int
    """the first node's ports"""


class EndRanks(msgspec.Struct, frozen=True, tag=True):
    """Ends the ranks or cores of a node. `why`: what has failed, if anything."""

    why: str = ""
    rank: int | None = None
    """The one to end; None: all end, and the node may get another first node."""


class Refuse(msgspec.Struct, frozen=True, tag=True):
    """Answers a Join that cannot be."""

    why: str


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Asks nothing: sending it shows whether the node is connected."""


NodeCommand = StartRanks | StartCore | EndRanks | Refuse | Ping
