"""An executor without a model: it returns scripted tokens, late, never or not at all if the prompt says so.

By default output token i is the prompt's token i, round and round; so a test writes the answer into the prompt. Used by
the tests of engine and server, in this process or (by import path) in the core's own.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers

from headrace.cache_groups import same_layout
from headrace.config import EngineConfig
from headrace.errors import CheckpointError, EngineDeadError, HeadraceError
from headrace.model_config import ModelConfig
from headrace.step import Logprobs, Masks, NewRow, RunnerOutput, SchedulerOutput, WorkerFacts

VOCAB_SIZE = 512
EOS = 2
FAIL_TOKEN = 500
"""A prompt that begins with it makes its first step fail."""
DIE_TOKEN = 501
"""... kills the process of the executor."""
DEAD_TOKEN = 502
"""... makes the executor raise EngineDeadError."""
SLOW_TOKEN = 503
"""... makes each of its steps take 50 ms."""
STUCK_TOKEN = 504
"""... makes its step never end."""

Script = Callable[[list[int], int], int]
"""(prompt, index of the output token) -> the output token."""


def echo(prompt: list[int], index: int) -> int:
    return prompt[index % len(prompt)]


@dataclass
class FakeStep:
    result_: RunnerOutput | Exception
    ready_at: float
    late: bool = False

    def done(self) -> bool:
        return not self.late and time.monotonic() >= self.ready_at

    def result(self) -> RunnerOutput:
        self.late = False
        while not self.done():
            time.sleep(max(0.0, min(self.ready_at - time.monotonic(), 0.01)))
        if isinstance(self.result_, Exception):
            raise self.result_
        return self.result_


@dataclass
class FakeExecutor:
    """`delay`: seconds from a step's submission to its result; steps run one after the other, as on a device. `late`:
    no result is there before it is waited for, so that steps overlap whatever the clock says."""

    script: Script = echo
    delay: float = 0.0
    late: bool = False
    steps: list[SchedulerOutput] = field(default_factory=list)
    closed: bool = False
    _rows: dict[int, NewRow] = field(default_factory=dict)
    _free_at: float = 0.0

    def load(self) -> list[WorkerFacts]:
        return [
            WorkerFacts("cpu", "fake", 2**30, 2**26, same_layout(16, 2**10), 0, "FAKE", ["no model: scripted tokens"])
        ]

    def profile(self, config: EngineConfig) -> list[WorkerFacts]:
        return self.load()

    def initialize_cache(self, num_pages: int) -> list[WorkerFacts]:
        self.num_pages = num_pages
        return self.load()

    def execute(self, step: SchedulerOutput) -> FakeStep:
        self.steps.append(step)
        for row in step.freed_rows:
            del self._rows[row]
        self._rows.update({new_row.row: new_row for new_row in step.new_rows})
        firsts = {self._rows[row].prompt_token_ids[0] for row in step.rows}
        if DIE_TOKEN in firsts:
            os.kill(os.getpid(), signal.SIGKILL)
        delay = 1e9 if STUCK_TOKEN in firsts else 0.05 if SLOW_TOKEN in firsts else self.delay
        self._free_at = max(self._free_at, time.monotonic()) + delay
        if any(new_row.prompt_token_ids[0] == FAIL_TOKEN for new_row in step.new_rows):
            return FakeStep(HeadraceError("scripted failure"), self._free_at, self.late)
        if DEAD_TOKEN in firsts:
            return FakeStep(EngineDeadError("scripted death of the executor"), self._free_at, self.late)
        return FakeStep(self._compute(step), self._free_at, self.late)

    def sample(self, masks: Masks) -> None:
        """The script says what is sampled, whatever is allowed."""

    def check(self) -> None:
        pass

    def shutdown(self) -> None:
        self.closed = True

    def _compute(self, step: SchedulerOutput) -> RunnerOutput:
        token_ids: list[int] = []
        logprobs: list[Logprobs | None] = []
        prompt_logprobs: dict[int, list[Logprobs]] = {}
        for row, computed, count, samples in zip(
            step.rows, step.num_computed_tokens, step.num_scheduled_tokens, step.samples, strict=True
        ):
            new_row = self._rows[row]
            prompt, params = new_row.prompt_token_ids, new_row.params
            if params.prompt_logprobs is not None and computed < len(prompt) - 1:
                entries = [
                    fake_logprobs(t, params.prompt_logprobs) for t in prompt[computed + 1 : computed + count + 1]
                ]
                prompt_logprobs[row] = entries
            if samples:
                token = self.script(prompt, computed + count - len(prompt))
                token_ids.append(token)
                logprobs.append(None if params.logprobs is None else fake_logprobs(token, params.logprobs))
        return RunnerOutput(step.step, token_ids, logprobs if any(logprobs) else [], prompt_logprobs)


def fake_logprobs(token: int, k: int) -> Logprobs:
    """The token with rank 2, and the k tokens that precede it in the vocabulary."""
    others = [(token - i) % VOCAB_SIZE for i in range(1, k + 1)]
    return Logprobs([token, *others], [-0.5 * (i + 1) for i in range(k + 1)], 2)


def make_echo(config: EngineConfig, folder: Path, model_config: ModelConfig) -> FakeExecutor:
    return FakeExecutor()


def make_delayed(config: EngineConfig, folder: Path, model_config: ModelConfig) -> FakeExecutor:
    """Each step takes 5 ms after it was submitted, so that steps overlap."""
    return FakeExecutor(delay=0.005)


def make_broken(config: EngineConfig, folder: Path, model_config: ModelConfig) -> FakeExecutor:
    raise CheckpointError("model.safetensors lacks `model.norm.weight`")


def make_crashing(config: EngineConfig, folder: Path, model_config: ModelConfig) -> FakeExecutor:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def make_slow_start(config: EngineConfig, folder: Path, model_config: ModelConfig) -> FakeExecutor:
    time.sleep(3600)
    return FakeExecutor()


MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """A byte-level vocabulary without merges: ids 3 to 258 are the 256 bytes; 0, 1, 2 are <unk>, <s> and </s>."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{char: 3 + i for i, char in enumerate(alphabet)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def model_folder(folder: Path) -> Path:
    """A model folder with config.json and a byte-level tokenizer, for a fake executor."""
    (folder / "config.json").write_text(json.dumps(MODEL_CONFIG))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )
    return folder
