"""Writes the command lines of a plan, for headrace and for vLLM, with a reason for every flag and variable."""

from __future__ import annotations

import json
import shlex
from dataclasses import MISSING, dataclass, fields
from typing import Any

from headrace.planner.chips import Chip
from headrace.planner.parallel import Parallel
from headrace.planner.scenario import Scenario
from headrace.planner.search import Candidate
from headrace.planner.settings import engine_decisions
from headrace.quantization.formats import MADE_AT_LOAD

DEFAULT_GRAPH_SIZE = 512
"""Decodes in the largest step that vLLM captures unless told otherwise."""
SHUFFLED_CACHE_FROM = 32
"""Requests in flight, from which AMD's guide finds AITER's own layout of the cache faster."""
PINNED = (
    "dtype", "kv_cache_dtype", "attention_backend", "block_size", "gpu_memory_utilization", "max_model_len",
    "max_num_seqs", "max_num_batched_tokens", "compilation_config", "speculative_config",
)  # fmt: skip
"""Settings that the headrace line names only where the user did."""


@dataclass(frozen=True)
class Flag:
    """Holds a flag, or an environment variable, with its reason."""

    name: str
    value: str | None
    """None: a switch"""
    reason: str

    @property
    def words(self) -> list[str]:
        return [self.name] if self.value is None else [self.name, self.value]


@dataclass(frozen=True)
class Command:
    """Tells how to start one engine."""

    engine: str
    program: tuple[str, ...]
    variables: tuple[Flag, ...]
    flags: tuple[Flag, ...]
    notes: tuple[str, ...] = ()
    """where and how often to run it"""

    @property
    def line(self) -> str:
        """The line as one types it."""
        words = [*self.program, *(word for flag in self.flags for word in flag.words)]
        variables = [f"{variable.name}={shlex.quote(variable.value or '')}" for variable in self.variables]
        return " ".join([*variables, shlex.join(words)])


def command_for(scenario: Scenario, candidate: Candidate) -> Command:
    """Write the command that starts the scenario's engine."""
    request, parallel, chip = scenario.request, candidate.parallel, scenario.chip
    given = _given(scenario)
    settings = {entry.field: entry.value for entry in engine_decisions(scenario, candidate)}
    model = scenario.model_id
    notes: list[str] = []
    if scenario.converts and scenario.weight_format not in MADE_AT_LOAD:
        model = f"<{model.strip('<>')} in {scenario.weight_format}>"
        holds = f"a checkpoint that holds {scenario.weight_format}"
        notes.append(f"put the folder or hub id of {holds} in place of {model}")
    elif model.startswith("<"):
        notes.append(f"put the folder or hub id of {model.strip('<>')} in place of {model}")
    notes += _node_notes(request.engine, parallel, chip)
    variables: list[Flag] = []
    if request.engine == "headrace":
        flags = _headrace_flags(scenario, candidate, given)
    else:
        variables = _vllm_variables(scenario, candidate, settings)
        flags = _vllm_flags(scenario, candidate, given, settings)
    # A node's replicas are one server, except that ranks of one vLLM share the experts of a mixture.
    replicas = _replicas_on_node(parallel, chip)
    if replicas > 1 and request.engine != "headrace" and scenario.shape.is_moe:
        each = f"each with {parallel.tp * parallel.pp} of CUDA_VISIBLE_DEVICES and a --port of its own"
        notes.append(f"{replicas} servers a node, {each}, behind a balancer")
    return Command(request.engine, (request.engine, "serve", model), tuple(variables), tuple(flags), tuple(notes))


