"""`headrace eval`: reads the flags, has a model answer a task (evaluate/), and prints its figures; or compares runs."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.arguments import FlagParser, build_config, flag_of
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.knobs import check_knobs, knob

if TYPE_CHECKING:
    from headrace.evaluate.samples import Record
    from headrace.evaluate.session import Item

EXAMPLES = """\
  headrace eval demo --task gsm8k --data ./gsm8k --num-fewshot 0 --limit 20
  headrace eval ./model --task mmlu_pro --data ./MMLU-Pro --apply-chat-template --output-path runs/bf16
  headrace eval --task humaneval --data HumanEval.jsonl --base-url http://host:8000 --output-path runs/server \\
      --allow-code-execution
  headrace eval --compare runs/bf16 runs/fp8"""
OF_CODE = ("humaneval", "humaneval_instruct")
TASK_NAMES = ("gsm8k", "mmlu_pro", *OF_CODE, "perplexity")
OF_SERVER = ("model", "tokenizer")
"""Flags of the engine that have a meaning for a server's model too."""
NO_MATTER = ("gpu_memory_utilization", "log_level", "disable_log_stats", "disable_log_requests", "max_num_seqs")
"""Flags of the engine that may change when a run goes on."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Holds the command's flags beside those of the engine; they have lm_eval's names where it has them."""

    task: str = knob("", f"What to measure: {', '.join(TASK_NAMES)}.", aliases=("--tasks",), group="task")
    data: str = knob("", "The task's items: a file (.jsonl, .json, .txt) or a dataset's folder.", group="task")
    fewshot_data: str | None = knob(
        None, "The examples; default: the split for it (train, validation) in the folder of --data.", group="task"
    )
    num_fewshot: int | None = knob(None, "Examples before each item (default: the task's).", minimum=0, group="task")
    limit: int | None = knob(None, "Ask only the first N items (default: all).", minimum=1, group="task")
    output_path: str | None = knob(
        None, "Folder for results and samples; a run of the same settings in it goes on (default: eval/MODEL).",
        group="task",
    )  # fmt: skip
    compare: list[str] = knob([], "Compare these folders of runs instead: the first with each other.", group="task")
    apply_chat_template: bool = knob(False, "Ask through the chat template, examples as turns.", group="asking")
    chat_template_kwargs: dict[str, Any] = knob({}, "JSON of variables for the template.", group="asking")
    system_instruction: str = knob("", "Text before the task's own description.", group="asking")
    reasoning_parser: str = knob(
        "auto", "How a chat's reasoning is marked, which is not scored: as for `headrace serve`.", group="asking"
    )
    max_gen_toks: int | None = knob(None, "Most tokens of an answer (default: the task's).", minimum=1, group="asking")
    gen_kwargs: dict[str, Any] = knob(
        {}, "JSON of sampling parameters, e.g. '{\"temperature\": 0.6}' (default: greedy).", group="asking"
    )
    max_length: int | None = knob(
        None, "Tokens of a window of perplexity (default: the context less 2).", minimum=1, group="asking"
    )
    allow_code_execution: bool = knob(
        False, "Run the programs that the model writes, held in as docs/evaluating.md says.",
        aliases=("--confirm-run-unsafe-code",), group="code",
    )  # fmt: skip
    code_timeout: float = knob(10.0, "Seconds that a program may run.", minimum=0.1, group="code")
    base_url: str | None = knob(None, "Ask the server there (http://host:port) instead.", group="server")
    api_key: str | None = knob(None, "Sent as bearer token (VLLM_API_KEY).", group="server")
    max_concurrency: int = knob(256, "Most requests under way at once.", minimum=1, group="server")

    def __post_init__(self) -> None:
        check_knobs(self)
        if self.compare:
            if len(self.compare) < 2:
                raise ConfigError("--compare needs at least two folders of runs")
            return
        if self.task not in TASK_NAMES:
            raise ConfigError(f"--task must be one of {', '.join(TASK_NAMES)}; got {self.task!r}")
        if not self.data:
            raise ConfigError(f"--data is missing: the items of {self.task}, which docs/evaluating.md describes")
        if self.task in OF_CODE and not self.allow_code_execution:
            raise ConfigError(
                f"--task {self.task} runs programs that the model writes, which needs --allow-code-execution; "
                "docs/evaluating.md says what they can do"
            )
        if self.base_url and not self.output_path:
            raise ConfigError("--base-url needs --output-path: what a server's name stands for may change")


