"""The store in which ranks on several machines find each other, and the addresses at which they listen."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
import zmq

from headrace.distributed.network import Keys, data_address, endpoint, interface_of
from headrace.distributed.store import SharedStore
from headrace.distributed.store_server import StoreServer
from headrace.errors import ConfigError

KEYS = Keys.of("a secret of some length")


@pytest.fixture
def server() -> Iterator[StoreServer]:
    made = StoreServer(KEYS, endpoint("127.0.0.1", "*"))
    yield made
    made.close()


def test_what_one_rank_puts_in_another_reads(server: StoreServer) -> None:
    one, two = (SharedStore(endpoint("127.0.0.1", server.port), KEYS, "1/") for _ in range(2))
    later = threading.Thread(target=lambda: (time.sleep(0.05), one.set("late", b"\0bytes")))
    later.start()
    assert two.get("late") == b"\0bytes"  # it waits
    later.join()
    assert [one.add("count", 2), two.add("count", -3)] == [2, -1]
    assert one.check(["late", "count"])
    assert not one.check(["late", "never"])
    assert two.compare_set("swapped", b"", b"a") == b"a"
    assert one.compare_set("swapped", b"b", b"c") == b"a"
    assert one.compare_set("swapped", b"a", b"c") == two.get("swapped") == b"c"
    assert two.compare_set("never", b"there", b"c") == b"there"
    assert (one.deleteKey("late"), two.deleteKey("late")) == (True, False)
    with pytest.raises(dist.DistStoreError, match="no other rank has put never into the store"):
        two.wait(["never"], timedelta(seconds=0.05))
    other_group = SharedStore(endpoint("127.0.0.1", server.port), KEYS, "2/")
    assert not other_group.check(["count"])


def test_nothing_is_answered_without_the_secret(server: StoreServer) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for keys in (Keys.of("another secret"), None):
        socket = context.socket(zmq.REQ)
        if keys is None:
            socket.connect(endpoint("127.0.0.1", server.port))
        else:
            keys.connect(socket, endpoint("127.0.0.1", server.port))
        socket.send(b"\x94\xa3set\x91\xa21/\xa1x\xa0")
        assert not socket.poll(300)
        socket.close(linger=0)
    context.term()
    known = SharedStore(endpoint("127.0.0.1", server.port), KEYS, "")
    assert not known.check(["1/"])


def test_the_address_at_which_ranks_listen() -> None:
    assert data_address("", "", "127.0.0.1") == "127.0.0.1"
    assert data_address("127.0.0.2", "", "127.0.0.1") == "127.0.0.2"
    assert data_address("", "lo", "192.0.2.1") == "127.0.0.1"
    assert interface_of("127.0.0.2") == "lo"
    with pytest.raises(ConfigError, match="GLOO_SOCKET_IFNAME 'no0' is no network interface"):
        data_address("", "no0", "127.0.0.1")
    with pytest.raises(ConfigError, match="name the one between the machines in NCCL_SOCKET_IFNAME"):
        interface_of("192.0.2.1")
