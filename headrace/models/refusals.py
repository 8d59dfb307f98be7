"""Says why an architecture is not served, and which served family is nearest to it."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any

from headrace.errors import UnsupportedModelError, UserError
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
    **dict.fromkeys(
        ("BloomForCausalLM", "MptForCausalLM", "BaichuanForCausalLM"),
        ": its scores fall with the distance of keys (ALiBi), which no kernel here computes",
    ),
    "XGLMForCausalLM": ": it adds sines of each position, for which there is no module here",
    "CodeGenForCausalLM": ": its queries, values and keys are in turn in one linear, in four parts, for which there is "
    "no reader here",
    **dict.fromkeys(
        ("Step3TextForCausalLM", "Step3VLForConditionalGeneration"),
        ": its queries are projected, normed and projected again (multi-matrix factorization), for which there is no "
        "module here",
    ),
    **dict.fromkeys(
        ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Lfm2VlForConditionalGeneration", "Lfm3ForCausalLM"),
        ": most of its layers are short convolutions, which have no cache here",
    ),
    **dict.fromkeys(
        ("KimiLinearForCausalLM", "BailingHybridForCausalLM"),
        ": its states decay by a factor for each number of a key, which no kernel here computes",
    ),
    "RecurrentGemmaForCausalLM": ": its layers are gated linear recurrences, for which there are no kernels here",
    **dict.fromkeys(
        ("RwkvForCausalLM", "xLSTMForCausalLM"), ": its layers are recurrent, and no kernel here computes them"
    ),
    "MiniMaxForCausalLM": ": its linear attention decays by a factor of each head, for which there are no kernels here",
    "JetMoeForCausalLM": ": it chooses among heads of attention as among experts, for which there is no module here",
    "DiffLlamaForCausalLM": ": it takes one softmax from another (differential attention), which no kernel here does",
    "MllamaForConditionalGeneration": ": its text part attends to pictures in layers of their own",
    "DbrxForCausalLM": ": the rows of all experts lie behind each other in one tensor, which nothing here takes apart",
    **dict.fromkeys(
        ("AyaVisionForConditionalGeneration", "Cohere2VisionForConditionalGeneration"),
        ": transformers leaves out the factor of its text part's logits, others do not, and so what is sampled is not "
        "agreed upon",
    ),
    "MiMoV2FlashForCausalLM": ": its values are smaller than its keys, which no cache here holds",
    "LongcatFlashForCausalLM": ": some of its experts return their input, which no kernel here does",
    "BitNetForCausalLM": ": it norms attention's heads and the feed-forward's inner numbers, for which there are no "
    "modules here",
    "DeepseekV4ForCausalLM": ": its keys are compressed over several tokens, and it keeps several residuals",
    "LagunaForCausalLM": ": attention's output has one gate a head, a softplus, which no kernel here computes",
    **dict.fromkeys(
        ("Gemma3nForConditionalGeneration", "Gemma3nForCausalLM"),
        ": its layers add embeddings of their own, keep several residuals, and share keys and values",
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
    unread or refuses the fewest fields of a config.json, and those fields; empty if none can describe it."""
    fields = text_part(Fields(raw, "config.json"))
    own = "".join(map(str, raw.get("architectures") or ()))
    found: list[tuple[int, float, str, list[str], list[str]]] = []
    for name, entry in served.items():
        strange = _strange(fields, entry)
        if strange is not None:
            unread, refused = strange
            alike = SequenceMatcher(None, own, name).ratio()
            found.append((len(unread) + len(refused), -alike, name, unread, refused))
    if not found:
        return ""
    _, _, name, unread, refused = min(found)
    said = [f"knows nothing of {_names(unread)}"] if unread else []
    said += [f"refuses the value of {_names(refused)}"] if refused else []
    return f"; nearest is {name}, " + (f"which {' and '.join(said)}" if said else "whose fields it has")


def _names(fields: list[str]) -> str:
    more = f" and {len(fields) - MOST_NAMED} more" if len(fields) > MOST_NAMED else ""
    return ", ".join(f"`{one}`" for one in fields[:MOST_NAMED]) + more


def _strange(fields: Fields, entry: Any) -> tuple[list[str], list[str]] | None:
    """Return two things: the fields that the family does not read, and those whose values it refuses, without which it
    can describe the model; None if it cannot."""
    noted, refused = _Noted({**entry.defaults, **fields.values}), list[str]()
    while True:
        try:
            entry.describe(Fields(noted, fields.where))
            break
        except UserError as error:
            name = error.field.partition(".")[0] if isinstance(error, UnsupportedModelError) else ""
            if name not in fields.values or name in refused:
                return None
            refused.append(name)
            noted.pop(name)
    known = noted.asked | NO_MATTER | {*refused}
    set_to = {name for name, value in fields.values.items() if value is not None and not name.endswith(ENDINGS)}
    return sorted(set_to - known), sorted(refused)
