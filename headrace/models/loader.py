"""Loads a model from a folder: builds its modules, attaches the weight format, allocates, fills and finalizes weights.

Layers say which tensors they take (`slots`); the loader gives them what the checkpoint holds, or random numbers.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import ConfigError, UnsupportedModelError
from headrace.layers.attention import Attention
from headrace.layers.context import LayerContext
from headrace.layers.embedding import ParallelLMHead
from headrace.layers.layer import Layer
from headrace.layers.linear import Linear
from headrace.layers.moe import SparseMoE
from headrace.layers.stacked import InOne
from headrace.model_config import ModelConfig
from headrace.model_spec import HeadSpec
from headrace.models.checkpoint import (
    OF_CACHES,
    StoredTensor,
    checkpoint_files,
    linear_of,
    stored_tensors,
    text_tensors,
    total_bytes,
    unstacked,
)
from headrace.models.filling import NOT_NEEDED, fill_from_checkpoint, fill_with_dummies, match_checkpoint, named
from headrace.models.fusion import fuse
from headrace.models.heads import DraftHead
from headrace.models.names import text_module
from headrace.models.registry import LLAMA
from headrace.models.schemes import LinearsInFiles, Schemes, linears_in_files
from headrace.models.served import describe, resolve
from headrace.pooling import HeadLayer
from headrace.quantization.checkpoint_format import kv_cache_type
from headrace.quantization.scheme import Scheme, Slot
from headrace.quantization.table import resolve_format
from headrace.stages import WHOLE, Stage

AFFINE = "The KV cache is affine in {} layers: biases (k_bias, v_bias) and the scales beside them are not served."
Headers = Callable[[Path], list[StoredTensor]]
"""a file -> the tensors that its header names"""
OF_HEADS = r"^(model\.)?(lm_head|pooler|pooler_dense|cls|head|head_dense|head_norm|decoder|classifier|score)\b"
"""Tensors that a model which pools leaves where they are, unless it has that head itself"""
POOLED = ("headrace.models.pooled", "PooledModel")
"""Module and class of all models that pool"""


def build_model(config: ModelConfig, context: LayerContext, taps: tuple[int, ...] = ()) -> Any:
    """Build the model without memory for its weights. `taps`: layers whose inputs it is to keep (ModelSpec's). Raises
    UnsupportedModelError, or ConfigError where the ranks do not divide it."""
    entry = resolve(config)
    module, name = entry.module, entry.class_name
    if config.pooling is not None:
        if module != LLAMA[0]:
            raise UnsupportedModelError(f"{config.architecture} cannot pool: it has modules of its own, which generate")
        module, name = POOLED
    model_class = getattr(importlib.import_module(module), name)
    if not context.stage.is_only and not getattr(model_class, "in_stages", False):
        raise ConfigError(
            f"pipeline_parallel_size must be 1 for {config.architecture}, got {len(context.stage.partition)}: "
            f"{name} in {module} does not say `in_stages`"
        )
    spec = replace(entry.spec(config.fields), taps=taps)
    if context.kept_states > 1 and module != LLAMA[0] and any(layer.mixer.kind == "state" for layer in spec.layers):
        raise ConfigError(
            f"speculative_config is not served with {config.architecture}: {name} in {module} keeps one "
            "recurrent state of a request, which cannot take back what was guessed wrong"
        )
    model = model_class(config, context.stage.of(spec), context)
    if taps and getattr(getattr(model, "model", None), "taps", ()) != taps:
        raise ConfigError(f"{entry.architecture} keeps no inputs of its layers, which method eagle3 needs")
    return model


def load_model(
    folder: Path,
    config: ModelConfig,
    context: LayerContext,
    load_format: str = "auto",
    seed: int = 0,
    quantization: str | None = None,
    taps: tuple[int, ...] = (),
    prepare: Callable[[Any], None] | None = None,
) -> Any:
    """Return the model on `context.device`, ready to run, with this rank's slices of the weights in `context.dtype`.

    `model.weight_bytes` is what the weights take, and `model.notes` says which are held in another format. With
    `load_format` dummy the weights are random, and the same whole model whatever the number of ranks. `prepare` is
    given the model before it has weights. Raises CheckpointError naming the file or tensor, UnsupportedModelError,
    ConfigError.
    """
    model = build_model(config, context, taps)
    if prepare is not None:
        prepare(model)
    return _loaded(model, None, folder, config, context, load_format, seed, quantization)


def load_head(
    folder: Path,
    config: ModelConfig,
    head: HeadSpec,
    model: Any,
    vocab_size: int,
    context: LayerContext,
    load_format: str = "auto",
    seed: int = 0,
    quantization: str | None = None,
) -> Any:
    """Return a head of the loaded `model`, which knows `vocab_size` tokens, from the `folder` and `config` of its
    checkpoint, as `load_model` returns a model."""
    biased = False
    if load_format != "dummy":
        headers, _ = _text_headers(config, head=head)
        bias = f"{head.path('fc')}.bias"
        biased = any(stored.name == bias for file in checkpoint_files(folder) for stored in headers(file))
    made = DraftHead(head, model, vocab_size, context, biased)
    return _loaded(made, head, folder, config, context, load_format, seed, quantization)


def _loaded(
    model: Any,
    head: HeadSpec | None,
    folder: Path,
    config: ModelConfig,
    context: LayerContext,
    load_format: str,
    seed: int,
    quantization: str | None,
) -> Any:
    """Return `model`, which may be a head, with its weights."""
    path_of = (lambda path: path) if head is None else head.path
    with torch.no_grad():
        layers = [(path_of(path), module) for path, module in model.named_modules() if isinstance(module, Layer)]
        for _, layer in layers:
            if isinstance(layer, Linear):
                layer.spec = replace(layer.spec, batch_invariant=context.batch_invariant)
        headers, others = _text_headers(config, context.stage, head)
        if load_format != "dummy":
            _read_as_stored(folder, layers, headers)
        tensors_of = _headers(layers, headers)
        in_files = linears_in_files(folder, tensors_of) if config.quantization and load_format != "dummy" else None
        names = (describe(config) if head is None else head).names
        model.notes = attach_schemes(config, layers, context, quantization, in_files, names)
        slots = slots_of(layers, torch.device("meta"))  # so that errors come before large memory is taken
        if load_format == "dummy":
            slots = slots_of(layers, context.device)
            fill_with_dummies(slots, seed)
        else:
            not_needed = tensors_not_needed(config)
            match_checkpoint(_in_folder(slots, config), folder, not_needed, tensors_of)
            slots = slots_of(layers, context.device)
            fill_from_checkpoint(_in_folder(slots, config), folder, not_needed, tensors_of)
            _fill_dense_layers(slots, folder, config)
            model.notes += _leave_scales_of_other_caches(config, layers)
            model.notes += [f"Skipped: {count} tensors {of}." for of, count in others.items()]
        del slots, tensors_of  # which hold all weights as they were loaded, while layers put other forms in their place
        embeds, reads_hidden = context.stage.is_first, head is not None
        model.notes.append(fuse(model, len(context.specs), context.device, embeds, reads_hidden))
        model.weight_bytes = sum(map(weight_bytes, (layer for _, layer in layers)))
        for path, layer in layers:
            if context.seat is not None:
                context.seat(path, layer)
            with named(path):
                layer.finalize()
        if context.device.type != "cpu":  # there the forms are the kernels' own: tiles, or what is widened
            model.weight_bytes = sum(map(weight_bytes, (layer for _, layer in layers)))
        products = {layer.scheme.product: None for _, layer in layers if isinstance(layer, Linear | SparseMoE)}
        model.notes += [note for one in products for note in one.notes()]
        joined = sum(isinstance(layer, SparseMoE) and layer.experts.joined is not None for _, layer in layers)
        if joined:
            model.notes.append(f"Shared experts of {joined} layers are further experts to kernels of few tokens.")
    return model


def tensors_not_needed(config: ModelConfig) -> re.Pattern[str]:
    """Return what the names match of tensors that a checkpoint may hold and this model does not have."""
    others = [NOT_NEEDED.pattern]
    if config.tie_word_embeddings:
        others.append(r"^lm_head\.weight$")
    if config.pooling is not None:
        others.append(OF_HEADS)
    return re.compile("|".join(f"({one})" for one in others))


def _in_folder(slots: dict[str, Slot], config: ModelConfig) -> dict[str, Slot]:
    """Return the slots of tensors that are in the model's own files."""
    elsewhere = tuple(f"{layer.name}." for layer in _dense_layers(config))
    return {name: slot for name, slot in slots.items() if not elsewhere or not name.startswith(elsewhere)}


def _dense_layers(config: ModelConfig) -> list[HeadLayer]:
    """Return the layers behind pooling whose tensors have a folder of their own."""
    return [] if config.pooling is None else [layer for layer in config.pooling.head if layer.folder]


def _fill_dense_layers(slots: dict[str, Slot], folder: Path, config: ModelConfig) -> None:
    """Fill layers of sentence-transformers, whose folders call each one's tensors `linear.*`."""
    for layer in _dense_layers(config):

        def read(file: Path, name: str = layer.name) -> list[StoredTensor]:
            return [
                replace(one, name=f"{name}.{one.name.removeprefix('linear.')}", within=one.name)
                for one in stored_tensors(file)
            ]

        own = {name: slot for name, slot in slots.items() if name.startswith(f"{layer.name}.")}
        fill_from_checkpoint(own, folder / layer.folder, tensors_of=read)


def _text_headers(
    config: ModelConfig, stage: Stage = WHOLE, head: HeadSpec | None = None
) -> tuple[Headers, Counter[str]]:
    """Return what gives the tensors of a file's header that are of text and of `stage`, or of a `head`, and a count of
    those that are not, which it fills."""
    others, spec = Counter[str](), describe(config) if head is None else head
    transposed = () if isinstance(spec, HeadSpec) else spec.transposed

    @functools.cache
    def read(file: Path) -> list[StoredTensor]:
        kept, found = text_tensors(stored_tensors(file), config, spec.names, transposed, head)
        others.update(found)
        if head is not None:
            return kept
        return [one for one in kept if stage.holds(one.name, config.tie_word_embeddings)]

    return read, others


def _headers(layers: list[tuple[str, Layer]], headers: Headers) -> Headers:
    """Return what gives the tensors of a file's header one by one, where layers' experts, or linears over one input,
    are tensors together."""
    names: dict[str, InOne] = {}
    for path, layer in layers:
        if isinstance(layer, SparseMoE | Linear):
            names |= layer.names_in_files(path)
    return functools.cache(lambda file: list(unstacked(headers(file), names)))


def _read_as_stored(folder: Path, layers: list[tuple[str, Layer]], headers: Headers) -> None:
    """Tell layers of experts, and linears of several parts, in which of their forms a checkpoint holds them."""
    files = checkpoint_files(folder)
    total_bytes(files)  # which names a file that is missing
    linears: dict[str, tuple[int, ...]] = {}
    for stored in (stored for file in files for stored in headers(file)):
        linear, tensor = linear_of(stored.name)
        if tensor not in OF_CACHES:
            for name in (linear, f"model.{linear}"):
                linears[name] = stored.shape if tensor == "weight" else linears.get(name, ())
    for path, layer in layers:
        if isinstance(layer, SparseMoE | Linear):
            layer.read_as(path, linears)


def slots_of(layers: list[tuple[str, Layer]], device: torch.device) -> dict[str, Slot]:
    """Allocate the layers' weights on `device`, and return where the checkpoint's tensors go."""
    slots: dict[str, Slot] = {}
    for path, layer in layers:
        with named(path):
            layer.create_weights(device)
            slots.update(layer.slots(path))
    return slots


def _leave_scales_of_other_caches(config: ModelConfig, layers: list[tuple[str, Layer]]) -> list[str]:
    """Forget scales that the checkpoint brings for a KV cache of another kind: with those of NVFP4 or int8, or of K and
    V less a bias, numbers would be beyond fp8's range or small in it. Return a line for the log if there are biases."""
    other = kv_cache_type(config.quantization or {}) not in ("", "fp8")
    biased = 0
    for _, layer in layers:
        if isinstance(layer, Attention) and layer.kv_scale is not None and (other or layer.kv_bias):
            layer.kv_scale.fill_(math.nan)
            biased += layer.kv_bias
    return [AFFINE.format(biased)] if biased else []


def attach_schemes(
    config: ModelConfig,
    layers: list[tuple[str, Layer]],
    context: LayerContext,
    quantization: str | None,
    in_files: LinearsInFiles | None = None,
    names: Sequence[tuple[str, str]] = (),
) -> list[str]:
    """Give every linear and every layer of experts the scheme of its format; those that the scheme refuses stay
    unquantized. What the files hold counts more than what config.json says. Return lines for the log, one for each
    format, which also name what is unquantized. `names`: ModelSpec's."""
    held = resolve_format(config, quantization)
    held = held.called(lambda name: text_module(name, config.more_than_text, names))
    schemes = Schemes(held, in_files)
    served: dict[Scheme, list[Linear | SparseMoE]] = {}
    kept: Counter[str] = Counter()
    for path, layer in layers:
        if not isinstance(layer, Linear | SparseMoE):
            continue
        if isinstance(layer, ParallelLMHead) and in_files is not None and path in in_files.quantized:
            layer.untie()
        scheme, why = schemes.of(path, layer)
        layer.attach(scheme)
        served.setdefault(scheme, []).append(layer)
        name = re.sub(r"\.\d+\.", ".*.", path)
        if scheme is schemes.unquantized:
            kept[f"{name} ({why})" if why else name] += 1
        elif isinstance(layer, SparseMoE):
            kept[f"{name} (router)"] += 1
        if isinstance(layer, SparseMoE):
            layer.router_scheme = schemes.of_router(layer.router_names(path))
    for scheme, ones in served.items():
        linears = [layer.spec for layer in ones if isinstance(layer, Linear) and layer.applied]
        scheme.product.prepare(linears, context.device, context.kernels)
    plain = ", ".join(f"{name} x {count}" if count > 1 else name for name, count in kept.items())
    lines = []
    for scheme, ones in served.items():
        if scheme is not schemes.unquantized:
            sparse = sum(isinstance(layer, SparseMoE) for layer in ones)
            experts = f" and the experts of {sparse} layers" if sparse else ""
            lines.append(f"Quantization {scheme.format.name}: {len(ones) - sparse} linears{experts}.")
    return lines and [*lines[:-1], f"{lines[-1]} Unquantized: {plain}."]


def weight_bytes(layer: Layer) -> int:
    """Return the bytes of the layer's own weights on this rank, scales included, before `finalize` or, on a GPU, after
    it."""
    tensors: list[Tensor] = [*layer.parameters(recurse=False)]
    if isinstance(layer, Linear):
        tensors += layer.weights.values()
    elif isinstance(layer, SparseMoE):
        tensors += layer.tensors()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def multiplied_weights(model: nn.Module, as_launched: bool = True) -> float:
    """Return how many weights a token is multiplied with in all layers, on each rank. The head is left out, and so are
    experts that a token does not go to. `as_launched`: each counts as its format says (`WeightFormat.launched_as`), so
    that the sum tells how long a GPU computes beside the time that launches take.

    Ranks that hold unequal shares of an expert return the same number, since they must capture the same graphs.
    """
    total = 0.0
    for layer in model.modules():
        if isinstance(layer, SparseMoE):
            experts = layer.spec
            width = experts.expert_intermediate_size / layer.ranks
            weights = 3 * experts.experts_per_token * width * experts.hidden_size
            total += weights * (layer.scheme.format.launched_as if as_launched else 1)
        elif isinstance(layer, Linear) and not isinstance(layer, ParallelLMHead):
            weights = layer.spec.in_features * layer.spec.out_features
            total += weights * (layer.scheme.format.launched_as if as_launched else 1)
    return total
