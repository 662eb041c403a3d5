from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batch import IGNORE, Batch
from lmworks.shards.batches import Batches
from lmworks.shards.indexed import IndexedFile
from lmworks.shards.lineage import Lineage
from lmworks.shards.manifest import Manifest
from lmworks.shards.remote import ShardFiles
from lmworks.tokenizer import load


def same(one: Batch, other: Batch) -> bool:
    names = [field.name for field in fields(Batch) if field.name not in ("sequence_bytes", "sources")]
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def joined(parts: list[Batch]) -> Batch:
    """The sequences of ranks or micro-batches, concatenated."""
    sizes = np.cumsum([0, *(part.tokens.size for part in parts)])
    cu_seqlens = np.concatenate([part.cu_seqlens[:-1] + size for part, size in zip(parts, sizes, strict=False)] + [sizes[-1:]])
    tokens, labels = np.concatenate([part.tokens for part in parts]), np.concatenate([part.labels for part in parts])
    return Batch(tokens, labels, cu_seqlens, parts[0].phase, parts[0].step)


def plain_batch(batches: Batches, step: int) -> Batch:
    """A simple implementation of the same batch: all tokens of a source in one list, documents marked token by token."""
    order = batches.order
    phase = order.phase_of(step)
    length = order.timeline.phases[phase].sequence_length
    first, count = order.sequences(step)
    found = order.locate(phase, np.arange(first, first + count))
    tokens, labels, begins = [], [], []
    for row, (source, start) in enumerate(zip(found.source.tolist(), found.start.tolist(), strict=True)):
        text: list[int] = []
        document_of: list[tuple[int, int]] = []
        for shard, entry in enumerate(batches.manifest.source(order.sources[source]).train.shards):
            file = IndexedFile(batches.shards_dir / entry.prefix)
            for document in range(file.documents):
                text += file.document(document).tolist()
                document_of += [(shard, document)] * len(file.document(document))
        window, owner = text[start : start + length + 1], document_of[start : start + length + 1]
        tokens.append(window[:-1])
        labels.append([token if owner[at] == owner[at + 1] else IGNORE for at, token in enumerate(window[1:])])
        begins += [row * length + at for at in range(length) if at == 0 or owner[at] != owner[at - 1]]
    return Batch(np.array(tokens), np.array(labels), np.array([*begins, count * length]), phase, step)


def test_batches_equal_the_plain_twin_across_documents_and_files(batches: Batches) -> None:
    assert len(batches.manifest.source("docs").train.shards) > 3, "the test needs sequences that run from one file into the next"
    for step in (0, 3, 9, 20, batches.steps - 1):
        assert same(batches.batch(step), plain_batch(batches, step))


def test_sequences_that_run_across_files_are_read(batches: Batches) -> None:
    stream = batches.manifest.stream(batches.shards_dir, "docs")
    border = int(stream.offsets[1])
    out = np.empty((3, 20), np.int32)
    stream.gather(np.array([border - 20, border - 7, border]), 20, out)
    whole = np.concatenate([stream.file(0).tokens, stream.file(1).tokens])
    assert np.array_equal(out, [whole[at : at + 20] for at in (border - 20, border - 7, border)])
    row, offset = stream.boundaries(np.array([border - 7]), 20)
    assert 7 in offset.tolist()
    assert row.max() == 0


def test_the_next_document_is_not_predicted(batches: Batches, tokenizer_dir: Path) -> None:
    end = load(tokenizer_dir).eos_id
    for step in range(0, batches.steps, 7):
        batch = batches.batch(step)
        assert np.array_equal(batch.labels == IGNORE, batch.tokens == end), "nothing is masked but what follows <|endoftext|>"
        flat = batch.tokens.reshape(-1)
        inner = batch.cu_seqlens[1:-1][batch.cu_seqlens[1:-1] % batch.tokens.shape[1] != 0]
        assert (flat[inner - 1] == end).all()
        assert batch.valid_tokens == np.count_nonzero(batch.tokens != end)


