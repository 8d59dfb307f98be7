"""Compares the logits of models in every format of a checkpoint with those of the same weights widened to fp32.

Each format's model is random and made in memory: the tensors that a checkpoint of the format has get random codes,
scales, zero points and orders, through the places that the loader fills. The widened model has the weights that the
layouts themselves make of them. Its layers of experts send every token to all of theirs: a token that rounding sends
elsewhere would say more about its router than about the formats.

How far the format's own path may be from fp32 is set by plain torch in bf16: the widened model's or, where activations
are rounded to 8 bits, that of the same rounding.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from h200_parts import models
from h200_parts.forced import Sequence, continued, reference_path, stepped_core
from h200_parts.models import FORMATS
from h200_parts.numerics import PLAIN, compare
from h200_parts.run import Run
from headrace.layers.layer import Layer
from headrace.layers.linear import Linear
from headrace.layers.moe import SparseMoE
from headrace.models import loader
from headrace.quantization.formats import UNQUANTIZED
from headrace.quantization.scheme import Slot, Weights

BOUND = 1.2
"""times the error of plain torch in bf16"""
PROMPTS = (1, 7, 40)
"""requests of a batch, whose prompts together are beyond the kernels for few tokens in the last"""
LONGEST, NEW_TOKENS = 11, 6
GROUP = 128
SCALES = ("weight_scale", "weight_scale_inv", "scales")
GROWTH = 40.0
"""by which scales are larger than those of dummy weights, so that activations keep their size from layer to layer"""
E8M0_RANGE = (119, 122)
"""exponents of which e2m1 codes become weights of the same size"""
CONSTANTS = json.loads(Path(__file__).with_name("numerics.json").read_text())
LIBRARY = frozenset(CONSTANTS["library"])
"""Operations that a layer may leave to torch: products by the vendor's library, inputs in another order, the residual's
sum, memory and views; and, where a step is planned, the sums of its requests' lengths."""
SMALL, TOY, EXPERTS = CONSTANTS["small"], CONSTANTS["toy"], CONSTANTS["experts"]
"""fields of config.json: of all models, of toys, of those with experts"""
DENSE = tuple(name for name in FORMATS if name != "w4a16")
"""formats of a Llama's linears; W4A16 has two other sizes of groups among them"""
SPARSE = ("awq", "w4a16", "int8", "fp8", "fp8-block", "nvfp4")
"""formats of a Qwen3-MoE's linears and experts"""


