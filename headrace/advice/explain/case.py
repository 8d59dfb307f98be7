"""Puts a command line together with the GPUs and the model that it is for, and answers the questions of remarks.

Sizes are computed from config.json and data sheets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from headrace.advice.explain.command_fields import AUTO_LENGTH, CommandFields, fields_of
from headrace.advice.explain.command_line import CommandLine
from headrace.advice.explain.setting import Setting
from headrace.config import QUANTIZATIONS
from headrace.errors import HeadraceError
from headrace.planner.catalogue import FORMAT_WORDS, find_config
from headrace.planner.chips import GIB, Chip, find_chip
from headrace.planner.deployment import Deployment
from headrace.planner.layouts import reasons
from headrace.planner.memory_map import memory_map
from headrace.planner.parallel import Parallel
from headrace.planner.shapes import ModelShape

PLAIN = 2
"""Bytes of a weight or a cached number without a format."""
WORKING_SHARE = 0.75
"""The share of a GPU's memory that weights may take so that a useful KV cache is left."""
LEAST_SHARE = 0.95
"""The share that they may take at all."""
GPUS_PER_NODE = 8
"""The number that is assumed where no chip is known."""
MANY_REQUESTS = 512
"""Requests in flight over one copy of the weights, from which a latent cache is better split by requests than copied to
every GPU: AMD's guide puts the crossover at 256 to 512, and the cost model agrees."""
GUESSED_CHIP = "mi300x"
"""The GPU that is assumed where variables are AMD's and no GPU is named."""

MASTER = "VLLM_ROCM_USE_AITER"
"""The switch without which AITER's other switches do nothing."""
OVERRIDES = ("--hf-overrides", "--rope-scaling", "--rope-theta")
"""Flags that change config.json, and may make the context longer; how long is not computed here."""


@dataclass(frozen=True)
class Case:
    """Holds a command line, what it asks for, and the chip and the model where they are known."""

    line: CommandLine
    asked: CommandFields
    chip: Chip | None
    shape: ModelShape | None
    chip_guessed: bool = False

    @property
    def vendor(self) -> str:
        """The chip's vendor (`amd`, `nvidia` or `cpu`), or "" where no chip is known."""
        return self.chip.vendor if self.chip is not None else ""

    @property
    def gpu(self) -> str:
        """The GPU's name in a sentence."""
        return self.chip.title if self.chip is not None else "this GPU"

    @property
    def tp(self) -> int:
        """The tensor-parallel size; all GPUs of a node where the shell or a file decides, as it is likely above one."""
        unknown = self.may_be_set_elsewhere("--tensor-parallel-size")
        return self.asked.tensor_parallel_size or (self.gpus_per_node if unknown else 1)

    @property
    def pp(self) -> int:
        return self.asked.pipeline_parallel_size or 1

    @property
    def dp(self) -> int:
        return self.asked.data_parallel_size or (2 if self.may_be_set_elsewhere("--data-parallel-size") else 1)

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    def may_be_set_elsewhere(self, *keys: str) -> bool:
        """Return whether the value of one of these is unknown: the shell expands it, or it may stand in a file."""
        settings = [self.line.find(key) for key in keys]
        return any(self.line.may_have_more_flags if setting is None else setting.is_unexpanded for setting in settings)

    def parallel(self, tp: int | None = None) -> Parallel:
        """Return the layout that is asked for, or that with another tensor-parallel size.

        Data-parallel ranks of a mixture of experts share its experts: that is what vLLM's flag means there.
        """
        moe = self.shape is not None and self.shape.is_moe
        spread = bool(self.asked.enable_expert_parallel) and moe
        return Parallel(tp or self.tp, self.pp, self.dp, ep=spread, dp_attention=moe and self.dp > 1)

    def tp_problems(self, tp: int) -> list[str]:
        """Return why the model cannot be split over `tp` GPUs, without what would be wrong with one GPU too."""
        if self.shape is None:
            return []
        chip = self.chip or find_chip(GUESSED_CHIP)  # of which the GPUs of a node count alone
        anyway = reasons(self.parallel(1), self.shape, chip)
        return [reason for reason in reasons(self.parallel(tp), self.shape, chip) if reason not in anyway]

    def tp_near(self, wanted: int, most: int | None = None) -> int | None:
        """Return the tensor-parallel size next to `wanted`, smaller ones first, that the model can be split over.

        Its GPUs must hold the weights. None: there is no such size up to `most`, or on one node.
        """
        others = self.gpus // self.tp
        least = self.fewest_gpus(LEAST_SHARE) or 1
        sizes = [*range(wanted, 0, -1), *range(wanted + 1, self.gpus_per_node + 1)]
        able = (tp for tp in sizes if tp <= (most or self.gpus_per_node) and tp * others >= least)
        return next((tp for tp in able if not self.tp_problems(tp)), None)

    @property
    def stretches(self) -> bool:
        """The line allows a context longer than the model's, or changes the model's."""
        allows = self.on("VLLM_ALLOW_LONG_MAX_MODEL_LEN") or any(map(self.line.find, OVERRIDES))
        return self.line.engine == "vllm" and allows

    @property
    def shortens_context(self) -> bool:
        """The engine takes the longest context that fits: headrace without a length, vLLM for `auto`."""
        told = self.line.value("--max-model-len") in AUTO_LENGTH
        return self.asked.max_model_len is None and (told or self.line.engine == "headrace")

    @property
    def gpus_per_node(self) -> int:
        return self.chip.gpus_per_node if self.chip is not None else GPUS_PER_NODE

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def is_server(self) -> bool:
        return self.line.program == "serve"

    def on(self, key: str) -> bool:
        setting = self.line.find(key)
        return setting is not None and setting.on

    def off(self, key: str) -> bool:
        setting = self.line.find(key)
        return setting is not None and setting.off

    @property
    def aiter(self) -> bool:
        master = self.line.find(MASTER)
        return master is not None and (master.on or master.is_unexpanded)

    @property
    def checkpoint_format(self) -> str:
        """The format in which weights are published: bf16, fp8, mxfp4, int4, int8; "" where nothing tells."""
        return self.shape.weight_format if self.shape is not None else format_in_name(self.line.model or "")

    @property
    def weight_format(self) -> str:
        """The format in which weights are served."""
        if self.checkpoint_format in ("bf16", "") and self.asked.quantization in QUANTIZATIONS:
            return QUANTIZATIONS[self.asked.quantization]
        return self.checkpoint_format

    def deployment(self, shape: ModelShape, parallel: Parallel, weight_format: str | None = None) -> Deployment:
        """Return what the planner counts; the guessed GPU stands for one that is unknown."""
        form = weight_format or self.weight_format or shape.weight_format
        engine = "headrace" if self.line.engine == "headrace" else "vllm"
        return Deployment(shape, self.chip or find_chip(GUESSED_CHIP), parallel, form, self.kv_width, engine)

    def weight_bytes(self, weight_format: str | None = None) -> int | None:
        """Return the bytes of the model's weights, without the layers that draft tokens; None: unknown model."""
        if self.shape is None:
            return None
        return memory_map(self.deployment(self.shape, Parallel(), weight_format)).weight_bytes

    def fewest_gpus(self, share: float = WORKING_SHARE, weight_format: str | None = None) -> int | None:
        """Return the smallest power of two of GPUs that hold the weights in `share` of their memory."""
        weights = self.weight_bytes(weight_format)
        if weights is None or self.chip is None:
            return None
        count = 1
        while count * self.chip.memory_bytes * share < weights and count < 1024:
            count *= 2
        return count

    def kv_bytes(self, tokens: int, width: float = PLAIN) -> int | None:
        """Return the KV cache of one sequence, at `width` bytes a number; layers with a window keep no more than it."""
        if self.shape is None:
            return None
        values = sum(
            group.count * group.mixer.cached_values * min(tokens, group.mixer.window or tokens)
            for group in self.shape.groups
        )
        return int(values * width)

    @property
    def kv_width(self) -> float:
        return 1.0 if (self.asked.kv_cache_dtype or "").startswith("fp8") else PLAIN

    @property
    def has_windows(self) -> bool:
        return self.shape is not None and any(group.mixer.window for group in self.shape.groups)

    @property
    def is_sparse_attention(self) -> bool:
        return self.shape is not None and any(group.mixer.sparse_top_k for group in self.shape.groups)


