"""Whole models in fp8: how far logits and perplexity move, what stays as it was and is named, dummies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from driver import Driver, make_context
from tiny_configs import ALIKE, CASES, VARIANTS, save_tiny_model
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headrace.distributed.mesh import Group, Mesh
from headrace.engine.tokenizer import Tokenizer
from headrace.hub import resolve_model_folder
from headrace.kernels.fp8 import quantize_per_token_reference
from headrace.kernels.moe_config import MoeConfig, Tile
from headrace.layers.linear import Linear
from headrace.layers.moe import SparseMoE
from headrace.model_config import ModelConfig
from headrace.models import loader
from headrace.models.loader import load_model
from headrace.models.names import renamed
from headrace.models.served import describe
from headrace.quantization.formats import PLAIN
from headrace.quantization.fp8 import RoundingProduct
from tests.sampled import RNG

SCHEMES = ("fp8", "ptpc_fp8")
each_scheme = pytest.mark.parametrize("scheme", SCHEMES)
STORIES = """
Once upon a time, there was a little dog named Max. Max loved to play with his red ball in the garden. One day, the ball
rolled under a big tree. Max looked and looked, but he could not find it. Then a bird came and said, "I can help you!"
The bird flew up high and saw the ball. Max was very happy and said thank you to the bird.

One day, Lily and her mom went to the park. Lily saw a boy who was sad because his kite was broken. She asked her mom if
they could help him. They fixed the kite with some tape, and the boy smiled. They all played together until the sun went
down, and then they went home to eat cake.

There was a small fish who lived in a blue lake. The fish wanted to see the moon. Every night it swam up to the top of
the water and looked at the sky. A frog sat on a leaf and asked what it was doing. "I am looking at the moon," said the
fish. The frog looked too, and they became good friends.
"""


def run(driver: Driver, sequences: list[list[int]]) -> Tensor:
    return torch.cat([driver.logits(ids) for ids in sequences])


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def perplexity(logits: Tensor, sequences: list[list[int]]) -> float:
    targets = torch.tensor([token for ids in sequences for token in [*ids[1:], -100]])
    return float(torch.nn.functional.cross_entropy(logits.float(), targets).exp())


@pytest.fixture(scope="module")
def stories() -> list[list[int]]:
    tokenizer = Tokenizer.from_folder(resolve_model_folder("demo"))
    return [list(tokenizer.encode(text)) for text in STORIES.strip().replace("\n\n", "|").replace("\n", " ").split("|")]


def test_the_demo_model_stays_close(stories: list[list[int]]) -> None:
    folder, errors = resolve_model_folder("demo"), {}
    exact = run(Driver(folder, max_len=256), stories)
    plain = perplexity(exact, stories)
    assert plain < 20
    for scheme in SCHEMES:
        found = run(Driver(folder, quantization=scheme, max_len=256), stories)
        errors[scheme] = error(found, exact)
        assert 0.01 < errors[scheme] < 0.07
        assert abs(perplexity(found, stories) / plain - 1) < 0.02
    assert errors["ptpc_fp8"] <= errors["fp8"]


@each_scheme
def test_what_a_gpu_holds_gives_the_same_logits(
    scheme: str, stories: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve_model_folder("demo")
    emulated = run(Driver(folder, quantization=scheme, max_len=256), stories[:1])
    prepare = RoundingProduct.prepare

    def as_on_gpu(self: RoundingProduct, specs: Any, device: torch.device, kernels: Any = None) -> None:
        prepare(self, specs, device, kernels)
        self.emulates = False

    monkeypatch.setattr(RoundingProduct, "prepare", as_on_gpu)
    held = Driver(folder, quantization=scheme, max_len=256)
    assert error(run(held, stories[:1]), emulated) < 0.03  # a rounding that falls the other way moves others
    config, linears = held.config, [layer for layer in held.model.modules() if isinstance(layer, Linear)]
    quantized = sum(one.spec.in_features * one.spec.out_features for one in linears[:-1])
    rest = config.vocab_size * config.hidden_size + (2 * config.num_layers + 1) * config.hidden_size
    scales = sum(one.spec.out_features for one in linears[:-1])
    assert held.model.weight_bytes == quantized + 4 * scales + 4 * rest  # the head is tied, everything else float32


def rounded(x: Tensor, dim: int = -1) -> Tensor:
    """What e4m3 with a scale along `dim` makes of x."""
    scales = (x.abs().amax(dim, keepdim=True) / 448).clamp_min(1e-12)
    return (x / scales).to(torch.float8_e4m3fn).float() * scales


class RoundInputs(TorchFunctionMode):
    """Rounds what is multiplied by some weights, wherever transformers' model multiplies it."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.held = {weight.untyped_storage().data_ptr() for weight in weights}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.linear, Tensor.matmul, torch.bmm) and args[1].untyped_storage().data_ptr() in self.held:
            args = rounded(args[0]), *args[1:]
        if func is torch.addmm and args[2].untyped_storage().data_ptr() in self.held:
            args = args[0], rounded(args[1]), args[2]
        return func(*args, **(kwargs or {}))


