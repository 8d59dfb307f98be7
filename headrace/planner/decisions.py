"""Derives a start's settings from hardware, model and workload, each as a `Decision` that says why.

Pure Python, no torch: the same code answers before a start and on a machine without the device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from headrace.attention.table import Selection, select_backend
from headrace.config import EngineConfig
from headrace.errors import ConfigError, OutOfMemoryError
from headrace.model_config import ModelConfig
from headrace.models.drafters import start_specs
from headrace.models.served import describe
from headrace.planner.fp8_cache import FP8, cache_for, runs_fp8_cache_here
from headrace.planner.graphs import decide_graphs
from headrace.planner.memory_map import CPU_CACHE
from headrace.planner.record import Decision
from headrace.planner.shapes import expert_share
from headrace.planner.speculation import FIELD, decide_speculation
from headrace.quantization.checkpoint_format import holds_kv_scales
from headrace.quantization.formats import UNQUANTIZED
from headrace.quantization.table import resolve_format
from headrace.stages import Stage, check_partition, divide_layers
from headrace.step import WorkerFacts

PREFILL_SHARES = {"latency": 0.7, "interactive": 0.93, "throughput": 0.97}
"""By objective, the least share of the best prefill rate at which steps with decodes must run prompts. (An 8B on an
H200 runs 384 tokens at 90%: with decodes beside them, the p99 of first tokens is 15% above that of 512.)"""
USUAL_OBJECTIVE = "interactive"
WIDE_STEP, WIDER_STEP, EXPERT_ROWS = 8192, 16384, 1024
"""Tokens of a step on a GPU: WIDE_STEP, or WIDER_STEP where an expert would see fewer than EXPERT_ROWS tokens of it.
(Qwen3-30B-A3B on an H200, 500 prompts of 2048 at once, 256 out: 5,130 output tokens/s at 4096, 5,546 at 8192, 5,850 at
16384, 5,912 at 32768.)"""
INVARIANT_RANKS = (1, 2, 4, 8)
"""over which the slices of kernels/matmul.py can be divided evenly"""
DEVICES = {"cuda": "a GPU", "cpu": "a CPU"}
MOST_SEQS = {"cuda": 1024, "cpu": 64}
FEWEST_SEQS = 8
DTYPE_ALIASES = {"half": "float16", "float": "float32"}


def decide_before_load(
    config: EngineConfig,
    model: ModelConfig,
    device_type: str,
    beside_server: bool = False,
    measured: Mapping[str, Decision] | None = None,
) -> tuple[EngineConfig, list[Decision]]:
    """Fill in every setting that does not need facts from the device, and return the config with one Decision each.

    `beside_server`: an HTTP process shares the machine. `measured`: by field, what was measured to be better than what
    is derived here. Raises ConfigError where a user's value cannot work.
    """
    decisions: list[Decision] = []
    changes: dict[str, Any] = {}
    measured = measured or {}

    def settle(field: str, value: Any, reason: str, runner_up: str = "") -> Any:
        given = getattr(config, field)
        if given is not None and given != "auto":
            decisions.append(Decision(field, given, "given", source="user"))
            return given
        if field in measured:
            value = measured[field].value
            decisions.append(measured[field])
        else:
            decisions.append(Decision(field, value, reason, runner_up))
        changes[field] = value
        return value

    settle("device", device_type, "the device that torch finds here")
    dtype = settle("dtype", *activation_dtype(model.dtype, device_type))
    dtype = changes["dtype"] = DTYPE_ALIASES.get(dtype, dtype)
    kv_dtype = settle("kv_cache_dtype", *_kv_cache_dtype(config, model, dtype, device_type))
    changes["kv_cache_dtype"] = FP8 if kv_dtype == "fp8" else kv_dtype
    quantization = _quantization(config, model, device_type)
    if quantization is not None:
        decisions.append(quantization)
        changes["quantization"] = quantization.value if quantization.source == "user" else None
    pooled, more = _pooling(config, model)
    config = config.replace(**pooled)  # what is asked for counts less: the model could not run
    decisions += more
    context = model.max_position_embeddings
    length = settle("max_model_len", context, f"the model's {model.length_field}")
    if length > context:
        raise ConfigError(f"max_model_len must be at most {context} (the model's {model.length_field}), got {length}")

    guesses = config if FIELD not in measured else config.replace(speculative_config=measured[FIELD].value)
    changes[FIELD], speculation = decide_speculation(guesses, model, device_type)
    decisions += [measured[FIELD]] if FIELD in measured and changes[FIELD] else speculation
    decode_len = config.replace(speculative_config=changes[FIELD]).decode_len
    budget = settle(
        "max_num_batched_tokens",
        *token_budget(
            device_type,
            config.enable_chunked_prefill,
            length,
            config.max_num_seqs,
            expert_share(describe(model)),
            decode_len,
        ),
    )
    if not config.enable_chunked_prefill and budget < length:
        raise ConfigError(
            f"max_num_batched_tokens must be at least max_model_len ({length}) without chunked prefill, got {budget}"
        )
    seqs = settle("max_num_seqs", *sequences(device_type, budget, config.expected_concurrency, decode_len))
    if seqs * decode_len > budget:
        raise ConfigError(
            f"max_num_seqs ({seqs}) must be at most {budget // decode_len}: with speculative_config every running "
            f"request gets {decode_len} tokens of a step, which has at most {budget} (max_num_batched_tokens)"
        )

    if config.tensor_parallel_size > 1 and model.num_heads % config.tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size must divide the model's {model.num_heads} attention heads, "
            f"got {config.tensor_parallel_size}"
        )
    if config.pipeline_parallel_size > 1:
        if model.pooling is not None:
            raise ConfigError(
                f"pipeline_parallel_size must be 1 for a model that pools, got {config.pipeline_parallel_size}"
            )
        settle("pp_layer_partition", *_partition(config, model))
        check_partition(config.replace(**changes).partition, describe(model).layers)
    if config.batch_invariant:
        decisions.append(_batch_invariance(config, model, device_type))
    if device_type == "cpu":
        settle("cpu_threads", *_cpu_threads(_ranks(config), beside_server))
    if "attention_backend" in measured:
        settle("attention_backend", None, "")
    graphs = config
    if "cudagraph_mode" in measured:
        wanted = {"cudagraph_mode": measured["cudagraph_mode"].value}
        graphs = config.replace(compilation_config=config.compilation_config | wanted)
    attention = select_backend(start_specs(config.replace(**changes), model, device_type), config.attention_backend)
    if "attention_backend" not in changes:
        decisions.append(backend_decision(attention, config.attention_backend))
    changes["compilation_config"], more = decide_graphs(graphs, device_type, attention.name, attention.full_graphs)
    if "cudagraph_mode" in measured and more[0].value == measured["cudagraph_mode"].value:
        more[0] = measured["cudagraph_mode"]
    return config.replace(**changes), decisions + more


def token_budget(
    device_type: str, chunked: bool, max_model_len: int, max_num_seqs: int | None, share: float, decode_len: int = 1
) -> tuple[int, str]:
    """Choose max_num_batched_tokens, and say why. `share`: the part of a layer's experts that a token uses.
    `decode_len`: tokens of a running request in a step."""
    if device_type == "cuda" and WIDE_STEP * share < EXPERT_ROWS:
        budget, why = WIDER_STEP, f"a prefill chunk of which an expert sees {WIDER_STEP * share:.0f} tokens"
    elif device_type == "cuda":
        budget, why = WIDE_STEP, "a prefill chunk that fills a GPU"
    else:
        budget, why = 2048, "bounds a step on CPU"
    if not chunked and budget < max_model_len:
        return max_model_len, "without chunked prefill a whole prompt must fit into one step"
    if max_num_seqs is not None and budget < max_num_seqs * decode_len:
        tokens = "a token" if decode_len == 1 else f"{decode_len} tokens"
        return max_num_seqs * decode_len, f"every running request gets {tokens} in every step"
    return budget, why


def sequences(device_type: str, budget: int, expected: int | None, decode_len: int = 1) -> tuple[int, str]:
    """Choose max_num_seqs, and say why. `expected`: requests in flight, if that is known. `decode_len`: tokens of each
    in a step."""
    most = max(1, min(MOST_SEQS[device_type], budget) // decode_len)
    if expected is None:
        return most, f"what {DEVICES[device_type]} serves before latency suffers"
    enough = max(FEWEST_SEQS, 1 << (expected - 1).bit_length())
    if enough < most:
        return enough, f"enough for the expected {expected} at once; fewer would queue, more take memory from the cache"
    return most, f"what {DEVICES[device_type]} serves before latency suffers; {expected} at once are expected"


def backend_decision(chosen: Selection, given: str | None) -> Decision:
    """Say which attention backend was chosen, and why those before it were not."""
    source = "derived" if given is None else "user"
    return Decision("attention_backend", chosen.name, chosen.why, "; ".join(chosen.passed_over), source)


def _batch_invariance(config: EngineConfig, model: ModelConfig, device_type: str) -> Decision:
    """How a request's tokens are made independent of other requests. Raises ConfigError where they cannot be."""
    if device_type == "cpu" and config.joined_engines > 1:
        raise ConfigError(
            "batch_invariant computes tokens one by one on a CPU, which engines that share their experts cannot "
            f"(data_parallel_size {config.data_parallel_size} with enable_expert_parallel)"
        )
    if device_type == "cpu":
        return Decision("batch_invariant", True, "given; every token is computed alone", source="user")
    ranks, spec = config.tensor_parallel_size * config.joined_engines, describe(model)
    if ranks not in INVARIANT_RANKS:
        raise ConfigError(f"batch_invariant needs tensor_parallel_size 1, 2, 4 or 8, got {ranks}")
    if ranks > 2 and (spec.is_moe or any(getattr(layer.mixer, "qk_norm", "") == "wide" for layer in spec.layers)):
        raise ConfigError(
            f"batch_invariant needs tensor_parallel_size 1 or 2 for this model, got {ranks}: over more GPUs, the order "
            "of sums of experts, and of norms over all heads, depends on the size of the batch"
        )
    why = "given; one order of sums whatever the batch, products over 8 slices of inputs in fp32, and slower"
    return Decision("batch_invariant", True, why, source="user")


