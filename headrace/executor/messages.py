"""Defines the messages between an executor and its ranks, as msgspec structs."""

from __future__ import annotations

import msgspec

from headrace.config import EngineConfig
from headrace.lora import LoRARequest
from headrace.step import Masks, RunnerOutput, SchedulerOutput, WorkerFacts


class RankConfig(msgspec.Struct, frozen=True):
    """Holds what a rank's process needs to start."""

    config: EngineConfig
    folder: str
    rank: int
    rendezvous: str
    """path of a file that every rank of the group can open"""
    progress: str
    """path of a file in which all ranks count what they do"""
    commands: str
    """zmq address on which the rank receives commands"""
    replies: str
    """zmq address to which the rank sends replies"""


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
