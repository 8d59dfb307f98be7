"""Prints a plan on a terminal: memory map, decisions, prediction, cost, command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from headrace.planner.commands import Command, Flag
from headrace.planner.memory_map import MemoryMap
from headrace.planner.plan import Plan
from headrace.planner.record import Decision
from headrace.planner.simulate import Percentiles

WIDEST, OFF_TERMINAL = 120, 100
"""Columns of the tables: most on a terminal, and always elsewhere."""
MIB, GIB = 1 << 20, 1 << 30
BAR, VALUES = 24, 24
"""Columns of a bar, and most of a setting's value."""
WORD = r"(?:'[^']*'|[^' ])+"
"""A word of a command line, quotes included."""
PREDICTED = ("", "mean", "p50", "p90", "p99")
LEFT = "left to others"
BOUNDS = {
    "weights": "reading weights",
    "kv": "reading the KV cache",
    "flops": "arithmetic",
    "activations": "activations between products",
    "links": "links between GPUs",
    "launches": "starting kernels",
    "host": "the host",
}
SOURCES = {"user": "cyan", "derived": "", "measured": "green"}
"""Colour of a decision's value, by where the decision comes from."""


def print_plan(plan: Plan, console: Console | None = None) -> None:
    if console is None:
        console = Console(highlight=False)
        console = Console(highlight=False, width=min(console.width, WIDEST) if console.is_terminal else OFF_TERMINAL)
    for part in sections(plan):
        console.print(part)


def sections(plan: Plan) -> Iterator[RenderableType]:
    yield _title(plan)
    for notice in plan.notices:
        yield _said("note", notice, "yellow")
    if not plan.feasible:
        yield from _refusal(plan)
        return
    assert plan.memory is not None
    yield ""
    yield memory_table(plan)
    yield ""
    yield decision_table(plan)
    yield ""
    yield prediction_table(plan)
    if plan.simulation is None:
        yield Text("too many steps to simulate by default: --simulate adds percentiles", style="dim")
    if plan.command is not None:
        yield ""
        yield from command_part(plan.command)


def _title(plan: Plan) -> Text:
    """Three lines: the model and GPUs, the workload, and the result."""
    request = plan.request
    load = f"{request.prompt_len} in / {request.answer_len} out"
    if request.request_rate:
        load += f" at {request.request_rate:g} requests/s"
    elif plan.concurrency or request.concurrency:
        load += f", {plan.concurrency or request.concurrency} at once"
    shape = plan.shape
    active = f", {shape.active_weights / 1e9:.1f}B a token" if shape.is_moe else ""
    text = Text.assemble(
        (shape.name, "bold"),
        f" ({shape.total_weights / 1e9:.1f}B{active}) on {plan.num_gpus} x {plan.chip.title}\n",
        f"{plan.engine}, {request.objective}: {load}",
    )
    prediction = plan.prediction
    if prediction is not None:
        text.append(f"\n{plan.layout}", style="bold")
        text.append(f": {prediction.itl_ms:.1f} ms a token, {prediction.output_tok_s:,.0f} output tokens/s")
        text.append(f" (within {prediction.error_band:.0%})")
        if plan.cost is not None:
            text.append(f", {plan.cost.per_million_output:,.2f} for 1M output tokens")
    return text


def _refusal(plan: Plan) -> Iterator[RenderableType]:
    yield ""
    yield Text("This does not run:", style="bold red")
    for problem in plan.problems:
        yield Padding(Text(problem), (0, 0, 0, 2))
    if not plan.alternatives:
        yield Text("Nothing near it does.", style="bold")
        return
    yield ""
    table = _table("What does", "with", "layout", "tok/s", "ms a token", "GPUs")
    for column in table.columns[2:]:
        column.justify = "right"
    for entry in plan.alternatives:
        prediction = entry.plan.prediction
        assert prediction is not None
        speed = f"{prediction.output_tok_s:,.0f}", f"{prediction.itl_ms:.1f}"
        table.add_row(entry.change, entry.plan.layout, *speed, str(entry.plan.num_gpus))
    yield table
    yield ""
    yield Text("The nearest plan:", style="bold")
    yield from sections(plan.alternatives[0].plan)


def memory_table(plan: Plan) -> Table:
    memory = plan.memory
    assert memory is not None
    whose = "the machine" if plan.chip.vendor == "cpu" else "each GPU"
    table = _table(f"Memory of {whose}, of {memory.total / GIB:.1f} GiB", "part", "MiB", "", "")
    table.columns[1].justify = "right"
    rows = {**memory.parts(), LEFT: memory.total - memory.usable}
    for name, size in rows.items():
        share = size / memory.total
        bar = "█" * round(share * BAR) or "▏"
        table.add_row(name, f"{size / MIB:,.0f}", Text(f"{bar:{BAR}}", style="blue"), _remark(name, plan, memory))
    return table