def _pooling(config: EngineConfig, model: ModelConfig) -> tuple[dict[str, Any], list[Decision]]:
    """Return what a model that pools does not do, and why. Raises ConfigError where it is asked for more."""
    if model.pooling is None:
        return {}, []
    if config.speculative_config:
        raise ConfigError("speculative_config must be {}: a model that pools generates no tokens to guess")
    changes: dict[str, Any] = {}
    made = [Decision("runner", "pooling", f"the model makes vectors or scores, by {model.pooling.kind} pooling")]
    if any(not layer.mixer.causal for layer in describe(model).layers):
        if config.batch_invariant:
            raise ConfigError("batch_invariant must be false: texts that are computed whole are padded to the longest")
        changes = {"enable_chunked_prefill": False, "enable_prefix_caching": False}
        why = "each token sees those behind it, so that a prompt is computed whole, and nothing is cached"
        made.append(Decision("enable_chunked_prefill", False, why))
    elif model.pooling.kind != "last":
        changes = {"enable_prefix_caching": False}
        made.append(Decision("enable_prefix_caching", False, "pooling needs the hidden states of all tokens"))
    return changes, made


def _quantization(config: EngineConfig, model: ModelConfig, device_type: str) -> Decision | None:
    """The format of most linears by headrace's own name for it; None: nothing is quantized. Raises ConfigError where
    the setting contradicts the checkpoint or another setting."""
    held = resolve_format(model, config.quantization)
    if held.main == UNQUANTIZED:
        return None
    name = held.main.format.name
    if config.batch_invariant and device_type != "cpu":
        raise ConfigError(
            f"quantization {config.quantization or name!r} does not go with batch_invariant on a GPU: the order of "
            "sums of quantized products depends on the size of the batch"
        )
    if not held.method:
        return Decision("quantization", name, "given", source="user")
    return Decision("quantization", f"{held.main}", f"the checkpoint's ({held.method})")


