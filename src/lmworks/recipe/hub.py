"""Models named on the Hugging Face hub: NAME, NAME@REVISION, or NAME@REVISION:COMMIT, where NAME is OWNER/MODEL.

`huggingface_hub` downloads them into its cache, and honours HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE. A branch or tag is looked up
once: a recipe is resolved to the commit that it stood for, and a run keeps that commit. Commands and recipes take names through one
function, `locate`, which also knows files in wheels.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks.errors import Unavailable, UserError
from lmworks.io import wheels
from lmworks.recipe.weight_files import safetensors_of

_NAMED = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[^\s@:]+)(:(?P<commit>[0-9a-f]{40}))?)?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DEFAULT = "main"
_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "spiece.model", "merges.txt", "README.md", "LICENSE*"]
# copies of the model in formats of other programs; of files in folders, only chat templates are taken
_OTHERS = [*(f"*/{name}" for name in _FILES if name != "*.jinja"), "consolidated*"]


@dataclass(frozen=True)
class HubModel:
    """A model of the hub, at a revision; `commit` is None until it has been looked up."""

    name: str
    revision: str
    commit: str | None

    def __str__(self) -> str:
        """The text of `start_from` that stands for this model."""
        return f"{self.name}@{self.revision}:{self.commit}" if self.commit else f"{self.name}@{self.revision}"


def parse(text: str) -> HubModel | None:
    """The model that a text names; None for a path: what begins as one, ends as a GGUF file, or exists, also before the @."""
    found = _NAMED.fullmatch(text)
    if found is None or text.lower().endswith(".gguf") or os.path.lexists(text) or os.path.lexists(text.partition("@")[0]):
        return None
    revision = found["revision"] or _DEFAULT
    return HubModel(found["name"], revision, found["commit"] or (revision if _COMMIT.fullmatch(revision) else None))


def pin(model: HubModel, run_dir: Path) -> HubModel:
    """The same with its commit: that which the run began with, if it was asked for the same, else what the hub says now."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # `lmworks run` reports a damaged resolved.json
        before = parse(json.loads((run_dir / "resolved.json").read_text(encoding="utf-8"))["start_from"])
        if before and before.commit and before.name == model.name and model.revision in (before.revision, before.commit):
            return before
    return model if model.commit else HubModel(model.name, model.revision, folder(model).name)


def folder(model: HubModel) -> Path:
    """The folder of the model in the cache, which is named after the commit; downloaded if it is not there.

    Raises `UserError` if there is no such model or revision, if it may not be read, or has no safetensors; `Unavailable` without network.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(f"{model.name} does not exist here; to take it from the Hugging Face hub: pip install 'lmworks[export]'") from None
    asked: dict[str, Any] = {"revision": model.commit or model.revision, "allow_patterns": _FILES, "ignore_patterns": _OTHERS}
    if model.commit:  # which never changes, so the hub need not be asked
        with suppress(OSError, ValueError, UserError):  # the last of a download that was cut off between two files
            found = Path(snapshot_download(model.name, local_files_only=True, **asked))
            if _is_model(found):
                return found
    try:
        found = Path(snapshot_download(model.name, **asked))
    except Exception as error:  # of huggingface_hub, of its HTTP library, of its client of the storage
        raise _explained(model, error) from None
    if not _is_model(found):
        raise UserError(
            f"{model.name}@{found.name} on the hub has no config.json with safetensors beside it; take a model that has them. To use a "
            f"GGUF file of it, download that with `hf download {model.name} FILE`, and name the file"
        )
    return found


def name_of(path: Path) -> str | None:
    """The name, without its owner, of the model of which a folder is the snapshot in the cache; None of any other folder."""
    if path.parent.name != "snapshots" or not path.parent.parent.name.startswith("models--"):
        return None
    return path.parent.parent.name.rpartition("--")[2]


def _is_model(path: Path) -> bool:
    return (path / "config.json").is_file() and bool(safetensors_of(path))


def _explained(model: HubModel, error: Exception) -> UserError:
    """What went wrong, and what to do. No text of the hub is repeated where it could contain more than that."""
    from huggingface_hub import constants, errors, get_token

    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
    status = getattr(getattr(cause, "response", None), "status_code", None)
    name, where = model.name, constants.ENDPOINT
    there = f"or put a folder with the model at {name}"
    if isinstance(cause, errors.GatedRepoError):
        return UserError(
            f"{name} is gated: ask for access at {where}/{name}, then log in with `hf auth login` or set HF_TOKEN, {there}"
        )
    if isinstance(cause, errors.RevisionNotFoundError):
        return UserError(f"{name} at {where} has no revision {model.commit or model.revision}; name a branch, a tag or a commit of it")
    if isinstance(cause, errors.HFValidationError):
        return UserError(f"{name} does not exist here, and is no name of a model on the hub (OWNER/MODEL); check the path")
    if isinstance(cause, errors.RepositoryNotFoundError) or status in (401, 403, 404):
        return UserError(
            f"{name} does not exist here, and {where} has no such model, or does not show it to you; check the name, log in with "
            f"`hf auth login` or set HF_TOKEN if it is private or gated, {there}"
        )
    if status is not None:
        reason = f"it answers with status {status}"
    else:
        reason = next(iter(str(cause).splitlines()), "") or type(cause).__name__
        token = get_token()
        reason = reason.replace(token, "***") if token else reason
    return Unavailable(
        f"{name} does not exist here, nor in the cache of the hub, and cannot be had from {where} ({reason}); check the path, the network "
        f"and HF_ENDPOINT, {there}"
    )


def locate(text: str | Path) -> str:
    """The path of what a text names: a model on the Hugging Face hub (OWNER/MODEL or OWNER/MODEL@REVISION), downloaded if it is not in the
    cache, or a file inside a wheel (`wheel:NAME==VERSION/FILE#sha256=HASH`). Other texts are paths, also RUN@WHICH, and are returned.

    Raises `UserError`, or `Unavailable` without a network.
    """
    text = str(text)
    if wheels.is_named(text):
        return str(wheels.named(text))
    model = parse(text)
    return text if model is None else str(folder(model))