def _replicas_on_node(parallel: Parallel, chip: Chip) -> int:
    return min(parallel.replicas, max(1, chip.gpus_per_node // (parallel.tp * parallel.pp)))


def _given(scenario: Scenario) -> dict[str, Any]:
    """What the user pinned, by name."""
    request = scenario.request
    plain = {entry.name: entry.default for entry in fields(request) if entry.default is not MISSING}
    plain |= {"compilation_config": {}, "speculative_config": {}}
    return {name: getattr(request, name) for name, usual in plain.items() if getattr(request, name) != usual}


def _layout_flags(scenario: Scenario, parallel: Parallel) -> list[Flag]:
    """How the model is spread over GPUs, and rounded as it loads: both engines have the same names for it."""
    replicas = _replicas_on_node(parallel, scenario.chip)
    if scenario.engine == "vllm" and scenario.shape.is_moe:  # whose data-parallel ranks would share the experts
        replicas = 1
    count, why = replicas, "engines behind one address"
    if parallel.dp_attention:
        count, why = parallel.dp, "ranks that keep their own requests' cache and share the experts"
    flags = []
    if parallel.tp > 1:
        flags.append(Flag("--tensor-parallel-size", str(parallel.tp), "GPUs that share every layer"))
    if parallel.pp > 1:
        flags.append(Flag("--pipeline-parallel-size", str(parallel.pp), "stages of layers: they do not fit otherwise"))
    if count > 1:
        flags.append(Flag("--data-parallel-size", str(count), why))
    if parallel.ep:
        flags.append(Flag("--enable-expert-parallel", None, "whole experts on each GPU in place of slices of all"))
    if scenario.converts and scenario.weight_format in MADE_AT_LOAD:
        flags.append(Flag("--quantization", scenario.weight_format, "rounds the weights as they load"))
    return flags


def _headrace_flags(scenario: Scenario, candidate: Candidate, given: dict[str, Any]) -> list[Flag]:
    """headrace derives its settings: what it derives them from is given, and what the user pinned."""
    request, parallel = scenario.request, candidate.parallel
    flags = _layout_flags(scenario, parallel)
    per_node, replicas = scenario.chip.gpus_per_node, _replicas_on_node(parallel, scenario.chip)
    if parallel.tp * parallel.pp > per_node:
        nodes = str(-(-parallel.tp * parallel.pp // per_node))
        flags.append(Flag("--nnodes", nodes, f"machines of {per_node} GPUs over which one engine is spread"))
        flags.append(Flag("--master-addr", "$MASTER_ADDR", "the first one's address on the network between them"))
    for name in PINNED:
        if name in given:
            value = given[name]
            flags.append(Flag(_flag(name), json.dumps(value) if isinstance(value, dict) else str(value), "given"))
    # Limits that follow from what the cache holds, which headrace knows too late to derive them.
    for name in ("max_num_batched_tokens", "max_num_seqs"):
        decision = candidate.decisions[name]
        if decision.runner_up:
            flags.append(Flag(_flag(name), str(decision.value), "what the cache leaves room for"))
    why = "how many prompt tokens a step with decodes may hold"
    if request.objective == "throughput" and scenario.kv_bytes == 1 and "kv_cache_dtype" not in given:
        why += ", and an fp8 KV cache, which rounds"
    each = -(-candidate.workload.concurrency * replicas // parallel.replicas)
    return [
        *flags,
        *_switches(given),
        Flag("--objective", request.objective, why),
        Flag("--expected-input-len", str(request.prompt_len), "what /v1/plan predicts for"),
        Flag("--expected-output-len", str(request.answer_len), "what /v1/plan predicts for"),
        Flag("--expected-concurrency", str(each), "bounds the sequences, and with them the graphs"),
    ]


def _vllm_flags(
    scenario: Scenario, candidate: Candidate, given: dict[str, Any], settings: dict[str, Any]
) -> list[Flag]:
    """The same plan for vLLM 0.26."""
    parallel, chip, kv_dtype = candidate.parallel, scenario.chip, scenario.kv_cache.value
    per_node, backend = chip.gpus_per_node, settings["attention_backend"]
    flags = _layout_flags(scenario, parallel)

    def add(name: str, value: Any, reason: str) -> None:
        flags.append(Flag(name, None if value is None else str(value), reason))

    if parallel.dp_attention and parallel.gpus > per_node:
        add("--data-parallel-size-local", per_node // parallel.tp, "of these ranks run on each node")
    if parallel.pp > 1 and parallel.tp * parallel.pp > per_node:
        add("--distributed-executor-backend", "ray", "stages on several nodes")
    if kv_dtype.startswith("fp8"):
        add("--kv-cache-dtype", kv_dtype.removesuffix("_e4m3"), "one byte for each number of the cache")
    if "dtype" in given:
        add("--dtype", given["dtype"], "given")
    if backend != "auto" and chip.vendor != "cpu":
        why = "given" if "attention_backend" in given else "named, so that nothing slower is taken silently"
        add("--attention-backend", backend, why)
    if "block_size" in given or backend == "ROCM_AITER_MLA_SPARSE":
        why = "given" if "block_size" in given else "what the sparse backend takes"
        add("--block-size", scenario.block_size, why)
    if "gpu_memory_utilization" in given and chip.vendor != "cpu":
        add("--gpu-memory-utilization", f"{given['gpu_memory_utilization']:g}", "given")
    add("--max-model-len", candidate.max_model_len, "one such sequence has to fit; nothing is set aside for it")
    add("--max-num-seqs", candidate.limits.max_num_seqs, "requests that run at once on one rank")
    budget = candidate.limits.max_num_batched_tokens
    add("--max-num-batched-tokens", budget, "decodes wait for a whole step; prompts want it large")
    flags += _switches(given)
    if "speculative_config" in given:
        add("--speculative-config", json.dumps(given["speculative_config"]), "given")
    if chip.vendor != "cpu" and (graphs := _vllm_graphs(candidate, given, settings["cudagraph_mode"])):
        add("--compilation-config", json.dumps(graphs), "decode steps of the size that will run, from graphs")
    return flags


def _vllm_variables(scenario: Scenario, candidate: Candidate, settings: dict[str, Any]) -> list[Flag]:
    """vLLM's environment on AMD GPUs; on others it needs none."""
    if scenario.chip.vendor != "amd":
        return []
    parallel, cdna3 = candidate.parallel, scenario.chip.arch == "gfx942"
    flags = [Flag("VLLM_ROCM_USE_AITER", "1", "AMD's kernels, off by default: 1.7 to 3.7 times slower without")]
    if scenario.shape.is_mla and cdna3:
        flags.append(Flag("VLLM_ROCM_USE_AITER_FP4BMM", "0", "this chip has no fp4 units; some versions crash"))
    many = candidate.workload.concurrency >= SHUFFLED_CACHE_FROM
    if settings["attention_backend"] == "ROCM_AITER_FA" and many:
        why = f"AITER's own layout of the cache pays from {SHUFFLED_CACHE_FROM} requests at once"
        flags.append(Flag("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1", why))
    flags.append(Flag("HIP_FORCE_DEV_KERNARG", "1", "kernel arguments in GPU memory: shorter launches"))
    flags.append(Flag("SAFETENSORS_FAST_GPU", "1", "reads weights straight to the GPU: a shorter start"))
    if cdna3 and (parallel.tp > 1 or parallel.pp > 1 or parallel.dp_attention):
        why = "RCCL channels for eight linked GPUs (AMD's value for this chip; no use on others or on one GPU)"
        flags.append(Flag("NCCL_MIN_NCHANNELS", "112", why))
    return flags


def _vllm_graphs(candidate: Candidate, given: dict[str, Any], mode: str) -> dict[str, Any]:
    """What vLLM has to be told of graphs beyond its own defaults."""
    config, seqs = dict(given.get("compilation_config", {})), candidate.limits.max_num_seqs
    if "cudagraph_mode" in config:
        config["cudagraph_mode"] = mode
    named = {"cudagraph_capture_sizes", "max_cudagraph_capture_size"} & config.keys()
    if mode != "NONE" and seqs > DEFAULT_GRAPH_SIZE and not named:
        config["max_cudagraph_capture_size"] = seqs
    return config


def _switches(given: dict[str, Any]) -> list[Flag]:
    """Flags that turn off what is on by default."""
    named = {name: f"--no-{name.replace('_', '-')}" for name in ("enable_chunked_prefill", "async_scheduling")}
    named["enforce_eager"] = "--enforce-eager"
    return [Flag(flag, None, "given") for name, flag in named.items() if name in given]


def _node_notes(engine: str, parallel: Parallel, chip: Chip) -> list[str]:
    """On which nodes to run a command, where there are several."""
    per_node = chip.gpus_per_node
    nodes = -(-parallel.gpus // per_node)
    if nodes == 1:
        return []
    if parallel.tp * parallel.pp > per_node:
        if engine == "headrace":
            more = "all but the first add --headless and --node-rank, and all have the same HEADRACE_SECRET"
            return [f"on each of {nodes} nodes: {more}"]
        return [f"once, on the head of a Ray cluster of {nodes} nodes"]
    if parallel.dp_attention:
        more = "all but the first add --headless --data-parallel-start-rank, and all --data-parallel-address"
        return [f"on each of {nodes} nodes: {more} of the first"]
    return [f"the same on each of {nodes} nodes, behind a balancer"]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
