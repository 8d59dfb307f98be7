"""Decides what happens to fields of a request that headrace does not act on.

Fields in HARMLESS change nothing in an answer. Those in REFUSED would give a wrong answer that looks right. Every other
field that no shape in protocol.py has is ignored, and a header of the answer says so.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import RequestError

logger = logging.getLogger(__name__)

IGNORED_HEADER = "x-headrace-ignored"
"""Header of answers that names the fields of the request that had no effect."""
HARMLESS = frozenset((
    "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",  # notes to the provider
    "prediction",  # saves time alone
    "guided_decoding_backend",  # chooses a library, of which there is one
    "parallel_tool_calls", "include_reasoning", "separate_reasoning", "stream_reasoning",  # say nothing of completions
    "mm_processor_kwargs",  # goes with what is refused
))  # fmt: skip
REFUSED = frozenset((
    "stop_regex",  # SGLang
    "suffix", "prompt_embeds", "truncate_prompt_tokens", "logits_processors", "documents",
    "lora_path", "modalities", "audio", "web_search_options", "function_call",
    "mcp_servers", "container",  # Anthropic's tools that run on its own machines
))  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logits_processors": ([],),
    "documents": ([],),
    "modalities": (["text"],),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
}
"""Values beside null and "" with which a field asks for nothing."""
WHY = {"function_call": "function_call can be 'none' or 'auto'; to force a call, give tools and a tool_choice"}
MAX_NAMED = 16
"""Most fields that the header names."""
MAX_LOGGED = 64
"""Most names that are logged, each once. There must be a bound, as clients choose them."""
_PLAIN_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


def ignored_fields(others: Mapping[str, Any]) -> list[str]:
    """Return the names of fields that should have an effect and have none. Raises RequestError for one in REFUSED.
    `others`: the fields of a request that its shape does not have."""
    found = []
    for name, value in others.items():
        if name in HARMLESS or value is None or value == "" or value in NEUTRAL.get(name, ()):
            continue
        if name in REFUSED:
            raise RequestError(WHY.get(name, f"{name} is not yet supported"), name)
        found.append(name)
    return found


def ignored_header(names: Sequence[str], logged: set[str]) -> dict[str, str]:
    """Return the header of an answer whose request had ignored fields. `logged`: names that are in the log already."""
    plain = [name for name in names[:MAX_NAMED] if _PLAIN_NAME.fullmatch(name)]
    for name in plain:
        if name not in logged and len(logged) < MAX_LOGGED:
            logged.add(name)
            logger.warning("%s of a request has no effect here; answers say so in the header %s", name, IGNORED_HEADER)
    if len(plain) < len(names):
        plain.append("...")
    return {IGNORED_HEADER: ", ".join(plain)} if plain else {}
