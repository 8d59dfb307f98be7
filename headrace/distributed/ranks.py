"""Describes how ranks are numbered: neighbours share each layer, then come pipeline stages, then engines.

Imports no torch, so that planner and executor can read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["tp", "pp", "dp", "all", "experts"]

LOOPBACK = "lo"
"""The interface on which NCCL's ranks find each other; by itself NCCL would listen on a network that others reach."""


class Place(NamedTuple):
    """Says where a rank is along each way of spreading a model."""

    dp: int
    pp: int
    tp: int


@dataclass(frozen=True)
class Ranks:
    """Describes how many ranks there are along each way of spreading a model over them."""

    tp: int = 1
    """tensor parallelism: ranks over which each layer is split"""
    pp: int = 1
    """pipeline parallelism: stages, each with a part of the layers"""
    dp: int = 1
    """data parallelism: engines with requests of their own, which share the experts and so step together"""

    @property
    def world(self) -> int:
        """The number of all ranks."""
        return self.dp * self.engine

    @property
    def engine(self) -> int:
        """The number of ranks that take the steps of one scheduler."""
        return self.pp * self.tp

    def place(self, rank: int) -> Place:
        """Return where `rank` is; ranks of one stage have neighbouring numbers, and so have those of one engine."""
        dp, inside = divmod(rank, self.engine)
        return Place(dp, *divmod(inside, self.tp))

    def rank(self, place: Place) -> int:
        """Return the number of the rank at `place`."""
        return (place.dp * self.pp + place.pp) * self.tp + place.tp

    def members(self, kind: Kind, rank: int) -> list[int]:
        """Return the ranks of the group of that kind to which `rank` belongs, in the order of the group.

        `tp`: those that share its layers; `pp`: those of the other stages with the same share; `dp`: those of other
        engines in its place; `all`: every one; `experts`: all that hold its stage's experts, engine by engine.
        """
        alike = {"tp": (0, 1), "pp": (0, 2), "dp": (1, 2), "all": (), "experts": (1,)}[kind]
        own = self.place(rank)
        return [other for other in range(self.world) if all(self.place(other)[axis] == own[axis] for axis in alike)]
