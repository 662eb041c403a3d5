"""Hugging Face datasets: rows of a dataset on disk, or streamed, so that a dataset of any size starts at once and is never stored whole."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from lmworks.corpus.read.listing import File
from lmworks.corpus.read.opening import DamagedFile
from lmworks.corpus.read.part import Item, Part, quarantine_errors
from lmworks.corpus.read.rows import Columns
from lmworks.errors import Unavailable, UserError
from lmworks.io.urls import connection_errors
from lmworks.recipe.schema.corpus import Source

_BUFFER = 10_000


def open_dataset(path: str, split: str) -> Any:
    """A `Dataset` from disk or an `IterableDataset`; `path` = NAME[:CONFIG] (on the hub, or a local directory of data files or of
    `save_to_disk`). Raises `UserError` without the package, and `Unavailable` if the dataset cannot be loaded."""
    try:
        import datasets
    except ImportError:
        raise UserError("kind huggingface needs the datasets package: pip install 'lmworks[data]'") from None
    name, _, config = (path, "", "") if Path(path).exists() else path.partition(":")
    try:
        if (Path(name) / "state.json").exists() or (Path(name) / "dataset_dict.json").exists():
            stored = datasets.load_from_disk(name)
            return stored[split] if isinstance(stored, datasets.DatasetDict) else stored
        return datasets.load_dataset(name, config or None, split=split, streaming=True)
    except (FileNotFoundError, ConnectionError, OSError, ValueError, KeyError) as error:
        raise Unavailable(f"cannot load dataset {path}, split {split}: {str(error).splitlines()[0] if str(error) else error!r}") from None


def _rows(source: Source) -> Any:
    """The dataset of a source: `document_format` names the split, by default train."""
    assert source.path is not None, "checked by the recipe"
    return open_dataset(source.path, source.document_format or "train")


def parts(source: Source, part_bytes: int) -> list[Part]:
    """Row ranges of a dataset on disk, shards of a streamed one.

    With `max_bytes` there is one part: rows of a seeded shuffle of shards with a buffer of 10,000 rows, until `max_bytes` are read. An even
    draw would require downloading everything.
    """
    rows = _rows(source)
    if rows.column_names is not None:
        Columns(source, 0).columns_to_read(rows.column_names, f"dataset {source.path}")
    file = File(source.path or "", 0, str(getattr(rows, "_fingerprint", "")))
    if source.max_bytes is not None:
        return [Part((file,), int(source.max_bytes))]
    if not hasattr(rows, "num_rows"):
        return [Part((file,), 0, (shard, shard + 1)) for shard in range(rows.n_shards)]
    size, count = int(rows.data.nbytes), rows.num_rows
    pieces = max(1, min(-(-size // part_bytes), count))
    edges = [count * number // pieces for number in range(pieces + 1)]
    return [Part((file,), size // pieces, span) for span in pairwise(edges)]


def read(source: Source, part: Part, limit: int) -> Iterator[Item]:
    path = source.path or ""
    with Columns(source, limit) as columns:
        yield from quarantine_errors(_items(source, part, columns), path if Path(path).exists() else f"hub://{path}")


def _items(source: Source, part: Part, columns: Columns) -> Iterator[Item]:
    import numpy as np  # not by the processes that read archives, which import this

    rows = _rows(source)
    stored = hasattr(rows, "num_rows")
    wanted = int(source.max_bytes) if source.max_bytes is not None else None
    origin = f"{source.path}/{source.document_format or 'train'}"
    found: Iterator[tuple[int, Any]]
    if stored and part.span is None:  # the library's own shuffle writes its order into the folder of the user
        found = ((int(number), rows[int(number)]) for number in np.random.default_rng(0).permutation(rows.num_rows))
    elif stored:
        assert part.span is not None
        found = enumerate(rows.select(range(*part.span)), start=part.span[0])
    elif part.span is None:  # the place of a row in its file is not known
        found, origin = enumerate(rows.shuffle(seed=0, buffer_size=_BUFFER)), f"{origin}/drawn"
    else:
        found = enumerate(rows.shard(num_shards=rows.n_shards, index=part.span[0]))
        origin += f"/{part.span[0]}" if part.span != (0, 1) else ""
    taken = 0
    for number, row in until_damage(found):
        item = columns.item(row, f"{origin}:{number}", 0)
        size = len(item.text.encode("utf-8", "surrogatepass")) if item.reason is None else 0
        taken += size
        yield Item(item.text, item.origin, size, item.reason, item.facts, item.language)
        if wanted is not None and taken >= wanted:
            return


def until_damage(rows: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Rows with their numbers. Raises DamagedFile, in one line, where the library fails at a file whose columns or cells do not fit."""
    from datasets.exceptions import DatasetsError

    try:
        yield from rows
    except connection_errors():
        raise
    except (DatasetsError, ValueError, TypeError, LookupError) as error:
        raise DamagedFile(f"{' '.join(str(error).split()) or type(error).__name__}; what follows in it is not read") from None
