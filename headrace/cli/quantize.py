"""`headrace quantize`: reads the flags, writes a quantized checkpoint (convert/), and prints what was lost."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import FlagParser, build_config
from headrace.errors import ConfigError, TokenizerError
from headrace.knobs import check_knobs, knob

if TYPE_CHECKING:
    from headrace.convert.quantize import Outcome
    from headrace.convert.texts import Texts

EXAMPLES = """\
  headrace quantize demo --output-dir demo-fp8 --quant-scheme fp8_channel
  headrace quantize meta-llama/Llama-3.1-8B-Instruct --output-dir llama-w4a16 --quant-scheme w4a16_gptq --format gptq
  headrace quantize --model_dir ./model --output_dir ./model-fp8 --quant_scheme w_fp8_a_fp8"""
OF_QUARK = {
    "w_fp8_a_fp8": "fp8",
    "ptpc_fp8": "fp8_channel",
    "w_int4_per_group_sym": "w4a16",
    "w_mxfp4_a_mxfp4": "mxfp4",
    "w_mxfp4": "mxfp4",
}
"""Quark's names of schemes -> ours"""
SCHEME_NAMES = ("fp8", "fp8_channel", "fp8_block", "int8", "w4a16", "w4a16_gptq", "w4a16_awq", "mxfp4")
FORMATS = ("compressed-tensors", "quark", "awq", "gptq")
EXPORTS = {"compressed-tensors": "compressed-tensors", "quark_safetensors": "quark", "hf_format": "quark"}
"""what `--model-export` says, which is Quark's -> the format"""
BAR = "█"
BAR_WIDTH = 24
"""of the largest"""


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """Holds the command's flags, some of which are those of Quark's script, by name."""

    model: str = knob("", "The unquantized model: a folder or a Hugging Face id.", aliases=("--model-dir",))
    output_dir: str = knob("", "Folder for the quantized model: new, empty, or begun by the same command.")
    quant_scheme: str = knob(
        "fp8",
        "fp8: weights with a scale a tensor, activations with one a token. fp8_channel: a scale an output. fp8_block: "
        "blocks of 128x128. int8: weights and activations of 8 bits. w4a16: integers of 4 bits in groups, each weight "
        "rounded to the nearest; w4a16_gptq and w4a16_awq calibrate. mxfp4: floats of 4 bits in groups of 32.",
        choices=(*SCHEME_NAMES, *OF_QUARK),
    )
    format: str | None = knob(
        None, "Whose tensors and config.json are written (default: compressed-tensors).", choices=FORMATS
    )
    group_size: int | None = knob(None, "Inputs that share a scale in w4a16; -1: all (default: 128).", minimum=-1)
    act_order: bool = knob(True, "GPTQ rounds inputs in the order of their size. Groups stay in place either way.")
    kv_cache_dtype: str = knob(
        "auto", "fp8: calibrate the scales of an fp8 KV cache, and write them.", choices=("auto", "fp8", "fp8_e4m3")
    )
    calib_data: str | None = knob(
        None, "Calibration text: a file of text, or of JSON documents by line (default: a sample)."
    )
    num_calib_data: int = knob(128, "Calibration texts, of --seq-len tokens each.", minimum=0)
    num_eval_data: int = knob(
        8, "Texts of the same data on which hidden states and perplexity are measured; 0: none.", minimum=0
    )
    seq_len: int = knob(512, "Tokens of a text, at most the model's context.", minimum=16)
    device: str | None = knob(
        None, "Where weights are rounded (default: a GPU if there is one).", choices=("cpu", "cuda")
    )
    revision: str | None = knob(None, "Branch, tag or commit of a Hugging Face id.")
    download_dir: str | None = knob(None, "Folder of the hub's cache.")
    model_export: str = knob(
        "compressed-tensors",
        "quark_safetensors and hf_format are --format quark.",
        choices=(*EXPORTS,),
        group="Quark's",
    )

    def __post_init__(self) -> None:
        check_knobs(self)
        for name in ("model", "output_dir"):
            if not getattr(self, name):
                raise ConfigError(f"--{name.replace('_', '-')} is missing; `headrace quantize --help` has examples")

    @property
    def scheme(self) -> str:
        """Our name of the scheme."""
        return OF_QUARK.get(self.quant_scheme, self.quant_scheme)

    @property
    def kv_scales(self) -> bool:
        """True if scales of an fp8 KV cache are asked for."""
        return self.kv_cache_dtype != "auto"

    def notes(self) -> list[str]:
        """Return a line for each flag of Quark's that has another effect here, or none."""
        lines = []
        if self.quant_scheme in OF_QUARK:
            how = (
                "activations get a scale for each token as they come" if "fp8" in self.scheme else "16-bit activations"
            )
            lines.append(f"--quant-scheme {self.quant_scheme} is {self.scheme} here: {how}.")
        return lines


