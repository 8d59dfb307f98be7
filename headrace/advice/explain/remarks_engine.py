"""What is to be said of flags that spread a model over GPUs or choose how it runs, for one command line.

Each function takes the case and the setting, and answers with a remark, or None where there is nothing to add.
"""

from __future__ import annotations

import json
import shlex

from headrace.advice.explain.case import LEAST_SHARE, Case, Remark, size
from headrace.advice.explain.setting import Setting, object_of
from headrace.config import GRAPH_MODES
from headrace.planner.layouts import MANY_REQUESTS, ULTRA_SPARSE

MOST_DRAFT_TOKENS = 2
"""of a draft model, from which AMD's own guide saw throughput fall"""
SIZES = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")
BUSY = 64
"""requests at once, above which a guess costs more than it saves (16 to 64 is where AMD's guide finds it useful)"""
UNIFORM_ONLY = ("ROCM_AITER_FA", "ROCM_AITER_MLA", "ROCM_AITER_TRITON_MLA", "ROCM_AITER_MLA_SPARSE")
"""Backends whose attention goes into graphs of decodes alone"""


def tensor_parallel_size(case: Case, setting: Setting) -> Remark | None:
    tp, visible = case.tp, case.asked.visible_gpus
    fewest, least, weights = case.fewest_gpus(), case.fewest_gpus(LEAST_SHARE), case.weight_bytes()
    if visible is not None and case.gpus > visible and not case.is_open(*SIZES):
        most = visible * tp // case.gpus
        text = f"{case.gpus} GPUs are asked for, and {visible} left visible"
        return Remark("wrong", text, _split(case.tp_near(most, most) if most else None))
    problems = case.tp_problems(tp)
    if problems:
        return Remark("wrong", "; ".join(problems), _split(case.tp_near(tp)))
    if least is not None and weights is not None and case.gpus < least:
        return Remark("wrong", *_room(case, weights, least))
    if tp == 1:
        return Remark("not needed", "1 is the default", "drop")
    text = "gives the shortest answers, paid with two sums over all GPUs in each layer"
    if fewest is not None and weights is not None and fewest < tp:
        text += (
            f". The weights ({size(weights)}) fit {fewest} GPU{'s' * (fewest > 1)}: for throughput, {tp // fewest} "
            f"replicas of that size may carry more, as guides say; what they publish is all for {tp} as one"
        )
    if case.shape is not None and case.shape.is_mla:
        text += f". Each GPU keeps the whole latent cache: from {MANY_REQUESTS} requests on, split it by requests"
    return Remark("fine", text, claim="replicas-always-beat-tensor-parallelism" if fewest and fewest < tp else "")


def _split(tp: int | None) -> str:
    return "" if tp is None else f"--tensor-parallel-size {tp}" if tp > 1 else "drop"


def _room(case: Case, weights: int, least: int) -> tuple[str, str]:
    """What is too little, and settings with which the weights fit: more GPUs of a node, fp8, or several nodes."""
    text = f"{size(weights)} of weights need {least} GPUs"
    node, small = case.gpus_per_node, case.fewest_gpus(LEAST_SHARE, "fp8")
    if least <= node:
        return text, _split(case.tp_near(least))
    if case.weight_format == "bf16" and case.chip is not None and "fp8" in case.chip.flops and small and small <= node:
        return f"{text}, {small} in fp8", f"--tensor-parallel-size {max(small, case.tp)} --quantization fp8"
    return f"{text}: several nodes", f"--tensor-parallel-size {node} --pipeline-parallel-size {least // node}"


def pipeline_parallel_size(case: Case, setting: Setting) -> Remark | None:
    stages = case.asked.pipeline_parallel_size or 1
    if stages == 1:
        return Remark("not needed", "1 is the default", "drop")
    if case.nodes > 1:
        fewest = case.fewest_gpus()
        if fewest is not None and fewest <= case.tp:
            return Remark("depends", f"{case.tp} GPUs hold the model: a second replica gives more than a second stage")
        return Remark("fine", "stages are how a model leaves the node: little travels between them")
    return Remark("costs", "inside a node tensor parallelism is faster, and stages wait for each other", "drop")


