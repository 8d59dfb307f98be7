"""The rows of flags.py for environment variables: vLLM's own, AITER's, and those of libraries below: facts.

A name that ends in * stands for all variables that begin so.
"""

from __future__ import annotations

from headrace.flags.table import AMOUNT, SWITCH, TEXT, WHOLE, Known, one_of

AITER = "AITER's kernels are not part of headrace, which runs kernels of its own on every GPU"
ONE_ATTENTION = "ordinary attention is served by headrace's own kernels, which the start-up log names"
OWN_KERNELS = "headrace's kernels choose by the shapes they get"
NO_QUICK_REDUCE = "GPUs' results are added at full precision"
PROCESSES = "processes are started and watched in headrace's own way"
NO_COMPILE = "nothing is compiled by torch"
NO_TELEMETRY = "headrace reports nothing to anybody"
LOGS = "headrace logs in its own way; --disable-log-stats and --uvicorn-log-level change it"
ONE_REPLICA = "there is one replica, which has nobody to agree with"
V0 = "gone with vLLM's first engine (V0)"
UNKNOWN = "a setting of vLLM that headrace has nothing for"


def _variables(names: str, *rest: object, **more: object) -> Known:
    return Known(tuple(names.split()), *rest, **more)  # type: ignore[arg-type]


def _aiter(name: str, does: str) -> Known:
    return Known((name,), does, SWITCH, AITER, hardware="amd")


def _below(names: str, does: str, who: str, kind: object = TEXT, hardware: str = "") -> Known:
    return Known(tuple(names.split()), does, kind, f"read by {who}", fate="library", hardware=hardware)  # type: ignore[arg-type]


AITER_SWITCHES = (
    _aiter("VLLM_ROCM_USE_AITER", "Master switch of AITER, AMD's Tensor Engine; off by default."),
    _aiter("VLLM_ROCM_USE_AITER_LINEAR", "AITER's quantizing and products for linears; on with the master."),
    _aiter("VLLM_ROCM_USE_AITER_MOE", "AITER's fused mixture of experts; on with the master."),
    _aiter("VLLM_ROCM_USE_AITER_RMSNORM", "AITER's norms; on with the master."),
    _aiter("VLLM_ROCM_USE_AITER_MLA", "AITER's attention over latents (DeepSeek); on with the master."),
    _aiter("VLLM_ROCM_USE_AITER_MHA", "AITER's ordinary attention; on with the master."),
    _aiter("VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION",
           "AITER's one attention kernel for prompts and decodes; off, and only with AITER_MHA=0."),
    _aiter("VLLM_ROCM_USE_AITER_FP8BMM", "fp8 products of latent attention; on with the master."),
    _aiter("VLLM_ROCM_USE_AITER_FP4BMM", "fp4 products of latent attention; on with the master; for MI350X, MI355X."),
    _aiter("VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS", "Shared experts inside the fused mixture of experts; off."),
    _aiter("VLLM_ROCM_USE_AITER_FP4_ASM_GEMM", "Assembly fp4 products of few tokens; off; for MI350X, MI355X."),
    _aiter("VLLM_ROCM_USE_AITER_PAGED_ATTN", "AITER's paged attention of the first engine; off."),
    _aiter("VLLM_ROCM_USE_AITER_TRITON_ROPE", "AITER's Triton rotary embedding; off."),
    _aiter("VLLM_ROCM_USE_AITER_TRITON_GEMM", "AITER's Triton products; on with the master."),
    _aiter("VLLM_ROCM_USE_AITER_CUSTOM_AR", "AITER's all-reduce; on with the master."),
    _aiter("VLLM_ROCM_USE_AITER_LINEAR_HIPBMM", "Products of linears by hipBLASLt; off."),
    _variables("VLLM_ROCM_USE_AITER_* VLLM_USE_AITER_*", "A sub-switch of AITER.", TEXT, AITER, hardware="amd"),
    _variables("AITER_ONLINE_TUNE", "AITER tunes a product that it has no kernel for, instead of failing.", SWITCH,
               AITER, hardware="amd"),
    _variables("AITER_*", "A setting of AITER's.", TEXT, AITER, hardware="amd"),
    _variables("VLLM_ROCM_USE_SKINNY_GEMM", "Kernels for products with few tokens; on.", SWITCH, OWN_KERNELS,
               hardware="amd"),
    _variables("VLLM_ROCM_FP8_PADDING VLLM_ROCM_MOE_PADDING", "Pads weights for better memory access; on.", SWITCH,
               "weights lie as the kernels want them", hardware="amd"),
    _variables("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
               "Another layout of the KV cache, for ROCM_AITER_FA with 32 requests or more; off.", SWITCH,
               "the KV cache has one layout", hardware="amd"),
    _variables("VLLM_ROCM_FP8_MFMA_PAGE_ATTN", "fp8 units for paged attention; off.", SWITCH, OWN_KERNELS,
               hardware="amd"),
)  # fmt: skip