def build_parser() -> FlagParser:
    """Return the parser of the command's own flags and the engine's."""
    summary = "Score a model's answers on a task, with error bars, or compare runs item by item."
    parser = FlagParser("eval", summary, EXAMPLES)
    parser.add_knobs(EvalOptions)
    parser.add_knobs(EngineConfig, skip=("task",), log_level="warning")
    return parser


def main(argv: list[str]) -> int:
    """Run the command. What was answered before it ends, however it ends, is kept."""
    values = build_parser().parse(argv)
    options = build_config(EvalOptions, values)
    if options.compare:
        return compare_runs(options.compare, options.output_path)
    delattr(values, "task")  # a field of EngineConfig too, which is another thing
    names = [field.name for field in dataclasses.fields(EngineConfig) if field.name in vars(values)]
    engine = {name: vars(values)[name] for name in names if name not in OF_SERVER}
    if options.base_url and engine:
        flags = ", ".join(map(flag_of, engine))
        raise ConfigError(f"{flags}: a server that runs already (--base-url) does not take flags of the engine")
    config = build_config(EngineConfig, values, log_level="warning", disable_log_stats=True)
    model = vars(values).get("model") if options.base_url else config.model
    settings = {name: value for name, value in engine.items() if name not in NO_MATTER}
    return evaluate(options, config, {"model": model, "tokenizer": config.tokenizer, "engine": settings})


def evaluate(options: EvalOptions, config: EngineConfig, settings: dict[str, Any]) -> int:
    """Answer what is not answered yet, then write the result file and print it. `settings`: those of the model."""
    import uvloop

    from headrace.cli.bench.output import progress_bar, write_json
    from headrace.cli.eval_models import engine_model, server_model
    from headrace.evaluate.code import check_machine
    from headrace.evaluate.report import figures, results_json, table
    from headrace.evaluate.samples import Samples
    from headrace.evaluate.session import kept, run

    asking = make_asking(options)
    items, size, of_task = read_task(options)
    settings = {**settings, **of_task, "generation": asking.generation}
    if options.task in OF_CODE:
        check_machine()
    folder = Path(options.output_path or Path("eval", Path(config.model).name)).expanduser()
    began = time.monotonic()
    with Samples(folder / f"samples_{options.task}.jsonl", settings) as samples:

        async def answer() -> None:
            name, tokenizer = settings["model"], config.tokenizer
            server = options.base_url and server_model(options.base_url, options.api_key, name, tokenizer, asking)
            async with server or engine_model(config, asking) as asked:
                await run(items, asked, samples, on_done)

        missing = [item for item in items if item.doc_id not in samples.done]
        if len(missing) < len(items):
            print(f"{len(items) - len(missing)} of {len(items)} items are answered already", file=sys.stderr)
        try:
            with progress_bar(options.task, len(items)) as on_done:
                if missing:
                    uvloop.run(answer())
        except KeyboardInterrupt:
            done = sum(item.doc_id in samples.done for item in items)
            print(f"interrupted: {kept(done, len(items), samples)}", file=sys.stderr)
            raise
        records = [samples.done[item.doc_id] for item in items]
    result = results_json(options.task, settings, records, size, time.monotonic() - began, time.time())
    write_json(folder / f"results_{options.task}.json", result)
    for line in table({folder.name: figures(records)}):
        print(line)
    warn_of_cut_answers(records)
    print(f"{len(records)} items; {folder / f'results_{options.task}.json'}")
    return 0


