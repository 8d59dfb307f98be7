"""Says why an architecture is not served, and which served family is nearest to it."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any

from headrace.errors import UserError
from headrace.model_config import Fields, text_part

MAMBA = ": it has {} layers, for whose scan there are no kernels here"
REFUSED = {
    **dict.fromkeys(
        (
            "FalconH1ForCausalLM", "NemotronHForCausalLM", "BambaForCausalLM", "Mamba2ForCausalLM",
            "Zamba2ForCausalLM",
        ),
        MAMBA.format("Mamba-2"),
    ),
    **dict.fromkeys(
        ("JambaForCausalLM", "MambaForCausalLM", "FalconMambaForCausalLM", "ZambaForCausalLM"), MAMBA.format("Mamba")
    ),
    "ApertusForCausalLM": ": its activation, xIELU, has learned numbers, which no kernel here takes",
    **dict.fromkeys(
        ("Gemma3nForConditionalGeneration", "Gemma3nForCausalLM"),
        ": its layers add embeddings of their own, keep several residuals, and share keys and values",
    ),
    **dict.fromkeys(
        ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"),
        ": its layers have heads of different sizes, and add embeddings of their own or share keys and values",
    ),
}  # fmt: skip
"""architecture -> why it is not served, as the end of a sentence"""
NO_MATTER = frozenset({
    "_name_or_path", "architectures", "auto_map", "cache_implementation", "chunk_size_feed_forward", "dtype",
    "id2label", "initializer_range", "intermediate_size", "is_decoder", "is_encoder_decoder", "label2id",
    "max_position_embeddings", "max_window_layers", "model_type", "output_attentions", "output_hidden_states",
    "output_router_logits", "pretraining_tp", "problem_type", "quantization_config", "return_dict",
    "router_aux_loss_coef", "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache",
    "vision_config", "vocab_size",
})  # fmt: skip
"""Fields that no layer's arithmetic depends on, beside those with one of these endings"""
ENDINGS = ("dropout", "_pdrop", "_token_id", "_token_index", "_tokens")
MOST_NAMED = 5


class _Noted(dict[str, Any]):
    """Notes which fields are asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return super().__contains__(name)


def nearest(raw: dict[str, Any], served: Mapping[str, Any]) -> str:
    """Return the end of a sentence that names the family of `served` (architecture -> its ModelEntry) which leaves
    the fewest fields of a config.json unread, and those fields; empty if none can describe it."""
    fields = text_part(Fields(raw, "config.json"))
    own = "".join(map(str, raw.get("architectures") or ()))
    found: list[tuple[int, float, str, list[str]]] = []
    for name, entry in served.items():
        unread = _unread(fields, entry)
        if unread is not None:
            alike = SequenceMatcher(None, own, name).ratio()
            found.append((len(unread), -alike, name, unread))
    if not found:
        return ""
    _, _, name, unread = min(found)
    more = f" and {len(unread) - MOST_NAMED} more" if len(unread) > MOST_NAMED else ""
    names = ", ".join(f"`{one}`" for one in unread[:MOST_NAMED]) + more
    return f"; nearest is {name}" + (f", which knows nothing of {names}" if unread else ", whose fields it has")


def _unread(fields: Fields, entry: Any) -> list[str] | None:
    """Return the fields that the family does not read; None if it cannot describe the model."""
    noted = _Noted({**entry.defaults, **fields.values})
    try:
        entry.describe(Fields(noted, fields.where))
    except UserError:
        return None
    known = noted.asked | NO_MATTER
    set_to = {name for name, value in fields.values.items() if value is not None and not name.endswith(ENDINGS)}
    return sorted(set_to - known)
