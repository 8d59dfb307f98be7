"""Loads a model's tokenizer and chat templates, and converts text to token ids and back.

Results equal those of transformers' AutoTokenizer, without torch. Encoding releases the GIL and may run in any thread.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import tokenizers
from tokenizers import AddedToken, processors

from headrace.config import EngineConfig
from headrace.engine.chat_template import ChatTemplate
from headrace.engine.pieces import PieceTable
from headrace.errors import ConfigError, RequestError, TokenizerError
from headrace.hub import resolve_tokenizer_folder
from headrace.structured_outputs.vocabulary import marks

NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
CLASS_DEFAULTS: dict[str, dict[str, str]] = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
}
"""Special tokens that a `tokenizer_class` implies where tokenizer_config.json does not name them."""


class Tokenizer:
    """Converts text of one model to token ids and back, and holds its chat templates. It keeps no request's state."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        templates: Mapping[str, str],
        template_override: str | None = None,
        extra_special_tokens: Sequence[str] = (),
    ) -> None:
        """`special_tokens`: name (`bos_token`, ...) -> text. `templates`: name -> jinja source.
        `extra_special_tokens`: those that the model's config lists without a name."""
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.extra_special_tokens = tuple(extra_special_tokens)
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self.pieces = PieceTable(backend)
        self.templates, self._broken = self._compile(templates, template_override)

    @classmethod
    def from_folder(cls, folder: Path, chat_template: str | None = None) -> Tokenizer:
        """Load the tokenizer in a folder. `chat_template` overrides the model's: a file's path, or the template itself.
        Raises TokenizerError if the folder has no usable tokenizer, ConfigError if the override is not a template."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(
                f"{folder} has no tokenizer.json; name a folder that has one with --tokenizer, "
                "or run on token ids with --skip-tokenizer-init"
            )
        try:
            content = path.read_bytes()
            source = msgspec.json.decode(content, type=_TokenizerFile)
            config = _read_object(folder / "tokenizer_config.json")
            if "added_tokens_decoder" not in config:  # newer folders have everything in tokenizer_config.json
                config = {**config, **_read_object(folder / "special_tokens_map.json")}
            backend = _backend(content, source, config)
            special_tokens, extra = _named_tokens(config), _extra_tokens(config)
            _finish_backend(backend, config, special_tokens, extra, source.post_processor is None)
            templates = _templates(folder, config)
        except TokenizerError:
            raise
        except Exception as error:  # `tokenizers` raises plain Exception for a file it cannot use
            raise TokenizerError(f"{path} cannot be used: {type(error).__name__}: {error}") from error
        override = None if chat_template is None else _read_template(chat_template)
        return cls(backend, special_tokens, templates, override, extra)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return a text's token ids. Raises RequestError for half a surrogate pair, which UTF-8 cannot represent."""
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"text cannot be encoded as UTF-8: {error}", "prompt") from None

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of several texts, encoded in parallel. Raises as `encode` does."""
        try:
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"text cannot be encoded as UTF-8: {error}", "prompt") from None
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Ids beyond the vocabulary, which a padded model may sample, add nothing."""
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    @functools.cached_property
    def marks(self) -> dict[str, int]:
        """Text -> id of the tokens that are marks, such as <|im_end|>, and never text to a grammar."""
        return marks(self)

    @property
    def works_by_token(self) -> bool:
        """Return whether each token adds the same bytes wherever it stands."""
        return self.pieces.rule is not None

    def token_text(self, token_id: int) -> str:
        """Return what a token adds to a running text, with its leading space; U+FFFD for a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to a running text, as bytes of UTF-8, which may be a part of a character."""
        piece = self.pieces.get(token_id)
        if piece is not None:
            return piece.data
        return self.backend.decode([token_id], skip_special_tokens=False).encode()

    def template_for(self, with_tools: bool, source: str | None = None) -> ChatTemplate:
        """Return the model's chat template, for a conversation with tools or without. `source` asks for another one:
        the name of one of the model's, or jinja. Raises RequestError if there is no template (param `messages`), or if
        `source` is not one (`chat_template`)."""
        name = source or ("tool_use" if with_tools and "tool_use" in self.templates else "default")
        template = self.templates.get(name)
        if template is None and source is not None:
            try:
                return ChatTemplate(source, self.special_tokens)
            except jinja2.TemplateError as error:
                raise RequestError(f"chat_template is not a valid jinja template: {error}", "chat_template") from None
        if template is None:
            why = f"its chat template is broken: {self._broken}" if self._broken else "it has no chat template"
            raise RequestError(
                f"this model cannot take chat messages, as {why}; give one with --chat-template", "messages"
            )
        return template

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def _compile(
        self, templates: Mapping[str, str], override: str | None
    ) -> tuple[dict[str, ChatTemplate], str | None]:
        if override is not None:
            try:
                return {"default": ChatTemplate(override, self.special_tokens)}, None
            except jinja2.TemplateError as error:
                raise ConfigError(f"chat_template is not a valid jinja template: {error}") from None
        compiled: dict[str, ChatTemplate] = {}
        for name, source in templates.items():
            try:
                compiled[name] = ChatTemplate(source, self.special_tokens)
            except jinja2.TemplateError as error:  # completions still work; chat requests get the reason
                return {}, str(error)
        return compiled, None


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an absent file is an empty object."""
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


class _TokenizerFile(msgspec.Struct):
    """Holds the parts of tokenizer.json that are read here. The vocabulary, most of the file, is skipped."""

    model: _Model
    pre_tokenizer: Any = None
    decoder: Any = None
    post_processor: Any = None


class _Model(msgspec.Struct):
    type: str | None = None


def _backend(content: bytes, source: _TokenizerFile, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return the tokenizer of a tokenizer.json as transformers 5 reads it: unchanged, except sentencepiece Llama files.

    Those prepend a space to every stretch of text between special tokens. Sentencepiece itself, with which the models
    were trained, prepends one to the beginning of the text only, so they get a Metaspace pre-tokenizer (`legacy`
    false).
    """
    class_name = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    byte_level = '"ByteLevel"' in json.dumps([source.pre_tokenizer, source.decoder])
    if class_name == "LlamaTokenizer" and not byte_level and source.model.type == "BPE":
        prefix_space = config.get("add_prefix_space") is not False
        scheme = ("always" if config.get("legacy") else "first") if prefix_space else "never"
        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if prefix_space:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        changed = {
            **json.loads(content),
            "normalizer": None,
            "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
            "decoder": {"type": "Sequence", "decoders": decoders},
        }
        content = json.dumps(changed).encode()
    return tokenizers.Tokenizer.from_buffer(content)


