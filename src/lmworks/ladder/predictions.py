"""Predictions of a ladder: written before the target runs, scored afterwards, and never changed.

`DIR/predictions.jsonl` has one line for each prediction. The hash of a line covers its contents and the hash of the line before, so a line
that is changed or removed later is found out.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks import jsonl
from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.files import explain_damage, write_json
from lmworks.ladder.points import finished_loss, held_out_text, size_and_tokens
from lmworks.plan.loss_law import LAW_FILE, load_law
from lmworks.recipe.loading.load import Resolved

FILE = "predictions.jsonl"
SCORES = "scores.json"
LEVEL = 0.9  # of the prediction interval


@dataclass(frozen=True)
class Score:
    """A prediction and what its run has measured; `measured` is None while the run is not finished."""

    run_dir: str
    parameters: int
    tokens: int
    predicted: float
    low: float
    high: float
    measured: float | None

    @property
    def error(self) -> float | None:
        return None if self.measured is None else self.predicted - self.measured

    @property
    def inside(self) -> bool | None:
        return None if self.measured is None else self.low <= self.measured <= self.high

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"error": self.error, "inside": self.inside}


def predict(folder: Path, target: Resolved) -> Score:
    """Write the prediction of the run that the recipe would make.

    Raises `UserError` if the run has begun to train, if it has a prediction already, or if its corpus is there and is another one.
    """
    law, recipe = load_law(folder), target.recipe
    assert recipe.run_dir
    run_dir = Path(recipe.run_dir)
    known = read(folder)
    if listing.begun(run_dir / "checkpoints") or (run_dir / "metrics.jsonl").exists():
        raise UserError(f"{run_dir} has begun to train, and a prediction has to be older than its run; choose another run_dir with --set")
    if any(Path(one["run_dir"]).resolve() == run_dir.resolve() for one in known):
        raise UserError(f"{run_dir} has a prediction already; choose another run_dir with --set")
    text = _settings(folder)["held_out_text"]
    if (run_dir / "corpus" / "manifest.json").exists() and held_out_text(run_dir) != text:
        raise UserError(f"{run_dir} is validated on other text than the ladder; its loss cannot be predicted")
    size, tokens = size_and_tokens(recipe)
    interval = law.interval(size, tokens, LEVEL)
    assert interval is not None, "a ladder's law has bootstrap fits"
    record = {
        "time": time.time(), "run_dir": str(run_dir), "recipe": target.fingerprint, "parameters": size, "tokens": tokens,
        "predicted": law.loss(size, tokens), "low": interval[0], "high": interval[1], "level": LEVEL, "unit": law.unit,
        "law": hashlib.sha256((folder / LAW_FILE).read_bytes()).hexdigest(), "before": known[-1]["hash"] if known else "",
    }  # fmt: skip
    fd = jsonl.open_append(folder / FILE)
    try:
        jsonl.append(fd, record | {"hash": _hash(record)})
        os.fsync(fd)
    finally:
        os.close(fd)
    return _score(record)


def read(folder: Path) -> list[dict[str, Any]]:
    """All predictions, oldest first. Raises `UserError` if a line was changed or removed after it was written."""
    path, before, found = folder / FILE, "", []
    if not path.exists():
        return []
    with explain_damage(path, "restore the file as it was written"):
        for line in jsonl.read(path):
            record = {key: value for key, value in line.items() if key != "hash"}
            if line["hash"] != _hash(record) or record["before"] != before:
                raise UserError(f"{path}: the prediction of {record['run_dir']} was changed, or the line before it was; restore the file")
            before = line["hash"]
            found.append(line)
    return found


def score(folder: Path) -> list[Score]:
    """Compare every prediction with its run; also written to `DIR/scores.json`."""
    scores = [_score(one) for one in read(folder)]
    if not scores:
        raise UserError(f"{folder} has no predictions; write one with: lmworks ladder predict {folder} RECIPE")
    write_json(folder / SCORES, {"scores": [one.to_json() for one in scores], **summary(scores)})
    return scores


def summary(scores: list[Score]) -> dict[str, Any]:
    """How many runs are finished, the mean and the largest absolute error, and the fraction of intervals that hold."""
    errors = [abs(one.error) for one in scores if one.error is not None]
    if not errors:
        return {"finished": 0, "mean_error": None, "largest_error": None, "coverage": None}
    mean, inside = sum(errors) / len(errors), sum(bool(one.inside) for one in scores)
    return {"finished": len(errors), "mean_error": mean, "largest_error": max(errors), "coverage": inside / len(errors)}


def save_settings(folder: Path, runs: list[Path]) -> None:
    """Record what a ladder was fitted to. `law.json` is written beside it."""
    write_json(folder / "ladder.json", {"runs": [str(run) for run in runs], "held_out_text": held_out_text(runs[0])})


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "ladder.json"
    if not path.is_file():
        raise UserError(f"{folder} is not a ladder; make one with: lmworks ladder fit {folder} RUN...")
    with explain_damage(path, "fit the ladder again"):
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found["held_out_text"]
    return found


def _score(record: dict[str, Any]) -> Score:
    run_dir = Path(record["run_dir"])
    measured = finished_loss(run_dir) if run_dir.is_dir() else None
    values = {name: record[name] for name in ("run_dir", "parameters", "tokens", "predicted", "low", "high")}
    return Score(**values, measured=measured)


def _hash(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
