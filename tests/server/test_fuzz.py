"""Fuzzed requests: whatever a body is made of, it is answered or refused, by no 5xx, and holds up nobody meanwhile."""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from headrace.server.run import GC_THRESHOLDS
from tests.scripted.engine import Scripted, scripted_servers
from tests.scripted.families import FAMILIES
from tests.server.hostile import MESSAGES, RESPONSES, Bodies
from tests.server.loop_watch import GAP, TRIES, watching
from tests.speed import PATIENCE, slowness

COUNT = 500
"""Bodies of one test; there are 20 of them in `make test-all`."""
MESSAGE_BYTES = 4096
LONG = 4 * GAP
"""Seconds for which the loop may stand still while other threads compute: the core is one of them here, and says in one
breath what takes a model seconds."""
ENDS = {MESSAGES: r"event: message_stop\n.*\n\n\Z", RESPONSES: r"event: response\.(completed|incomplete)\n.*\n\n\Z"}
"""how a stream ends where it is not [DONE]"""
REFUSALS = (400, 404, 413, 415, 422)


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    """A model that says any tokens that a request's grammar allows, and its own otherwise."""
    with scripted_servers() as servers:
        found = servers(FAMILIES["qwen3"], max_model_len=2048)
        found.transcript.obeys = True
        found.say("A word.", reasoning="A thought.")
        gc.collect()
        gc.freeze()  # what was made before the tests is no garbage, as in a server
        threshold = gc.get_threshold()
        gc.set_threshold(*GC_THRESHOLDS)
        yield found
        gc.set_threshold(*threshold)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_any_body_is_answered_or_refused(scripted: Scripted, seed: int) -> None:
    bodies = Bodies(seed)
    statuses: Counter[int] = Counter()
    limit = GAP * slowness()

    async def go() -> None:
        transport = httpx.ASGITransport(scripted.app, raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=PATIENCE)
        async with client, watching() as watch:
            for _ in range(COUNT):
                path, body = bodies.any()
                gap = busy = float("inf")
                for _ in range(TRIES):
                    watch.begin()
                    answer = await client.post(path, content=body, headers={"content-type": "application/json"})
                    gap, busy = min(gap, await watch.end()), min(busy, watch.busy)
                    check(answer, path, body)
                    if busy < limit and gap < LONG * slowness():
                        break
                assert busy < limit, f"{path} kept the loop busy for {busy * 1000:.0f} ms: {body[:2000]!r}"
                assert gap < LONG * slowness(), f"{path} held up the loop for {gap * 1000:.0f} ms: {body[:2000]!r}"
                statuses[answer.status_code] += 1

    scripted.servers.run(go())
    assert statuses[200] > COUNT / 10, "the fuzzing is too coarse: nearly all is refused"
    assert sum(statuses.values()) - statuses[200] > COUNT / 10


def check(answer: httpx.Response, path: str, body: bytes) -> None:
    """The answer is whole, or an error that is the client's and says so in the shape of its API."""
    what = f"{path} answered {answer.status_code} {answer.text[:500]} to {body[:2000]!r}"
    if answer.status_code == 200:
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert re.search(ENDS.get(path, r"data: \[DONE\]\n\n\Z"), answer.text), what
        else:
            answer.json()
        return
    assert answer.status_code in REFUSALS, what
    assert len(answer.content) < MESSAGE_BYTES, what
    error = answer.json()["error"]
    assert sorted(error) == (["message", "type"] if path == MESSAGES else ["code", "message", "param", "type"]), what
    assert error["message"], what


@pytest.mark.parametrize("most", [4, pytest.param(12, marks=pytest.mark.slow)])
def test_the_document_of_the_api_holds(scripted: Scripted, most: int) -> None:
    """schemathesis makes requests from openapi.json, valid and not, and compares the answers with it."""
    schemathesis = pytest.importorskip("schemathesis")
    import hypothesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    api = schemathesis.openapi.from_url(f"{scripted.url}/openapi.json")
    always = [not_a_server_error, checks.status_code_conformance, checks.content_type_conformance]
    of_json = [*always, checks.response_schema_conformance]  # that of events is of what `data` holds
    every_check = list(hypothesis.HealthCheck)
    seen: Counter[str] = Counter()
    for found in api.get_all_operations():
        operation = found.ok()
        examples = most if operation.method == "post" else 3

        @hypothesis.settings(max_examples=examples, deadline=None, database=None, suppress_health_check=every_check)
        @hypothesis.given(case=operation.as_strategy())
        def sends(case: Any) -> None:
            answer = case.call(timeout=PATIENCE)
            streamed = answer.headers.get("content-type", [""])[0].startswith("text/event-stream")
            case.validate_response(answer, checks=always if streamed else of_json)
            seen[case.operation.label] += 1

        sends()
    assert {"POST /v1/chat/completions", "POST /v1/completions"} < set(seen)
