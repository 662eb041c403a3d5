"""How two checkpoints differ: metadata, recipe, and the relative change of each tensor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lmworks.checkpoint import listing
from lmworks.checkpoint.tensor_files import Reader, split_rows
from lmworks.progress import bar
from lmworks.recipe.tree.fingerprint import changed_keys


def diff(before: Path, after: Path) -> dict[str, Any]:
    """The differences between two checkpoints, as JSON values.

    steps; meta and recipe (by key, the values of both where they differ); only_before and only_after (names of tensors); tensors: one
    row each, the largest change first: name, shape, norm_before, norm_after, change = |after - before| / |before|, or null where that is
    no number.
    Norms are summed in fp64 over slices of 64 MB, so that memory does not depend on the size of the model.
    """
    old, new = Reader(before), Reader(after)
    documents = [listing.read_meta(path) for path in (before, after)]
    metas, recipes = [document["meta"] for document in documents], [document.get("recipe") or {} for document in documents]
    both = [name for name, record in old.table.items() if name in new.table and new.table[name].shape == record.shape]
    rows = []
    with bar("comparing", sum(old.table[name].bytes for name in both)) as progress:
        for name in both:
            rows.append(_row(old, new, name))
            progress.advance(old.table[name].bytes)
    rows.sort(key=lambda row: (row["change"] is not None, -(row["change"] or 0.0), row["name"]))
    keys = [key for key in {**metas[0], **metas[1]} if metas[0].get(key) != metas[1].get(key)]
    return {
        "steps": [listing.step_of(before), listing.step_of(after)],
        "meta": {key: [meta.get(key) for meta in metas] for key in keys},
        "recipe": {one.path: [one.old, one.new] for one in changed_keys(*recipes)} if all(recipes) else {},
        "only_before": sorted(old.table.keys() - set(both)),
        "only_after": sorted(new.table.keys() - set(both)),
        "tensors": rows,
    }


def _row(old: Reader, new: Reader, name: str) -> dict[str, Any]:
    moved = first = second = 0.0
    for offsets, sizes in split_rows(old.table[name]):
        a, b = old.read_slice(name, offsets, sizes).double(), new.read_slice(name, offsets, sizes).double()
        first, second = first + float(a.square().sum()), second + float(b.square().sum())
        moved += float((b - a).square().sum())
    norms = [math.sqrt(value) if math.isfinite(value) else None for value in (first, second, moved)]
    change = 0.0 if norms[2] == 0 else norms[2] / norms[0] if norms[2] and norms[0] else None
    shape = list(old.table[name].shape)
    return {"name": name, "shape": shape, "norm_before": norms[0], "norm_after": norms[1], "change": change}
