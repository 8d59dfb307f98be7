"""What an executor and its ranks say to each other, as msgspec structs."""

from __future__ import annotations

import msgspec

from headrace.config import EngineConfig
from headrace.step import RunnerOutput, SchedulerOutput, WorkerFacts


class RankConfig(msgspec.Struct, frozen=True):
    config: EngineConfig
    folder: str
    rank: int
    rendezvous: str
    """file://PATH, a file that every rank of the group can open"""
    commands: str
    """zmq address on which the rank receives commands"""
    replies: str
    """zmq address to which the rank sends replies"""


class Load(msgspec.Struct, frozen=True, tag=True):
    pass


class Profile(msgspec.Struct, frozen=True, tag=True):
    config: EngineConfig


class InitializeCache(msgspec.Struct, frozen=True, tag=True):
    num_pages: int


class Execute(msgspec.Struct, frozen=True, tag=True):
    step: SchedulerOutput


class Stop(msgspec.Struct, frozen=True, tag=True):
    pass


Command = Load | Profile | InitializeCache | Execute | Stop


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The answer to Load and Profile."""

    rank: int
    facts: WorkerFacts


class CacheReady(msgspec.Struct, frozen=True, tag=True):
    """Unless the facts have a shortfall."""

    rank: int
    facts: WorkerFacts


class StepDone(msgspec.Struct, frozen=True, tag=True):
    output: RunnerOutput


class Failed(msgspec.Struct, frozen=True, tag=True):
    rank: int
    error_class: str
    message: str


Reply = Loaded | CacheReady | StepDone | Failed