def read_task(options: EvalOptions) -> tuple[list[Item], int, dict[str, Any]]:
    """Return the items to answer, the number of items in the data, and the settings that they depend on."""
    from headrace.evaluate.data import find_split, read_docs
    from headrace.evaluate.session import items_of, texts_of
    from headrace.evaluate.tasks import SPLITS, TASKS

    task = TASKS.get(options.task)
    path = find_split(options.data, SPLITS, "--data")
    docs = read_docs(path, () if task is None else task.fields)
    settings: dict[str, Any] = {"task": options.task, "data": hashlib.sha256(path.read_bytes()).hexdigest()}
    if task is None:
        return texts_of(docs)[: options.limit], len(docs), settings | {"max_length": options.max_length}
    count = task.num_fewshot if options.num_fewshot is None else options.num_fewshot
    pool, examples = [], None
    if count:
        examples = find_split(options.fewshot_data or str(path.parent), task.fewshot_splits, "--fewshot-data")
        if examples == path:
            raise ConfigError(
                f"{options.task} with {count} examples needs --fewshot-data, or {' or '.join(task.fewshot_splits)}"
                f"{path.suffix} beside the items; --num-fewshot 0 asks without"
            )
        pool = read_docs(examples, task.fields)
    settings |= {
        "num_fewshot": count,
        "fewshot_data": hashlib.sha256(examples.read_bytes()).hexdigest() if examples else None,
        "apply_chat_template": options.apply_chat_template,
        "chat_template_kwargs": options.chat_template_kwargs,
        "system_instruction": options.system_instruction,
        "reasoning_parser": options.reasoning_parser,
    } | ({"code_timeout": options.code_timeout} if options.task in OF_CODE else {})
    asked = docs[: options.limit]
    items = items_of(task, asked, pool, count, options.system_instruction, options.code_timeout)
    return items, len(docs), settings


def make_asking(options: EvalOptions) -> Any:
    """Return how the model is asked. Raises ConfigError for a sampling parameter that there is not."""
    from headrace.cli.eval_models import Asking
    from headrace.errors import RequestError
    from headrace.evaluate.tasks import TASKS
    from headrace.sampling_params import SamplingParams

    task = TASKS.get(options.task)
    generation: dict[str, Any] = {}
    if task is not None:
        stops = [] if options.apply_chat_template else [*task.stop]  # a chat ends by itself, and may think of these
        generation = {"temperature": 0.0, "max_tokens": options.max_gen_toks or task.max_gen_toks}
        generation |= ({"stop": stops} if stops else {}) | options.gen_kwargs
    try:
        SamplingParams(**generation)
    except (RequestError, TypeError) as error:
        raise ConfigError(f"--gen-kwargs: {error}") from None
    return Asking(
        generation=generation,
        chat=options.apply_chat_template,
        template_kwargs=options.chat_template_kwargs,
        reasoning_parser=options.reasoning_parser,
        max_concurrency=options.max_concurrency,
        max_length=options.max_length,
    )


def warn_of_cut_answers(records: list[Record]) -> None:
    """Say how many answers were not finished, which makes a model look worse than it is."""
    cut = sum(record.get("finish_reason") == "length" for record in records)
    if cut:
        print(f"{cut} of {len(records)} answers were cut at max_gen_toks, --max-gen-toks raises it", file=sys.stderr)


def compare_runs(names: list[str], output_path: str | None) -> int:
    """Print the figures of runs, and the first one's comparison with each other, task by task."""
    from headrace.cli.bench.output import write_json
    from headrace.evaluate.report import compare, figures, table
    from headrace.evaluate.samples import read_samples

    runs: dict[str, dict[str, tuple[Record, list[Record]]]] = {}
    for name in names:
        files = sorted(Path(name).expanduser().glob("samples_*.jsonl"))
        if not files:
            raise ConfigError(f"--compare {name!r}: there is no samples_TASK.jsonl of a run in this folder")
        read = [read_samples(file) for file in files]
        runs[name] = {settings["task"]: (settings, [*by_id.values()]) for settings, by_id in read if by_id}
    first, *others = names
    found: dict[str, list[Record]] = {}
    for task, (settings, records) in runs[first].items():
        having = {name: runs[name][task] for name in names if task in runs[name]}
        print(task)
        for line in table({name: figures(one) for name, (_, one) in having.items()}):
            print(line)
        for other in (name for name in others if name in having):
            unlike, compared = having[other]
            for key in {**settings, **unlike}:
                if settings.get(key) != unlike.get(key):
                    print(f"{key}: {unlike.get(key)!r} in {other}, {settings.get(key)!r} in {first}")
            for record, lines in compare(records, compared, (first, other)):
                found.setdefault(task, []).append({"runs": [first, other], **record})
                print(*lines, sep="\n")
    if not found:
        raise ConfigError(f"{first} has no task in common with {', '.join(others)}")
    if output_path:
        write_json(Path(output_path).expanduser(), found)
    return 0
