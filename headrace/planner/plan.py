"""Turns a request into a plan: memory map, decisions with reasons, prediction, cost and command. Where nothing runs as
asked, it says why and makes the nearest plans that do run.

Reads config.json alone: no weights, no GPU, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace

from headrace.planner.alternatives import changes, drastic_changes
from headrace.planner.chips import Chip
from headrace.planner.commands import Command, command_for
from headrace.planner.fp8_cache import FP8
from headrace.planner.memory_map import MemoryMap
from headrace.planner.plan_request import PlanRequest
from headrace.planner.predict import Prediction, not_measured
from headrace.planner.record import Decision
from headrace.planner.scenario import Scenario
from headrace.planner.search import Candidate, SearchResult, TooLarge, evaluate, score, search, simulated
from headrace.planner.settings import PACE, engine_decisions, guessing_gain, parallel_decisions, summary
from headrace.planner.shapes import ModelShape
from headrace.planner.simulate import Simulation
from headrace.planner.speculation import speculation_gaps

GPU_COUNTS = [1, 2, 4, 8, 16, 32, 64]
"""Numbers of GPUs, of which the fewest that fit are taken where nobody says how many."""
MOST_REASONS = 4
"""Most layouts of which a plan says why they do not run."""


@dataclass(frozen=True)
class Cost:
    """Holds what a plan costs, in the currency of --price-per-gpu-hour."""

    per_hour: float
    per_million_output: float
    per_million_total: float
    """prompt tokens counted too"""


@dataclass(frozen=True)
class Plan:
    """Holds what a request comes to; where it cannot run, only `problems` and `alternatives` are filled in."""

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
    """why headrace cannot serve it today; empty: it can, or the plan is for vLLM"""
    command: Command | None = None
    """what starts it; None: headrace cannot serve it"""
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
    """Holds a plan that runs, for a request that differs from what was asked."""

    change: str
    """to what was asked"""
    plan: Plan


def make_plan(request: PlanRequest, machine: tuple[Chip, int] | None = None) -> Plan:
    """Make the plan of a request; where nothing runs as asked, its `problems` say why and its `alternatives` what does.

    `machine`: what `gpu="auto"` means, default this machine. Raises ConfigError for a model or GPU that is unknown.
    """
    scenario = Scenario.of(request, machine)
    request = request.filled(min(scenario.context, scenario.checkpoint.spec.max_position_embeddings))
    scenario = replace(scenario, request=request)
    plan = _plan_of(_find_layouts(scenario))
    if plan.feasible:
        return plan
    scenario = replace(scenario, num_gpus=plan.num_gpus)
    return replace(plan, alternatives=tuple(_alternatives(scenario)))


@dataclass(frozen=True)
class _Found:
    """Holds the layouts that run, or says why there is none."""

    scenario: Scenario
    """with the number of GPUs that they are on"""
    result: SearchResult
    problems: list[str]
    """empty: some run"""


def _plan_of(found: _Found, exact: bool = True) -> Plan:
    """The plan for exactly what was searched for. Unless it must be `exact`, it is predicted in closed form alone."""
    scenario, result, problems = found.scenario, found.result, found.problems
    plan = Plan(
        scenario.request, scenario.checkpoint, scenario.chip, scenario.num_gpus, scenario.engine, tuple(problems),
        passed_over=result.passed_over,
    )  # fmt: skip
    return plan if problems else _completed(plan, scenario, result, exact)


def _find_layouts(scenario: Scenario) -> _Found:
    """Search on as many GPUs as the scenario has or as are needed."""
    pinned = scenario.pinned_gpus
    counts = [pinned] if pinned else GPU_COUNTS
    scenario, result = replace(scenario, num_gpus=counts[0]), SearchResult([])
    if problems := scenario.problems():
        return _Found(scenario, result, problems)
    for count in counts:
        scenario = replace(scenario, num_gpus=count)
        result = search(scenario)
        if result.ranked and not pinned and result.best.parallel.gpus < count:  # three nodes, of four
            scenario = replace(scenario, num_gpus=result.best.parallel.gpus)
            result = search(scenario)
        if result.ranked:
            return _Found(scenario, result, [])
    nearest = result.too_large or [f"{name}: {why}" for name, why in result.passed_over.items()]
    nearest = nearest[:MOST_REASONS] or [f"no layout of {scenario.num_gpus} GPUs is what was asked for"]
    return _Found(scenario, result, nearest)


def _alternatives(scenario: Scenario) -> Iterator[Alternative]:
    """What does run, nearest first."""
    nearest = [_first_that_runs(group, scenario) for group in changes(scenario, GPU_COUNTS[-1])]
    if not any(nearest):
        nearest = [_first_that_runs(drastic_changes(scenario, GPU_COUNTS[-1]), scenario)]
    different = {_difference(scenario.request, found.scenario.request): found for found in nearest if found is not None}
    for number, (change, found) in enumerate(different.items()):
        yield Alternative(change, _plan_of(found, exact=number == 0))


def _first_that_runs(requests: Iterable[PlanRequest], scenario: Scenario) -> _Found | None:
    """The first that runs, if any does."""
    tried = (_find_layouts(replace(scenario, request=request)) for request in requests)
    return next((found for found in tried if not found.problems), None)


def _difference(asked: PlanRequest, changed: PlanRequest) -> str:
    """The fields that differ: `num_gpus 16 (not 8)`."""
    differences = []
    for entry in fields(asked):
        old, new = getattr(asked, entry.name), getattr(changed, entry.name)
        if old != new:
            before = "" if old is None else f" (not {old})"
            differences.append(f"{entry.name} {'left open' if new is None else new}{before}")
    return ", ".join(differences)


def _completed(plan: Plan, scenario: Scenario, result: SearchResult, exact: bool) -> Plan:
    """The plan with everything that follows from the best layout."""
    request = scenario.request
    best, simulation = simulated(result.best, request.simulate) if exact else (result.best, None)
    result = replace(result, ranked=[best, *result.ranked[1:]])
    command, gaps = _command(scenario, best)
    return replace(
        plan,
        layout=best.name,
        concurrency=best.workload.concurrency,
        memory=best.memory,
        decisions=(
            _count_decision(scenario, exact),
            *parallel_decisions(scenario, result),
            scenario.dtype,
            scenario.quantization,
            _with_other_cache(scenario, best, simulation is not None),
            *engine_decisions(scenario, best),
        ),
        prediction=best.prediction,
        simulation=simulation,
        cost=_cost(request, best),
        gaps=tuple(gaps),
        command=command,
        notices=tuple(_notices(scenario, best, gaps)),
    )


def _count_decision(scenario: Scenario, exact: bool) -> Decision:
    field, count = "num_gpus", scenario.num_gpus
    if scenario.request.num_gpus is not None:
        return Decision(field, count, "given", source="user")
    if scenario.machine_gpus is not None:
        return Decision(field, count, "what this machine has", source="measured")
    if scenario.pinned_gpus is not None:
        return Decision(field, count, "what the given layout takes")
    more = next((more for more in GPU_COUNTS if count < more <= scenario.chip.gpus_per_node), None)
    found = search(replace(scenario, num_gpus=more)).ranked if exact and more is not None else []
    runner_up = f"{found[0].parallel.gpus}, as {found[0].name}: {summary(found[0])}" if found else ""
    return Decision(field, count, "the fewest that hold it; --num-gpus takes more", runner_up)


def _with_other_cache(scenario: Scenario, best: Candidate, exact: bool) -> Decision:
    """`kv_cache_dtype` with what its runner-up would give, predicted as `best` was."""
    decision = scenario.kv_cache
    if not decision.runner_up:
        return decision
    kv_dtype = scenario.dtype.value if decision.value == FP8 else FP8
    other = evaluate(scenario.asking(kv_cache_dtype=kv_dtype), best.parallel)
    if isinstance(other, TooLarge):
        return decision
    if exact:
        other, _ = simulated(other, scenario.request.simulate)
    held = f"{other.prediction.kv_tokens:,} tokens held instead of {best.prediction.kv_tokens:,}"
    tok_s = f"{other.prediction.output_tok_s:,.0f} tok/s instead of {best.prediction.output_tok_s:,.0f}"
    return replace(decision, runner_up=f"{decision.runner_up}; {held}, {tok_s}")


def _cost(request: PlanRequest, best: Candidate) -> Cost | None:
    if request.price_per_gpu_hour is None:
        return None
    rates = best.prediction
    hour = request.price_per_gpu_hour * best.parallel.gpus
    return Cost(hour, hour / 3600 / rates.output_tok_s * 1e6, hour / 3600 / rates.total_tok_s * 1e6)


def _notices(scenario: Scenario, best: Candidate, gaps: list[str]) -> Iterator[str]:
    """What the user should know beside the figures."""
    request, chip, workload, prediction = scenario.request, scenario.chip, best.workload, best.prediction
    if scenario.engine == "headrace":
        if gaps:
            yield "headrace cannot serve this plan yet; --engine vllm plans for vLLM. " + "; ".join(gaps)
        if chip.vendor == "amd":
            yield (
                f"headrace's kernels are compiled for {chip.arch} and have not run there yet: its figures are vLLM's "
                "on such GPUs"
            )
    if scenario.shape.plain_bytes == 4 and chip.vendor != "cpu":
        yield "products in float32 run at a fraction of the 16-bit rates that are counted here: it is slower"
    if unknown := not_measured(best.deployment):
        yield f"never measured, so that the figures are within {prediction.error_band:.0%}: {', '.join(unknown)}"
    if request.speculative_config:
        yield f"guesses of tokens are not in the prediction: {guessing_gain(scenario, best)}"
    running, wanted = best.limits.max_num_seqs * best.parallel.dp, 0 if workload.request_rate else workload.concurrency
    if running < wanted:
        yield f"of {wanted:,} requests {running:,} run at once; the others wait"
    elif prediction.max_concurrency < wanted:
        yield (
            f"the cache holds {prediction.max_concurrency:,} requests to their end: of {wanted:,} at once some are "
            "preempted and computed again"
        )
    rate, served = workload.request_rate, prediction.output_tok_s / workload.output_len
    if rate and served < 0.9 * rate:
        yield f"{rate:g} requests a second come, {served:.3g} are served: the others wait ever longer"
    if request.objective == "interactive" and score("interactive", prediction) < 0:
        yield f"nothing here keeps to {PACE}: fewer at once, more GPUs or a smaller format would come nearer"
    if idle := scenario.num_gpus - best.parallel.gpus:
        yield f"{idle} of {scenario.num_gpus} GPUs stay idle: no better layout comes out even"


def _command(scenario: Scenario, best: Candidate) -> tuple[Command | None, list[str]]:
    """The command that starts the plan, and why headrace cannot serve it; empty: it can."""
    gaps = []
    if scenario.engine == "headrace":
        gaps = [*scenario.model_gaps(), *speculation_gaps(scenario.request.speculative_config)]
    return (None if gaps else command_for(scenario, best)), gaps