def data_parallel_size(case: Case, setting: Setting) -> Remark | None:
    if case.dp == 1:
        return Remark("not needed", "1 is the default", "drop")
    if case.shape is not None and not case.shape.is_moe:
        return Remark(
            "fine", "a dense model's replicas share nothing: servers of their own behind a balancer do as well"
        )
    if case.shape is not None and case.shape.is_mla:
        return Remark(
            "depends",
            f"splits the latent cache by requests: pays from some {MANY_REQUESTS // 2} to "
            f"{MANY_REQUESTS} requests at once; below, tensor parallelism is ahead",
        )
    return Remark("fine", "more requests at once, each no faster")


def enable_expert_parallel(case: Case, setting: Setting) -> Remark | None:
    if not setting.on:
        return None
    claim = "experts-always-want-expert-parallelism"
    if case.shape is not None and not case.shape.is_moe:
        return Remark("no effect", "the model has no experts", "drop", claim)
    if case.gpus == 1:
        return Remark("no effect", "one GPU has all experts anyway", "drop", claim)
    if case.shape is not None:
        mlps = [group.feed_forward for group in case.shape.groups if group.feed_forward.num_experts]
        share = min(mlp.experts_per_token / mlp.num_experts for mlp in mlps)
        if share < ULTRA_SPARSE:
            return Remark(
                "costs",
                f"a token uses {share:.2%} of the experts: AMD's own guide measures 7-12% slower",
                "drop",
                claim,
            )
    return Remark(
        "depends",
        f"pays with many requests at once (the crossover is between {MANY_REQUESTS // 2} and {MANY_REQUESTS}); below, "
        "plain tensor parallelism is ahead. The editions of AMD's guide contradict each other on it",
        claim=claim,
    )


def only_with_replicas(case: Case, setting: Setting) -> Remark | None:
    if case.dp > 1:
        on_rocm = setting.key == "--disable-nccl-for-dp-synchronization" and case.vendor in ("amd", "")
        return Remark("fine", "what AMD's guide wants with replicas on ROCm") if on_rocm else None
    return Remark("no effect", "there is one replica (--data-parallel-size 1), which has nobody to agree with", "drop")


def only_with_experts_apart(case: Case, setting: Setting) -> Remark | None:
    apart = case.on("--enable-expert-parallel") or case.is_open("--enable-expert-parallel")
    if case.gpus == 1 or not apart:
        return Remark("no effect", "tokens travel between experts only with expert parallelism over GPUs", "drop")
    if setting.is_variable:
        return Remark("fine", "today a flag", f"--all2all-backend {shlex.quote(setting.value)}")
    return None


def config_file(case: Case, setting: Setting) -> Remark | None:
    return Remark("unknown", "what stands in the file is not read here: what may depend on it is left open")


def executor(case: Case, setting: Setting) -> Remark | None:
    if setting.value == "ray" and case.nodes == 1:
        return Remark("costs", "ray starts slower and gives nothing on one machine", "drop")
    if setting.value == "mp" and case.nodes > 1:
        return Remark("depends", "processes of one machine: with several, each needs its own command")
    if setting.value in ("mp", "uni"):
        return Remark("not needed", "the default on one machine", "drop")
    return None


def disable_custom_all_reduce(case: Case, setting: Setting) -> Remark | None:
    if not setting.on:
        return None
    if case.tp == 1:
        return Remark("no effect", "with one GPU there is nothing to add up", "drop")
    return Remark("costs", "sums of decode steps are small, and NCCL is slower on them; only for a broken one", "drop")


