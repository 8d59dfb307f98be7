"""What the runner's tests share: the real runner, scheduler and core on a tiny model, the traffic that they serve, and
the answers to it, which must not depend on how steps are computed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import headrace
from headrace.cache_groups import same_layout
from headrace.config import EngineConfig
from headrace.distributed.mesh import Mesh
from headrace.engine.core import EngineCore
from headrace.engine.messages import CoreFacts
from headrace.graph_sizes import GraphSettings
from headrace.layers.adapters import Adapters
from headrace.layers.context import LayerContext
from headrace.model_config import ModelConfig
from headrace.model_spec import HeadSpec, ModelSpec
from headrace.models import filling, loader
from headrace.models.adapters import adapted_linears
from headrace.models.served import attention_specs, describe
from headrace.request import EngineCoreRequest
from headrace.runner.adapters import AdapterStore
from headrace.runner.kv_cache import cache_shape
from headrace.runner.model_runner import ModelRunner, RunnerLimits
from headrace.runner.pending import MaskedStep
from headrace.sampling_params import SamplingParams
from headrace.scheduler.config import SchedulerConfig
from headrace.scheduler.draft_length import DraftLength
from headrace.scheduler.scheduler import Scheduler
from headrace.spec_decode.draft_model import ModelDrafter
from headrace.spec_decode.drafter import Drafter
from headrace.spec_decode.head import HeadDrafter
from headrace.step import Masks, SchedulerOutput, WorkerFacts
from headrace.structured_outputs.matcher import GrammarCompiler
from tests.runner.fakes import KERNELS, AttentionInGraphs, RecordingDevice
from tests.structured_outputs.grammars import EOS, VOCAB_SIZE, regex

VOCAB, STOP = VOCAB_SIZE, EOS
WORD = "[0-9a-p]{8,20}"
MASKED = (2, 5, 9, 10, 14)
"""Requests that write such a word"""
Answers = dict[int, tuple[list[int], list[float]]]
"""seed -> (tokens, log-probabilities of them and of the prompt's)"""
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


def a_head(spec: ModelSpec, taps: tuple[int, ...]) -> HeadSpec:
    """A head like EAGLE-3's of a model, or without `taps` like EAGLE's."""
    layer, norm = spec.layers[0], spec.norm
    layer = replace(layer, norms=replace(layer.norms, before_mixer=""))
    if not taps:
        return HeadSpec(layer, spec.max_position_embeddings)
    layer = replace(layer, mixer=replace(layer.mixer, input_size=2 * spec.hidden_size))
    return HeadSpec(
        layer, spec.max_position_embeddings, "in_attention", taps, vocab_size=40, input_norm=norm, last_norm=norm
    )


def make_runner(
    name: str,
    mode: str,
    drafter: Drafter | None = None,
    own_drafts: int = 0,
    head_drafts: int = 0,
    taps: tuple[int, ...] = (),
    max_loras: int = 0,
    **sizes: object,
) -> ModelRunner:
    """`max_loras`: slots of adapters, which hold random ones. `own_drafts`: the model guesses so many tokens itself, by
    the same weights with another cache; `head_drafts`: so many are guessed by a head of it that reads the inputs of its
    layers `taps`, or its hidden states."""
    model_config = ModelConfig.from_folder(DEMO) if name == "demo" else ModelConfig.from_dict(MODELS[name])
    spec = describe(model_config)
    head = a_head(spec, taps)
    behind = spec.layers if own_drafts else head.layers if head_drafts else ()
    specs = attention_specs(
        model_config, tp_size=1, block_size=BLOCK_SIZE, dtype="float32", device_type="cpu", behind=behind
    )
    backend, own = AttentionInGraphs(), len(spec.layers)
    context = LayerContext(Mesh(), KERNELS, backend, specs, torch.float32, CPU)
    adapters = Adapters(max_loras, 16, adapted_linears(spec).keys(), KERNELS, torch.float32, CPU)
    of_model = context.layers(0, own)
    if max_loras:
        of_model = replace(of_model, seat=adapters.seat)
    with mock.patch.object(filling, "DUMMY_RANGE", 0.5):  # of +-1e-3 all logits are alike
        load_format = "auto" if name == "demo" else "dummy"
        model = loader.load_model(DEMO, model_config, of_model, load_format, taps=taps)
        if own_drafts:
            draft = loader.load_model(DEMO, model_config, context.layers(own), load_format)
            drafter = ModelDrafter(draft, specs[own:], own_drafts, LIMITS.max_model_len, KERNELS)
        elif head_drafts:
            draft = loader.load_head(DEMO, model_config, head, model, spec.vocab_size, context.layers(own), load_format)
            drafter = HeadDrafter(draft, specs[own:], head_drafts, torch.float32, KERNELS)
    layers = replace(spec, layers=(*spec.layers, *behind))
    shape = cache_shape(layers, specs, 1, BLOCK_SIZE, torch.float32, len(behind))
    settings = GraphSettings.of(
        {"cudagraph_mode": mode, **sizes}, LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens, LIMITS.max_model_len
    )
    if settings is not None and drafter is not None:
        settings = replace(settings, decode_lens=tuple({1, 1 + drafter.num_drafts}))
    limits = replace(LIMITS, vocab_size=model_config.vocab_size)
    made = torch.Generator().manual_seed(5)
    adapters.allocate()
    for a, b, ranks, *_ in (seat.weights for seat in adapters.seats):
        a.normal_(generator=made), b.normal_(0, 0.05, generator=made), ranks.fill_(16)
    store = AdapterStore(adapters, model_config) if max_loras else None
    return ModelRunner(model, KERNELS, shape, limits, CPU, settings, RecordingDevice, drafter, adapters=store)


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
    draft_length: DraftLength | None = None,
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
    places = runner.num_drafts if runner.shape.num_drafting else 0
    scheduler = SchedulerConfig(*sizes, look_ahead=False, num_drafts=runner.num_drafts, draft_places=places)
    config = EngineConfig(
        max_num_seqs=LIMITS.max_num_seqs,
        max_num_batched_tokens=LIMITS.max_num_batched_tokens,
        max_model_len=LIMITS.max_model_len,
    )
    worker = WorkerFacts("cpu", "recorded", 0, 0, same_layout(BLOCK_SIZE), 0, "", warmup_sizes=list(warmup_sizes))
    facts = CoreFacts(config, [], [worker], num_blocks)
    return EngineCore(facts, Scheduler(scheduler, draft_length), executor(runner), compiler=compiler)  # type: ignore[arg-type]


def traffic(grammars: bool = True) -> list[EngineCoreRequest]:
    """Prompts, some of which begin alike, with all that a token may depend on: seeds, penalties, rules, filters, masks;
    ends by stops, length and context."""
    rng = random.Random(3)
    shared = [rng.randrange(VOCAB) for _ in range(21)]
    wishes: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
        {"temperature": 1.5, "top_p": 0.9, "top_k": 20, "min_tokens": 6},
        {"temperature": 0.0, "logit_bias": {7: 2.5, 11: -3.0}, "min_tokens": 4},
        {"temperature": 1.0, "allowed_token_ids": [1, 2, 3, 5, 8, 13, 21, 34]},
    ]
    requests = []
    for number in range(16):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, 5, 11, 30)))]
        if number % 3 == 0:
            prompt = shared + prompt[:9]
        if number == 7:
            prompt = [rng.randrange(VOCAB) for _ in range(85)]  # runs into max_model_len
        params = SamplingParams(
            max_tokens=rng.randrange(12, 30),
            logprobs=2 if number % 2 else None,
            prompt_logprobs=1 if number == 5 else None,
            **wishes[number % len(wishes)],
        )
        bad_words = [[4], [9, 5], [3, 1, 2]] if number % 4 == 0 else []
        requests.append(
            EngineCoreRequest(
                request_id=str(number),
                prompt_token_ids=prompt,
                params=params,
                max_tokens=params.max_tokens or 1,
                seed=number,
                stop_token_ids=[STOP, 17] if number % 3 and number != 7 else [],
                bad_words_token_ids=bad_words,
                grammar=regex(WORD) if grammars and number in MASKED else "",
            )
        )
    return requests


def serve(core: EngineCore, grammars: bool = True) -> Answers:
    """What the requests of `traffic` get, which arrive spread over the steps."""
    found: Answers = {}
    arriving = deque(traffic(grammars))
    for turn in range(3000):
        if arriving and turn % 2 == 0:
            core.add_request(arriving.popleft())
        stepped = core.step() if core.has_work() else None
        for output in stepped.outputs if stepped else ():
            assert output.error is None
            tokens, scores = found.setdefault(int(output.request_id), ([], []))
            tokens += output.new_token_ids
            for entry in output.new_prompt_logprobs or ():
                scores += entry.logprobs[:1]
            for token, entry in zip(output.new_token_ids, output.new_logprobs, strict=False):
                assert entry.token_ids[0] == token
                scores += entry.logprobs
        if not arriving and not core.has_work():
            return found
    raise AssertionError("never done")


def check(got: Answers, answers: Answers) -> None:
    assert {seed: tokens for seed, (tokens, _) in got.items()} == {s: tokens for s, (tokens, _) in answers.items()}
    for seed, (_, scores) in got.items():
        assert scores == pytest.approx(answers[seed][1], abs=1e-3)
