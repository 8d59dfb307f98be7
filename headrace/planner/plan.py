"""From a request to a plan: memory map, decisions with reasons, prediction, cost and commands; or what cannot run, and
the nearest plan that can.

Reads config.json alone: no weights, no GPU, no torch. How a plan looks on a terminal is the command line's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

from headrace.planner.chips import Chip
from headrace.planner.commands import Command, Settings, headrace_command, vllm_command
from headrace.planner.engines import layout_gaps
from headrace.planner.formats import (
    at_load,
    format_decision,
    format_problem,
    missing_checkpoint,
)
from headrace.planner.memory_map import MemoryMap
from headrace.planner.nearest import changes, drastic_changes
from headrace.planner.plan_request import PlanRequest
from headrace.planner.predict import Prediction
from headrace.planner.record import Decision
from headrace.planner.rounded_cache import FP8
from headrace.planner.search import Candidate, Found, Short, Terms, evaluate, score, search, simulated
from headrace.planner.settings import PACE, engine_decisions, parallel_decisions
from headrace.planner.shapes import ModelShape
from headrace.planner.simulate import Simulation
from headrace.planner.subject import (
    Subject,
    dtype_of,
    find_subject,
    gaps_of_model,
    kv_cache_of,
    pinned_gpus,
    problems_of,
    terms_of,
)

GPU_COUNTS = [1, 2, 4, 8, 16, 32, 64]
"""among which the fewest that fit are looked for"""
MOST_REASONS = 4


@dataclass(frozen=True)
class Cost:
    """In the currency of --price-per-gpu-hour."""

    per_hour: float
    per_million_output: float
    per_million_total: float
    """prompt tokens counted too"""


@dataclass(frozen=True)
class Plan:
    request: PlanRequest
    shape: ModelShape
    chip: Chip
    num_gpus: int
    engine: str
    problems: tuple[str, ...] = ()
    """why nothing runs as asked; empty: it runs"""
    notices: tuple[str, ...] = ()
    layout: str = ""
    concurrency: int = 0
    memory: MemoryMap | None = None
    decisions: tuple[Decision, ...] = ()
    prediction: Prediction | None = None
    simulation: Simulation | None = None
    cost: Cost | None = None
    gaps: tuple[str, ...] = ()
    """why headrace cannot serve it today; empty: it can"""
    commands: tuple[Command, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    """where nothing runs as asked: what does, nearest first"""
    passed_over: dict[str, str] = field(default_factory=dict)
    """layout -> why it was not ranked"""

    @property
    def feasible(self) -> bool:
        return not self.problems

    def decision(self, name: str) -> Decision:
        return next(decision for decision in self.decisions if decision.field == name)


@dataclass(frozen=True)
class Alternative:
    change: str
    """to what was asked"""
    plan: Plan


def make_plan(request: PlanRequest, machine: tuple[Chip, int] | None = None) -> Plan:
    """The plan; where nothing runs as asked, its `problems` say why and its `alternatives` what does.

    `machine`: what `gpu="auto"` means, default this machine. Raises ConfigError for a model or GPU that nobody knows.
    """
    subject = find_subject(request, machine)
    context = subject.shape.spec.max_position_embeddings
    request = request.filled(min(context, request.max_model_len or context))
    plan = _attempt(request, subject)
    if plan.feasible:
        return plan
    return replace(plan, alternatives=tuple(_alternatives(request, subject, plan)))


def _attempt(request: PlanRequest, subject: Subject, exact: bool = True) -> Plan:
    """The plan for exactly this request; the closed form has to do where it need not be exact."""
    terms, found, problems = _find(request, subject)
    plan = Plan(request, subject.shape, subject.chip, terms.num_gpus, request.engine, tuple(problems))
    if problems:
        return replace(plan, passed_over=found.passed_over)
    return _completed(plan, terms, found, subject, exact)


def _find(request: PlanRequest, subject: Subject) -> tuple[Terms, Found, list[str]]:
    """The layouts that run, or why there is none."""
    pinned = request.num_gpus or subject.num_gpus or pinned_gpus(request)
    counts = [pinned] if pinned else GPU_COUNTS
    terms, found = terms_of(request, subject, counts[0]), Found([])
    problems = problems_of(request, subject)
    if problems:
        return terms, found, problems
    for count in counts:
        terms = terms_of(request, subject, count)
        found = _search(terms, subject)
        if found.ranked and not pinned and found.best.parallel.gpus < count:  # three nodes, of four
            terms = terms_of(request, subject, found.best.parallel.gpus)
            found = _search(terms, subject)
        if found.ranked:
            return terms, found, []
    return terms, found, _why_nothing(found, terms)


def _alternatives(request: PlanRequest, subject: Subject, plan: Plan) -> Iterator[Alternative]:
    """What does run, nearest first."""
    terms = (request, subject.shape, subject.chip, plan.num_gpus, GPU_COUNTS[-1])
    nearest = [_first(group, subject) for group in changes(*terms)]
    if not any(nearest):
        nearest = [_first(drastic_changes(*terms), subject)]
    different = {_difference(request, changed): changed for changed in nearest if changed is not None}
    for number, (change, changed) in enumerate(different.items()):
        yield Alternative(change, _attempt(changed, subject, exact=number == 0))


def _first(requests: Iterable[PlanRequest], subject: Subject) -> PlanRequest | None:
    """The first that runs, if there is any; headrace has it today, if any of them."""
    on_paper = None
    for request in requests:
        terms, found, problems = _find(request, subject)
        if problems:
            continue
        if terms.engine == "vllm" or not layout_gaps(found.best.parallel):
            return request
        on_paper = on_paper or request
    return on_paper


def _difference(asked: PlanRequest, changed: PlanRequest) -> str:
    """`num_gpus 16 (not 8)`"""
    said = []
    for entry in fields(asked):
        old, new = getattr(asked, entry.name), getattr(changed, entry.name)
        if old != new:
            before = "" if old is None else f" (not {old})"
            said.append(f"{entry.name} {'left open' if new is None else new}{before}")
    return ", ".join(said)


def _search(terms: Terms, subject: Subject) -> Found:
    """Layouts that the engine has today, else any: a plan for an engine to come is still a plan."""
    if terms.served_by_headrace:
        found = search(terms)
        if found.ranked:
            return found
    return search(replace(terms, served_by_headrace=False))


def _beside_other_cache(decision: Decision, terms: Terms, best: Candidate, dtype: str, exact: bool) -> Decision:
    """`kv_cache_dtype` with what its runner-up would give, predicted as `best` was."""
    if not decision.runner_up:
        return decision
    kv_dtype = dtype if decision.value == FP8 else FP8
    other = evaluate(replace(terms, kv_dtype=kv_dtype), best.parallel)
    if not isinstance(other, Candidate):
        return decision
    if exact:
        other, _ = simulated(other, terms.request.simulate)
    held = f"{other.prediction.kv_tokens:,} tokens held instead of {best.prediction.kv_tokens:,}"
    tok_s = f"{other.prediction.output_tok_s:,.0f} tok/s instead of {best.prediction.output_tok_s:,.0f}"
    return replace(decision, runner_up=f"{decision.runner_up}; {held}, {tok_s}")


def _completed(plan: Plan, terms: Terms, found: Found, subject: Subject, exact: bool) -> Plan:
    """With everything that follows from the best layout."""
    request = plan.request
    best, simulation = simulated(found.best, request.simulate) if exact else (found.best, None)
    found = replace(found, ranked=[best, *found.ranked[1:]])
    dtype = dtype_of(request, subject)
    decisions = [
        *_count_decision(request, terms, subject),
        *parallel_decisions(terms, found),
        dtype,
        format_decision(request, subject.shape, subject.chip),
        _beside_other_cache(kv_cache_of(request, subject), terms, best, dtype.value, simulation is not None),
    ]
    decisions += engine_decisions(terms, best, dtype.value)
    gaps = _gaps(terms, best, subject)
    return replace(
        plan,
        num_gpus=terms.num_gpus,
        layout=best.name,
        concurrency=best.workload.concurrency,
        memory=best.memory,
        decisions=tuple(decisions),
        prediction=best.prediction,
        simulation=simulation,
        cost=_cost(request, best),
        gaps=tuple(gaps),
        commands=tuple(_commands(terms, best, subject, gaps)),
        notices=tuple(_notices(terms, best, gaps)),
        passed_over=found.passed_over,
    )


def _count_decision(request: PlanRequest, terms: Terms, subject: Subject) -> list[Decision]:
    if request.num_gpus is not None:
        return [Decision("num_gpus", request.num_gpus, "given", source="user")]
    if subject.num_gpus is not None:
        return [Decision("num_gpus", subject.num_gpus, "what this machine has", source="measured")]
    if pinned_gpus(request) is not None:
        return [Decision("num_gpus", terms.num_gpus, "what the given layout takes")]
    return [Decision("num_gpus", terms.num_gpus, "the fewest that hold it; --num-gpus takes more")]


def _cost(request: PlanRequest, best: Candidate) -> Cost | None:
    if request.price_per_gpu_hour is None:
        return None
    rates = best.prediction
    hour = request.price_per_gpu_hour * best.parallel.gpus
    return Cost(hour, hour / 3600 / rates.output_tok_s * 1e6, hour / 3600 / rates.total_tok_s * 1e6)


def _notices(terms: Terms, best: Candidate, gaps: list[str]) -> list[str]:
    notices = []
    if terms.engine == "headrace":
        if gaps:
            notices.append("headrace cannot serve this plan yet; it is for planning. " + "; ".join(gaps))
        if terms.chip.vendor == "amd":
            notices.append(
                f"headrace's kernels are compiled for {terms.chip.arch} and have not run there yet: its figures are "
                "vLLM's on such GPUs"
            )
    if terms.shape.plain_bytes == 4 and terms.chip.vendor != "cpu":
        notices.append("products in float32 run at a fraction of the 16-bit rates that are counted here: it is slower")
    if terms.request.speculative_config:
        notices.append("speculation is not in the prediction: how many guesses are right is known from traffic alone")
    room, wanted = best.limits.max_num_seqs * best.parallel.dp, best.workload.concurrency
    wanted = 0 if best.workload.request_rate else wanted
    if room < wanted:
        notices.append(f"of {wanted:,} requests {room:,} run at once; the others wait")
    elif best.prediction.max_concurrency < wanted:
        notices.append(
            f"the cache holds {best.prediction.max_concurrency:,} requests to their end: of {wanted:,} at once some "
            "are pushed out and computed again"
        )
    rate, served = best.workload.request_rate, best.prediction.output_tok_s / best.workload.output_len
    if rate and served < 0.9 * rate:
        notices.append(f"{rate:g} requests a second come, {served:.3g} are served: the others wait ever longer")
    if terms.request.objective == "interactive" and score("interactive", best.prediction) < 0:
        notices.append(f"nothing here keeps to {PACE}: fewer at once, more GPUs or a smaller format would come nearer")
    idle = terms.num_gpus - best.parallel.gpus
    if idle:
        notices.append(f"{idle} of {terms.num_gpus} GPUs stay idle: no better layout comes out even")
    return notices


def _gaps(terms: Terms, best: Candidate, subject: Subject) -> list[str]:
    """Why headrace cannot serve this plan today; empty: it can."""
    request = terms.request.replace(engine="headrace", attention_backend=_backend_of("headrace", terms.request))
    gaps = [*gaps_of_model(request, subject), *layout_gaps(best.parallel)]
    if request.speculative_config:
        gaps.append("headrace does not speculate yet")
    if gaps or terms.engine == "headrace":
        return gaps
    if problem := format_problem(request, subject.shape, subject.chip):
        return [problem]
    found = evaluate(terms_of(request, subject, terms.num_gpus), best.parallel)
    return [f"headrace: {found.why}"] if isinstance(found, Short) else []


def _commands(terms: Terms, best: Candidate, subject: Subject, gaps: list[str]) -> Iterator[Command]:
    """The planned engine's first."""
    order = sorted(("headrace", "vllm"), key=lambda engine: engine != terms.engine)
    for engine in order:
        if engine == "headrace" and gaps:
            continue
        request = terms.request.replace(engine=engine, attention_backend=_backend_of(engine, terms.request))
        own = terms_of(request, subject, terms.num_gpus)
        candidate = best if engine == terms.engine else evaluate(own, best.parallel)
        if isinstance(candidate, Short) or format_problem(request, subject.shape, subject.chip):
            continue
        settings = _settings(own, candidate, subject)
        yield headrace_command(settings) if engine == "headrace" else vllm_command(settings)


