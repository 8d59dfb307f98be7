"""Defines every setting: one field is flag, help text, default, row in the docs and Python keyword at once.

Names are vLLM's. `None` means that the planner derives the value from hardware, model and workload
(planner/decisions.py). What a field may say of itself is in knobs.py, its environment variable in environment.py.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from headrace.errors import ConfigError
from headrace.knobs import check_knobs, knob
from headrace.speculation import Speculation
from headrace.stages import parse_partition

DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")
QUANTIZATIONS = {"fp8": "fp8", "fp8_per_tensor": "fp8", "ptpc_fp8": "ptpc_fp8", "ptpc-fp8": "ptpc_fp8"}
"""What users type to have an unquantized checkpoint rounded -> the name of the format here."""
_INTEGERS = ("int4", "w8a16")
CHECKPOINT_WORDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*QUANTIZATIONS, "fbgemm_fp8"), ("fp8",)),
    **dict.fromkeys(("gptq", "gptq_marlin", "auto-round", "inc", "moe_wna16"), _INTEGERS),
    **dict.fromkeys(("awq", "awq_marlin"), ("int4",)),
    "compressed-tensors": ("fp8", "int8", *_INTEGERS, "mxfp4", "nvfp4"),
    "quark": ("fp8", "int8", "mxfp4"),
    **dict.fromkeys(("modelopt", "modelopt_mixed"), ("fp8", *_INTEGERS, "nvfp4", "mxfp4")),
    "modelopt_fp4": ("nvfp4",),
    "modelopt_mxfp8": ("fp8",),
    "mxfp8": ("fp8",),
    "mxfp4": ("mxfp4",),
}
"""What users type for a checkpoint that is quantized already, vLLM's names -> names of the formats it may be in."""
ATTENTION_OF_VLLM = (
    "FLASH_ATTN", "FLASHINFER", "XFORMERS", "FLEX_ATTENTION", "TREE_ATTN", "ROCM_FLASH", "ROCM_ATTN", "ROCM_AITER_FA",
    "ROCM_AITER_UNIFIED_ATTN", "TRITON_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "CUTLASS_MLA",
    "ROCM_AITER_MLA", "ROCM_AITER_TRITON_MLA",
)  # fmt: skip
"""vLLM's backends for attention, over latents too. Asking for one of them gives the backend that is chosen here."""
BLOCK_SIZES = (1, 16, 32, 64)
OBJECTIVES = ("latency", "interactive", "throughput")
GRAPH_MODES = {
    "NONE": ("none", "none"),
    "PIECEWISE": ("piecewise", "piecewise"),
    "FULL": ("full", "full"),
    "FULL_DECODE_ONLY": ("full", "none"),
    "FULL_AND_PIECEWISE": ("full", "piecewise"),
}
"""cudagraph_mode -> how steps of decodes run, and how all others run: without graphs, from graphs of the pieces between
attention calls, or from one graph."""


