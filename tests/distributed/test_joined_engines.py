"""Engines that share their experts, each with requests and a cache of its own, give transformers' tokens: with a prefix
cache, after preemption, beside aborted requests, and while some have nothing to do. If one dies, all end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tiny_configs import BASE, VARIANTS, best_tokens, save_tiny_model, tiny_config

from headrace.config import EngineConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.engine.joined import settle_experts
from headrace.errors import ConfigError, EngineDeadError
from headrace.model_config import ModelConfig
from headrace.runner import expert_load
from headrace.sampling_params import SamplingParams
from tests.distributed.joined import Asked, Joined
from tests.speed import PATIENCE

SMALL: dict[str, Any] = {
    "max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 96, "num_gpu_blocks_override": 8,
}  # fmt: skip
JOINED: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True, "dtype": "float32", "device": "cpu"}
TWO_RANKS = {"tensor_parallel_size": 2, "executor": "tests.distributed.thread_ranks:make"}
EOS = BASE["eos_token_id"]


def asked(prompt: list[int], num_tokens: int, **how: Any) -> Asked:
    """So many greedy tokens, of which the scheduler does not know that no stop comes before."""
    params = SamplingParams(temperature=0.0, min_tokens=num_tokens, max_tokens=num_tokens, stop_token_ids=[EOS])
    return Asked(prompt, params, **how)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(3, 100, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize(
    ("family", "name", "more"),
    [
        ("DeepseekV3ForCausalLM", "queries-too", {}),  # latents, 15 experts in groups, and a shared one
        pytest.param("Qwen2MoeForCausalLM", "full", {}, marks=pytest.mark.slow),  # a gate of the shared expert
        pytest.param("GptOssForCausalLM", "sliding", {}, marks=pytest.mark.slow),  # biases, windows
        pytest.param("Qwen3_5MoeForCausalLM", "hybrid", {}, marks=pytest.mark.slow),  # states
        pytest.param("Qwen3MoeForCausalLM", "full", {"engines": 4}, marks=pytest.mark.slow),
        pytest.param("Qwen2MoeForCausalLM", "full", TWO_RANKS, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_transformers_own(
    family: str, name: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_load, "SECONDS", 0.0)  # every step is counted
    ranks = more.get("engines", 2) * more.get("tensor_parallel_size", 1)
    reference = save_tiny_model(family, name, tmp_path / "model")
    engines = Joined(tmp_path / "model", tmp_path / "meeting", **{**SMALL, **more})
    others: list[list[Asked]] = [[] for _ in engines.cores[2:]]
    shared, *alone = prompts(40, 3, 50, 33, 9)
    # the first has more than its cache holds; the second a prompt in the middle of that, which lasts longest
    busy = [asked(prompt, 24) for prompt in (*alone[:3], *([*shared, place] for place in range(5, 8)))]
    busy.append(asked(alone[3], 20, abort_after=5))
    late = [asked(alone[3], 40, after=6)]
    engines.run([busy, late, *others])
    # each has a cache of its own: only the first knows the shared beginning
    again = [[asked([*shared, place], 4)] for place in (8, 9)]
    engines.run([*again, *others])
    stats = [core.snapshot([]).stats for core in engines.cores]
    engines.shutdown()
    for one in [*busy, *late, *again[0], *again[1]]:
        assert one.tokens == best_tokens(reference, one.prompt, one.tokens, never=EOS)
        assert one.abort_after is not None or len(one.tokens) == one.params.max_tokens
    # windows and states leave the longest request so many pages that all others fit beside it
    assert (stats[0].num_preemptions > 0) == (name not in ("sliding", "hybrid"))
    assert stats[0].prefix_cache_hits >= 32
    assert stats[1].prefix_cache_hits == 0
    for load in (each.expert_load for each in stats[:2]):  # the others have no tokens to count
        assert len(load.of_ranks) == ranks
        assert sum(load.of_ranks) <= ranks * load.of_busiest <= ranks * sum(load.of_ranks)
    assert sum(stats[0].expert_load.of_ranks) > sum(stats[1].expert_load.of_ranks) > 0, "each counts its own tokens"


async def test_processes_answer_and_when_one_dies_all_end(tmp_path: Path) -> None:
    """Of one rank each."""
    reference = save_tiny_model("Qwen3MoeForCausalLM", "full", tmp_path)
    config = EngineConfig(model=str(tmp_path), **JOINED, skip_tokenizer_init=True, cpu_threads=1, **SMALL)
    engine = await AsyncEngine.start(config)
    try:

        async def tokens(number: int, length: int, num_tokens: int) -> list[int]:
            params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
            prompt = [5 + number] * length
            answers = engine.generate([prompt], params, f"r{number}-{length}", output_kind="final")
            (output,) = [output async for batch in answers for _, output in batch]
            found = output.outputs[0].token_ids
            assert found == best_tokens(reference, prompt, found)
            return found

        sizes = ((30, 8), (3, 4), (20, 6), (2, 5), (9, 9))
        found = await asyncio.gather(*(tokens(number, *each) for number, each in enumerate(sizes)))
        assert list(map(len, found)) == [each[1] for each in sizes]
        assert all(each.load.sent for each in engine.replicas._all), "both have had some"
        victim, *_ = children = [psutil.Process(each.client.pid) for each in engine.replicas._all]

        async def lasting(number: int) -> None:
            while True:  # however fast they are and whenever the engine dies
                await tokens(number, 3, 90)

        tasks = [asyncio.create_task(lasting(number)) for number in range(4)]
        await asyncio.sleep(0.05)
        victim.kill()
        said = r"^engine 0: the engine core died \(exit code -9\); its experts are gone, so all 2 engines end$"
        for task in tasks:
            with pytest.raises(EngineDeadError, match=said):
                await task
        with pytest.raises(EngineDeadError, match=r"none of 2 engines serves now: engine 0: .*its experts are gone"):
            engine.check_health()
        assert not psutil.wait_procs(children, timeout=PATIENCE)[1]
    finally:
        await engine.shutdown()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"data_parallel_rank": 1}, r"spreads experts over all 2 engines .*which one server must start"),
        ({"enable_lora": True}, "no engine knows the others' adapters"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size must be 1 where engines share their experts"),
        ({"speculative_config": {"method": "eagle3", "model": "x"}}, r"must have method ngram .*, got eagle3"),
    ],
)
def test_what_does_not_go_with_it_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settle_experts(EngineConfig(**JOINED, **asked), model("Qwen3MoeForCausalLM"))


def test_engines_of_a_dense_model_have_nothing_to_share() -> None:
    alone = settle_experts(EngineConfig(**JOINED, data_parallel_rank=1), model("LlamaForCausalLM"))
    assert alone.joined_engines == 1


def model(architecture: str) -> ModelConfig:
    return ModelConfig.from_dict(tiny_config(architecture, next(iter(VARIANTS[architecture].values()))).to_dict())
