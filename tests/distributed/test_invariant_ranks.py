"""With `batch_invariant` one rank, two and four give the same tokens and logprobs, bit for bit, in 16 bits too:
products whose inputs ranks share are summed as eight slices in one tree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_configs import VARIANTS, save_tiny_model

from headrace import LLM, SamplingParams
from headrace.distributed.mesh import Group
from headrace.kernels.matmul import SLICES, matmul_slices, tree_sum
from headrace.layers.linear import RowParallelLinear
from headrace.planner.decisions import INVARIANT_RANKS
from headrace.quantization.unquantized import unquantized
from tests.distributed.thread_ranks import THREADS

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [64, 104, 200])
def test_the_sum_of_slices_is_the_same_wherever_they_lie(inputs: int, dtype: torch.dtype) -> None:
    """On eight simulated ranks too; slices need not be equally long."""
    random = torch.Generator().manual_seed(inputs)
    x, weight = torch.randn(3, inputs, generator=random).to(dtype), torch.randn(5, inputs, generator=random).to(dtype)
    bias = torch.randn(5, generator=random).to(dtype)

    def outputs(ranks: int) -> torch.Tensor:
        sums: list[torch.Tensor] = []
        for rank in range(ranks):
            group = Group(rank, ranks, all_gather=lambda own: torch.cat([*sums[:-1], own], dim=-1))
            layer = RowParallelLinear(inputs, 5, group, dtype, bias=True)
            layer.spec = replace(layer.spec, batch_invariant=True)
            layer.attach(unquantized())
            layer.create_weights(CPU)
            columns = layer.spec.parts[0].columns
            layer.weights["weight"].copy_(weight[:, columns])
            layer.weights["bias"].copy_(bias)
            layer.finalize()
            sums.append(layer.compute(x[:, columns], None))
            if rank == ranks - 1:
                return layer.computed(x[:, columns])
        raise AssertionError

    one = outputs(1)
    assert one.dtype == dtype
    exact = (x.double() @ weight.double().T + bias.double()).to(dtype)
    assert torch.allclose(one, exact, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    for ranks in (2, 4, 8):
        assert torch.equal(outputs(ranks), one)


def test_a_tree_adds_neighbours() -> None:
    terms = [torch.tensor(value) for value in (1.0, 1e8, -1e8, 1.0)]
    assert float(tree_sum(terms)) == float((terms[0] + terms[1]) + (terms[2] + terms[3]))
    assert matmul_slices(torch.ones(2, 3), 8)(torch.ones(1, 3)).tolist() == [[3.0, 3.0]]
    assert [ranks for ranks in range(1, SLICES + 1) if SLICES % ranks == 0] == [*INVARIANT_RANKS]


@pytest.mark.parametrize(
    "case",
    [("LlamaForCausalLM", "biases"), pytest.param(("Qwen3ForCausalLM", None), marks=pytest.mark.slow)],
    ids=lambda case: case[0],
)
def test_one_two_and_four_ranks_give_the_same_bits(case: tuple[str, str | None], tmp_path: Path) -> None:
    save_tiny_model(case[0], case[1] or next(iter(VARIANTS[case[0]])), tmp_path)
    random = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 90, (length,), generator=random).tolist() for length in (3, 21, 9)]
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=3, prompt_logprobs=1)

    def answers(ranks: int) -> list[Any]:
        with LLM(
            str(tmp_path), executor=THREADS, dtype="bfloat16", device="cpu", skip_tokenizer_init=True,
            batch_invariant=True, tensor_parallel_size=ranks, num_gpu_blocks_override=30, max_model_len=64,
            max_num_seqs=4,
        ) as llm:  # fmt: skip
            found = llm.generate(prompts, params, use_tqdm=False)
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs) for output in found]

    one = answers(1)
    assert answers(2) == one
    assert answers(4) == one
