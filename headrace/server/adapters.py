"""Serves adapters (LoRA) under names of their own: those of --lora-modules, and others loaded while the server runs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import ConfigError, RequestError, quoted
from headrace.lora import LoRARequest
from headrace.models.adapters import CONFIG, WEIGHTS, read_adapter

if TYPE_CHECKING:
    from headrace.engine.async_engine import AsyncEngine

MOST_NAME_CHARS, MOST_PATH_CHARS = 256, 512


class AdapterBook:
    """Holds the adapters that requests may name. A name that is loaded anew is another adapter to the engine."""

    def __init__(self, engine: AsyncEngine, modules: Sequence[str], folder: str | None, taken: Sequence[str]) -> None:
        """`modules`: --lora-modules; `folder`: what further adapters must lie in, if there may be any; `taken`: the
        model's own names. Raises ConfigError, or what `read_adapter` raises."""
        self._config, self._model_config = engine.config, engine.model_config
        self._taken = taken
        self._folder = None if folder is None else Path(folder).resolve()
        self._numbers = itertools.count(1)
        self.by_name: dict[str, LoRARequest] = {}
        for option, given in (("lora_modules", modules), ("runtime_lora_folder", folder)):
            if given and not self._config.enable_lora:
                raise ConfigError(f"{option} needs enable_lora (--enable-lora)")
        if self._folder is not None and not self._folder.is_dir():
            raise ConfigError(f"runtime_lora_folder {folder!r} is no folder")
        for text in modules:
            name, path = _named(text)
            try:
                self.check_name(name)
            except RequestError as error:
                raise ConfigError(f"lora_modules: {error}") from None
            self.check(Path(path))
            self.add(name, path)

    def check(self, path: Path) -> None:
        """Raise UserError for an adapter that the engine could not use."""
        read_adapter(path, self._model_config, self._config.max_lora_rank, self._config.lora_experts)

    def add(self, name: str, path: str) -> None:
        """Serve an adapter that was checked."""
        self.by_name[name] = LoRARequest(name, next(self._numbers), path)

    def folder(self) -> Path:
        """Return the folder of adapters that clients may load. Raises RequestError if they may not."""
        if self._folder is None:
            raise RequestError(
                "adapters cannot change while this server runs: it was started without --runtime-lora-folder"
            )
        return self._folder

    def inside(self, path: str) -> Path:
        """Return the path of an adapter that a client has asked for. Raises RequestError unless it, and the files that
        are read, lie in the folder that the server was started with."""
        folder = self.folder()
        wanted = (folder / path).resolve() if path.isprintable() and len(path) <= MOST_PATH_CHARS else Path("/")
        for place in (wanted, (wanted / CONFIG).resolve(), (wanted / WEIGHTS).resolve()):
            if not place.is_relative_to(folder):
                raise RequestError(
                    f"lora_path must lead into the folder of --runtime-lora-folder, got {quoted(path)}", "lora_path"
                )
        return wanted

    def check_name(self, name: str, replaces: bool = False) -> None:
        """Raise RequestError for a name that a further adapter cannot have; one that `replaces` may have one in use."""
        if not 0 < len(name) <= MOST_NAME_CHARS or not name.isprintable():
            raise RequestError(f"lora_name must be a text of 1 to {MOST_NAME_CHARS} characters", "lora_name")
        if name in self._taken:
            raise RequestError(f"lora_name {quoted(name)} is the model's own name", "lora_name")
        if name in self.by_name and not replaces:
            raise RequestError(
                f"an adapter {quoted(name)} is served already; load_inplace puts another in its place", "lora_name"
            )


def _named(text: str) -> tuple[str, str]:
    """Return name and path of one of --lora-modules: NAME=PATH, or vLLM's JSON object."""
    name, equals, path = text.partition("=")
    if text.startswith("{"):
        try:
            given = json.loads(text)
            name, equals, path = given["name"], "=", given["path"]
        except (ValueError, KeyError):
            equals = ""
    if not equals or not isinstance(name, str) or not isinstance(path, str) or not name or not path:
        raise ConfigError(f'lora_modules must be NAME=PATH or {{"name": ..., "path": ...}}, got {text!r:.200}')
    return name, path
