"""Serves large language models. These names are the public interface; each is loaded, and torch with it, on first
use."""

from __future__ import annotations

TYPE_CHECKING = False  # as typing.TYPE_CHECKING; importing typing would take longer than all else that `--help` needs

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "LoRARequest",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

if TYPE_CHECKING:
    from typing import Any

    from headrace.engine.beam_search import BeamSearchParams
    from headrace.llm import LLM, TextPrompt, TokensPrompt
    from headrace.lora import LoRARequest
    from headrace.pooling import PoolingParams, PoolingRequestOutput
    from headrace.request import CompletionOutput, RequestOutput
    from headrace.sampling_params import SamplingParams
    from headrace.structured_params import StructuredOutputsParams

_HOMES = {
    "BeamSearchParams": "engine.beam_search",
    "LoRARequest": "lora",
    "PoolingParams": "pooling",
    "PoolingRequestOutput": "pooling",
    "SamplingParams": "sampling_params",
    "StructuredOutputsParams": "structured_params",
    "RequestOutput": "request",
    "CompletionOutput": "request",
}
"""Name -> its module, of names that are not in llm.py."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"headrace.{_HOMES.get(name, 'llm')}"), name)