def make_case(line: CommandLine, chip: Chip | None = None) -> Case:
    """Return the case of a command line.

    Without a chip AMD's is assumed where the line sets AMD's variables. A model of which nothing is known is None, and
    so is what a flag of the wrong type asks for.
    """
    given = [setting for setting in line.settings if not setting.is_unexpanded]
    readable = [s for s in given if s.known is None or not s.known.problem(s.value, line.engine)]
    asked, shape = fields_of(replace(line, settings=tuple(readable))), None
    if line.model is not None and line.program not in ("download", "quantize"):
        shape = _shape_of(line.model)
    if shape is not None and asked.dtype is not None:
        shape = shape.held_in(asked.dtype)
    guessed = chip is None and _hints_at_amd(line)
    return Case(line, asked, find_chip(GUESSED_CHIP) if guessed else chip, shape, guessed)


def _shape_of(model: str) -> ModelShape | None:
    """None: nothing is known of the model, or what its config.json says cannot be counted."""
    try:
        return find_config(model).shape
    except (HeadraceError, OSError, TypeError, ValueError):
        return None


def config_of(model: str) -> dict[str, Any]:
    """Return a model's config.json; it is empty where nothing is known of the model."""
    try:
        return find_config(model).config
    except (HeadraceError, OSError, ValueError):
        return {}


def _hints_at_amd(line: CommandLine) -> bool:
    settings: tuple[Setting, ...] = (*line.settings, *line.container)
    if (line.model or "").startswith("amd/"):
        return True
    if any(setting.value == "/dev/kfd" for setting in settings) or "ROCM_" in (line.value("--attention-backend") or ""):
        return True
    return any(setting.known is not None and setting.known.hardware == "amd" for setting in settings)


def format_in_name(model: str) -> str:
    """Return the format that a checkpoint's name tells: `...-FP8-KV`, `...-AWQ-INT4`, `...quantized.w4a16`; else ""."""
    words = re.split(r"[-_./ ]", model.lower())
    return next((form for word, form in FORMAT_WORDS.items() if word in words), "")


def size(count: float) -> str:
    """Return bytes as text, such as `61.5 GiB`, `288 MiB` or `70.5 KiB`."""
    for unit, least in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= least:
            value = count / least
            return f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{count:.0f} bytes"


def duration(seconds: float) -> str:
    """Return seconds as text, such as `1.5 s` or `250 ms`."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
