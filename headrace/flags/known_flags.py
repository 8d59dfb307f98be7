"""The rows of flags.py for the command lines of vLLM and of the tools around it: facts, no code.

A row with a knob's name says what the knob does in vLLM. What is not in vLLM any more has its era. Flags that matter
little share a row.
"""

from __future__ import annotations

from headrace.flags.table import AMOUNT, COUNT, JSON, SWITCH, TEXT, WHOLE, WORDS, Known, one_of

V0 = "gone with vLLM's first engine (V0)"
NO_SPECULATION = "headrace does not speculate yet; the tokens are the same without"
NO_IMAGES = "headrace takes text alone so far"
NO_REPLICAS = "a server is one replica; start one for each group of GPUs (CUDA_VISIBLE_DEVICES, --port) and balance"
ONE_REPLICA = "there is one replica, which has nobody to agree with"
ONE_HTTP = "one HTTP process serves, and its settings are its own"
NO_LORA = "headrace does not serve adapters (LoRA) yet"
NO_POOLING = "headrace generates text; it does not embed, classify or score"
NO_STRUCTURE = "headrace does not constrain output to a grammar yet; such a request gets an error"
NO_TOOLS = "tool calls and reasoning are left in the text: nothing parses them yet"
MODEL_AS_IT_IS = "the model runs as its own files say"
NO_TLS = "headrace speaks plain HTTP; put a proxy with TLS before it"
ANY_LOAD = "weights are read from safetensors, each rank only its own share"
NOT_MEASURED = "the benchmark does not do this"


def _flags(names: str, *rest: object, **more: object) -> Known:
    return Known(tuple(names.split()), *rest, **more)  # type: ignore[arg-type]


SCHEDULING = (
    _flags("--num-scheduler-steps", "Runs that many steps between two visits of the scheduler.", COUNT,
           "every step is scheduled while the one before runs", era=V0),
    _flags("--async-scheduling", "Schedules the next step while this one runs; on by default in current vLLM."),
    _flags("--use-v2-block-manager", "Chose the second block manager.", SWITCH, "there is one block manager", era=V0),
    _flags("--max-seq-len-to-capture", "Sequences longer than this ran without CUDA graphs.", WHOLE,
           "captured graphs do not depend on sequence length", era=V0),
    _flags("--swap-space", "GiB of host memory for preempted requests' KV.", AMOUNT,
           "preempted requests are recomputed, not swapped", era=V0),
    _flags("--enable-chunked-prefill", "Splits long prompts over steps so that running decodes do not wait for them."),
    _flags("--max-num-batched-tokens", "Most tokens, of prompts and decodes together, in one step.", WHOLE),
    _flags("--max-num-seqs", "Most requests that run at once.", WHOLE),
    _flags("--max-num-partial-prefills --max-long-partial-prefills --long-prefill-token-threshold",
           "How prompts in chunks share a step.", WHOLE, "prompts share a step first come, first served"),
    _flags("--disable-async-output-proc --multi-step-stream-outputs", "Output handling of the first engine.", SWITCH,
           "outputs are always handled beside the running step", era=V0),
    _flags("--num-lookahead-slots --scheduler-delay-factor", "Scheduling of the first engine.", AMOUNT,
           "the scheduler has no such slots or delays", era=V0),
    _flags("--preemption-mode", "Whether preempted requests are recomputed or swapped.", one_of("recompute", "swap"),
           "preempted requests are recomputed, not swapped", era=V0),
    _flags("--disable-cascade-attn", "Turns off shared-prefix attention.", SWITCH, "attention has no such mode"),
    _flags("--disable-hybrid-kv-cache-manager --disable-chunked-mm-input --scheduler-reserve-full-isl",
           "Details of vLLM's KV cache manager.", SWITCH, "the KV cache has one manager, without such modes"),
    _flags("--prefix-caching-hash-algo", "How blocks are named for reuse.", TEXT, "block hashes are salted SHA-256"),
    _flags("--performance-mode", "A preset of vLLM's settings.", TEXT, "settings are derived from hardware and model"),
    _flags("--stream-interval", "Tokens between two messages of a stream.", COUNT, "every token is sent as it comes"),
    _flags("--enable-dbo --enable-sleep-mode", "Modes of vLLM's engine.", SWITCH, "the engine has no such mode"),
    _flags("--disable-sliding-window", "Cuts contexts to the model's window.", SWITCH, MODEL_AS_IT_IS,
           accepts=("false",)),
)  # fmt: skip

