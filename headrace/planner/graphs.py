"""Decides which steps run from CUDA graphs, and of what kind: what the user asked for, as far as the backend allows it.

Accepts vLLM's spellings, old ones too. Captures nothing.
"""

from __future__ import annotations

from typing import Any

from headrace.config import GRAPH_MODES, EngineConfig
from headrace.errors import ConfigError
from headrace.planner.record import Decision

GRAPH_KEYS = frozenset({"cudagraph_mode", "use_cudagraph", "full_cuda_graph"})
"""Keys of a compilation_config that name the mode."""
KNOWN_KEYS = GRAPH_KEYS | {"cudagraph_capture_sizes", "max_cudagraph_capture_size"}
DEFAULT_MODE = "FULL_AND_PIECEWISE"
MODES_BY_NUMBER = {0: "NONE", 1: "PIECEWISE", 2: "FULL", (2, 0): "FULL_DECODE_ONLY", (2, 1): "FULL_AND_PIECEWISE"}
"""The values of vLLM's enumeration, which JSON may carry instead of names."""


def decide_graphs(
    config: EngineConfig, device_type: str, backend: str, full_graphs: str
) -> tuple[dict[str, Any], list[Decision]]:
    """Resolve `compilation_config` (mode, sizes), and say why.

    `full_graphs`: what the attention backend of that name declares (attention/table.py). Raises ConfigError for a mode
    or sizes that are unknown.
    """
    given = config.compilation_config
    asked = _asked_mode(given)
    settled = {**given, **_sizes(given)}
    if device_type != "cuda":
        mode = Decision("cudagraph_mode", "NONE", f"{device_type} has no graphs", asked or "")
    elif config.enforce_eager:
        mode = Decision("cudagraph_mode", "NONE", "enforce_eager is given", asked or "", source="user")
    else:
        mode = _allowed_mode(asked, backend, full_graphs)
    settled["cudagraph_mode"] = mode.value
    why = "ignored: nothing is compiled here but kernels"
    ignored = sorted(given.keys() - KNOWN_KEYS)
    return settled, [mode, *(Decision(f"compilation_config.{key}", given[key], why, source="user") for key in ignored)]


def _asked_mode(given: dict[str, Any]) -> str | None:
    """The mode that the user named, by name, number or vLLM's earlier switches; None: none."""
    value = given.get("cudagraph_mode")
    if value is not None:
        name = str(value).upper()
        key = tuple(value) if isinstance(value, list) else value
        if isinstance(key, int | tuple) and not isinstance(key, bool):
            name = MODES_BY_NUMBER.get(key, name)
        if name not in GRAPH_MODES:
            raise ConfigError(
                f"compilation_config.cudagraph_mode must be one of {', '.join(GRAPH_MODES)}; got {value!r}"
            )
        return name
    for key in ("use_cudagraph", "full_cuda_graph"):
        if not isinstance(given.get(key, False), bool):
            raise ConfigError(f"compilation_config.{key} must be true or false, got {given[key]!r}")
    if given.get("use_cudagraph") is False:
        return "NONE"
    if given.get("full_cuda_graph"):
        return "FULL"
    return "PIECEWISE" if given.get("use_cudagraph") else None


def _sizes(given: dict[str, Any]) -> dict[str, Any]:
    """`cudagraph_capture_sizes`, ascending, where given. Raises ConfigError where it or the maximum makes no sense."""
    sizes, most = given.get("cudagraph_capture_sizes"), given.get("max_cudagraph_capture_size")
    if most is not None and (type(most) is not int or most < 1):
        raise ConfigError(f"compilation_config.max_cudagraph_capture_size must be at least 1, got {most!r}")
    if sizes is None:
        return {}
    if not isinstance(sizes, list) or not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise ConfigError(
            f"compilation_config.cudagraph_capture_sizes must be a list of positive integers, got {sizes!r}"
        )
    return {"cudagraph_capture_sizes": sorted(set(sizes))}


def _allowed_mode(asked: str | None, backend: str, full_graphs: str) -> Decision:
    """The mode asked for, or the best below it that the attention backend allows."""
    wanted = asked or DEFAULT_MODE
    decode, other = GRAPH_MODES[wanted]
    if decode == "full" and full_graphs == "none":
        decode = "piecewise"
    if decode == "piecewise" or (other == "full" and full_graphs != "any"):
        other = "piecewise"
    mode = next(name for name, pair in GRAPH_MODES.items() if pair == (decode, other))
    if mode != wanted:
        what = "no attention inside a graph" if full_graphs == "none" else "only decodes of one token inside a graph"
        return Decision("cudagraph_mode", mode, f"{backend} allows {what}", wanted)
    if asked:
        return Decision("cudagraph_mode", mode, "given", source="user")
    why = "decodes and lone prompts are replayed whole; other small steps in pieces around attention, at true lengths"
    return Decision("cudagraph_mode", mode, why, "NONE")
