"""Describes feed-forwards: dense ones, and mixtures of experts. It imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from headrace.layer_parts import Norm
from headrace.parameters import Parameter, Split, linear, norm

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]
"""what is done to the gate of a feed-forward; gelu_tanh: GELU (arXiv 1606.08415) as approximated with a tanh; relu2:
the square of what is above zero; xielu: without a gate alone, with two learned numbers"""

XIELU = ("alpha_p", "alpha_n", "beta", "eps")
"""its numbers in a checkpoint, of which the last two may be left out"""


@dataclass(frozen=True)
class DenseMLP:
    """Describes a dense feed-forward, down(activation(gate(x)) * up(x)), or without a gate down(activation(up(x)))."""

    hidden_size: int
    intermediate_size: int
    bias: bool = False
    activation: Activation = "silu"
    gated: bool = True
    names: tuple[str, str] = ("up_proj", "down_proj")
    """of the linears of one without a gate"""
    block: str = "mlp"
    """its name in a checkpoint"""

    num_experts = experts_per_token = expert_intermediate_size = 0
    expert_parameters: tuple[Parameter, ...] = ()
    all_expert_parameters: tuple[Parameter, ...] = ()

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The layer's tensors."""
        hidden, width, (up, down) = self.hidden_size, self.intermediate_size, self.names
        if self.gated:
            return gated(self.block, hidden, width, self.bias)
        biases: tuple[Split | None, Split | None] = ("width", "whole") if self.bias else (None, None)
        tensors = linear(f"{self.block}.{up}", width, hidden, "width", biases[0])
        tensors += linear(f"{self.block}.{down}", hidden, width, "width", biases[1], axis=1)
        if self.activation == "xielu":
            learned = (f"{self.block}.act_fn.{name}" for name in XIELU)
            tensors += [Parameter(name, (1,), "plain", "whole", wide=True) for name in learned]
        return tuple(tensors)


