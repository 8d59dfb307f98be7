"""Lists what is to be said of flags that size memory, batches and weights: facts first, then advice."""

from __future__ import annotations

from headrace.advice.explain.case import Case, duration, size
from headrace.advice.explain.context import OVERRIDES, config_of
from headrace.advice.explain.remark import MakeRemark, Remark, costs, depends, fine, helps, not_needed, unknown, wrong
from headrace.advice.explain.setting import Setting
from headrace.config import CHECKPOINT_WORDS, QUANTIZATIONS
from headrace.planner.chips import GIB

LARGE_STEP = 16384
"""Prompt tokens of a step, from which more hardly raises throughput while every running request waits for it."""


def _kv_cache_dtype(case: Case, setting: Setting) -> Remark | None:
    value = setting.value.lower()
    if case.line.program == "quantize" or not value.startswith("fp8"):
        return None
    tokens = case.asked.max_model_len or 8192
    full, half = case.kv_bytes(tokens), case.kv_bytes(tokens, 1.0)
    text = "halves the KV cache"
    if full is not None and half is not None:
        text += f" (a sequence of {tokens:,} tokens: {size(full)} -> {size(half)})"
    weights = case.weight_bytes()
    text += " and rounds K and V, which moves answers; it cannot shrink weights"
    text += f", which stay {size(weights)} ({_format(case)})" if weights else ""
    if value == "fp8_e5m2":
        text += ". e5m2 has 2 bits of mantissa: with outliers in K (Qwen2 and its like) answers go wrong in silence"
        return costs(text, better="--kv-cache-dtype fp8", claim="kv-dtype-shrinks-weights")
    if case.shape is not None and case.shape.fp8_kv_cache:
        text += ". Scales come with this checkpoint"
    elif case.line.find("--calculate-kv-scales") is None and case.line.engine == "vllm":
        text += ". Without scales in the checkpoint vLLM takes 1.0"
    if case.aiter:
        text += ". AMD's pages contradict each other on AITER with it: see which backend the log names"
    return helps(text, claim="kv-dtype-shrinks-weights")


def _quantization(case: Case, setting: Setting) -> Remark | None:
    value, form = setting.value.lower(), case.checkpoint_format
    from_config = "format-follows-from-the-flag"
    if value == "gptq" and case.line.engine == "vllm" and _holds_compressed_tensors(case.line.model or ""):
        text = "checkpoints named so hold compressed-tensors, not GPTQ; config.json says which, and decides"
        return wrong(text, claim=from_config)
    if form not in ("bf16", "", *CHECKPOINT_WORDS.get(value, (form,))):
        return wrong(f"the checkpoint holds {form} weights and keeps them: this is another format", better="drop")
    if form not in ("bf16", ""):
        rounds = value in QUANTIZATIONS
        what = f"{value} is for rounding plain weights" if rounds else "the flag adds nothing"
        text = f"the checkpoint holds {form} weights already and config.json says how; {what}"
        return not_needed(text, claim="fp8-flag-on-a-quantized-checkpoint" if rounds else from_config)
    if value not in QUANTIZATIONS:
        make = unknown if value not in CHECKPOINT_WORDS else wrong if form else not_needed
        return make("config.json says the format, and decides", better="drop")
    plain, small = case.weight_bytes("bf16"), case.weight_bytes("fp8")
    text = "rounds plain weights to fp8 as they load"
    if plain is not None and small is not None:
        text += f": {size(plain)} -> {size(small)}"
    if case.chip is not None and "fp8" not in case.chip.flops:
        return depends(f"{text}. {case.gpu} has no fp8 units: it saves memory and no arithmetic")
    if value.startswith("ptpc"):
        if case.vendor == "nvidia" and case.line.engine == "vllm":
            return wrong("vLLM has this format on ROCm alone", better="--quantization fp8")
        return helps(f"{text}; one scale an output and a token, at the speed of fp8")
    if case.vendor == "amd":
        text += ". ptpc_fp8 is as fast and rounds less: a scale for each output"
        return helps(text, better="--quantization ptpc_fp8")
    return helps(text)


def _holds_compressed_tensors(model: str) -> bool:
    """As config.json says, or where that is not known the name."""
    held = config_of(model).get("quantization_config")
    if isinstance(held, dict):
        return held.get("quant_method") == "compressed-tensors"
    return "quantized.w" in model.lower()


