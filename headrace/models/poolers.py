"""Reads from a model's folder whether it pools, and how: config.json, the modules of sentence-transformers, and what
the user asks for. It imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.config import EngineConfig
from headrace.errors import ConfigError, UnsupportedModelError
from headrace.model_config import Fields, read_object
from headrace.pooling import HeadLayer, Pooling, PoolingKind, Squash

CAUSAL, CLASSIFIER, BARE = "ForCausalLM", "ForSequenceClassification", "Model"
"""How architectures end that generate, classify, and have no head"""
GENERATING = (CAUSAL, "ForConditionalGeneration", "LMHeadModel")
"""All endings of those that generate"""
SETTINGS = ("pooling_type", "seq_pooling_type", "normalize", "use_activation", "activation", "softmax")
"""What `--pooler-config` may have"""
KINDS: dict[str, PoolingKind] = {"LAST": "last", "CLS": "cls", "MEAN": "mean"}
OF_SENTENCES: dict[str, PoolingKind] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
}
"""What 1_Pooling/config.json sets to true -> the kind"""
OF_TRANSFORMER = "sentence_*_config.json"
"""The settings of a Transformer module: sentence_bert_config.json, or the name of another family in its place"""
ACTIVATIONS: dict[str, Squash] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
"""torch's names of what a cross-encoder does to its logits"""
HEAD_ACTIVATIONS: dict[str, Literal["none", "tanh", "gelu", "relu"]] = {
    "Identity": "none", "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu",
}  # fmt: skip
TASKS_OF_OLD: dict[str, tuple[str, str]] = {
    "generate": ("generate", "none"),
    **dict.fromkeys(("embed", "embedding"), ("pooling", "embed")),
    **dict.fromkeys(("classify", "score", "reward"), ("pooling", "classify")),
}
"""`--task` -> `--runner` and `--convert`"""


@dataclass(frozen=True)
class Sentences:
    """Holds what the files of sentence-transformers say; without them, what is usual."""

    found: bool = False
    kind: PoolingKind | None = None
    normalizes: bool = False
    dense: tuple[HeadLayer, ...] = ()
    """linears behind pooling"""
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str = ""
    max_length: int | None = None
    """`max_seq_length`: where texts are cut, which models were not trained beyond"""


def read_sentences(folder: Path) -> Sentences:
    """Read modules.json and the files that it names. Raises UnsupportedModelError for a module that is not served."""
    path = folder / "modules.json"
    if not path.is_file():
        return Sentences()
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        kinds = [(str(one["type"]).rpartition(".")[2], str(one.get("path") or "")) for one in modules]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnsupportedModelError(f"{path} is not sentence-transformers' list of modules: {error!r:.100}") from None
    kind, normalizes, dense, length = None, False, [], None
    for name, place in kinds:
        if name == "Pooling":
            kind = _kind_of_sentences(Fields(read_object(folder / place / "config.json"), f"{place}/config.json"))
        elif name == "Normalize":
            normalizes = True
        elif name == "Dense":
            dense.append(_dense(Fields(read_object(folder / place / "config.json"), f"{place}/config.json"), place))
        elif name == "Transformer":
            for settings in sorted((folder / place).glob(OF_TRANSFORMER)):
                length = _optional(settings).optional("max_seq_length")
        else:
            raise UnsupportedModelError(
                f"modules.json has a module {name!r}; accepted: Transformer, Pooling, Dense, Normalize"
            )
    of_prompts = _optional(folder / "config_sentence_transformers.json")
    prompts = of_prompts.object("prompts").values
    return Sentences(
        True, kind, normalizes, tuple(dense), tuple((str(name), str(text)) for name, text in prompts.items()),
        of_prompts.text("default_prompt_name", ""), length,
    )  # fmt: skip


def _optional(path: Path) -> Fields:
    return Fields(read_object(path) if path.is_file() else {}, path.name)


def longest_text(folder: Path, positions: int, learned: bool, sentences: Sentences) -> tuple[int, str]:
    """Return how many tokens a text may have, and the field that says it. `positions`: how many the model has;
    `learned`: each of them has an embedding, so that the tokenizer's file says how many were trained."""
    said_by, most = "max_seq_length", sentences.max_length
    if most is None and learned:
        said_by = "model_max_length"
        most = _optional(folder / "tokenizer_config.json").values.get(said_by)  # 1e30 where nobody knew
    if isinstance(most, int | float) and 1 <= most < positions:
        return int(most), said_by
    return positions, "max_position_embeddings"


def _kind_of_sentences(c: Fields) -> PoolingKind:
    """Return the kind of a Pooling module, of whose modes just one may be set."""
    newer = c.values.get("pooling_mode")
    modes = [name for name, value in c.values.items() if name.startswith("pooling_mode_") and value is True]
    if isinstance(newer, str):
        modes = [f"pooling_mode_{'mean_tokens' if newer == 'mean' else f'{newer}_token' if newer == 'cls' else newer}"]
    if len(modes) != 1 or modes[0] not in OF_SENTENCES:
        raise UnsupportedModelError(f"{c.where} pools by {', '.join(modes) or 'nothing'}; accepted: one of "
                                    f"{', '.join(OF_SENTENCES)}")  # fmt: skip
    if not c.flag("include_prompt", True):
        raise c.refusal("include_prompt", "true")
    return OF_SENTENCES[modes[0]]


def _dense(c: Fields, place: str) -> HeadLayer:
    name = c.text("activation_function", "torch.nn.modules.linear.Identity").rpartition(".")[2]
    if name not in HEAD_ACTIVATIONS:
        raise c.refusal("activation_function", f"one of torch's {', '.join(HEAD_ACTIVATIONS)}")
    return HeadLayer(
        f"dense_{place.partition('_')[0]}", c.integer("in_features"), c.integer("out_features"), c.flag("bias", True),
        HEAD_ACTIVATIONS[name], folder=place,
    )  # fmt: skip


