"""Compares whole steps on a small cache: all fast kernels with their references, graphs with eager steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from headrace.attention.batch import Batch
from headrace.graph_sizes import GraphSettings
from headrace.kernels.cases import relative_error
from headrace.layers.attention import Attention
from headrace.layers.moe import SparseMoE
from headrace.runner.cuda_graph import CudaDevice, GraphDevice, Shape
from headrace.runner.kernel_checks import Subject
from headrace.runner.model_runner import ModelRunner, RunnerLimits
from headrace.runner.pipeline import Pipeline
from headrace.runner.self_check import Check, switches
from headrace.sampling_params import SamplingParams
from headrace.step import BlockUpdate, NewRow, SchedulerOutput

BOUND = {torch.bfloat16: 0.1, torch.float16: 3e-2, torch.float32: 1e-2}
"""Bounds of the rounding errors of a whole model, which add up from layer to layer"""
COARSE = 0.25
"""Bound where a small difference may choose another expert, or another number of an fp8 type"""
PROMPTS = (12, 5)
"""Prompt tokens of the requests"""
SEQS, LENGTH = 4, 32


def scratch_limits(vocab_size: int) -> RunnerLimits:
    """Return the limits of the runner on which steps are checked."""
    return RunnerLimits(SEQS, 2 * LENGTH, LENGTH, vocab_size)


def step_checks(
    subject: Subject,
    settings: GraphSettings | None,
    refused: set[str],
    pipeline: Pipeline | None = None,
    device: Callable[[torch.device], GraphDevice] = CudaDevice,
) -> Iterator[Check]:
    """Yield the checks of whole steps, or of what a stage of `pipeline` computes of them, which is given made-up hidden
    states. `settings` must be made for `scratch_limits`. A demoted kind of graph, `decode`,
    `other` or `alone`, is added to `refused`."""
    limits = scratch_limits(subject.vocab_size)
    fused = any(layer.decode is not None for layer in subject.layers(Attention))
    if not (settings or fused or switches(subject.kernels)):
        return
    runner = ModelRunner(
        subject.model, subject.kernels, subject.shape, limits, subject.device, settings, device, pipeline=pipeline,
        dtype=subject.dtype,
    )  # fmt: skip
    runner.make_up_hidden_states()
    runner.allocate(subject.shape.layout.pages_for(LENGTH, LENGTH, SEQS))
    if fused or switches(subject.kernels):
        yield _references_check(subject, runner, refused)
    for kind in ("decode", "other", "alone"):
        left = without_graphs(settings, refused)
        if left is not None and (left.alone_sizes if kind == "alone" else getattr(left, kind) != "none"):
            yield _graph_check(subject, runner, kind, refused)
    runner.graphs = None  # they hold memory, and the runner


def _bound(subject: Subject) -> float:
    coarse = subject.shape.dtype.itemsize == 1 or subject.rounding_linears() or subject.layers(SparseMoE)
    return COARSE if coarse else BOUND[subject.dtype]


def _steps(runner: ModelRunner) -> dict[str, SchedulerOutput]:
    """Return by kind two prompts, a decode of each, and the first prompt alone; each may run more than once."""
    limits, rows = runner.limits, list(range(len(PROMPTS)))
    params = SamplingParams(temperature=0.0, max_tokens=None, seed=0)
    ids = [[(row * 31 + place * 7919) % limits.vocab_size for place in range(PROMPTS[row] + 1)] for row in rows]
    new = [NewRow(row, ids[row], params, []) for row in rows]
    owned = _own_blocks(runner, rows)
    prompts = SchedulerOutput(0, new, rows, owned, rows, [0] * len(rows), list(PROMPTS), [True] * len(rows))
    decodes = SchedulerOutput(1, [], [], [], rows, list(PROMPTS), [1] * len(rows), [True] * len(rows))
    alone = SchedulerOutput(2, [], [], [], rows[:1], [0], [PROMPTS[0]], [True])
    return {"other": prompts, "decode": decodes, "alone": alone}


def _own_blocks(runner: ModelRunner, rows: list[int]) -> list[BlockUpdate]:
    """Return blocks for the longest sequences in each cache group, in pages of the group's own."""
    updates, page = [], 0
    for number, group in enumerate(runner.shape.layout.groups):
        count = group.most_blocks(LENGTH, LENGTH)
        first = page * group.blocks_per_page
        for row in rows:
            updates.append(BlockUpdate(row, 0, list(range(first + row * count, first + (row + 1) * count)), number))
        page += -(-SEQS * count // group.blocks_per_page)
    return updates


def _references_check(subject: Subject, runner: ModelRunner, refused: set[str]) -> Check:
    def error() -> float:
        fast = _eagerly(subject, runner)
        with _by_references(subject):
            expected = _eagerly(subject, runner)
        return relative_error(fast, expected)

    def demote() -> str:
        _use_references(subject)
        refused.update(("decode", "other"))
        return "the references of all kernels, without graphs"

    return Check("whole_step", error, _bound(subject), demote, collective=True)


def _eagerly(subject: Subject, runner: ModelRunner) -> tuple[Tensor, ...]:
    """Return the logits of each step's last tokens; their hidden states where another stage has the head."""
    logits = []
    for kind, step in _steps(runner).items():
        if kind == "decode" and not subject.decodes:
            continue
        runner.state.apply(step)
        batch = runner.batch_of(step)
        hidden, _ = runner.forward(batch)
        last = hidden[batch.sample_index]
        logits.append(runner.model.compute_logits(last) if runner.pipeline.stage.is_last else last)
    return tuple(logits)


def _use_references(subject: Subject) -> None:
    for switch in switches(subject.kernels).values():
        switch.demote()
    subject.drop_fused_decode()


@contextmanager
def _by_references(subject: Subject) -> Iterator[None]:
    held, layers = switches(subject.kernels).values(), subject.layers(Attention)
    before = [switch.call for switch in held], [layer.decode for layer in layers]
    _use_references(subject)
    try:
        yield
    finally:
        for switch, call in zip(held, before[0], strict=True):
            switch.call = call
        for layer, decode in zip(layers, before[1], strict=True):
            layer.decode = decode


def _graph_check(subject: Subject, runner: ModelRunner, kind: str, refused: set[str]) -> Check:
    def error() -> float:
        steps = _steps(runner)
        runner.renew_graphs()
        runner.notes.take()
        step = steps[kind]
        runner.state.apply(steps["other"])

        def batch(shape: Shape | None) -> Batch:  # behind the prompts alone, since a decode moves recurrent states on
            runner.forward(runner.batch_of(steps["other"]))
            return runner.batch_of(step, shape)

        batch(None)
        graphs = runner.graphs
        assert graphs is not None
        shape = graphs.shape_of(step)
        if shape is None:
            return 0.0
        expected = runner.forward(batch(shape))[0][: step.num_tokens].clone()
        worst = 0.0
        for _ in range(3):  # eager, captured, replayed
            worst = max(worst, relative_error(graphs.run(shape, batch(shape))[: step.num_tokens], expected))
        if runner.notes.warnings:
            raise RuntimeError(runner.notes.warnings[-1])
        return worst

    def demote() -> str:
        refused.add(kind)
        return "eager steps"

    return Check(f"cuda_graph_{kind}", error, _bound(subject), demote, collective=True)


def without_graphs(settings: GraphSettings | None, refused: set[str]) -> GraphSettings | None:
    """Return `settings` without the kinds that were refused; None: nothing is captured."""
    if settings is None:
        return None
    left = replace(settings, **dict.fromkeys(refused, "none"))  # pyrefly: ignore[bad-argument-type]
    return None if left.decode == left.other == "none" else left