def activation_dtype(checkpoint: str, device_type: str) -> tuple[str, str]:
    """Choose the dtype of activations, and say why, from the checkpoint's."""
    if device_type == "cuda" and checkpoint == "float32":
        return "bfloat16", "float32 checkpoints run in bfloat16 on a GPU, as vLLM does (--dtype float32 keeps them)"
    return checkpoint, "the checkpoint's"


def _kv_cache_dtype(config: EngineConfig, model: ModelConfig, dtype: str, device_type: str) -> tuple[str, ...]:
    """What `auto` means, why, and the runner-up."""
    if holds_kv_scales(model.quantization):
        return FP8, "the checkpoint's quantization_config holds scales for it"
    if config.kv_cache_dtype == "auto" and runs_fp8_cache_here(config, dtype, device_type):
        return cache_for(config.objective, dtype)
    return dtype, "the model's"


def decide_num_pages(config: EngineConfig, facts: list[WorkerFacts]) -> tuple[int, list[Decision]]:
    """Decide how many pages of KV cache every rank allocates (blocks, where all layers cache alike): as many as the
    rank with the least memory can hold, and no more than can ever be used.

    Raises OutOfMemoryError when not one sequence of max_model_len fits.
    """
    assert config.max_model_len is not None
    assert config.max_num_seqs is not None
    if config.num_gpu_blocks_override is not None:
        count = config.num_gpu_blocks_override
        return count, [Decision("num_gpu_blocks", count, "given", source="user")]
    by_memory, needed = pages_by_memory(config, facts), pages_of_longest(config, facts)
    useful = 2 * facts[0].layout.pages_for(config.max_model_len, sequences=config.max_num_seqs)
    count = min(by_memory, max(useful, needed))
    if count < needed:
        tokens = longest_sequence(config, facts, by_memory)
        if tokens <= 0:
            missing = -min(_kv_bytes(config, fact) for fact in facts) / 2**30
            knob = f"--gpu-memory-utilization (it is {config.gpu_memory_utilization:g})"
            if facts[0].device == "cpu":
                knob = "--cpu-kv-cache-gib"
            raise OutOfMemoryError(
                f"weights and a step leave no room for a KV cache: {missing:.2f} GiB are missing even without; raise "
                f"{knob} or free memory on {facts[0].device_name}"
            )
        raise OutOfMemoryError(
            f"the KV cache has room for {tokens} tokens, fewer than max_model_len ({config.max_model_len}); "
            f"lower --max-model-len to {tokens} or free memory on {facts[0].device_name}"
        )
    reason = "what memory leaves"
    if by_memory > useful:
        reason = f"twice what {config.max_num_seqs} longest sequences need"
    reason += f": {facts[0].layout.tokens_in(count, config.max_model_len):,} tokens"
    return count, [Decision("num_gpu_blocks", count, reason, source="measured")]


