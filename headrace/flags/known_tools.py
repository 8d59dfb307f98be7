"""The rows of flags.py for what stands around a server in a command line: benchmarks, downloads, containers."""

from __future__ import annotations

from headrace.flags.table import AMOUNT, COUNT, JSON, SWITCH, TEXT, WHOLE, WORDS, Known

NOT_MEASURED = "the benchmark does not do this"
FULL_LENGTH = "offline benchmarks always run to the full output length"
NO_QUANTIZE = "headrace has no quantize command yet; --quantization fp8 rounds a plain checkpoint as it loads"
OF_THE_CONTAINER = "a matter of the container, not of the engine"


def _bench(names: str, *rest: object, **more: object) -> Known:
    return Known(tuple(names.split()), *rest, scope="bench", **more)  # type: ignore[arg-type, misc]


def _ours(names: str, does: str, kind: object = WHOLE) -> Known:
    return Known(tuple(names.split()), does, kind, fate="ours", scope="bench")  # type: ignore[arg-type]


HELP = tuple(
    Known(("--help", "-h"), "Shows the flags.", SWITCH, fate="ours", scope=scope)
    for scope in ("engine", "bench", "quantize", "download")
)
BENCH = (
    _ours("--model", "The model; for `bench serve` the name to send.", TEXT),
    _ours("--input-len --random-input-len", "Prompt tokens of a request.", COUNT),
    _ours("--output-len --random-output-len", "Output tokens of a request.", COUNT),
    _ours("--batch-size", "Prompts that run together.", COUNT),
    _ours("--n", "Completions for each prompt.", COUNT),
    _ours("--num-iters", "Runs to measure.", COUNT),
    _ours("--num-iters-warmup", "Runs before measuring."),
    _ours("--output-json --result-filename", "Where the result is written.", TEXT),
    _ours("--num-prompts", "Requests to send.", COUNT),
    _ours("--dataset-path --dataset", "The file that prompts come from.", TEXT),
    _ours("--dataset-name", "Where prompts come from.", TEXT),
    _ours("--random-range-ratio", "How far random lengths vary.", AMOUNT),
    _ours("--random-prefix-len --prefix-len", "Tokens that all random prompts share in front."),
    _ours("--sharegpt-output-len", "Output tokens of a ShareGPT request.", COUNT),
    _ours("--max-input-len", "Cuts prompts of a trace.", COUNT),
    _ours("--max-output-len", "Cuts outputs of a trace.", COUNT),
    _ours("--seed", "Seeds prompts, lengths and arrivals."),
    _ours("--num-warmups", "Requests before measuring."),
    _ours("--temperature", "Sampling temperature; 0 is greedy.", AMOUNT),
    _ours("--disable-detokenize", "Leaves text out of what is measured.", SWITCH),
    _ours("--disable-tqdm", "No progress bar.", SWITCH),
    _ours("--backend --endpoint-type", "The API that the client talks.", TEXT),
    _ours("--base-url", "Where the server is.", TEXT),
    _ours("--host", "The server's address.", TEXT),
    _ours("--port", "The server's port."),
    _ours("--endpoint", "Path of the API.", TEXT),
    _ours("--tokenizer", "The tokenizer.", TEXT),
    _ours("--served-model-name", "The name to send.", TEXT),
    _ours("--vocab-size", "Bound of random token ids.", COUNT),
    _ours("--api-key", "The key to send.", TEXT),
    _ours("--ready-check-timeout-sec", "How long to wait for the server.", AMOUNT),
    _ours("--request-rate", "Requests a second; inf sends all at once.", AMOUNT),
    _ours("--burstiness", "Shape of the gaps between requests.", AMOUNT),
    _ours("--max-concurrency", "Most requests under way at once.", COUNT),
    _ours("--trace-speed", "Replays a trace that many times as fast.", AMOUNT),
    _ours("--ignore-eos", "Goes on to the full output length.", SWITCH),
    _ours("--extra-body", "Further fields of each request.", JSON),
    _ours("--num-client-processes", "Clients to spread the load over.", COUNT),
    _ours("--percentile-metrics", "Which of ttft, tpot, itl and e2el are reported.", TEXT),
    _ours("--metric-percentiles", "Which percentiles are reported.", TEXT),
    _ours("--goodput", "Limits that a good request keeps.", WORDS),
    _ours("--label", "Prefix of the result's name.", TEXT),
    _ours("--save-result", "Writes the result.", SWITCH),
    _ours("--save-detailed", "Adds every request's figures.", SWITCH),
    _ours("--result-dir", "Folder of the result.", TEXT),
    _ours("--metadata", "KEY=VALUE pairs to keep.", WORDS),
    # What vLLM's benchmarks have and ours have not. A benchmark that lacks one of the above says so itself.
    _bench("--async-engine --disable-frontend-multiprocessing", "Runs the engine as the server does.", SWITCH,
           "the same engine core runs either way"),
    _bench("--profile", "Writes a profile.", SWITCH, "no profile is written"),
    _bench("--profile-result-dir", "Where the profile goes.", TEXT, "no profile is written"),
    _bench("--use-beam-search", "Beam search.", SWITCH, NOT_MEASURED, accepts=("false",)),
    _bench("--best-of", "Candidates for each answer.", COUNT, NOT_MEASURED, accepts=("1",)),
    _bench("--lora-modules --lora-path", "Requests for adapters.", WORDS, "adapters (LoRA) are not served yet",
           accepts=()),
    _bench("--top-p --top-k --min-p --frequency-penalty --presence-penalty --repetition-penalty",
           "Sampling parameters to send.", AMOUNT, "send it with --extra-body", accepts=()),
    _bench("--logprobs", "Logprobs to ask for.", WHOLE, "send it with --extra-body", accepts=()),
    _bench("--ramp-up-strategy --ramp-up-start-rps --ramp-up-end-rps", "A rate that grows.", TEXT, NOT_MEASURED,
           accepts=()),
    _bench("--header", "Headers to send.", WORDS, NOT_MEASURED, accepts=()),
    _bench("--append-result --no-stream --no-oversample --skip-chat-template --disable-shuffle --insecure "
           "--enable-multimodal-chat --plot-timeline --plot-dataset-stats", "Details of vLLM's benchmark.", SWITCH,
           NOT_MEASURED),
    _bench("--request-id-prefix --hf-name --hf-subset --hf-split --hf-max-batch-size --hf-output-len "
           "--custom-output-len --random-batch-size --sonnet-input-len --sonnet-output-len --sonnet-prefix-len "
           "--spec-bench-output-len --timeline-itl-thresholds", "Details of datasets that we do not read.", TEXT,
           NOT_MEASURED),
)  # fmt: skip

