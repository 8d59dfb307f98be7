"""The command lines that carry a plan out, for headrace and for vLLM, with a reason for every flag and variable.

Writes what was decided; decides nothing.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from typing import Any

from headrace.planner.chips import Chip
from headrace.planner.cost import Parallel

DEFAULT_GRAPH_SIZE = 512
"""Decodes in the largest step that vLLM captures unless told otherwise"""
SHUFFLED_CACHE_FROM = 32
"""requests in flight, from which AMD's guide finds AITER's own layout of the cache faster"""
FIRST_PORT = 8000
PINNED = (
    "dtype", "kv_cache_dtype", "attention_backend", "block_size", "gpu_memory_utilization", "max_model_len",
    "max_num_seqs", "max_num_batched_tokens", "compilation_config",
)  # fmt: skip
"""Settings that the headrace line names only where the user did"""


@dataclass(frozen=True)
class Settings:
    """What one engine is started with: every decision that a command may have to name."""

    engine: str
    model: str
    """as the engine takes it: a folder or a hub id"""
    chip: Chip
    parallel: Parallel
    is_moe: bool
    is_mla: bool
    quantization: str | None
    """to be made at load; None: the checkpoint as it is"""
    kv_cache_dtype: str
    attention_backend: str
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    bounded_by_cache: tuple[str, ...]
    """limits that follow from what the cache holds, which headrace knows too late to derive them"""
    concurrency: int
    """in flight, over all replicas"""
    graph_mode: str
    gpu_memory_utilization: float
    objective: str
    input_len: int
    output_len: int
    given: dict[str, Any] = field(default_factory=dict)
    """settings that the user pinned, by name"""
    needs_checkpoint: str = ""
    """the checkpoint for which `model` stands, where its id is not known"""


@dataclass(frozen=True)
class Flag:
    """`name` may be a flag or an environment variable."""

    name: str
    value: str | None
    """None: a switch"""
    reason: str

    @property
    def words(self) -> list[str]:
        return [self.name] if self.value is None else [self.name, self.value]


@dataclass(frozen=True)
class Command:
    engine: str
    program: tuple[str, ...]
    variables: tuple[Flag, ...]
    flags: tuple[Flag, ...]
    notes: tuple[str, ...] = ()
    """where and how often to run it"""
    servers: tuple[dict[str, str], ...] = ()
    """For several servers on one node: each one's own variables and its `--port`; empty: one server"""

    @property
    def lines(self) -> list[str]:
        """As one types them, one a server."""
        words = [*self.program, *(word for flag in self.flags for word in flag.words)]
        shared = {variable.name: variable.value or "" for variable in self.variables}
        lines = []
        for own in self.servers or ({},):
            port = own.get("--port")
            environment = shared | {name: value for name, value in own.items() if name != "--port"}
            parts = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
            lines.append(" ".join([*parts, shlex.join(words + (["--port", port] if port else []))]))
        return lines


