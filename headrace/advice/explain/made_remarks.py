"""Makes what is to be said of flags where it depends on several numbers: facts first, then advice."""

from __future__ import annotations

import json

from headrace.advice.explain.case import MANY_REQUESTS, Case, config_of, size
from headrace.advice.explain.remark import (
    MakeRemark,
    Remark,
    costs,
    depends,
    fine,
    helps,
    not_needed,
    unknown,
    wrong,
)
from headrace.advice.explain.setting import Setting, object_of
from headrace.config import CHECKPOINT_WORDS, QUANTIZATIONS
from headrace.planner.collectives import reckoned_sums
from headrace.planner.draft_costs import asked_costs
from headrace.planner.served import USUAL_CONTEXT

MOST_DRAFT_TOKENS = 2
"""Tokens of a draft model, from which AMD's own guide saw throughput fall."""
SIZES = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")
BUSY = 64
"""Requests at once, above which a guess costs more than it saves where no model or GPU says how many (16 to 64 is where
AMD's guide finds it useful)."""


def _tensor_parallel_size(case: Case, setting: Setting) -> Remark | None:
    tp, visible = case.tp, case.asked.visible_gpus
    fewest, weights = case.fewest_gpus(), case.weight_bytes()
    if visible is not None and case.gpus > visible and not case.may_be_set_elsewhere(*SIZES):
        most = visible * tp // case.gpus
        text = f"{case.gpus} GPUs are asked for, and {visible} left visible"
        return wrong(text, better=_split(case.tp_near(most, most) if most else None))
    problems = case.tp_problems(tp)
    if problems:
        return wrong("; ".join(problems), better=_split(case.tp_near(tp)))
    if tp == 1:
        return not_needed("1 is the default")
    text = "gives the lowest latency, at the cost of two all-reduces in each layer"
    if fewest is not None and weights is not None and fewest < tp:
        text += (
            f". The weights ({size(weights)}) fit {fewest} GPU{'s' * (fewest > 1)}: for throughput, {tp // fewest} "
            f"replicas of that size may carry more, as guides say; what they publish is all for {tp} as one"
        )
    if case.chip is not None and (unknown := reckoned_sums(case.chip, case.line.engine, tp)):
        text += f". Never measured: {unknown}"
    if case.shape is not None and case.shape.is_mla:
        text += f". Each GPU keeps the whole latent cache: from {MANY_REQUESTS} requests on, split it by requests"
    return fine(text, claim="replicas-always-beat-tensor-parallelism" if fewest and fewest < tp else "")


def _split(tp: int | None) -> str:
    return "" if tp is None else f"--tensor-parallel-size {tp}" if tp > 1 else "drop"


def _speculation(case: Case, setting: Setting) -> Remark:
    """Remark on guessing tokens ahead, in any of its spellings."""
    tokens, given = case.asked.speculative_tokens or 0, _speculation_of(case)
    claim = "more-draft-tokens-are-better" if tokens > MOST_DRAFT_TOKENS else ""
    busy = max(case.asked.concurrency or 0, case.asked.max_num_seqs or 0 if case.is_server else 0)
    text, most = "guesses are verified together: it saves time where the GPU idles, at few requests", BUSY
    if case.shape is not None and case.chip is not None:
        deployment = case.deployment(case.shape, case.parallel())
        if (found := asked_costs(given, deployment, case.shape.dtype)) is not None:
            costs_of, lengths = found
            context = (case.asked.input_len or USUAL_CONTEXT) + (case.asked.output_len or 0) / 2
            most = costs_of.pays_up_to(context, lengths)
            text += f"; {costs_of.describe(context, lengths)}"
            if 0 in lengths:
                return helps(f"{text}. With more, steps have no guesses")
    if busy > most:
        text += f". At {busy} at once it takes more than it gives: DeepSeek-R1's fell to a third at 1,000"
        return costs(text, claim=claim)
    if claim:
        text += (
            f". {tokens} at a time: later ones are seldom accepted, and AMD's guide says {MOST_DRAFT_TOKENS} at most"
        )
        given["num_speculative_tokens"] = MOST_DRAFT_TOKENS
    better = f"--speculative-config '{json.dumps(given)}'"
    if setting.key != "--speculative-config":
        return depends(f"{text}. The spelling is the first engine's (V0)", better=better, claim=claim)
    return depends(text, better=better, claim=claim) if claim else helps(text)


def _speculation_of(case: Case) -> dict[str, object]:
    """What is asked of speculation in whatever spelling, as JSON holds it today."""
    config = case.line.find("--speculative-config")
    if config is not None:
        return object_of(config)
    model = case.line.value("--speculative-model")
    given: dict[str, object] = {"model": model} if model else {}
    return given | {"num_speculative_tokens": case.asked.speculative_tokens or 1}


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


def _format(case: Case) -> str:
    return {"bf16": "16 bits"}.get(case.weight_format, case.weight_format)


MADE_REMARKS: dict[str, MakeRemark] = {
    "--tensor-parallel-size": _tensor_parallel_size,
    "--speculative-config": _speculation,
    "--speculative-model": _speculation,
    "--num-speculative-tokens": _speculation,
    "--kv-cache-dtype": _kv_cache_dtype,
    "--quantization": _quantization,
}
"""Setting -> what makes a remark on it where no rule applies."""
