"""How a run is set up: full size or toy, which device, and the engine settings that every row shares."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from h200_parts.models import BenchModel

SEED = 0


@dataclass(frozen=True)
class Settings:
    work: Path
    """a folder for configs, caches and results of the tools"""
    smoke: bool = False
    """toy models and a few tokens on the CPU, to prove that the code runs"""
    repeats: int = 3
    tokenizer: str | None = None
    """a folder; served rows tokenize with it"""
    client_processes: int = 4
    commit: str | None = None
    """what is measured, where that cannot be asked of git"""
    engine: dict[str, Any] = field(default_factory=dict)
    """engine settings in place of the table's own"""

    @property
    def device(self) -> str:
        return "cpu" if self.smoke else "cuda"

    def tokens(self, count: int) -> int:
        """A prompt's or output's length."""
        return max(2, count // 64) if self.smoke else count

    def requests(self, count: int) -> int:
        """A batch's or a run's."""
        return min(count, 6) if self.smoke else count

    def folder(self, model: BenchModel) -> str:
        return str(model.write(self.work / model.name, toy=self.smoke))

    def vocab_size(self, model: BenchModel) -> int:
        size: int = model.shape(self.smoke)["vocab_size"]
        return size

    def engine_knobs(self, model: BenchModel) -> dict[str, Any]:
        """Fields of EngineConfig: those of the table, then what the user gave."""
        knobs: dict[str, Any] = {
            "model": self.folder(model),
            "load_format": "dummy",
            "seed": SEED,
            "enable_prefix_caching": False,
            "max_model_len": 1024 if self.smoke else 8192,
            "max_num_seqs": 64 if self.smoke else 1024,
            "gpu_memory_utilization": 0.9,
        }
        if model.quantization:
            knobs["quantization"] = model.quantization
        if self.smoke:
            knobs |= {"device": "cpu", "cpu_kv_cache_gib": 0.1}
        return knobs | self.engine

    def serve_flags(self, model: BenchModel) -> list[str]:
        """The same settings on `headrace serve`'s command line."""
        knobs = self.engine_knobs(model)
        flags = [str(knobs.pop("model"))]
        knobs |= {"tokenizer": self.tokenizer} if self.tokenizer else {"skip_tokenizer_init": True}
        for name, value in knobs.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
        return flags
