"""Holds how a run is set up: full size or toy, which device, and the engine settings that all rows share."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from h200_parts.models import BenchModel

SEED = 0


@dataclass(frozen=True)
class Settings:
    """Holds the options of a run that every part reads."""

    work: Path
    """a folder for config.json files, caches and the client's results"""
    smoke: bool = False
    """toy models and a few tokens on the CPU, to prove that the code runs"""
    repeats: int = 3
    tokenizer: str | None = None
    """a folder; served rows tokenize with it"""
    commit: str | None = None
    """the measured commit, where the folder is no git checkout"""
    engine: dict[str, Any] = field(default_factory=dict)
    """engine settings that replace the table's"""

    @property
    def device(self) -> str:
        return "cpu" if self.smoke else "cuda"

    def place(self, share: float) -> dict[str, Any]:
        """Return where the engine of a case runs: in that share of the GPU or, as a toy, on one thread of the CPU."""
        return {"device": "cpu", "cpu_threads": 1} if self.smoke else {"gpu_memory_utilization": share}

    def tokens(self, count: int) -> int:
        """Return the length of a prompt or an output."""
        return max(2, count // 64) if self.smoke else count

    def requests(self, count: int) -> int:
        """Return the size of a batch or a run."""
        return min(count, 6) if self.smoke else count

    def write_config(self, name: str, config: dict[str, Any]) -> str:
        """Write a folder with config.json alone, for dummy weights; return its path."""
        folder = self.work / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        return str(folder)

    def vocab_size(self, model: BenchModel) -> int:
        size: int = model.shape(self.smoke)["vocab_size"]
        return size

    def engine_knobs(self, model: BenchModel) -> dict[str, Any]:
        """Return fields of EngineConfig: the table's, then those that the user gave."""
        knobs: dict[str, Any] = {
            "model": self.write_config(model.name, model.shape(self.smoke)),
            "load_format": "dummy",
            "seed": SEED,
            "enable_prefix_caching": False,
            "max_model_len": 2048 if self.smoke else model.max_model_len,
            "max_num_seqs": 64 if self.smoke else 1024,
            "gpu_memory_utilization": 0.9,
        }
        if model.quantization:
            knobs["quantization"] = model.quantization
        if model.drafted:
            head = self.write_config(f"{model.name}-head", model.head(self.smoke))
            knobs["speculative_config"] = {"method": "eagle3", "model": head, "num_speculative_tokens": 3}
        if self.smoke:
            knobs |= {"device": "cpu", "cpu_kv_cache_gib": 0.1}
        return knobs | self.engine

    def serve_flags(self, model: BenchModel) -> list[str]:
        """Return the same settings as flags of `headrace serve`."""
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
