"""Implements `headrace generate`, which completes prompts from flags, a file or standard input."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.cli.arguments import FlagParser, build_config, flag_of
from headrace.config import EngineConfig
from headrace.errors import ConfigError, HeadraceError, RequestError, SomeRequestsError
from headrace.hub import DEMO_MODEL
from headrace.knobs import check_knobs, knob, knob_types
from headrace.request import CompletionOutput, RequestOutput
from headrace.sampling_params import COMPATIBLE_ONLY, SamplingParams

DEFAULT_MAX_TOKENS = 128
DEMO_PROMPT = "Once upon a time"
EXAMPLES = """\
  headrace generate demo --prompt "Once upon a time"
  headrace generate ./model --prompts-file prompts.jsonl --temperature 0 --json
  echo "The capital of France is" | headrace generate ./model --max-tokens 5"""
SAMPLING_HELP = {
    "n": "Completions of each prompt.",
    "temperature": "How random sampling is; 0 always takes the most likely token.",
    "top_p": "Sample from the most likely tokens that together have this probability.",
    "top_k": "Sample from this many most likely tokens; 0: from all.",
    "min_p": "Leave out tokens less likely than this share of the most likely one's probability.",
    "presence_penalty": "Subtracted from the logits of tokens that were generated already.",
    "frequency_penalty": "Subtracted from the logits of such tokens, once for each time they were generated.",
    "repetition_penalty": "Divides the logits of tokens that the prompt or the output has already.",
    "seed": "The same seed gives the same tokens.",
    "stop": "Strings at which to stop.",
    "stop_token_ids": "Token ids at which to stop.",
    "bad_words": "Strings that are never generated.",
    "include_stop_str_in_output": "Keep the stop string in the text.",
    "ignore_eos": "Do not stop at the end-of-sequence token.",
    "max_tokens": "Most tokens to generate.",
    "min_tokens": "Tokens to generate before any stop counts.",
    "logprobs": "With --json, log probabilities of this many most likely tokens.",
    "prompt_logprobs": "The same for the prompt's tokens.",
    "detokenize": "Turn token ids into text.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "spaces_between_special_tokens": "Accepted for compatibility; special tokens are written as they are.",
    "logit_bias": "JSON, e.g. '{\"42\": -100}': added to logits by token id.",
    "allowed_token_ids": "The only token ids that may be generated.",
    "structured_outputs": 'JSON, e.g. \'{"regex": "[0-9]+"}\': what the output must be.',
}


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Holds the flags of `generate` beside those of the engine and of sampling."""

    prompt: list[str] = knob([], "A prompt; repeat the flag for more.", group="prompts")
    prompts_file: str | None = knob(
        None,
        'One prompt a line, or JSON lines: {"prompt": TEXT} or {"prompt_token_ids": [IDS]}; - is standard input.',
        group="prompts",
    )
    json: bool = knob(
        False,
        "Print one JSON object a completion: prompt, text, token_ids, finish_reason, logprobs.",
        group="prompts",
    )

    def __post_init__(self) -> None:
        check_knobs(self)


Prompt = str | list[int]


def build_parser() -> FlagParser:
    """Return the parser of the command's own flags, those of sampling and the engine's."""
    parser = FlagParser("generate", "Complete prompts, and print what the model writes.", EXAMPLES)
    parser.add_knobs(GenerateOptions, single=("prompt",))
    kinds = knob_types(SamplingParams)
    for field in msgspec.structs.fields(SamplingParams):
        if field.name in COMPATIBLE_ONLY:
            continue
        kind, optional = kinds[field.name]
        kind = dict if field.name == "structured_outputs" else kind
        element = int if field.name.endswith("token_ids") else str
        default = DEFAULT_MAX_TOKENS if field.name == "max_tokens" else field.default
        default = None if default is msgspec.NODEFAULT else default
        meta = knob(default, SAMPLING_HELP[field.name], group="sampling").metadata
        # None is a value of its own in SamplingParams, not "derived": say nothing of it.
        parser.add_flag(field.name, kind, optional and default is not None, default, meta, element)
    parser.add_knobs(EngineConfig, skip=("seed",))
    return parser


def main(argv: list[str]) -> int:
    """Run the command. What could be completed is printed before the error of a request that failed is raised."""
    values = build_parser().parse(argv)
    options = build_config(GenerateOptions, values)
    params = build_sampling_params(values)
    if params.seed is not None and params.seed < 0:
        raise ConfigError(f"--seed must be at least 0, got {params.seed}")
    config = build_config(EngineConfig, values)
    prompts = collect_prompts(options, config.model)

    from headrace.llm import LLM

    llm = LLM(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})
    failed: SomeRequestsError | None = None
    try:
        outputs = llm.generate(prompts, params, use_tqdm=len(prompts) > 1 and sys.stderr.isatty())
    except SomeRequestsError as error:
        failed, outputs = error, [entry for entry in error.outputs if not isinstance(entry, HeadraceError)]
    finally:
        llm.shutdown()
    for line in json_lines(outputs) if options.json else text_lines(outputs, sys.stdout.isatty()):
        print(line)
    if failed is not None:
        raise failed
    return 0


