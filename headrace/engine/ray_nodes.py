"""Lets Ray start the other machines' processes: the main program of a child of `headrace serve` on the first machine.

It asks Ray for one task on each, which is what `headrace serve --headless` is, and for nothing else: the machines then
join as if each had been started by hand, by the secret in HEADRACE_SECRET of each. That must be there when `ray start`
runs on a machine, since it does not travel through Ray. The tasks end with this process, which ends with the server.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import msgspec

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.process import Child, configure_logging, read_config, spawn

logger = logging.getLogger(__name__)

PLACE_SECONDS = 120.0
"""How long Ray may take to find the machines."""


def other_machines(config: EngineConfig) -> list[EngineConfig]:
    """Return the config of each machine beside the first, as its own flags would give it."""
    plain = config.replace(distributed_executor_backend="mp")
    if config.nnodes > 1:
        return [plain.replace(node_rank=node) for node in range(1, config.nnodes)]
    each, rest = len(config.engine_ranks), config.remote_engines
    return [
        plain.replace(data_parallel_start_rank=start, data_parallel_size_local=min(each, rest.stop - start))
        for start in range(rest.start, rest.stop, each)
    ]


def start_machines(config: EngineConfig) -> Child | None:
    """Let Ray start the other machines, without waiting for it; None: it is not asked to, or there are none. Raises
    ConfigError where Ray is not installed."""
    machines = other_machines(config) if config.distributed_executor_backend == "ray" else []
    if not machines:
        return None
    _ray()
    return spawn("headrace.engine.ray_nodes", msgspec.msgpack.encode(machines))


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "distributed_executor_backend ray needs Ray: pip install 'headrace[ray]', or leave it out and start "
            "`headrace serve --headless` on the other machines yourself"
        ) from None
    return ray


def run_machine(settings: bytes) -> int:
    """Run what one of the other machines does, in a task of Ray's; return its exit code."""
    from headrace.engine.node import run_node

    return run_node(msgspec.msgpack.decode(settings, type=EngineConfig))


def main(argv: list[str]) -> int:
    """Keep a task on each of the other machines until one ends."""
    machines = msgspec.msgpack.decode(read_config(argv), type=list[EngineConfig])
    configure_logging(machines[0].log_level, "[ray] ")
    ray = _ray()
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from headrace.engine import ray_nodes  # whose functions others find by name, which those of a main program are not

    ray.init(address="auto", log_to_driver=True)
    here = f"node:{ray.util.get_node_ip_address()}"
    needs = [_resources(config) for config in machines]
    # The first machine's own share keeps others off its GPUs.
    group = placement_group([{**needs[0], here: 0.001}, *needs], strategy="STRICT_SPREAD")
    if not group.wait(PLACE_SECONDS):
        logger.error("Ray finds no %d machines with %s each in %.0f s", len(needs) + 1, needs[0], PLACE_SECONDS)
        return 1
    tasks = []
    for index, (config, need) in enumerate(zip(machines, needs, strict=True), start=1):
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        task = ray.remote(num_cpus=need["CPU"], num_gpus=need.get("GPU", 0), max_retries=0, scheduling_strategy=place)
        tasks.append(task(ray_nodes.run_machine).remote(msgspec.msgpack.encode(config)))
    while tasks:
        done, tasks = ray.wait(tasks)
        try:
            ray.get(done)
        except Exception as error:  # whatever a machine has raised, which the server notices for itself
            logger.error("%s", error)
    return 0


def _resources(config: EngineConfig) -> dict[str, float]:
    """Return what a machine needs of Ray: a GPU for each rank, unless a CPU is asked for."""
    engines = len(config.engine_ranks) if config.nnodes == 1 else 1
    gpus = 0 if config.device == "cpu" else config.ranks_per_node * engines
    return {"CPU": 1.0} | ({"GPU": float(gpus)} if gpus else {})


if __name__ == "__main__":
    sys.exit(main(sys.argv))
