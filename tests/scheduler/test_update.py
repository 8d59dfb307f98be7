"""What results do to a request: ends, errors, aborts, drafts; also when steps run ahead of results.

That requests get their tokens and scores, and when, is what test_traffic.py asserts of random histories."""

from __future__ import annotations

import re

import msgspec
import pytest

from headrace.request import EngineCoreOutput, FinishReason
from headrace.scheduler.scheduler import Scheduler
from headrace.step import LOGITS_NOT_FINITE, NO_TOKEN_ALLOWED, RunnerOutput

from .support import make_request, make_scheduler, run_step

EOS, USER_STOP = 2, 5


def feed(scheduler: Scheduler, *tokens: int) -> list[EngineCoreOutput]:
    """One step for each token; the last step's outputs."""
    outputs = []
    for token in tokens:
        _, outputs = run_step(scheduler, token)
    return outputs


# ---- how a request ends


@pytest.mark.parametrize(("token", "told"), [(EOS, None), (USER_STOP, USER_STOP)])
def test_stop_tokens_end_a_request_and_stay_in_its_output(token: int, told: int | None) -> None:
    scheduler = make_scheduler()
    request = make_request("a", 3, stop_token_ids=[EOS, USER_STOP])
    params = msgspec.structs.replace(request.params, stop_token_ids=[USER_STOP])
    scheduler.add_request(msgspec.structs.replace(request, params=params))
    (output,) = feed(scheduler, 7, token)
    assert output == EngineCoreOutput(
        request_id="a", new_token_ids=[token], finish_reason=FinishReason.STOP, stop_token_id=told
    )
    assert not scheduler.has_work()


# ---- aborts


def test_a_stop_string_found_late_takes_the_overlapped_tokens_out_of_the_cache() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4, max_tokens=20))
    feed(scheduler, *[7] * 9)  # computed: 4 + 8, three full blocks
    prefix = [100, 101, 102, 103, *[7] * 8]
    scheduler.abort("a", num_output_tokens_kept=5)  # 9 tokens remain: the third block has some beyond
    scheduler.add_request(make_request("b", [*prefix, 1]))
    assert run_step(scheduler)[0].num_computed_tokens == [8]


def test_what_another_live_request_shares_stays_in_the_cache() -> None:
    scheduler = make_scheduler()
    prefix = [100, 101, 102, 103, *[7] * 8]
    scheduler.add_request(make_request("a", 4, max_tokens=20))
    feed(scheduler, *[7] * 9)
    scheduler.add_request(make_request("b", [*prefix, 1]))
    run_step(scheduler)
    scheduler.abort("a", num_output_tokens_kept=0)
    scheduler.add_request(make_request("c", [*prefix, 1]))
    assert run_step(scheduler)[0].num_computed_tokens[-1] == 12


def test_a_plain_abort_leaves_the_cache_as_it_is() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 9))
    run_step(scheduler)
    scheduler.abort("a")
    scheduler.add_request(make_request("b", 9))
    assert run_step(scheduler)[0].num_computed_tokens == [8]


# ---- failures


@pytest.mark.parametrize(
    ("told", "said"),
    [(LOGITS_NOT_FINITE, "the model gave .* NaN or Inf"), (NO_TOKEN_ALLOWED, "allowed_token_ids, .* forbid")],
)
def test_a_request_without_usable_logits_ends_alone_and_leaves_nothing_in_the_cache(told: int, said: str) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add_request(make_request("good", 2))
    scheduler.add_request(make_request("bad", list(range(9))))
    run_step(scheduler)
    step = scheduler.schedule()
    bad = scheduler.requests["bad"]
    assert bad.num_registered_blocks == 1
    good, ended = scheduler.update(step, RunnerOutput(step.step, [7, told]))
    assert (good.request_id, good.new_token_ids) == ("good", [7])
    assert (ended.request_id, ended.new_token_ids, ended.finish_reason) == ("bad", [], FinishReason.ERROR)
    assert re.search(said, ended.error)
    assert [scheduler.kv_cache.pages.pools[0].find(digest) for digest in bad.block_hashes] == [None, None]


# ---- drafts


@pytest.mark.parametrize(
    ("tokens", "kept", "reason"),
    [
        ([7, EOS, 7, 7], [7, EOS], FinishReason.STOP),
        ([EOS, 7, EOS, 7], [EOS, 7, EOS], FinishReason.STOP),  # the first comes before min_tokens
        ([7, EOS, 7, NO_TOKEN_ALLOWED], [7, EOS], FinishReason.STOP),
        ([7, 7, 7, 7], [7, 7, 7], FinishReason.LENGTH),
    ],
)
def test_tokens_beyond_the_end_are_dropped(tokens: list[int], kept: list[int], reason: FinishReason) -> None:
    scheduler = make_scheduler(num_drafts=3)
    scheduler.add_request(make_request("a", 5, max_tokens=4, min_tokens=3, stop_token_ids=[EOS]))
    run_step(scheduler)
    (output,) = scheduler.update(scheduler.schedule(), RunnerOutput(1, tokens, num_sampled=[4]))
    assert (output.new_token_ids, output.finish_reason) == (kept, reason)
    assert scheduler.kv_cache.pages.pools[0].num_held == 0
