"""Lists what is to be said of flags that spread a model over GPUs or choose how it runs: facts first, then advice."""

from __future__ import annotations

import json
import shlex

from headrace.advice.explain.case import LEAST_SHARE, Case, size
from headrace.advice.explain.remark import (
    Remark,
    Rules,
    costs,
    depends,
    fine,
    helps,
    no_effect,
    not_needed,
    unknown,
    wrong,
)  # fmt: skip
from headrace.advice.explain.setting import Setting, object_of
from headrace.config import GRAPH_MODES
from headrace.planner.layouts import MANY_REQUESTS, ULTRA_SPARSE

MOST_DRAFT_TOKENS = 2
"""Tokens of a draft model, from which AMD's own guide saw throughput fall."""
SIZES = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")
BUSY = 64
"""Requests at once, above which a guess costs more than it saves (16 to 64 is where AMD's guide finds it useful)."""
UNIFORM_ONLY = ("ROCM_AITER_FA", "ROCM_AITER_MLA", "ROCM_AITER_TRITON_MLA", "ROCM_AITER_MLA_SPARSE")
"""Backends whose attention goes into graphs of decodes alone."""
EXPERTS = "experts-always-want-expert-parallelism"


def _tensor_parallel_size(case: Case, setting: Setting) -> Remark | None:
    tp, visible = case.tp, case.asked.visible_gpus
    fewest, least, weights = case.fewest_gpus(), case.fewest_gpus(LEAST_SHARE), case.weight_bytes()
    if visible is not None and case.gpus > visible and not case.may_be_set_elsewhere(*SIZES):
        most = visible * tp // case.gpus
        text = f"{case.gpus} GPUs are asked for, and {visible} left visible"
        return wrong(text, better=_split(case.tp_near(most, most) if most else None))
    problems = case.tp_problems(tp)
    if problems:
        return wrong("; ".join(problems), better=_split(case.tp_near(tp)))
    if least is not None and weights is not None and case.gpus < least:
        return _too_few_gpus(case, weights, least)
    if tp == 1:
        return not_needed("1 is the default")
    text = "gives the lowest latency, at the cost of two all-reduces in each layer"
    if fewest is not None and weights is not None and fewest < tp:
        text += (
            f". The weights ({size(weights)}) fit {fewest} GPU{'s' * (fewest > 1)}: for throughput, {tp // fewest} "
            f"replicas of that size may carry more, as guides say; what they publish is all for {tp} as one"
        )
    if case.shape is not None and case.shape.is_mla:
        text += f". Each GPU keeps the whole latent cache: from {MANY_REQUESTS} requests on, split it by requests"
    return fine(text, claim="replicas-always-beat-tensor-parallelism" if fewest and fewest < tp else "")


def _split(tp: int | None) -> str:
    return "" if tp is None else f"--tensor-parallel-size {tp}" if tp > 1 else "drop"


def _too_few_gpus(case: Case, weights: int, least: int) -> Remark:
    """What is too little, and settings with which the weights fit: more GPUs of a node, fp8, or several nodes."""
    text = f"{size(weights)} of weights need {least} GPUs"
    node, small = case.gpus_per_node, case.fewest_gpus(LEAST_SHARE, "fp8")
    if least <= node:
        return wrong(text, better=_split(case.tp_near(least)))
    if case.weight_format == "bf16" and case.chip is not None and "fp8" in case.chip.flops and small and small <= node:
        better = f"--tensor-parallel-size {max(small, case.tp)} --quantization fp8"
        return wrong(f"{text}, {small} in fp8", better=better)
    better = f"--tensor-parallel-size {node} --pipeline-parallel-size {least // node}"
    return wrong(f"{text}: several nodes", better=better)


def _stages_between_nodes(case: Case, setting: Setting) -> Remark:
    """Remark on pipeline stages that are on several machines."""
    fewest = case.fewest_gpus()
    if fewest is not None and fewest <= case.tp:
        return depends(f"{case.tp} GPUs hold the model: a second replica gives more than a second stage")
    return fine("stages are how a model leaves the node: little travels between them")


def _ultra_sparse(case: Case, setting: Setting) -> Remark | None:
    """Remark on expert parallelism where a token uses very few of the experts."""
    if case.shape is None:
        return None
    mlps = [group.feed_forward for group in case.shape.groups if group.feed_forward.num_experts]
    share = min(mlp.experts_per_token / mlp.num_experts for mlp in mlps)
    text = f"a token uses {share:.2%} of the experts: AMD's own guide measures 7-12% slower"
    return costs(text, claim=EXPERTS) if share < ULTRA_SPARSE else None


def _replicas_apart(case: Case, setting: Setting) -> Remark | None:
    """Remark on flags that mean something among replicas alone."""
    if case.dp > 1:
        on_rocm = setting.key == "--disable-nccl-for-dp-synchronization" and case.vendor in ("amd", "")
        return fine("what AMD's guide wants with replicas on ROCm") if on_rocm else None
    return no_effect("there is one replica (--data-parallel-size 1), so there is nothing to synchronize")


