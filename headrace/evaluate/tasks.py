"""Defines the tasks: what an item asks, what counts as its answer, and when that is right.

Prompts, extraction and names are those of lm_eval 0.4.13, so that its figures can be set beside ours.
"""

from __future__ import annotations

import dataclasses
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace.errors import ConfigError, quoted
from headrace.evaluate.data import Doc

LETTERS = "ABCDEFGHIJ"
INVALID = "[invalid]"
"""Stands for an answer in which nothing was found."""
SPLITS = ("test", "validation", "dev")
"""Names of what is asked, the first that a dataset has."""
Message = dict[str, str]


@dataclass(frozen=True)
class Extract:
    """Finds the answer in a text by a regular expression: its first match, or the last one. Of several groups it takes
    the first that is not empty."""

    pattern: str
    last: bool = False

    def __call__(self, doc: Doc, text: str) -> str:
        matches = re.findall(self.pattern, text)
        if not matches:
            return INVALID
        match = matches[-1 if self.last else 0]
        groups = [match] if isinstance(match, str) else [group for group in match if group]
        return groups[0].strip() if groups else INVALID


@dataclass(frozen=True)
class ExactMatch:
    """Compares an answer with the right one, whatever their case, without what `ignored` matches."""

    ignored: tuple[str, ...] = ()
    ignore_punctuation: bool = False

    def __call__(self, answer: str, right: str) -> bool:
        return self._plain(answer) == self._plain(right)

    def _plain(self, text: str) -> str:
        for pattern in self.ignored:
            text = re.sub(pattern, "", text)
        text = text.lower()
        return text.translate(str.maketrans("", "", string.punctuation)) if self.ignore_punctuation else text


@dataclass(frozen=True)
class Task:
    """Describes a task whose answers are generated. Functions take an item."""

    name: str
    fields: tuple[str, ...]
    """What an item must have."""
    question: Callable[[Doc], str]
    worked: Callable[[Doc], str]
    """The answer as an example shows it."""
    right: Callable[[Doc], str]
    """What a right answer is compared with."""
    filters: Mapping[str, Callable[[Doc, str], str]]
    """Name of a way to find the answer to an item in a text -> that way."""
    is_right: Callable[[str, str], bool] | None
    """Compares what was found with what is right; None: the two are a program and its test, which must run."""
    stop: tuple[str, ...]
    max_gen_toks: int
    metric: str = "exact_match"
    num_fewshot: int = 0
    fewshot_splits: tuple[str, ...] = ("train", "validation", "dev")
    description: Callable[[Doc], str] = lambda doc: ""
    group: Callable[[Doc], str] = lambda doc: ""
    """The part of the task that an item belongs to, which has a figure and examples of its own; empty: none."""

    def conversation(self, doc: Doc, examples: Sequence[Doc], system: str = "") -> list[Message]:
        """Return an item as messages, after the examples of its group."""
        head = "\n\n".join(filter(None, (system, self.description(doc))))
        turns = [{"role": "system", "content": head}] if head else []
        for one in examples:
            turns.append({"role": "user", "content": self.question(one)})
            turns.append({"role": "assistant", "content": self.worked(one)})
        return [*turns, {"role": "user", "content": self.question(doc)}]

    def examples_of(self, doc: Doc, pool: Sequence[Doc], count: int) -> list[Doc]:
        """Return the first `count` examples of the item's group. Raises ConfigError if there are fewer."""
        group = self.group(doc)
        found = [one for one in pool if self.group(one) == group and one != doc][:count]
        if len(found) < count:
            of = f" of {group}" if group else ""
            raise ConfigError(f"--num-fewshot is {count}, and the few-shot data have {len(found)} examples{of}")
        return found

    def cut(self, text: str) -> str:
        """Return a text up to the first of the stop strings in it."""
        ends = [at for at in map(text.find, self.stop) if at >= 0]
        return text[: min(ends, default=len(text))]


def as_text(conversation: Sequence[Message]) -> str:
    """Return a conversation as the plain prompt of a model that knows no chats."""
    ends = {"system": "", "user": " ", "assistant": "\n\n"}
    return "".join(turn["content"] + ends[turn["role"]] for turn in conversation[:-1]) + conversation[-1]["content"]


