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
    if server_config.headless and not config.node_rank:
        raise ConfigError("headless is for the machines with node_rank 1 and above; the one with 0 serves")
    if config.node_rank:
        from headrace.engine.node import run_node

        return run_node(config)

    from headrace.server.run import run_server

    return run_server(config, server_config)
