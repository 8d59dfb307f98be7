"""Keeps settings that `headrace tune` measured to be better than the plan's, for one model, machine and version.

A profile is a small JSON file in the cache folder. One that is unreadable, or that was made for something else, is
ignored, and the log says so.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from headrace import __version__
from headrace.config import EngineConfig
from headrace.environment import cache_folder
from headrace.model_config import ModelConfig
from headrace.planner.chips import read_gpus
from headrace.planner.decisions import USUAL_OBJECTIVE
from headrace.planner.graphs import GRAPH_KEYS
from headrace.planner.record import Decision

logger = logging.getLogger(__name__)

BASE = ("tensor_parallel_size", "pipeline_parallel_size", "quantization", "dtype", "batch_invariant", "block_size")
"""Fields of EngineConfig in which an engine must equal the one that was tuned."""


@dataclass(frozen=True)
class Measured:
    """Holds a value of one field that was better than the plan's."""

    value: int | str | dict[str, Any]
    over: Any
    """the plan's value"""
    gain: float
    """1.06: 6% better by itself"""


class Workload(TypedDict):
    """Describes the requests with which an engine was tuned."""

    input_len: int
    output_len: int
    concurrency: int | None
    """None: all at once"""
    request_rate: float | None


@dataclass(frozen=True)
class Profile:
    """Holds what one session of tuning measured."""

    model: str
    machine: str
    device: str
    base: dict[str, Any]
    """fields of EngineConfig that an engine must share to take the settings"""
    objective: str
    workload: Workload
    when: str
    """2026-01-31"""
    gained: str
    """what `gain` is counted in: `output tok/s`"""
    settings: dict[str, Measured] = field(default_factory=dict)
    version: str = __version__

    def reason(self, measured: Measured) -> str:
        load = f"{self.workload['input_len']}/{self.workload['output_len']}"
        return f"tuned on {self.when} for {load}: {measured.gain - 1:+.1%} over {measured.over}, in {self.gained}"


def measured_here(config: EngineConfig, model: ModelConfig, device: str) -> dict[str, Decision]:
    """Return the decisions that were measured here, by field, without those that go against a flag of the user's."""
    profile = find_profile(model) if config.use_profile else None
    if profile is None:
        return {}
    if why_not := _mismatch(profile, config, device):
        logger.info("profile of %s not used: %s", profile.when, why_not)
        return {}
    return {
        name: Decision(name, measured.value, profile.reason(measured), str(measured.over), "measured")
        for name, measured in profile.settings.items()
        if _allowed(name, measured.value, config)
    }


def profile_path(model: ModelConfig, machine: str) -> Path:
    return cache_folder() / "profiles" / f"{digest(model.raw)}-{digest(machine)}.json"


def write_profile(profile: Profile, model: ModelConfig) -> Path:
    """Write the profile whole or not at all: where that fails, OSError is raised and the one before stays."""
    path = profile_path(model, profile.machine)
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise
    return path


def find_profile(model: ModelConfig, machine: Callable[[], str] | None = None) -> Profile | None:
    """Find the profile of this model, machine and version, if there is one. The machine is looked at only where the
    model has any profile."""
    folder = cache_folder() / "profiles"
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("profiles in %s ignored: %s", folder, error.strerror)
        return None
    if not any(name.startswith(f"{digest(model.raw)}-") for name in names):
        return None
    return _read(profile_path(model, (machine or machine_name)()))


def _read(path: Path) -> Profile | None:
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        logger.warning("profile %s ignored: %s", path, error)
        return None
    if profile.version != __version__:
        logger.info("profile %s ignored: it is of headrace %s; `headrace tune` renews it", path, profile.version)
        return None
    return profile


def machine_name() -> str:
    """Name this machine's GPUs (`NVIDIA H200`), or else its CPU: `AMD EPYC 9554, 64 cores`."""
    gpus = sorted({name.strip() for name, _ in read_gpus()})
    if gpus:
        return " + ".join(gpus)
    cpu = None
    with suppress(OSError):
        cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{cpu[1].strip() if cpu else 'CPU'}, {len(os.sched_getaffinity(0))} cores"


def digest(value: Any) -> str:
    """Return a short key for any JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _mismatch(profile: Profile, config: EngineConfig, device: str) -> str:
    """Why a profile is for something else than this start; empty: it is not."""
    wanted: dict[str, tuple[Any, Any]] = {"device": (profile.device, device)}
    wanted |= {name: (value, getattr(config, name, None)) for name, value in profile.base.items()}
    wanted["objective"] = (profile.objective, config.objective or USUAL_OBJECTIVE)
    for name in ("input_len", "output_len", "concurrency"):
        expected = getattr(config, f"expected_{name}")
        if expected is not None:
            wanted[f"expected_{name}"] = (profile.workload.get(name), expected)
    return "; ".join(f"it is for {name} {a}, not {b}" for name, (a, b) in wanted.items() if a != b)


def _allowed(name: str, value: Any, config: EngineConfig) -> bool:
    """Whether a measured value goes with what the user gave."""
    if name in ("max_num_batched_tokens", "max_num_seqs") and not isinstance(value, int):
        return False
    if name == "max_num_batched_tokens":
        return config.enable_chunked_prefill and value >= (config.max_num_seqs or 0)
    if name == "max_num_seqs":
        return config.max_num_batched_tokens is None or value <= config.max_num_batched_tokens
    if name == "cudagraph_mode":
        return not config.enforce_eager and not any(key in config.compilation_config for key in GRAPH_KEYS)
    if name == "kv_cache_dtype" and str(value).startswith("fp8"):  # lossy
        return config.objective == "throughput"
    if name == "attention_backend":  # chosen for the cache that it was measured with
        return config.kv_cache_dtype == "auto"
    if name == "speculative_config":
        return isinstance(value, dict) and not config.speculative_config
    return True