def round_weights(model: torch.nn.Module, found: Driver) -> list[Tensor]:
    """Round transformers' weights, but for embeddings, routers, and what `found` leaves as it is; returns them."""
    linears = [(path, one) for path, one in found.model.named_modules() if isinstance(one, Linear)]
    kept = {
        part.path(path).rpartition("layers.")[2]
        for path, one in linears
        for part in one.spec.parts
        if one.scheme.format == PLAIN
    }
    modules = [*model.modules()]
    turned = any(getattr(one, "is_transposed", "Llama4" in type(one).__name__) for one in modules)  # experts [in, out]
    weights = []
    spec = describe(found.config)
    for name, weight in model.named_parameters():
        ours = renamed(name, spec.names)
        _, _, own = ours.removesuffix(".weight").rpartition("layers.")
        if weight.dim() < 2 or own in kept or not TEXT.search(ours) or OTHERS.search(own):
            continue
        inputs_first = (turned and weight.dim() > 2) or name.endswith(spec.transposed)
        weight.data = rounded(weight.data, -2 if inputs_first else -1)
        weights.append(weight.data)
    return weights


PROMPTS = torch.tensor([[5, 9, 33], [2, 71, 64], [90, 1, 17], [44, 3, 8], [60, 12, 77]])
TEXT = re.compile(r"^(?!.*visi).*layers\.")
OTHERS = re.compile(r"norm|bias|conv1d|router|\.gate$|\.gate\.wg$|shared_expert_gate$")


@torch.inference_mode()
def logits_of(model: torch.nn.Module) -> Tensor:
    return model(PROMPTS).logits  # type: ignore[no-any-return]


OF_FAMILY = {
    name: RNG.choice([one for one in variants if one != "longrope"])
    for name, variants in VARIANTS.items()
    if name not in ALIKE
}
"""The variant that `make test` runs of a family that is unlike others: most of them differ in what rounds nothing."""


@pytest.mark.parametrize(
    ("architecture", "variant"),
    [
        pytest.param(*case, marks=() if OF_FAMILY.get(case[0]) == case[1] else pytest.mark.slow)
        for case in CASES
        if case[1] != "longrope"
    ],
)
def test_every_family_is_rounded_as_its_linears_are(architecture: str, variant: str, tmp_path: Path) -> None:
    """Logits are those of transformers, there too rounded: a layer that differs in what it rounds, or by which scale,
    makes another model. But for a number halfway between two of e4m3, which falls to either side and moves all behind
    it: so two prompts of five have to agree. transformers takes other angles for short prompts of a longrope."""
    model = save_tiny_model(architecture, variant, tmp_path)
    for config in (model.config, model.config.get_text_config()):
        config._experts_implementation = "eager"
    plain, wanted = Driver(tmp_path), logits_of(model)
    far = {}
    for scheme in SCHEMES:
        found = Driver(tmp_path, quantization=scheme)
        found.start(len(PROMPTS))
        logits = found.step(PROMPTS.tolist()).view(wanted.shape)
        far[scheme] = error(logits, wanted)
        check_notes(scheme, plain, found)
    assert all(0.001 < one < 1 for one in far.values())  # of sharp random weights; another layer: 1.4
    with RoundInputs(round_weights(model, found)):
        again = logits_of(model)
    errors = sorted(error(one, other) for one, other in zip(logits, again, strict=True))
    assert errors[1] < 1e-4