def _experts_apart(case: Case, setting: Setting) -> Remark | None:
    """Remark on how tokens travel between the GPUs that hold experts."""
    apart = case.on("--enable-expert-parallel") or case.may_be_set_elsewhere("--enable-expert-parallel")
    if case.gpus == 1 or not apart:
        return no_effect("tokens travel between experts only with expert parallelism over GPUs")
    if setting.is_variable:
        return fine("today a flag", better=f"--all2all-backend {shlex.quote(setting.value)}")
    return None


def _executor(case: Case, setting: Setting) -> Remark | None:
    if setting.value == "ray" and case.nodes == 1:
        return costs("ray starts slower and gives nothing on one machine")
    if setting.value == "mp" and case.nodes > 1:
        return depends("processes of one machine: with several, each needs its own command")
    return not_needed("the default on one machine") if setting.value in ("mp", "uni") else None


def _attention_backend(case: Case, setting: Setting) -> Remark | None:
    name = setting.value.upper()
    latent = name.endswith(("_MLA", "_MLA_SPARSE")) or name.startswith(("FLASHMLA", "CUTLASS_MLA"))
    if case.shape is not None and latent != case.shape.is_mla and name != "AUTO":
        kind = "latents (MLA)" if latent else "ordinary keys and values"
        return wrong(f"{name} is for {kind}, which this model does not have")
    if name.startswith("ROCM_") and case.vendor == "nvidia":
        return wrong(f"{name} exists on AMD's GPUs alone")
    if name == "ROCM_ATTN":
        text = (
            "head size 64 or 128, blocks of 16 or 32, no window; any other shape falls to a slow kernel without a word "
            "(2.7-4.4 times slower on Qwen3-235B)"
        )
        return depends(text, better="drop")
    if "AITER" in name and not case.aiter:
        text = "the attention alone: linears, norms and experts need the master switch too"
        return depends(text, better=f"VLLM_ROCM_USE_AITER=1 --attention-backend {name}")
    if name == "ROCM_AITER_UNIFIED_ATTN":
        why = "one kernel for prompts and decodes, with windows and sinks"
        return (helps if case.has_windows else depends)(f"{why}: what gpt-oss wants; others do well without")
    if name in ("ROCM_AITER_FA", "ROCM_AITER_MLA", "ROCM_AITER_MLA_SPARSE"):
        why = "what VLLM_ROCM_USE_AITER=1 chooses for such a model; named, nothing slower is taken without a word"
        return fine(why)
    return None


def _compilation_config(case: Case, setting: Setting) -> Remark | None:
    given = object_of(setting)
    mode = given.get("cudagraph_mode")
    if mode is None:
        old = {"use_cudagraph": ("PIECEWISE", "NONE"), "full_cuda_graph": ("FULL", "PIECEWISE")}
        for key, (yes, no) in old.items():
            if isinstance(given.get(key), bool):
                return fine(f"{key} is an old spelling", better=_graphs(yes if given[key] else no))
        return None
    name = str(mode).upper()
    if name not in GRAPH_MODES and not isinstance(mode, int | list):
        text = f"cudagraph_mode must be one of {', '.join(GRAPH_MODES)}"
        return wrong(text, better=_graphs("FULL_AND_PIECEWISE"))
    if name == "FULL_AND_PIECEWISE":
        return not_needed("the default: decodes in whole graphs, other steps in pieces")
    if name == "NONE":
        return costs("every step launches its kernels one by one; for debugging")
    backend = (case.asked.attention_backend or ("ROCM_AITER_FA" if case.aiter else "")).upper()
    if name == "FULL" and backend in UNIFORM_ONLY:
        text = f"{backend} goes into graphs of decodes alone: vLLM steps down to what that allows"
        return depends(text, better="drop")
    if name == "FULL" and backend == "TRITON_MLA":
        return wrong("TRITON_MLA must stay outside of graphs", better=_graphs("PIECEWISE"))
    text = {
        "FULL": "whole graphs for mixed steps too: for small models with short prompts; more memory and a longer start",
        "FULL_DECODE_ONLY": "no graphs for steps with prompts: less memory; for servers that only decode",
        "PIECEWISE": "attention stays outside of the graphs: the most compatible, slower at small batches",
    }.get(name, "a mode of CUDA graphs")
    return depends(text)


def _graphs(mode: str) -> str:
    return f"--compilation-config '{json.dumps({'cudagraph_mode': mode})}'"


def _speculation(case: Case, setting: Setting) -> Remark:
    """Remark on guessing tokens ahead, in any of its spellings."""
    tokens, given = case.asked.speculative_tokens or 0, _speculation_of(case)
    claim = "more-draft-tokens-are-better" if tokens > MOST_DRAFT_TOKENS else ""
    busy = max(case.asked.concurrency or 0, case.asked.max_num_seqs or 0 if case.is_server else 0)
    text = "guesses are verified together: it saves time where the GPU idles, at few requests"
    if busy > BUSY:
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


def _mm_encoder_tp_mode(case: Case, setting: Setting) -> Remark | None:
    if setting.value != "data":
        return None
    if case.tp == 1:
        return no_effect("with one GPU there is nothing to split")
    if case.shape is not None and case.shape.extra_weights <= case.shape.spec.draft_weights:
        return no_effect("the model has no image encoder")
    text = "the encoder is copied: one all-gather instead of an all-reduce in each of its layers"
    return helps(f"{text}. Of large images most; of ten small ones little")


