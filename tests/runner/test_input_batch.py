"""A SchedulerOutput becomes device tensors: what sits where, what padding looks like."""

from __future__ import annotations

import torch

from headrace.runner.input_batch import InputBatch
from headrace.step import SchedulerOutput

CPU = torch.device("cpu")


def step(rows: list[int], computed: list[int], scheduled: list[int], samples: list[bool]) -> SchedulerOutput:
    return SchedulerOutput(1, [], [], [], rows, computed, scheduled, samples)


def test_a_mixed_step() -> None:
    batch = InputBatch(8, CPU).fill(step([5, 2, 7], [9, 3, 0], [1, 1, 4], [True, True, False]))
    assert batch.rows.tolist() == [5, 2, 7]
    assert batch.num_computed.tolist() == [9, 3, 0]
    assert batch.seq_lens.tolist() == [10, 4, 4]
    assert batch.query_start_loc.tolist() == [0, 1, 2, 6]
    assert batch.sample_index.tolist() == [0, 1]
    assert batch.sample_rows.tolist() == [5, 2]
    assert batch.sample_positions.tolist() == [10, 4]
    assert (batch.num_reqs, batch.num_tokens, batch.num_samples) == (3, 6, 2)
    assert (batch.max_query_len, batch.max_seq_len, batch.decode_only) == (4, 10, False)
    assert (batch.num_decodes, batch.max_prompt_len) == (2, 4)


def test_the_last_token_of_a_chunk_is_the_one_that_samples() -> None:
    batch = InputBatch(4, CPU).fill(step([0, 1], [4, 0], [1, 3], [True, True]))
    assert batch.sample_index.tolist() == [0, 3]
    assert batch.sample_positions.tolist() == [5, 3]


def test_padding_sits_in_the_scratch_row_with_no_context() -> None:
    batch = InputBatch(8, CPU).fill(step([3], [6], [1], [True]), padded_reqs=4)
    assert batch.rows.tolist() == [3, 8, 8, 8]
    assert batch.seq_lens.tolist() == [7, 0, 0, 0]
    assert batch.query_start_loc.tolist() == [0, 1, 2, 3, 4]
    assert (batch.num_reqs, batch.num_tokens, batch.num_samples) == (4, 4, 1)
    assert batch.decode_only
    assert batch.num_decodes == 4


def test_a_full_step_uses_every_slot() -> None:
    batch = InputBatch(4, CPU).fill(step([0, 1, 2, 3], [1, 2, 3, 4], [1] * 4, [True] * 4))
    assert batch.query_start_loc.tolist() == [0, 1, 2, 3, 4]
    assert batch.decode_only


def test_an_earlier_step_is_not_overwritten_while_it_may_still_be_read() -> None:
    inputs = InputBatch(4, CPU)
    first = inputs.fill(step([1], [2], [1], [True]))
    inputs.fill(step([3], [7], [1], [True]))
    assert first.sample_rows.tolist() == [1]
    assert first.sample_positions.tolist() == [3]


def test_padding_tokens_belong_to_one_request_of_the_scratch_row() -> None:
    """Else they would count as the last request's, and write over its cache."""
    inputs = InputBatch(8, CPU, fixed=True)
    batch = inputs.fill(step([5, 2], [9, 3], [1, 4], [True, True]), padded_reqs=4, padded_tokens=8, all_rows=True)
    assert batch.rows.tolist() == [5, 2, 8, 8]
    assert batch.num_computed.tolist() == [9, 3, 0, 0]
    assert batch.seq_lens.tolist() == [10, 7, 0, 0]
    assert batch.query_start_loc.tolist() == [0, 1, 5, 8, 8]
    assert (batch.num_reqs, batch.num_tokens, batch.num_samples) == (4, 8, 2)
    assert (batch.num_decodes, batch.max_query_len, batch.max_seq_len, batch.max_prompt_len) == (1, 4, 10, 7)
    assert not batch.decode_only
    all_rows = inputs.all_rows()
    assert all_rows.rows.tolist() == [5, 2] + [8] * 7
    assert all_rows.num_computed.tolist() == [9, 3] + [0] * 7
    assert all_rows.query_start_loc.tolist() == [0, 1, 5] + [8] * 7


def test_requests_without_tokens_are_no_decodes() -> None:
    batch = InputBatch(8, CPU).fill(step([1, 2], [4, 4], [1, 1], [True, False]), padded_reqs=3, padded_tokens=2)
    assert batch.query_start_loc.tolist() == [0, 1, 2, 2]
    assert batch.num_decodes == 2
    assert batch.max_query_len > 1
    assert not batch.decode_only


def test_fixed_addresses_stay() -> None:
    inputs = InputBatch(4, CPU, fixed=True)
    first = inputs.fill(step([1], [2], [1], [True]))
    second = inputs.fill(step([3], [7], [1], [True]))
    assert first.rows.data_ptr() == second.rows.data_ptr()
    assert second.query_start_loc.data_ptr() == inputs.all_rows().query_start_loc.data_ptr()