ATTENTION = (
    _variables("VLLM_ATTENTION_BACKEND", "Which attention kernels run.", TEXT, fate="ours",
               becomes="--attention-backend", era="replaced by --attention-backend"),
    _variables("VLLM_USE_TRITON_FLASH_ATTN", "On ROCm: Triton's flash attention instead of CK's.", SWITCH,
               ONE_ATTENTION, hardware="amd", era=V0),
    _variables("VLLM_V1_USE_PREFILL_DECODE_ATTENTION", "Separate kernels for prompts and decodes; now ROCM_ATTN.",
               SWITCH, ONE_ATTENTION, hardware="amd", era="replaced by --attention-backend ROCM_ATTN"),
    _variables("VLLM_ROCM_CUSTOM_PAGED_ATTN", "A HIP kernel for decodes in ROCM_ATTN; on.", SWITCH, ONE_ATTENTION,
               hardware="amd"),
    _variables("VLLM_MLA_DISABLE", "Runs latent attention as ordinary attention, with its large cache.", SWITCH,
               "how attention is computed follows from the model"),
    _variables("VLLM_USE_FLASHINFER_SAMPLER VLLM_USE_FLASHINFER_* VLLM_FLASHINFER_* VLLM_USE_TRTLLM_* VLLM_USE_CUDNN_*",
               "Kernels of FlashInfer.", TEXT, OWN_KERNELS, hardware="nvidia"),
    _variables("VLLM_FLASH_ATTN_VERSION", "Version of FlashAttention.", TEXT, ONE_ATTENTION, hardware="nvidia"),
    _variables("VLLM_KV_CACHE_LAYOUT", "Order of a KV block's dimensions.", one_of("NHD", "HND"),
               "the KV cache has one layout"),
)  # fmt: skip

KERNELS = (
    _variables("VLLM_USE_TRITON_AWQ", "Triton kernels for AWQ; ROCm has no others.", SWITCH, OWN_KERNELS),
    _variables("VLLM_USE_DEEP_GEMM VLLM_USE_DEEP_GEMM_* VLLM_MOE_USE_DEEP_GEMM VLLM_DEEP_GEMM_* VLLM_MARLIN_* "
               "VLLM_MXFP4_USE_MARLIN VLLM_DISABLED_KERNELS VLLM_NVFP4_GEMM_BACKEND VLLM_BLOCKSCALE_*",
               "Which kernels run.", TEXT, OWN_KERNELS),
    _variables("VLLM_FUSED_MOE_CHUNK_SIZE VLLM_ENABLE_FUSED_MOE_ACTIVATION_CHUNKING VLLM_TUNED_CONFIG_FOLDER",
               "How experts run.", TEXT, OWN_KERNELS),
    _variables("VLLM_DISABLE_COMPILE_CACHE VLLM_USE_STANDALONE_COMPILE VLLM_ENABLE_INDUCTOR_* VLLM_USE_AOT_COMPILE "
               "VLLM_FORCE_AOT_LOAD VLLM_COMPILE_*", "Compilation by torch.", TEXT, NO_COMPILE),
    _variables("Q_SCALE_CONSTANT K_SCALE_CONSTANT V_SCALE_CONSTANT", "Divisors of calculated KV scales.", AMOUNT,
               "scales follow from what is measured at load"),
    _variables("SAFETENSORS_FAST_GPU", "Reads weights straight to the GPU.", SWITCH,
               "each rank reads only its own share, in parallel"),
)  # fmt: skip

