"""New checkpoints from old ones: a reset optimizer, an average of weights; and how two checkpoints differ.

Both work slice by slice, so that no tensor need fit into memory. A difference has metadata, recipe, and the relative change of each tensor.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmworks.checkpoint import listing
from lmworks.checkpoint.publish import publish
from lmworks.checkpoint.save_plan import TensorSlice
from lmworks.checkpoint.tensor_files import Reader, metadata_files, split_rows, write_metadata, write_slices
from lmworks.errors import UserError
from lmworks.io.files import explain_os_errors, link_tree
from lmworks.io.run_layout import USED
from lmworks.recipe.changes import changed_keys
from lmworks.recipe.former import translated
from lmworks.recipe.schema.model import Lora, is_adapter
from lmworks.ui.terminal import bar

_OPTIMIZER = "optimizer/"
_WEIGHTS = ("model/", "average/")


def reset_optimizer(path: Path) -> Path:
    """Replace a checkpoint by one whose optimizer state is zero, as at the start of a run; the rest is copied.

    The old one is kept as `step-00000100.before-reset-1`, which is returned. The checkpoint must have been verified.
    """
    reader, document = Reader(path), listing.read_meta(path)
    parts = [
        TensorSlice(name, saved.dtype, saved.shape, one.offsets, one.sizes, partial(_kept_or_zero, reader, name, one.offsets, one.sizes))
        for name, saved in sorted(reader.table.items())
        for one in saved.slices
    ]  # fmt: skip
    if not any(part.name.startswith(_OPTIMIZER) for part in parts):
        raise UserError(f"{path} has no optimizer state")

    def keep_and_publish(aside: Path) -> Path:
        kept = listing.free_name(path, "before-reset")
        # Links instead of a rename: a checkpoint of this step exists at all times.
        link_tree(path, kept)
        publish(aside, path)
        return kept

    return _write(path, parts, document, keep_and_publish)


def _kept_or_zero(reader: Reader, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    if name.startswith(_OPTIMIZER):
        return torch.zeros(sizes, dtype=reader.table[name].dtype)
    return reader.read_slice(name, offsets, sizes)


def average(paths: Sequence[Path], weights: Sequence[float], target: Path) -> Path:
    """Write a checkpoint of the weighted mean of the weights of several checkpoints of one model into the directory `target`.

    weights: relative, one per checkpoint. Sums are computed in fp64. Tensors of integers are taken from the last checkpoint. Low-rank
    adapters are put side by side, since the mean of A and that of B are not the factors of the mean of B A. The result has no optimizer
    state: it can be evaluated, tuned and exported. The checkpoints must have been verified.
    """
    readers, metas = [Reader(path) for path in paths], [listing.read_meta(path) for path in paths]
    last, shares = readers[-1], [weight / sum(weights) for weight in weights]
    names = {name for name in last.table if name.startswith(_WEIGHTS)}
    for path, reader, meta in zip(paths, readers, metas, strict=True):
        kinds = {name: (record.dtype, record.shape) for name, record in reader.table.items() if name.startswith(_WEIGHTS)}
        expected = {name: (last.table[name].dtype, last.table[name].shape) for name in names}
        if listing.differences(meta["identity"], metas[-1]["identity"]) or kinds != expected:
            raise UserError(f"{path.name} and {paths[-1].name} are of different models; average checkpoints of one run")
    parts = [
        part
        for name in sorted(names)
        for offsets, sizes in split_rows(last.table[name])
        for part in (_side_by_side if is_adapter(name) else _averaged)(readers, shares, name, offsets, sizes)
    ]  # fmt: skip
    own = {key: value for key, value in metas[-1]["meta"].items() if key != USED}  # the average is the final checkpoint of its run
    meta = own | {"average_of": {path.name: share for path, share in zip(paths, shares, strict=True)}}
    document = metas[-1] | {"metric": None, "permanent": True, "meta": meta, "values": {}}
    if any(map(is_adapter, names)):
        _widen(document, len(paths))
    final = target / paths[-1].name

    def publish_it(aside: Path) -> Path:
        publish(aside, final)
        return final

    return _write(final, parts, document, publish_it)


def _averaged(
    readers: Sequence[Reader], shares: Sequence[float], name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> Iterator[TensorSlice]:
    saved = readers[-1].table[name]
    yield TensorSlice(name, saved.dtype, saved.shape, offsets, sizes, partial(_mean, readers, shares, name, offsets, sizes))


def _side_by_side(
    readers: Sequence[Reader], shares: Sequence[float], name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> Iterator[TensorSlice]:
    """A of an adapter has the rows of all checkpoints, and B their columns, times the shares: B A is then the mean of theirs."""
    saved = readers[-1].table[name]
    of_a = name.endswith("A")
    axis = len(saved.shape) - (2 if of_a else 1)
    rank = saved.shape[axis]

    def put(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:axis], value, *values[axis + 1 :])

    for number, (reader, share) in enumerate(zip(readers, shares, strict=True)):
        values = partial(_mean, [reader], [1.0 if of_a else share], name, offsets, sizes)
        shape, at = put(saved.shape, len(readers) * rank), put(offsets, offsets[axis] + number * rank)
        yield TensorSlice(name, saved.dtype, shape, at, sizes, values)


def _widen(document: dict[str, Any], count: int) -> None:
    """Say of a checkpoint of adapters that it has `count` side by side."""
    about = document["meta"]["lora"]
    wide = Lora.model_validate(translated(about["options"], Lora)).side_by_side(count)
    changed = {"rank": wide.rank, "alpha": wide.alpha}
    document["meta"]["lora"] = about | {"options": about["options"] | changed}
    document["identity"] = document["identity"] | {"lora": document["identity"]["lora"] | changed}


def _mean(
    readers: Sequence[Reader], shares: Sequence[float], name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> Tensor:
    last = readers[-1].read_slice(name, offsets, sizes)
    if not last.is_floating_point():
        return last
    total = last.double() * shares[-1]
    for reader, share in zip(readers[:-1], shares[:-1], strict=True):
        total += reader.read_slice(name, offsets, sizes).double() * share
    return total.to(last.dtype)


def _write(final: Path, parts: Sequence[TensorSlice], document: dict[str, Any], finish: Callable[[Path], Path]) -> Path:
    """Write a checkpoint aside and let `finish` rename it. If anything fails, `final` is unchanged."""
    aside = listing.aside_name(final)
    with explain_os_errors(final.parent), bar(f"writing {final.name}", sum(part.bytes for part in parts)) as progress:
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir(parents=True)
            counted = [TensorSlice(**vars(part) | {"values": partial(_count, part, progress.advance)}) for part in parts]
            write_metadata(aside, metadata_files([write_slices(aside, 0, counted)], {listing.META: document}))
            return finish(aside)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _count(part: TensorSlice, advance: Callable[[float], None]) -> Tensor:
    values = part.values()
    advance(part.bytes)
    return values


def diff(before: Path, after: Path) -> dict[str, Any]:
    """The differences between two checkpoints, as JSON values.

    steps; meta and recipe (by key, the values of both where they differ); only_before and only_after (names of tensors); tensors: one
    row each, the largest change first: name, shape, norm_before, norm_after, change = |after - before| / |before|, or null where that is
    no number.
    Norms are summed in fp64 over slices of 64 MB, so that memory does not depend on the size of the model.
    """
    old, new = Reader(before), Reader(after)
    documents = [listing.read_meta(path) for path in (before, after)]
    metas, recipes = [document["meta"] for document in documents], [translated(document.get("recipe") or {}) for document in documents]
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
