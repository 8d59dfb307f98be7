"""Weight formats as facts: bits, scales, which units multiply them. Imports no torch, so that the planner reads it too.

Which scheme serves one, and in which checkpoints, stands in table.py; how config.json spells it in
checkpoint_format.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import ConfigError

ROW = 4096
"""Weights of a row of a middling linear"""


@dataclass(frozen=True)
class WeightFormat:
    name: str
    bits: int
    """of a weight, scales apart"""
    group_size: int = 0
    """weights that share a scale; 0: those of an output, a row"""
    scale_bytes: float = 0.0
    """of a scale, and of a zero beside it; 0: there is none"""
    units: str = ""
    """Those of a chip that multiply it, with activations in the same type; empty, and where a chip has none: the 16-bit
    ones"""
    made_at_load: bool = False
    """A plain checkpoint is rounded to it while it loads; others need a checkpoint that holds them."""
    words: tuple[str, ...] = ()
    """other names that people ask for it by"""
    vllm_vendor: str = ""
    """whose GPUs vLLM makes it on; empty: any"""
    launched_as: float = 1.0
    """What a weight counts for where launching is weighed against computing (graph_sizes.py)"""

    @property
    def bytes_per_weight(self) -> float:
        """Scales included, in a linear of no particular size"""
        return self.num_bytes(1, ROW) / ROW

    def num_bytes(self, outputs: int, inputs: int) -> float:
        """Of a linear's weight, scales included."""
        return outputs * inputs * self.bits / 8 + self.scale_bytes * outputs * inputs / (self.group_size or inputs)


FORMATS = {
    one.name: one
    for one in (
        WeightFormat("bf16", 16),
        WeightFormat("fp16", 16),
        WeightFormat("fp32", 32),
        # computes in half the time, and takes twice the launches
        WeightFormat("fp8", 8, 0, 4, "fp8", made_at_load=True, launched_as=0.25),
        WeightFormat("ptpc_fp8", 8, 0, 4, "fp8", made_at_load=True, vllm_vendor="amd", launched_as=0.25),
        WeightFormat("mxfp4", 4, 32, 1, "fp4"),
        WeightFormat("int4", 4, 128, 2.5, words=("awq", "gptq")),
        WeightFormat("int8", 8, 0, 4, "int8"),
    )
}
"""By name. bf16 also stands for the model's own dtype, whichever that is; ptpc_fp8 is fp8 with a scale a row where fp8
may have one a tensor; int4 has scales of 16 bits and a zero for 128 weights where config.json says nothing else"""
PLAIN = FORMATS["bf16"]
MADE_AT_LOAD = tuple(one.name for one in FORMATS.values() if one.made_at_load)


def find_format(name: str) -> WeightFormat:
    """Raises ConfigError for a format that is none of ours."""
    if name not in FORMATS:
        raise ConfigError(f"weight format must be one of {', '.join(FORMATS)}; got {name!r}")
    return FORMATS[name]
