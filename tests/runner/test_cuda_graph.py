"""Five graph modes give the tokens of none, through the real runner, scheduler and core, with graphs that a recorder
stands in for."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace
from functools import cache

import pytest
import torch

from headrace.attention.batch import Batch
from headrace.config import GRAPH_MODES
from headrace.request import EngineCoreRequest
from headrace.runner.cuda_graph import Shape, StepGraphs, _for_any_lengths
from headrace.runner.input_batch import InputBatch
from headrace.runner.model_runner import ModelRunner
from headrace.sampling_params import SamplingParams
from headrace.step import BlockUpdate, NewRow, SchedulerOutput
from tests.runner.fakes import RecordingDevice, shapes_of
from tests.runner.harness import CPU, MODELS, Answers, check, make_core, make_runner, serve
from tests.sampled import sampled

MODES = [mode for mode in GRAPH_MODES if mode != "NONE"]


@cache
def without_graphs(name: str) -> Answers:
    """The answers of a model whose steps are all eager: mixed ones and chunks, prefix hits and preemptions."""
    core = make_core(make_runner(name, "NONE"), num_blocks=26)
    answers = serve(core, grammars=False)
    stats = core.scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0
    steps = core._executor.steps  # type: ignore[attr-defined]
    kinds = {(max(s.num_scheduled_tokens) == 1, all(s.samples), len(s.rows) > 1) for s in steps if s.rows}
    assert {(True, True, True), (False, True, True), (False, False, True)} <= kinds
    return answers


@sampled(("name", "mode"), (*MODELS, "demo"), MODES)
def test_five_modes_give_the_same_tokens(name: str, mode: str) -> None:
    runner = make_runner(name, mode)
    check(serve(make_core(runner, num_blocks=26), grammars=False), without_graphs(name))
    assert runner.graphs is not None
    kinds = {(shape.kind, shape.decode) for shape in shapes_of(runner.graphs) if not shape.alone}
    decode, other = GRAPH_MODES[mode]
    wanted = {(decode, decode == "full")} | ({(other, False)} if other != "none" else set())
    assert kinds == wanted
    replayed = [graph.replays for graph in runner.graphs._device.graphs]  # type: ignore[attr-defined]
    assert min(replayed) >= 1
    assert max(replayed) > 2


def decode_step(number: int, rows: list[int], computed: int) -> SchedulerOutput:
    return SchedulerOutput(number, [], [], [], rows, [computed] * len(rows), [1] * len(rows), [True] * len(rows))


def recorded(mode: str, **sizes: object) -> tuple[ModelRunner, StepGraphs, RecordingDevice]:
    """A runner, its graphs, and the device that records them."""
    runner = make_runner("llama", mode, **sizes)
    runner.allocate(8)
    assert runner.graphs is not None
    device = runner.graphs._device
    assert isinstance(device, RecordingDevice)
    return runner, runner.graphs, device


def test_a_size_is_captured_when_it_is_used_again() -> None:
    runner, graphs, _ = recorded("FULL_DECODE_ONLY")
    outputs = []
    for number, captured in enumerate([set(), {Shape("full", True, 4, 4)}, {Shape("full", True, 4, 4)}]):
        outputs.append(runner.execute(decode_step(number, [0, 1, 2], 0)).result())
        assert shapes_of(graphs) == captured
    said = [
        ["a full graph of 4 decodes would serve a step, which is the first of its size and loads kernels"],
        ["captured a full graph of 4 decodes (1 full graphs: 0.0 MiB)"],
    ]
    assert [output.notes for output in outputs] == [*said, []]
    assert outputs[1].graph_bytes == {"full": 1000}


def test_a_step_that_other_engines_take_has_as_many_tokens_as_theirs() -> None:
    """Or it is eager: in no graph may a rank bring other numbers of rows than the rest."""
    _, graphs, _ = recorded("FULL_AND_PIECEWISE")
    most = graphs.settings.max_num_seqs
    sizes = sorted(graphs.settings.token_sizes("full", "piecewise"))
    assert [graphs.padded(size) for size in (1, 3, sizes[-1], sizes[-1] + 1)] == [1, 4, sizes[-1], sizes[-1] + 1]
    decodes = decode_step(0, [0, 1, 2], 0)
    chunk = SchedulerOutput(1, [], [], [], [0], [8], [5], [False])
    for rows in (4, most, 16, sizes[-1]):
        assert rows in sizes
        shape = graphs.shape_of(decodes, rows=rows)
        assert shape is not None
        assert (shape.num_tokens, shape.decode) == (rows, rows <= most), "beyond as many decodes, as any step"
        assert rows < 5 or (found := graphs.shape_of(chunk, rows=rows)) is None or found.num_tokens == rows
    assert graphs.shape_of(decodes, rows=sizes[-1] + 1) is None
    assert graphs.shape_of(decodes) == Shape("full", True, 4, 4)


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "PIECEWISE"])
def test_without_room_a_size_stays_eager_and_says_so(mode: str) -> None:
    runner, graphs, device = recorded(mode)
    runner.execute(decode_step(0, [0, 1], 0)).result()
    device.failures = 2
    outputs = [runner.execute(decode_step(number, [0, 1], 0)).result() for number in (1, 2)]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert shapes_of(graphs) == set()
    assert device.memory.emptied == 2
    (note,) = outputs[0].warnings
    assert outputs[1].warnings == []
    assert note.startswith("no room for a ")
    assert note.endswith("which stays eager: CUDA out of memory. Tried to allocate 20.00 MiB.")


def test_a_capture_that_finds_room_after_memory_is_given_back() -> None:
    runner, graphs, device = recorded("FULL_DECODE_ONLY")
    runner.execute(decode_step(0, [0, 1], 0)).result()
    device.failures = 1
    runner.execute(decode_step(1, [0, 1], 0)).result()
    assert shapes_of(graphs) == {Shape("full", True, 2, 2)}


def test_memory_that_ends_within_a_forward_pass_leaves_no_capture_under_way() -> None:
    runner, graphs, device = recorded("PIECEWISE")
    runner.execute(decode_step(0, [0, 1], 0)).result()
    calls = []

    def second_capture_fails() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    device.fail_if_told = second_capture_fails  # type: ignore[method-assign]
    runner.execute(decode_step(1, [0, 1], 0)).result()
    assert not device.under_way
    assert shapes_of(graphs) == {Shape("piecewise", False, 0, 2)}, "the second try succeeded"


def test_after_three_other_failures_of_captures_their_kind_is_given_up() -> None:
    runner, graphs, device = recorded("FULL_DECODE_ONLY")
    expected = runner.execute(decode_step(0, [0], 0)).result()

    def fail() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    device.fail_if_told = fail  # type: ignore[method-assign]
    steps = ([0], [0, 1], [0, 1], [0], [0], [0, 1])
    outputs = [runner.execute(decode_step(1, rows, 0)).result() for rows in steps]
    assert [output.token_ids[0] for output in outputs] == expected.token_ids * len(steps)
    assert shapes_of(graphs) == set()
    said = "RuntimeError: operation not permitted when stream is capturing"
    assert [output.warnings for output in outputs] == [
        [f"a full graph of 1 decodes could not be captured, and is tried again: {said}"],
        [],  # the first use of its size
        [f"a full graph of 2 decodes could not be captured, and is tried again: {said}"],
        [f"no full graphs from now on, since 3 could not be captured: {said}"],
        [],
        [],
    ]


def test_a_capture_that_failed_once_is_tried_again() -> None:
    runner, graphs, device = recorded("FULL_DECODE_ONLY")
    runner.execute(decode_step(0, [0], 0)).result()
    failures = [RuntimeError("operation failed due to a previous error during capture")]

    def fail_once() -> None:
        if failures:
            raise failures.pop()

    device.fail_if_told = fail_once  # type: ignore[method-assign]
    (warning,) = runner.execute(decode_step(1, [0], 0)).result().warnings
    assert "is tried again" in warning
    output = runner.execute(decode_step(2, [0], 0)).result()
    assert output.warnings == []
    assert shapes_of(graphs) == {Shape("full", True, 1, 1)}


def test_graphs_keep_no_memory_for_their_results_and_go_at_once_when_dropped() -> None:
    """A hundred graphs would keep their hidden states, and break up the memory that all of them compute in; and what is
    dropped goes with all that it holds: the next one to measure memory must not find it."""
    core = make_core(make_runner("llama", "FULL_AND_PIECEWISE"), num_blocks=26)
    serve(core, grammars=False)
    runner = core._executor.runner  # type: ignore[attr-defined]
    graphs = runner.graphs
    borrowed = {id(tensor) for _, tensor in graphs._device.borrowed}
    assert {shape.kind for shape in graphs._captured} == runner.notes.graph_bytes.keys() == {"full", "piecewise"}
    assert all(id(captured.hidden) in borrowed for captured in graphs._captured.values())
    gone = weakref.ref(graphs)
    del graphs
    gc.collect()
    gc.disable()
    try:
        runner.renew_graphs()
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("mode", MODES)
def test_what_is_warmed_up_is_captured_before_it_comes_up(mode: str) -> None:
    runner = make_runner("llama", mode)
    settings = runner.graph_settings
    assert settings is not None
    core = make_core(runner, num_blocks=26, warmup_sizes=settings.warmup_sizes)
    while core.warm_up():
        pass
    assert runner.graphs is not None
    before = shapes_of(runner.graphs)
    assert {shape.num_tokens for shape in before if shape.kind == settings.decode} >= set(settings.decode_sizes)
    if settings.other == "piecewise":
        assert {shape.num_tokens for shape in before if shape.kind == "piecewise"} >= set(settings.other_sizes) - {1}
    check(serve(core, grammars=False), without_graphs("llama"))
    after = shapes_of(runner.graphs)
    assert after == before or settings.other == "full", "of whole mixed steps one number of requests is warmed up"


def test_warming_up_begins_with_what_the_last_requests_left() -> None:
    """A row that asked for draws and penalties is told to be free, else the step would sample for it."""
    runner = make_runner("llama", "FULL_DECODE_ONLY")
    assert runner.graph_settings is not None
    core = make_core(runner, num_blocks=26, warmup_sizes=runner.graph_settings.warmup_sizes)
    core.add_request(
        EngineCoreRequest(
            request_id="a", prompt_token_ids=[5, 6, 7], max_tokens=2, seed=1,
            params=SamplingParams(max_tokens=2, temperature=1.0, top_p=0.5, repetition_penalty=1.5, logprobs=1),
        )
    )  # fmt: skip
    while core.has_work():
        core.step()
    assert runner.state.sampling.features
    assert core.warm_up()
    assert not runner.state.sampling.features


def test_a_warm_up_step_that_fails_is_the_last() -> None:
    runner = make_runner("llama", "FULL_DECODE_ONLY")
    core = make_core(runner, num_blocks=26, warmup_sizes=[(1, 1), (2, 2)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "execute", lambda step: 1 / 0)
        assert core.warm_up()
    assert not core.warm_up()


def test_steps_with_adapters_have_graphs_of_their_own() -> None:
    """Which serve requests whatever adapters they have, and leave those without as they are."""
    eager, captured = (make_runner("llama", mode, max_loras=2) for mode in ("NONE", "FULL_AND_PIECEWISE"))
    for runner in (eager, captured):
        runner.allocate(26)

    def answers(runner: ModelRunner, *slots: int) -> list[list[int]]:
        """Of three requests: a step for their prompts, then decodes."""
        rows, params = [0, 1, 2], SamplingParams(temperature=0.0)
        new = [NewRow(row, [7 * row + 1, 2, 9, 4, 30], params, [], adapter_slot=slots[row]) for row in rows]
        blocks = [BlockUpdate(row, 0, [*range(4 * row, 4 * row + 4)]) for row in rows]
        prompts = SchedulerOutput(0, new, rows, blocks, rows, [0] * 3, [5] * 3, [True] * 3)
        steps = [prompts, *(decode_step(number, rows, 4 + number) for number in range(1, 4))]
        found = [runner.execute(step).result().token_ids for step in steps]
        return [[step[row] for step in found] for row in rows]

    plain = answers(eager, -1, -1, -1)
    for slots in ((0, -1, 1), (1, 1, -1), (-1, 0, 0), (-1, -1, -1)):
        expected = answers(eager, *slots)
        assert answers(captured, *slots) == expected
        assert [row for row in range(3) if expected[row] != plain[row]] == [row for row in range(3) if slots[row] >= 0]
    assert captured.graphs is not None
    assert captured.adapters is not None
    seats = captured.adapters.adapters.num_used
    assert {shape.adapted for shape in shapes_of(captured.graphs)} == {0, seats}
    assert {shape.kind for shape in shapes_of(captured.graphs) if shape.adapted} == {"full", "piecewise"}


def test_what_is_padded_to_what() -> None:
    _, graphs, _ = recorded("FULL_AND_PIECEWISE", cudagraph_capture_sizes=[2, 4, 16])

    def shape(counts: list[int], samples: list[bool]) -> Shape | None:
        rows = list(range(len(counts)))
        return graphs.shape_of(SchedulerOutput(0, [], [], [], rows, [0] * len(rows), counts, samples))

    assert shape([1, 1, 1], [True] * 3) == Shape("full", True, 4, 4)
    assert shape([1] * 5, [True] * 5) is None, "more than the largest size"
    assert shape([1, 1, 1], [True, True, False]) == Shape("piecewise", False, 4, 4)
    assert shape([1, 4], [True, True]) == Shape("piecewise", False, 3, 16)
    assert shape([1, 15], [True, True]) == Shape("piecewise", False, 3, 16)
    assert shape([1, 16], [True, True]) is None


def test_padding_longer_than_a_sequence_may_be_is_left_alone() -> None:
    _, graphs, _ = recorded("PIECEWISE", cudagraph_capture_sizes=[2, 24])
    graphs.settings = replace(graphs.settings, max_model_len=20)
    step = SchedulerOutput(0, [], [], [], [0], [0], [3], [True])
    assert graphs.shape_of(step) is None


def lone_prompt(number: int, row: int, tokens: int, computed: int = 0) -> SchedulerOutput:
    """All of whose tokens and blocks are those of a row that nobody filled."""
    return SchedulerOutput(number, [], [], [], [row], [computed], [tokens], [True])


@pytest.mark.parametrize("name", ["sliding", "demo"])
def test_a_lone_prompt_is_captured_whole_and_gives_the_same_tokens(name: str) -> None:
    """One after the other, of sizes that are padded and of one that is not, again and again."""

    def one_by_one(mode: str) -> tuple[list[list[int]], ModelRunner]:
        runner = make_runner(name, mode)
        core, found = make_core(runner, num_blocks=26), []
        rng = random.Random(5)
        for number, length in enumerate([9, 16, 20, 9, 16, 20, 12, 15, 19]):
            prompt = [rng.randrange(60) for _ in range(length)]
            params = SamplingParams(max_tokens=3, temperature=0.0)
            core.add_request(
                EngineCoreRequest(request_id=str(number), prompt_token_ids=prompt, params=params, max_tokens=3, seed=0)
            )
            found.append([])
            while core.has_work():
                stepped = core.step()
                for output in stepped.outputs if stepped else ():
                    found[-1] += output.new_token_ids
        return found, runner

    expected, _ = one_by_one("NONE")
    got, runner = one_by_one("FULL_AND_PIECEWISE")
    assert got == expected
    assert runner.graphs is not None
    alone = {shape.num_tokens for shape in shapes_of(runner.graphs) if shape.alone}
    assert alone == {16, 24}
    assert not any(shape.kind == "piecewise" for shape in shapes_of(runner.graphs))


def test_what_is_not_alone_or_not_whole_runs_in_pieces() -> None:
    _, graphs, _ = recorded("FULL_AND_PIECEWISE", cudagraph_capture_sizes=[2, 4, 16])
    alone = Shape("full", False, 2, 16, alone=True)
    assert graphs.shape_of(lone_prompt(0, 0, 9)) == alone
    assert graphs.shape_of(lone_prompt(0, 0, 9, computed=4)) == Shape("piecewise", False, 2, 16)
    assert graphs.shape_of(lone_prompt(0, 0, 2)) == Shape("piecewise", False, 2, 2)
    two = SchedulerOutput(0, [], [], [], [0, 1], [0, 0], [4, 5], [True, True])
    assert graphs.shape_of(two) == Shape("piecewise", False, 3, 16)
    assert str(alone) == "full graph of a lone prompt of 16 tokens"


def test_a_lone_prompt_whose_pieces_are_there_does_not_wait_for_its_own_graph() -> None:
    runner, graphs, device = recorded("FULL_AND_PIECEWISE", cudagraph_capture_sizes=[16])
    two = SchedulerOutput(0, [], [], [], [0, 1], [0, 0], [4, 5], [True, True])
    pieces, alone = Shape("piecewise", False, 0, 16), Shape("full", False, 2, 16, alone=True)
    for _ in range(2):
        runner.execute(two).result()
    assert shapes_of(graphs) == {pieces}
    before = [graph.replays for graph in device.graphs]
    runner.execute(lone_prompt(1, 0, 9)).result()
    assert [graph.replays for graph in device.graphs] == [count + 1 for count in before]
    assert shapes_of(graphs) == {pieces}
    runner.execute(lone_prompt(2, 0, 9)).result()
    assert shapes_of(graphs) == {pieces, alone}


def test_without_room_for_a_lone_prompts_graph_its_pieces_serve() -> None:
    _, graphs, _ = recorded("FULL_AND_PIECEWISE", cudagraph_capture_sizes=[16])
    alone = Shape("full", False, 2, 16, alone=True)
    graphs._refused.add(alone)
    assert graphs.shape_of(lone_prompt(0, 0, 9)) == Shape("piecewise", False, 2, 16)


def test_lone_prompts_that_cannot_be_captured_take_no_graph_from_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, graphs, _ = recorded("FULL_AND_PIECEWISE")
    capture = graphs._capture

    def fails(key: Shape, batch: Batch) -> object:
        if key.alone:
            raise RuntimeError("operation not permitted when stream is capturing")
        return capture(key, batch)

    monkeypatch.setattr(graphs, "_capture", fails)
    warnings = []
    for number, tokens in enumerate([4, 4, 8, 8, 16, 16, 24, 24]):
        warnings += runner.execute(lone_prompt(number, 0, tokens)).result().warnings
    assert warnings[-1].startswith("no full graphs of lone prompts from now on, since 3 could not be captured")
    for number in range(2):
        runner.execute(decode_step(number, [0, 1, 2], 0)).result()
    assert Shape("full", True, 4, 4) in shapes_of(graphs)


def test_whole_graphs_are_told_of_the_longest_requests_there_may_be() -> None:
    step = SchedulerOutput(1, [], [], [], [1, 2], [5, 0], [1, 4], [True, True])
    told = _for_any_lengths(InputBatch(4, CPU).fill(step), Shape("full", False, 2, 8), 100)
    assert (told.max_seq_len, told.max_prompt_len, told.num_decodes) == (100, 100, 0)
    alone = InputBatch(4, CPU).fill(lone_prompt(1, 0, 5), 2, 8)
    told = _for_any_lengths(alone, Shape("full", False, 2, 8, True), 100)
    assert (told.max_seq_len, told.max_prompt_len, told.max_query_len, told.num_decodes) == (8, 8, 8, 0)
