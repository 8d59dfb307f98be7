"""Prepares prompts for models that pool, and makes vectors, probabilities and scores of what the core brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.engine.input_processor import NO_POOLING, InputProcessor
from headrace.engine.tokenizer import Tokenizer
from headrace.errors import HeadraceError, RequestError, quoted
from headrace.pooling import Pooling, PoolingParams, Settled
from headrace.request import RequestOutput
from headrace.sampling_params import SamplingParams

POOLED = SamplingParams(max_tokens=1, detokenize=False, temperature=0.0)
"""Sampling parameters of requests that sample nothing"""
QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""How Qwen3-Reranker, which scores by the logits of `no` and `yes`, was trained to read a pair"""
USUAL_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
FIRST_CHARS = 2**14
"""Characters of a text to be cut that are tokenized first, to see whether more are needed"""
BORDER = 64
"""Tokens at the end of a part of a text that the rest of it might change"""
Text = str | list[int]


@dataclass(frozen=True)
class Pair:
    """Holds two texts that are read together."""

    query: str
    document: str


class PoolingInputs:
    """Converts texts and pairs to token ids for a model that pools. Raises RequestError for what it cannot."""

    def __init__(self, pooling: Pooling, inputs: InputProcessor, tokenizer: Tokenizer | None, templated: bool) -> None:
        """`templated`: the user has given a chat template, which then also writes pairs."""
        self.pooling = pooling
        self._inputs = inputs
        self._tokenizer = tokenizer
        self._templated = templated

    def ids_of(
        self, text: Text, params: PoolingParams, add_special_tokens: bool = True, prompt_name: str | None = None
    ) -> list[int]:
        """Return the token ids of one text, with the model's prompt of that name in front; None: its default one."""
        if not isinstance(text, str):
            return self._checked(self._cut(text, params, False))
        name = self.pooling.default_prompt if prompt_name is None else prompt_name
        if name:
            prompts = dict(self.pooling.prompts)
            if name not in prompts:
                known = ", ".join(prompts) or "none"
                raise RequestError(f"prompt_name {quoted(name)} is not one of the model's: {known}", "prompt_name")
            text = prompts[name] + text
        ids = self._encoded(text, params, add_special_tokens)
        return self._checked(self._cut(ids, params, add_special_tokens))

    def pair_ids(self, pair: Pair, params: PoolingParams, instruction: str | None = None) -> list[int]:
        """Return the token ids of a pair as the model reads it. What is cut is of the document."""
        tokenizer = self._need_tokenizer()
        if self._templated or self.pooling.token_pair is not None:
            text = self._written(pair, instruction)
            return self._checked(self._cut(self._encoded(text, params, False), params, True))
        if params.truncate_prompt_tokens is None:  # which refuses what is much too long before it is tokenized
            self._inputs.tokenize(pair.query, False), self._inputs.tokenize(pair.document, False)
        document = self._beginning(pair.document, params)
        try:
            encoding = tokenizer.backend.encode(self._beginning(pair.query, params), document)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"text cannot be encoded as UTF-8: {error}", "documents") from None
        ids: list[int] = encoding.ids
        if self.pooling.segments:
            ids = [
                token + self._inputs.limits.vocab_size * of for token, of in zip(ids, encoding.type_ids, strict=True)
            ]
        return self._checked(self._cut(ids, params, True))

    def _encoded(self, text: str, params: PoolingParams, add_special_tokens: bool) -> list[int]:
        if params.truncate_prompt_tokens is None:
            return self._inputs.tokenize(text, add_special_tokens)
        return self._need_tokenizer().encode(self._beginning(text, params), add_special_tokens)

    def _beginning(self, text: str, params: PoolingParams) -> str:
        """Return as much of a text that will be cut as its tokens can come from: to tokenize all of it would hold up
        other requests."""
        if params.truncate_prompt_tokens is None:
            return text
        most, chars = self._inputs.limits.longest_prompt, FIRST_CHARS
        while chars < len(text):
            if len(self._need_tokenizer().encode(text[:chars], False)) > most + BORDER:
                return text[:chars]
            chars *= 4
        return text

    def _written(self, pair: Pair, instruction: str | None) -> str:
        if not self._templated:
            return QWEN3_RERANKER.format(
                instruction=instruction or USUAL_INSTRUCTION, query=pair.query, document=pair.document
            )
        messages = [{"role": "query", "content": pair.query}, {"role": "document", "content": pair.document}]
        template = self._need_tokenizer().template_for(False)
        kwargs = {} if instruction is None else {"instruction": instruction}
        return template.render(messages, None, add_generation_prompt=False, kwargs=kwargs)

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("texts need a tokenizer, but the server runs without one", "input")
        return self._tokenizer

    def _tail(self) -> int:
        """Return how many special tokens end every text."""
        backend = self._need_tokenizer().backend
        mask = backend.encode("a").special_tokens_mask
        return next((count for count, special in enumerate(reversed(mask)) if not special), 0)

    def _cut(self, ids: list[int], params: PoolingParams, keeps_tail: bool) -> list[int]:
        """Return what `params` leaves of a text's ids; `keeps_tail`: with the special tokens that end every text."""
        most = params.truncate_prompt_tokens
        if most is None or not isinstance(ids, list):
            return ids
        longest = self._inputs.limits.longest_prompt
        if most > longest:
            raise RequestError(
                f"truncate_prompt_tokens must be at most {longest}, the model's context, got {most}",
                "truncate_prompt_tokens",
            )
        most = longest if most == -1 else most
        if len(ids) <= most:
            return ids
        kept = min(self._tail(), most) if keeps_tail else 0
        return ids[: most - kept] + ids[len(ids) - kept :]

    def _checked(self, ids: list[int]) -> list[int]:
        self._inputs.check_prompt(ids, segments=self.pooling.segments)
        return ids