def configs(toy: bool) -> dict[str, dict[str, Any]]:
    """Return config.json of each model."""
    small = SMALL | (TOY if toy else {})
    found = {name: models.LLAMA_8B | small | {"quantization_config": FORMATS[name]} for name in DENSE}
    sparse = models.QWEN3_30B_A3B | small | EXPERTS | ({"moe_intermediate_size": 256} if toy else {})
    found |= {f"experts-{name}": sparse | {"quantization_config": FORMATS[name]} for name in SPARSE}
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * (small["num_hidden_layers"] // 2)}
    scaling = {"rope_scaling": models.GPT_OSS_20B["rope_scaling"], "num_local_experts": 4, "num_experts_per_tok": 4}
    return found | {"gpt-oss": models.GPT_OSS_20B | small | scaling | kinds}


def latent_configs(toy: bool) -> dict[str, dict[str, Any]]:
    """Return config.json of models whose keys an index chooses, with heads of their own sizes, in FP8 blocks but for
    what their checkpoints leave alone. Where the index chooses all keys, nothing but rounding is compared."""
    changes = SMALL | CONSTANTS["latent"] | (TOY | {"head_dim": None} if toy else {})
    blocks = {"quantization_config": FORMATS["fp8-block"] | {"modules_to_not_convert": ["weights_proj"]}}
    found = {}
    for name, model_type in (("deepseek-v3.2", "deepseek_v32"), ("glm-5", "glm_moe_dsa")):
        for top_k in (4, LONGEST + NEW_TOKENS):
            config = models.in_catalogue(name, model_type) | changes | {"index_topk": top_k}
            found[f"{name} fp8-block, index_topk {top_k}"] = config | blocks
    return found


def format_numerics_cases(run: Run) -> None:
    """Add a case for each format: its error against fp32, that of plain torch in bf16, and what torch computed inside
    its layers."""
    for name, config in configs(run.smoke).items():
        case(run, name, config)


def case(run: Run, name: str, config: dict[str, Any], also: tuple[str, ...] = ()) -> None:
    """Add the case of one model, whose layers may leave `also` to torch. It passes where the error is at most BOUND
    times plain torch's, no weights were widened at load, no kernel was demoted and, on a GPU, no layer left more than
    LIBRARY and that to torch."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    widened: dict[str, Tensor] = {}
    ours, inside, notes, rounds = logits(run, f"{name}-held", config, "bfloat16", keep=widened)
    with reference_path():
        exact = logits(run, f"{name}-wide", plain, "float32", take=widened, **PLAIN)[0]
        rounded = (f"{name}-held", config) if rounds else (f"{name}-wide", plain)
        base = logits(run, *rounded, "bfloat16", take={} if rounds else widened, **PLAIN)[0]
    error, allowed = compare(ours, exact).error, compare(base, exact).error
    more = [f"{count} x {op}" for op, count in inside.items() if op not in also]
    torch_path = ", ".join([*notes, *more]) if not run.smoke else ""
    said = f"error against fp32 {error:.2e}, of {'the same rounding' if rounds else 'the widened model'} in bf16 "
    said += f"{allowed:.2e}, ratio {error / allowed:.2f}; torch inside layers: {torch_path or 'none'}"
    run.case(name, error <= BOUND * allowed and not torch_path, said)


def logits(
    run: Run, name: str, config: dict[str, Any], dtype: str,
    keep: dict[str, Tensor] | None = None, take: dict[str, Tensor] | None = None, **knobs: Any,
) -> tuple[list[Sequence], Counter[str], list[str], bool]:  # fmt: skip
    """Run the same tokens through an engine of each model. Return logits, what torch computed inside layers, notes
    about what is not as it should be, and whether activations are rounded. The quantized layers' weights are put
    widened into `keep`, or taken from `take`."""
    base: dict[str, Any] = {
        "load_format": "dummy", "dtype": dtype, "kv_cache_dtype": dtype, "max_model_len": 512, "max_num_seqs": 64,
        "max_num_batched_tokens": 512, "enforce_eager": True, "num_gpu_blocks_override": 512,
    }  # fmt: skip
    folder = Path(run.settings.write_config(name, config))
    inside: Counter[str] = Counter()
    batches = [random_tokens(requests, config["vocab_size"], LONGEST, NEW_TOKENS) for requests in PROMPTS]
    with random_weights(keep, take), stepped_core(run.settings, folder, **base | knobs) as core:
        model = core._executor._worker.model  # pyrefly: ignore[missing-attribute]
        watch(model, inside)
        made = continued(core, batches, NEW_TOKENS)
        facts = core.facts.workers[0]
        notes = [f"{name} demoted" for name in facts.demoted] + [note for note in facts.notes if "widened" in note]
        rounds = any(layer.rounding is not None for layer in model.modules() if isinstance(layer, Linear))
    return made, inside, notes, rounds


def random_tokens(requests: int, vocab_size: int, longest: int, behind: int) -> list[list[int]]:
    """Return prompts of 3 to `longest` tokens, and so many tokens `behind` each."""
    generator = torch.Generator().manual_seed(requests)
    lengths = torch.randint(3, longest + 1, (requests,), generator=generator).tolist()
    return [torch.randint(0, vocab_size, (n + behind,), generator=generator).tolist() for n in lengths]


@contextmanager
def unmeasured() -> Iterator[None]:
    """Let engines that start inside give each size of linears over few tokens the first kernel, without measuring."""
    with (
        patch("headrace.quantization.gpu_linear._fastest", lambda configs, *_: configs[0]),
        patch("headrace.quantization.gpu_linear._write"),
        patch("headrace.quantization.gpu_linear.ROTATED_BYTES", 1),
    ):
        yield


@contextmanager
def random_weights(keep: dict[str, Tensor] | None, take: dict[str, Tensor] | None) -> Iterator[None]:
    """Let engines that start inside fill their slots with `fill`, and keep or take what is quantized."""
    fuse = loader.fuse

    def filled(model: nn.Module, *arguments: Any) -> Any:
        for path, layer in model.named_modules():
            for name, spec, weights, scheme in linears(path, layer):
                if keep is not None and scheme.format != UNQUANTIZED.format:
                    keep[name] = scheme.layout.dequantize(replace(spec, dtype=torch.float32), weights)["weight"]
                if take and name in take:
                    weights["weight"].copy_(take[name])
        return fuse(model, *arguments)

    with (
        patch.object(loader, "fill_with_dummies", fill),
        patch.object(loader, "fuse", filled),
        unmeasured(),
    ):
        yield


def linears(path: str, layer: nn.Module) -> Iterator[tuple[str, Any, Weights, Any]]:
    """Yield (name, spec, weights, scheme) of each linear that a layer is."""
    if isinstance(layer, Linear):
        yield path, layer.spec, layer.weights, layer.scheme
    elif isinstance(layer, SparseMoE):
        yield f"{path}/w13", layer.gate_up_spec, layer.w13, layer.scheme
        yield f"{path}/w2", layer.down_spec, layer.w2, layer.scheme


def fill(slots: dict[str, Slot], seed: int) -> None:
    """Fill slots with random numbers that follow from `seed` and the tensor's name."""
    for name, slot in slots.items():
        order = name.endswith("g_idx")
        if slot.destination is None or slot.optional:
            continue
        device = slot.destination.device
        digest = hashlib.sha256(f"{seed}:{'' if order else name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
        dtype = slot.dtype or slot.destination.dtype
        if order:  # one for all linears over one input, as tools write it
            whole = torch.randperm(slot.shape[0], generator=generator, device=device) // GROUP
        else:
            whole = drawn(name, slot, dtype, generator)
        slot.put(whole.to(dtype)[slot.source])


def drawn(name: str, slot: Slot, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return a whole tensor of the checkpoint."""
    shape, device, last = slot.shape, generator.device, name.rpartition(".")[2]

    def normal(std: float, mean: float = 0.0) -> Tensor:  # in what all dtypes of a model hold
        return torch.empty(shape, device=device).normal_(mean, std, generator=generator).bfloat16()

    if slot.e8m0:
        return torch.randint(*E8M0_RANGE, shape, generator=generator, device=device)
    if slot.dummy is not None:
        grown = slot.dummy * (GROWTH if last in SCALES else 1.0)
        return torch.rand(shape, generator=generator, device=device).add_(0.5).mul_(grown).half().float()
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max + 1, shape, generator=generator, device=device, dtype=torch.int64)
    if dtype.itemsize == 1:  # fp8, of which dummy weights' scales are
        return torch.rand(shape, generator=generator, device=device).sub_(0.5)
    if "norm" in name:
        return normal(0.1, 1.0)
    if "embed_tokens" in name:
        return normal(0.3)  # so that layers add more than they are given
    return normal(shape[-1] ** -0.5 if len(shape) > 1 else 0.1)


class TorchOperations(TorchDispatchMode):
    """Counts the operations of torch beyond LIBRARY that are called while it is active."""

    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        unchanged = name in ("to", "contiguous") and result is args[0]
        if name not in LIBRARY and not unchanged:
            self.seen[name] += 1
        return result


def watch(model: Any, seen: Counter[str]) -> None:
    """Count in `seen` what torch computes inside the decoder layers from now on."""
    for layer in model.model.layers:
        layer.forward = watched(layer, seen)


def watched(layer: Layer, seen: Counter[str]) -> Callable[..., Any]:
    forward = layer.forward

    def counting(*arguments: Any) -> Any:
        with TorchOperations(seen):
            return forward(*arguments)

    return counting