COLLECTIVES = (
    _variables("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
               "Adds GPUs' large results by a kernel that sends fewer bits; only with tensor parallelism.",
               one_of("NONE", "FP", "INT8", "INT6", "INT4"), NO_QUICK_REDUCE, hardware="amd"),
    _variables("VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16", "Casts bfloat16 to float16 on the way; on.", SWITCH,
               NO_QUICK_REDUCE, hardware="amd"),
    _variables("VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB",
               "Sizes that Quick Reduce takes, in MB; 2048 at most by default.", WHOLE, NO_QUICK_REDUCE,
               hardware="amd"),
    _variables("VLLM_ALL2ALL_BACKEND", "How tokens travel to other GPUs' experts.", TEXT,
               "experts are split like other layers, so no token travels", era="replaced by --all2all-backend"),
    _variables("VLLM_ALLREDUCE_USE_SYMM_MEM VLLM_USE_NCCL_SYMM_MEM VLLM_ALLREDUCE_USE_FLASHINFER VLLM_DISABLE_PYNCCL "
               "VLLM_SKIP_P2P_CHECK", "How GPUs' results are added.", SWITCH,
               "GPUs' results are added by NCCL as it is"),
    _variables("VLLM_NCCL_SO_PATH VLLM_NCCL_INCLUDE_PATH", "Where NCCL is.", TEXT, "torch's own NCCL is used"),
    _variables("VLLM_DP_* VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_MOE_DP_CHUNK_SIZE VLLM_DEEPEP_* VLLM_RAY_DP_*",
               "Replicas that agree with each other.", TEXT, ONE_REPLICA),
    _variables("VLLM_PP_LAYER_PARTITION", "Layers of each pipeline stage.", TEXT,
               "a model is split inside its layers alone (--tensor-parallel-size)"),
    _variables("VLLM_NIXL_* VLLM_MOONCAKE_* VLLM_MORIIO_*", "Moves KV between servers.", TEXT,
               "prompts and decodes run in one server"),
    _below("NCCL_MIN_NCHANNELS", "Least number of channels for collectives; AMD's guides set 112 on MI300X.",
           "NCCL and RCCL", WHOLE),
    _variables("RCCL_NET_GDR_LEVEL", "Meant for network cards that read GPU memory.", TEXT,
               "RCCL reads NCCL_NET_GDR_LEVEL, and not this name", hardware="amd"),
    _variables("RCCL_DEBUG", "Meant for RCCL's log.", TEXT, "RCCL reads NCCL_DEBUG, and not this name", hardware="amd"),
    _variables("RCCL_DEBUG_SUBSYS", "Meant for parts of RCCL's log.", TEXT,
               "RCCL reads NCCL_DEBUG_SUBSYS, and not this name", hardware="amd"),
    _below("RCCL_*", "A setting of RCCL's.", "RCCL", hardware="amd"),
    _below("NCCL_*", "A setting of NCCL's; RCCL has the same names.", "NCCL and RCCL"),
    _below("GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME", "The network that ranks meet on.", "torch"),
)  # fmt: skip

