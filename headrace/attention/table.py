"""Lists the attention backends in order of preference, and chooses among them, giving reasons.

Imports no torch, since the planner reads it too; a backend's own file is imported when it is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from headrace.attention.spec import AttentionSpec
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.attention.backend import Backend


WIDEST_LATENT = 512
"""what registers hold the sums of"""


@dataclass(frozen=True)
class BackendEntry:
    """Describes one backend."""

    name: str
    why: str
    """what it is, for the start-up log"""
    reasons: Callable[[AttentionSpec], list[str]]
    """returns why it cannot serve a layer; empty: it can"""
    path: str
    """module:class, imported when chosen"""
    full_graphs: str = "none"
    """the steps whose attention may be inside a CUDA graph: `any`, `decode` (one token a request) or `none`"""


class Selection(NamedTuple):
    """Holds the backend chosen, and why."""

    name: str
    why: str
    passed_over: list[str]
    """`NAME: reason; reason` of each backend that was tried before it"""
    full_graphs: str


def _common_reasons(spec: AttentionSpec) -> list[str]:
    reasons = []
    if not spec.causal:
        reasons.append("attends over a cache, to what came before alone: not to keys that come later")
    if spec.num_heads % spec.num_kv_heads:
        reasons.append(f"{spec.num_heads} query heads are no multiple of {spec.num_kv_heads} KV heads")
    return reasons


def _triton_reasons(spec: AttentionSpec) -> list[str]:
    reasons = _common_reasons(spec)
    if spec.device_type != "cuda":
        reasons.append(f"runs on GPUs, not on {spec.device_type}")
    if spec.latent_dim is None and spec.head_dim > 256:
        reasons.append(f"head_dim {spec.head_dim} is over 256")
    if spec.latent_dim is not None and spec.latent_dim > WIDEST_LATENT:
        reasons.append(f"latents of {spec.latent_dim} numbers are over {WIDEST_LATENT}")
    if spec.latent_dim is not None and spec.batch_invariant:
        reasons.append("batch invariance: latents are projected by the vendor's library")
    return reasons


def _sdpa_reasons(spec: AttentionSpec) -> list[str]:
    reasons = _common_reasons(spec)
    if spec.batch_invariant and spec.device_type != "cpu":
        reasons.append("batch invariance: torch sums in another order for other sizes of a batch")
    return reasons


def _whole_reasons(spec: AttentionSpec) -> list[str]:
    reasons = []
    if spec.causal:
        reasons.append("attends to whole texts, without a cache")
    if spec.sinks or spec.soft_cap is not None or spec.latent_dim is not None:
        reasons.append("knows no sinks, soft caps or latents")
    if spec.batch_invariant:
        reasons.append("batch invariance: texts are padded to the longest")
    return reasons


BACKENDS = (
    BackendEntry(
        "TRITON_ATTN",
        "one Triton kernel family for prefill, chunks and decode, inside CUDA graphs",
        _triton_reasons,
        "headrace.attention.triton_attn:TritonAttention",
        full_graphs="any",
    ),
    BackendEntry(
        "TORCH_SDPA",
        "torch's scaled_dot_product_attention over gathered blocks, the CPU path and reference",
        _sdpa_reasons,
        "headrace.attention.torch_sdpa:TorchSdpa",
    ),
    BackendEntry(
        "TORCH_WHOLE",
        "torch's scaled_dot_product_attention over whole texts, in which each token sees all others",
        _whole_reasons,
        "headrace.attention.torch_whole:TorchWhole",
    ),
)


def reasons_against(entry: BackendEntry, specs: Iterable[AttentionSpec | None]) -> list[str]:
    """Return why it cannot serve a model with these layers (None: a layer without attention); empty: it can."""
    return list(dict.fromkeys(why for spec in dict.fromkeys(specs) if spec is not None for why in entry.reasons(spec)))


def select_backend(specs: Sequence[AttentionSpec | None], forced: str | None = None) -> Selection:
    """Return the first backend that can serve all layers, or the forced one.

    Raises ConfigError if the forced one is unknown or cannot serve them, naming its reasons and the backends that can.
    """
    verdicts = {entry.name: reasons_against(entry, specs) for entry in BACKENDS}
    usable = [name for name, reasons in verdicts.items() if not reasons]
    if forced is not None:
        name = forced.upper()
        if name not in verdicts:
            raise ConfigError(f"attention_backend {forced!r} is unknown; choose from {', '.join(verdicts)}")
        if verdicts[name]:
            raise ConfigError(
                f"attention_backend {name} cannot serve this model here: {'; '.join(verdicts[name])}; "
                f"choose from {', '.join(usable) or 'none'}"
            )
        entry = next(entry for entry in BACKENDS if entry.name == name)
        return Selection(name, "given", [], entry.full_graphs)
    if not usable:
        listed = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in verdicts.items())
        raise ConfigError(f"no attention backend can serve this model here: {listed}")
    chosen = next(entry for entry in BACKENDS if entry.name == usable[0])
    names = list(verdicts)
    passed = [f"{name}: {'; '.join(verdicts[name])}" for name in names[: names.index(chosen.name)]]
    return Selection(chosen.name, chosen.why, passed, chosen.full_graphs)


def load_backend(name: str) -> Backend:
    """Import and build the backend of that name. Raises ConfigError if there is none."""
    for entry in BACKENDS:
        if entry.name == name:
            module, attribute = entry.path.split(":")
            backend: Backend = getattr(import_module(module), attribute)()
            return backend
    raise ConfigError(f"attention_backend {name!r} is unknown; choose from {', '.join(e.name for e in BACKENDS)}")