@dataclass(frozen=True)
class ExpertNames:
    """Holds the names of a checkpoint's tensors of experts: `<block>.experts.3.<gate>.weight`."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    shared: str = "shared_expert"
    selection: str = "gate.e_score_correction_bias"
    """the biases with which experts are chosen"""
    stacked: str = ""
    """name of one tensor for all experts' gates and ups, [experts, in, out] with gate and up in turn, beside a tensor
    `down`: `<block>.experts.<stacked>`; empty: each expert has tensors of its own"""


@dataclass(frozen=True)
class Experts:
    """Describes a mixture of experts: a router picks each token's experts, whose weighted outputs are added to those of
    shared experts."""

    hidden_size: int
    num_experts: int
    experts_per_token: int
    expert_intermediate_size: int
    """of one expert, over all ranks"""
    renormalize: bool = True
    """the weights of a token's experts are scaled to sum to one"""
    sigmoid: bool = False
    """the router's logits become weights by a sigmoid, not by a softmax"""
    selection_bias: bool = False
    """each expert has a bias that is added to its weight when experts are chosen, and only then"""
    scaling: float = 1.0
    """factor of the weights of a token's experts, applied last"""
    near: float = 0.0
    """each weight is by a softmax over experts that are so near alone (kernels/moe_route.py: Scoring); 0: over all"""
    groups: int = 1
    """experts are in so many groups of equal size"""
    used_groups: int = 1
    """a token's experts come from so many groups: those with the best expert, or with a sigmoid with the best two"""
    intermediate_size: int = 0
    """of all shared experts together, which every token uses; 0: there are none"""
    shared_gate: bool = False
    """the output of the shared experts is multiplied with a sigmoid gate"""
    bias: bool = False
    """router and experts have biases"""
    scales_input: bool = False
    """a token's weight of an expert is a factor of what the expert is given, not of its output"""
    halves_shared: bool = False
    """the shared experts' output is halved: by a gate of zeros, which a checkpoint need not hold"""
    clamp: tuple[float, float] | None = None
    """(alpha, limit): the activation is gate * sigmoid(alpha * gate) * (up + 1), gate being at most `limit` and up
    within +-limit; None: activation(gate) * up"""
    activation: Activation = "silu"
    """that of the shared experts too"""
    own_norm: Norm | None = None
    """It norms its input itself, for its router with other weights, and each expert has a factor of its weight. The
    shared experts stand beside it: they read another norm of the same, and both outputs are normed (Norms.of_each)."""
    names: ExpertNames = ExpertNames()

    @property
    def block(self) -> str:
        """Its name in a checkpoint."""
        return self.names.block

    @property
    def gates_shared(self) -> bool:
        """Tell whether the router has a row for a gate of the shared experts."""
        return self.shared_gate or self.halves_shared

    @property
    def shared(self) -> DenseMLP:
        """Describe the shared experts together."""
        block = self.names.shared if self.own_norm else f"{self.names.block}.{self.names.shared}"
        return DenseMLP(self.hidden_size, self.intermediate_size, activation=self.activation, block=block)

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The tensors that every token uses: router and shared experts."""
        hidden, names, block = self.hidden_size, self.names, self.names.block
        tensors = [Parameter(f"{block}.{names.router}.weight", (self.num_experts, hidden), "router", "whole")]
        if self.bias:
            tensors.append(Parameter(f"{block}.{names.router}.bias", (self.num_experts,), "router", "whole"))
        if self.selection_bias:
            name = f"{block}.{names.selection}"
            tensors.append(Parameter(name, (self.num_experts,), "router", "whole", wide=True))
        if self.own_norm:
            sizes = {"scale": hidden, "per_expert_scale": self.num_experts}
            tensors += [
                Parameter(f"{block}.{names.router}.{name}", (size,), "router", "whole", wide=True)
                for name, size in sizes.items()
            ]
            tensors += norm(f"{block}.norm", hidden, of=self.own_norm)
        if self.gates_shared:
            tensors.append(Parameter(f"{block}.shared_expert_gate.weight", (1, hidden), "router", "whole"))
        if self.intermediate_size:
            tensors += self.shared.parameters
        return tuple(tensors)

    @cached_property
    def expert_parameters(self) -> tuple[Parameter, ...]:
        """The tensors of one expert."""
        names = self.names
        parts = (names.gate, names.up, names.down)
        return gated(f"{names.block}.experts.*", self.hidden_size, self.expert_intermediate_size, self.bias, parts)

    @cached_property
    def all_expert_parameters(self) -> tuple[Parameter, ...]:
        """The tensors of all experts, as a checkpoint names them."""
        names, number = self.names, self.num_experts
        if not names.stacked:
            return tuple(
                replace(parameter, name=parameter.name.replace("*", str(expert)))
                for expert in range(number)
                for parameter in self.expert_parameters
            )
        hidden, wide, block = self.hidden_size, self.expert_intermediate_size, f"{names.block}.experts"
        tensors = [
            Parameter(f"{block}.{names.stacked}", (number, hidden, 2 * wide), "linear", "width"),
            Parameter(f"{block}.{names.down}", (number, wide, hidden), "linear", "width"),
        ]
        if self.bias:
            tensors.append(Parameter(f"{block}.{names.stacked}_bias", (number, 2 * wide), "plain", "width"))
            tensors.append(Parameter(f"{block}.{names.down}_bias", (number, hidden), "plain", "whole"))
        return tuple(tensors)


def gated(
    block: str,
    hidden: int,
    width: int,
    bias: bool = False,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[Parameter, ...]:
    """Return the tensors of a gated feed-forward, named `names` (gate, up, down) below `block`."""
    gate, up, down = names
    split: Split | None = "width" if bias else None
    return (
        *linear(f"{block}.{gate}", width, hidden, "width", split, fused="gate_up_proj"),
        *linear(f"{block}.{up}", width, hidden, "width", split, fused="gate_up_proj"),
        *linear(f"{block}.{down}", hidden, width, "width", "whole" if bias else None, axis=1),
    )


FeedForward = DenseMLP | Experts
