from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shards_corpus import write_corpus

from lmworks.errors import UserError
from lmworks.io.files import sha256_file
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.build import build_shards
from lmworks.shards.indexed import IndexedFile
from lmworks.shards.manifest import Manifest, check_vocabulary, verify
from lmworks.tokenizer import load


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): sha256_file(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def test_every_document_is_there_once_with_its_lineage(manifest: Manifest, shards_dir: Path, corpus: Path, tokenizer_dir: Path) -> None:
    tokenizer = load(tokenizer_dir)
    for source in manifest.sources:
        for name, split in (("train", source.train), ("validation", source.validation)):
            assert split is not None
            rows = {row["id"]: row for row in pq.read_table(corpus / name / source.name / "00000.parquet").to_pylist()}
            seen: Counter[str] = Counter()
            for shard in split.shards:
                file = IndexedFile(shards_dir / shard.prefix)
                table = pq.read_table(f"{shards_dir / shard.prefix}.lineage.parquet").to_pylist()
                assert file.documents == len(table) == shard.documents
                for number, about in enumerate(table):
                    text = rows[about["id"]]["text"]
                    ids = file.document(number).tolist()
                    assert ids == [*tokenizer.encode(text), tokenizer.eos_id]
                    assert about["tokens"] == len(ids)
                    assert about["bytes"] == len(text.encode())
                    assert (about["origin"], about["domain"], about["language"]) == (rows[about["id"]]["origin"], source.domain, "en")
                    seen[about["id"]] += 1
            assert seen == Counter(rows.keys())
            assert split.documents == len(rows)
            assert split.tokens == sum(shard.tokens for shard in split.shards)
            assert split.bytes == sum(len(row["text"].encode()) for row in rows.values())


def test_documents_are_shuffled_and_shards_have_their_size(manifest: Manifest, shards_dir: Path) -> None:
    split = manifest.source("words").train
    tables = [pq.read_table(f"{shards_dir / shard.prefix}.lineage.parquet") for shard in split.shards]
    order = [int(row["id"].split("/")[2]) for table in tables for row in table.to_pylist()]
    assert abs(np.corrcoef(np.arange(len(order)), order)[0, 1]) < 5 / len(order) ** 0.5
    for source in manifest.sources:
        assert all(shard.tokens >= 9000 for shard in source.train.shards[:-1])
    assert len(manifest.source("docs").train.shards) > 3


def test_only_finished_files_are_left(manifest: Manifest, shards_dir: Path) -> None:
    expected = {"manifest.json", "report.json", "token_bytes.npy"}
    for source in manifest.sources:
        for split in (source.train, source.validation):
            assert split is not None
            expected |= {f"{shard.prefix}{ending}" for shard in split.shards for ending in (".bin", ".idx", ".crc", ".lineage.parquet")}
    assert set(contents(shards_dir)) == expected
    verify(shards_dir)


def test_building_again_elsewhere_gives_equal_files(
    recipe: Recipe, corpus: Path, tokenizer_dir: Path, shards_dir: Path, tmp_path: Path
) -> None:
    build_shards(recipe, corpus, tokenizer_dir, tmp_path)
    assert contents(tmp_path) == contents(shards_dir)


def test_several_processes_write_the_same_files(
    recipe: Recipe, corpus: Path, tokenizer_dir: Path, shards_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmworks.shards.build._WORTH_A_PROCESS", 1)
    build_shards(recipe.model_copy(update={"threads": 2}), corpus, tokenizer_dir, tmp_path)
    assert contents(tmp_path) == contents(shards_dir)


def test_sources_of_several_parts_and_shards_made_in_blocks_are_whole(
    recipe: Recipe, corpus: Path, tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmworks.shards.encode._ABOUT_ROWS", 7)
    monkeypatch.setattr("lmworks.shards.shuffle._AT_ONCE", 11)
    whole = pq.read_table(corpus / "train" / "words" / "00000.parquet")
    for part in range(3):
        (tmp_path / "corpus" / "train" / "words").mkdir(parents=True, exist_ok=True)
        pq.write_table(whole.slice(part * 40, 40 if part < 2 else None), tmp_path / "corpus" / "train" / "words" / f"{part:05d}.parquet")
    manifest = build_shards(recipe, tmp_path / "corpus", tokenizer_dir, tmp_path / "shards")
    shards = manifest.source("words").train.shards
    assert [shard.tokens >= 9000 for shard in shards] == [True] * (len(shards) - 1) + [False]
    tokenizer, texts, seen = load(tokenizer_dir), dict(zip(whole["id"].to_pylist(), whole["text"].to_pylist(), strict=True)), []
    for shard in shards:
        file = IndexedFile(tmp_path / "shards" / shard.prefix)
        for number, about in enumerate(pq.read_table(f"{tmp_path / 'shards' / shard.prefix}.lineage.parquet").to_pylist()):
            assert file.document(number).tolist() == [*tokenizer.encode(texts[about["id"]]), tokenizer.eos_id]
            seen.append(about["id"])
    assert sorted(seen) == sorted(texts)
    one = build_shards(recipe, corpus, tokenizer_dir, tmp_path / "one").source("words").train
    assert [shard.sha256[".bin"] for shard in one.shards] == [shard.sha256[".bin"] for shard in shards], "parts change no token"


KILLED = """
import sys
from pathlib import Path
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards import build as module
module._WORTH_A_PROCESS = 1
module.build_shards(Recipe.model_validate_json(sys.argv[1]), *map(Path, sys.argv[2:]))
"""


@pytest.mark.parametrize("threads", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_killed_and_started_again_gives_equal_files(
    recipe: Recipe, corpus: Path, tokenizer_dir: Path, shards_dir: Path, tmp_path: Path, threads: int
) -> None:
    out = tmp_path / "shards"
    recipe = recipe.model_copy(update={"threads": threads})
    command = [sys.executable, "-c", KILLED, recipe.model_dump_json(), str(corpus), str(tokenizer_dir), str(out)]
    codes = []
    kills = (12,) if threads == 2 else (1, 8, 40)  # in the fast tests once, since each start imports everything in each process
    for files in kills:
        with subprocess.Popen(command) as process:
            while process.poll() is None and sum(path.is_file() for path in out.rglob("*")) < files:
                time.sleep(0.001)
            process.kill()
        codes.append(process.returncode)
    assert set(codes) <= {0, -signal.SIGKILL} and codes.count(-signal.SIGKILL) >= max(len(kills) - 1, 1), "kills come while it works"
    build_shards(recipe, corpus, tokenizer_dir, out)
    assert contents(out) == contents(shards_dir)


def test_finished_sources_are_kept_and_damaged_ones_made_again(
    recipe: Recipe, corpus: Path, tokenizer_dir: Path, shards_dir: Path, copied_shards: Path
) -> None:
    damaged, kept = copied_shards / "train/docs-00001.bin", copied_shards / "train/code-00000.bin"
    flip(damaged)
    os.utime(kept, (1, 1))
    (copied_shards / "train" / "gone-00000.bin").write_bytes(b"from a source that is no more")
    build_shards(recipe, corpus, tokenizer_dir, copied_shards)
    assert contents(copied_shards) == contents(shards_dir)
    assert kept.stat().st_mtime == 1


def test_a_full_disk_is_one_line_wherever_it_is_met(
    recipe: Recipe, corpus: Path, tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a file is closed, whose last bytes are written then; nothing half-written is left, and the next try goes through."""
    honest = pa.ipc.new_file

    class Full:
        def __init__(self, *arguments: object) -> None:
            self._inner = honest(*arguments)

        def __enter__(self) -> Full:
            return self

        def write_batch(self, batch: pa.RecordBatch) -> None:
            self._inner.write_batch(batch)

        def __exit__(self, *error: object) -> None:
            self._inner.close()
            raise OSError(errno.ENOSPC, "Error writing bytes to file")

    monkeypatch.setattr(pa.ipc, "new_file", Full)
    with pytest.raises(UserError, match=r"^the disk of .* is full \(.*\): free some space and run the same command again"):
        build_shards(recipe, corpus, tokenizer_dir, tmp_path)
    assert not list(tmp_path.rglob("*.part")) and not list(tmp_path.rglob("*.about.arrow"))
    monkeypatch.setattr(pa.ipc, "new_file", honest)
    build_shards(recipe, corpus, tokenizer_dir, tmp_path)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("sha256", ".idx"), "../../victim"),
        (("sha256", ".idx"), "A" * 64),
        (("sha256", "/../../victim"), "0" * 64),
        (("size", ".bin"), -1),
        (("prefix",), "train/../../victim"),
        (("prefix",), "../train/words"),
        (("prefix",), "/etc/passwd"),
    ],
)
def test_what_a_manifest_says_becomes_no_path_elsewhere(copied_shards: Path, where: tuple[str, ...], value: object) -> None:
    path = copied_shards / "manifest.json"
    document = json.loads(path.read_text())
    node = document["sources"][0]["train"]["shards"][0]
    for key in where[:-1]:
        node = node[key]
    node[where[-1]] = value
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"manifest.json: sources.0.train.shards.0"):
        Manifest.load(copied_shards)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


FILES = ["train/docs-00001.bin", "train/code-00000.idx", "validation/words-00000.lineage.parquet", "token_bytes.npy"]


@pytest.mark.parametrize("name", FILES)
def test_verify_names_a_file_with_one_flipped_bit(copied_shards: Path, name: str) -> None:
    verify(copied_shards)
    flip(copied_shards / name)
    with pytest.raises(UserError, match=rf"{name} is damaged \(its hash differs\); delete the folder .* and run the same"):
        verify(copied_shards)
    (copied_shards / name).unlink()
    with pytest.raises(UserError, match=rf"{name} is missing; delete the folder"):
        verify(copied_shards)


def test_a_vocabulary_that_does_not_match_is_refused(manifest: Manifest) -> None:
    check_vocabulary(manifest, 700, manifest.tokenizer_sha256)
    check_vocabulary(manifest, 768)
    with pytest.raises(UserError, match=r"the model's vocab_size 640 is smaller than the shards' 700 entries; delete the shards folder"):
        check_vocabulary(manifest, 640)
    with pytest.raises(UserError, match=r"the shards were made with another tokenizer \(.*, now 000000000000\); delete the shards folder"):
        check_vocabulary(manifest, 700, "0" * 64)


def test_an_empty_or_missing_corpus_is_refused(recipe: Recipe, corpus: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train holds no \.parquet file; make the corpus first"):
        build_shards(recipe, tmp_path / "nothing", tokenizer_dir, tmp_path / "out")
    copied = Path(shutil.copytree(corpus, tmp_path / "corpus"))
    write_corpus(copied, "train", "empty", [], "docs")
    with pytest.raises(UserError, match=r"train/empty has no documents; take source empty out of the recipe"):
        build_shards(recipe, copied, tokenizer_dir, tmp_path / "out")
    (copied / "train" / "empty" / "00000.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(UserError, match=r"empty/00000\.parquet is not readable parquet .*; delete the corpus folder"):
        build_shards(recipe, copied, tokenizer_dir, tmp_path / "out")


def test_a_broken_or_missing_manifest_is_named(copied_shards: Path) -> None:
    path = copied_shards / "manifest.json"
    path.write_text('{"format": 1}')
    with pytest.raises(UserError, match=r"manifest\.json: seed: Field required; delete the folder"):
        Manifest.load(copied_shards)
    path.unlink()
    with pytest.raises(UserError, match=r"manifest\.json does not exist; make the shards first"):
        Manifest.load(copied_shards)
