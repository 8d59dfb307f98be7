"""MODEL to folder: the demo, paths, the hub's cache on disk, and one-line errors for the rest. No network is used."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub import errors as hub_errors

from headrace import hub
from headrace.errors import ModelNotFoundError


def make_folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text("{}")
    return path


def make_cached(cache: Path, model: str, revision: str = "main") -> Path:
    """A model as huggingface_hub leaves it in its cache."""
    commit = "a" * 40
    repo = cache / ("models--" + model.replace("/", "--"))
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / revision).write_text(commit)
    return make_folder(repo / "snapshots" / commit)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "is_offline_mode", lambda: True, raising=False)


def test_a_local_folder_is_itself(tmp_path: Path) -> None:
    assert hub.resolve_model_folder(str(make_folder(tmp_path / "m"))) == tmp_path / "m"


def test_a_relative_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert hub.resolve_model_folder("org/name").resolve() == (tmp_path / "org" / "name").resolve()


@pytest.mark.parametrize("name", ["demo", "demo-draft", "demo-eagle3"])
def test_demo_is_the_embedded_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hub.EMBEDDED, name, tmp_path)
    with pytest.raises(ModelNotFoundError, match=f"embedded {name} model is missing"):
        hub.resolve_model_folder(name)
    make_folder(tmp_path)
    assert hub.resolve_model_folder(name) == tmp_path
    assert hub.local_model_folder(name) == tmp_path


@pytest.mark.parametrize("model", ["/no/such", "./no", "../no", "~/no-such-folder", "a/b/c", "with space"])
def test_what_looks_like_a_path_is_never_asked_of_the_hub(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        hub.resolve_model_folder(model)


def test_a_file_and_a_folder_without_config(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelNotFoundError, match="is a file"):
        hub.resolve_model_folder(str(tmp_path / "file"))
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        hub.resolve_model_folder(str(tmp_path))
    assert hub.resolve_tokenizer_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["~nosuchuser/model", "x" * 300, "./" + "x" * 300])
def test_a_name_that_no_file_can_have_is_one_line(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    assert hub.local_model_folder(model) is None
    with pytest.raises(ModelNotFoundError, match=r"no user of that name|File name too long") as caught:
        hub.resolve_model_folder(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("forbidden", ["private", "private/model"])
def test_a_folder_that_may_not_be_read_is_one_line(
    forbidden: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, look = make_folder(tmp_path / "private" / "model"), Path.stat

    def refuse(path: Path, **kwargs: bool) -> os.stat_result:
        if tmp_path / forbidden in path.parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return look(path, **kwargs)

    monkeypatch.setattr(Path, "stat", refuse)
    assert hub.local_model_folder(str(folder)) is None
    with pytest.raises(ModelNotFoundError, match=f"{folder}' cannot be read: Permission denied"):
        hub.resolve_model_folder(str(folder))


def test_cached_model_is_found_without_network(tmp_path: Path, offline: None) -> None:
    snapshot = make_cached(tmp_path, "org/name")
    assert hub.resolve_model_folder("org/name", download_dir=str(tmp_path)) == snapshot


def test_cached_revision(tmp_path: Path, offline: None) -> None:
    snapshot = make_cached(tmp_path, "org/name", revision="v2")
    assert hub.resolve_model_folder("org/name", revision="v2", download_dir=str(tmp_path)) == snapshot
    with pytest.raises(ModelNotFoundError, match=r"at revision 'v3'.*HF_HUB_OFFLINE"):
        hub.resolve_model_folder("org/name", revision="v3", download_dir=str(tmp_path))


def test_not_cached_and_offline_names_the_remedy(tmp_path: Path, offline: None) -> None:
    with pytest.raises(ModelNotFoundError, match="unset HF_HUB_OFFLINE") as caught:
        hub.resolve_model_folder("org/name", download_dir=str(tmp_path))
    assert "\n" not in str(caught.value)


def hub_error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, "long\nstory with a secret hf_token")
    return error


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (hub_errors.GatedRepoError, "gated.*HF_TOKEN"),
        (hub_errors.RepositoryNotFoundError, "neither a local folder nor a repository.*HF_TOKEN"),
        (hub_errors.RevisionNotFoundError, "no revision 'x'"),
        (hub_errors.HFValidationError, "nor a valid Hugging Face id"),
        (hub_errors.LocalEntryNotFoundError, "cannot be reached.*name a local folder"),
        (ConnectionError, "could not be downloaded: long"),
    ],
)
def test_every_hub_error_is_one_line(kind: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise hub_error(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ModelNotFoundError, match=words) as caught:
        hub.resolve_model_folder("org/name", revision="x")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("load_format", "weights"), [("auto", True), ("dummy", False)])
def test_dummy_weights_are_not_downloaded(
    load_format: str, weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, list[str]] = {}

    def download(model: str, **kwargs: list[str]) -> str:
        asked.update(kwargs)
        return str(make_folder(tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    hub.resolve_model_folder("org/name", load_format=load_format)
    assert ("*.safetensors" in asked["allow_patterns"]) is weights
    assert not {"*.bin", "*.py", "*"} & set(asked["allow_patterns"])


def test_a_folder_in_mistrals_own_layout_says_so(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    (tmp_path / "consolidated.safetensors").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"params\.json and no config\.json: Mistral's own layout is not read"):
        hub.resolve_model_folder(str(tmp_path))
