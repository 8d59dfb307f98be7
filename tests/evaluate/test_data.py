"""Where a task's items come from, and what is said of files that are none."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.evaluate.data import find_split, read_docs


def made(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text('{"question": "?"}\n')


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (("test.jsonl", "train.jsonl"), "test.jsonl"),
        (("gsm8k_test.json", "gsm8k_train.json"), "gsm8k_test.json"),
        (("data/test-00000-of-00001.jsonl", "data/validation-00000-of-00001.jsonl"), "data/test-00000-of-00001.jsonl"),
        (("latest.jsonl", "validation.jsonl"), "validation.jsonl"),
        (("HumanEval.jsonl", "README.md"), "HumanEval.jsonl"),
    ],
)
def test_splits_of_a_folder(tmp_path: Path, files: tuple[str, ...], found: str) -> None:
    made(tmp_path, *files)
    assert find_split(str(tmp_path), ("test", "validation"), "--data") == tmp_path / found
    assert find_split(str(tmp_path / found), ("train",), "--data") == tmp_path / found


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ((), "has no .jsonl, .json, .txt, and no test: name a file"),
        (("test-0.jsonl", "test-1.jsonl"), r"several files of test \(test-0.jsonl, test-1.jsonl\): name one"),
        (("a.jsonl", "b.jsonl"), "has a.jsonl, b.jsonl, and no test"),
        (("test.parquet",), "has parquet files alone; write them as JSON lines"),
    ],
)
def test_folders_without_the_split(tmp_path: Path, files: tuple[str, ...], said: str) -> None:
    made(tmp_path, *files)
    with pytest.raises(ConfigError, match=f"--data .*{said}"):
        find_split(str(tmp_path), ("test",), "--data")


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--fewshot-data '.*none': there is no such file or folder"):
        find_split(str(tmp_path / "none"), ("train",), "--fewshot-data")


def test_forms_of_files(tmp_path: Path) -> None:
    docs = [{"question": "one\u2028two"}, {"question": "é"}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(doc, ensure_ascii=False) for doc in docs) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(docs))
    assert read_docs(tmp_path / "a.jsonl", ("question",)) == read_docs(tmp_path / "a.json", ()) == docs
    (tmp_path / "a.txt").write_text("a text\n")
    assert read_docs(tmp_path / "a.txt", ()) == [{"text": "a text\n"}]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"question": "?"}\n{"quest', "is not JSON lines"),
        ("a.json", b"[", "is not JSON: "),
        ("a.json", b'{"question": "?"}', "must hold a list of items, got {'question': '?'}"),
        ("a.jsonl", b"", "must hold a list of items"),
        ("a.jsonl", b"\xff\xfe", "is not UTF-8 text"),
        ("a.jsonl", b'{"question": "?"}\n{"text": "?"}', "item 1: the task needs question, got {'text': '?'}"),
        ("a.jsonl", b"[1]", "item 0: the task needs question"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_docs(tmp_path / name, ("question",))
