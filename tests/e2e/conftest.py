"""One server for a module's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.serving import Serve


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    with Serve("demo", "--dtype", "float32") as server:
        yield server
        server.wait_until_free()
        assert "Traceback" not in server.text
        assert server.stop() == 0