def runner_of(config: EngineConfig, architecture: str, sentences: Sentences) -> tuple[str, str]:
    """Return what a model is to do: `generate` or `pooling`, and for the latter `embed` or `classify`. Raises
    ConfigError where flags contradict each other."""
    runner, convert = config.runner, config.convert
    if config.task not in (None, "auto"):
        assert config.task is not None
        of_task = TASKS_OF_OLD[config.task]
        for name, given, meant in (("runner", runner, of_task[0]), ("convert", convert, of_task[1])):
            if given not in ("auto", meant):
                raise ConfigError(f"{name} is {given!r}, but task {config.task!r} means {meant!r}; give one of them")
        runner, convert = of_task
    generates = architecture.endswith(GENERATING)
    if runner == "auto":
        runner = "pooling" if sentences.found or not generates or convert in ("embed", "classify") else "generate"
    if runner == "generate":
        if not generates:
            raise ConfigError(f"runner is 'generate', but {architecture} has no head that generates text")
        return "generate", "none"
    if convert in ("auto", "none"):
        convert = "classify" if architecture.endswith(CLASSIFIER) else "embed"
    return "pooling", convert


def read_pooling(
    config: EngineConfig, folder: Path, c: Fields, convert: str, sentences: Sentences, usual: PoolingKind,
    head: Callable[[Fields, int], tuple[HeadLayer, ...]], segments: bool,
) -> Pooling:  # fmt: skip
    """Return how a model pools. `c`: its config.json; `usual`: the kind where nothing says otherwise; `head`: what
    follows pooling in a classifier of the family, given the number of labels."""
    asked = Fields(config.pooler_config, "pooler_config")
    unknown = sorted(asked.values.keys() - {*SETTINGS})
    if unknown:
        raise ConfigError(f"pooler_config has {unknown[0]!r:.80}; accepted: {', '.join(SETTINGS)}")
    kind = sentences.kind or (KINDS.get(c.text("classifier_pooling", "").upper()) if convert == "classify" else None)
    kind = kind or usual
    for name in ("pooling_type", "seq_pooling_type"):
        if asked.values.get(name) is not None:
            given = str(asked.values[name]).upper()
            if given not in KINDS:
                raise ConfigError(f"pooler_config.{name} must be one of {', '.join(KINDS)}, got {given!r:.80}")
            kind = KINDS[given]
    on: bool | None = None
    for name in ("normalize", "activation", "softmax", "use_activation"):
        if asked.values.get(name) is not None:
            on = asked.flag(name)
    architecture = c.texts("architectures")[0]
    if convert == "classify":
        pair, labels = None, _labels(c)
        layers = head(c, len(labels))
        if architecture.endswith(CAUSAL):
            pair, labels, layers = _token_pair(folder, c), ("yes",), ()
        squash = _squash(c, len(labels))
        return Pooling("classify", kind, "none" if on is False else squash, layers, pair, labels, segments=segments)
    normalizes = sentences.normalizes if sentences.found else True
    layers = sentences.dense
    width = layers[-1].outputs if layers else c.integer("hidden_size")
    return Pooling(
        "embed", kind, "normalize" if (normalizes if on is None else on) else "none", layers, width=width,
        dimensions=_dimensions(c), segments=segments, prompts=sentences.prompts,
        default_prompt=sentences.default_prompt,
    )  # fmt: skip


def _labels(c: Fields) -> tuple[str, ...]:
    named = {str(number): str(label) for number, label in c.object("id2label").values.items()}
    count = c.integer("num_labels", len(named) or 2)
    return tuple(named.get(str(number), f"LABEL_{number}") for number in range(count))


def _squash(c: Fields, num_labels: int) -> Squash:
    """Return what a classifier does to its logits."""
    of_sentences = c.object("sentence_transformers")
    name = of_sentences.text("activation_fn", c.text("sbert_ce_default_activation_function", "")).rpartition(".")[2]
    if name:
        if name not in ACTIVATIONS:
            raise UnsupportedModelError(f"{c.where}: activation {name!r:.80} of a cross-encoder is not served; "
                                        f"accepted: {', '.join(ACTIVATIONS)}")  # fmt: skip
        return ACTIVATIONS[name]
    by_problem: dict[str, Squash] = {"regression": "none", "multi_label_classification": "sigmoid"}
    usual: Squash = "softmax" if num_labels > 1 else "sigmoid"
    return by_problem.get(c.text("problem_type", ""), usual)


def _dimensions(c: Fields) -> tuple[int, ...] | None:
    listed = c.integers("matryoshka_dimensions")
    if listed:
        return tuple(listed)
    return None if c.flag("is_matryoshka") else ()


def _token_pair(folder: Path, c: Fields) -> tuple[int, int]:
    """Return the tokens whose logits make a generating model a classifier: `classifier_from_token`, of which the second
    is the one that is likely, or `no` and `yes`."""
    import tokenizers  # only this kind of model needs it here

    names = c.texts("classifier_from_token") or ["no", "yes"]
    path = folder / "tokenizer.json"
    if len(names) != 2 or not path.is_file():
        raise c.refusal("classifier_from_token", "two tokens of the model's tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(str(path))
    ids: list[int] = []
    for name in names:
        found = backend.token_to_id(name)
        if found is None:
            raise UnsupportedModelError(f"{path} has no token {name!r:.80} (`classifier_from_token`)")
        ids.append(found)
    return ids[0], ids[1]