def _host(case: Case, setting: Setting) -> Remark | None:
    open_to_all = setting.value in ("0.0.0.0", "::") and case.is_server
    if open_to_all and case.line.find("--api-key") is None and case.line.find("VLLM_API_KEY") is None:
        return costs("whoever reaches the port may use the model: no --api-key is given", better="")
    return None


def _num_prompts(case: Case, setting: Setting) -> Remark | None:
    prompts, seqs = case.asked.num_prompts, case.asked.max_num_seqs
    if prompts and seqs and prompts > seqs and prompts % seqs:
        text = f"no multiple of --max-num-seqs {seqs}: the last batch runs part empty"
        return costs(text, better=f"--num-prompts {prompts // seqs * seqs}")
    return None


def _request_rate(case: Case, setting: Setting) -> Remark | None:
    if case.asked.request_rate is None:
        return None
    return fine("measures latency at that load, and says nothing of the throughput there is")


TRUST = "; it only lets code from the repository run on your machine"
TRUST_CLAIM = "models-need-trust-remote-code"
ENGINE_RULES: Rules = {
    "--tensor-parallel-size": (("", _tensor_parallel_size),),
    "--pipeline-parallel-size": (
        ("pp1", not_needed("1 is the default")),
        ("!one-node", _stages_between_nodes),
        ("", costs("inside a node tensor parallelism is faster, and stages wait for each other")),
    ),
    "--data-parallel-size": (
        ("dp1", not_needed("1 is the default")),
        ("dense", fine("a dense model's replicas share nothing: servers of their own behind a balancer do as well")),
        ("latent", depends(f"splits the latent cache by requests: pays from some {MANY_REQUESTS // 2} to "
                           f"{MANY_REQUESTS} requests at once; below, tensor parallelism is ahead")),
        ("", fine("more requests at once, each no faster")),
    ),
    "--enable-expert-parallel": (
        ("on dense", no_effect("the model has no experts", claim=EXPERTS)),
        ("on one-gpu", no_effect("one GPU has all experts anyway", claim=EXPERTS)),
        ("on", _ultra_sparse),
        ("on", depends(f"pays with many requests at once (the crossover is between {MANY_REQUESTS // 2} and "
                       f"{MANY_REQUESTS}); below, plain tensor parallelism is ahead. The editions of AMD's guide "
                       "contradict each other on it", claim=EXPERTS)),
    ),
    "--disable-nccl-for-dp-synchronization": (("", _replicas_apart),),
    "--data-parallel-address": (("", _replicas_apart),),
    "--data-parallel-rpc-port": (("", _replicas_apart),),
    "--data-parallel-backend": (("", _replicas_apart),),
    "--all2all-backend": (("", _experts_apart),),
    "VLLM_ALL2ALL_BACKEND": (("", _experts_apart),),
    "--config": (("", unknown("what stands in the file is not read here: what may depend on it is left open")),),
    "--distributed-executor-backend": (("", _executor),),
    "--disable-custom-all-reduce": (
        ("on tp1", no_effect("with one GPU there is no all-reduce")),
        ("on", costs("NCCL is slower at the small all-reduces of decode steps; only for a broken custom kernel")),
    ),
    "--attention-backend": (("", _attention_backend),),
    "VLLM_ATTENTION_BACKEND": (("", _attention_backend),),
    "--compilation-config": (("", _compilation_config),),
    "--enforce-eager": (
        ("on", costs("every step launches its kernels one by one: small batches wait for the host")),
    ),
    "--enable-chunked-prefill": (
        ("on", not_needed("on by default")),
        ("", costs("a long prompt runs in one step, and every running request waits for it; the step must also be as "
                   "long as the longest prompt. That it is faster on MI300X is said without a measurement",
                   claim="chunked-prefill-off-is-faster")),
    ),
    "--async-scheduling": (
        ("on", not_needed("the default of current vLLM")),
        ("", costs("guides say off for latency; measured, it lowers the time per token too (gpt-oss-20b on an H100: "
                   "91 -> 87 ms)", claim="async-scheduling-hurts-latency")),
    ),
    "--disable-log-requests": (("on", not_needed("requests are not logged by default any more")),),
    "--swap-space": (("", no_effect("the current engine (V1) recomputes preempted requests and never swaps")),),
    "--speculative-config": (("", _speculation),),
    "--speculative-model": (("", _speculation),),
    "--num-speculative-tokens": (("", _speculation),),
    "--trust-remote-code": (
        ("on known-model", not_needed(f"this model's family is native in vLLM{TRUST}", claim=TRUST_CLAIM)),
        ("on", not_needed(f"the families of these guides are native{TRUST}", claim=TRUST_CLAIM)),
    ),
    "--mm-encoder-tp-mode": (("", _mm_encoder_tp_mode),),
    "--host": (("", _host),),
    "--num-prompts": (("", _num_prompts),),
    "--request-rate": (("", _request_rate),),
}  # fmt: skip
