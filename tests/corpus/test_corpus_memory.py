"""Memory does not grow with the number of documents in a part: a compressed file is one part, however long it is."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from step_documents import documents

from lmworks.corpus import prepare
from lmworks.corpus.dedup.signatures import SignatureWriter, sketching_of
from lmworks.corpus.document import Batch
from lmworks.corpus.engine import reading_pass
from lmworks.corpus.engine.decisions import DecisionRows
from lmworks.recipe.schema.corpus import Corpus, Dedup, Source
from lmworks.recipe.schema.recipe import Recipe


def test_traces_are_collected_in_files(tmp_path: Path) -> None:
    batch = Batch(documents([f"document {number} of many" for number in range(500)]))
    made = SignatureWriter(tmp_path, sketching_of(Dedup(), ()))
    made.add(batch)
    tracemalloc.start()
    try:
        for _ in range(15):
            made.add(batch)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1 << 20, "7,500 documents, of which some 500 bytes each are taken down"
    made.close(tmp_path / "traces")
    assert (tmp_path / "traces").stat().st_size > 8_000 * 500


def test_decisions_are_written_as_they_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_pass, "_DECIDED", 50)
    monkeypatch.setattr(reading_pass, "BATCH_CHARACTERS", 1000)
    waiting, write = [], DecisionRows.write

    def counted(self: DecisionRows, out: pq.ParquetWriter) -> None:
        waiting.append(len(self))
        write(self, out)

    monkeypatch.setattr(DecisionRows, "write", counted)
    rows = [json.dumps({"text": f"document {number}: " + "word " * (number % 7)}) for number in range(1000)]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join([*rows, "{"]).encode()))
    source = Source(name="web", kind="jsonl", path=str(tmp_path / "a.jsonl.gz"), license="none", domain="other")
    prepare(Recipe(name="test", threads=1, corpus=Corpus(sources=[source], validation_fraction=0.1)), tmp_path / "out")
    assert sum(waiting) == 1001 and max(waiting) < 150
    decided = pq.read_table(tmp_path / "out" / "decisions" / "web" / "00000.parquet").to_pylist()
    assert [row["id"] for row in decided] == [f"web/0/{number}" for number in range(1001)]
    fates = [row["fate"] for row in decided]
    assert fates[-1] == "quarantine" and {"train", "validation", "rules"} <= set(fates)