def _finish_backend(
    backend: tokenizers.Tokenizer,
    config: Mapping[str, Any],
    special_tokens: Mapping[str, str],
    extra: list[str],
    without_post_processor: bool,
) -> None:
    """Add special tokens of the config that tokenizer.json lacks, and the tokens that go around every text."""
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    declared = config.get("added_tokens_decoder") or {}
    missing = [_added_token(value) for _, value in sorted(declared.items(), key=lambda item: int(item[0]))]
    backend.add_tokens([token for token in missing if backend.token_to_id(token.content) is None])
    names = [*special_tokens.values(), *extra]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names if name])
    if without_post_processor:  # a post-processor decides what goes around a text, whatever the config says
        around = {
            "bos": special_tokens.get("bos_token") if config.get("add_bos_token") else None,
            "eos": special_tokens.get("eos_token") if config.get("add_eos_token") else None,
        }
        single = [part for part in (around["bos"], "$A", around["eos"]) if part]
        used = [(token, backend.token_to_id(token)) for token in dict.fromkeys(around.values()) if token]
        backend.post_processor = processors.TemplateProcessing(single=single, pair=[*single, "$B"], special_tokens=used)


def _added_token(value: Mapping[str, Any]) -> AddedToken:
    flags = {name: bool(value[name]) for name in ("lstrip", "rstrip", "single_word", "normalized") if name in value}
    return AddedToken(value["content"], special=bool(value.get("special", False)), **flags)


def _token_content(value: Any) -> str:
    return str(value["content"]) if isinstance(value, Mapping) else str(value)


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that have names: `bos_token` and the like, and all that the config calls `*_token`."""
    class_name = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    found: dict[str, str] = {}
    extra = config.get("extra_special_tokens")
    for name, value in {
        **CLASS_DEFAULTS.get(class_name, {}),
        **config,
        **(extra if isinstance(extra, Mapping) else {}),
    }.items():
        if (name in NAMED_TOKENS or name.endswith("_token")) and isinstance(value, str | Mapping):
            found[name] = _token_content(value)
    return found


def _extra_tokens(config: Mapping[str, Any]) -> list[str]:
    """Return the special tokens that the config lists without a name."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    return [] if isinstance(extra, Mapping) else [_token_content(token) for token in extra]


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return jinja sources by name. Files (chat_template.jinja, additional_chat_templates/) win over the config."""
    found: dict[str, str] = {}
    declared = config.get("chat_template")
    if isinstance(declared, str):
        found["default"] = declared
    elif isinstance(declared, list):
        found = {str(entry["name"]): str(entry["template"]) for entry in declared}
    elif isinstance(declared, Mapping):
        found = {str(name): str(source) for name, source in declared.items()}
    files: Iterable[Path] = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    of_files = {file.stem: file.read_text(encoding="utf-8") for file in files}
    default = folder / "chat_template.jinja"
    if default.is_file():
        of_files["default"] = default.read_text(encoding="utf-8")
    return of_files or found


def _read_template(given: str) -> str:
    """Return the template that `--chat-template` gives: its value if that looks like one, else the file it names."""
    if "{" in given or "\n" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template {given!r} is neither a readable file nor a template: {error}") from None


def load_tokenizer(config: EngineConfig, folder: Path) -> Tokenizer | None:
    """Return the tokenizer that the config asks for; None with `skip_tokenizer_init`. `folder`: the model's."""
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        folder = resolve_tokenizer_folder(config.tokenizer, config.revision, config.download_dir)
    return Tokenizer.from_folder(folder, config.chat_template)