def check_notes(scheme: str, plain: Driver, found: Driver) -> None:
    sparse = any(isinstance(layer, SparseMoE) for layer in plain.model.modules())
    (note,) = (one for one in found.model.notes if one.startswith(f"Quantization {scheme}: "))
    assert [one for one in found.model.notes if one != note] == plain.model.notes
    assert "lm_head" in note
    assert (" (router)" in note) == sparse
    shared = found.config.raw.get("shared_expert_intermediate_size", 64)
    odd = f"shared_expert.down_proj ({shared} inputs, not a multiple of 16)"
    assert (odd in note) == (shared % 16 != 0)


@each_scheme
@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_the_experts_of_a_layer_stay_within_8_percent(scheme: str, architecture: str, tmp_path: Path) -> None:
    """And within 6% where a token is by itself, whose activations a GPU does not round."""
    save_tiny_model(architecture, "full", tmp_path)
    plain, rounded = (
        [layer for layer in Driver(tmp_path, quantization=one).model.modules() if isinstance(layer, SparseMoE)]
        for one in (None, scheme)
    )
    alone = MoeConfig(1, Tile(1, 1, 1, 1), Tile(1, 1, 1, 1))
    for before, after in zip(plain, rounded, strict=True):
        assert after.experts.w13.dtype == after.experts.w2.dtype == torch.float8_e4m3fn
        assert torch.equal(after.router, before.router)
        x = torch.randn(300, before.spec.hidden_size)
        exact, _ = before.fused_moe(x, before.experts)
        assert 0.04 < error(after.fused_moe(x, after.experts)[0], exact) < 0.08
        assert 0.03 < error(after.fused_moe(x, after.experts, None, None, alone)[0], exact) < 0.06


def test_dummies_are_the_unquantized_ones_quantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On any number of ranks: a scale a tensor is each rank's own, so it is a scale an output that is compared."""
    save_tiny_model("LlamaForCausalLM", "gqa", tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    seen: dict[str, Tensor] = {}
    fill = loader.fill_with_dummies

    def spy(slots: dict[str, loader.Slot], seed: int) -> None:
        fill(slots, seed)
        seen.update({name: slot.destination.clone() for name, slot in slots.items() if slot.destination is not None})

    monkeypatch.setattr(loader, "fill_with_dummies", spy)

    def dummies(mesh: Mesh, quantization: str | None) -> dict[str, Tensor]:
        seen.clear()
        load_model(Path("nowhere"), config, make_context(config, mesh), "dummy", 3, quantization)
        return dict(seen)

    plain, found = dummies(Mesh(), None), dummies(Mesh(), "ptpc_fp8")
    halves = [dummies(Mesh(Group(rank, 2)), "ptpc_fp8") for rank in (0, 1)]
    assert plain.keys() == found.keys()
    for name, tensor in plain.items():
        assert tensor.std() > 4e-4
        if name.endswith("_proj.weight"):
            tensor = quantize_per_token_reference(tensor, torch.float8_e4m3fn).values
        assert torch.equal(found[name].float(), tensor.float())
    name = "model.layers.1.self_attn.k_proj.weight"
    assert torch.equal(torch.cat([half[name] for half in halves]).float(), found[name].float())