def need_pooling(pooling: Pooling | None) -> Pooling:
    """Return how the model pools. Raises RequestError if it does not."""
    if pooling is None:
        raise RequestError(NO_POOLING, "model")
    return pooling


def numbers(output: RequestOutput, settled: Settled) -> np.ndarray:
    """Return what a request gets # [width] float32, or [num_tokens, width] where it wants something of each token.
    Raises HeadraceError for numbers that are not finite."""
    parts = output.outputs[0].pooled
    if not parts:
        raise HeadraceError("the request was ended before its prompt was computed")
    rows = np.concatenate([np.frombuffer(part.data, dtype="<f4").reshape(-1, part.width) for part in parts])
    if not np.isfinite(rows).all():
        raise HeadraceError("the model gave no usable numbers: NaN or Inf")
    if settled.dimensions is not None:
        rows = rows[:, : settled.dimensions]
    rows = squashed(rows, settled.squash)
    return rows if settled.unit == "tokens" else rows[0]


def squashed(rows: np.ndarray, how: str) -> np.ndarray:
    """Return rows of numbers # [n, width] with length 1, or as probabilities."""
    if how == "normalize":
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        return rows / np.maximum(lengths, np.float32(1e-12))
    if how == "sigmoid":
        return (0.5 * (1 + np.tanh(0.5 * rows))).astype(np.float32)
    if how == "softmax":
        grown = np.exp(rows - rows.max(axis=1, keepdims=True))
        return (grown / grown.sum(axis=1, keepdims=True)).astype(np.float32)
    return rows


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    """Return the cosine of the angle between two vectors; 0 where one has no length."""
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / lengths if lengths else 0.0


def plan_scores(
    inputs: PoolingInputs, first: Sequence[str], second: Sequence[str], pairs: Sequence[tuple[int, int]],
    params: PoolingParams, instruction: str | None = None,
) -> tuple[list[list[int]], Callable[[Sequence[np.ndarray]], list[float]]]:  # fmt: skip
    """Return the prompts that score pairs of texts, and what makes the pairs' scores of their rows of numbers. Each
    pair is a prompt where the model reads pairs, else each text is one and a score is the cosine of two vectors."""
    if inputs.pooling.scores_pairs:
        prompts = [inputs.pair_ids(Pair(first[a], second[b]), params, instruction) for a, b in pairs]
        return prompts, lambda rows: [float(row[0]) for row in rows]
    prompts = [inputs.ids_of(text, params) for text in (*first, *second)]
    return prompts, lambda rows: [cosine(rows[a], rows[len(first) + b]) for a, b in pairs]


def paired(queries: Sequence[str], documents: Sequence[str]) -> list[tuple[int, int]]:
    """Return which query goes with which document: each with its own, or one with all. Raises RequestError for other
    numbers of them."""
    if not queries or not documents or len(queries) not in (1, len(documents)):
        raise RequestError(
            f"there must be one first text, or as many as second ones, and at least one of each; got {len(queries)} "
            f"and {len(documents)}",
            "text_1",
        )
    return [(0 if len(queries) == 1 else place, place) for place in range(len(documents))]
