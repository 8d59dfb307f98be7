"""Puts the weights of shared experts behind those of routed ones, where kernels may take them for further experts.

Shared experts are a dense feed-forward of two linears. Few tokens spare its launches if the experts' kernels compute
it too (kernels/moe.py: `Joined`); more tokens, and adapters, go through the linears, which have the same memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.feed_forwards import Experts
from headrace.kernels.moe import Joined
from headrace.layers.linear import Linear
from headrace.layers.mlp import GatedMLP
from headrace.quantization.scheme import HeldExperts, LinearSpec, Scheme, Weights

MULTIPLE = 16
"""Sizes are multiples of this, so that the linears' weights begin where kernels and libraries like it."""
OWN_FORMS = ("cpu",)
"""types of devices on which linears put forms of their own in the place of their weights"""


def laid_behind(
    shared: GatedMLP, spec: Experts, linears: tuple[LinearSpec, LinearSpec], scheme: Scheme, number: int,
    device: torch.device,
) -> list[Weights] | None:  # fmt: skip
    """Allocate the weights of a layer's `number` experts on this rank, whose `linears` are of gate and up, and of down,
    and right behind them those of its shared experts; return the former. None: these must stay apart."""
    up, down = linears
    own = shared.gate_up_proj, shared.down_proj
    # A rank without some of the experts would compute the shared ones besides its own.
    apart = number < spec.num_experts or device.type in OWN_FORMS
    apart |= spec.bias or spec.clamp is not None or (spec.scales_input and spec.gates_shared)
    # What is tiled is no linear's memory, and what is in another format no expert's.
    apart |= bool(scheme.format.tiled) or any(linear.scheme is not scheme for linear in own)
    apart |= any(size % MULTIPLE for size in (up.in_features, down.in_features))
    apart |= shared.width % down.in_features > 0
    # Whether they join depends on a step's tokens, and so do their bits.
    apart |= own[0].spec.batch_invariant
    for linear in own:
        linear.behind_experts = not apart
    return None if apart else [_lay_behind(*both, number, device) for both in zip(own, linears, strict=True)]


def _lay_behind(linear: Linear, spec: LinearSpec, number: int, device: torch.device) -> Weights:
    """Allocate the weights of experts, which `spec` describes, and behind them those of `linear`, which is given its
    own; return the experts'."""
    layout, held = linear.scheme.layout, Weights()
    own = layout.create_weights(linear.spec, torch.device("meta"))
    count = own["weight"].numel() // (spec.out_features * spec.in_features)
    for name, made in layout.create_weights(spec, device, (number + count,)).items():
        last = number + own[name].numel() // made[0].numel()  # scales of outputs may be no more than one expert's
        both = made if last == len(made) else made[:last].clone()
        held[name], linear.weights[name] = both[:number], both[number:].view(own[name].shape)
    return held


def joined(shared: GatedMLP, w13: HeldExperts, w2: HeldExperts) -> Joined | None:
    """Return the shared experts as kernels take them, given the routed ones; None if they do not lie behind these, or
    if scales of activations are given, which are not the same."""
    found: list[Tensor | None] = []
    for held, linear in ((w13, shared.gate_up_proj), (w2, shared.down_proj)):
        given = held.rounding is not None and (held.rounding.given is not None or held.rounding.bound is not None)
        if given or not linear.behind_experts:
            return None
        for tensor, own in ((held.weight, linear.weights["weight"]), (held.scales, linear.weights.get("weight_scale"))):
            if tensor is not None and (own is None or own.data_ptr() != tensor.data_ptr() + tensor.nbytes):
                return None
            found.append(own)
    up, up_scales, down, down_scales = found
    assert up is not None
    assert down is not None
    return Joined(shared.width // w2.weight.shape[-1], up, down, up_scales, down_scales)
