"""An engine with adapters computes what transformers' model does with each of them merged into its weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_configs import save_tiny_model
from torch import Tensor

from headrace import LLM, LoRARequest, SamplingParams
from headrace.errors import SomeRequestsError
from headrace.request import RequestOutput
from tests.lora import ALL, merge, save_adapter, scores

PROMPTS = [[5, 9, 33, 2, 71, 8, 8, 40, 12], [7, 60, 3], [9, 9, 1, 50, 22, 17], [100, 4, 44, 5, 9, 33, 2]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=0, logprobs=0, ignore_eos=True)
SIZES: dict[str, Any] = {
    "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 4,
    "max_num_batched_tokens": 16, "enable_lora": True,
}  # fmt: skip
CLOSE = {"rtol": 0, "atol": 1e-3}
"""of log-probabilities: adapters change those of these models by more than 0.1, and sums in another order by 1e-5"""


def scored(output: RequestOutput) -> tuple[list[int], Tensor]:
    """All tokens of prompt and answer, and the log-probabilities of all but the first."""
    (answer,) = output.outputs
    assert output.prompt_logprobs is not None
    assert answer.logprobs is not None
    entries = [*output.prompt_logprobs[1:], *answer.logprobs]
    tokens = [*output.prompt_token_ids, *answer.token_ids]
    found = [entry[token].logprob for entry, token in zip(entries, tokens[1:], strict=True) if entry is not None]
    return tokens, torch.tensor(found)


def check(outputs: list[RequestOutput], models: list[torch.nn.Module]) -> None:
    for output, model in zip(outputs, models, strict=True):
        tokens, found = scored(output)
        torch.testing.assert_close(found, scores(model, tokens), **CLOSE)


def request(number: int, folder: Path) -> LoRARequest:
    return LoRARequest(f"adapter-{number}", number, str(folder))


class Family:
    """A tiny model, adapters of it, and transformers' models with each of them merged; the first has none."""

    def __init__(
        self, folder: Path, architecture: str, variant: str, *adapters: dict[str, Any], strip: str = ""
    ) -> None:
        self.base = save_tiny_model(architecture, variant, folder / "base")
        self.folder, self.models, self.requests = folder / "base", [self.base], [None]
        for number, fields in enumerate(adapters, 1):
            adapter = save_adapter(folder / str(number), self.base, number, strip, **fields)
            self.models.append(copy.deepcopy(self.base))
            merge(self.models[-1], adapter, strip)
            self.requests.append(request(number, adapter))


