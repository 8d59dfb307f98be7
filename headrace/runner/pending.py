"""A step between launch and result: the copies to the host that are under way, and the lists they become.

Knows nothing of models; it only turns tensors into a RunnerOutput.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.errors import HeadraceError
from headrace.sampling.logprobs import LogprobTensors
from headrace.step import Logprobs, RunnerOutput

REJECTED = -3
"""In place of a token that was sampled behind a wrong draft; beside step.NO_TOKEN_ALLOWED and LOGITS_NOT_FINITE."""


@dataclass(frozen=True)
class HostLogprobs:
    """LogprobTensors on their way to the host, and how many alternatives each entry's request asked for."""

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    ks: list[int | None]
    """per entry; None: this request asked for no logprobs"""

    def entries(self) -> list[Logprobs | None]:
        ids, values, ranks = self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist()
        return [
            None if k is None else Logprobs(ids[i][: k + 1], values[i][: k + 1], ranks[i])
            for i, k in enumerate(self.ks)
        ]


@dataclass(frozen=True)
class FinishedStep:
    """A step that left nothing to wait for."""

    output: RunnerOutput

    def done(self) -> bool:
        return True

    def result(self) -> RunnerOutput:
        return self.output


@dataclass(frozen=True)
class Notes:
    """Lines for the log, which go up with the next step's result."""

    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    graph_bytes: dict[str, int] = field(default_factory=dict)
    """Memory that CUDA graphs of each kind took"""

    def take(self) -> Notes | None:
        """What is new, once; None: nothing."""
        if not self.lines and not self.warnings:
            return None
        taken = Notes(self.lines.copy(), self.warnings.copy(), dict(self.graph_bytes))
        self.lines.clear()
        self.warnings.clear()
        return taken


class PendingStep:
    """A step whose work is queued on the device. Construct it right after queueing; `result()` waits for it."""

    def __init__(
        self,
        step: int,
        token_ids: Tensor | None = None,
        logprobs: HostLogprobs | None = None,
        prompt_logprobs: dict[int, HostLogprobs] | None = None,
        event: torch.cuda.Event | None = None,
        notes: Notes | None = None,
        samples: list[int] | None = None,
    ) -> None:
        """`samples`: of each request, where some have drafts, of which REJECTED tells those that do not count."""
        self._step = step
        self._samples = samples
        self._token_ids = token_ids
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs or {}
        self._event = event
        self._notes = notes or Notes()

    def done(self) -> bool:
        return self._event is None or self._event.query()

    def result(self) -> RunnerOutput:
        if self._event is not None:
            self._event.synchronize()
        token_ids: list[int] = [] if self._token_ids is None else self._token_ids.tolist()
        logprobs = [] if self._logprobs is None else self._logprobs.entries()
        num_sampled = []
        if self._samples is not None:
            first = 0
            for count in self._samples:
                num_sampled.append(count - token_ids[first : first + count].count(REJECTED))
                first += count
            logprobs = [entry for entry, token in zip(logprobs, token_ids, strict=False) if token != REJECTED]
            token_ids = [token for token in token_ids if token != REJECTED]
        return RunnerOutput(
            self._step,
            token_ids,
            logprobs,
            {
                row: [entry for entry in host.entries() if entry is not None]
                for row, host in self._prompt_logprobs.items()
            },
            self._notes.lines,
            self._notes.warnings,
            graph_bytes=self._notes.graph_bytes,
            num_sampled=num_sampled,
        )


class Outgoing:
    """Where sampled tokens come to lie on the host: pinned buffers that take turns, so that a step may be queued while
    the results of `turns` - 1 before it have not been read. On a CPU each step has its own."""

    def __init__(self, most: int, device: torch.device, turns: int = 4) -> None:
        pinned = device.type != "cpu"
        self._buffers = [torch.empty(most, dtype=torch.int64, pin_memory=True) for _ in range(turns * pinned)]
        self._turn = 0

    def next(self, count: int) -> Tensor:
        """# [count] int64"""
        if not self._buffers:
            return torch.empty(count, dtype=torch.int64)
        if count > len(self._buffers[0]):
            raise HeadraceError(f"a step samples {count} tokens, more than rows can have")
        self._turn = (self._turn + 1) % len(self._buffers)
        return self._buffers[self._turn][:count]


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, queued on the current stream; valid once the stream has reached it. On CPU a copy too, so
    that a later step cannot change it."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def logprobs_to_host(tensors: LogprobTensors, ks: list[int | None]) -> HostLogprobs:
    return HostLogprobs(to_host(tensors.token_ids), to_host(tensors.logprobs), to_host(tensors.ranks), ks)