def attention_backend(case: Case, setting: Setting) -> Remark | None:
    name = setting.value.upper()
    latent = name.endswith(("_MLA", "_MLA_SPARSE")) or name.startswith(("FLASHMLA", "CUTLASS_MLA"))
    if case.shape is not None and latent != case.shape.is_mla and name != "AUTO":
        kind = "latents (MLA)" if latent else "ordinary keys and values"
        return Remark("wrong", f"{name} is for {kind}, which this model does not have", "drop")
    if name.startswith("ROCM_") and case.vendor == "nvidia":
        return Remark("wrong", f"{name} exists on AMD's GPUs alone", "drop")
    if name == "ROCM_ATTN":
        return Remark(
            "depends",
            "head size 64 or 128, blocks of 16 or 32, no window; any other shape falls to a slow kernel "
            "without a word (2.7-4.4 times slower on Qwen3-235B)",
            "drop",
        )
    if "AITER" in name and not case.aiter:
        return Remark(
            "depends",
            "the attention alone: linears, norms and experts need the master switch too",
            f"VLLM_ROCM_USE_AITER=1 --attention-backend {name}",
        )
    if name == "ROCM_AITER_UNIFIED_ATTN":
        why = "one kernel for prompts and decodes, with windows and sinks"
        return Remark("helps" if case.has_windows else "depends", f"{why}: what gpt-oss wants; others do well without")
    if name in ("ROCM_AITER_FA", "ROCM_AITER_MLA", "ROCM_AITER_MLA_SPARSE"):
        why = "what VLLM_ROCM_USE_AITER=1 chooses for such a model; named, nothing slower is taken without a word"
        return Remark("fine", why)
    return None


def compilation_config(case: Case, setting: Setting) -> Remark | None:
    given = object_of(setting)
    mode = given.get("cudagraph_mode")
    if mode is None:
        old = {"use_cudagraph": (True, "PIECEWISE", "NONE"), "full_cuda_graph": (True, "FULL", "PIECEWISE")}
        for key, (_, yes, no) in old.items():
            if isinstance(given.get(key), bool):
                new = yes if given[key] else no
                return Remark("fine", f"{key} is an old spelling", _graphs(new))
        return None
    name = str(mode).upper()
    if name not in GRAPH_MODES and not isinstance(mode, int | list):
        return Remark("wrong", f"cudagraph_mode must be one of {', '.join(GRAPH_MODES)}", _graphs("FULL_AND_PIECEWISE"))
    if name == "FULL_AND_PIECEWISE":
        return Remark("not needed", "the default: decodes in whole graphs, other steps in pieces", "drop")
    if name == "NONE":
        return Remark("costs", "every step launches its kernels one by one; for debugging", "drop")
    backend = (case.asked.attention_backend or ("ROCM_AITER_FA" if case.aiter else "")).upper()
    if name == "FULL" and backend in UNIFORM_ONLY:
        return Remark(
            "depends", f"{backend} goes into graphs of decodes alone: vLLM steps down to what that allows", "drop"
        )
    if name == "FULL" and backend == "TRITON_MLA":
        return Remark("wrong", "TRITON_MLA must stay outside of graphs", _graphs("PIECEWISE"))
    text = {
        "FULL": "whole graphs for mixed steps too: for small models with short prompts; more memory and a longer start",
        "FULL_DECODE_ONLY": "no graphs for steps with prompts: less memory; for servers that only decode",
        "PIECEWISE": "attention stays outside of the graphs: the most compatible, slower at small batches",
    }
    return Remark("depends", text.get(name, "a mode of CUDA graphs"))


def _graphs(mode: str) -> str:
    return f"--compilation-config '{json.dumps({'cudagraph_mode': mode})}'"


def speculation(case: Case, setting: Setting) -> Remark | None:
    tokens, given = case.asked.speculative_tokens or 0, _speculation_of(case)
    claim = "more-draft-tokens-are-better" if tokens > MOST_DRAFT_TOKENS else ""
    busy = max(case.asked.concurrency or 0, case.asked.max_num_seqs or 0 if case.is_server else 0)
    text = "guesses are verified together: it saves time where the GPU idles, at few requests"
    if busy > BUSY:
        text += f". At {busy} at once it takes more than it gives: DeepSeek-R1's fell to a third at 1,000"
        return Remark("costs", text, "drop", claim)
    if claim:
        text += (
            f". {tokens} at a time: later ones are seldom accepted, and AMD's guide says {MOST_DRAFT_TOKENS} at most"
        )
        given["num_speculative_tokens"] = MOST_DRAFT_TOKENS
    better = f"--speculative-config '{json.dumps(given)}'"
    if setting.key != "--speculative-config":
        return Remark("depends", f"{text}. The spelling is the first engine's (V0)", better, claim)
    return Remark("depends", text, better, claim) if claim else Remark("helps", text)