@pytest.fixture(scope="module", name="llama")
def _llama(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(
        tmp_path_factory.mktemp("llama"), "LlamaForCausalLM", "biases",
        {"use_rslora": True, "rank_pattern": {"q_proj": 7}, "alpha_pattern": {"1.mlp.up_proj": 3}},
        {"target_modules": [*ALL, "embed_tokens", "lm_head"], "r": 9},
        {"target_modules": r".*\.1\.self_attn\.[kv]_proj", "lora_alpha": 32},
    )  # fmt: skip


@pytest.fixture(scope="module", name="llm")
def _llm(llama: Family) -> Iterator[LLM]:
    with LLM(str(llama.folder), max_loras=3, max_cpu_loras=3, **SIZES) as llm:
        yield llm


def test_each_request_of_a_batch_gets_its_own_adapter_or_none(llama: Family, llm: LLM) -> None:
    """Prompts in chunks, decodes beside them, and their log-probabilities."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=llama.requests)
    check(outputs, llama.models)
    assert [output.lora_request for output in outputs] == llama.requests
    check(llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=llama.requests[::-1]), llama.models[::-1])
    check(llm.generate(PROMPTS[:2], PARAMS, use_tqdm=False, lora_request=llama.requests[2]), [llama.models[2]] * 2)


def test_cached_blocks_of_one_adapter_are_no_others(llama: Family, llm: LLM) -> None:
    prompt = [[61, *range(20, 60)]]
    params = SamplingParams(temperature=0.0, max_tokens=2)
    cached = [
        llm.generate(prompt, params, use_tqdm=False, lora_request=one)[0].num_cached_tokens
        for one in (llama.requests[1], llama.requests[2], None, llama.requests[1])
    ]
    assert cached == [0, 0, 0, 32]


def test_adapters_take_turns_where_there_are_more_than_slots(llama: Family) -> None:
    """One slot, one place on the host: each is read, evicted and read again, with more requests than run at once, which
    are preempted for want of blocks."""
    with LLM(str(llama.folder), max_loras=1, num_gpu_blocks_override=4, **{**SIZES, "max_model_len": 32}) as llm:
        order = [1, 2, 3, 1, 0, 2]
        asked = [llama.requests[one] for one in order]
        prompts = [PROMPTS[place % 4] for place in range(len(order))]
        check(llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=asked), [llama.models[one] for one in order])


@pytest.mark.parametrize(
    "how",
    [
        {"tensor_parallel_size": 2},
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {"batch_invariant": True},
    ],
    ids=lambda how: next(iter(how)),
)
def test_however_the_engine_runs(how: dict[str, Any], llama: Family, tmp_path: Path) -> None:
    """An adapter that cannot be read ends its own request alone."""
    asked = [*llama.requests[:3], request(9, tmp_path)]
    with LLM(str(llama.folder), max_loras=2, **{**SIZES, **how}) as llm:
        with pytest.raises(SomeRequestsError, match=r"1 of 4 requests failed.*number 3: .* cannot be read") as failed:
            llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=asked)
        check(failed.value.outputs[:3], llama.models[:3])


def test_a_quantized_model_with_an_adapter_is_as_near_as_without(llama: Family) -> None:
    with LLM(str(llama.folder), max_loras=2, quantization="ptpc_fp8", **SIZES) as llm:
        outputs = llm.generate(PROMPTS[:3], PARAMS, use_tqdm=False, lora_request=llama.requests[:3])
    for output, model in zip(outputs, llama.models, strict=False):
        tokens, found = scored(output)
        assert (found - scores(model, tokens)).norm() < 2.5  # 0.5 to 0.9 in these; what the adapters change: 10


@pytest.mark.parametrize(
    ("architecture", "variant", "fields", "strip"),
    [
        ("Phi3ForCausalLM", "fused", {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]}, ""),
        ("Gemma3ForConditionalGeneration", "text", {"target_modules": [*ALL, "embed_tokens"]}, ""),
        ("DeepseekV2ForCausalLM", "queries-too",
         {"target_modules": r".*(q_a_proj|q_b_proj|kv_a_proj_with_mqa|o_proj|0\.mlp\.\w+_proj)"}, ""),
        ("Starcoder2ForCausalLM", "windows", {"target_modules": ["q_proj", "c_fc", "c_proj"]}, ""),
        ("Gemma4ForConditionalGeneration", "experts", {"target_modules": ["q_proj", "gate_proj", "down_proj"]}, ""),
    ],
)  # fmt: skip
def test_other_families(architecture: str, variant: str, fields: dict[str, Any], strip: str, tmp_path: Path) -> None:
    family = Family(tmp_path, architecture, variant, fields, strip=strip)
    with LLM(str(family.folder), **SIZES) as llm:
        check(llm.generate(PROMPTS[:2], PARAMS, use_tqdm=False, lora_request=family.requests), family.models)


EACH = "mlp gate_proj up_proj down_proj"
FUSED = ["experts.gate_up_proj", "experts.down_proj"]
NONE: dict[str, Any] = {"target_modules": []}


@pytest.fixture(scope="module", name="qwen")
def _qwen(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """With shared experts."""
    return Family(
        tmp_path_factory.mktemp("qwen"), "Qwen2MoeForCausalLM", "full",
        {"target_modules": ALL, "each_expert": EACH},
        {"target_parameters": FUSED, "target_modules": ["q_proj"], "use_rslora": True,
         "rank_pattern": {"gate_up_proj": 8}},
        {"target_parameters": ["mlp.experts.gate_up_proj"], "r": 9, **NONE},
    )  # fmt: skip


@pytest.mark.parametrize(
    "how",
    [
        {},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2, "enable_expert_parallel": True}, marks=pytest.mark.slow),
        pytest.param({"batch_invariant": True}, marks=pytest.mark.slow),
    ],
    ids=lambda how: "-".join(how) or "plain",
)
def test_adapters_of_experts(how: dict[str, Any], qwen: Family) -> None:
    """Of each and of all in one, beside shared ones, mixed in a batch."""
    with LLM(str(qwen.folder), max_loras=3, lora_experts=True, **{**SIZES, **how}) as llm:
        check(llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=qwen.requests), qwen.models)
        check(llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=qwen.requests[::-1]), qwen.models[::-1])


def test_quantized_experts_with_an_adapter_are_as_near_as_without(qwen: Family) -> None:
    with LLM(str(qwen.folder), lora_experts=True, quantization="ptpc_fp8", **SIZES) as llm:
        (output,) = llm.generate(PROMPTS[:1], PARAMS, use_tqdm=False, lora_request=qwen.requests[1])
    tokens, found = scored(output)
    errors = [(found - scores(model, tokens)).norm() for model in qwen.models[:2]]
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.parametrize(
    ("architecture", "variant", "fields"),
    [
        (
            "MixtralForCausalLM",
            "full",
            {"each_expert": "block_sparse_moe w1 w3 w2", "target_modules": r".*\.w\d"},
        ),
        ("MixtralForCausalLM", "full", {"target_parameters": FUSED, "peft_version": "0.18.1", **NONE}),
        ("GptOssForCausalLM", "sliding", {"target_parameters": FUSED, **NONE}),
        ("Llama4ForCausalLM", "scout", {"target_parameters": FUSED}),
        ("Gemma4ForConditionalGeneration", "experts", {"target_parameters": FUSED, **NONE}),
        ("DeepseekV2ForCausalLM", "queries-too", {"target_parameters": FUSED, "target_modules": ["up_proj"]}),
    ],
)
def test_experts_of_other_families(architecture: str, variant: str, fields: dict[str, Any], tmp_path: Path) -> None:
    family = Family(tmp_path, architecture, variant, fields)
    with LLM(str(family.folder), lora_experts=True, **SIZES) as llm:
        check(llm.generate(PROMPTS[:2], PARAMS, use_tqdm=False, lora_request=family.requests), family.models)