def build_parser() -> FlagParser:
    """Return the parser of the command's flags."""
    summary = "Write a model in fewer bits, and say what that changed."
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

    written_as = options.format or EXPORTS[options.model_export]
    scheme = find_scheme(options.scheme, options.group_size, written_as, options.kv_scales, options.act_order)
    for line in options.notes():
        print(line, file=sys.stderr)
    folder = resolve_model_folder(options.model, options.revision, options.download_dir)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    output = Path(options.output_dir).expanduser()
    print_outcome(quantize(folder, output, scheme, device, _texts(options, folder, scheme.calibrated)), output)
    return 0


def _texts(options: QuantizeOptions, folder: Path, needed: bool) -> Texts | None:
    """Return the texts to calibrate and to measure with; None where nothing is to be measured, or the model has no
    tokenizer, unless texts are `needed`."""
    from headrace.convert.texts import read_texts
    from headrace.engine.tokenizer import Tokenizer
    from headrace.models.served import read_served_config

    if not needed and not options.num_eval_data:
        return None
    config = read_served_config(folder)
    file = None if options.calib_data is None else Path(options.calib_data).expanduser()
    try:
        tokenizer = Tokenizer.from_folder(folder)
    except TokenizerError as error:
        if needed:
            raise
        print(f"Hidden states and perplexity are not measured: {error}", file=sys.stderr)
        return None
    length = min(options.seq_len, config.max_position_embeddings)
    rows = options.num_calib_data if needed else 0
    return read_texts(file, tokenizer, config.vocab_size, length, rows, options.num_eval_data)


def print_outcome(outcome: Outcome, output: Path) -> None:
    """Print for each layer the relative error of its weights, and how far hidden states have moved behind it; then
    perplexity, what was kept, and the sizes."""
    layers: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for linear, error in outcome.errors.items():
        found = re.search(r"layers\.(\d+)\.(.*)", linear)
        layers[found[1] if found else "-"].append((error, found[2] if found else linear))
    most = max(outcome.moved.values(), default=0.0)
    print(f"{'layer':>5}  {'linears':>7}  {'error':>8}  {'largest':>8}  {'of':<24}{'  hidden states' if most else ''}")
    for layer, linears in layers.items():
        worst, name = max(linears)
        mean = sum(error for error, _ in linears) / len(linears)
        moved = outcome.moved.get(int(layer)) if layer.isdigit() else None
        picture = "" if moved is None or not most else f"  {moved:>6.2%} {BAR * round(BAR_WIDTH * moved / most)}"
        print(f"{layer:>5}  {len(linears):>7}  {mean:>8.3%}  {worst:>8.3%}  {name:<24}{picture}".rstrip())
    print("error: the norm of what changed over the norm of the weight, the mean of a layer's linears.")
    if most:
        print("hidden states: the same of what a layer hands on, with all changes so far, on held-out text.")
    if outcome.perplexity:
        before, after = outcome.perplexity
        print(f"perplexity of held-out text: {before:.4g} -> {after:.4g} ({after / before - 1:+.2%})")
    kept = Counter((re.sub(r"\.\d+(?=\.)", ".*", name), why) for name, why in outcome.kept.items())
    for (name, why), count in kept.items():
        print(f"kept: {name}{f' x {count}' if count > 1 else ''} ({why})")
    if outcome.unreached:
        print(f"calibration reached none of: {', '.join(outcome.unreached)}")
    if outcome.nearest:
        print(f"rounded to nearest, for want of calibration: {', '.join(outcome.nearest)}")
    for note in outcome.notes:
        print(note)
    size, smaller = outcome.bytes_before, outcome.bytes_after
    print(f"{size / 1e6:,.1f} MB -> {smaller / 1e6:,.1f} MB ({smaller / size:.1%}) in {output}")
