"""One server for all tests that do not harm it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving import Serve

KEY = "a key"


@pytest.fixture(scope="session")
def server() -> Iterator[Serve]:
    with Serve("demo", "--dtype", "float32", "--max-request-bytes", "1M", key=KEY) as server:
        yield server
        server.wait_until_free()
        assert "Traceback" not in server.text
        assert server.stop() == 0
