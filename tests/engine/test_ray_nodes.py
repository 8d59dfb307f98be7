"""Ray starts the other machine's process, and takes it away with the server: a cluster of two nodes, both here."""

from __future__ import annotations

import sys
from typing import Any

import psutil
import pytest

from headrace.config import EngineConfig
from headrace.engine.ray_nodes import other_machines, start_machines
from headrace.errors import ConfigError
from headrace.process import free_port
from tests.e2e.test_nodes import GOLDEN
from tests.serving import Serve, gone
from tests.speed import PATIENCE

SECRET = "the secret of these two machines"


def test_each_other_machine_gets_the_config_that_its_own_flags_would_give() -> None:
    ray = {"distributed_executor_backend": "ray"}
    spread = EngineConfig(tensor_parallel_size=3, nnodes=3, master_addr="10.0.0.1", **ray)
    assert [(each.node_rank, each.distributed_executor_backend) for each in other_machines(spread)] == [
        (1, "mp"), (2, "mp"),
    ]  # fmt: skip
    engines = EngineConfig(data_parallel_size=5, data_parallel_size_local=2, data_parallel_address="10.0.0.1", **ray)
    assert [each.engine_ranks for each in other_machines(engines)] == [range(2, 4), range(4, 5)]
    assert start_machines(EngineConfig(**ray)) is None


def test_a_machine_without_ray_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    config = EngineConfig(tensor_parallel_size=2, nnodes=2, master_addr="10.0.0.1", distributed_executor_backend="ray")
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[ray\]'"):
        start_machines(config)


def test_ray_starts_the_other_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for patience in ("RAY_raylet_start_wait_time_s", "RAY_worker_register_timeout_seconds"):
        monkeypatch.setenv(patience, str(PATIENCE))
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("HEADRACE_SECRET", SECRET)  # where Ray is started, since it does not travel through it
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    port = free_port()
    node: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(**node)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        flags = ["-tp", "2", "--dtype", "float32", "--device", "cpu", "--nnodes", "2", "--master-addr", "127.0.0.1"]
        with Serve("demo", *flags, "--master-port", str(port), "--distributed-executor-backend", "ray") as server:
            assert server.complete(max_tokens=16).startswith(GOLDEN)
            assert len(server.ranks()) == 1
            ours = psutil.Process().children(recursive=True)  # Ray's among them
            ranks = [each for each in ours if "headrace.executor.rank" in each.cmdline()]
            assert len(ranks) == 2
            assert server.stop() == 0
            gone(ranks)
    finally:
        cluster.shutdown()
