"""Turns a step's results, which the device is still computing, into a RunnerOutput on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.errors import HeadraceError
from headrace.pooling import Pooled
from headrace.sampling.logprobs import LogprobTensors
from headrace.step import LOGITS_NOT_FINITE, ExpertLoad, Logprobs, RunnerOutput, SchedulerOutput

REJECTED = -3
"""Stands for a token that was sampled behind a wrong draft; see also step.NO_TOKEN_ALLOWED and LOGITS_NOT_FINITE."""


@dataclass(frozen=True)
class HostLogprobs:
    """Holds log-probabilities on their way to the host."""

    tensors: LogprobTensors
    ks: list[int | None]
    """for each entry, how many alternatives its request asked for; None: the request asked for no logprobs"""

    @staticmethod
    def of(tensors: LogprobTensors, ks: list[int | None]) -> HostLogprobs:
        """Begin to copy `tensors` to the host."""
        return HostLogprobs(LogprobTensors(*map(to_host, tensors)), ks)

    def entries(self) -> list[Logprobs | None]:
        """Return the entries as lists; call it once the copies have arrived."""
        ids, values, ranks = (tensor.tolist() for tensor in self.tensors)
        return [
            None if k is None else Logprobs(ids[i][: k + 1], values[i][: k + 1], ranks[i])
            for i, k in enumerate(self.ks)
        ]


@dataclass(frozen=True)
class Notes:
    """Collects lines for the log, which travel with the next step's result."""

    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    graph_bytes: dict[str, int] = field(default_factory=dict)
    """memory that CUDA graphs of each kind take"""

    def take(self) -> Notes | None:
        """Return the lines that have come since the last call; None if there are none."""
        if not self.lines and not self.warnings:
            return None
        taken = Notes(self.lines.copy(), self.warnings.copy(), dict(self.graph_bytes))
        self.lines.clear()
        self.warnings.clear()
        return taken


@dataclass(frozen=True)
class FinishedStep:
    """Stands for a step whose result is already on the host."""

    output: RunnerOutput

    def done(self) -> bool:
        return True

    def result(self) -> RunnerOutput:
        return self.output


@dataclass(eq=False, slots=True)
class MaskedStep:
    """Stands for a step that stops before it samples. Once its masks have come it is what `sampled` is."""

    step: SchedulerOutput
    sampled: PendingStep | FinishedStep | None = None

    def done(self) -> bool:
        return self.sampled is not None and self.sampled.done()

    def result(self) -> RunnerOutput:
        if self.sampled is None:
            raise HeadraceError(f"step {self.step.step} has no masks yet, so it never ends")
        return self.sampled.result()


@dataclass(eq=False, slots=True)
class PendingStep:
    """Stands for a step whose work is queued on the device; `result` waits for it."""

    step: int
    token_ids: Tensor | None = None
    """[n] int64 on the host, filled by the device"""
    logprobs: HostLogprobs | None = None
    prompt_logprobs: dict[int, HostLogprobs] = field(default_factory=dict)
    """by row"""
    event: torch.cuda.Event | None = None
    """recorded behind the step's work; None: there is nothing to wait for"""
    notes: Notes | None = None
    samples: list[int] | None = None
    """how many of `token_ids` are each request's, where some have drafts; those after a wrong draft are REJECTED"""
    drafts: tuple[list[int], Tensor] | None = None
    """rows that had masks, and the drafts behind their newest tokens # [rows, num_drafts] int32 on the host"""
    pooled: dict[int, Tensor] = field(default_factory=dict)
    """by row, what a model that pools made # [n, width] float32 on the host"""
    completes: list[int] = field(default_factory=list)
    """rows of the texts that such a model has completed"""
    expert_load: Callable[[], ExpertLoad] | None = None
    """tells where its tokens went, if it was counted"""

    def done(self) -> bool:
        return self.event is None or self.event.query()

    def result(self) -> RunnerOutput:
        if self.event is not None:
            self.event.synchronize()
        token_ids: list[int] = [] if self.token_ids is None else self.token_ids.tolist()
        logprobs = [] if self.logprobs is None else self.logprobs.entries()
        num_sampled = []
        if self.samples is not None:
            first = 0
            for count in self.samples:
                num_sampled.append(count - token_ids[first : first + count].count(REJECTED))
                first += count
            logprobs = [entry for entry, token in zip(logprobs, token_ids, strict=False) if token != REJECTED]
            token_ids = [token for token in token_ids if token != REJECTED]
        prompts = {
            row: [entry for entry in host.entries() if entry is not None] for row, host in self.prompt_logprobs.items()
        }
        notes = self.notes or Notes()
        drafts = {} if self.drafts is None else dict(zip(self.drafts[0], self.drafts[1].tolist(), strict=True))
        if self.completes:
            token_ids = [0 if bool(self.pooled[row].isfinite().all()) else LOGITS_NOT_FINITE for row in self.completes]
        pooled = {row: Pooled(made.numpy().tobytes(), made.shape[1]) for row, made in self.pooled.items()}
        return RunnerOutput(
            self.step, token_ids, logprobs, prompts, notes.lines, notes.warnings, graph_bytes=notes.graph_bytes,
            num_sampled=num_sampled, drafts=drafts, pooled=pooled,
            expert_load=None if self.expert_load is None else self.expert_load(),
        )  # fmt: skip


class TokenBuffers:
    """Holds sampled tokens for the host, in pinned buffers used by turns: one is overwritten `turns` steps later, and
    must have been read by then. On a CPU each step gets a buffer of its own."""

    def __init__(self, most: int, device: torch.device, turns: int = 4) -> None:
        pinned = device.type != "cpu"
        self._buffers = [torch.empty(most, dtype=torch.int64, pin_memory=True) for _ in range(turns * pinned)]
        self._turn = 0

    def next(self, count: int) -> Tensor:
        """Return a buffer for `count` tokens # [count] int64."""
        if not self._buffers:
            return torch.empty(count, dtype=torch.int64)
        if count > len(self._buffers[0]):
            raise HeadraceError(f"a step samples {count} tokens, more than rows can have")
        self._turn = (self._turn + 1) % len(self._buffers)
        return self._buffers[self._turn][:count]


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy on the host, which is valid once the current stream has reached this point. On a CPU it is a copy
    too, so that later steps do not change it."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