def pages_by_memory(config: EngineConfig, facts: list[WorkerFacts]) -> int:
    """Count the pages that the rank with the least memory can hold; below 0: how many are missing."""
    return min(_kv_bytes(config, fact) // fact.layout.page_bytes for fact in facts)


def pages_of_longest(config: EngineConfig, facts: list[WorkerFacts]) -> int:
    """Count the pages that one sequence of max_model_len holds while its prompt is computed."""
    assert config.max_model_len is not None
    return facts[0].layout.pages_for(config.max_model_len, _step_places(config))


def longest_sequence(config: EngineConfig, facts: list[WorkerFacts], num_pages: int) -> int:
    """Return the length of the longest sequence that so many pages can hold, up to max_model_len."""
    assert config.max_model_len is not None
    return facts[0].layout.longest(num_pages, config.max_model_len, _step_places(config))


def _step_places(config: EngineConfig) -> int:
    """The most places in the cache that a step writes of one request, what a draft model guesses included."""
    return (config.max_num_batched_tokens or 1) + config.decode_len - 1


def decide_mixed_step(
    config: EngineConfig, facts: list[WorkerFacts], streamed: bool = True
) -> tuple[int | None, list[Decision]]:
    """Decide the most tokens of a step with decodes, while few prompts wait: decodes wait for the whole step, and from
    some size on a larger one makes prompts hardly faster. The slowest rank counts.

    It is None where answers are not `streamed`; None, and no decision, where no step was measured or prompts are not
    cut.
    """
    measured = [dict(fact.step_times) for fact in facts]
    sizes = [size for size in measured[0] if size <= (config.max_num_batched_tokens or 0)]
    if not sizes or not config.enable_chunked_prefill:
        return None, []
    if not streamed:
        return None, [
            Decision("mixed_step_tokens", None, "answers are returned whole: nobody waits for the next token")
        ]
    decision = mixed_step({size: max(rank[size] for rank in measured) for size in sizes}, config.objective)
    return decision.value, [decision]


def mixed_step(
    times: dict[int, float], objective: str | None, source: str = "measured", field: str = "mixed_step_tokens"
) -> Decision:
    """Decide on `field`: the size of step that decodes should wait for, from milliseconds by step size."""
    wanted = PREFILL_SHARES[objective or USUAL_OBJECTIVE]
    best = max(times, key=lambda size: size / times[size])

    def share(size: int) -> float:
        return size / times[size] * times[best] / best

    def describe(size: int) -> str:
        return f"{size} tokens in {times[size]:.1f} ms"

    chosen = min(size for size in times if share(size) >= wanted)
    rate = "the best prefill rate"
    if chosen != best:
        rate = f"{share(chosen):.0%} of {rate} ({describe(best)})"
    reason = f"decodes wait for the whole step; {describe(chosen)} reach {rate}"
    smaller = max((size for size in times if size < chosen), default=None)
    other = "" if smaller is None else f"{describe(smaller)}: {share(smaller):.0%}"
    return Decision(field, chosen, reason, other, source)


def _kv_bytes(config: EngineConfig, fact: WorkerFacts) -> int:
    """Bytes of cache on one rank: a GPU's share is in gpu_memory_utilization, a CPU's memory is shared with all."""
    if fact.device != "cpu":
        return fact.available_kv_memory
    if config.cpu_kv_cache_gib is not None:
        return int(config.cpu_kv_cache_gib * 2**30) // _ranks(config)
    return min(CPU_CACHE, fact.available_kv_memory // 4) // _ranks(config)


def _ranks(config: EngineConfig) -> int:
    """Return how many ranks share this machine."""
    return config.ranks_per_node * config.num_local_engines


def _partition(config: EngineConfig, model: ModelConfig) -> tuple[str, str]:
    """Choose the layers of each pipeline stage, and say why."""
    spec = describe(model)
    head = spec.vocab_size * spec.hidden_size
    parts = divide_layers(spec.layers, head, config.pipeline_parallel_size)
    sizes = [sum(layer.weights for layer in spec.layers[Stage(n, parts).layers]) for n in range(len(parts))]
    sizes[-1] += head
    shares = ", ".join(f"{size / sum(sizes):.0%}" for size in sizes)
    return ",".join(map(str, parts)), f"stages hold {shares} of the weights that a step reads, the head's with the last"


def _cpu_threads(ranks: int, beside_server: bool) -> tuple[int, str]:
    cores = len(os.sched_getaffinity(0))
    if beside_server and cores > 1:
        # OpenMP's spin barriers cost milliseconds an operation when a core is shared with another busy process.
        return max(1, (cores - 1) // ranks), f"the machine's {cores} cores but one, which the HTTP process needs"
    return max(1, cores // ranks), f"the machine's {cores} cores over {ranks} rank{'s' if ranks > 1 else ''}"
