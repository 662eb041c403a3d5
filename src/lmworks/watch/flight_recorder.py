"""torch's flight recorder: which collectives a rank has entered, of its own process or from the file that a process has left.

The files have the form that `python -m torch.distributed.flight_recorder.fr_trace` reads: FOLDER/rank_N, a pickle of plain values.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PREFIX = "rank_"
_MOST = 1 << 26  # bytes of a file; one of 256 collectives has 200 kB
_RECORDERS = ("_dump_fr_trace", "_dump_nccl_trace")  # of gloo, and of NCCL in builds that have it


@dataclass(frozen=True)
class Entered:
    """The latest collective that a rank has entered in a process group: its sequence number, name and time (seconds since 1970)."""

    number: int
    name: str
    time: float


def set_defaults(folder: Path) -> None:
    """Have NCCL's watchdog write a file to `folder` when a collective times out, before it ends the process. What the user has set is
    kept. Before the first process group is created."""
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in os.environ:  # the older name, by which the user may have set it
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / _PREFIX))


def entered_collectives() -> dict[str, Entered]:
    """The latest collective that this process has entered in each process group.

    Empty if nothing was recorded: `TORCH_FR_BUFFER_SIZE` must be set before the first process group is created. torch has no public
    function that reads the recorder from within a process.
    """
    found: dict[str, Entered] = {}
    for recorder in _RECORDERS:
        if dump := getattr(_c10d(), recorder + "_json", None):
            for group, entered in _entered(json.loads(dump())).items():
                if group not in found or found[group].time <= entered.time:
                    found[group] = entered
    return found


def write_record(folder: Path, rank: int) -> None:
    """Write what this process has recorded to `folder`: of NCCL if there is any, else of gloo."""
    for recorder in reversed(_RECORDERS):
        dump = getattr(_c10d(), recorder, None)
        tree = _load(dump(True, True, False)) if dump else {}
        if tree.get("entries"):
            tree["pg_config"] = _groups() | {name: one for name, one in tree["pg_config"].items() if name}
            with suppress(OSError):  # a full disk: the heartbeat has the latest collective
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{_PREFIX}{rank}").write_bytes(pickle.dumps(tree, protocol=2))
            return


def read_record(folder: Path, rank: int, since: float) -> dict[str, Entered]:
    """The latest collective per process group from the file that a process has left; empty if there is none that was written after
    `since` (seconds since 1970)."""
    path = folder / f"{_PREFIX}{rank}"
    try:
        if path.stat().st_mtime < since or path.stat().st_size > _MOST:
            return {}
        return _entered(_load(path.read_bytes()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, pickle.UnpicklingError):
        return {}


class _Plain(pickle.Unpickler):
    """Reads plain values only: a pickle with anything else could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a record of collectives")


def plain_record(data: bytes) -> dict[str, Any]:
    """The contents of a file of the flight recorder, of plain values. Raises `pickle.UnpicklingError` for anything else in it, and what
    damaged pickles raise."""
    return _load(data)


def _load(data: bytes) -> dict[str, Any]:
    return dict(_Plain(io.BytesIO(data)).load())


def _entered(tree: Mapping[str, Any]) -> dict[str, Entered]:
    found: dict[str, Entered] = {}
    for entry in tree.get("entries", ()):  # oldest first
        group, name = entry["process_group"]
        members = tree["pg_config"].get(group, {}).get("ranks", "")
        key = f"{name if name not in ('', 'undefined') else group} {members}".removesuffix(" []").rstrip()
        entered = Entered(int(entry["collective_seq_id"]), entry["profiling_name"].partition(":")[2], entry["time_created_ns"] / 1e9)
        if key not in found or found[key].time <= entered.time:
            found[key] = entered
    return found


def _groups() -> dict[str, dict[str, str]]:
    """Name, description and ranks of this process's groups, which gloo does not tell its recorder."""
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    return {
        str(name): {"name": str(name), "desc": group.group_desc, "ranks": str(list(world.pg_group_ranks[group]))}
        for group, name in world.pg_names.items()
    }


def _c10d() -> Any:
    import torch

    return getattr(torch._C, "_distributed_c10d", None)
