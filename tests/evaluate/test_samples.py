"""The samples file: a run that was killed goes on, and a run of other settings does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.errors import ConfigError, HeadraceError
from headrace.evaluate.samples import Samples, read_samples

SETTINGS = {"model": "demo", "num_fewshot": 5}
ITEMS = [{"doc_id": 0, "text": "é\n\u2028"}, {"doc_id": 7, "scores": {"exact_match,none": 1.0}}]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with two items."""
    with Samples(tmp_path / "runs" / "samples.jsonl", SETTINGS) as samples:
        for item in ITEMS:
            samples.add(item)
    return tmp_path / "runs" / "samples.jsonl"


def test_what_was_added_is_there_again(path: Path) -> None:
    with Samples(path, SETTINGS) as samples:
        assert samples.done == {0: ITEMS[0], 7: ITEMS[1]}
    assert read_samples(path) == (SETTINGS, {0: ITEMS[0], 7: ITEMS[1]})


def test_a_file_cut_at_any_byte_keeps_its_whole_lines(path: Path) -> None:
    whole = path.read_bytes()
    lines = whole.split(b"\n")
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        with Samples(path, SETTINGS) as samples:
            assert len(samples.done) == max(0, whole[:size].count(b"\n") - 1)
            samples.add({"doc_id": 9})
        assert read_samples(path)[1].keys() == {*samples.done}
    assert len(lines) == 4


def test_other_settings_are_refused_by_name(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="of a run with num_fewshot 5, not 0; give another --output-path"):
        Samples(path, SETTINGS | {"num_fewshot": 0})
    with pytest.raises(ConfigError, match="of a run with seed None, not 1"):
        Samples(path, SETTINGS | {"seed": 1})
    assert path.read_bytes() == before


def test_a_file_without_items_may_be_of_other_settings(tmp_path: Path) -> None:
    for settings in (SETTINGS, SETTINGS | {"model": "other"}):
        Samples(tmp_path / "samples.jsonl", settings).__exit__(None, None, None)
        assert read_samples(tmp_path / "samples.jsonl") == (settings, {})


def test_two_runs_do_not_write_in_one_file(path: Path) -> None:
    with Samples(path, SETTINGS), pytest.raises(ConfigError, match="another run writes to"):
        Samples(path, SETTINGS)
    Samples(path, SETTINGS).__exit__(None, None, None)


def test_a_full_disk_is_one_line_and_leaves_whole_lines(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with Samples(path, SETTINGS) as samples:
        monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:5]))
        with pytest.raises(HeadraceError, match="cannot be written: No space left on device"):
            samples.add({"doc_id": 9})
        assert samples.done.keys() == {0, 7}
    assert read_samples(path)[1].keys() == {0, 7}


@pytest.mark.parametrize("text", ["", "{}\n", "[1]\n", "no json\n", '{"settings": {}}\n{"doc": 1}\n'])
def test_files_that_are_none_are_named(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match="is not a samples file"):
        read_samples(path)
    if text:
        with pytest.raises(ConfigError, match="is not a samples file"):
            Samples(path, SETTINGS)
        assert path.read_text() == text
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_samples(path.with_name("none"))


def test_a_folder_that_cannot_be_made_is_named(path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        Samples(path / "below" / "samples.jsonl", SETTINGS)
