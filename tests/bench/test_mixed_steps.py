"""Which steps count, and a toy run on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from h200_parts.settings import Settings
from mixed_steps import Times, run_round, timed_core


def test_steps_of_another_size_and_the_first_do_not_count() -> None:
    times = Times(tokens=[8, 8, 3, 8], submitting=[0.1, 0.2, 0.3, 0.4], finished=[1.0, 2.0, 5.0, 6.5])
    assert times.of_size(8) == ([1.0, 1.5], [0.2, 0.4])
    assert times.of_size(3) == ([3.0], [0.3])


@pytest.mark.parametrize(("decodes", "tokens"), [(3, 16), (1, 32)])
def test_prompts_go_by_beside_decodes_in_steps_of_the_size(tmp_path: Path, decodes: int, tokens: int) -> None:
    with timed_core(Settings(tmp_path, smoke=True), "bf16") as (core, executor):
        for prompts in (2, 6):
            times = run_round(core, executor, decodes, tokens, prompts, length=16)
            assert not core.scheduler.running.items
        steps, host = times.of_size(tokens)
        computed = sum(count - decodes for count in times.tokens if count > decodes)
    assert computed >= 6 * 16
    assert max(times.tokens) == tokens
    assert len(steps) == len(host) > 1
    assert all(submitting > 0 for submitting in host)
