"""Lists the weight formats with their facts: bits, scales, and which units of a chip multiply them.

Imports no torch, since the planner reads it too. table.py says which scheme serves a format, checkpoint_format.py how
config.json spells it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from headrace.errors import ConfigError

ROW = 4096
"""weights of an output in a linear of typical size"""


@dataclass(frozen=True)
class WeightFormat:
    """Holds the facts of one format."""

    name: str
    bits: int
    """of a weight, without its scale"""
    group_size: int = 0
    """weights of an output that share a scale; 0: all of them"""
    outputs_per_scale: int = 1
    """outputs of which `group_size` weights each share a scale"""
    scale_bytes: int = 0
    """of a scale; 0: there are none"""
    zero_bits: int = 0
    """of a zero point beside it; 0: there are none"""
    any_order: bool = False
    """Inputs that share a scale need not be neighbours."""
    tiled: Literal["", "experts", "all"] = ""
    """which weights a GPU holds in tiles (kernels/tiled.py); the others it holds as they are stored"""
    widened: bool = False
    """A GPU holds those that are not in tiles in 16 bits, since it cannot multiply them as they are stored."""
    units: str = ""
    """the chip's units that multiply it, with activations of the same type; empty, or missing on a chip: those for 16
    bits"""
    made_at_load: bool = False
    """An unquantized checkpoint can be rounded to it while it loads; the others must be in the checkpoint."""
    words: tuple[str, ...] = ()
    """other names that people ask for it by"""
    vllm_vendor: str = ""
    """vendor of the GPUs for which vLLM has it; empty: all"""
    launched_as: float = 1.0
    """share of a 16-bit weight that one counts for where computing is weighed against launching (graph_sizes.py)"""

    @property
    def is_fp4(self) -> bool:
        """Tell whether weights are floats of 4 bits."""
        return self.units == "fp4"

    @property
    def in_blocks(self) -> bool:
        """Tell whether fp8 has a scale a block of inputs."""
        return self.bits == 8 and self.scale_bytes == 4 and self.group_size > 0

    @property
    def bytes_per_weight(self) -> float:
        """Return the bytes of a weight in a checkpoint, scales included, in a linear of typical size."""
        return self.num_bytes(1, ROW) / ROW

    def num_bytes(self, outputs: int, inputs: int) -> float:
        """Return the bytes of a linear's weight in a checkpoint, scales included; resident.py counts those on a GPU."""
        scales = outputs / self.outputs_per_scale * inputs / (self.group_size or inputs)
        return outputs * inputs * self.bits / 8 + (self.scale_bytes + self.zero_bits / 8) * scales


FORMATS = {
    one.name: one
    for one in (
        WeightFormat("bf16", 16),
        WeightFormat("fp16", 16),
        WeightFormat("fp32", 32),
        # computes in half the time, and takes twice the launches
        WeightFormat("fp8", 8, scale_bytes=4, units="fp8", made_at_load=True, launched_as=0.25),
        WeightFormat("ptpc_fp8", 8, scale_bytes=4, units="fp8", made_at_load=True, vllm_vendor="amd", launched_as=0.25),
        WeightFormat("mxfp4", 4, 32, scale_bytes=1, tiled="all", units="fp4"),
        WeightFormat("nvfp4", 4, 16, scale_bytes=1, tiled="all", units="fp4"),
        WeightFormat("int4", 4, 128, scale_bytes=2, zero_bits=4, tiled="all", words=("awq", "gptq")),
        WeightFormat("int8", 8, scale_bytes=4, tiled="experts", units="int8"),
        WeightFormat("w8a16", 8, 128, scale_bytes=2, tiled="all"),
    )
}
"""the formats by name. bf16 also stands for any dtype that the model itself has; ptpc_fp8 has a scale an output, where
fp8 may have one a tensor; int4 (2 and 3 bits are held as 4) and w8a16 multiply activations of 16 bits, and have the
group size and zeros that config.json says."""
PLAIN = FORMATS["bf16"]
MADE_AT_LOAD = tuple(one.name for one in FORMATS.values() if one.made_at_load)


Setting = str | int | float | bool | tuple[int, ...]


@dataclass(frozen=True)
class LinearFormat:
    """Says how one linear is held: the facts of its format, and what reads the checkpoint's tensors of it."""

    format: WeightFormat = PLAIN
    layout: str = "plain"
    """a key of table.SCHEMES"""
    settings: tuple[tuple[str, Setting], ...] = ()
    """keyword arguments of the function that makes the scheme, sorted by name"""
    asked_bits: int = field(default=0, compare=False)
    """of activations, for which config.json asks and which keep 16 here; 0: it asks for nothing else"""

    def __str__(self) -> str:
        """Return `int4 (group_size 64, ...)`."""
        settings = ", ".join(f"{name} {value}" for name, value in self.settings)
        return f"{self.format.name} ({settings})" if settings else self.format.name


UNQUANTIZED = LinearFormat()


def linear_format(format: WeightFormat, layout: str, **settings: Setting) -> LinearFormat:
    """Return the LinearFormat with these settings."""
    return LinearFormat(format, layout, tuple(sorted(settings.items())))


def rounded(name: str) -> LinearFormat:
    """Return how the linears of an unquantized checkpoint are held that is rounded to a format of MADE_AT_LOAD."""
    scale = "channel" if name == "ptpc_fp8" else "tensor"
    return linear_format(FORMATS[name], "fp8_stored", scale=scale, made_at_load=True)


def find_format(name: str) -> WeightFormat:
    """Return the format of that name. Raises ConfigError if there is none."""
    if name not in FORMATS:
        raise ConfigError(f"weight format must be one of {', '.join(FORMATS)}; got {name!r}")
    return FORMATS[name]
