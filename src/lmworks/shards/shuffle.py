"""Shuffling of encoded parts into shards, over the whole source: the second half of building shards."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from lmworks.io.files import atomic_path, sha256_file, write_bytes
from lmworks.shards import indexed, lineage
from lmworks.shards.encode import ABOUT, Encoded
from lmworks.shards.epochs import derive_key, permute
from lmworks.shards.indexed import IndexedFile, IndexedWriter, with_ending
from lmworks.shards.manifest import Shard

_AT_ONCE = 1 << 20  # documents whose places are computed at a time
_MOST_OPEN = 256


def order_key(seed: int, source: str) -> np.ndarray:
    """The key of the permutation of the documents of a source."""
    return derive_key(seed, "documents", source)


def shard_borders(parts: Sequence[Encoded], seed: int, source: str, shard_tokens: int) -> list[int]:
    """The first document of each shard in shuffled order, and the number of documents. A shard ends with the document that fills it.

    Memory: 4 bytes per document of the source.
    """
    count = sum(part.documents for part in parts)
    lengths = np.empty(count, np.int32)
    at = 0
    for part in parts:
        file = IndexedFile(part.prefix)
        lengths[at : at + part.documents] = np.diff(file.document_start(np.arange(part.documents + 1)))
        at += part.documents
    found, room = [0], shard_tokens
    for begin in range(0, count, _AT_ONCE):
        order = permute(np.arange(begin, min(begin + _AT_ONCE, count)), count, order_key(seed, source))
        until, done = np.cumsum(lengths[order], dtype=np.int64), 0
        while (place := int(np.searchsorted(until, done + room))) < len(until):
            found.append(begin + place + 1)
            done, room = int(until[place]), shard_tokens
        room -= int(until[-1]) - done
    return found if found[-1] == count else [*found, count]


def write_shard(out_dir: Path, name: str, parts: Sequence[Encoded], seed: int, source: str, start: int, stop: int) -> Shard:
    """Write documents [start, stop) of the shuffled source as the shard `name` below `out_dir`."""
    import pyarrow.parquet as pq

    first = np.concatenate(([0], np.cumsum([part.documents for part in parts], dtype=np.int64)))
    order = permute(np.arange(start, stop), int(first[-1]), order_key(seed, source))
    place = np.searchsorted(first, order, side="right") - 1
    prefix, opened = Path(out_dir) / name, lru_cache(_MOST_OPEN)(IndexedFile)
    with IndexedWriter(prefix, IndexedFile(parts[0].prefix).dtype) as writer:
        for part, document in zip(place.tolist(), (order - first[place]).tolist(), strict=True):
            writer.add(opened(parts[part].prefix).document(document))
    tokens = np.diff(IndexedFile(prefix).document_start(np.arange(stop - start + 1)))
    with atomic_path(with_ending(prefix, lineage.ENDING)) as aside:
        pq.write_table(_about(parts, place, order - first[place], tokens), aside, row_group_size=lineage.ROWS_PER_GROUP)
    return finish_shard(out_dir, name, writer.tokens, stop - start)


def finish_shard(out_dir: Path, name: str, tokens: int, documents: int) -> Shard:
    """Write the checksums of a shard's tokens, and hash all its files for the manifest."""
    prefix = Path(out_dir) / name
    digest, sums = indexed.fingerprints(with_ending(prefix, ".bin"))
    write_bytes(with_ending(prefix, indexed.ENDING), sums.tobytes())
    endings = (".bin", ".idx", indexed.ENDING, lineage.ENDING)
    return Shard(
        prefix=name,
        tokens=tokens,
        documents=documents,
        sha256={ending: digest if ending == ".bin" else sha256_file(with_ending(prefix, ending)) for ending in endings},
        size={ending: with_ending(prefix, ending).stat().st_size for ending in endings},
    )


def _about(parts: Sequence[Encoded], place: np.ndarray, document: np.ndarray, tokens: np.ndarray) -> object:
    """The rows of the lineage, gathered part by part from memory maps and then put in order."""
    import pyarrow as pa

    rows, gathered = [], []
    for number in np.unique(place):
        mine = np.flatnonzero(place == number)
        with pa.memory_map(str(with_ending(parts[number].prefix, ABOUT))) as source:
            gathered.append(_take(pa.ipc.open_file(source), document[mine]))
        rows.append(mine)
    table = pa.concat_tables(gathered).combine_chunks().take(np.argsort(np.concatenate(rows)))
    return table.append_column("tokens", pa.array(tokens))


def _take(file: object, documents: np.ndarray) -> object:
    """Rows of an Arrow file in the given order; only the batches that contain one of them are mapped and read."""
    import pyarrow as pa

    assert isinstance(file, pa.ipc.RecordBatchFileReader)
    in_order = np.argsort(documents, kind="stable")
    wanted, begin, taken = documents[in_order], 0, []
    for number in range(file.num_record_batches):
        batch = file.get_batch(number)
        low, high = np.searchsorted(wanted, (begin, begin + batch.num_rows))
        if high > low:
            taken.append(pa.Table.from_batches([batch.take(pa.array(wanted[low:high] - begin))]))
        begin += batch.num_rows
    return pa.concat_tables(taken).combine_chunks().take(np.argsort(in_order))
