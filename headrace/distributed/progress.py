"""Shows how far each rank has come, in a file that all ranks and their executor map into memory.

Every rank counts the commands that it has taken and the collectives that it has entered and left. When nothing moves
any more, whoever waits for the ranks reads there which of them the others wait for.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

TAKEN, ENTERED, LEFT = range(3)
_FIELDS = 3
_COUNT = struct.Struct("<q")
NAME_BYTES = 24


@dataclass(frozen=True)
class RankProgress:
    """Holds how far one rank has come."""

    rank: int
    taken: int
    """commands"""
    entered: int
    """collectives"""
    left: int
    collective: str
    """the one that was entered last"""

    @property
    def waits(self) -> bool:
        """True while it is inside a collective."""
        return self.entered > self.left


class Progress:
    """Counts what one rank does, and reads what all have done. Each rank writes to its own line alone."""

    def __init__(self, path: Path, num_ranks: int, rank: int = 0) -> None:
        """Map the file, which is made if it does not exist yet. `rank`: whose line is written."""
        self._line = _FIELDS * _COUNT.size + NAME_BYTES
        self._ranks, self._rank = num_ranks, rank
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, num_ranks * self._line)
            self._memory = mmap.mmap(descriptor, num_ranks * self._line)
        finally:
            os.close(descriptor)
        self._counts = [0] * _FIELDS

    def take(self) -> None:
        """Count a command."""
        self._count(TAKEN)

    def enter(self, collective: str) -> None:
        """Count a collective that is begun."""
        start = self._rank * self._line + _FIELDS * _COUNT.size
        self._memory[start : start + NAME_BYTES] = collective.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
        self._count(ENTERED)

    def leave(self) -> None:
        """Count a collective that has ended, as far as the host knows: on a GPU it is queued by then."""
        self._count(LEFT)

    def read(self) -> list[RankProgress]:
        """Return how far each rank has come."""
        found = []
        for rank in range(self._ranks):
            start = rank * self._line
            taken, entered, left = (
                _COUNT.unpack_from(self._memory, start + place * _COUNT.size)[0] for place in (TAKEN, ENTERED, LEFT)
            )
            name = self._memory[start + _FIELDS * _COUNT.size : start + self._line].rstrip(b"\0").decode()
            found.append(RankProgress(rank, taken, entered, left, name))
        return found

    def lines(self, ranks: range) -> bytes:
        """Return the lines of neighbouring ranks, for a file on another machine."""
        return self._memory[ranks.start * self._line : ranks.stop * self._line]

    def put(self, ranks: range, lines: bytes) -> None:
        """Write lines that another machine has returned."""
        if len(lines) == len(ranks) * self._line:
            self._memory[ranks.start * self._line : ranks.stop * self._line] = lines

    def _count(self, place: int) -> None:
        self._counts[place] += 1
        _COUNT.pack_into(self._memory, self._rank * self._line + place * _COUNT.size, self._counts[place])


def blame(ranks: list[RankProgress]) -> str:
    """Say which rank the others wait for, and in which collective."""
    fewest = min(ranks, key=lambda one: (one.taken, one.waits, one.entered))
    waiting = [one for one in ranks if one.waits and one is not fewest]
    said = f"rank {fewest.rank} has not moved since command {fewest.taken}"
    if waiting:
        others = ", ".join(f"rank {one.rank} in {one.collective} ({one.entered})" for one in waiting)
        said += f", after {fewest.left} collectives; {others} {'wait' if len(waiting) > 1 else 'waits'}"
    return said