MEMORY = (
    _flags("--gpu-memory-utilization", "Share of the GPU's memory for this instance.", AMOUNT),
    _flags("--max-model-len", "Longest sequence, prompt and output together.", WHOLE),
    _flags("--block-size", "Tokens in one block of the KV cache.", WHOLE),
    _flags("--kv-cache-dtype", "Type of the KV cache.", TEXT),
    _flags("--calculate-kv-scales", "Measures the scales of an fp8 KV cache where the checkpoint brings none."),
    _flags("--kv-cache-memory-bytes", "Size of the KV cache itself.", WHOLE,
           "give --gpu-memory-utilization or --num-gpu-blocks-override", accepts=()),
    _flags("--cpu-offload-gb", "Keeps that much of the weights in host memory.", AMOUNT,
           "weights are kept on the GPU whole", accepts=("0",)),
    _flags("--kv-offloading-size --kv-offloading-backend", "Host memory for KV blocks that the GPU drops.", TEXT,
           "blocks that the GPU drops are recomputed"),
    _flags("--kv-transfer-config --kv-events-config --ec-transfer-config", "Moves KV between servers.", JSON,
           "prompts and decodes run in one server", accepts=("{}",)),
    _flags("--mamba-cache-dtype --mamba-ssm-cache-dtype --mamba-block-size --mamba-cache-mode",
           "Cache of state-space layers.", TEXT, "no model here has state-space layers"),
    _flags("--quantization-param-path", "File of KV scales.", TEXT, "scales are read from the checkpoint alone",
           accepts=(), era=V0),
)  # fmt: skip

PARALLELISM = (
    _flags("--tensor-parallel-size", "GPUs over which every layer is split.", WHOLE),
    _flags("--pipeline-parallel-size -pp", "Splits the layers into stages, one a group of GPUs.", COUNT,
           "a model is split inside its layers alone (--tensor-parallel-size)", accepts=("1",)),
    _flags("--data-parallel-size -dp", "That many replicas behind one port.", COUNT, NO_REPLICAS, accepts=("1",)),
    _flags("--data-parallel-size-local -dpl", "Replicas on this machine.", WHOLE, NO_REPLICAS, accepts=("0", "1")),
    _flags("--data-parallel-rank -dpn", "Which replica this server is.", WHOLE, NO_REPLICAS, accepts=("0",)),
    _flags("--data-parallel-start-rank -dpr", "First replica of this machine.", WHOLE, NO_REPLICAS, accepts=("0",)),
    _flags("--data-parallel-address -dpa", "Where replicas meet.", TEXT, ONE_REPLICA),
    _flags("--data-parallel-rpc-port -dpp", "Port where replicas meet.", WHOLE, ONE_REPLICA),
    _flags("--data-parallel-backend -dpb", "What starts replicas.", one_of("mp", "ray"), ONE_REPLICA),
    _flags("--data-parallel-hybrid-lb -dph", "A balancer outside chooses the machine.", SWITCH, ONE_REPLICA),
    _flags("--data-parallel-external-lb -dpe", "A balancer outside chooses the replica.", SWITCH, ONE_REPLICA),
    _flags("--disable-nccl-for-dp-synchronization", "Replicas agree over the CPU, not over NCCL.", SWITCH, ONE_REPLICA),
    _flags("--all2all-backend", "How tokens travel to other GPUs' experts.",
           one_of("naive", "allgather_reducescatter", "pplx", "deepep_high_throughput", "deepep_low_latency", "mori",
                  "flashinfer_all2allv", "mori_high_throughput", "mori_low_latency", "nixl_ep"),
           "experts are split like other layers, so no token travels"),
    _flags("--enable-expert-parallel -ep", "Gives every GPU whole experts instead of a slice of each.", SWITCH,
           "experts are split like other layers, by tensor parallelism; the tokens are the same"),
    _flags("--enable-eplb", "Moves experts so that GPUs are loaded alike.", SWITCH,
           "every GPU has a slice of every expert"),
    _flags("--eplb-config --num-redundant-experts --expert-placement-strategy", "Where experts are placed.", TEXT,
           "every GPU has a slice of every expert"),
    _flags("--decode-context-parallel-size -dcp", "Splits the cache of a sequence over GPUs.", COUNT,
           "a sequence is on all GPUs of its replica", accepts=("1",)),
    _flags("--prefill-context-parallel-size -pcp", "Splits a prompt over GPUs.", COUNT,
           "a sequence is on all GPUs of its replica", accepts=("1",)),
    _flags("--nnodes -n", "Machines of one replica.", COUNT, "a replica is on one machine", accepts=("1",)),
    _flags("--node-rank -r", "Which machine this is.", WHOLE, "a replica is on one machine", accepts=("0",)),
    _flags("--master-addr --master-port", "Where machines meet.", TEXT, "a replica is on one machine"),
    _flags("--headless", "Ranks without a server.", SWITCH, "a replica is on one machine", accepts=("false",)),
    _flags("--distributed-executor-backend", "What starts the ranks: processes of this machine (mp), or ray.",
           one_of("mp", "ray", "uni"), "ranks are processes of this machine; there is nothing else to choose"),
    _flags("--worker-use-ray --engine-use-ray --ray-workers-use-nsight", "Starts ranks by ray.", SWITCH,
           "ranks are processes of this machine; there is nothing else to choose", era=V0),
    _flags("--max-parallel-loading-workers", "Loads weights in turns.", COUNT, ANY_LOAD),
    _flags("--disable-custom-all-reduce", "Adds GPUs' results by NCCL alone, without vLLM's own kernel.", SWITCH,
           "GPUs' results are added by NCCL as it is"),
)  # fmt: skip