def _backend_of(engine: str, request: PlanRequest) -> str | None:
    """Names of backends are one engine's."""
    return request.attention_backend if engine == request.engine else None


def _settings(terms: Terms, candidate: Candidate, subject: Subject) -> Settings:
    request, shape = terms.request, subject.shape
    decisions = {entry.field: entry for entry in engine_decisions(terms, candidate, dtype_of(request, subject).value)}
    missing = missing_checkpoint(request, shape)
    model = subject.model_id(request.model, request.engine)
    needed = f"a checkpoint that holds {missing}" if missing else model.strip("<>") if model.startswith("<") else ""
    return Settings(
        engine=request.engine,
        model=f"<{model.strip('<>')} in {missing}>" if missing else model,
        needs_checkpoint=needed,
        chip=terms.chip,
        parallel=candidate.parallel,
        is_moe=shape.is_moe,
        is_mla=shape.is_mla,
        quantization=at_load(request, shape),
        kv_cache_dtype=terms.kv_dtype,
        attention_backend=decisions["attention_backend"].value,
        block_size=terms.block_size,
        max_model_len=candidate.max_model_len,
        max_num_seqs=candidate.limits.max_num_seqs,
        max_num_batched_tokens=candidate.limits.max_num_batched_tokens,
        bounded_by_cache=tuple(
            name for name in ("max_num_batched_tokens", "max_num_seqs") if candidate.decisions[name].runner_up
        ),
        concurrency=candidate.workload.concurrency,
        graph_mode=decisions["cudagraph_mode"].value,
        gpu_memory_utilization=request.gpu_memory_utilization,
        objective=request.objective,
        input_len=request.prompt_len,
        output_len=request.answer_len,
        given=_given(request),
    )


def _given(request: PlanRequest) -> dict[str, Any]:
    """What the user pinned."""
    plain = {entry.name: entry.default for entry in fields(request) if entry.default is not MISSING}
    plain |= {"compilation_config": {}, "speculative_config": {}}
    return {name: getattr(request, name) for name, usual in plain.items() if getattr(request, name) != usual}


def _why_nothing(found: Found, terms: Terms) -> list[str]:
    """The reasons of the layouts that came nearest: those that memory alone forbids, if there are any."""
    reasons = found.short or [f"{name}: {why}" for name, why in found.passed_over.items()]
    return reasons[:MOST_REASONS] or [f"no layout of {terms.num_gpus} GPUs is what was asked for"]
