"""Two machines, which are two addresses of this one: the real commands on each."""

from __future__ import annotations

import socket

import psutil
import pytest

from tests.serving import Serve, Served, gone, headrace

GOLDEN = ", there was a little girl named Lily. She loved to play outside"


def test_two_machines_serve_together_and_one_that_dies_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_SECRET", "the secret of these two machines")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["demo", "-tp", "2", "--dtype", "float32", "--nnodes", "2"]
    flags += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    with monkeypatch.context() as there:
        there.setenv("VLLM_HOST_IP", "127.0.0.2")
        process = headrace("serve", *flags, "--node-rank", "1", "--headless")
    with Served(process, wait=False) as node, Serve(*flags) as server:
        assert server.complete(max_tokens=16).startswith(GOLDEN)
        assert [len(each.ranks()) for each in (server, node)] == [1, 1]
        here, elsewhere = (listening([psutil.Process(each.process.pid), *each.children()]) for each in (server, node))
        assert (here, elsewhere) == ({"127.0.0.1"}, {"127.0.0.2"})
        everything = [*server.ranks(), *node.children()]
        node.process.kill()
        gone(everything)
        server.wait_for_health(503)
        assert "node 1 (127.0.0.1) with rank 1 is gone: its connection is closed" in server.text
        assert server.stop() == 0


def listening(processes: list[psutil.Process]) -> set[str]:
    """Addresses at which others could connect."""
    return {
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