def _remark(name: str, plan: Plan, memory: MemoryMap) -> str:
    if name == "KV cache":
        return f"{memory.kv_tokens:,} tokens of {memory.kv_bytes_per_token / 1024:.4g} KiB"
    if name == "activations":
        return f"a step of {plan.decision('max_num_batched_tokens').value:,} tokens"
    if name == LEFT:
        return f"gpu_memory_utilization {plan.request.gpu_memory_utilization:g}"
    return f"{plan.decision('max_num_seqs').value:,} rows" if name == "tables" else ""


def decision_table(plan: Plan) -> Table:
    table = _table("Decisions", "setting", "value", "why")
    table.columns[1].max_width = VALUES
    for decision in plan.decisions:
        why = Text(decision.reason)
        if decision.runner_up:
            why.append(f"\ninstead of {decision.runner_up}", style="dim")
        table.add_row(decision.field, Text(value_text(decision), style=SOURCES.get(decision.source, "")), why)
    return table


def value_text(decision: Decision) -> str:
    value: Any = decision.value
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ranges(value)
    return str(value)


def ranges(sizes: list[int]) -> str:
    """Write sizes in short: `1, 2, 4, 8-64 by 8`."""
    if not sizes:
        return "none"
    parts: list[str] = []
    start = 0
    while start < len(sizes):
        end = start + 1
        while end + 1 < len(sizes) and sizes[end + 1] - sizes[end] == sizes[start + 1] - sizes[start]:
            end += 1
        if end - start >= 2 and end < len(sizes):
            parts.append(f"{sizes[start]}-{sizes[end]} by {sizes[start + 1] - sizes[start]}")
            start = end + 1
        else:
            parts.append(str(sizes[start]))
            start += 1
    return ", ".join(parts)


def prediction_table(plan: Plan) -> Table:
    prediction, run = plan.prediction, plan.simulation
    assert prediction is not None
    table = _table(f"Prediction (a measurement is expected within {prediction.error_band:.0%})", *PREDICTED)
    for column in table.columns[1:]:
        column.justify = "right"

    def row(name: str, predicted: float, spread: Percentiles | None, scale: float, digits: int) -> None:
        values = [predicted]
        if spread is not None:
            values = [scale * seconds for seconds in (spread.mean, spread.p50, spread.p90, spread.p99)]
        table.add_row(name, *(f"{value:,.{digits}f}" for value in values))

    row("time to first token, ms", prediction.ttft_ms, run.ttft if run else None, 1000, 0)
    row("between tokens, ms", prediction.itl_ms, run.itl if run else None, 1000, 1)
    row("whole answer, s", prediction.e2e_s, run.e2e if run else None, 1, 2)
    row("output tokens/s", prediction.output_tok_s, None, 1, 0)
    row("all tokens/s", prediction.total_tok_s, None, 1, 0)
    row("requests at once, at most", prediction.max_concurrency, None, 1, 0)
    row("KV cache tokens", prediction.kv_tokens, None, 1, 0)
    table.add_row("decode steps are bound by", BOUNDS.get(prediction.bound, prediction.bound))
    if plan.cost is not None:
        row("an hour costs", plan.cost.per_hour, None, 1, 2)
        row("1M output tokens cost", plan.cost.per_million_output, None, 1, 2)
        row("1M tokens cost, prompts too", plan.cost.per_million_total, None, 1, 2)
    return table


def command_part(command: Command) -> Iterator[RenderableType]:
    yield Text(" ".join(command.program[:2]), style="bold")
    for note in command.notes:
        yield Padding(Text(note, style="dim"), (0, 0, 0, 2))
    yield Text(folded(command.line), style="green", no_wrap=True, overflow="ignore")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    for flag in (*command.variables, *command.flags):
        table.add_row(_spelled(flag), Text(flag.reason, style="dim"))
    yield table


def _spelled(flag: Flag) -> str:
    return flag.name if flag.value is None else f"{flag.name}{' ' if flag.name.startswith('-') else '='}{flag.value}"


def folded(line: str, width: int = 94) -> str:
    """Break a command into several indented lines that a shell takes as one.

    A flag and its value, and what is in quotes, stay together.
    """
    lines = [" "]
    for word in re.findall(rf"-{WORD}(?: (?!-){WORD})?|{WORD}", line):
        if len(lines[-1]) + 1 + len(word) > width and lines[-1].strip():
            lines.append("   ")
        lines[-1] += f" {word}"
    return " \\\n".join(lines)


def _said(who: str, what: str, style: str) -> Text:
    return Text.assemble((f"{who}: ", style), what)


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        header_style="dim",
    )
    for name in columns:
        table.add_column(name, overflow="fold")
    return table
