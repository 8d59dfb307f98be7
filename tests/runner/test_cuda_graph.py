"""Five graph modes give the tokens of none, through the real runner, scheduler and core, with graphs that a recorder
stands in for."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import headrace
from headrace.cache_groups import same_layout
from headrace.config import GRAPH_MODES, EngineConfig
from headrace.distributed.mesh import Mesh
from headrace.engine.core import EngineCore
from headrace.engine.messages import CoreFacts
from headrace.graph_sizes import GraphSettings
from headrace.layers.context import LayerContext
from headrace.model_config import ModelConfig
from headrace.models import loader
from headrace.models.registry import attention_specs, describe
from headrace.request import EngineCoreRequest
from headrace.runner.cuda_graph import Shape, StepGraphs, _for_any_lengths
from headrace.runner.input_batch import Batch, InputBatch
from headrace.runner.kv_cache import cache_shape
from headrace.runner.model_runner import Drafter, ModelRunner, RunnerLimits
from headrace.runner.pending import MaskedStep
from headrace.sampling_params import SamplingParams
from headrace.scheduler.config import SchedulerConfig
from headrace.scheduler.scheduler import Scheduler
from headrace.step import Masks, SchedulerOutput, WorkerFacts
from headrace.structured_outputs.matcher import GrammarCompiler
from tests.runner.fakes import KERNELS, AttentionInGraphs, RecordingDevice, shapes_of

CPU = torch.device("cpu")
LIMITS = RunnerLimits(max_num_seqs=6, max_num_batched_tokens=24, max_model_len=96, vocab_size=61)
BLOCK_SIZE = 4
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "eos_token_id": 60,
    "dtype": "float32",
}
MODELS = {
    "llama": LLAMA,
    "sliding": {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 7},
    "qk_norm": {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
}


DEMO = Path(headrace.__file__).parent / "demo_model"


def make_runner(name: str, mode: str, drafter: Drafter | None = None, **sizes: object) -> ModelRunner:
    model_config = ModelConfig.from_folder(DEMO) if name == "demo" else ModelConfig.from_dict(MODELS[name])
    specs = attention_specs(model_config, tp_size=1, block_size=BLOCK_SIZE, dtype="float32", device_type="cpu")
    backend = AttentionInGraphs()
    context = LayerContext(Mesh(), KERNELS, backend, specs, torch.float32, CPU)
    with mock.patch.object(loader, "DUMMY_RANGE", 0.5):  # of +-1e-3 all logits are alike
        model = loader.load_model(DEMO, model_config, context, "auto" if name == "demo" else "dummy")
    shape = cache_shape(describe(model_config), specs, 1, BLOCK_SIZE, torch.float32)
    settings = GraphSettings.of(
        {"cudagraph_mode": mode, **sizes}, LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens, LIMITS.max_model_len
    )
    if settings is not None and drafter is not None:
        settings = replace(settings, decode_len=1 + drafter.num_drafts)
    limits = replace(LIMITS, vocab_size=model_config.vocab_size)
    return ModelRunner(model, KERNELS, shape, limits, CPU, settings, RecordingDevice, drafter)


class InThisProcess:
    """An executor around a runner, which keeps the steps that it was given."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.steps: list[SchedulerOutput] = []

    def execute(self, step: SchedulerOutput) -> Any:
        self.steps.append(step)
        if not step.masked:
            return self.runner.execute(step)
        self.masked, self.forward = MaskedStep(step), self.runner.begin(step)
        return self.masked

    def sample(self, masks: Masks) -> None:
        assert masks.step == self.steps[-1].step
        assert self.forward is not None
        self.masked.sampled = self.runner.finish(self.forward, masks)

    def check(self) -> None:
        pass


def make_core(
    runner: ModelRunner,
    num_blocks: int,
    warmup_sizes: Sequence[tuple[int, int]] = (),
    executor: Callable[[ModelRunner], InThisProcess] = InThisProcess,
    compiler: GrammarCompiler | None = None,
) -> EngineCore:
    runner.allocate(num_blocks)
    sizes = (
        LIMITS.max_num_seqs,
        max(LIMITS.max_num_batched_tokens, LIMITS.max_num_seqs * (1 + runner.num_drafts)),
        LIMITS.max_model_len,
        same_layout(BLOCK_SIZE),
        num_blocks,
    )
    # a small pool is to be filled, and some preempted
    scheduler = SchedulerConfig(*sizes, look_ahead=False, num_drafts=runner.num_drafts)
    config = EngineConfig(
        max_num_seqs=LIMITS.max_num_seqs,
        max_num_batched_tokens=LIMITS.max_num_batched_tokens,
        max_model_len=LIMITS.max_model_len,
    )
    worker = WorkerFacts("cpu", "recorded", 0, 0, same_layout(BLOCK_SIZE), 0, "", warmup_sizes=list(warmup_sizes))
    facts = CoreFacts(config, [], [worker], num_blocks)
    return EngineCore(facts, Scheduler(scheduler), executor(runner), compiler=compiler)  # type: ignore[arg-type]


