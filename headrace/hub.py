"""Finds a model's files: those of the embedded demo, a local folder, or the Hugging Face hub's cache.

Access tokens stay inside huggingface_hub: none is read, kept or logged here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import ModelNotFoundError

DEMO_MODEL, DEMO_DRAFT, DEMO_HEAD = "demo", "demo-draft", "demo-eagle3"
DEMO_FOLDER = Path(__file__).parent / "demo_model"
EMBEDDED = {
    DEMO_MODEL: DEMO_FOLDER,
    DEMO_DRAFT: Path(__file__).parent / "demo_draft",
    DEMO_HEAD: Path(__file__).parent / "demo_eagle3",
}
"""Models that come with the code: one that answers, and two that guess tokens for it."""
CONFIG_PATTERNS = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]
WEIGHT_PATTERNS = ["*.safetensors"]
IGNORED = ["*/*", "consolidated*"]
"""Files with second copies of the weights in other layouts (original/, metal/, onnx/, consolidated.safetensors)."""
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def resolve_model_folder(
    model: str, revision: str | None = None, download_dir: str | None = None, load_format: str = "auto"
) -> Path:
    """Return the folder that holds config.json, and the weights unless `load_format` is dummy. `demo` and
    `demo-draft` are embedded. Any other name is a local folder if there is one, and a hub id if not. Raises
    ModelNotFoundError, which says in one line what to do."""
    folder = _resolve(model, revision, download_dir, weights=load_format != "dummy")
    with _readable(folder):
        found, of_mistral = ((folder / name).is_file() for name in ("config.json", "params.json"))
    if not found and of_mistral:
        raise ModelNotFoundError(
            f"model folder {str(folder)!r} has params.json and no config.json: Mistral's own layout is not read; name "
            "a copy that was converted to Hugging Face layout (config.json, model.safetensors, tokenizer.json)"
        )
    if not found:
        raise ModelNotFoundError(f"model folder {str(folder)!r} has no config.json; is it in Hugging Face layout?")
    return folder


def resolve_tokenizer_folder(tokenizer: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """Return the folder that holds a tokenizer, found as `resolve_model_folder` does, without downloading weights."""
    return _resolve(tokenizer, revision, download_dir, weights=False)


def local_model_folder(model: str) -> Path | None:
    """Return MODEL's folder if that can be known without asking the hub, else None. Never raises."""
    folder = EMBEDDED.get(model) or local_path(model)
    return folder if folder is not None and is_file(folder / "config.json") else None


def local_path(model: str) -> Path | None:
    """Return MODEL as a path with `~` expanded; None if that is the home of an unknown user. Never raises."""
    try:
        return Path(model).expanduser()
    except RuntimeError:
        return None


def is_file(path: Path) -> bool:
    """Return whether a path is a readable file; False also for a name that no file can have. Never raises."""
    try:
        return path.is_file()
    except OSError:
        return False


def _resolve(model: str, revision: str | None, download_dir: str | None, weights: bool) -> Path:
    if (embedded := EMBEDDED.get(model)) is not None:
        if not (embedded / "config.json").is_file():
            raise ModelNotFoundError(
                f"the embedded {model} model is missing from this installation ({embedded}); "
                "reinstall headrace, or name a local folder or a Hugging Face id"
            )
        return embedded
    folder = local_path(model)
    if folder is None:
        raise ModelNotFoundError(f"folder {model!r} does not exist: no user of that name has a home folder here")
    with _readable(model):
        is_folder, exists = folder.is_dir(), folder.exists()
    if is_folder:
        return folder
    if exists:
        raise ModelNotFoundError(f"{model!r} is a file; name the folder that holds config.json")
    if model.startswith(("/", "./", "../", "~")) or model in (".", "..") or not HUB_ID.fullmatch(model):
        raise ModelNotFoundError(f"folder {model!r} does not exist")
    return _from_hub(model, revision, download_dir, weights)


@contextmanager
def _readable(model: str | Path) -> Iterator[None]:
    """Turn an OSError into a ModelNotFoundError of one line."""
    try:
        yield
    except OSError as error:
        raise ModelNotFoundError(
            f"model folder {str(model)!r} cannot be read: {error.strerror}; name a folder that you may read"
        ) from None


def _from_hub(model: str, revision: str | None, download_dir: str | None, weights: bool) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub import errors as hub_errors

    where = f"{model!r} at revision {revision!r}" if revision else repr(model)
    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=CONFIG_PATTERNS + (WEIGHT_PATTERNS if weights else []),
                ignore_patterns=IGNORED,
            )
        )
    except hub_errors.GatedRepoError:
        raise ModelNotFoundError(
            f"model {where} is gated: accept its terms on https://huggingface.co/{model} and set HF_TOKEN"
        ) from None
    except hub_errors.RepositoryNotFoundError:
        raise ModelNotFoundError(
            f"model {where} is neither a local folder nor a repository that the Hugging Face hub shows us; "
            "check the spelling, or set HF_TOKEN if it is private"
        ) from None
    except hub_errors.RevisionNotFoundError:
        raise ModelNotFoundError(f"model {model!r} has no revision {revision!r} on the Hugging Face hub") from None
    except hub_errors.HFValidationError:
        raise ModelNotFoundError(f"{model!r} is neither a local folder nor a valid Hugging Face id") from None
    except (hub_errors.LocalEntryNotFoundError, hub_errors.OfflineModeIsEnabled):
        if constants.HF_HUB_OFFLINE:
            reason, remedy = "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE to download it"
        else:
            reason, remedy = "the Hugging Face hub cannot be reached", "check the network (HF_ENDPOINT, proxies)"
        raise ModelNotFoundError(
            f"model {where} is no local folder and not in the hub cache, and {reason}; {remedy}, or name a local folder"
        ) from None
    except (hub_errors.HfHubHTTPError, OSError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFoundError(f"model {where} could not be downloaded: {first_line:.200}") from None
