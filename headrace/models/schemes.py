"""Chooses the scheme of each layer's weights: that of the format which config.json states unless the checkpoint's files
say otherwise: they may hold a linear unquantized, or quantized though config.json leaves it alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import CheckpointError
from headrace.layers.embedding import ParallelLMHead
from headrace.layers.linear import Linear
from headrace.layers.moe import SparseMoE
from headrace.models.checkpoint import StoredTensor, checkpoint_files, of_all_experts, total_bytes
from headrace.quantization.formats import UNQUANTIZED, LinearFormat
from headrace.quantization.linear_rules import CheckpointFormat
from headrace.quantization.mixed import mixed
from headrace.quantization.scheme import FLOATS, Scheme
from headrace.quantization.table import make_scheme

Names = dict[str | None, list[str]]
"""part of a layer -> the names under which a checkpoint may list its format"""
PLAIN_IN_FILES = "unquantized in the checkpoint's files"


@dataclass(frozen=True)
class LinearsInFiles:
    """Names the linears that a checkpoint's files hold, by what their headers say."""

    plain: frozenset[str]
    """as a weight of 16 bits or more without scales"""
    quantized: frozenset[str]

    def check_experts(self, names: Names, count: int) -> None:
        """Raise CheckpointError where the experts of a layer, of which `names` has the first one's, are not all alike:
        they are one tensor here."""
        for first, *_ in names.values():
            front, _, part = first.rpartition(".experts.0.")
            for number in range(1, count) if front else ():
                name = f"{front}.experts.{number}.{part}"
                if (name in self.plain) != (first in self.plain) and (name in self.plain or name in self.quantized):
                    alone, others = (name, first) if name in self.plain else (first, name)
                    raise CheckpointError(
                        f"{alone} is unquantized in the checkpoint's files, {others} is not; accepted: experts of a "
                        "layer that are all in one format"
                    )


class Schemes:
    """Makes one scheme for each format, and for each combination of formats that one layer is in."""

    def __init__(self, held: CheckpointFormat, in_files: LinearsInFiles | None) -> None:
        """Take what config.json states, and what the files hold; None: nobody has looked."""
        self.held, self.in_files = held, in_files if held.method else None
        self.unquantized: Scheme = make_scheme(UNQUANTIZED)
        self.made: dict[LinearFormat, Scheme] = {UNQUANTIZED: self.unquantized}
        self.mixed: dict[tuple[tuple[str | None, LinearFormat], ...], Scheme] = {}

    def of(self, path: str, layer: Linear | SparseMoE) -> tuple[Scheme, str]:
        """Return two things: the layer's scheme, and why it is unquantized although its format is not."""
        if isinstance(layer, ParallelLMHead) and layer.tied_to[0] is not None:  # it has the embedding's weights
            return self.unquantized, ""
        names = layer.quantized_names(path)
        if isinstance(layer, SparseMoE) and self.in_files is not None:
            self.in_files.check_experts(names, layer.spec.num_experts)
        scheme = self.named(names)
        if scheme is self.unquantized:
            stated = any(self.held.format_for(*each) != UNQUANTIZED for each in names.values())
            return scheme, PLAIN_IN_FILES if stated else ""
        why = scheme.product.refusal(layer.spec) if isinstance(layer, Linear) else ""
        return self.unquantized if why else scheme, why

    def of_router(self, names: Names) -> Scheme:
        """Return the scheme of a router whose parts have these names: unquantized unless the files have another, for
        most tools leave routers alone without saying so."""
        held = set() if self.in_files is None else self.in_files.quantized
        return self.named(names) if any(name in held for name, *_ in names.values()) else self.unquantized

    def named(self, names: Names) -> Scheme:
        """Return the scheme of a layer whose parts have these names."""
        formats = {part: self._format(each) for part, each in names.items()}
        if len({*formats.values()}) == 1:
            return self._made(next(iter(formats.values())))
        key = tuple(formats.items())
        if key not in self.mixed:
            # of their own, since a scheme learns all its linears at once
            own = {each: make_scheme(each) for each in dict.fromkeys(formats.values())}
            self.mixed[key] = mixed({part: own[each] for part, each in formats.items()})
        return self.mixed[key]

    def _format(self, names: list[str]) -> LinearFormat:
        stated, in_files = self.held.format_for(*names), self.in_files
        if in_files is None:
            return stated
        if names[0] in in_files.plain:
            return UNQUANTIZED
        return self.held.main if stated == UNQUANTIZED and names[0] in in_files.quantized else stated

    def _made(self, linear: LinearFormat) -> Scheme:
        if linear not in self.made:
            self.made[linear] = make_scheme(linear)
        return self.made[linear]


def linears_in_files(folder: Path, tensors_of: Callable[[Path], list[StoredTensor]]) -> LinearsInFiles:
    """Return which linears are quantized in a checkpoint's files. Tools leave some unquantized, of sizes that their
    blocks do not divide or of layers that they never quantize, and leave names out that they quantize, and do not
    always say so in config.json. `tensors_of`: checkpoint.stored_tensors, or a cache of it."""
    plain: set[str] = set()
    scaled: set[str] = set()
    quantized: set[str] = set()
    files = checkpoint_files(folder)
    total_bytes(files)  # which names a file that is missing
    for file in files:
        for stored in tensors_of(file):
            of_all, tensor = of_all_experts(stored.name)
            owner = of_all.replace(".experts.", ".experts.0.")  # which stands for all
            if not of_all:
                owner, _, tensor = stored.name.rpartition(".")
            names = {owner, f"model.{owner}"}
            if tensor == "weight" and stored.dtype in FLOATS:
                plain |= names
            elif tensor in ("weight", "weight_packed", "qweight"):
                quantized |= names
            elif tensor.startswith("weight_"):
                scaled |= names
    return LinearsInFiles(frozenset(plain - scaled), frozenset(quantized))
