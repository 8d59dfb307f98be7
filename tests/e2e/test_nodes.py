"""Two machines, which are two addresses of this one: the real commands on each."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from headrace.process import free_port
from tests.serving import Serve, Served, gone, headrace, started
from tests.speed import PATIENCE, wait_until

HASTY = """
import sys
from headrace.cli.main import main
from headrace.engine import node

node.NEXT_SECONDS = 0.0
sys.exit(main())
"""
"""The command on a machine that waits for no other engine once its own has ended"""
GOLDEN = ", there was a little girl named Lily. She loved to play outside"


def test_two_machines_serve_together_and_one_that_dies_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_SECRET", "the secret of these two machines")
    port = free_port()
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


def test_engines_on_two_machines_share_a_door_and_a_machine_that_dies_takes_only_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADRACE_SECRET", "the secret of these two machines")
    port = free_port("127.0.0.2")
    flags = ["demo", "-dp", "2", "-dpl", "1", "--dtype", "float32"]
    flags += ["--data-parallel-address", "127.0.0.2", "--data-parallel-rpc-port", str(port)]

    other_flags = ["serve", *flags, "--data-parallel-start-rank", "1", "--headless"]

    with Served(headrace(*other_flags), wait=False) as other, Serve(*flags) as server:
        assert [len(each.children("headrace.engine.core_process")) for each in (server, other)] == [1, 1]
        processes = [psutil.Process(server.process.pid), *server.children()]
        assert listening(processes) <= {"127.0.0.1", "127.0.0.2"}  # its own door, and the network between machines
        assert listening([psutil.Process(other.process.pid), *other.children()]) == set()
        with ThreadPoolExecutor(4) as clients:  # whose answers come in one piece, so all are sent again
            answers = [clients.submit(server.complete, max_tokens=400, ignore_eos=True) for _ in range(4)]
            wait_until(lambda: runs_there(server))
            everything = other.children()
            other.process.kill()
            gone(everything)
            assert [answer.result()[: len(GOLDEN)] for answer in answers] == [GOLDEN] * 4
        assert server.health() == 200
        assert "is gone: its connection is closed" in engine_states(server)["1"]
        with Served(started([sys.executable, "-c", HASTY, *other_flags]), wait=False) as again:
            server.wait_for("engine 1 serves again")
            assert engine_states(server) == {"0": "serving", "1": "serving"}
            everything = again.children()
            assert server.stop() == 0
            assert again.process.wait(PATIENCE) == 0
            gone(everything)


def runs_there(server: Serve) -> bool:
    """Whether the other machine's engine has requests."""
    shown = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text
    return re.search(r'^vllm:num_requests_running\{engine="1".* [1-9]', shown, re.MULTILINE) is not None


def engine_states(server: Serve) -> dict[str, str]:
    """What each engine does, as /health says."""
    found: dict[str, str] = httpx.get(f"{server.url}/health", timeout=PATIENCE).json()["engines"]
    return found


def listening(processes: list[psutil.Process]) -> set[str]:
    """Addresses at which others could connect."""
    return {
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
