"""How many guesses are right is what a script says, whoever guesses; a picture shows the gain."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from draft_gains import measured, picture
from h200_parts import drafts
from h200_parts.bounds import Ceilings
from h200_parts.models import MODELS
from h200_parts.offline import Bench
from h200_parts.run import Run
from h200_parts.settings import Settings

from headrace.spec_decode.ngram import NgramDrafter


def test_as_many_guesses_are_right_as_a_script_says(tmp_path: Path) -> None:
    run = Run(Settings(work=tmp_path, smoke=True), None, "")
    bench = Bench(run, MODELS["8b-eagle3"], Ceilings(1.0, 1.0, 1.0, 1.0))
    core: Any = bench.core
    looks_up = NgramDrafter(5, 2, 4, core._executor._worker.kernels.propose_ngram)
    scripts: list[tuple[Any, Callable[..., Any], float]] = [
        (drafts.head_of(core), drafts.one_or_two_right, 2.5),
        (looks_up, partial(drafts.first_right, 4), 5.0),
        (looks_up, partial(drafts.first_right, 0), 1.0),
        (drafts.head_of(core), partial(drafts.with_chance, 0.4), 1 + 0.4 + 0.16 + 0.064),
    ]
    for drafter, script, tokens in scripts:
        drafts.use_drafts(core, drafts.Scripted(drafter, script))
        _, steps = drafts.timed(bench, bench.prompts(3, 9), 101, drafts.FORCED)
        assert 100 / steps == pytest.approx(tokens, rel=0.15)
    bench.close()


def test_gains_are_drawn_as_measured() -> None:
    names = {"plain/1": 200.0, "eagle3/1": 400.0, "plain/128": 5000.0, "adaptive/128": 5100.0, "0/1": 5.0}
    rows = [{"name": f"drafts/8b-eagle3/{name}", "value": value} for name, value in names.items()]
    curves = measured({"rows": rows})
    assert curves == {
        "3 guesses, 2.5 tokens a step": {1: 2.0}, "3 guesses, 40% right": {}, "adaptive, 40% right": {128: 1.02},
    }  # fmt: skip
    assert "adaptive, 40% right" in picture(curves, "measured")
