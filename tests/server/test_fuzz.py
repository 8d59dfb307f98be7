"""Fuzzed requests: whatever a body is made of, it is answered or refused, by no 5xx, and holds up nobody meanwhile."""

from __future__ import annotations

import contextlib
import gc
import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from typing import Any

import httpx
import pytest

from headrace.server.run import GC_THRESHOLDS
from tests.scripted.engine import Scripted, scripted_servers
from tests.scripted.families import FAMILIES
from tests.server.hostile import COUNT_TOKENS, GENERATES, LOAD, MESSAGES, RESPONSES, UNLOAD, Bodies
from tests.server.loop_watch import GAP, TRIES, watching
from tests.server.test_adapters import adapter
from tests.speed import PATIENCE, slowness

COUNT = 500
"""Bodies of one test; there are 30 of them in `make test-all`."""
MESSAGE_BYTES = 4096
LONG = 4 * GAP
"""Seconds for which the loop may stand still while other threads compute: the core is one of them here, and says in one
breath what takes a model seconds."""
ENDS = {MESSAGES: r"event: message_stop\n.*\n\n\Z", RESPONSES: r"event: response\.(completed|incomplete)\n.*\n\n\Z"}
"""how a stream ends where it is not [DONE]"""
REFUSALS = (400, 404, 413, 415, 422)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    """A model that says any tokens that a grammar allows, and its own otherwise. Clients may load adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    adapter(folder / "good")
    adapter(folder / "odd", inputs=5)
    adapter(folder / "pickled")
    (folder / "pickled" / "adapter_model.safetensors").rename(folder / "pickled" / "adapter_model.bin")
    (folder / "linked").symlink_to("/etc")
    with scripted_servers() as servers:
        flags = {"max_model_len": 2048, "enable_lora": True, "runtime_lora_folder": str(folder)}
        found = servers(FAMILIES["qwen3"], **flags)
        found.transcript.obeys = True
        found.say("A word.", reasoning="A thought.")
        yield found


@contextlib.contextmanager
def no_garbage_of_before() -> Iterator[None]:
    """What was made before is no garbage, as in a server."""
    gc.collect()
    gc.freeze()
    threshold = gc.get_threshold()
    gc.set_threshold(*GC_THRESHOLDS)
    yield
    gc.set_threshold(*threshold)
    gc.unfreeze()


SEEDS = pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 31))])
"""All but the first, of `make test`, are timed too."""


@SEEDS
def test_any_body_is_answered_or_refused(scripted: Scripted, seed: int) -> None:
    with no_garbage_of_before():
        statuses = scripted.servers.run(answers(asked_of(scripted.app), Bodies(seed), GENERATES, timed=seed > 0))
    assert statuses[200] > COUNT / 10, "the fuzzing is too coarse: nearly all is refused"
    assert sum(statuses.values()) - statuses[200] > COUNT / 10


def asked_of(app: Any) -> httpx.AsyncClient:
    """A client of an application on the running loop."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=PATIENCE)


async def answers(
    client: httpx.AsyncClient, bodies: Bodies, weights: Mapping[str, int], *, timed: bool, count: int = COUNT
) -> Counter[int]:
    """Send so many bodies, check each answer, and return how often each status came. `timed`: nothing may hold up the
    loop either."""
    statuses: Counter[int] = Counter()
    limit, longest = GAP * slowness(), LONG * slowness()
    async with client, watching() as watch:
        for _ in range(count):
            path, body = bodies.any(weights)
            gap = busy = float("inf")
            for _ in range(TRIES if timed else 1):
                watch.begin()
                answer = await client.post(path, content=body, headers={"content-type": "application/json"})
                gap, busy = min(gap, await watch.end()), min(busy, watch.busy)
                check(answer, path, body)
                if busy < limit and gap < longest:
                    break
            if timed:
                assert busy < limit, f"{path} kept the loop busy for {busy * 1000:.0f} ms: {body[:2000]!r}"
                assert gap < longest, f"{path} held up the loop for {gap * 1000:.0f} ms: {body[:2000]!r}"
            statuses[answer.status_code] += 1
    return statuses


def check(answer: httpx.Response, path: str, body: bytes) -> None:
    """The answer is whole, or an error that is the client's and says so in the shape of its API."""
    what = f"{path} answered {answer.status_code} {answer.text[:500]} to {body[:2000]!r}"
    if answer.status_code == 200:
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert re.search(ENDS.get(path, r"data: \[DONE\]\n\n\Z"), answer.text), what
        elif path not in (LOAD, UNLOAD):
            answer.json()
        return
    assert answer.status_code in REFUSALS, what
    assert len(answer.content) < MESSAGE_BYTES, what
    error = answer.json()["error"]
    shape = ["message", "type"] if path in (MESSAGES, COUNT_TOKENS) else ["code", "message", "param", "type"]
    assert sorted(error) == shape, what
    assert error["message"], what


@pytest.mark.parametrize("most", [4, pytest.param(12, marks=pytest.mark.slow)])
def test_the_document_of_the_api_holds(scripted: Scripted, most: int) -> None:
    assert {f"POST {path}" for path in GENERATES} < document_holds(scripted.url, most)


def document_holds(url: str, most: int, only: Container[str] | None = None) -> set[str]:
    """schemathesis makes so many requests of each POST, valid and not, from openapi.json, and compares the answers with
    it. `only`: paths that it asks. Returns what it has asked."""
    schemathesis = pytest.importorskip("schemathesis")
    import hypothesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    api = schemathesis.openapi.from_url(f"{url}/openapi.json")
    always = [not_a_server_error, checks.status_code_conformance, checks.content_type_conformance]
    of_json = [*always, checks.response_schema_conformance]  # that of events is of what `data` holds
    every_check = list(hypothesis.HealthCheck)
    seen: Counter[str] = Counter()
    for found in api.get_all_operations():
        operation = found.ok()
        if only is not None and operation.path not in only:
            continue
        examples = most if operation.method == "post" else 3

        @hypothesis.settings(max_examples=examples, deadline=None, database=None, suppress_health_check=every_check)
        @hypothesis.given(case=operation.as_strategy())
        def sends(case: Any) -> None:
            answer = case.call(timeout=PATIENCE)
            streamed = answer.headers.get("content-type", [""])[0].startswith("text/event-stream")
            case.validate_response(answer, checks=always if streamed else of_json)
            seen[case.operation.label] += 1

        sends()
    return set(seen)