def _speculation_of(case: Case) -> dict[str, object]:
    """What is asked of speculation in whatever spelling, as JSON holds it today."""
    found = case.line.find("--speculative-config")
    if found is not None:
        return object_of(found)
    model = case.line.value("--speculative-model")
    given: dict[str, object] = {"model": model} if model else {}
    return given | {"num_speculative_tokens": case.asked.speculative_tokens or 1}


def trust_remote_code(case: Case, setting: Setting) -> Remark | None:
    if not setting.on:
        return None
    known = (
        "this model's family is native in vLLM" if case.shape is not None else "the families of these guides are native"
    )
    return Remark(
        "not needed",
        f"{known}; it only lets code from the repository run on your machine",
        "drop",
        "models-need-trust-remote-code",
    )


def mm_encoder_tp_mode(case: Case, setting: Setting) -> Remark | None:
    if setting.value != "data":
        return None
    if case.tp == 1:
        return Remark("no effect", "with one GPU there is nothing to split", "drop")
    if case.shape is not None and case.shape.extra_weights <= case.shape.spec.draft_weights:
        return Remark("no effect", "the model has no image encoder", "drop")
    return Remark(
        "helps",
        "the encoder is copied: one gather instead of a sum in each of its layers. Of large images most; "
        "of ten small ones little",
    )


def host(case: Case, setting: Setting) -> Remark | None:
    if setting.value in ("0.0.0.0", "::") and case.is_server:
        guarded = case.line.find("--api-key") or case.line.find("VLLM_API_KEY")
        if guarded is None:
            return Remark("costs", "whoever reaches the port may use the model: no --api-key is given")
    return None


def num_prompts(case: Case, setting: Setting) -> Remark | None:
    prompts, seqs = case.asked.num_prompts, case.asked.max_num_seqs
    if prompts and seqs and prompts > seqs and prompts % seqs:
        return Remark(
            "costs",
            f"no multiple of --max-num-seqs {seqs}: the last batch runs part empty",
            f"--num-prompts {prompts // seqs * seqs}",
        )
    return None


def request_rate(case: Case, setting: Setting) -> Remark | None:
    if case.asked.request_rate is not None:
        return Remark("fine", "measures latency at that load, and says nothing of the throughput there is")
    return None


ENGINE_RULES = {
    "--tensor-parallel-size": tensor_parallel_size,
    "--pipeline-parallel-size": pipeline_parallel_size,
    "--data-parallel-size": data_parallel_size,
    "--enable-expert-parallel": enable_expert_parallel,
    "--disable-nccl-for-dp-synchronization": only_with_replicas,
    "--data-parallel-address": only_with_replicas,
    "--data-parallel-rpc-port": only_with_replicas,
    "--data-parallel-backend": only_with_replicas,
    "--all2all-backend": only_with_experts_apart,
    "VLLM_ALL2ALL_BACKEND": only_with_experts_apart,
    "--config": config_file,
    "--distributed-executor-backend": executor,
    "--disable-custom-all-reduce": disable_custom_all_reduce,
    "--attention-backend": attention_backend,
    "VLLM_ATTENTION_BACKEND": attention_backend,
    "--compilation-config": compilation_config,
    "--speculative-config": speculation,
    "--speculative-model": speculation,
    "--num-speculative-tokens": speculation,
    "--trust-remote-code": trust_remote_code,
    "--mm-encoder-tp-mode": mm_encoder_tp_mode,
    "--host": host,
    "--num-prompts": num_prompts,
    "--request-rate": request_rate,
}