SPECULATION = (
    _flags("--speculative-config -sc", "A draft guesses tokens that the model then verifies together.", JSON,
           NO_SPECULATION),
    _flags("--speculative-model", "The draft model.", TEXT, NO_SPECULATION, era=V0),
    _flags("--num-speculative-tokens", "Tokens guessed at a time.", WHOLE, NO_SPECULATION, era=V0),
    _flags("--speculative-draft-tensor-parallel-size --speculative-max-model-len --speculative-disable-by-batch-size "
           "--speculative-model-quantization --ngram-prompt-lookup-max --ngram-prompt-lookup-min "
           "--spec-decoding-acceptance-method --typical-acceptance-sampler-posterior-threshold "
           "--typical-acceptance-sampler-posterior-alpha --spec-method --spec-model --spec-tokens",
           "Details of speculation.", TEXT, NO_SPECULATION, era=V0),
    _flags("--disable-logprobs-during-spec-decoding --speculative-disable-mqa-scorer", "Details of speculation.",
           SWITCH, NO_SPECULATION, era=V0),
)  # fmt: skip

MODEL = (
    _flags("--trust-remote-code", "Runs Python code that comes with the model's files."),
    _flags("--dtype", "Type of activations, and of weights that are not quantized.", TEXT),
    _flags("--quantization -q", "How linears are held: rounds a plain checkpoint as it loads, or names the format of a "
           "quantized one.", TEXT),
    _flags("--attention-backend", "Which attention kernels run.", TEXT),
    _flags("--enforce-eager", "No CUDA graphs and no compilation."),
    _flags("--compilation-config", "CUDA graphs and compilation.", JSON),
    _flags("-cc", "CUDA graphs and compilation.", JSON, becomes="--compilation-config"),
    _flags("--cudagraph-capture-sizes", "Batch sizes that get a CUDA graph.", WORDS,
           becomes="--compilation-config.cudagraph_capture_sizes"),
    _flags("--cuda-graph-sizes", "Batch sizes that get a CUDA graph, or the largest.", WORDS,
           "give --cudagraph-capture-sizes or --max-cudagraph-capture-size", accepts=()),
    _flags("--max-cudagraph-capture-size", "Largest batch that gets a CUDA graph.", WHOLE,
           becomes="--compilation-config.max_cudagraph_capture_size"),
    _flags("-O --optimization-level", "How much is compiled.", TEXT, "nothing is compiled by torch"),
    _flags("-O0 -O1 -O2 -O3", "How much is compiled.", SWITCH, "nothing is compiled by torch"),
    _flags("--attention-config -ac", "Settings of attention.", JSON, "give --attention-backend", accepts=("{}",)),
    _flags("--kernel-config --moe-backend --linear-backend --mm-encoder-attn-backend --gdn-prefill-backend",
           "Which kernels run.", TEXT, "kernels are chosen by a table that is checked at load"),
    _flags("--enable-flashinfer-autotune", "Tunes kernels at start.", SWITCH, "kernels come with their tuning"),
    _flags("--additional-config --model-loader-extra-config --profiler-config --compilation-backend-config",
           "Settings of plugins and loaders.", TEXT, "there are no such plugins"),
    _flags("--use-tqdm-on-load", "A progress bar while loading.", SWITCH, "there is one where somebody watches"),
    _flags("--safetensors-load-strategy --pt-load-map-location --ignore-patterns", "How files are read.", TEXT,
           ANY_LOAD),
    _flags("--worker-cls", "The class of a rank.", TEXT, "a rank cannot be replaced", accepts=("auto",)),
    _flags("--worker-extension-cls --logits-processors --io-processor-plugin --scheduler-cls --reasoning-parser-plugin "
           "--tool-parser-plugin --logits-processor-pattern", "Loads Python code of the user's.", TEXT,
           "headrace loads no code from elsewhere", accepts=()),
    _flags("--model-impl", "Whose implementation of the model runs.", TEXT, "every family here is native",
           accepts=("auto", "vllm")),
    _flags("--runner --task --convert", "What the model is for.", TEXT, NO_POOLING,
           accepts=("auto", "generate", "none")),
    _flags("--override-pooler-config --pooler-config", "Settings of embedding models.", JSON, NO_POOLING,
           accepts=("{}",)),
    _flags("--tokenizer-mode", "Which tokenizer code runs.", TEXT, "tokenizer.json is read",
           accepts=("auto", "hf", "slow")),
    _flags("--config-format", "Which files describe the model.", TEXT, "config.json is read", accepts=("auto", "hf")),
    _flags("--code-revision", "Revision of the code that comes with a model.", TEXT,
           "code from a model's repository is never run"),
    _flags("--tokenizer-revision --hf-config-path", "Takes part of the model from elsewhere.", TEXT,
           "give a folder that holds what you want", accepts=()),
    _flags("--hf-token", "Access token of the hub.", TEXT, "set HF_TOKEN, or log in with the hub's own command",
           accepts=(), secret=True),
    _flags("--hf-overrides --rope-scaling", "Changes the model's config.json.", JSON,
           "change config.json in a folder of your own", accepts=("{}",)),
    _flags("--rope-theta", "Changes the model's config.json.", AMOUNT, "change config.json in a folder of your own",
           accepts=()),
    _flags("--override-generation-config", "Sampling defaults of requests.", JSON,
           "a request's own fields, or generation_config.json in a folder of your own", accepts=("{}",)),
    _flags("--logprobs-mode", "What logprobs mean.", TEXT, "logprobs are those before temperature and filters",
           accepts=("raw_logprobs",)),
    _flags("--max-logprobs", "Most logprobs that a request may ask for.", TEXT, "the limit is fixed"),
    _flags("--enable-prompt-embeds", "Takes embeddings as prompts.", SWITCH, "prompts are text or token ids",
           accepts=("false",)),
    _flags("--enable-lora --enable-prompt-adapter --enable-lora-bias", "Serves adapters.", SWITCH, NO_LORA,
           accepts=("false",)),
    _flags("--lora-modules --prompt-adapters --lora-path", "Adapters to serve.", WORDS, NO_LORA, accepts=()),
    _flags("--max-loras --max-lora-rank --max-cpu-loras --lora-dtype --lora-extra-vocab-size --default-mm-loras",
           "Limits of adapters.", TEXT, NO_LORA),
    _flags("--fully-sharded-loras", "How adapters are split.", SWITCH, NO_LORA),
    _flags("--mm-encoder-tp-mode", "Whether the image encoder is split over GPUs or copied to each (`data`).",
           one_of("weights", "data"), NO_IMAGES),
    _flags("--limit-mm-per-prompt --mm-processor-kwargs --media-io-kwargs --allowed-local-media-path "
           "--mm-processor-cache-gb --mm-processor-cache-type --mm-shm-cache-max-object-size-mb --video-pruning-rate "
           "--mm-encoder-only", "Images, audio and video.", TEXT, NO_IMAGES),
    _flags("--allowed-media-domains", "Where images may come from.", WORDS, NO_IMAGES),
    _flags("--skip-mm-profiling --interleave-mm-strings --disable-mm-preprocessor-cache --language-model-only "
           "--enable-mm-embeds", "Images, audio and video.", SWITCH, NO_IMAGES),
    _flags("--guided-decoding-backend --structured-outputs-config", "What constrains output to a grammar.", TEXT,
           NO_STRUCTURE),
    _flags("--guided-decoding-disable-fallback --guided-decoding-disable-any-whitespace "
           "--guided-decoding-disable-additional-properties", "Details of grammars.", SWITCH, NO_STRUCTURE),
)  # fmt: skip

