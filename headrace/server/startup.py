"""Says in a few lines how a started server runs: with what, why, at what cost, and where to read more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.server.output_formats import OutputFormats

if TYPE_CHECKING:
    from headrace.engine.async_engine import AsyncEngine


def startup_lines(engine: AsyncEngine, formats: OutputFormats, seconds: float) -> list[str]:
    """Return the lines to print once an engine has started, which took so many seconds. `formats`: how answers are
    read."""
    config, decisions = engine.config, {entry.field: entry for entry in engine.decisions}

    def setting(field: str, unit: str = "") -> str:
        entry = decisions[field]
        value = f"{entry.value:,}" if isinstance(entry.value, int) else entry.value
        return f"{value}{unit} ({entry.reason})"

    ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    gpus = f", {ranks} GPUs" if ranks > 1 else ""
    weights = f", weights in {config.quantization}" if config.quantization else ""
    limits = (
        setting("max_num_seqs", " requests at once"),
        setting("max_num_batched_tokens", " tokens in a step"),
        f"{engine.max_model_len:,} tokens in a request ({decisions['max_model_len'].reason})",
    )
    cache_size = decisions["num_gpu_blocks"].reason.partition(":")[0]
    loaded = f"loaded {engine.model_config.architecture} in {seconds:.1f} s on {engine.device_name}{gpus}"
    if engine.num_engines > 1:
        loaded += f"; {engine.num_engines} engines, each as follows"
    lines = [
        f"{loaded}; computes in {setting('dtype')}{weights}",
        f"at most {', '.join(limits)}",
        f"KV cache: {engine.kv_cache_tokens:,} tokens ({cache_size}) in {setting('kv_cache_dtype')}",
        f"attention: {setting('attention_backend')}",
        f"CUDA graphs: {setting('cudagraph_mode')}",
        formats.line,
    ]
    if "api_server_count" in decisions:
        lines.append(f"HTTP processes: {setting('api_server_count')}")
    lines += [str(line) for line in (engine.memory, engine.expected) if line is not None]
    if engine.default_sampling:
        defaults = ", ".join(f"{name}={value}" for name, value in engine.default_sampling.items())
        lines.append(
            f"sampling defaults: {defaults} (the model's generation_config.json; --generation-config vllm ignores it)"
        )
    if engine.demoted:
        lines.append(f"not used, because they failed the self-check: {', '.join(engine.demoted)}; serving is slower")
    if given := [f"{name} = {entry.value}" for name, entry in decisions.items() if entry.source == "user"]:
        lines.append(f"set by you: {', '.join(given)}")
    lines.append("all settings with their reasons: /v1/plan, or --log-level debug at the next start")
    return lines