def headrace_command(settings: Settings) -> Command:
    """One server a replica. What headrace derives by itself is not repeated; what shapes that is."""
    parallel, given = settings.parallel, settings.given
    flags: list[Flag] = []
    if parallel.tp > 1:
        flags.append(Flag("-tp", str(parallel.tp), f"{parallel.tp} GPUs share every layer; one GPU unless told"))
    if settings.quantization:
        flags.append(Flag("--quantization", settings.quantization, "rounds the weights as they load"))
    flags += [Flag(_flag(name), _text(given[name]), "given") for name in PINNED if name in given]
    for name in settings.bounded_by_cache:
        flags.append(Flag(_flag(name), str(getattr(settings, name)), "what the cache leaves room for"))
    flags += _switches(given)
    flags += [
        Flag("--objective", settings.objective, _why_objective(settings)),
        Flag("--expected-input-len", str(settings.input_len), "what /v1/plan predicts for"),
        Flag("--expected-output-len", str(settings.output_len), "what /v1/plan predicts for"),
        Flag(
            "--expected-concurrency",
            str(-(-settings.concurrency // parallel.replicas)),
            "bounds the sequences, and with them the graphs",
        ),
    ]
    program = ("headrace", "serve", settings.model)
    notes, servers = _servers(settings)
    return Command("headrace", program, (), tuple(flags), (*_checkpoint_notes(settings), *notes), servers)


def vllm_command(settings: Settings) -> Command:
    """The same plan for vLLM 0.26. Replicas of a dense model are one server of several ranks; those of a mixture, whose
    ranks would share the experts, are servers of their own."""
    parallel, given = settings.parallel, settings.given
    flags: list[Flag] = []

    def say(name: str, value: Any, reason: str) -> None:
        flags.append(Flag(name, None if value is None else str(value), reason))

    ranks = parallel.dp if parallel.dp_attention or not settings.is_moe else 1
    on_node = max(1, min(ranks, settings.chip.gpus_per_node // (parallel.tp * parallel.pp)))
    if parallel.tp > 1:
        say("--tensor-parallel-size", parallel.tp, "GPUs that share every layer")
    if parallel.pp > 1:
        say("--pipeline-parallel-size", parallel.pp, "layers dealt out: they do not fit otherwise")
    if parallel.dp_attention:
        say("--data-parallel-size", parallel.dp, "ranks that keep their own requests' cache and share the experts")
        if parallel.gpus > settings.chip.gpus_per_node:
            say("--data-parallel-size-local", on_node, "of these ranks run on each node")
    elif on_node > 1:
        say("--data-parallel-size", on_node, "replicas behind one address")
    if parallel.ep:
        say("--enable-expert-parallel", None, "whole experts on each GPU in place of slices of all")
    if parallel.pp > 1 and parallel.tp * parallel.pp > settings.chip.gpus_per_node:
        say("--distributed-executor-backend", "ray", "stages on several nodes")
    if settings.quantization:
        say("--quantization", settings.quantization, "rounds the weights as they load")
    if settings.kv_cache_dtype.startswith("fp8"):
        say("--kv-cache-dtype", settings.kv_cache_dtype.removesuffix("_e4m3"), "one byte for each number of the cache")
    if "dtype" in given:
        say("--dtype", given["dtype"], "given")
    if settings.attention_backend != "auto" and settings.chip.vendor != "cpu":
        said = "given" if "attention_backend" in given else "named, so that nothing slower is taken silently"
        say("--attention-backend", settings.attention_backend, said)
    if "block_size" in given or settings.attention_backend == "ROCM_AITER_MLA_SPARSE":
        say("--block-size", settings.block_size, "given" if "block_size" in given else "what the sparse backend takes")
    if "gpu_memory_utilization" in given and settings.chip.vendor != "cpu":
        say("--gpu-memory-utilization", f"{settings.gpu_memory_utilization:g}", "given")
    say("--max-model-len", settings.max_model_len, "one such sequence has to fit; nothing is set aside for it")
    say("--max-num-seqs", settings.max_num_seqs, "requests that run at once on one rank")
    say(
        "--max-num-batched-tokens",
        settings.max_num_batched_tokens,
        "decodes wait for a whole step; prompts want it large",
    )
    flags += _switches(given)
    if "disable_custom_all_reduce" in given and parallel.tp > 1:
        say("--disable-custom-all-reduce", None, "given")
    if "speculative_config" in given:
        say("--speculative-config", json.dumps(given["speculative_config"]), "given")
    graphs = _graph_config(settings)
    if graphs:
        say("--compilation-config", json.dumps(graphs), "decode steps of the size that will run, from graphs")
    program = ("vllm", "serve", settings.model)
    notes, servers = _servers(settings) if settings.is_moe and not parallel.dp_attention else (_nodes(settings), ())
    return Command(
        "vllm", program, tuple(_variables(settings)), tuple(flags), (*_checkpoint_notes(settings), *notes), servers
    )


def _checkpoint_notes(settings: Settings) -> tuple[str, ...]:
    if not settings.needs_checkpoint:
        return ()
    return (f"put the folder or hub id of {settings.needs_checkpoint} in place of {settings.model}",)


def _variables(settings: Settings) -> list[Flag]:
    """vLLM's environment on AMD GPUs; on others it needs none."""
    if settings.chip.vendor != "amd":
        return []
    several = settings.parallel.tp > 1 or settings.parallel.pp > 1 or settings.parallel.dp_attention
    cdna3 = settings.chip.arch == "gfx942"
    found = [Flag("VLLM_ROCM_USE_AITER", "1", "AMD's kernels, off unless told: 1.7 to 3.7 times slower without")]
    if settings.is_mla and cdna3:
        found.append(Flag("VLLM_ROCM_USE_AITER_FP4BMM", "0", "this chip has no fp4 units; some versions crash"))
    if settings.attention_backend == "ROCM_AITER_FA" and settings.concurrency >= SHUFFLED_CACHE_FROM:
        why = f"AITER's own layout of the cache pays from {SHUFFLED_CACHE_FROM} requests at once"
        found.append(Flag("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1", why))
    found.append(Flag("HIP_FORCE_DEV_KERNARG", "1", "kernel arguments in GPU memory: shorter launches"))
    found.append(Flag("SAFETENSORS_FAST_GPU", "1", "reads weights straight to the GPU: a shorter start"))
    if several and cdna3:
        why = "RCCL channels for eight linked GPUs (AMD's value for this chip; no use on others or on one GPU)"
        found.append(Flag("NCCL_MIN_NCHANNELS", "112", why))
    return found


def _graph_config(settings: Settings) -> dict[str, Any]:
    """What vLLM has to be told of graphs beyond its own defaults."""
    if settings.chip.vendor == "cpu":
        return {}
    config = dict(settings.given.get("compilation_config", {}))
    if "cudagraph_mode" in config:
        config["cudagraph_mode"] = settings.graph_mode
    named = {"cudagraph_capture_sizes", "max_cudagraph_capture_size"} & config.keys()
    if settings.graph_mode != "NONE" and settings.max_num_seqs > DEFAULT_GRAPH_SIZE and not named:
        config["max_cudagraph_capture_size"] = settings.max_num_seqs
    return config


def _switches(given: dict[str, Any]) -> list[Flag]:
    """Of what is on unless somebody turns it off."""
    flags = []
    if given.get("enable_chunked_prefill") is False:
        flags.append(Flag("--no-enable-chunked-prefill", None, "given"))
    if given.get("async_scheduling") is False:
        flags.append(Flag("--no-async-scheduling", None, "given"))
    if given.get("enforce_eager"):
        flags.append(Flag("--enforce-eager", None, "given"))
    return flags


def _servers(settings: Settings) -> tuple[tuple[str, ...], tuple[dict[str, str], ...]]:
    """Notes, and what is each server's own on a node that holds several."""
    parallel, chip = settings.parallel, settings.chip
    size = parallel.tp * parallel.pp
    replicas = min(parallel.replicas, max(1, chip.gpus_per_node // size))
    notes = list(_nodes(settings))
    if replicas == 1:
        return tuple(notes), ()
    notes.append(
        f"{replicas} servers a node, behind a balancer that sends a request to the one with the fewest running"
    )
    # vLLM reads CUDA's name on AMD's GPUs too, and wants the other unset.
    amd = chip.vendor == "amd" and settings.engine == "headrace"
    variable = "HIP_VISIBLE_DEVICES" if amd else "CUDA_VISIBLE_DEVICES"
    servers = []
    for replica in range(replicas):
        devices = ",".join(str(replica * size + gpu) for gpu in range(size))
        servers.append({variable: devices, "--port": str(FIRST_PORT + replica)})
    return tuple(notes), tuple(servers)


def _nodes(settings: Settings) -> tuple[str, ...]:
    parallel, per_node = settings.parallel, settings.chip.gpus_per_node
    nodes = -(-parallel.gpus // per_node)
    if nodes == 1:
        return ()
    if parallel.tp * parallel.pp > per_node:
        return (f"once, on the head of a Ray cluster of {nodes} nodes",)
    if parallel.dp_attention:
        more = "all but the first add --headless --data-parallel-start-rank, and all --data-parallel-address"
        return (f"on each of {nodes} nodes: {more} of the first",)
    return (f"the same on each of {nodes} nodes, behind a balancer",)


def _why_objective(settings: Settings) -> str:
    why = "how many prompt tokens a step with decodes may hold"
    rounds = settings.objective == "throughput" and settings.kv_cache_dtype.startswith("fp8")
    return f"{why}, and an fp8 KV cache, which rounds" if rounds and "kv_cache_dtype" not in settings.given else why


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