def _max_model_len(case: Case, setting: Setting) -> Remark | None:
    length = case.asked.max_model_len
    if length is None:
        return fine("the longest context that the KV cache has room for, up to the model's")
    longest = case.shape.spec.max_position_embeddings if case.shape is not None else length
    if length > longest and case.stretches:
        text = f"the model ends at {longest:,} tokens; what it answers beyond them, nobody knows"
        return costs(text, better="")
    if length > longest and not case.may_be_set_elsewhere(*OVERRIDES):
        return wrong(f"the model ends at {longest:,} tokens", better=f"--max-model-len {longest}")
    lengths = (case.asked.input_len or 0) + (case.asked.output_len or 0)
    if lengths > length:
        return wrong(f"input and output together need {lengths:,} tokens", better=f"--max-model-len {lengths}")
    text = "a limit for requests. It reserves nothing: the KV pool is all memory that is left, in blocks"
    one = case.kv_bytes(length, case.kv_width)
    if one is not None:
        windows = ", windows counted" if case.has_windows else ""
        text += f". One sequence that long takes {size(one)}{windows}"
    return fine(text, claim="max-model-len-preallocates")


def _max_num_seqs(case: Case, setting: Setting) -> Remark | None:
    seqs, length, budget = case.asked.max_num_seqs, case.asked.max_model_len, case.asked.max_num_batched_tokens
    if seqs is None:
        return None
    if budget is not None and seqs > budget:
        text = f"a step of {budget:,} tokens has no room for {seqs:,} requests"
        return wrong(text, better=f"--max-num-seqs {budget}")
    usual = "a default of vLLM's (1024 where a GPU has much memory, else 256): " if seqs in (256, 1024) else ""
    text = f"{usual}further requests queue. Lower it for a steadier ITL; TTFT only gets worse by waiting in the queue"
    if length is not None:
        product, one = case.kv_bytes(length, case.kv_width), ""
        if product is not None:
            one = f" ({size(product)}, not {size(product * seqs)})"
        text += (
            f". {seqs:,} x {length:,} tokens need not fit: the cache is paged, and one longest sequence is enough to "
            f"start{one}"
        )
        return fine(text, claim="seqs-times-length-must-fit")
    return fine(text, claim="fewer-seqs-lower-ttft")


def _gpu_memory_utilization(case: Case, setting: Setting) -> Remark | None:
    share, claim = case.asked.gpu_memory_utilization, "utilization-is-for-the-kv-cache"
    if share is None:
        return None
    text = "weights, activations, graphs and KV cache together, not the KV cache alone"
    if case.chip is not None:
        left = (1 - share) * case.chip.memory_bytes
        text += f"; {size(left)} of {case.chip.memory_bytes / GIB:.0f} GiB stay outside"
    if share > 0.95:
        text += ". Too little is left for libraries and for what a step needs at its worst: it runs out of memory"
        return costs(f"{text} under load", better="--gpu-memory-utilization 0.92", claim=claim)
    if share <= 0.5:
        return fine(f"{text}: room for a second instance", claim=claim)
    if share == 0.9:
        return not_needed(f"the default. It is for {text}", claim=claim)
    return fine(text, claim=claim)


def _max_num_batched_tokens(case: Case, setting: Setting) -> Remark | None:
    budget, length = case.asked.max_num_batched_tokens, case.asked.max_model_len
    if budget is None:
        return None
    chunked = case.asked.enable_chunked_prefill is not False
    if not chunked and length is not None and budget < length:
        text = f"without chunked prefill a prompt of {length:,} tokens must fit into one step"
        return wrong(text, better=f"--max-num-batched-tokens {length}")
    text = "a running request waits for the whole step: small budgets give a good ITL, large ones TTFT and throughput"
    seconds = case.step_seconds(budget)
    if seconds is not None:
        text += f". A full one takes about {duration(seconds)} here"
    claim = "larger-steps-improve-itl"
    if budget > LARGE_STEP and case.is_server:
        smaller = LARGE_STEP if chunked else max(length or 0, LARGE_STEP)
        return costs(text, better=f"--max-num-batched-tokens {smaller}", claim=claim)
    return fine(text, claim=claim)


def _format(case: Case) -> str:
    return {"bf16": "16 bits"}.get(case.weight_format, case.weight_format)


MEMORY_REMARKS: dict[str, MakeRemark] = {
    "--kv-cache-dtype": _kv_cache_dtype,
    "--quantization": _quantization,
    "--max-model-len": _max_model_len,
    "--max-num-seqs": _max_num_seqs,
    "--gpu-memory-utilization": _gpu_memory_utilization,
    "--max-num-batched-tokens": _max_num_batched_tokens,
}