MACHINE = (
    _below("CUDA_VISIBLE_DEVICES", "Which GPUs the process sees; vLLM reads it on ROCm too.", "the driver"),
    _below("HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES GPU_DEVICE_ORDINAL", "Which AMD GPUs the process sees.",
           "AMD's runtime", hardware="amd"),
    _below("HIP_FORCE_DEV_KERNARG", "Keeps kernel arguments in GPU memory: each launch starts 2 to 3 us earlier.",
           "AMD's runtime", SWITCH, "amd"),
    _below("TORCH_BLAS_PREFER_HIPBLASLT", "hipBLASLt for matrix products instead of rocBLAS.", "torch on ROCm", SWITCH,
           "amd"),
    _below("PYTORCH_TUNABLEOP_*", "torch times the libraries' kernels for each product it meets and keeps the best.",
           "torch, on ROCm above all"),
    _below("HSA_* HIP_* AMD_* GPU_* ROC_* ROCM_* AMDGCN_* MIOPEN_* HIPBLASLT_*", "A setting of AMD's runtime.",
           "AMD's runtime", hardware="amd"),
    _below("CUDA_*", "A setting of NVIDIA's driver.", "the driver", hardware="nvidia"),
    _below("PYTORCH_* TORCH_* TORCHINDUCTOR_* TRITON_* OMP_NUM_THREADS", "A setting of torch or Triton.",
           "torch and Triton"),
    _below("HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_ENDPOINT HF_HUB_ENABLE_HF_TRANSFER HF_XET_HIGH_PERFORMANCE "
           "HUGGINGFACE_HUB_CACHE TRANSFORMERS_CACHE", "Where files of the hub are kept and come from.",
           "the hub's library"),
    Known(("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN"), "Access token of the hub.", TEXT,
          "read by the hub's library", fate="library", secret=True),
)  # fmt: skip

ENGINE = (
    _variables("VLLM_USE_V1", "Chose the engine: 0 the first, 1 the second.", SWITCH, "there is one engine", era=V0),
    _variables("VLLM_CPU_KVCACHE_SPACE", "GiB of the KV cache on CPU.", AMOUNT, fate="ours",
               becomes="--cpu-kv-cache-gib"),
    _variables("VLLM_BATCH_INVARIANT", "The same tokens whatever else runs.", SWITCH, fate="ours",
               becomes="--batch-invariant"),
    Known(("VLLM_API_KEY",), "The key that clients must send.", TEXT, fate="ours", becomes="--api-key", secret=True),
    _variables("VLLM_USE_MODELSCOPE", "Takes models from ModelScope.", one_of("True", "False", "1", "0"),
               "models come from folders or the Hugging Face hub (HF_ENDPOINT names a mirror)", accepts=("false", "0")),
    _variables("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "Allows a context longer than the model's own.", SWITCH,
               "a context longer than the model's own is refused"),
    _variables("VLLM_WORKER_MULTIPROC_METHOD VLLM_ENABLE_V1_MULTIPROCESSING VLLM_RPC_* VLLM_HOST_IP VLLM_PORT "
               "VLLM_LOOPBACK_IP VLLM_RINGBUFFER_* VLLM_MQ_* VLLM_ENGINE_* VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS "
               "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_SLEEP_WHEN_IDLE VLLM_USE_RAY_* VLLM_RAY_* "
               "VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU", "Processes of vLLM.", TEXT, PROCESSES),
    _variables("VLLM_LOGGING_* VLLM_CONFIGURE_LOGGING VLLM_LOG_* VLLM_DEBUG_* VLLM_TRACE_FUNCTION "
               "VLLM_TORCH_PROFILER_*", "Logs, profiles.", TEXT, LOGS),
    _variables("VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK VLLM_USAGE_*", "Reports of use.", TEXT,
               NO_TELEMETRY),
    _variables("VLLM_CACHE_ROOT VLLM_CONFIG_ROOT VLLM_ASSETS_CACHE", "Folders of vLLM.", TEXT,
               "HEADRACE_CACHE names the folder of ours"),
    _variables("VLLM_*", "A variable of vLLM.", TEXT, UNKNOWN),
)  # fmt: skip

VARIABLES = (*AITER_SWITCHES, *ATTENTION, *KERNELS, *COLLECTIVES, *MACHINE, *ENGINE)
