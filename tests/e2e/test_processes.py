"""What lives and dies with what: the real server, its core and its ranks, killed in every order."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.serving import Reader, Serve, gone
from tests.speed import PATIENCE, wait_until


def test_ctrl_c_while_requests_run() -> None:
    """As from a terminal: the signal reaches every process of the group."""
    with Serve() as server:
        reader = Reader(server)
        everything = server.children()
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(PATIENCE) == 0
        gone(everything)
        reader.thread.join(PATIENCE)
        assert reader.lines[-1] == "data: [DONE]" or reader.error()["code"] == "server_stopping"
        assert "Traceback" not in server.text


def test_a_closed_terminal_stops_and_output_that_nobody_reads_harms_nobody() -> None:
    """`headrace serve demo | tee log`, and Ctrl-C ends tee first: streams still end as they should."""
    with Serve("demo", "--uvicorn-log-level", "info", read_until="serving demo on http") as server:
        server.reader.join(PATIENCE)
        assert not server.reader.is_alive()
        everything = server.children()
        reader = Reader(server, max_tokens=8)
        reader.thread.join(PATIENCE)
        assert reader.lines[-1] == "data: [DONE]"
        reader = Reader(server)
        server.process.send_signal(signal.SIGHUP)
        reader.thread.join(PATIENCE)
        assert reader.lines[-1] == "data: [DONE]" or reader.error()["code"] == "server_stopping"
        assert server.process.wait(PATIENCE) == 0
        gone(everything)


@pytest.mark.parametrize(
    ("number", "seconds"),
    [(signal.SIGINT, 0.0), (signal.SIGTERM, 1.5), pytest.param(signal.SIGINT, 0.4, marks=pytest.mark.slow)],
)
def test_stop_while_starting(number: int, seconds: float) -> None:
    with Serve(wait=False) as server:
        server.wait_for("loading demo")
        time.sleep(seconds)
        everything = server.children()
        os.killpg(server.process.pid, number)
        assert server.process.wait(PATIENCE) == 0
        gone(everything)
        assert "Traceback" not in server.text


class TestTensorParallel:
    def test_killed_rank_ends_open_requests(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with tempfile.TemporaryDirectory() as sockets, monkeypatch.context() as environment:
            environment.setenv("TMPDIR", sockets)  # its own, as other servers of this machine use the usual one
            with Serve("demo", "-tp", "2", "--dtype", "float32") as server:
                self.check_killed_rank(server, Path(sockets))

    def check_killed_rank(self, server: Serve, sockets: Path) -> None:
        assert len(server.ranks()) == 2
        assert not list(sockets.glob("headrace-*"))  # nothing is left behind by whoever is killed
        self.check_nobody_else_can_join(server)
        text = server.complete(max_tokens=8)
        assert len(text) > 8
        ranks, reader = server.ranks(), Reader(server)
        ranks[1].kill()
        assert reader.error()["code"] == "engine_dead"
        server.wait_for_health(503)
        gone([server.process, *ranks][1:])
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 503
        assert "rank 1 died" in server.text
        assert server.stop() == 0

    def check_nobody_else_can_join(self, server: Serve) -> None:
        """CVE-2025-30202, CVE-2025-47277: sockets between processes that the whole network could reach."""
        processes = [psutil.Process(server.process.pid), *server.children()]
        addresses = {
            connection.laddr.ip
            for process in processes
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM
        }
        assert {process.pid for process in server.ranks()} < {process.pid for process in processes}
        assert addresses == {"127.0.0.1"}
        assert {rank.environ()["NCCL_SOCKET_IFNAME"] for rank in server.ranks()} == {"lo"}  # of GPUs

    @pytest.mark.slow  # `make test` kills one with open requests
    def test_killed_rank_while_idle_turns_health_red(self) -> None:
        """First and last stage, and a start in between, which works."""
        for victim in (0, 3):
            with Serve("demo", "-tp", "2", "-pp", "2") as server:
                ranks = server.ranks()
                ranks[victim].kill()
                server.wait_for_health(503)
                gone(ranks)

    def test_killed_server_takes_core_and_ranks_along(self) -> None:
        with Serve("demo", "-tp", "2", wait=False) as server:
            everything = self.once_ranks_load(server)
            assert len(everything) >= 3
            for process in everything:  # which could not end by themselves
                process.suspend()
            server.process.kill()
            gone(everything)

    def once_ranks_load(self, server: Serve) -> list[psutil.Process]:
        """Return all processes of the server as soon as both ranks have come to load torch."""

        def loading() -> int:
            return sum(any("libtorch" in each.path for each in rank.memory_maps()) for rank in server.ranks())

        wait_until(lambda: loading() == 2)
        return server.children()

    def test_stop_while_ranks_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with tempfile.TemporaryDirectory() as sockets, monkeypatch.context() as environment:
            environment.setenv("TMPDIR", sockets)
            with Serve("demo", "-tp", "2", wait=False) as server:
                everything = self.once_ranks_load(server)
                assert list(Path(sockets).glob("headrace-*"))
                server.process.send_signal(signal.SIGTERM)
                assert server.process.wait(PATIENCE) == 0
                gone(everything)
            assert not list(Path(sockets).iterdir())


class TestDataParallel:
    def test_a_killed_engine_comes_back_and_a_killed_server_takes_all_along(self) -> None:
        """Of the second machine of two, with a balancer between them."""
        hybrid = ("--data-parallel-hybrid-lb", "--data-parallel-size-local", "2", "--data-parallel-start-rank", "2")
        with Serve("demo", "-dp", "4", *hybrid, "--dtype", "float32", "-asc", "2") as server:
            text = server.complete(max_tokens=8)
            cores = server.children("headrace.engine.core_process")
            assert len(cores) == 2
            assert self.states(server) == {"2": "serving", "3": "serving"}
            shown = httpx.get(f"{server.url}/metrics").text
            assert [f'vllm:num_requests_running{{engine="{rank}"' in shown for rank in "0123"] == [False] * 2 + [
                True
            ] * 2
            cores[0].kill()
            for _ in range(4):
                assert server.complete(max_tokens=8) == text
            assert server.health() == 200
            wait_until(lambda: "serves again" in server.text, lambda: server.text)
            wait_until(lambda: self.states(server) == {"2": "serving", "3": "serving"})
            everything = server.children()
            reader = Reader(server)
            server.process.kill()
            gone(everything)
            reader.thread.join(PATIENCE)
            assert reader.lines[-1].startswith("broken off")

    def states(self, server: Serve) -> dict[str, str]:
        found: dict[str, str] = httpx.get(f"{server.url}/health", timeout=PATIENCE).json()["engines"]
        return found
