"""`headrace quantize`: reads the flags, writes a quantized checkpoint (convert/), and prints what was lost."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import FlagParser, build_config
from headrace.errors import ConfigError
from headrace.knobs import check_knobs, knob

if TYPE_CHECKING:
    from headrace.convert.quantize import Outcome

EXAMPLES = """\
  headrace quantize demo --output-dir demo-fp8 --quant-scheme fp8_channel
  headrace quantize meta-llama/Llama-3.1-8B-Instruct --output-dir llama-w4a16 --quant-scheme w4a16 --group-size 64
  headrace quantize --model_dir ./model --output_dir ./model-fp8 --quant_scheme w_fp8_a_fp8"""
OF_QUARK = {
    "w_fp8_a_fp8": "fp8",
    "ptpc_fp8": "fp8_channel",
    "w_int4_per_group_sym": "w4a16",
    "w_mxfp4_a_mxfp4": "mxfp4",
    "w_mxfp4": "mxfp4",
}
"""Quark's names of schemes -> ours"""
SCHEME_NAMES = ("fp8", "fp8_channel", "fp8_block", "int8", "w4a16", "mxfp4")


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """Holds the command's flags, some of which are those of Quark's script, by name."""

    model: str = knob("", "The unquantized model: a folder or a Hugging Face id.", aliases=("--model-dir",))
    output_dir: str = knob("", "Folder for the quantized model: new, empty, or begun by the same command.")
    quant_scheme: str = knob(
        "fp8",
        "fp8: weights with a scale a tensor, activations with one a token. fp8_channel: a scale an output. fp8_block: "
        "blocks of 128x128. int8: weights and activations of 8 bits. w4a16: integers of 4 bits in groups. mxfp4: "
        "floats of 4 bits in groups of 32.",
        choices=(*SCHEME_NAMES, *OF_QUARK),
    )
    group_size: int | None = knob(None, "Inputs that share a scale in w4a16; -1: all (default: 128).", minimum=-1)
    device: str | None = knob(
        None, "Where weights are rounded (default: a GPU if there is one).", choices=("cpu", "cuda")
    )
    revision: str | None = knob(None, "Branch, tag or commit of a Hugging Face id.")
    download_dir: str | None = knob(None, "Folder of the hub's cache.")
    kv_cache_dtype: str = knob("auto", "auto alone: scales of an fp8 KV cache need calibration.", group="Quark's")
    num_calib_data: int = knob(0, "Not used: no scheme here needs calibration.", minimum=0, group="Quark's")
    model_export: str = knob(
        "compressed-tensors", "What is written is always compressed-tensors in safetensors.", group="Quark's"
    )
    weight_matrix_merge: bool = knob(False, "Not accepted: matrices are never merged.", group="Quark's")
    multi_gpu: bool = knob(False, "Not used: one device holds one layer at a time.", group="Quark's")

    def __post_init__(self) -> None:
        check_knobs(self)
        for name in ("model", "output_dir"):
            if not getattr(self, name):
                raise ConfigError(f"--{name.replace('_', '-')} is missing; `headrace quantize --help` has examples")
        if self.kv_cache_dtype != "auto":
            raise ConfigError(
                f"--kv-cache-dtype {self.kv_cache_dtype}: a checkpoint's scales of a KV cache need calibration, which "
                "this command does not do; accepted: auto, and `headrace serve --kv-cache-dtype fp8`, which needs none"
            )
        if self.model_export not in ("compressed-tensors", "quark_safetensors", "hf_format"):
            raise ConfigError(f"--model-export must be compressed-tensors, got {self.model_export!r}")
        if self.weight_matrix_merge:
            raise ConfigError("--weight-matrix-merge is not accepted: every linear keeps its own tensors")

    @property
    def scheme(self) -> str:
        """Our name of the scheme."""
        return OF_QUARK.get(self.quant_scheme, self.quant_scheme)

    def notes(self) -> list[str]:
        """Return a line for each flag of Quark's that has another effect here, or none."""
        lines = []
        if self.quant_scheme in OF_QUARK:
            how = (
                "activations get a scale for each token as they come" if "fp8" in self.scheme else "16-bit activations"
            )
            lines.append(f"--quant-scheme {self.quant_scheme} is {self.scheme} here: {how}.")
        if self.num_calib_data:
            lines.append(f"--num-calib-data {self.num_calib_data} has no effect: nothing here needs calibration.")
        if self.model_export != "compressed-tensors":
            lines.append(f"--model-export {self.model_export}: what is written is compressed-tensors.")
        if self.multi_gpu:
            lines.append("--multi-gpu has no effect: one device holds one layer at a time.")
        return lines


def build_parser() -> FlagParser:
    """Return the parser of the command's flags."""
    summary = "Write a model in fewer bits, by rounding each weight to the nearest number, and say what that changed."
    parser = FlagParser("quantize", summary, EXAMPLES)
    parser.add_knobs(QuantizeOptions)
    return parser


def main(argv: list[str]) -> int:
    """Run the command. Killed, it goes on where it was when it is run again."""
    options = build_config(QuantizeOptions, build_parser().parse(argv))

    import torch

    from headrace.convert.quantize import quantize
    from headrace.convert.schemes import find_scheme
    from headrace.hub import resolve_model_folder

    scheme = find_scheme(options.scheme, options.group_size)
    for line in options.notes():
        print(line, file=sys.stderr)
    folder = resolve_model_folder(options.model, options.revision, options.download_dir)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    output = Path(options.output_dir).expanduser()
    print_outcome(quantize(folder, output, scheme, device), output)
    return 0


def print_outcome(outcome: Outcome, output: Path) -> None:
    """Print the relative error of each layer's weights, what was kept, and the sizes."""
    layers: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for linear, error in outcome.errors.items():
        found = re.search(r"layers\.(\d+)\.(.*)", linear)
        layers[found[1] if found else "-"].append((error, found[2] if found else linear))
    print(f"{'layer':>5}  {'linears':>7}  {'error':>8}  {'largest':>8}  of")
    for layer, linears in layers.items():
        worst, name = max(linears)
        mean = sum(error for error, _ in linears) / len(linears)
        print(f"{layer:>5}  {len(linears):>7}  {mean:>8.3%}  {worst:>8.3%}  {name}")
    print("error: the norm of what changed over the norm of the weight, the mean of a layer's linears.")
    kept = Counter((re.sub(r"\.\d+(?=\.)", ".*", name), why) for name, why in outcome.kept.items())
    for (name, why), count in kept.items():
        print(f"kept: {name}{f' x {count}' if count > 1 else ''} ({why})")
    before, after = outcome.bytes_before, outcome.bytes_after
    print(f"{before / 1e6:,.1f} MB -> {after / 1e6:,.1f} MB ({after / before:.1%}) in {output}")