model_knob, cache_knob, scheduler_knob, workload_knob, parallel_knob, lora_knob, server_knob = (
    functools.partial(knob, group=group)
    for group in ("model", "cache", "scheduler", "workload", "parallel", "lora", "server")
)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Holds what one engine runs and how. To change a setting, make a new object with `replace`."""

    model: str = model_knob("demo", "`demo`, a local folder, or a Hugging Face id.")
    tokenizer: str | None = model_knob(None, "Folder or id of the tokenizer, if not the model's own.")
    revision: str | None = model_knob(None, "Branch, tag or commit of the model on the hub.")
    download_dir: str | None = model_knob(None, "Where hub files go; default: the hub's cache (HF_HOME).")
    load_format: str = model_knob(
        "auto",
        "`auto` and `safetensors` read weights; `dummy` fills random ones from config.json alone.",
        choices=("auto", "safetensors", "dummy"),
    )
    skip_tokenizer_init: bool = model_knob(False, "Run without tokenizer: prompts and outputs are token ids.")
    runner: str = model_knob(
        "auto",
        "What the model does: `generate` text or, by `pooling`, vectors and scores; `auto`, what its architecture and "
        "the files of sentence-transformers say.",
        choices=("auto", "generate", "pooling"),
    )
    convert: str = model_knob(
        "auto",
        "What a model that pools gives: `embed` or `classify` (scores too). A generating one classifies by the logits "
        "of two tokens, `no` and `yes` unless config.json has `classifier_from_token`.",
        choices=("auto", "none", "embed", "classify"),
    )
    task: str | None = model_knob(
        None,
        "Older name of runner and convert together.",
        choices=("auto", "generate", "embed", "embedding", "classify", "score", "reward"),
    )
    pooler_config: dict[str, Any] = model_knob(
        {},
        'JSON, e.g. \'{"pooling_type": "MEAN", "normalize": false}\': how hidden states become one vector (LAST, CLS, '
        "MEAN), and whether it gets length 1 (a score: is squashed), where the model's files say otherwise.",
    )
    hf_overrides: dict[str, Any] = model_knob({}, "JSON: fields that config.json is read with.")
    trust_remote_code: bool = model_knob(
        False, "Accepted for compatibility; code from a model repository is never run."
    )
    dtype: str = knob("auto", "Data type of weights and activations; `auto` is the checkpoint's.", choices=DTYPES)
    quantization: str | None = knob(
        None,
        "Round the weights of an unquantized checkpoint to fp8 as they load, and activations in every step: `fp8` with "
        "one scale for each weight tensor, `ptpc_fp8` with one for each output. The other names change nothing: a "
        "quantized checkpoint says itself what it holds, and one that holds something else is refused.",
        choices=tuple(CHECKPOINT_WORDS),
        short="-q",
    )
    served_model_name: list[str] = model_knob([], "Names the API answers to; default: MODEL as given.")
    chat_template: str | None = model_knob(None, "A jinja file, or the template itself, instead of the model's.")
    generation_config: str = model_knob(
        "auto",
        "Sampling defaults of requests: `auto`, those of the model's generation_config.json; `vllm`, none.",
        choices=("auto", "vllm"),
    )
    max_model_len: int | None = knob(None, "Longest sequence, prompt and output together, in tokens.", minimum=1)
    seed: int = knob(0, "Seeds dummy weights and the seeds drawn for requests that bring none.", minimum=0)
    batch_invariant: bool = knob(
        False, "Give a request the same tokens, bit for bit, whatever else runs; slower (VLLM_BATCH_INVARIANT)."
    )

    block_size: int = cache_knob(16, "Tokens in one KV cache block.", choices=BLOCK_SIZES)
    gpu_memory_utilization: float = cache_knob(
        0.9, "Share of the GPU's memory this instance may use.", minimum=0.01, maximum=1.0
    )
    num_gpu_blocks_override: int | None = cache_knob(
        None, "Use this many KV cache blocks instead of what memory allows.", minimum=1
    )
    cpu_kv_cache_gib: float | None = cache_knob(
        None, "KV cache size on CPU, in GiB (VLLM_CPU_KVCACHE_SPACE).", minimum=0.001, maximum=1e6
    )
    kv_cache_dtype: str = cache_knob(
        "auto",
        "Data type of the KV cache; `auto` is the model's own, which rounds nothing, but fp8 where the checkpoint was "
        "calibrated for it, and under --objective throughput on H100 and H200. `fp8` (same as fp8_e4m3) holds twice "
        "the tokens, rounded.",
        choices=KV_CACHE_DTYPES,
    )
    calculate_kv_scales: bool = cache_knob(
        True, "With an fp8 KV cache, calculate scales at load where the checkpoint brings none; off: 1.0, as in vLLM."
    )
    enable_prefix_caching: bool = cache_knob(True, "Reuse KV blocks of prompts that begin alike.")

    max_num_seqs: int | None = scheduler_knob(None, "Most requests that run at once.", minimum=1)
    max_num_batched_tokens: int | None = scheduler_knob(None, "Most tokens in one step.", minimum=1)
    enable_chunked_prefill: bool = scheduler_knob(
        True, "Split long prompts over steps so that running decodes never wait for them."
    )
    scheduling_policy: str = scheduler_knob(
        "fcfs", "Who runs first: by arrival, or by the request's `priority`.", choices=("fcfs", "priority")
    )
    max_queued_requests: int = scheduler_knob(
        8192,
        "Most requests (prompts x n) of the server that wait to run; more are refused with 429. 0: no bound.",
        minimum=0,
    )
    max_queued_tokens: int = scheduler_knob(
        2**25, "Most prompt tokens of the server that wait to run; more are refused with 429. 0: no bound.", minimum=0
    )
    async_scheduling: bool = scheduler_knob(True, "Schedule step N+1 while step N runs on the device.")

    objective: str | None = workload_knob(
        None,
        "What to plan for: the shortest time per token (latency), a speed at which people read along (interactive), or "
        "the most tokens (throughput; on H100 and H200 with an fp8 KV cache, which rounds); default: interactive.",
        choices=OBJECTIVES,
    )
    expected_input_len: int | None = workload_knob(
        None, "Tokens that a prompt is expected to have; default: unknown.", minimum=1
    )
    expected_output_len: int | None = workload_knob(
        None, "Tokens that an answer is expected to have; default: unknown.", minimum=1
    )
    expected_concurrency: int | None = workload_knob(
        None, "Requests that are expected in flight at once; default: unknown.", minimum=1
    )

    use_profile: bool = workload_knob(True, "Use what `headrace tune` measured for this model on this machine.")

    tensor_parallel_size: int = parallel_knob(1, "GPUs over which each layer is split.", minimum=1, short="-tp")
    data_parallel_size: int = parallel_knob(
        1,
        "Engines behind one port, each with GPUs and a cache of its own; a request goes to the one that is expected to "
        "answer first.",
        minimum=1,
        maximum=1024,
        short="-dp",
    )
    data_parallel_size_local: int | None = parallel_knob(
        None, "Of these engines, how many run on this machine; default: all.", minimum=1, short="-dpl"
    )
    data_parallel_rank: int | None = parallel_knob(
        None,
        "Run this one of the engines alone, on a port of its own; a balancer outside chooses.",
        minimum=0,
        short="-dpn",
    )
    data_parallel_start_rank: int | None = parallel_knob(
        None, "The first of the engines that run on this machine, if that is not 0.", minimum=0, short="-dpr"
    )
    data_parallel_external_lb: bool = parallel_knob(
        False, "A balancer outside chooses the engine: start one server for each --data-parallel-rank.", short="-dpe"
    )
    data_parallel_hybrid_lb: bool = parallel_knob(
        False, "A balancer outside chooses the machine, and each server one of its own engines.", short="-dph"
    )
    data_parallel_address: str | None = parallel_knob(
        None,
        "Address of the machine that serves, on the network between machines that run engines of "
        "--data-parallel-size; the others have --headless.",
        short="-dpa",
    )
    data_parallel_rpc_port: int = parallel_knob(
        29550, "Port on which it waits for them.", minimum=1, maximum=65535, short="-dpp"
    )
    enable_expert_parallel: bool = parallel_knob(
        False,
        "Give every GPU whole experts, in place of slices of all: the GPUs of an engine, or with --data-parallel-size "
        "those of all engines, which then take their steps together, each with the cache of its own requests.",
        short="-ep",
    )
    disable_custom_all_reduce: bool = parallel_knob(
        False, "Sum over GPUs by NCCL alone, not by headrace's own kernels where sums are small."
    )
    quick_reduce_quantization: str = parallel_knob(
        "NONE",
        "Send numbers of large sums over GPUs in so many bits, 16 with FP, from the size on where that was measured to "
        "be faster (VLLM_ROCM_QUICK_REDUCE_QUANTIZATION). Fewer than 16 round them.",
        choices=("NONE", "FP", "INT8", "INT6", "INT4"),
    )
    quick_reduce_max_size_mb: int = parallel_knob(
        2048, "MiB of the largest sum for which they do (VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB).", minimum=0
    )
    pipeline_parallel_size: int = parallel_knob(
        1, "Stages over which the layers are divided, each on GPUs of its own.", minimum=1, short="-pp"
    )
    pp_layer_partition: str | None = parallel_knob(
        None,
        "Layers of each pipeline stage, e.g. `18,14`; default: stages of equally many weights "
        "(VLLM_PP_LAYER_PARTITION).",
    )
    nnodes: int = parallel_knob(
        1,
        "Machines over which the GPUs of the engine are spread, equally many on each: start the same command on each "
        "with its --node-rank.",
        minimum=1,
        short="-n",
    )
    node_rank: int = parallel_knob(
        0, "Which of these machines this is; 0 serves, the others run with --headless.", minimum=0, short="-r"
    )
    master_addr: str | None = parallel_knob(
        None, "Address of the machine with --node-rank 0, on the network between the machines."
    )
    master_port: int = parallel_knob(29501, "Port on which it waits for the others.", minimum=1, maximum=65535)
    distributed_executor_backend: str = parallel_knob(
        "mp",
        "What starts the other machines of --nnodes or --data-parallel-address: you do (`mp`), or the Ray cluster that "
        "this machine belongs to (`ray`).",
        choices=("mp", "ray"),
    )
    secret_file: str | None = parallel_knob(
        None, "File with the secret by which machines know each other, in place of HEADRACE_SECRET."
    )
    attention_backend: str | None = knob(None, "Attention backend (the start says why one was chosen).")
    enforce_eager: bool = knob(False, "Capture no CUDA graphs (same as cudagraph_mode NONE).")
    compilation_config: dict[str, Any] = knob(
        {},
        'JSON, e.g. \'{"cudagraph_mode": "FULL_DECODE_ONLY"}\' (NONE, PIECEWISE, FULL, FULL_DECODE_ONLY, '
        "FULL_AND_PIECEWISE), cudagraph_capture_sizes, max_cudagraph_capture_size.",
    )
    speculative_config: dict[str, Any] = knob(
        {},
        'JSON, e.g. \'{"method": "ngram", "prompt_lookup_max": 4}\': guess tokens of each request, which the model '
        "verifies together: as many a step as pay, or always `num_speculative_tokens`; answers stay the same.",
        short="-sc",
    )
    enable_lora: bool = lora_knob(False, "Let requests have adapters (LoRA), loaded while the engine runs.")
    max_loras: int = lora_knob(1, "Most different adapters of the requests that run at once.", minimum=1)
    max_lora_rank: int = lora_knob(16, "Largest rank of an adapter.", minimum=1, maximum=512)
    lora_experts: bool = lora_knob(False, "Let adapters change experts too, for each of which slots then have room.")
    max_cpu_loras: int | None = lora_knob(
        None, "Adapters kept in the host's memory, the last used ones; default: max_loras.", minimum=1
    )
    device: str = knob("auto", "Where to run.", choices=("auto", "cuda", "cpu"))
    cpu_threads: int | None = knob(None, "Torch threads of one rank on CPU.", minimum=1, maximum=1024)
    log_level: str = server_knob(
        "info",
        "What the server logs; `debug` adds every setting with its reason, and what loading and capturing graphs says.",
        choices=("debug", "info", "warning", "error"),
    )
    disable_log_requests: bool = server_knob(True, "Do not log each request.")
    disable_log_stats: bool = server_knob(False, "Do not log throughput every ten seconds.")

    def __post_init__(self) -> None:
        check_knobs(self)
        guesses = Speculation.of(self.speculative_config, self.tensor_parallel_size)
        if guesses is not None and self.pipeline_parallel_size > 1:
            raise ConfigError(
                f"speculative_config (method {guesses.method}) does not go with pipeline_parallel_size "
                f"{self.pipeline_parallel_size}: guesses are made on one stage alone"
            )
        if self.pp_layer_partition is not None:
            parse_partition(self.pp_layer_partition, self.pipeline_parallel_size)
        self._check_engines()
        self._check_nodes()
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(f"max_cpu_loras ({self.max_cpu_loras}) must be at least max_loras ({self.max_loras})")
        limit, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if limit is not None and seqs is not None and seqs > limit:
            raise ConfigError(
                f"max_num_seqs ({seqs}) must not exceed max_num_batched_tokens ({limit}): "
                "every running request gets a token in every step"
            )

    def _check_engines(self) -> None:
        size, local, rank = self.data_parallel_size, self.data_parallel_size_local, self.data_parallel_rank
        start, hybrid = self.data_parallel_start_rank, self.data_parallel_hybrid_lb
        if self.data_parallel_external_lb and rank is None:
            raise ConfigError(
                "data_parallel_external_lb needs data_parallel_rank, which of the engines this server is: "
                f"start one server for each of 0 to {size - 1}, on ports of their own"
            )
        if rank is not None and rank >= size:
            raise ConfigError(f"data_parallel_rank must be less than data_parallel_size ({size}), got {rank}")
        if rank is not None and (hybrid or start is not None):
            raise ConfigError(
                "data_parallel_rank runs one engine, so data_parallel_hybrid_lb and data_parallel_start_rank, which "
                "choose several, cannot stand beside it"
            )
        if local is not None and local > size:
            raise ConfigError(f"data_parallel_size_local must be at most data_parallel_size ({size}), got {local}")
        apart = hybrid or self.data_parallel_address is not None
        if not apart and rank is None and (local or size) != size:
            raise ConfigError(
                f"data_parallel_size_local ({local}) leaves engines to other machines: add data_parallel_address and "
                "start these with headless and data_parallel_start_rank; or add data_parallel_hybrid_lb and a balancer "
                "in front of the machines' servers, or give data_parallel_rank"
            )
        multiple = hybrid and start is not None and start % (local or size) != 0
        if start is not None and (not apart or multiple or start + (local or size) > size):
            raise ConfigError(
                "data_parallel_start_rank needs data_parallel_address, or data_parallel_hybrid_lb and a multiple of "
                f"data_parallel_size_local ({local}), and must leave that room below data_parallel_size ({size}), got "
                f"{start}"
            )

    def _check_nodes(self) -> None:
        if self.node_rank >= self.nnodes:
            raise ConfigError(f"node_rank must be less than nnodes ({self.nnodes}), got {self.node_rank}")
        if self.nnodes == 1:
            return
        ranks = self.tensor_parallel_size * self.pipeline_parallel_size
        if ranks % self.nnodes:
            raise ConfigError(
                f"nnodes ({self.nnodes}) must divide tensor_parallel_size x pipeline_parallel_size ({ranks}): every "
                "machine runs as many ranks"
            )
        if self.master_addr is None:
            raise ConfigError("nnodes above 1 needs master_addr, the address of the machine with node_rank 0")
        if self.data_parallel_size > 1:
            raise ConfigError(
                f"nnodes ({self.nnodes}) spreads one engine over machines, and data_parallel_size is "
                f"{self.data_parallel_size}: for engines on several machines give data_parallel_address, and nnodes 1"
            )

    @property
    def ranks_per_node(self) -> int:
        """Return how many ranks of an engine are on one machine; the first ones are on the first."""
        return self.tensor_parallel_size * self.pipeline_parallel_size // self.nnodes

    @property
    def engine_ranks(self) -> range:
        """Return which of the data-parallel engines run here."""
        if self.data_parallel_rank is not None:
            return range(self.data_parallel_rank, self.data_parallel_rank + 1)
        start = self.data_parallel_start_rank or 0
        return range(start, start + (self.data_parallel_size_local or self.data_parallel_size))

    @property
    def is_further_machine(self) -> bool:
        """Return whether a front end on another machine runs the engines that are here."""
        return self.data_parallel_start_rank is not None and not self.data_parallel_hybrid_lb

    @property
    def remote_engines(self) -> range:
        """Return which of the engines run on other machines, for the front end that is here."""
        here = self.engine_ranks
        own_door = self.data_parallel_hybrid_lb or self.data_parallel_rank is not None
        return range(here.stop, here.stop if own_door else self.data_parallel_size)

    def for_engine(self, rank: int, here: int | None = None) -> EngineConfig:
        """Return the config of one of the engines, of which `here` run on its machine; None: it is this one."""
        if self.data_parallel_rank is not None:
            return self
        requests, engines = self.expected_concurrency, len(self.engine_ranks) + len(self.remote_engines)
        return self.replace(
            expected_concurrency=None if requests is None else -(-requests // engines),
            data_parallel_rank=rank, data_parallel_size_local=here or len(self.engine_ranks),
            data_parallel_start_rank=None, data_parallel_hybrid_lb=False, data_parallel_address=None,
        )  # fmt: skip

    @property
    def num_local_engines(self) -> int:
        """Return how many engines share this machine, as far as this config knows."""
        return self.data_parallel_size_local or len(self.engine_ranks)

    @property
    def joined_engines(self) -> int:
        """Return how many engines share the experts of each layer, and so take their steps together; 1: none do."""
        return self.data_parallel_size if self.enable_expert_parallel else 1

    @property
    def first_gpu(self) -> int:
        """Return the first GPU of this engine among those that its process sees."""
        gpus = self.tensor_parallel_size * self.pipeline_parallel_size
        return (self.data_parallel_rank or 0) % self.num_local_engines * gpus

    @property
    def speculation(self) -> Speculation | None:
        """Return what guesses tokens; None: nothing does."""
        return Speculation.of(self.speculative_config, self.tensor_parallel_size)

    @property
    def decode_lens(self) -> tuple[int, ...]:
        """Return the numbers of tokens that a running request may compute in a step."""
        guesses = self.speculation
        return (1,) if guesses is None else tuple(1 + length for length in guesses.lengths)

    @property
    def partition(self) -> tuple[int, ...]:
        """Return the layers of each pipeline stage; empty: there is one stage."""
        if self.pipeline_parallel_size == 1 or self.pp_layer_partition is None:
            return ()
        return parse_partition(self.pp_layer_partition, self.pipeline_parallel_size)

    @property
    def decode_len(self) -> int:
        """Return the most tokens that a running request computes in a step: its last one, and guesses behind it."""
        return max(self.decode_lens)

    def replace(self, **changes: Any) -> EngineConfig:
        """Return a copy with other values, which are checked."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Holds the settings of the HTTP server."""

    host: str = server_knob("127.0.0.1", "Address to listen on; 0.0.0.0 for all.")
    port: int = server_knob(8000, "Port to listen on.", minimum=0, maximum=65535)
    headless: bool = server_knob(False, "Serve nothing, and run the ranks of a --node-rank above 0.")
    api_server_count: int | None = server_knob(
        None,
        "HTTP processes behind the port; default: 1, but with --data-parallel-size as many as the streams need.",
        minimum=1,
        maximum=64,
        short="-asc",
    )
    api_key: list[str] = server_knob([], "Keys, one of which every route but /health asks for (VLLM_API_KEY).")
    max_request_bytes: int = server_knob(32 * 1024 * 1024, "Largest request body, in bytes.", minimum=1024)
    max_connections: int | None = server_knob(
        None,
        "Most open connections; beyond them only /health and /metrics are answered; default: what the limit of open "
        "files (ulimit -n) leaves, 16384 at most.",
        minimum=1,
    )
    header_timeout: float = server_knob(
        10.0, "Seconds that a client may take to send the headers of a request.", minimum=0.1
    )
    body_timeout: float = server_knob(
        30.0, "Seconds over which a request body must bring 500 bytes a second; then 408.", minimum=0.1
    )
    send_timeout: float = server_knob(
        300.0, "Seconds after which a client that does not read its answer is disconnected.", minimum=0.1
    )
    timeout_keep_alive: int = server_knob(
        75,
        "Seconds that a connection may idle between two requests (VLLM_HTTP_TIMEOUT_KEEP_ALIVE); 75 is longer than "
        "common clients and proxies keep one, so that it is they who close.",
        minimum=0,
    )
    shutdown_timeout: float = server_knob(
        1.5, "Seconds that open requests have to finish once the server is told to stop; new ones get 503.", minimum=0
    )
    tool_call_parser: str = server_knob(
        "auto",
        "How the model writes tool calls: `auto`, as its family and chat template say; `none`, calls stay text; or the "
        "name of a format, vLLM's or SGLang's.",
    )
    reasoning_parser: str = server_knob(
        "auto",
        "How the model marks its reasoning: `auto`, as its family and chat template say; `none`, reasoning stays in "
        "the content; or the name of a format, vLLM's or SGLang's.",
    )
    default_chat_template_kwargs: dict[str, Any] = server_knob(
        {}, "JSON: variables of the chat template where a request sets none, e.g. '{\"enable_thinking\": false}'."
    )
    response_store_bytes: int = server_knob(
        256 * 1024 * 1024, "Bytes of answers that /v1/responses keeps for later requests; 0: none.", minimum=0
    )
    response_store_seconds: float = server_knob(3600.0, "Seconds for which it keeps one.", minimum=1)
    lora_modules: list[str] = server_knob(
        [],
        'Adapters to serve, each NAME=PATH or JSON, e.g. \'{"name": "sql", "path": "/adapters/sql"}\': requests name '
        "one as their model (with --enable-lora).",
    )
    runtime_lora_folder: str | None = server_knob(
        None,
        "Let clients load and unload adapters in this folder (/v1/load_lora_adapter; VLLM_LORA_RESOLVER_CACHE_DIR).",
    )
    allowed_origins: list[str] = server_knob([], "Origins whose pages browsers let use this server (CORS).")
    root_path: str = server_knob("", "Path prefix behind a proxy.")
    uvicorn_log_level: str = server_knob(
        "warning", "Log level of the HTTP server.", choices=("critical", "error", "warning", "info", "debug")
    )
    disable_page: bool = server_knob(False, "Serve no page at /.")
    enable_request_id_headers: bool = server_knob(False, "Echo X-Request-Id in responses.")

    def __post_init__(self) -> None:
        check_knobs(self)
        if self.runtime_lora_folder is not None and (self.api_server_count or 1) > 1:
            raise ConfigError(
                f"api_server_count must be 1 with runtime_lora_folder, got {self.api_server_count}: an adapter that "
                "clients load is known to one HTTP process alone"
            )
        if any(not key.strip() for key in self.api_key):
            raise ConfigError(
                "api_key must not be empty (--api-key, VLLM_API_KEY): an empty key would let everybody in; to serve "
                "without keys, leave both away"
            )
