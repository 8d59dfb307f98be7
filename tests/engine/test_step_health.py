"""When steps fail one after the other, and when it is a request that fails."""

import pytest

from headrace.engine.step_health import MOST_FAILURES, StepHealth
from headrace.errors import HeadraceError
from headrace.step import LOGITS_NOT_FINITE, NO_TOKEN_ALLOWED, RunnerOutput


def sampled(*token_ids: int) -> RunnerOutput:
    return RunnerOutput(0, list(token_ids))


BROKEN = sampled(LOGITS_NOT_FINITE, LOGITS_NOT_FINITE)


def after(*results: RunnerOutput | Exception, dtype: str = "bfloat16") -> str:
    """The problem that such steps leave."""
    health = StepHealth(dtype)
    for result in results:
        if isinstance(result, Exception):
            health.failed(result)
        else:
            health.finished(result)
    return health.problem


def test_a_few_failures_are_no_problem_and_many_are() -> None:
    assert not after(*[BROKEN] * (MOST_FAILURES - 1))
    assert after(*[BROKEN] * MOST_FAILURES) == "the last 3 steps failed: the model gave every request NaN or Inf logits"
    assert "last 5 steps failed" in after(*[BROKEN] * 5)


def test_steps_that_raise_count_alike_and_words_of_others_are_not_shown() -> None:
    assert after(BROKEN, BROKEN, HeadraceError("ours")).endswith("the last one with HeadraceError: ours")
    assert after(BROKEN, BROKEN, RuntimeError("at 0xdead")).endswith("the last one with RuntimeError")


@pytest.mark.parametrize(
    "healthy", [sampled(5), sampled(LOGITS_NOT_FINITE, 5), sampled(LOGITS_NOT_FINITE, NO_TOKEN_ALLOWED)]
)
def test_one_row_with_sound_logits_is_enough(healthy: RunnerOutput) -> None:
    assert not after(*[BROKEN] * 9, healthy)
    assert not after(BROKEN, BROKEN, healthy, BROKEN, BROKEN)


def test_requests_that_forbid_every_token_are_their_own_problem() -> None:
    assert not after(*[sampled(NO_TOKEN_ALLOWED)] * 9)


def test_steps_that_sample_nothing_show_nothing() -> None:
    assert after(BROKEN, sampled(), BROKEN, sampled(), BROKEN)
    assert after(*[BROKEN] * 3, sampled())


def test_float16_is_named_as_a_likely_cause() -> None:
    assert "--dtype bfloat16" in after(*[BROKEN] * 3, dtype="float16")
    assert "float16" not in after(*[RuntimeError()] * 3, dtype="float16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float16_is_named_at_once_and_once(dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    after(sampled(LOGITS_NOT_FINITE, 5), sampled(5), sampled(LOGITS_NOT_FINITE), dtype=dtype)
    assert sum("--dtype bfloat16" in line for line in caplog.messages) == (dtype == "float16")
