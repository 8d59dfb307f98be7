"""A step never reads the device on the host: no operation whose output's size or value the host must know."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.kernels.batch import scatter_words
from headrace.kernels.table import select_kernels
from headrace.sampling.sampler import Sampler
from headrace.sampling.state import SamplingState
from headrace.sampling.transfer import TableWriter

from .oracle import Bench, random_case

VOCAB_SIZE, ROWS = 77, 32


def tensors_in(arguments: Iterable[Any]) -> Iterable[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from tensors_in(argument)


class HostReads(TorchDispatchMode):
    """Collects the operations that would make the host wait for a GPU."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero", "bincount")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.count += 1
        by_mask = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            index.dtype in (torch.bool, torch.uint8) for index in tensors_in([args[1]])
        )
        if by_mask or any(name.startswith(word) for word in self.WAITING):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def full_bench(seed: int) -> Bench:
    rng = np.random.default_rng(seed)
    bench = Bench(VOCAB_SIZE, ROWS)
    bench.add({row: random_case(rng, VOCAB_SIZE) for row in range(ROWS)})
    return bench


def test_a_step_with_every_feature_reads_nothing_back() -> None:
    bench, logits = full_bench(0), torch.randn(ROWS, VOCAB_SIZE)
    rows, num_tokens = torch.arange(ROWS), torch.tensor([len(bench.cases[row].tokens) for row in range(ROWS)])
    # The draw's reference looks at values where they lie on the host anyway; on a GPU another function draws.
    kernels = replace(select_kernels("cpu"), gumbel_argmax=lambda scores, *_: scores.argmax(dim=1))
    with HostReads() as reads:
        Sampler(bench.state, kernels).sample(logits, rows, num_tokens, bench.token_table)
    assert reads.count > 50
    assert reads.found == []


def test_the_watcher_sees_what_it_is_for() -> None:
    values = torch.randn(8)
    with HostReads() as reads:
        values[values > 0].sum().item()
        values[values > 0] = 0
    assert reads.found == ["index", "_local_scalar_dense", "index_put_"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_tokens_without_waiting() -> None:
    device = torch.device("cuda")
    for seed in range(4):
        bench, logits = full_bench(seed), torch.randn(ROWS, VOCAB_SIZE) * 2
        expected = bench.sample(logits, list(range(ROWS)))
        writer = TableWriter(device, {SamplingState.TABLE: SamplingState.table_shape(ROWS)}, scatter_words)
        state = SamplingState(ROWS, VOCAB_SIZE, device, writer)
        sampler, table = Sampler(state, select_kernels("cuda")), bench.token_table.to(device)
        rows = torch.arange(ROWS, device=device)
        num_tokens = torch.tensor([len(bench.cases[row].tokens) for row in range(ROWS)], device=device)
        on_device = logits.to(device)
        state.add([case.new_row(row) for row, case in bench.cases.items()])
        writer.flush()
        sampler.sample(on_device, rows, num_tokens, table)  # compiles kernels, which may wait
        state.remove([0])
        state.add([bench.cases[0].new_row(0)])
        writer.flush()
        torch.cuda.set_sync_debug_mode("error")
        try:
            result = sampler.sample(on_device, rows, num_tokens, table)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert result.token_ids.tolist() == expected.token_ids.tolist()
        assert result.logprobs is not None
        assert expected.logprobs is not None
        torch.testing.assert_close(result.logprobs.logprobs.cpu(), expected.logprobs.logprobs, rtol=1e-5, atol=1e-5)
        assert torch.equal(result.logprobs.ranks.cpu(), expected.logprobs.ranks)