def build_sampling_params(values: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters that the flags ask for. Raises ConfigError naming the flag."""
    given = {name: value for name, value in vars(values).items() if name in SAMPLING_HELP}
    given.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    try:
        if "logit_bias" in given:
            given["logit_bias"] = msgspec.convert(given["logit_bias"], dict[int, float], strict=False)
        return SamplingParams(**given)
    except msgspec.ValidationError:
        raise ConfigError(f"--logit-bias must map token ids to numbers, got {given['logit_bias']!r}") from None
    except RequestError as error:
        name = error.param or ""
        raise ConfigError(f"{flag_of(name)} {str(error).removeprefix(name).strip()}") from None


def collect_prompts(options: GenerateOptions, model: str) -> list[Prompt]:
    """Return prompts from --prompt and --prompts-file, else standard input. Raises ConfigError where there is none."""
    prompts: list[Prompt] = list(options.prompt)
    if options.prompts_file is not None:
        prompts += read_prompts(options.prompts_file)
    elif not prompts and not sys.stdin.isatty():
        prompts += parse_prompts(sys.stdin.read(), "standard input")
    elif not prompts and model == DEMO_MODEL:
        prompts.append(DEMO_PROMPT)
    if not prompts:
        raise ConfigError("no prompt given; use --prompt TEXT, --prompts-file FILE or standard input")
    return prompts


def read_prompts(name: str) -> list[Prompt]:
    """Return the prompts in a file; `-` is standard input. Raises ConfigError where it cannot be read."""
    if name == "-":
        return parse_prompts(sys.stdin.read(), "standard input")
    try:
        return parse_prompts(Path(name).read_text(encoding="utf-8"), name)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"--prompts-file {name!r} cannot be read: {reason}") from None


def parse_prompts(text: str, source: str) -> list[Prompt]:
    """Return the prompts of a text: JSON lines if its first line is an object with a prompt, else one a line."""
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines or _json_prompt(lines[0][1]) is None:
        return [line for _, line in lines]
    prompts: list[Prompt] = []
    for number, line in lines:
        prompt = _json_prompt(line)
        if prompt is None:
            raise ConfigError(
                f'{source}, line {number}: needs {{"prompt": TEXT}} or {{"prompt_token_ids": [IDS]}}, got {line:.80}'
            )
        prompts.append(prompt)
    return prompts


def _json_prompt(line: str) -> Prompt | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    value = record.get("prompt", record.get("prompt_token_ids"))
    if isinstance(value, str) or (isinstance(value, list) and value and all(type(i) is int for i in value)):
        return value
    return None


def json_lines(outputs: list[RequestOutput]) -> Iterator[str]:
    """Yield one JSON object for each completion; its prompt is text or token ids, as it was given."""
    for output in outputs:
        for choice in output.outputs:
            record: dict[str, Any] = {
                "prompt": output.prompt if output.prompt is not None else output.prompt_token_ids,
                "text": choice.text,
                "token_ids": choice.token_ids,
                "finish_reason": choice.finish_reason,
                "logprobs": _logprobs(choice.logprobs),
            }
            if output.prompt_logprobs is not None:
                record["prompt_logprobs"] = _logprobs(output.prompt_logprobs)
            yield msgspec.json.encode(record).decode()  # infinities, which JSON does not know, become null


def _logprobs(positions: Any) -> list[dict[str, Any] | None] | None:
    """Per position: token id -> {logprob, rank, decoded_token}, the sampled token first."""
    if positions is None:
        return None
    return [
        None if position is None else {str(token_id): vars(entry) for token_id, entry in position.items()}
        for position in positions
    ]


def text_lines(outputs: list[RequestOutput], colour: bool) -> Iterator[str]:
    """Yield prompts with their completions, empty lines between them."""
    bold, plain = ("\033[1m", "\033[0m") if colour else ("", "")
    first = True
    for output in outputs:
        for choice in output.outputs:
            if not first:
                yield ""
            first = False
            if output.prompt is None:
                yield f"{bold}{output.prompt_token_ids}{plain} {_completion(choice)}"
            else:
                yield f"{bold}{output.prompt}{plain}{_completion(choice)}"


def _completion(choice: CompletionOutput) -> str:
    return choice.text if choice.text else str(choice.token_ids)