def traffic() -> list[EngineCoreRequest]:
    """Prompts of 1 to 60 tokens, some of which begin alike; chunks of 24; greedy and drawn ones."""
    rng = random.Random(3)
    shared = [rng.randrange(60) for _ in range(21)]
    requests = []
    for number in range(18):
        prompt = [rng.randrange(60) for _ in range(rng.choice((1, 2, 5, 11, 30, 60)))]
        if number % 3 == 0:
            prompt = shared + prompt[:9]
        params = SamplingParams(
            max_tokens=rng.randrange(8, 30),
            temperature=1.0 if number % 4 == 1 else 0.0,
            prompt_logprobs=1 if number == 5 else None,
            logprobs=1 if number % 5 == 0 else None,
        )
        requests.append(
            EngineCoreRequest(
                request_id=str(number),
                prompt_token_ids=prompt,
                params=params,
                max_tokens=params.max_tokens or 1,
                seed=number,
            )
        )
    return requests


def serve(core: EngineCore) -> tuple[dict[str, list[int]], dict[str, list[float]]]:
    """Tokens, and scores of prompt tokens, by request; arrivals are spread over the steps."""
    tokens: dict[str, list[int]] = {}
    scores: dict[str, list[float]] = {}
    arriving = traffic()
    for turn in range(2000):
        if arriving and turn % 2 == 0:
            core.add_request(arriving.pop(0))
        stepped = core.step() if core.has_work() else None
        for output in stepped.outputs if stepped else ():
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            for entry in output.new_prompt_logprobs or ():
                scores.setdefault(output.request_id, []).append(entry.logprobs[0])
        if not arriving and not core.has_work():
            return tokens, scores
    raise AssertionError("never done")


@pytest.fixture(scope="module", params=[*MODELS, "demo"])
def expected(request: pytest.FixtureRequest) -> tuple[str, dict[str, list[int]], dict[str, list[float]]]:
    core = make_core(make_runner(request.param, "NONE"), num_blocks=26)
    tokens, scores = serve(core)
    stats = core.scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0
    assert len(scores["5"]) > 1
    steps = core._executor.steps  # type: ignore[attr-defined]
    kinds = {(max(s.num_scheduled_tokens) == 1, all(s.samples), len(s.rows) > 1) for s in steps if s.rows}
    assert {(True, True, True), (False, True, True), (False, False, True)} <= kinds, "mixed steps and chunks"
    return request.param, tokens, scores


@pytest.mark.parametrize("mode", [mode for mode in GRAPH_MODES if mode != "NONE"])
def test_five_modes_give_the_same_tokens(
    mode: str, expected: tuple[str, dict[str, list[int]], dict[str, list[float]]]
) -> None:
    name, tokens, scores = expected
    runner = make_runner(name, mode)
    got_tokens, got_scores = serve(make_core(runner, num_blocks=26))
    assert got_tokens == tokens
    assert got_scores["5"] == pytest.approx(scores["5"], abs=1e-4)
    assert runner.graphs is not None
    kinds = {(shape.kind, shape.decode) for shape in shapes_of(runner.graphs)}
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
    said = ["captured a full graph of 4 decodes (1 full graphs: 0.0 MiB)"]
    assert [output.notes for output in outputs] == [[], said, []]
    assert outputs[1].graph_bytes == {"full": 1000}


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


def test_graphs_that_are_dropped_go_at_once() -> None:
    """With all that they hold: the next one to measure memory must not find it."""
    core = make_core(make_runner("llama", "FULL_AND_PIECEWISE"), num_blocks=26)
    serve(core)
    runner = core._executor.runner  # type: ignore[attr-defined]
    assert runner.notes.graph_bytes.keys() == {"full", "piecewise"}
    gone = weakref.ref(runner.graphs)
    gc.collect()
    gc.disable()
    try:
        runner.renew_graphs()
        assert gone() is None
    finally:
        gc.enable()


def test_graphs_keep_no_memory_for_their_results() -> None:
    """A hundred graphs would keep their hidden states, and break up the memory that all of them compute in."""
    core = make_core(make_runner("llama", "FULL_AND_PIECEWISE"), num_blocks=26)
    serve(core)
    graphs = core._executor.runner.graphs  # type: ignore[attr-defined]
    borrowed = {id(tensor) for _, tensor in graphs._device.borrowed}
    assert {shape.kind for shape in graphs._captured} == {"full", "piecewise"}
    assert all(id(captured.hidden) in borrowed for captured in graphs._captured.values())


@pytest.mark.parametrize("expected", ["llama"], indirect=True)
@pytest.mark.parametrize("mode", [mode for mode in GRAPH_MODES if mode != "NONE"])
def test_what_is_warmed_up_is_captured_before_it_comes_up(
    mode: str, expected: tuple[str, dict[str, list[int]], dict[str, list[float]]]
) -> None:
    name, tokens, scores = expected
    runner = make_runner(name, mode)
    assert runner.graph_settings is not None
    core = make_core(runner, num_blocks=26, warmup_sizes=runner.graph_settings.warmup_sizes)
    while core.warm_up():
        pass
    assert runner.graphs is not None
    before = shapes_of(runner.graphs)
    settings = runner.graph_settings
    assert {shape.num_tokens for shape in before if shape.kind == settings.decode} >= set(settings.decode_sizes)
    if settings.other == "piecewise":
        assert {shape.num_tokens for shape in before if shape.kind == "piecewise"} >= set(settings.other_sizes) - {1}
    got_tokens, got_scores = serve(core)
    assert got_tokens == tokens
    assert got_scores["5"] == pytest.approx(scores["5"], abs=1e-4)
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
