"""Texts for training a classifier: a random sample of a source or of files, or labeled rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lmworks.corpus import readers
from lmworks.corpus.cleaning import clean
from lmworks.corpus.quality.train import CHARACTERS
from lmworks.corpus.readers.items import Item
from lmworks.corpus.sampling import keys
from lmworks.errors import UserError
from lmworks.progress import bar
from lmworks.recipe.schema.corpus import Source
from lmworks.recipe.schema.recipe import Recipe

_PART_BYTES = 16_000_000
_MOST_BYTES = 16_000_000
_SPARE = 4  # documents read per document taken, so that the sample is not a single stretch of a file
_YES, _NO = {"true", "yes", "good", "positive", "hq", "1"}, {"false", "no", "bad", "negative", "lq", "0"}


def sample(name: str, most: int, seed: int, recipe: Recipe | None = None, text_key: str = "text") -> list[str]:
    """At most `most` texts of a source of the recipe, or of a file, folder or glob, normalized as by the step `clean`.

    Parts are read in an order keyed by the seed until there are several times as many documents as requested, of which a keyed hash draws
    the sample: the same for the same files, without reading all of a large source. Only the start of long texts is kept.
    """
    source = _source(name, recipe, text_key)
    found = [(key, text) for key, text, _ in _keyed_sample(source, most, seed)]
    return [text for _, text in sorted(found)[:most]]


def labeled(path: str, label_key: str, minimum: float | None, most: int, seed: int, text_key: str = "text") -> tuple[list[str], list[str]]:
    """(good, bad) texts of the rows at `path` (jsonl or parquet), at most `most` in all.

    A label is true or false, a word for it, or a number. Numbers other than 0 and 1 need `minimum`, the smallest good value.
    """
    source = _source(path, None, text_key).model_copy(update={"keep": (label_key,)})
    if source.kind not in ("jsonl", "parquet"):
        raise UserError(f"{path} cannot contain labels; give a .jsonl or .parquet file with the columns {text_key} and {label_key}")
    chosen = sorted(_keyed_sample(source, most, seed), key=lambda one: one[:2])[:most]
    good: list[str] = []
    bad: list[str] = []
    for _, text, item in chosen:
        if label_key not in item.facts:
            raise UserError(f"{item.origin} has no {label_key!r}; name the column of the labels with --label-key")
        (good if _is_good(item.facts[label_key], minimum, item.origin) else bad).append(text)
    return good, bad


def _is_good(label: object, minimum: float | None, origin: str) -> bool:
    if minimum is not None and isinstance(label, int | float):
        return label >= minimum
    word = str(label).strip().lower().removesuffix(".0")
    if word in _YES | _NO:
        return word in _YES
    if isinstance(label, int | float):
        raise UserError(f"{origin} has the score {label:g}; give the smallest good score with --minimum")
    raise UserError(f"{origin} has the label {label!r}; labels are true or false, good or bad, or numbers")


def _source(name: str, recipe: Recipe | None, text_key: str) -> Source:
    for source in recipe.corpus.sources if recipe else ():
        if source.name == name:
            return source
    inner = name.lower().removesuffix(".gz").removesuffix(".zst")
    kind = "jsonl" if inner.endswith((".jsonl", ".ndjson", ".json")) else "parquet" if inner.endswith(".parquet") else "text"
    if Path(name).is_dir():
        held = {path.suffix for path in Path(name).rglob("*") if path.is_file()}
        kind = "parquet" if ".parquet" in held else "jsonl" if {".jsonl", ".ndjson"} & held else "text"
    elif kind == "text" and not any(mark in name for mark in "*?[") and "://" not in name and not Path(name).exists():
        known = ", ".join(source.name for source in recipe.corpus.sources) if recipe else "no recipe was given"
        raise UserError(f"{name} is neither a file, folder or glob nor a source of the recipe ({known})")
    return Source.model_validate({"name": "texts", "kind": kind, "path": name, "text_key": text_key, "license": "not used for training"})


def _keyed_sample(source: Source, most: int, seed: int) -> list[tuple[int, str, Item]]:
    """(key, text, item) of enough documents, by parts in keyed order."""
    parts = readers.parts(source, _PART_BYTES)
    order = np.argsort(keys([str(number) for number in range(len(parts))], seed, f"classifier/parts/{source.name}"), kind="stable")
    found: list[tuple[int, str, Item]] = []
    with bar(f"sample {source.name}", min(len(parts), most)) as progress:
        for number in order.tolist():
            items = list(_documents(source, parts[number]))
            drawn = keys([item.origin for item in items], seed, "classifier/documents").tolist()
            found += [(key, clean(item.text[:CHARACTERS]), item) for key, item in zip(drawn, items, strict=True)]
            progress.advance()
            if len(found) >= most * _SPARE:
                break
    return [one for one in found if one[1].strip()]


def _documents(source: Source, part: readers.Part) -> Iterator[Item]:
    return (item for item in readers.read(source, part, _MOST_BYTES) if item.reason is None)
