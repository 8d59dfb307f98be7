"""headrace: LLM inference and serving. The whole public surface, loaded on first use (no torch until then)."""

from __future__ import annotations

TYPE_CHECKING = False  # the name's meaning is typing's, which takes longer to import than all else that `--help` needs

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from typing import Any

    from headrace.llm import LLM
    from headrace.sampling_params import SamplingParams


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from headrace.llm import LLM

        return LLM
    if name == "SamplingParams":
        from headrace.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