SERVER = (
    _flags("--api-server-count -asc", "HTTP processes.", COUNT, ONE_HTTP, scope="server"),
    _flags("--disable-frontend-multiprocessing", "Engine and HTTP in one process.", SWITCH,
           "the engine has a process of its own", scope="server"),
    _flags("--disable-uvicorn-access-log --disable-fastapi-docs --enable-server-load-tracking --enable-ssl-refresh "
           "--allow-credentials --enable-tokenizer-info-endpoint --enable-log-outputs --enable-log-deltas "
           "--log-error-stack --disable-access-log", "Details of vLLM's HTTP server.", SWITCH, ONE_HTTP,
           scope="server"),
    _flags("--allowed-methods --allowed-headers --disable-access-log-for-endpoints --log-config-file "
           "--h11-max-incomplete-event-size --h11-max-header-count --response-role --data-parallel-supervisor-port",
           "Details of vLLM's HTTP server.", TEXT, ONE_HTTP, scope="server"),
    _flags("--max-log-len", "Most characters of a prompt in the log.", WHOLE, "prompts are not logged", scope="server"),
    _flags("--chat-template-content-format", "How messages are handed to the template.",
           one_of("auto", "string", "openai"), "what the template needs is seen from it", scope="server"),
    _flags("--enable-prompt-tokens-details --enable-force-include-usage", "More usage figures in answers.", SWITCH,
           "usage is sent where a request asks for it", scope="server"),
    _flags("--return-tokens-as-token-ids --trust-request-chat-template --tokens-only", "Changes answers or requests.",
           SWITCH, "the API is OpenAI's", accepts=("false",), scope="server"),
    _flags("--enable-auto-tool-choice --enable-reasoning --exclude-tools-when-tool-choice-none", "Parses tool calls.",
           SWITCH, NO_TOOLS, scope="server"),
    _flags("--tool-call-parser --reasoning-parser --tool-server", "Which syntax of tool calls or reasoning is parsed.",
           TEXT, NO_TOOLS),
    _flags("--middleware", "Loads Python code of the user's.", TEXT, "headrace loads no code from elsewhere",
           accepts=(), scope="server"),
    _flags("--ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs --ssl-ciphers", "HTTPS.", TEXT, NO_TLS,
           accepts=(), scope="server"),
    _flags("--uds", "Listens on a socket file.", TEXT, "give --host and --port", accepts=(), scope="server"),
    _flags("--otlp-traces-endpoint --collect-detailed-traces --show-hidden-metrics-for-version",
           "Traces and metrics.", TEXT, "figures are on /metrics"),
    _flags("--kv-cache-metrics --cudagraph-metrics --enable-mfu-metrics --enable-layerwise-nvtx-tracing "
           "--enable-logging-iteration-details --aggregate-engine-logging", "More metrics and logs.", SWITCH,
           "figures are on /metrics"),
)  # fmt: skip

FLAGS = (*SCHEDULING, *MEMORY, *PARALLELISM, *SPECULATION, *MODEL, *SERVER)