@given(step=st.integers(0, 70), world=st.integers(1, 9), micro=st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_world_size_and_micro_batch_change_nothing(built: Batches, step: int, world: int, micro: int) -> None:
    step %= built.steps
    whole = built.batch(step)
    count = len(whole.tokens)
    parts, apart = [], []
    for rank in range(world):
        start, stop = count * rank // world, count * (rank + 1) // world
        for begin in range(start, stop, micro):
            parts.append(whole.rows(begin, min(begin + micro, stop)))
            apart.append(built.batch(step, begin, min(begin + micro, stop)))
    assert same(joined(parts), whole)
    assert same(joined(apart), whole), "a rank that reads only its own rows gets the same ones"
    for part in parts:
        assert part.cu_seqlens[0] == 0
        assert part.cu_seqlens[-1] == part.tokens.size
        assert np.isin(np.arange(len(part.tokens)) * part.tokens.shape[1], part.cu_seqlens).all()


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_a_rank_without_sequences_gets_none(recipe: Recipe, copied_shards: Path, packing: str) -> None:
    """Where a step has fewer sequences than there are ranks; before, between and behind the others."""
    batches = Batches(recipe.model_copy(update={"shards": recipe.shards.model_copy(update={"packing": packing})}), copied_shards)
    for step in (0, batches.steps - 1):
        whole = batches.batch(step)
        for at in (0, 2, len(whole.tokens)):
            nothing = batches.batch(step, at, at)
            assert same(nothing, whole.rows(at, at)) and nothing.tokens.shape == (0, whole.tokens.shape[1])
            assert nothing.tokens_by_source == (0,) * len(batches.sources) and nothing.labels.dtype == whole.labels.dtype


def test_the_documents_of_a_batch_cover_its_tokens() -> None:
    tokens = np.zeros((2, 8), np.int32)
    Batch(tokens, tokens, np.array([0, 8, 16], np.int32), 0, 0)
    with pytest.raises(AssertionError, match="documents end at 8, the tokens at 16"):
        Batch(tokens, tokens, np.array([0, 8], np.int32), 0, 0)


def test_longer_rows_are_the_same_rows_and_a_document_without_labels(built: Batches) -> None:
    whole = built.batch(0)
    rows, length = whole.tokens.shape
    assert whole.lengthened(length) is whole
    weighted = replace(whole, weights=np.ones(whole.tokens.shape, np.float32))
    longer = weighted.lengthened(length + 5)
    assert np.array_equal(longer.tokens[:, :length], whole.tokens) and np.array_equal(longer.labels[:, :length], whole.labels)
    assert longer.valid_tokens == whole.valid_tokens and longer.tokens.dtype == whole.tokens.dtype
    assert longer.weights is not None and longer.weights.sum() == rows * length
    for row in range(rows):
        one, other = whole.rows(row, row + 1), longer.rows(row, row + 1)
        assert other.cu_seqlens.tolist() == [*one.cu_seqlens.tolist(), length + 5]
    assert same(weighted.rows(2, 2).lengthened(length + 5), longer.rows(2, 2))


@pytest.fixture(scope="module")
def built(recipe: Recipe, shards_dir: Path) -> Batches:
    return Batches(recipe, shards_dir)


PROBE = """
import hashlib, sys
from pathlib import Path
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batches import Batches
batches = Batches(Recipe.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
for step in map(int, sys.argv[3:]):
    batch = batches.batch(step)
    print(hashlib.sha256(batch.tokens.tobytes() + batch.labels.tobytes() + batch.cu_seqlens.tobytes()).hexdigest())
"""


def test_a_fresh_process_makes_the_same_batches_in_any_order(recipe: Recipe, batches: Batches) -> None:
    steps = [0, 5, batches.steps - 1, 30]
    hashes = {}
    for step in steps:
        batch = batches.batch(step)
        hashes[step] = hashlib.sha256(batch.tokens.tobytes() + batch.labels.tobytes() + batch.cu_seqlens.tobytes()).hexdigest()
    for hash_seed, asked in (("1", steps), ("77", steps[::-1])):
        command = [sys.executable, "-c", PROBE, recipe.model_dump_json(), str(batches.shards_dir), *map(str, asked)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True, env=os.environ | {"PYTHONHASHSEED": hash_seed})
        assert done.stdout.split() == [hashes[step] for step in asked]


def test_documents_of_a_step_are_found_in_the_corpus(batches: Batches, corpus: Path, tokenizer_dir: Path) -> None:
    import pyarrow.parquet as pq

    tokenizer = load(tokenizer_dir)
    texts = {}
    for path in (corpus / "train").glob("*/*.parquet"):
        for row in pq.read_table(path).to_pylist():
            texts[row["id"]] = (row["text"], row["origin"])
    for step in (0, 12, batches.steps - 1):
        batch, rows = batches.batch(step), batches.documents(step)
        assert len(rows) == len(batch.tokens)
        for row, sequence in enumerate(rows):
            expected: list[int] = []
            for span in sequence.documents:
                text, origin = texts[span.id]
                assert origin == span.origin
                assert span.id.startswith(f"{sequence.source}/")
                expected += [*tokenizer.encode(text), tokenizer.eos_id][span.start : span.stop]
            assert batch.tokens[row].tolist() == expected
        assert [sequence.number for sequence in rows] == list(range(*np.cumsum(batches.order.sequences(step)).tolist()))


def test_documents_shared_by_phases_are_reported(batches: Batches) -> None:
    told = batches.shared_documents()
    assert all((before, after) == ("general", "long") for before, after, _ in told)
    borders = {share.source: share.start for share in batches.order.shares() if share.phase == "long"}
    expected = []
    for source, border in borders.items():  # counted by hand along the source's own documents
        files = [batches.shards_dir / entry.prefix for entry in batches.manifest.source(source).train.shards]
        ids = [Lineage(prefix).row(document)["id"] for prefix in files for document in range(IndexedFile(prefix).documents)]
        lengths = [len(IndexedFile(prefix).document(document)) for prefix in files for document in range(IndexedFile(prefix).documents)]
        ends = np.cumsum(lengths).tolist()
        cut = [number for number, (length, end) in enumerate(zip(lengths, ends, strict=True)) if end - length < border < end]
        expected += [(ids[number], border - ends[number] + lengths[number]) for number in cut]
    assert expected and [(span.id, span.start) for _, _, span in told] == expected


def test_a_token_outside_the_vocabulary_is_refused(recipe: Recipe, copied_shards: Path) -> None:
    for path in (copied_shards / "train").glob("*.bin"):
        tokens = np.fromfile(path, "<u2")
        tokens[:] = 700
        tokens.tofile(path)
    state = json.loads((copied_shards / "manifest.json").read_text())
    for source in state["sources"]:
        for shard in source["train"]["shards"]:
            del shard["sha256"][".crc"]  # as if they had been written so
    (copied_shards / "manifest.json").write_text(json.dumps(state))
    batches = Batches(recipe, copied_shards)
    with pytest.raises(UserError, match=r"step 2: a token shard below .* holds token 700, outside the vocabulary of 700; the file is d"):
        batches.batch(2)


def test_a_shard_of_another_length_than_the_manifest_states_is_refused(recipe: Recipe, copied_shards: Path) -> None:
    state = json.loads((copied_shards / "manifest.json").read_text())
    for source in state["sources"]:
        source["train"]["shards"][0]["tokens"] += 1
    (copied_shards / "manifest.json").write_text(json.dumps(state))
    stream = Batches(recipe, copied_shards).manifest.stream(copied_shards, "docs")
    with pytest.raises(UserError, match=r"holds [\d,]+ tokens where manifest.json states [\d,]+; delete the shards folder"):
        stream.gather(np.array([0]), 10, np.empty((1, 10), np.int32))


def test_starting_opens_no_shard(recipe: Recipe, copied_shards: Path) -> None:
    for path in (copied_shards / "train").iterdir():
        path.unlink()
    batches = Batches(recipe, copied_shards)
    assert batches.order.locate(0, np.arange(10)).start.min() >= 0
    with pytest.raises(UserError, match=r"\.crc is missing; delete the folder"):
        batches.batch(0)


def test_only_so_many_shards_are_open(recipe: Recipe, shards_dir: Path) -> None:
    manifest = Manifest.load(shards_dir)
    files = ShardFiles(shards_dir, manifest, most=2)
    prefixes = [shards_dir / shard.prefix for shard in manifest.shards()]
    for prefix in [*prefixes, *prefixes]:
        assert files(prefix).prefix == prefix
        assert len(files._open) <= 2
