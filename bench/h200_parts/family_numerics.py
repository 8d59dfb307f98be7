"""Compares the logits of a model of every family in bf16 with transformers', and looks at how they were computed.

Models are those of the conformance tests (tests/models/tiny_configs.py), widened to sizes that kernels like, with
random weights that bf16 holds. Their layers of experts send every token to all of theirs: a token that rounding sends
elsewhere would say more about its router than about the family. Where experts' weights jump from one logit to the next
(SparseMixer), the middle one of the positions is compared in place of all together: rounding makes a few jump, in
transformers' model too. A model whose keys an index chooses is compared twice: where the index chooses few of the keys,
which rounding makes others in transformers' model too, and where it has none to choose from.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from h200_parts.forced import Sequence, continued, decode, stepped_core
from h200_parts.format_numerics import BOUND, CONSTANTS, latent_configs, random_tokens, unmeasured, watch
from h200_parts.format_numerics import case as format_case
from h200_parts.numerics import compare, transformers_logits
from h200_parts.run import Run
from h200_parts.settings import Settings
from headrace.feed_forwards import Experts
from headrace.model_config import ModelConfig
from headrace.models.registry import SERVED
from headrace.models.served import describe

PROMPTS = (1, 8, 24)
"""requests of a batch, whose prompts together are beyond the kernels for few tokens in the last"""
LONGEST, NEW_TOKENS = 20, 8
VOCAB = 512
MEDIUM: dict[str, Any] = CONSTANTS["medium"]
"""fields that are changed where a tiny config has them"""
ALWAYS = ("hidden_size", "intermediate_size", "vocab_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
PER_TOKEN = ("num_experts_per_tok", "moe_k", "top_k_experts")
FACTORS = ("short_factor", "long_factor")
"""of rope, one for each pair of numbers that are turned"""
AT_ONCE = 3
"""families that share the GPU, each with SHARE of its memory"""
SHARE = 0.25


def family_numerics_cases(run: Run) -> None:
    """Add a case for each family but those of latents."""
    compare_families(run, [name for name in SERVED if not has_latents(name)])


def latent_numerics_cases(run: Run) -> None:
    """Add a case or two for each family of latents, and those of formats."""
    compare_families(run, [name for name in SERVED if has_latents(name)])
    for name, config in latent_configs(run.smoke).items():
        format_case(run, name, config, also=("cat",))  # a linear in two formats puts its parts side by side


def tiny_configs() -> Any:
    """Return the module of the conformance tests' models."""
    if (folder := str(Path(__file__).parents[2] / "tests" / "models")) not in sys.path:
        sys.path.insert(0, folder)
    return import_module("tiny_configs")


def first_variant(name: str) -> dict[str, Any]:
    variant: dict[str, Any] = next(iter(tiny_configs().VARIANTS[name].values()))
    return variant


def has_latents(name: str) -> bool:
    return name in tiny_configs().LATENT_OR_STATES and "kv_lora_rank" in first_variant(name)


def compare_families(run: Run, names: list[str]) -> None:
    """Add cases for families. One passes where the error against fp32 is at most BOUND times that of transformers in
    bf16, graphs give the tokens of eager steps, no kernel was demoted and, on a GPU, no layer left more than products
    to torch."""
    import transformers

    if left := sorted(name for name in names if not hasattr(transformers, name)):
        run.note(f"not in transformers {transformers.__version__}: {', '.join(left)}")
    models: list[tuple[str, dict[str, int]]] = [(name, {}) for name in names if name not in left]
    models += [
        (name, {"index_topk": LONGEST + NEW_TOKENS}) for name, _ in models if "index_topk" in first_variant(name)
    ]
    with ProcessPoolExecutor(1 if run.smoke else AT_ONCE, multiprocessing.get_context("spawn")) as processes:
        for made in as_completed([processes.submit(compared, run.settings, *model) for model in models]):
            run.case(*made.result())


