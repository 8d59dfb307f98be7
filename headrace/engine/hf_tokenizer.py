"""Gives a tokenizer the interface that users of transformers know; `LLM.get_tokenizer` returns it.

Names, defaults and results are those of transformers 5: `decode` keeps special tokens, and `apply_chat_template`
returns a BatchEncoding unless `return_dict` or `tokenize` is false. Nothing is padded, cut or made a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from headrace.engine.tokenizer import NAMED_TOKENS, Tokenizer
from headrace.errors import RequestError

Conversation = Sequence[dict[str, Any]]


class BatchEncoding(dict[str, Any]):
    """Holds `input_ids` and `attention_mask`, as items and as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class HFTokenizer:
    """Offers the methods of transformers' tokenizers that need no tensors."""

    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    sep_token: str | None
    pad_token: str | None
    cls_token: str | None
    mask_token: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    unk_token_id: int | None
    sep_token_id: int | None
    pad_token_id: int | None
    cls_token_id: int | None
    mask_token_id: int | None
    is_fast = True

    def __init__(self, tokenizer: Tokenizer, name_or_path: str) -> None:
        self.name_or_path = name_or_path
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend
        for name in NAMED_TOKENS:
            text = tokenizer.special_tokens.get(name)
            setattr(self, name, text)
            setattr(self, name + "_id", None if text is None else self._backend.token_to_id(text))
        named = dict.fromkeys(NAMED_TOKENS) | tokenizer.special_tokens
        texts = dict.fromkeys([*filter(None, named.values()), *tokenizer.extra_special_tokens])
        self.all_special_tokens = [text for text in texts if text is not None]
        self.all_special_ids = [self._backend.token_to_id(text) for text in self.all_special_tokens]
        sources = {name: template.source for name, template in tokenizer.templates.items()}
        self.chat_template = sources.get("default") if sources.keys() <= {"default"} else sources
        """The jinja source; a dictionary by name if there are several templates, None if there is none."""

    def __len__(self) -> int:
        """Return the number of all tokens, added ones included; `vocab_size` leaves those out."""
        return self._tokenizer.vocab_size

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=False)

    def get_vocab(self) -> dict[str, int]:
        return self._backend.get_vocab(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens)

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True, **others: Any) -> BatchEncoding:
        """Encode one text, or several into lists of lists. `others` may only ask for what is done anyway."""
        for name, value in others.items():
            if value not in (None, False, "do_not_pad", "do_not_truncate"):
                raise RequestError(
                    f"the tokenizer does not take {name}={value!r:.100}: it returns lists as long as texts are", name
                )
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return BatchEncoding(input_ids=ids, attention_mask=[1] * len(ids))
        batch = self._tokenizer.encode_batch(list(text), add_special_tokens)
        return BatchEncoding(input_ids=batch, attention_mask=[[1] * len(ids) for ids in batch])

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> Any:
        """Return the text of an id or of a sequence, array or tensor of ids; for a sequence of sequences, their
        texts."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        ids = [ids] if isinstance(ids, int) else list(ids)
        if ids and not isinstance(ids[0], int):
            return self.batch_decode(ids, skip_special_tokens)
        return self._tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(self, sequences: Iterable[Any], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        return self._backend.encode(text, add_special_tokens=add_special_tokens).tokens

    def convert_ids_to_tokens(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> Any:
        """Return a token for an id, tokens for several; None for an id that does not exist."""
        if isinstance(ids, int):
            return self._backend.id_to_token(ids)
        skipped = self.all_special_ids if skip_special_tokens else ()
        return [self._backend.id_to_token(int(token_id)) for token_id in ids if token_id not in skipped]

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """Return an id for a token, ids for several; `unk_token_id` for a token that does not exist."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        token_id = self._backend.token_to_id(tokens)
        return self.unk_token_id if token_id is None else token_id

    def apply_chat_template(
        self,
        conversation: Conversation | Sequence[Conversation],
        tools: list[dict[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Return the prompt of one conversation, or the prompts of several; `kwargs` go to the template. With
        `tokenize` it is a BatchEncoding, or its ids if `return_dict` is false; otherwise text. `chat_template`: jinja,
        or the name of one of the model's templates."""
        template = self._tokenizer.template_for(bool(tools), chat_template)
        several = bool(conversation) and isinstance(conversation[0], list | tuple)
        texts = [
            template.render(
                [_without_nulls(message) for message in messages],
                tools, add_generation_prompt, kwargs, continue_final_message,
            )
            for messages in (conversation if several else [conversation])
        ]  # fmt: skip
        if not tokenize:
            return texts if several else texts[0]
        found = self(texts if several else texts[0], add_special_tokens=False)
        return found if return_dict else found["input_ids"]


def _without_nulls(message: Any) -> dict[str, Any]:
    """Drop null fields: clients send `"tool_calls": null`, which templates do not expect."""
    return {name: value for name, value in message.items() if value is not None}
