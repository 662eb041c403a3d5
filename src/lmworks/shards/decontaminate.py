"""Decontamination of imported token files: documents with protected text are removed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lmworks.corpus.contamination import Decontaminator, Findings, Match
from lmworks.corpus.report import widespread_rows
from lmworks.corpus.transform.cleaning import clean
from lmworks.errors import UserError
from lmworks.io.files import atomic_path, write_json
from lmworks.shards import lineage
from lmworks.shards.indexed import IndexedFile, IndexedWriter, with_ending
from lmworks.shards.lineage import open_lineage
from lmworks.shards.manifest import Shard, Split
from lmworks.shards.shuffle import finish_shard
from lmworks.tokenizer import Tokenizer
from lmworks.ui.terminal import bar, console

_AT_ONCE = 1 << 18  # tokens that are decoded at one time
_SHOWN = 200


def decontaminate(name: str, split: Split, tokenizer: Tokenizer, decontaminator: Decontaminator, action: str, out_dir: Path) -> Split:
    """The split without the documents that contain protected text; these are listed in `out_dir`/imported-NAME.json, with the passages in
    more than ten documents, which are also printed.

    `action` is `corpus.decontaminate.action`. Shards with such documents are written again below `out_dir`; the others stay in place.
    Raises UserError if no document would be left, and if the action is to fail.
    """
    with bar(f"search {name}", 2 * split.tokens) as progress:
        found = []
        for shard in split.shards:
            batches = []
            for first, texts, tokens in _texts(shard, tokenizer):
                batches.append((first, decontaminator.scan(texts)))
                progress.advance(tokens)
            found.append(Findings.joined(batches))
        document_counts = decontaminator.count_documents(found)
        leaks: list[dict[int, list[Match]]] = []
        for shard, part in zip(split.shards, found, strict=True):
            file = IndexedFile(Path(shard.prefix))
            suspects = decontaminator.suspect_documents(part, document_counts)
            matches_of = {one: decontaminator.find_matches(_text(file, one, tokenizer), document_counts) for one in suspects}
            leaks.append({document: matches for document, matches in matches_of.items() if matches})
            progress.advance(shard.tokens)
    report = [
        {"document": document, "shard": shard.prefix, "against": matches[0].against}
        for shard, part in zip(split.shards, leaks, strict=True)
        for document, matches in part.items()
    ]
    widespread, exempt = decontaminator.widespread_runs(document_counts)
    rows = [asdict(one) for one in widespread]
    counts = {"documents": split.documents, "contaminated": len(report), "exempt": exempt}
    written = out_dir / f"imported-{name}.json"
    write_json(written, {**counts, "passages": report[:_SHOWN], "widespread": rows})
    for against, documents, what in widespread_rows(rows, exempt, str(written)):
        text = f"shards.imported.{name}: {against}{documents and f', in {documents} documents'}: {what}"
        console.print(text, style="yellow", markup=False, highlight=False)
    if not report or action == "report":
        return split
    finding = f"{len(report)} of its {split.documents} documents hold protected text, the first that of {report[0]['against']}"
    if action == "fail":
        raise UserError(f"shards.imported.{name}: {finding}; set corpus.decontaminate.action to drop, or take them out of its files")
    if len(report) == split.documents:
        raise UserError(f"shards.imported.{name}: {finding}, and nothing is left")
    shards = [
        _without(shard, sorted(part), out_dir, f"train/{name}-{number:05d}") if part else shard
        for number, (shard, part) in enumerate(zip(split.shards, leaks, strict=True))
    ]
    kept = [shard for shard in shards if shard.documents]
    gone = sum(int(row["bytes"]) for shard, part in zip(split.shards, leaks, strict=True) for row in _rows(shard, sorted(part)))
    return split.model_copy(
        update={
            "shards": tuple(kept),
            "tokens": sum(shard.tokens for shard in kept),
            "documents": sum(shard.documents for shard in kept),
            "bytes": split.bytes - gone,
        }
    )


def _texts(shard: Shard, tokenizer: Tokenizer) -> Iterator[tuple[int, list[str], int]]:
    """(number of the first document, texts, tokens), some documents at a time."""
    file, held = IndexedFile(Path(shard.prefix)), list[str]()
    first = tokens = 0
    for document in range(file.documents):
        held.append(_text(file, document, tokenizer))
        tokens += len(file.document(document))
        if tokens >= _AT_ONCE:
            yield first, held, tokens
            first, held, tokens = document + 1, [], 0
    if held:
        yield first, held, tokens


def _text(file: IndexedFile, document: int, tokenizer: Tokenizer) -> str:
    return clean(tokenizer.decode(file.document(document).tolist(), skip_special=True))


def _rows(shard: Shard, documents: list[int]) -> list[dict[str, Any]]:
    table = open_lineage(with_ending(Path(shard.prefix), lineage.ENDING))
    rows: list[dict[str, Any]] = table.read().take(documents).to_pylist() if documents else []
    return rows


def _without(shard: Shard, documents: list[int], out_dir: Path, name: str) -> Shard:
    import pyarrow.parquet as pq

    file, prefix = IndexedFile(Path(shard.prefix)), out_dir / name
    left = np.setdiff1d(np.arange(file.documents), documents)
    with IndexedWriter(prefix, file.dtype) as writer:
        for document in left.tolist():
            writer.add(file.document(document))
    with atomic_path(with_ending(prefix, lineage.ENDING)) as aside:
        about = open_lineage(with_ending(Path(shard.prefix), lineage.ENDING)).read().take(left)
        pq.write_table(about, aside, row_group_size=lineage.ROWS_PER_GROUP)
    return finish_shard(out_dir, name, writer.tokens, len(left))
