"""Looks up what a request names: the model, the GPUs and their number, and the number types that follow from them.

A `Scenario` is what layouts are searched for; this module ranks nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from headrace.hub import DEMO_FOLDER, DEMO_MODEL
from headrace.planner.catalogue import CheckpointConfig, catalogue, find_config
from headrace.planner.chips import Chip, find_chip, this_machine
from headrace.planner.decisions import DTYPE_ALIASES, activation_dtype
from headrace.planner.engines import default_block_size, graph_decision, model_gaps
from headrace.planner.fp8_cache import FP8, LOSSLESS, OFFERED, cache_for, cached_bytes, runs_fp8_cache
from headrace.planner.plan_request import PlanRequest
from headrace.planner.record import Decision
from headrace.planner.shapes import ModelShape
from headrace.planner.speculation import plan_draft
from headrace.quantization.formats import MADE_AT_LOAD, PLAIN, find_format
from headrace.speculation import DRAFT_MODEL, Speculation

HUB = "https://huggingface.co/"
USUAL_CONCURRENCY = {"latency": 1, "interactive": 32}
"""Requests in flight by objective, where nobody says how many; for throughput, as many as the cache holds."""


@dataclass(frozen=True)
class Scenario:
    """Holds a request with its model and GPUs, and everything that is the same for all layouts of them."""

    request: PlanRequest
    checkpoint: ModelShape
    """the model as its checkpoint holds it"""
    config: CheckpointConfig
    chip: Chip
    num_gpus: int
    """how many this plan may use"""
    machine_gpus: int | None = None
    """how many this machine has, where the plan is for it"""

    @classmethod
    def of(cls, request: PlanRequest, machine: tuple[Chip, int] | None = None) -> Scenario:
        """Look up the model and GPUs of a request. Raises ConfigError for what is unknown. `machine`: what `gpu="auto"`
        means, default this machine."""
        config = find_config(request.model)
        shape = config.shape
        if request.gpu == "auto":
            chip, count = machine or this_machine()
            return cls(request, shape, config, chip, request.num_gpus or count, count)
        return cls(request, shape, config, find_chip(request.gpu), request.num_gpus or 1)

    def asking(self, **changes: Any) -> Scenario:
        """Return the same with changes to the request."""
        return replace(self, request=self.request.replace(**changes))

    @property
    def engine(self) -> str:
        return self.request.engine

    @property
    def concurrency(self) -> int | None:
        """Requests in flight over all replicas; None: as many as the cache holds."""
        usual = None if self.request.request_rate else USUAL_CONCURRENCY.get(self.request.objective)
        return self.request.concurrency or usual

    @property
    def tokens(self) -> int:
        """Tokens of one request at its end."""
        return self.request.prompt_len + self.request.answer_len

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that has to fit."""
        return max(self.request.max_model_len or 0, self.tokens)

    @property
    def context(self) -> int:
        return self.request.max_model_len or self.checkpoint.spec.max_position_embeddings

    @property
    def pinned_gpus(self) -> int | None:
        """GPUs that the request names or its pinned layout takes; None: it says nothing of them."""
        request = self.request
        pins = (request.tensor_parallel_size, request.pipeline_parallel_size, request.data_parallel_size)
        layout = None if pins == (None, None, None) else math.prod(pin or 1 for pin in pins)
        return request.num_gpus or self.machine_gpus or layout

    @property
    def wanted_format(self) -> str | None:
        """The format that the request asks for; None: the checkpoint's."""
        return self.request.weight_format(self.checkpoint.weight_format)

    @cached_property
    def weight_format(self) -> str:
        """Of the linears, as the engine will hold them."""
        return self.checkpoint.format_for(self.wanted_format)

    @cached_property
    def shape(self) -> ModelShape:
        """The model as the engine will hold it."""
        return self.checkpoint.converted(self.wanted_format).held_in(self.dtype.value)

    @cached_property
    def dtype(self) -> Decision:
        asked = self.request.dtype
        if asked != "auto":
            return Decision("dtype", DTYPE_ALIASES.get(asked, asked), "given", source="user")
        return Decision("dtype", *activation_dtype(self.checkpoint.dtype, self.chip.device_type))

    @cached_property
    def kv_cache(self) -> Decision:
        """`kv_cache_dtype`."""
        field, asked, dtype = "kv_cache_dtype", self.request.kv_cache_dtype, self.dtype.value
        if asked != "auto":
            return Decision(field, FP8 if asked == "fp8" else asked, "given", source="user")
        has_units = "fp8" in self.chip.flops
        if self.checkpoint.fp8_kv_cache and has_units:
            return Decision(field, FP8, "the checkpoint brings scales for it")
        if self.engine == "headrace" and runs_fp8_cache(dtype, self.chip):
            value, why, other = cache_for(self.request.objective, dtype)
            return Decision(field, value, why, other or OFFERED)
        return Decision(field, dtype, LOSSLESS, OFFERED if has_units else "")

    @property
    def kv_bytes(self) -> float:
        """Bytes of a cached number."""
        return cached_bytes(self.kv_cache.value)

    @cached_property
    def block_size(self) -> int:
        return self.request.block_size or default_block_size(self.engine, self.shape, self.chip)

    @cached_property
    def graph_mode(self) -> str:
        """cudagraph_mode, as far as it does not depend on the attention backend."""
        return str(graph_decision(self.request, self.chip, "").value)

    @cached_property
    def draft(self) -> ModelShape | None:
        """The model that guesses tokens beside this one, if headrace runs one."""
        speculation, draft = self._guesses
        return draft if speculation is not None and speculation.method == DRAFT_MODEL else None

    @property
    def decode_lens(self) -> tuple[int, ...]:
        """The numbers of tokens that a running request may have in a step of headrace's."""
        speculation, _ = self._guesses
        return (1,) if speculation is None else tuple(1 + length for length in speculation.lengths)

    @cached_property
    def _guesses(self) -> tuple[Speculation | None, ModelShape | None]:
        if self.engine != "headrace":
            return None, None
        return plan_draft(self.request.speculative_config, self.shape, self.dtype.value)

    @property
    def converts(self) -> bool:
        """Tell whether the linears are in another format than this checkpoint's: rounded at load, or another's."""
        return self.weight_format != self.checkpoint.weight_format

    @property
    def quantization(self) -> Decision:
        wanted, own, flops = self.weight_format, self.checkpoint.weight_format, self.chip.flops
        held, how = self.shape.format_of(wanted), ""
        if self.engine == "headrace" and held.tiled == "all":
            how = "; weights alone are narrow, products run in 16 bits"
        elif wanted != PLAIN.name and held.units not in flops:
            how = f"; products run in 16 bits, as {self.chip.name} has no units for it"
        if self.request.quantization is not None:
            return Decision("quantization", wanted, "given" + how, source="user")
        if own != PLAIN.name:
            return Decision("quantization", own, "the checkpoint's" + how)
        runner_up = "fp8: half the bytes a token, rounded" if "fp8" in flops else ""
        return Decision("quantization", "none", "the checkpoint's own 16 bits: nothing is rounded unasked", runner_up)

    def format_problem(self) -> str:
        """Say why the requested weight format cannot be had; empty: it can, or none was requested."""
        wanted, own, chip = self.wanted_format, self.checkpoint.weight_format, self.chip
        if wanted is None or not self.converts:
            return ""
        if own != PLAIN.name:
            return f"quantization {self.request.quantization}: the checkpoint holds {own} already and keeps it"
        units, vendor = find_format(wanted).units, find_format(wanted).vllm_vendor
        if wanted in MADE_AT_LOAD and units not in chip.flops:  # of stored ones the weights alone may be narrow
            kinds = ", ".join(chip.flops)
            return f"quantization {self.request.quantization}: {chip.title} has no {units} units ({kinds})"
        if self.engine == "vllm" and vendor not in ("", chip.vendor):
            return f"quantization {wanted}: vLLM has it for {vendor.upper()} GPUs only; {MADE_AT_LOAD[0]} runs here"
        return ""

    def problems(self) -> list[str]:
        """Say why no layout can do what was asked; empty: one may."""
        request, chip, context = self.request, self.chip, self.checkpoint.spec.max_position_embeddings
        length, budget = request.max_model_len, request.max_num_batched_tokens
        problems = [self.format_problem()]
        if self.kv_cache.value == FP8 and chip.vendor != "cpu" and "fp8" not in chip.flops:
            problems.append(f"kv_cache_dtype fp8: {chip.title} has no fp8 units; fp8_e5m2 or auto run")
        if self.longest > context:
            problems.append(f"{self.longest} tokens are more than the model's context of {context}")
        elif length is not None and self.tokens > length:
            problems.append(f"max_model_len {length} is less than a prompt and an answer of {self.tokens} tokens")
        if not request.enable_chunked_prefill and budget is not None and budget < self.context:
            problems.append(
                f"max_num_batched_tokens {budget} is less than max_model_len ({self.context}), and without chunked "
                "prefill a whole prompt must fit into one step"
            )
        return [problem for problem in problems if problem]

    def model_gaps(self) -> list[str]:
        """Say why headrace cannot serve the model today; empty: it can."""
        return model_gaps(self.config.config)

    @property
    def model_id(self) -> str:
        """The model as the engine takes it: a folder or a hub id.

        The catalogue's hub id stands for a name of the catalogue. Another checkpoint of such a model
        (`llama-3.1-8b-fp8`) has an id that is not known here: that is `<llama-3.1-8b-fp8>`.
        """
        asked, source = self.request.model, self.config.source
        if asked == DEMO_MODEL and self.engine != "headrace":
            return str(DEMO_FOLDER)
        if asked.endswith(".json"):
            return str(Path(asked).parent)
        if not source.startswith(HUB) or "/" in asked:
            return asked
        entry = catalogue()[self.config.name]
        if asked.lower() in (entry.name, *entry.aliases):
            return "/".join(source.removeprefix(HUB).split("/")[:2])
        return f"<{asked}>"