def _options(doc: Doc) -> list[str]:
    found = doc["options"]
    if not isinstance(found, list) or not 2 <= len(found) <= len(LETTERS) or not all(isinstance(o, str) for o in found):
        raise ConfigError(f"options must be a list of 2 to {len(LETTERS)} texts, got {quoted(found)}")
    return found


def _choices(doc: Doc) -> str:
    lines = "".join(f"{letter}. {option.strip()}\n" for letter, option in zip(LETTERS, _options(doc), strict=False))
    return f"Question:\n{doc['question']}\nOptions:\n{lines}Answer: Let's think step by step."


def _letter(doc: Doc) -> str:
    """Return the right letter; data may have the place of the option in its stead."""
    answer = doc["answer"]
    if isinstance(answer, int) and 0 <= answer < len(_options(doc)):
        return LETTERS[answer]
    if not isinstance(answer, str) or answer not in LETTERS[: len(_options(doc))]:
        raise ConfigError(f"answer must be the letter or the number of an option, got {quoted(answer)}")
    return answer


def _reasoned(doc: Doc) -> str:
    """Return an example's reasoning, or its bare answer where the data have none."""
    thought = str(doc.get("cot_content") or "").replace("A: Let's think step by step. ", "")
    return thought or f"The answer is ({_letter(doc)})."


def _program_of_chat(doc: Doc, text: str) -> str:
    """Return the program in a chat's answer: its first block of code that defines the function, else the first one,
    which then goes on where the prompt ended."""
    blocks = re.findall(r"```[^\n]*\n(.*?)(?:```|\Z)", text, re.DOTALL) or [text]
    whole = [block for block in blocks if re.search(rf"\bdef\s+{re.escape(str(doc['entry_point']))}\b", block)]
    return f"{doc['prompt']}\n{whole[0]}" if whole else f"{doc['prompt']}{blocks[0]}"


GSM8K = Task(
    name="gsm8k",
    fields=("question", "answer"),
    question=lambda doc: f"Question: {doc['question']}\nAnswer:",
    worked=lambda doc: str(doc["answer"]),
    right=lambda doc: str(doc["answer"]),
    filters={
        "strict-match": Extract(r"#### (\-?[0-9\.\,]+)"),
        "flexible-extract": Extract(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", last=True),
    },
    is_right=ExactMatch((",", r"\$", "(?s).*#### ", r"\.$")),
    stop=("Question:", "</s>", "<|im_end|>"),
    max_gen_toks=256,
    num_fewshot=5,
    fewshot_splits=("train",),
)
MMLU_PRO = Task(
    name="mmlu_pro",
    fields=("question", "options", "answer", "category"),
    question=_choices,
    worked=_reasoned,
    right=_letter,
    filters={"custom-extract": Extract(r"answer is \(?([ABCDEFGHIJ])\)?")},
    is_right=ExactMatch(ignore_punctuation=True),
    stop=("Question:",),
    max_gen_toks=2048,
    num_fewshot=5,
    fewshot_splits=("validation", "dev"),
    description=lambda doc: (
        f"The following are multiple choice questions (with answers) about {doc['category']}. Think step by step and "
        'then finish your answer with "the answer is (X)" where X is the correct letter choice.\n'
    ),
    group=lambda doc: str(doc["category"]),
)
HUMANEVAL = Task(
    name="humaneval",
    fields=("prompt", "test", "entry_point"),
    question=lambda doc: str(doc["prompt"]),
    worked=lambda doc: str(doc["canonical_solution"]),
    right=lambda doc: f"{doc['test']}\ncheck({doc['entry_point']})",
    filters={"create_test": lambda doc, text: f"{doc['prompt']}{text}"},
    is_right=None,
    stop=("\nclass", "\ndef", "\n#", "\nif", "\nprint"),
    max_gen_toks=1024,
    metric="pass@1",
)
HUMANEVAL_INSTRUCT = dataclasses.replace(
    HUMANEVAL,
    name="humaneval_instruct",
    question=lambda doc: (
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        f"```python\n{doc['prompt']}\n```\n"
    ),
    filters={"create_test": _program_of_chat},
    stop=(),
)
TASKS = {task.name: task for task in (GSM8K, MMLU_PRO, HUMANEVAL, HUMANEVAL_INSTRUCT)}
