"""The folder of `lmworks evaluate --out`, to which models and scores are added, also by several processes.

Two models may have one name, such as the folders `huggingface` of two exports. `results.json` records the weights of each: the same ones
with other sets add to what is there, and other weights get a name of their own. No score is lost that was not measured again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmworks.evaluate.bits_per_byte import DocumentBits
from lmworks.evaluate.records import EvaluationResults, write_records
from lmworks.evaluate.sets.scoring import pooled_scores
from lmworks.io import files, jsonl
from lmworks.io.destinations import require_folder
from lmworks.recipe.hub import locate
from lmworks.recipe.schema.artifacts import RopeExtension
from lmworks.ui.terminal import console
from lmworks.weights.open import weights_hash

FILE = "results.json"
_LONGEST = 100  # bytes of the name of a model, which is a part of the names of files


@dataclass(frozen=True)
class Origin:
    """Where an evaluated model came from: the text that named it, its path, a hash of its weights, and the extension of its context."""

    where: str
    path: str
    weights: str
    rope: str = ""

    @classmethod
    def of(cls, where: str, rope: RopeExtension | None = None) -> Origin:
        """The origin of what `open_model` opens. Raises `UserError` if there is no model."""
        located = locate(where)
        extension = "" if rope is None else f"{rope.scaling}:{rope.factor:g}"
        return cls(where, str(Path(located).expanduser().absolute()), weights_hash(located), extension)

    def to_json(self) -> dict[str, str]:
        return {"path": self.path, "weights": self.weights, **({"rope": self.rope} if self.rope else {})}


@dataclass(frozen=True)
class Evaluated:
    """The scores of one model: `model` and `not_clean` as in results.json, and `found` with the records."""

    name: str
    model: dict[str, Any]
    not_clean: dict[str, str]
    found: EvaluationResults

    @property
    def document(self) -> dict[str, Any]:
        """As results.json, of this model alone."""
        return {"models": {self.name: self.model}, "not_clean": self.not_clean}


def require_usable(folder: Path) -> None:
    """Raise `UserError` unless results can be added to `folder`. This comes before an evaluation, which takes long."""
    require_folder(folder)
    _read(folder)
    for path in sorted(folder.glob("*.jsonl")):
        jsonl.read(path)


def add(folder: Path, one: Evaluated, origin: Origin | None = None) -> Evaluated:
    """Add the scores and records of a model to `folder`; returns them under the name that they have there.

    Without an `origin` nothing is known of the weights, and the model is always a new one. Raises `UserError` for what cannot be written.
    """
    with files.only_one(folder / FILE):
        results = _read(folder)
        models = results["models"]
        source = {"source": origin.to_json()} if origin and origin.weights else {}
        whole = {**one.model, **source}
        names = _names(one.name, origin)
        name = next(name for name in names if name not in models or _is_same(models[name], whole))
        found = one.found
        if name in models:
            found = _with_earlier(found, folder, name)
            whole = _merged(models[name], whole)
        elif name != one.name:
            whose = origin.where if origin else one.name
            console.print(f"{folder} has results of another {one.name}; those of {whose} are named {name}", soft_wrap=True)
        write_records(folder, name, found, add=True)
        not_clean = {**results.get("not_clean", {}), **one.not_clean}
        files.write_json(folder / FILE, {**results, "models": {**models, name: whole}, "not_clean": not_clean})
    return replace(one, name=name, model={**one.model, **source})


def _read(folder: Path) -> dict[str, Any]:
    """results.json, without models if there is none. Raises `UserError` if it is damaged."""
    path = folder / FILE
    if not path.exists():
        return {"models": {}}
    with files.explain_damage(path, "choose another folder with --out, or remove this file"):
        found = json.loads(files.read_regular(path).decode("utf-8"))
        if not all(isinstance(part, dict) for part in (found, found["models"], found.get("not_clean", {}), *found["models"].values())):
            raise ValueError("no results of an evaluation")
    return dict(found)


def _names(name: str, origin: Origin | None) -> Iterator[str]:
    """The names that a model may get: its own, the whole text that named it, and that with a number."""
    if len(name.encode()) <= _LONGEST:
        yield name
    text = f"{origin.where}-{origin.rope}" if origin and origin.rope else origin.where if origin else name
    whole = re.sub(r"[^\w.@-]+", "-", text).encode()[-_LONGEST:].decode(errors="ignore").strip("-.")
    yield whole
    number = 2
    while True:
        yield f"{whole}-{number}"
        number += 1


def _is_same(there: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two entries are of the same weights, computed alike. Nothing is known of the weights of an entry of an earlier version."""

    def state(entry: Mapping[str, Any]) -> list[Any]:
        source = entry["source"]
        return [source.get("weights"), source.get("rope"), entry.get("context"), entry.get("dtype")]

    return all(isinstance(entry.get("source"), dict) for entry in (there, new)) and state(there) == state(new)


def _merged(there: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a model with the scores of two evaluations: the later one counts for a score that both have."""
    scores = {**there["scores"], **new["scores"]}
    scores |= pooled_scores(scores)
    sets = {score["set"] for score in scores.values()}
    unavailable = {name: why for name, why in {**there["unavailable"], **new["unavailable"]}.items() if name not in sets}
    return {**there, **new, "scores": scores, "unavailable": unavailable}


def _with_earlier(found: EvaluationResults, folder: Path, name: str) -> EvaluationResults:
    """The records of a model with those of its earlier scores, and of held-out text if none was measured now."""

    def others(kind: str) -> Sequence[dict[str, Any]]:
        return [one for one in jsonl.read(folder / f"{kind}-{name}.jsonl") if one.get("score") not in found.scores]

    documents = found.documents or [DocumentBits(**one) for one in jsonl.read(folder / f"documents-{name}.jsonl")]
    return replace(found, outcomes=[*others("outcomes"), *found.outcomes], items=[*others("items"), *found.items], documents=documents)
