"""Hugging Face datasets, streamed: a dataset of any size starts at once and is never stored whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lmworks.corpus.items import Item, Reading, Unavailable
from lmworks.errors import UserError
from lmworks.recipe.corpus import Source

_BUFFER = 10_000


def dataset_reading(source: Source, item: Callable[[Any, str, int], Item]) -> Reading:
    """Rows of `path` = NAME[:CONFIG] (on the hub, or a local directory of data files or of `save_to_disk`); `layout` names the split,
    by default train.

    With `max_bytes` the rows come from a seeded shuffle of shards and a buffer of 10,000 rows, and reading ends when enough came: drawing
    evenly would mean downloading everything.
    """
    try:
        import datasets
    except ImportError:
        raise UserError("kind huggingface needs the datasets package: pip install 'lmworks[data]'") from None
    assert source.path is not None, "the recipe checks it"
    name, _, config = (source.path, "", "") if Path(source.path).exists() else source.path.partition(":")
    split = source.layout or "train"
    try:
        if (Path(name) / "state.json").exists() or (Path(name) / "dataset_dict.json").exists():
            stored = datasets.load_from_disk(name)
            rows = stored[split] if isinstance(stored, datasets.DatasetDict) else stored
        else:
            rows = datasets.load_dataset(name, config or None, split=split, streaming=True)
    except (FileNotFoundError, ConnectionError, OSError, ValueError, KeyError) as error:
        raise Unavailable(
            f"cannot load dataset {source.path}, split {split}: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from None
    columns = rows.column_names
    if columns is not None and source.text_key not in columns:
        raise UserError(f"dataset {source.path} has no column {source.text_key!r}, only {', '.join(columns)}; set text_key")
    wanted = int(source.max_bytes) if source.max_bytes is not None else None
    if wanted is not None:
        rows = rows.shuffle(seed=0) if isinstance(rows, datasets.Dataset) else rows.shuffle(seed=0, buffer_size=_BUFFER)

    def items() -> Iterator[Item]:
        taken = 0
        for number, row in enumerate(rows):
            value = row.get(source.text_key)
            size = len(value.encode("utf-8", "surrogatepass")) if isinstance(value, str) else 0
            yield item(value, f"{source.path}/{split}:{number}", size)
            taken += size
            if wanted is not None and taken >= wanted:
                return

    return Reading(wanted, items)
