"""Reads a task's items from files: JSON lines, a JSON list, or plain text. Nothing is fetched."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, quoted

Doc = dict[str, Any]
ENDINGS = (".jsonl", ".json", ".txt")


def find_split(given: str, names: Sequence[str], flag: str) -> Path:
    """Return a dataset's file: `given` itself, or the one of this folder that is named after one of the splits `names`,
    the first that there is (test.jsonl, test-00000-of-00001.jsonl, data/gsm8k_test.json). A folder's only file serves
    as any split. Raises ConfigError naming `flag`."""
    path = Path(given).expanduser()
    if path.is_file():
        return path
    if not path.is_dir():
        raise ConfigError(f"{flag} {given!r}: there is no such file or folder")
    files = sorted(file for file in (*path.glob("*"), *path.glob("data/*")) if file.suffix in ENDINGS)
    for name in names:
        named = [file for file in files if name in re.split(r"[-_.]", file.stem)]
        if len(named) > 1:
            raise ConfigError(f"{flag} {given!r} has several files of {name} ({_listed(named)}): name one of them")
        if named:
            return named[0]
    if len(files) == 1:
        return files[0]
    if not files and any(path.rglob("*.parquet")):
        raise ConfigError(f"{flag} {given!r} has parquet files alone; write them as JSON lines (Dataset.to_json)")
    there = f"has {_listed(files)}" if files else f"has no {', '.join(ENDINGS)}"
    raise ConfigError(f"{flag} {given!r} {there}, and no {' or '.join(names)}: name a file")


def read_docs(path: Path, fields: Sequence[str]) -> list[Doc]:
    """Return the items of a file, each with all of `fields`. A text file is one item with the field `text`. Raises
    ConfigError naming the file and the line or item."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".txt":
            docs: list[Any] = [{"text": text}]
        elif path.suffix == ".json":
            docs = json.loads(text)
        else:  # not splitlines(): JSON may hold U+2028 unescaped
            docs = [json.loads(line) for line in text.split("\n") if line.strip()]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON{'' if path.suffix == '.json' else ' lines'}: {error}") from None
    if not isinstance(docs, list) or not docs:
        raise ConfigError(f"{path} must hold a list of items, got {quoted(docs)}")
    for number, doc in enumerate(docs):
        missing = [name for name in fields if not isinstance(doc, dict) or name not in doc]
        if missing:
            raise ConfigError(f"{path}, item {number}: the task needs {', '.join(missing)}, got {quoted(doc)}")
    return docs


def hash_of(doc: Doc) -> str:
    """Return the hash by which runs recognize an item, lm_eval's `doc_hash`."""
    return hashlib.sha256(json.dumps(doc, indent=2, ensure_ascii=False).encode()).hexdigest()


def _listed(files: Sequence[Path]) -> str:
    return ", ".join(file.name for file in files[:8]) + (", ..." if len(files) > 8 else "")
