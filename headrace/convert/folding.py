"""Finds in a model's description where the inputs of linears may be divided by numbers: where a norm or a linear in
front can do so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.feed_forwards import DenseMLP, Experts
from headrace.mixers import Attention, RecurrentState
from headrace.model_spec import LayerSpec
from headrace.parameters import Parameter


@dataclass(frozen=True)
class Fold:
    """Names what makes some numbers, and all that read them. If the outputs of the one are divided by as many factors,
    and the columns of the others multiplied by them, the model stays what it is."""

    maker: str
    """a norm or a linear, below the layer: `input_layernorm`, `self_attn.v_proj`"""
    readers: tuple[str, ...]
    """linears over those numbers, in the model's order"""
    of_norm: bool = False
    plus_one: bool = False
    """the norm's weight is stored less one"""
    heads: tuple[int, int] = (1, 1)
    """the heads that the maker's outputs are of, and how often a reader has each beside the other"""


def folds_of(layer: LayerSpec) -> Iterator[Fold]:
    """Yield all folds of a layer."""
    norms, mixer, block = layer.norms, layer.mixer, layer.feed_forward
    of_mixer = () if isinstance(mixer, RecurrentState) else _over_input(mixer.parameters)  # else families list them
    # experts with a norm of their own, and their router, are not over the layer's
    first = block.shared if isinstance(block, Experts) and block.own_norm else block
    of_block = _over_input((*first.parameters, *first.all_expert_parameters))
    readers = {norms.before_mixer: of_mixer, norms.before_block: of_block}
    if norms.parallel and not norms.before_block:
        readers = {norms.before_mixer: (*of_mixer, *of_block) if of_mixer and of_block else ()}
    for name, linears in readers.items():
        if name and linears and norms.norm.weight and not norms.of_sums:
            yield Fold(name, linears, True, norms.norm.plus_one)
    if isinstance(mixer, Attention) and mixer.clip is None and not (mixer.v_norm or mixer.values_are_keys):
        heads = mixer.num_kv_heads, mixer.num_heads // mixer.num_kv_heads
        yield Fold("self_attn.v_proj", ("self_attn.o_proj",), heads=heads)
    yield from (Fold(up, (down,)) for up, down in _gated(block))


def _over_input(parameters: tuple[Parameter, ...]) -> tuple[str, ...]:
    """Return the linears over the input that mixers and feed-forwards begin with: parts of fused ones, routers, and the
    first of a feed-forward without a gate; none where those of all experts are one tensor."""
    weights = [one for one in parameters if one.name.endswith(".weight") and len(one.shape) == 2]
    if any(len(one.shape) == 3 for one in parameters):
        return ()
    found = [one for one in weights if one.fused or one.kind == "router"] or weights[:1]
    return tuple(one.name.removesuffix(".weight") for one in found)


def _gated(block: DenseMLP | Experts) -> Iterator[tuple[str, str]]:
    """Yield (up, down) of each feed-forward in which down's inputs are up's outputs times a gate."""
    if isinstance(block, DenseMLP):
        if block.gated:
            yield f"{block.block}.up_proj", f"{block.block}.down_proj"
        return
    names = block.names
    if block.intermediate_size:
        yield from _gated(block.shared)
    for expert in range(block.num_experts if block.clamp is None and not names.stacked else 0):
        own = f"{names.block}.experts.{expert}"
        yield f"{own}.{names.up}", f"{own}.{names.down}"
