"""From a checkpoint into a live state, on any layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmworks.checkpoint import listing, manifest
from lmworks.checkpoint.team import Team
from lmworks.errors import UserError
from lmworks.files import explain_damage

if TYPE_CHECKING:
    from lmworks.checkpoint.state import State

ALONE = Team()


def load(
    path: Path, state: State, identity: dict[str, Any] | None = None, *,
    verified: bool = False, team: Team = ALONE, near: Mapping[str, Path] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Fill the tensors of `state` in place from the checkpoint at `path`, replace its plain values, and return the meta saved with it.

    Only the top-level parts that `state` has are read: `{"model": model.state_dict()}` leaves the optimizer alone. The layout of
    DTensors may differ from that of the save. The ranks of `team` call it together and may hold different tensors; each reads what it
    holds, and only the first reads what says where things are. `verified` skips the hashing. `near` says where copies of files are
    that are read instead. Raises `UserError` if the checkpoint is
    damaged, or of another model (`identity`, where given, or names, shapes or types differ).
    """
    from lmworks.checkpoint import state as states
    from lmworks.checkpoint.storage import TABLE, Reader, parse_table

    path = Path(path)
    if not verified:
        refuse_damaged(path, team)
    small, files = team.agree(team.together(lambda: _documents(path) if team.is_first else ({}, {})))
    try:
        document, table = listing.parse_meta(small[listing.META]), parse_table(small[TABLE], files)
    except ValueError as error:  # alike on all, who have the same bytes
        raise _damaged(path, str(error)) from None
    if identity is not None:
        states.refuse_other_identity(str(path), as_json(identity), document["identity"])
    states.refuse_other_tensors(str(path), state, table, document["values"], team)
    parts = local_parts(state)
    team.together(lambda: Reader(path, table, near).fill(parts))
    with explain_damage(path / listing.META):
        states.put_values(state, document["values"])
    return dict(document["meta"])


def local_parts(state: State) -> list[Any]:
    """What this rank holds of the tensors of a state, as parts to be filled."""
    from lmworks.checkpoint import state as states
    from lmworks.checkpoint.parts import local_part

    tensors, _ = states.split(state)
    return [part for name, tensor in tensors.items() if (part := local_part(name, tensor)) is not None]


def refuse_damaged(path: Path, team: Team = ALONE) -> None:
    """Raise `UserError` if a byte of the checkpoint is not as it was written."""
    reasons = team.all(manifest.problem(path, share=(team.rank, team.size)))
    if (reason := next((one for one in reasons if one), None)) is not None:
        raise _damaged(path, reason)


def _documents(path: Path) -> tuple[dict[str, bytes], dict[str, manifest.Entry]]:
    """What a checkpoint says of itself, and the files that its manifest names."""
    from lmworks.checkpoint.storage import TABLE

    try:
        return {name: manifest.read_document(path / name) for name in (listing.META, TABLE)}, manifest.entries(path)
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from None


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is damaged: {reason}; use another checkpoint (lmworks ckpt verify shows the good ones)")


def as_json(value: Any) -> Any:
    """What comes back from JSON: tuples become lists, keys become text."""
    return json.loads(json.dumps(value))
