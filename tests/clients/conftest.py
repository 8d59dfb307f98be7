"""What the tests of clients share: one event loop with a scripted server for each family, and no calls home."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.clients.tasks import Task
from tests.sampled import slow_but_for_a_sample
from tests.scripted.engine import Scripted, ScriptedServers, scripted_servers
from tests.scripted.families import FAMILIES

QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or it is downloaded at import
    "LITELLM_MODE": "PRODUCTION",  # reads no .env file
    "LANGSMITH_TRACING": "false",
    "LANGCHAIN_TRACING_V2": "false",
    "OTEL_SDK_DISABLED": "true",
    "PYDANTIC_AI_DISABLE_INSTRUMENTATION": "1",
}
os.environ.update(QUIET)
for proxy in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
    os.environ.pop(proxy, None)
    os.environ.pop(proxy.lower(), None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each family and each way of a client comes up, with streams or without; all of them with each other are slow."""
    here = Path(__file__).parent
    slow_but_for_a_sample([one for one in items if one.path.parent == here and isinstance(one, pytest.Function)])


@pytest.fixture(autouse=True)
def _no_calls_home() -> Iterator[None]:
    """No client looks up the address of anything but the server."""
    asked: list[str] = []
    real = socket.getaddrinfo

    def only_here(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in (None, "127.0.0.1", b"127.0.0.1"):
            asked.append(str(host))
            raise OSError(f"{host} is not this machine")
        return real(host, *args, **kwargs)

    with mock.patch.object(socket, "getaddrinfo", only_here):
        yield
    assert asked == []


@pytest.fixture(scope="session")
def servers() -> Iterator[ScriptedServers]:
    with scripted_servers() as found:
        yield found


@pytest.fixture(params=FAMILIES)
def scripted(servers: ScriptedServers, request: pytest.FixtureRequest) -> Scripted:
    """The server of each family in turn."""
    return servers(FAMILIES[request.param])


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def task(scripted: Scripted) -> Task:
    """A fresh task, whose transcript the server of this test plays."""
    fresh = Task.fresh(scripted.family)
    scripted.play(*fresh.turns())
    return fresh
