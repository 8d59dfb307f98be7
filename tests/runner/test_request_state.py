"""Rows are filled at admission, updated by blocks, and forgotten when freed."""

from __future__ import annotations

import torch

from headrace.runner.request_state import RequestState
from headrace.sampling_params import SamplingParams
from headrace.step import BlockUpdate, NewRow, SchedulerOutput


def state(num_drafts: int = 0) -> RequestState:
    return RequestState(
        max_rows=3,
        max_model_len=10,
        block_sizes=[4, 10],
        vocab_size=32,
        scratch_blocks=[99, 7],
        device=torch.device("cpu"),
        num_drafts=num_drafts,
    )


def step(
    new: list[NewRow] | None = None, freed: list[int] | None = None, blocks: list[BlockUpdate] | None = None
) -> SchedulerOutput:
    return SchedulerOutput(1, new or [], freed or [], blocks or [], [], [], [], [])


def test_prompts_of_several_rows_land_in_one_go() -> None:
    rows = state()
    rows.apply(step([NewRow(2, [5, 6, 7], SamplingParams(), []), NewRow(0, [9], SamplingParams(), [])]))
    assert rows.token_table[2, :3].tolist() == [5, 6, 7]
    assert rows.token_table[0, :1].tolist() == [9]
    assert rows.token_table[1].eq(0).all()


def test_one_that_resumes_brings_its_output_along() -> None:
    """Which is no part of its prompt: penalties, min_tokens and prompt logprobs tell the two apart."""
    rows = state()
    wants = SamplingParams(prompt_logprobs=1)
    rows.apply(step([NewRow(1, [5, 6], wants, [], output_token_ids=[7, 8])]))
    assert rows.token_table[1, :4].tolist() == [5, 6, 7, 8]
    assert rows.sampling.gather(torch.tensor([1])).num_prompt_tokens.tolist() == [2]
    assert rows.prompt_logprobs == {1: (1, 2)}


def test_block_updates_write_where_they_say() -> None:
    rows = state()
    rows.apply(step(blocks=[BlockUpdate(1, 0, [4, 8]), BlockUpdate(0, 2, [3])]))
    rows.apply(step(blocks=[BlockUpdate(1, 2, [6]), BlockUpdate(1, 0, [5], group=1)]))
    first, second = rows.block_tables
    assert first[:2].tolist() == [[0, 0, 3], [4, 8, 6]]
    assert second[:2].tolist() == [[0], [5]]


def test_the_scratch_row_points_at_the_scratch_block() -> None:
    rows = state()
    assert [table.shape for table in rows.block_tables] == [(4, 3), (4, 1)]
    assert [table[3].tolist() for table in rows.block_tables] == [[99, 99, 99], [7]]


def test_a_row_freed_and_reused_in_one_step_keeps_only_the_new_request() -> None:
    rows = state()
    wants = SamplingParams(logprobs=3, prompt_logprobs=2)
    rows.apply(step([NewRow(1, [5, 6], wants, [])]))
    assert rows.wants_logprobs == {1: 3}
    assert rows.prompt_logprobs == {1: (2, 2)}
    rows.apply(step([NewRow(1, [7], SamplingParams(), [])], freed=[1]))
    assert rows.wants_logprobs == {}
    assert rows.prompt_logprobs == {}
    assert rows.token_table[1, :1].tolist() == [7]


def test_lengths_that_are_noted_are_written_later_unless_their_row_is_anothers_by_then() -> None:
    rows = state(num_drafts=2)
    rows.apply(step([NewRow(row, [5, 6], SamplingParams(), []) for row in range(3)]))
    rows.note_lengths(SchedulerOutput(2, [], [], [], [0, 1, 2], [1, 1, 0], [1, 1, 1], [True, True, False]))
    rows.note_lengths(SchedulerOutput(3, [], [], [], [0], [2], [1], [True]))
    assert rows.num_known is not None
    assert rows.num_known[:3].tolist() == [2, 2, 2]
    rows.apply(step([NewRow(1, [7, 8, 9, 9, 9], SamplingParams(), [])], freed=[1]))
    for _ in range(2):
        rows.write_lengths()
        assert rows.num_known[:3].tolist() == [4, 5, 2]
