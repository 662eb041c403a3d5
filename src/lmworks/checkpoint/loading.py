"""Loading a checkpoint into a state, on any mesh layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmworks.checkpoint import listing, manifest
from lmworks.checkpoint.communicator import Communicator
from lmworks.errors import UserError
from lmworks.files import explain_damage

if TYPE_CHECKING:
    from lmworks.checkpoint.state import State

SINGLE_PROCESS = Communicator()


def load(
    path: Path, state: State, identity: dict[str, Any] | None = None, *,
    verified: bool = False, communicator: Communicator = SINGLE_PROCESS, local_files: Mapping[str, Path] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Fill the tensors of `state` in place from the checkpoint at `path`, replace its plain values, and return the meta saved with it.

    Only the top-level parts that `state` has are read: `{"model": model.state_dict()}` leaves the optimizer alone. The layout of
    DTensors may differ from that of the save. The ranks of `communicator` call it together and may hold different tensors. Each rank
    reads the slices that it holds; only rank 0 reads meta.json and the table of tensors. `verified` skips the hashing. `local_files`
    maps file names to copies that are read instead. Raises `UserError` if the checkpoint is damaged, or of another model (`identity`,
    where given, or names, shapes or types differ).
    """
    from lmworks.checkpoint import state as states
    from lmworks.checkpoint.tensor_files import TABLE, Reader, parse_table

    path = Path(path)
    if not verified:
        refuse_damaged(path, communicator)
    small, files = communicator.broadcast(communicator.run_on_all(lambda: _documents(path) if communicator.is_first else ({}, {})))
    try:
        document, table = listing.parse_meta(small[listing.META]), parse_table(small[TABLE], files)
    except ValueError as error:  # on all ranks alike: they have the same bytes
        raise _damaged(path, str(error)) from None
    if identity is not None:
        states.refuse_other_identity(str(path), as_json(identity), document["identity"])
    states.refuse_other_tensors(str(path), state, table, document["values"], communicator)
    parts = local_slices(state)
    communicator.run_on_all(lambda: Reader(path, table, local_files).fill(parts))
    with explain_damage(path / listing.META):
        states.put_values(state, document["values"])
    return dict(document["meta"])


def local_slices(state: State) -> list[Any]:
    """The slices of the tensors of a state that this rank holds, to be filled by `Reader.fill`."""
    from lmworks.checkpoint import state as states
    from lmworks.checkpoint.save_plan import local_slice

    tensors, _ = states.split(state)
    return [part for name, tensor in tensors.items() if (part := local_slice(name, tensor)) is not None]


def refuse_damaged(path: Path, communicator: Communicator = SINGLE_PROCESS) -> None:
    """Raise `UserError` if a file of the checkpoint does not match its hash."""
    reasons = communicator.all_gather(manifest.problem(path, share=(communicator.rank, communicator.size)))
    if (reason := next((one for one in reasons if one), None)) is not None:
        raise _damaged(path, reason)


def _documents(path: Path) -> tuple[dict[str, bytes], dict[str, manifest.Entry]]:
    """The metadata files of a checkpoint, and the files that its manifest names."""
    from lmworks.checkpoint.tensor_files import TABLE

    try:
        return {name: manifest.read_document(path / name) for name in (listing.META, TABLE)}, manifest.entries(path)
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from None


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is damaged: {reason}; use another checkpoint (lmworks ckpt verify shows the good ones)")


def as_json(value: Any) -> Any:
    """The value as JSON returns it: tuples become lists, keys become strings."""
    return json.loads(json.dumps(value))
