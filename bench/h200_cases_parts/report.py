"""Where cases say how they ended: a line each, printed at once and kept for the JSON file. Knows nothing of engines."""

from __future__ import annotations

import gc
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from h200_parts.models import LLAMA_8B

EIGHT_B = LLAMA_8B | {"max_position_embeddings": 32768, "rope_scaling": None}
"""The 8B's sizes. The cases give it as many layers as they need."""


@dataclass(frozen=True)
class Case:
    name: str
    """part/case"""
    ok: bool
    said: str
    seconds: float
    """since the case before it ended"""


class Report:
    """One process's cases."""

    def __init__(self, part: str, path: Path | None, work: Path, smoke: bool) -> None:
        self.part, self.path, self.work, self.smoke = part, path, work, smoke
        self.cases: list[Case] = []
        self._began = time.monotonic()

    @property
    def failed(self) -> bool:
        """Nothing said is a failure too."""
        return not self.cases or not all(case.ok for case in self.cases)

    def case(self, name: str, ok: bool, said: str = "") -> None:
        gc.unfreeze()  # an engine keeps for good what its start has left; here the next one needs the room
        gc.collect()
        now = time.monotonic()
        case = Case(f"{self.part}/{name}", ok, said, round(now - self._began, 1))
        self._began = now
        self.cases.append(case)
        print(f"{'OK  ' if ok else 'FAIL'} {case.name} ({case.seconds:.0f} s){': ' if said else ''}{said}", flush=True)
        self.write()

    def note(self, text: str) -> None:
        print(f"       {text[:240]}", flush=True)

    def write(self) -> None:
        if self.path is not None:
            write_cases(self.path, [asdict(case) for case in self.cases])

    def model(self, name: str, config: dict[str, object]) -> str:
        """A folder with config.json alone, for dummy weights."""
        folder = self.work / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)


def write_cases(path: Path, cases: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"ok": all(case["ok"] for case in cases), "cases": cases}, indent=1) + "\n")
