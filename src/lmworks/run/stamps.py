"""stage.json, the stamp in each stage's folder: what the stage was made from, what it has made, and how long it took."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmworks import __version__
from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.files import read_json, write_json
from lmworks.run.stages import STAGES, STAMP, Stage


def read_stamp(folder: Path) -> dict[str, Any] | None:
    """The stamp in a stage's folder: None if there is none, empty if it is not readable. An invalidated stamp has no `done`."""
    path = folder / STAMP
    if not path.exists():
        return None
    try:
        record = read_json(path)
    except UserError:
        return {}
    return record if isinstance(record, dict) and "stage" in record else {}


def write_stamp(folder: Path, stage: Stage, known: Mapping[str, str], seconds: float | None = None) -> None:
    """Record that the stage has begun or, with `seconds`, that it has ended and what it has made."""
    record: dict[str, Any] = {"stage": stage.name, "version": __version__, "done": seconds is not None, "inputs": dict(known)}
    if seconds is not None:
        record |= {"seconds": round(seconds, 1), "outputs": stage_outputs(folder, stage)}
    write_json(folder / STAMP, record)


def invalidate_stamp(folder: Path, stage: Stage) -> bool:
    """Mark the stage as not done; its folder stays ours. Returns whether it had been started."""
    record = read_stamp(folder)
    if not record or "done" not in record:
        return False
    write_json(folder / STAMP, {"stage": stage.name, "version": __version__})
    return True


def stage_outputs(folder: Path, stage: Stage) -> dict[str, int]:
    """Size in bytes of each output file of the stage."""
    found: dict[str, int] = {}
    for pattern in stage.makes:
        newest = listing.directories(folder / pattern)[-1:] if pattern.endswith("/") else []
        paths = newest[0].iterdir() if newest else () if pattern.endswith("/") else folder.glob(pattern)
        found |= {str(path.relative_to(folder)): path.stat().st_size for path in sorted(paths) if path.is_file() and path.name != STAMP}
    return found


def seconds_by_stage(run_dir: Path) -> dict[str, float | None]:
    """Seconds of the last run of each stage; None if it has not ended."""
    paths = {stage.name: run_dir / stage.folder / STAMP for stage in STAGES}
    return {name: read_json(path).get("seconds") if path.exists() else None for name, path in paths.items()}