def compared(settings: Settings, name: str, changes: dict[str, int]) -> tuple[str, bool, str]:
    """Return the case of a family's model with `changes`: its name, whether it passes and what was found. It runs in a
    process of its own."""
    torch.backends.cuda.matmul.allow_tf32 = False
    title = ", ".join([name, *(f"{field} {value}" for field, value in changes.items())])
    folder = settings.work / title.replace(", ", "-").replace(" ", "-")
    try:
        write_model(name, folder, changes)
        measure = "middle_error" if weights_jump(ModelConfig.from_folder(folder)) else "error"
        batches = [
            random_tokens(count, VOCAB, LONGEST, NEW_TOKENS) for count in PROMPTS[: 2 if settings.smoke else None]
        ]
        made, inside, backend, notes = headrace_logits(settings, folder, batches)
        tokens = [tokens for batch in batches for tokens in batch]
        eager = {"attn_implementation": "eager"}  # what is faster may leave out soft caps
        exact, theirs = (
            transformers_logits(settings, name, folder, dtype, tokens, NEW_TOKENS, **eager)
            for dtype in ("float32", "bfloat16")
        )
    except Exception as error:  # the other families are still compared
        return title, False, f"{type(error).__name__}: {str(error)[:600]}"
    ours, allowed = (getattr(compare(one, exact), measure) for one in (made, theirs))
    torch_path = ", ".join(f"{count} x {op}" for op, count in inside.items()) if not settings.smoke else ""
    said = f"{measure.replace('_', ' ')} against fp32 {ours:.2e}, transformers' {allowed:.2e}, "
    said += f"ratio {ours / allowed:.2f}; torch inside layers: {torch_path or 'none'}; by {backend}"
    said += "".join(f"; {note}" for note in notes)
    return title, ours <= BOUND * allowed and not torch_path and not notes, said


def write_model(name: str, folder: Path, further: dict[str, int]) -> None:
    """Write a checkpoint in float32 whose numbers are bf16's, of a model with `further` changes."""
    import transformers

    model = getattr(transformers, name)(widened(name, further)).eval()
    tiny_configs().fill_at_random(model, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    model.save_pretrained(folder)


def widened(name: str, further: dict[str, int]) -> Any:
    """Return transformers' config of a family's model with `further` changes."""
    tiny, variant, medium = tiny_configs(), first_variant(name), MEDIUM | CONSTANTS["own"].get(name, {})
    changes = {field: value for field, value in medium.items() if field in ALWAYS or variant.get(field) is not None}
    changes |= further
    experts = [(variant | changes)[field] for field in EXPERTS if field in variant]
    changes |= dict.fromkeys(PER_TOKEN, experts[0]) if experts else {}
    rope = variant.get("rope_parameters", {})
    pairs = int(MEDIUM["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2
    if sections := rope.get("mrope_section"):
        changes["rope_parameters"] = {**rope, "mrope_section": [size * pairs // sum(sections) for size in sections]}
    if factors := {name: rope[name] for name in FACTORS if name in rope}:
        wider = {name: [one for one in each for _ in range(pairs // len(each))] for name, each in factors.items()}
        changes["rope_parameters"] = {**rope, **wider}
    return tiny.tiny_config(name, {**variant, **changes})


def weights_jump(config: ModelConfig) -> bool:
    """Tell whether a model's weights of experts jump. Raises ValueError where tokens go to some of the experts alone,
    by a field that PER_TOKEN lacks."""
    blocks = [layer.feed_forward for layer in describe(config).layers]
    experts = {block for block in blocks if isinstance(block, Experts)}
    if few := [block for block in experts if block.experts_per_token < block.num_experts]:
        raise ValueError(f"tokens go to {few[0].experts_per_token} of {few[0].num_experts} experts")
    return any(block.near for block in experts)


def headrace_logits(
    settings: Settings, folder: Path, batches: list[list[list[int]]]
) -> tuple[list[Sequence], Counter[str], str, list[str]]:
    """Return the logits of eager steps in bf16, what torch computed inside layers, the attention backend, and what is
    not as it should be, such as graphs that give other tokens."""
    knobs: dict[str, Any] = {
        "dtype": "bfloat16", "max_model_len": 64, "max_num_seqs": 32, "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": 256,
    }  # fmt: skip
    inside: Counter[str] = Counter()
    with unmeasured(), stepped_core(settings, folder, SHARE, **knobs) as core:
        worker: Any = core._executor._worker  # pyrefly: ignore[missing-attribute]
        facts, graphs = core.facts.workers[0], worker.runner.graphs
        notes = [f"{name} demoted" for name in facts.demoted]
        watch(worker.model, inside)
        worker.runner.graphs = None
        made = continued(core, batches, NEW_TOKENS)
        prompts = [tokens[:-NEW_TOKENS] for tokens in batches[1]]
        eager = [one.tokens for one in decode(core, prompts, NEW_TOKENS)]
        worker.runner.graphs = graphs
        for _ in range(3):  # sizes are met, captured and replayed
            replayed = [one.tokens for one in decode(core, prompts, NEW_TOKENS)]
        unlike = sum(one != other for one, other in zip(eager, replayed, strict=True))
        notes += [f"graphs give other tokens to {unlike} of {len(eager)} requests"] if unlike else []
        return made, inside, worker.backend.name, notes
