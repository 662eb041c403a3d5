"""The first passes: draw documents up to `max_bytes`, read each part, apply the steps, and stage the results for later passes.

Which documents a source with `max_bytes` keeps, and which are held out, are functions of seed and document id alone (a keyed hash).

Per part, staging/read has the documents that the steps kept (parquet), a row per document that was read (`decisions`), keys and sketches of
the kept documents (signatures, `traces`), their sizes and the keys by which documents are held out (`keys`), and counts (`counts`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from lmworks.corpus.dedup.semantic import embedding
from lmworks.corpus.dedup.signatures import SignatureWriter
from lmworks.corpus.document import Batch, Context, Document, split_id
from lmworks.corpus.engine.decisions import DecisionRows, parquet_writer, rows_of, save_array
from lmworks.corpus.engine.job import Advance, Job, Piece
from lmworks.corpus.engine.step_runner import Count, Counts, Samples, StepRunner, count
from lmworks.corpus.read import read
from lmworks.corpus.read.part import Item
from lmworks.corpus.transform.steps import make_step
from lmworks.errors import UserError, all_refusals
from lmworks.io.files import read_json, write_json
from lmworks.recipe.schema.corpus import Source


def keys(ids: Sequence[str], seed: int, purpose: str) -> np.ndarray:
    """(N,) uint64 keyed hash of each id; a different `purpose` gives independent draws."""
    base = hashlib.blake2b(digest_size=8, key=f"{seed}/{purpose}".encode()[:64])

    def one(identity: str) -> bytes:
        state = base.copy()
        state.update(identity.encode("utf-8", "surrogatepass"))
        return state.digest()

    return np.frombuffer(b"".join(map(one, ids)), dtype="<u8")


def threshold(keys: np.ndarray, sizes: np.ndarray, max_bytes: int) -> int:
    """The key below which documents are drawn: in the order of keys, as many as fit into `max_bytes`, and at least one."""
    if not len(keys):
        return 0
    order = np.argsort(keys, kind="stable")
    count = max(int(np.searchsorted(np.cumsum(sizes[order]), max_bytes, side="right")), 1)
    return int(keys[order[count]]) if count < len(keys) else 1 << 64


def held_out(keys: np.ndarray, sizes: np.ndarray, fraction: float, max_bytes: int) -> np.ndarray:
    """(N,) bool: the held-out documents: `fraction` of them by count (at least one of two or more), with `max_bytes` in all.

    They are taken in the order of keys. A document larger than the remaining budget is skipped, so that a single large one does not leave
    the held-out set empty.
    """
    chosen = np.zeros(len(keys), dtype=bool)
    wanted = min(max(round(len(keys) * fraction), 1), len(keys) - 1) if fraction > 0 else 0
    left, least = max_bytes, int(sizes.min()) if len(sizes) else 0
    for index in np.argsort(keys, kind="stable") if wanted > 0 else ():
        if sizes[index] <= left:
            chosen[index] = True
            left -= int(sizes[index])
            wanted -= 1
        if not wanted or left < least:
            break
    return chosen


BATCH_CHARACTERS = 1 << 19  # so that temporary arrays stay in the CPU cache
_REPORT_EVERY = 256
_DECIDED = 8192  # documents whose decisions are written together
DRAW_ROW = np.dtype([("bytes", "<i8"), ("key", "<u8")])
KEPT_ROW = np.dtype([("number", "<i8"), ("variant", "<i4"), ("bytes", "<i8"), ("key", "<u8")])
"""A kept document: its number in the part and that of its variant, its size, and the key by which documents are held out."""


def limited_pieces(job: Job) -> list[Piece]:
    """The parts of sources with `max_bytes`."""
    return [piece for piece in job.pieces if piece.source.max_bytes is not None]


def size_inputs(job: Job, piece: Piece) -> Any:
    return job.reading_of(piece)


def measure_sizes(job: Job, piece: Piece, advance: Advance) -> None:
    """Write size and key of each readable document of a part, so that the documents within `max_bytes` can be drawn exactly."""
    ids: list[str] = []
    sizes: list[int] = []
    found = []
    for identity, item in _items_with_progress(job, piece, advance):
        if item.reason is None:
            ids.append(identity)
            sizes.append(len(item.text.encode()))
        if len(ids) == _DECIDED:
            found.append(_rows(ids, sizes, DRAW_ROW, job.recipe.seed, "draw"))
            ids, sizes = [], []
    save_array(job.path("size", piece, ".npy"), np.concatenate([*found, _rows(ids, sizes, DRAW_ROW, job.recipe.seed, "draw")]))


def _rows(ids: list[str], sizes: list[int], dtype: np.dtype[Any], seed: int, purpose: str) -> np.ndarray:
    """Rows of `DRAW_ROW` or `KEPT_ROW`."""
    rows = np.zeros(len(ids), dtype=dtype)
    rows["bytes"], rows["key"] = sizes, keys(ids, seed, purpose)
    if dtype == KEPT_ROW:
        split = [split_id(identity) for identity in ids]
        rows["number"], rows["variant"] = [one[2] for one in split], [one[3] for one in split]
    return rows


def draw_inputs(job: Job, task: str) -> Any:
    return [[str(piece), job.reading_of(piece), int(piece.source.max_bytes or 0)] for piece in limited_pieces(job)]


def draw_documents(job: Job, task: str, advance: Advance) -> None:
    """Write, per source, the key below which documents are drawn."""
    found = {}
    for source in job.sources:
        if source.max_bytes is not None:
            rows = np.concatenate([np.zeros(0, DRAW_ROW), *(np.load(job.path("size", piece, ".npy")) for piece in job.of(source))])
            found[source.name] = threshold(rows["key"], rows["bytes"], int(source.max_bytes))
    write_json(job.path("draw", task, ".drawn.json"), found)


def _drawn_below(job: Job, piece: Piece) -> int | None:
    """The key below which documents of this part are drawn; None for all."""
    if piece.source.max_bytes is None:
        return None
    return int(read_json(job.path("draw", "all", ".drawn.json"))[piece.source.name])


def read_inputs(job: Job, piece: Piece) -> Any:
    if piece.source.max_bytes is None:
        return [job.reading_of(piece), None]
    drawn = job.path("draw", "all", ".drawn.json")
    return [job.reading_of(piece), _drawn_below(job, piece) if drawn.exists() else ""]


def steps_of(job: Job, piece: Piece) -> Sequence[Any]:
    """The steps for the documents of one part."""
    return [make_step(node, Context(piece.source, job.recipe.seed, job.folder)) for node in job.recipe.corpus.steps]


def read_part(job: Job, piece: Piece, advance: Advance) -> None:
    """Read a part, apply the steps, and write the files described above."""
    _PartReader(job, piece).run(advance)


def _items_with_progress(job: Job, piece: Piece, advance: Advance) -> Iterator[tuple[str, Item]]:
    """(id, item) of a part, reporting progress."""
    left, done, documents = piece.bytes, 0, 0
    for number, item in enumerate(read(piece.source, piece.part, int(job.recipe.corpus.max_document_bytes))):
        step = min(item.consumed, left)
        left, done, documents = left - step, done + step, documents + 1
        if documents == _REPORT_EVERY or done > 1 << 20:
            advance(done, documents)
            done = documents = 0
        yield f"{piece.source.name}/{piece.number}/{number}", item
    advance(done + left, documents)


class _PartReader:
    def __init__(self, job: Job, piece: Piece) -> None:
        self._job, self._piece = job, piece
        self._came, self._not_drawn = Count(), Count()
        self._quarantined: Counts = {}
        self._quarantine, self._rejected = Samples(), Samples()
        steps = steps_of(job, piece)
        self._decisions = DecisionRows(tuple(dict.fromkeys(name for step in steps for name in step.statistics)))
        semantic = job.recipe.corpus.dedup.semantic
        self._signatures = SignatureWriter(job.staging, job.sketching, embedding(semantic, job.folder) if semantic else None)
        self._runner = StepRunner(steps, self._decisions, self._rejected)
        self._left: list[np.ndarray] = [np.zeros(0, dtype=KEPT_ROW)]

    def run(self, advance: Advance) -> None:
        job, piece = self._job, self._piece
        decisions = job.path("read", piece, ".decisions.parquet")
        with parquet_writer(job.path("read", piece, ".parquet")) as out, parquet_writer(decisions, self._decisions.schema) as decided:
            batch: list[Document] = []
            characters = 0
            for document in self._documents(advance):
                batch.append(document)
                characters += len(document.text)
                if characters >= BATCH_CHARACTERS:
                    self._process(batch, out)
                    batch, characters = [], 0
                    if len(self._decisions) >= _DECIDED:
                        self._decisions.write(decided)
            self._process(batch, out)
            self._decisions.write(decided)
        self._signatures.close(job.path("read", piece, ".traces"))
        save_array(job.path("read", piece, ".keys.npy"), np.concatenate(self._left))
        write_json(
            job.path("read", piece, ".counts.json"),
            {
                "came": asdict(self._came),
                "quarantined": {reason: asdict(one) for reason, one in self._quarantined.items()},
                "not_drawn": asdict(self._not_drawn),
                "steps": [asdict(counts) for counts in self._runner.counts],
                "quarantine": self._quarantine.rows,
                "rejected": self._rejected.rows,
            },
        )

    def _documents(self, advance: Advance) -> Iterator[Document]:
        source, below = self._piece.source, _drawn_below(self._job, self._piece)
        for identity, item in _items_with_progress(self._job, self._piece, advance):
            language = item.language or source.language
            if item.reason is not None:
                size = max(item.consumed, len(item.text.encode()))
                self._came.add(size)
                count(self._quarantined, item.reason, size)
                self._quarantine.add(source.name, item.reason, identity, item.origin, item.text)
                self._decisions.add(identity, item.origin, size, language, "quarantine", item.reason)
                continue
            size = len(item.text) if item.text.isascii() else len(item.text.encode())
            self._came.add(size)
            if below is not None and int(keys([identity], self._job.recipe.seed, "draw")[0]) >= below:
                self._not_drawn.add(size)
                self._decisions.add(identity, item.origin, size, language, "max_bytes", "not_drawn")
                continue
            self._decisions.add(identity, item.origin, size, language)
            yield Document(identity, item.text, item.origin, source.name, source.domain, language, item.facts)

    def _process(self, documents: list[Document], out: Any) -> None:
        batch, sizes = self._runner.run(Batch(documents))
        if not len(batch):
            return
        self._signatures.add(batch)
        self._left.append(_rows([document.id for document in batch.documents], sizes, KEPT_ROW, self._job.recipe.seed, "validation"))
        out.write_batch(rows_of(batch.documents))


def missing_facts(job: Job) -> Iterator[UserError]:
    """For each source a step that needs a fact which neither the source nor an earlier step provides, or a step that cannot be made."""
    return all_refusals(partial(_check_facts, job, source) for source in job.sources)


def _check_facts(job: Job, source: Source) -> None:
    from lmworks.corpus.read import provides

    known = set(provides(source))
    for step in [make_step(node, Context(source, job.recipe.seed, job.folder)) for node in job.recipe.corpus.steps]:
        for fact in step.needs:
            if fact not in known:
                raise UserError(
                    f"step {step.name} needs the fact {fact!r}, which source {source.name} does not have: add it to "
                    "keep of the source, or put a step that makes it before this one"
                )
        known.update(step.makes)
    if source.buckets and source.bucket_by not in known:
        raise UserError(
            f"source {source.name} has buckets by the fact {source.bucket_by!r}, which neither the source nor a step provides: add a "
            "step that makes it, or name another bucket_by"
        )
