"""Implements `headrace serve`, which turns flags into EngineConfig and ServerConfig and runs the server."""

from __future__ import annotations

from headrace.cli.arguments import FlagParser, build_config
from headrace.config import EngineConfig, ServerConfig
from headrace.errors import ConfigError

EXAMPLES = """\
  headrace serve demo
  headrace serve meta-llama/Llama-3.1-8B-Instruct --port 8000 --api-key SECRET
  headrace serve ./model -tp 2 --max-model-len 32K --served-model-name llama"""


def build_parser() -> FlagParser:
    """Return the parser of the engine's flags and the server's."""
    summary = (
        "Serve a model over the OpenAI HTTP API. What no flag sets follows from hardware and model; the start says why."
    )
    parser = FlagParser("serve", summary, EXAMPLES)
    parser.add_knobs(EngineConfig)
    parser.add_knobs(ServerConfig)
    return parser


def main(argv: list[str]) -> int:
    """Run the command until the server ends, or the first node's does, and return the exit code."""
    values = build_parser().parse(argv)
    config, server_config = build_config(EngineConfig, values), build_config(ServerConfig, values)
    elsewhere = config.node_rank > 0 or config.is_further_machine
    if server_config.headless and not elsewhere:
        raise ConfigError(
            "headless is for the machines with node_rank 1 and above, and for those with data_parallel_start_rank and "
            "data_parallel_address; the first one serves"
        )
    if elsewhere and not (config.node_rank or server_config.headless):
        raise ConfigError(
            "data_parallel_start_rank needs headless, which the machines with data_parallel_address beside the first "
            "are, or data_parallel_hybrid_lb, with which each serves"
        )
    if config.remote_engines and (server_config.api_server_count or 1) > 1:
        raise ConfigError(
            f"api_server_count must be 1 where engines are on other machines (data_parallel_address), got "
            f"{server_config.api_server_count}"
        )
    if elsewhere:
        from headrace.engine.node import run_node

        return run_node(config)

    from headrace.engine.ray_nodes import start_machines
    from headrace.server.run import run_server

    machines = start_machines(config)
    try:
        return run_server(config, server_config)
    finally:
        if machines is not None:
            machines.stop(timeout=0.0)
