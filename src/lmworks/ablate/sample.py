"""What a value was measured on: the held-out text, the items of a benchmark, or the text that is trained on.

Values that were measured on other text or other items do not say which arm is better. What the recipe says of it (`keys`) is compared
before anything runs. What follows from the data alone, such as which documents are held out, is compared when runs have finished: arms
that change the corpus are compared where they hold out the same text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lmworks.ablate.measures import EVALUATION, IN_TRAINING, NEEDLE, Measure, Reading
from lmworks.errors import UserError
from lmworks.evaluate.bits_per_byte import held_out
from lmworks.recipe.changes import as_tree, canonical
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.manifest import Manifest

_LIMIT, _EVERY = "train.validation_bytes_per_domain", "evaluate.every_items"
SAMPLES = (_LIMIT, _EVERY)
"""Keys on which no weight depends, but what is measured."""
_HELD_OUT, _POSITION, _TRAINED, _SOURCE = "validation/", "validation/position/", "train/", "train/source/"


def keys(measure: Measure, recipe: Recipe) -> dict[str, Any] | None:
    """What the recipe says of what a measure is taken on, by key; None if its runs do not have the measure."""
    name, evaluate, phases = measure.name, recipe.evaluate, recipe.train.phases
    limit = {_LIMIT: as_tree(recipe.train)["validation_bytes_per_domain"]}
    if name.startswith((_POSITION, NEEDLE)):  # rows of the last phase's length
        return limit | {"the sequence length of the last phase": int(phases[-1].sequence_length)}
    if name.startswith(_HELD_OUT):
        return limit
    if name.startswith(IN_TRAINING):
        sets = [one for one in evaluate.benchmarks if one.name == name.split("/")[1]]
        return _first({_EVERY: evaluate.items_in_loop(one), f"evaluate.benchmarks.{one.name}": _rows(one)} for one in sets)
    if name.startswith(EVALUATION) and measure.has_items:
        wanted = name.removeprefix(EVALUATION).partition("/")[0]
        counts = {"benchmarks": "benchmark_items", "tasks": "task_items"}
        return _first(
            {f"evaluate.{items}": getattr(evaluate, items), f"evaluate.{kind}.{wanted}": as_tree(one)}
            for kind, items in counts.items() for one in getattr(evaluate, kind) if one.name == wanted
        )  # fmt: skip
    if name.startswith(_TRAINED) and measure.per_token and not name.startswith(_SOURCE):
        return {f"train.phases.{phase.name}.mixture": [phase.mixture, as_tree(phase)["mixture_changes"]] for phase in phases}
    return {}


def _first(found: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    return next(iter(found), None)


def _rows(benchmark: Any) -> dict[str, Any]:
    return {key: value for key, value in as_tree(benchmark).items() if key in ("file", "path", "hub")}


def require_same(measures: Iterable[Measure], recipes: Mapping[str, Recipe]) -> None:
    """Raise `UserError` if the recipes of two arms say that a measure is taken on other text or other items."""
    for measure in measures:
        found = [(arm, known) for arm, recipe in recipes.items() if (known := keys(measure, recipe)) is not None]
        for arm, known in found[1:]:
            first, expected = found[0]
            key = next((key for key in {**expected, **known} if known.get(key) != expected.get(key)), None)
            if key is not None:
                trained = measure.name.startswith(_TRAINED)
                todo = "compare held-out text instead, such as validation/bits_per_byte" if trained else "give all arms the same, with set"
                raise UserError(
                    f"measures: the arms {first} and {arm} would measure {measure.name} on other {what(measure)}, because they differ in "
                    f"{key}; {todo}"
                )


def what(measure: Measure) -> str:
    """What a measure is taken on, in a word."""
    return "text" if measure.name.startswith(_TRAINED) else "items" if measure.has_items else "held-out text"


def samples(run_dir: Path, recipe: Recipe, measures: Iterable[Measure], reading: Reading) -> dict[str, str]:
    """A hash of what each measure of a finished run was taken on. A measure is left out that depends on no text, or whose text is not in
    the run directory any more."""
    text, shards, found = _held_out(run_dir / "corpus"), _shards(run_dir / "shards"), dict[str, str]()
    for measure in measures:
        if (read := _read(measure, recipe, text, shards, reading)) is not None:
            found[measure.name] = _digest([keys(measure, recipe), read])
    return found


def _read(measure: Measure, recipe: Recipe, text: dict[str, str], shards: Manifest | None, reading: Reading) -> Any:
    name = measure.name
    part = name.split("/")[1]
    if measure.has_items:
        items = sorted(reading.items.get(name, ()))
        known = [reading.forms.get(name), items or reading.counts.get(name)]
        return known if any(known) else None
    if name.startswith(NEEDLE):
        return [text, shards.tokenizer_sha256, recipe.seed] if text and shards else None
    if name.startswith((_HELD_OUT, EVALUATION)):
        return text.get(part) or text or None
    if name.startswith(_TRAINED) and measure.per_token and shards is not None:
        source = name.removeprefix(_SOURCE).rpartition("/")[0] if name.startswith(_SOURCE) else ""
        return {one.name: [shard.sha256[".bin"] for shard in one.train.shards] for one in shards.sources if one.name.startswith(source)}
    return None


def _held_out(corpus: Path) -> dict[str, str]:
    """A hash of the held-out text of each domain; empty if it cannot be read."""
    try:
        return {domain: _digest(texts) for domain, texts in held_out(corpus).items()}
    except (UserError, OSError, ValueError):
        return {}


def _shards(folder: Path) -> Manifest | None:
    try:
        return Manifest.load(folder)
    except (UserError, OSError, ValueError):
        return None


def _digest(value: Any) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()[:16]
