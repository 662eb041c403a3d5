"""Checkpoints that hold no weights but name files of others, with their hashes: the base model of a run that starts from one.

Weights in the format of others are not copied into a run. Its checkpoint of step 0 says where they lie and what they contain, and whoever
loads it reads those files. They must be there, and be what they were: each has a hash, which is computed once and kept in the cache until
size, time or inode of the file differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from lmworks.checkpoint import listing, manifest
from lmworks.checkpoint import state as loading
from lmworks.checkpoint import state as states
from lmworks.checkpoint.communicator import Communicator
from lmworks.errors import UserError
from lmworks.io.files import cache_directory, write_json
from lmworks.recipe.schema.model import Model
from lmworks.recipe.weights import Weights, find_weights

BASE_FOLDER = "base"  # in a run: the weights of its base model, or a link to them, where they lie elsewhere than when the run began


def describe(weights: Weights) -> dict[str, Any]:
    """What a run records of the weights that it starts from: path, kind, and size and hash of each file."""
    files = files_behind(weights)
    return {
        "path": str(weights.name.absolute()), "kind": weights.kind, "bytes": {name: file.stat().st_size for name, file in files.items()},
        "blake3": {name: hash_of(file) for name, file in files.items()},
    }  # fmt: skip


def files_behind(weights: Weights) -> dict[str, Path]:
    """The files that make the weights, by name."""
    from lmworks.weights.huggingface import files_of

    if weights.kind == "checkpoint":
        return {manifest.NAME: weights.path / manifest.NAME}
    files = files_of(weights.path)
    if weights.origin is None:
        files = [weights.path / "config.json", *files]
    return {file.name: file.resolve() for file in files}


def hash_of(file: Path) -> str:
    """Hex BLAKE3 of a file. Computed once for each state of the file, as the cache keeps it."""
    status = file.stat()
    state = [str(file), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    kept = cache_directory("blake3") / f"{sha256(json.dumps(state).encode()).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError, LookupError, TypeError):
        found = json.loads(kept.read_text(encoding="utf-8"))
        if found["state"] == state:
            return str(found["blake3"])
    computed = manifest.hash_file(file)
    with suppress(OSError, UserError):  # a cache that cannot be written costs time only
        write_json(kept, {"state": state, "blake3": computed})
    return computed


def load_model(
    path: Path, state: Mapping[str, Mapping[str, Tensor]], model: Model, identity: dict[str, Any] | None = None, *,
    verified: bool = False, communicator: Communicator = loading.SINGLE_PROCESS,
) -> dict[str, Any]:  # fmt: skip
    """Fill the weights of `state`, under "model" or "average", from a checkpoint or from the files that it names; returns its meta.

    Under "average" they stay as they are if the checkpoint has no averages: it may be older than `optimizer.ema_decay`, and averages begin
    with the weights. As `lmworks.checkpoint.state.load`, and collective as that is. Raises `UserError` if a file is missing, or is not
    what it was.
    """
    about = communicator.broadcast(communicator.run_on_all(lambda: listing.reference_of(path) if communicator.is_first else None))
    if about is None:
        return loading.load(path, dict(state), identity, optional=("average",), verified=verified, communicator=communicator)
    if not verified:
        loading.refuse_damaged(path, communicator)
    document = communicator.broadcast(communicator.run_on_all(lambda: listing.read_meta(path) if communicator.is_first else {}))
    if identity is not None:
        states.refuse_other_identity(str(path), identity, document["identity"])
    weights = find(path, about, communicator)
    added = range(*about.get("added", (0, 0)))
    for tensors in state.values():
        communicator.run_on_all(partial(read, weights, tensors, model, added))
    return dict(document["meta"])


def read(weights: Weights, tensors: Mapping[str, Tensor], model: Model, added: range) -> None:
    """Fill `tensors` of `model`, of which this rank may hold slices, from weights in a format of others."""
    from lmworks.weights.huggingface import load_weights

    load_weights(weights.path, tensors, model, extend=True, added=added)


def find(checkpoint: Path, about: Mapping[str, Any], communicator: Communicator = loading.SINGLE_PROCESS) -> Weights:
    """The weights that a checkpoint names. Raises `UserError` naming the file if one is missing, or has another content than it had.

    Each rank hashes some of the files: one that hashed them all would keep the others waiting for minutes, and their wait has a limit.
    """
    where = communicator.run_on_all(lambda: _place(checkpoint, about))
    folder, names = where if where.is_dir() else where.parent, [*about["blake3"]][communicator.rank :: communicator.size]
    shares = communicator.all_gather(communicator.run_on_all(lambda: {name: hash_of((folder / name).resolve()) for name in names}))
    hashes = {name: found for share in shares for name, found in share.items()}
    for name, expected in about["blake3"].items():
        if hashes[name] != expected:
            raise UserError(
                f"{folder / name} is not the file that {run_of(checkpoint)} began with: its BLAKE3 is {hashes[name]}, and it was "
                f"{expected}; put that file back"
            )
    weights = communicator.run_on_all(lambda: find_weights(where, needs_tokenizer=False))
    if (there := sorted(files_behind(weights))) != sorted(about["blake3"]):
        raise UserError(
            f"{folder} is read from {', '.join(there)} now, and {run_of(checkpoint)} began with {', '.join(sorted(about['blake3']))}; take "
            "the other files of weights away, or start a new run"
        )
    return weights


def _place(checkpoint: Path, about: Mapping[str, Any]) -> Path:
    """Where the weights lie that a checkpoint names: a folder with all of their files, or one of these."""
    recorded, own = Path(str(about["path"])), run_of(checkpoint) / BASE_FOLDER
    where = recorded if recorded.exists() or not own.exists() else own
    if not where.exists():
        raise UserError(
            f"{recorded}, the base model of {run_of(checkpoint)}, does not exist; put it there, or put it (or a link to it) at {own}. Its "
            f"files: {_named(about)}"
        )
    folder = where if where.is_dir() else where.parent
    for name, expected in about["blake3"].items():
        if not (folder / name).is_file():
            raise UserError(f"{folder / name}, a file of the base model of {run_of(checkpoint)}, does not exist; put it there. "
                            f"Its BLAKE3 is {expected}")  # fmt: skip
    return where


def run_of(checkpoint: Path) -> Path:
    """The run directory of a checkpoint of pretraining."""
    return checkpoint.absolute().parent.parent


def _named(about: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} ({about.get('bytes', {}).get(name, 0):,} bytes, BLAKE3 {one[:16]})" for name, one in about["blake3"].items())
