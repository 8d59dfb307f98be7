"""Writes the tiny models that the formats' own tools made (tests/quantization/fixtures/README.md) as folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FIXTURES = Path(__file__).parents[1] / "quantization" / "fixtures"


def about(tool: str) -> dict[str, Any]:
    with safe_open(FIXTURES / f"{tool}.safetensors", "pt") as file:
        found: dict[str, Any] = json.loads(file.metadata()["about"])
        return found


CASES = [(path.stem, name) for path in sorted(FIXTURES.glob("*.safetensors")) for name in about(path.stem)["models"]]
"""(tool, its model)"""
W8A8 = sorted(path.stem for path in (FIXTURES / "w8a8").glob("*.safetensors"))
"""models in 8 bits, whose activations are rounded"""


def write(tool: str, name: str, folder: Path, **quantization: Any) -> list[list[int]]:
    """Write a model's folder as the tool's export has it, with other values of some fields of its quantization_config;
    returns the tokens that it should give."""
    with safe_open(FIXTURES / f"{tool}.safetensors", "pt") as file:
        paths = [path for path in file.keys() if path.startswith(f"{name}/")]  # noqa: SIM118
        tensors = {path.removeprefix(f"{name}/"): file.get_tensor(path) for path in paths}
    model = about(tool)["models"][name]
    folder.mkdir(parents=True)
    model["config"]["quantization_config"] |= quantization
    (folder / "config.json").write_text(json.dumps(model["config"]))
    save_file(tensors, folder / "model.safetensors")
    tokens: list[list[int]] = model["tokens"]
    return tokens


def unpack(name: str, folder: Path) -> tuple[dict[str, Tensor], list[int], Tensor]:
    """Write one of W8A8 into `folder`; return its tensors, the prompt and the tool's logits."""
    with safe_open(FIXTURES / "w8a8" / f"{name}.safetensors", "pt") as file:
        about = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    logits = tensors.pop("expected.logits")
    (folder / "config.json").write_text(about["config"])
    save_file(tensors, folder / "model.safetensors")
    return tensors, json.loads(about["prompt"]), logits