OFFLINE = (
    Known(("--ignore-eos",), "Goes on to the full output length.", SWITCH, FULL_LENGTH, scope="offline"),
    Known(("--backend",), "Which engine is measured.", TEXT, "headrace measures itself", accepts=("vllm",),
          scope="offline"),
)  # fmt: skip
"""What the benchmarks that run an engine of their own take otherwise than the one that asks a server."""


def _quark(names: str, does: str, kind: object = TEXT) -> Known:
    return Known(tuple(names.split()), does, kind, NO_QUANTIZE, scope="quantize")  # type: ignore[arg-type]


QUANTIZE = (
    _quark("--model-dir", "The checkpoint to quantize."),
    _quark("--output-dir", "Where the quantized one goes."),
    _quark("--quant-scheme", "Format of weights and activations: w_fp8_a_fp8 is fp8 for both."),
    _quark("--kv-cache-dtype", "Adds scales for an fp8 KV cache."),
    _quark("--num-calib-data", "Prompts to calibrate with; KV scales want 512 or more.", COUNT),
    _quark("--model-export", "File format of the result."),
    _quark("--no-weight-matrix-merge", "Leaves q, k, v and gate, up apart.", SWITCH),
    _quark("--multi-gpu", "Spreads the model over the GPUs of the machine.", SWITCH),
    _quark("--dataset --seq-len --batch-size --group-size --quant-algo --data-type --device --pack-method "
           "--custom-mode", "How it is calibrated."),
    _quark("--exclude-layers", "Layers to leave as they are.", WORDS),
    _quark("--skip-evaluation", "Measures nothing afterwards.", SWITCH),
)  # fmt: skip

DOWNLOAD = tuple(
    Known(tuple(names.split()), does, kind, "MODEL as hub id is downloaded by itself", scope="download", secret=secret)
    for names, does, kind, secret in (
        ("--exclude", "Leaves files out.", WORDS, False),
        ("--include", "Takes these files alone.", WORDS, False),
        ("--local-dir", "Where files go.", TEXT, False),
        ("--local-dir-use-symlinks --resume-download --force-download --quiet", "How files are kept.", SWITCH, False),
        ("--revision --repo-type --cache-dir --max-workers", "What is downloaded.", TEXT, False),
        ("--token", "Access token of the hub.", TEXT, True),
    )
)


def _docker(names: str, does: str, kind: object = TEXT, hardware: str = "") -> Known:
    return Known(tuple(names.split()), does, kind, OF_THE_CONTAINER, "library", None, "", hardware, "", "docker")  # type: ignore[arg-type]


DOCKER = (
    _docker("--ipc", "`host` shares the machine's /dev/shm, which ranks use to talk."),
    _docker("--shm-size", "Size of the container's /dev/shm; the default of 64 MB is too small for several ranks."),
    _docker("--device", "Lets the container use a device: /dev/kfd and /dev/dri are AMD's GPUs."),
    _docker("--gpus --runtime", "Lets the container use NVIDIA's GPUs.", hardware="nvidia"),
    _docker("--network --net", "`host` uses the machine's own network."),
    _docker("--group-add", "Membership of `video` and `render`, to open AMD's devices.", hardware="amd"),
    _docker("--cap-add", "SYS_PTRACE serves debuggers and peer-to-peer copies of older ROCm."),
    _docker("--security-opt", "seccomp=unconfined allows the system calls of debuggers and of NUMA placement."),
    _docker("--privileged", "Everything that the machine's root may do. Serving does not need it.", SWITCH),
    _docker("--ulimit", "Limits of the process: memlock and stack matter to network cards."),
    _docker("-p --publish", "Ports to open."),
    _docker("-v --volume --mount", "Folders to see, of models for instance."),
    _docker("--entrypoint", "What the image runs."),
    _docker("-e --env --env-file", "Environment of the container."),
    _docker("--name --hostname -w --workdir -u --user --platform --pull --restart --memory -m --cpus --cpuset-cpus "
            "--log-opt --label -l", "The container's own affairs."),
    _docker("--rm -i -t -it -ti -d --detach --interactive --tty --init -dit -itd", "How the container runs.", SWITCH),
)  # fmt: skip

TOOL_FLAGS = (*HELP, *BENCH, *OFFLINE, *QUANTIZE, *DOWNLOAD, *DOCKER)
