"""Token files of other tools: the same documents come out, and what cannot be right is refused."""

from __future__ import annotations

import csv
import gzip
import shutil
import struct
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards import import_tokens as import_tokens_module
from lmworks.shards.batches import Batches
from lmworks.shards.build import build_shards
from lmworks.shards.import_tokens import Imported, import_tokens
from lmworks.shards.indexed import IndexedFile
from lmworks.shards.manifest import verify
from lmworks.tokenizer import load

DATATROVE = Path(__file__).parent / "fixtures" / "datatrove"
TEXTS = [f"The {word} of {number} things, naïve 中文.\n" * (number % 5 + 1) for number, word in enumerate(("sum", "list", "end") * 40)]


def documents(out: Path, made: Imported) -> dict[str, tuple[list[int], str]]:
    """By id: tokens without the closing token, and the origin."""
    found = {}
    for shard in made.manifest.sources[0].train.shards:
        file, about = IndexedFile(out / shard.prefix), pq.read_table(f"{out / shard.prefix}.lineage.parquet").to_pylist()
        for number, row in enumerate(about):
            tokens = file.document(number).tolist()
            assert row["tokens"] == len(tokens)
            found[row["id"]] = tokens[:-1], row["origin"]
    return found


def megatron(prefix: Path, sequences: list[list[int]], ends: list[int], code: int, kind: str) -> None:
    """Token files in Megatron's format; several sequences may form one document."""
    sizes = [len(sequence) for sequence in sequences]
    at = np.cumsum([0, *sizes[:-1]]) * np.dtype(kind).itemsize
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sizes), len(ends) + 1)
    index += np.array(sizes, "<i4").tobytes() + at.astype("<i8").tobytes() + np.array([0, *ends], "<i8").tobytes()
    prefix.with_suffix(".idx").write_bytes(index)
    np.concatenate([np.array(sequence, kind) for sequence in sequences]).tofile(prefix.with_suffix(".bin"))


@pytest.mark.parametrize(("code", "kind"), [(4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_megatron_of_any_type_with_documents_of_several_sequences(tokenizer_dir: Path, tmp_path: Path, code: int, kind: str) -> None:
    tokenizer = load(tokenizer_dir)
    encoded = [tokenizer.encode(text) for text in TEXTS]
    sequences, ends = [], []
    for number, ids in enumerate(encoded):
        closed = [*ids, tokenizer.eos_id] if number % 2 else ids
        sequences += [closed[: len(closed) // 2], closed[len(closed) // 2 :]]
        ends.append(len(sequences))
    megatron(tmp_path / "web_text_document", sequences, ends, code, kind)
    made = import_tokens("megatron", tmp_path / "web_text_document", tokenizer_dir, "web", tmp_path / "out", domain="web", shard_tokens=900)
    assert made.closed == len(TEXTS) / 2, "those without a closing token got one"
    found = documents(tmp_path / "out", made)
    assert [found[f"web/0/{number}"][0] for number in range(len(TEXTS))] == encoded
    assert found["web/0/7"][1] == f"{tmp_path / 'web_text_document.idx'}:7"
    split = made.manifest.source("web").train
    assert len(split.shards) > 2
    assert split.bytes == sum(len(text.encode()) for text in TEXTS)
    assert not (tmp_path / "out" / "encoded").exists()
    verify(tmp_path / "out")


def test_an_import_that_is_continued_counts_all_documents(tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    shuffled = import_tokens_module.shuffled
    monkeypatch.setattr(import_tokens_module, "shuffled", interrupted)
    with pytest.raises(KeyboardInterrupt):
        import_tokens("datatrove", DATATROVE, tokenizer_dir, "dt", tmp_path / "out", domain="web", eos=500)
    monkeypatch.setattr(import_tokens_module, "shuffled", shuffled)
    made = import_tokens("datatrove", DATATROVE, tokenizer_dir, "dt", tmp_path / "out", domain="web", eos=500)
    assert (made.closed, made.empty) == (3, 1)


@pytest.mark.parametrize("kind", ["datatrove", "nanotron"])
def test_files_of_datatroves_own_writer(tokenizer_dir: Path, tmp_path: Path, kind: str) -> None:
    made = import_tokens(kind, DATATROVE, tokenizer_dir, "dt", tmp_path, domain="web", eos=500)  # type: ignore[arg-type]
    found = documents(tmp_path, made)
    expected = {"dt/0/0": [40, 41, 42], "dt/0/1": [43], "dt/0/3": [10, 11, 12, 13, 14, 15], "dt/1/0": [70, 71], "dt/1/1": [1, 2, 3]}
    assert {identity: tokens for identity, (tokens, _) in found.items()} == expected
    assert (made.closed, made.empty) == (3, 1)


def test_datatrove_without_its_index_is_cut_at_the_closing_token(tokenizer_dir: Path, tmp_path: Path) -> None:
    for name in ("00000_tokens.ds", "00000_tokens.ds.metadata"):
        shutil.copy(DATATROVE / name, tmp_path / name)
    made = import_tokens("datatrove", tmp_path, tokenizer_dir, "dt", tmp_path / "out", domain="web", eos=500)
    assert sorted(tokens for tokens, _ in documents(tmp_path / "out", made).values()) == [[40, 41, 42], [43, 10, 11, 12, 13, 14, 15]]
    (tmp_path / "00000_tokens.ds.metadata").unlink()
    with pytest.raises(UserError, match=r"00000_tokens\.ds\.metadata does not say how many bytes a token has; give --dtype"):
        import_tokens("datatrove", tmp_path, tokenizer_dir, "dt", tmp_path / "other", domain="web", eos=500)


def test_olmo_with_and_without_its_table(tokenizer_dir: Path, tmp_path: Path) -> None:
    tokenizer = load(tokenizer_dir)
    encoded = [tokenizer.encode(text) for text in TEXTS]
    closed = [[*ids, tokenizer.eos_id] for ids in encoded]
    np.concatenate([np.array(ids, "<u2") for ids in closed]).tofile(tmp_path / "part-0.npy")
    plain = import_tokens("olmo", tmp_path / "part-0.npy", tokenizer_dir, "o", tmp_path / "plain", domain="web")
    assert [documents(tmp_path / "plain", plain)[f"o/0/{number}"][0] for number in range(len(TEXTS))] == encoded
    ends = np.cumsum([len(ids) for ids in closed]).tolist()
    with gzip.open(tmp_path / "part-0.csv.gz", "wt", newline="") as lines:
        for number, (ids, end) in enumerate(zip(closed, ends, strict=True)):
            csv.writer(lines).writerow([end - len(ids), end, f"id-{number}", "s3://raw/a.jsonl.gz", number + 1])
    told = documents(tmp_path / "told", import_tokens("olmo", tmp_path, tokenizer_dir, "o", tmp_path / "told", domain="web"))
    assert told["id-5"] == (encoded[5], "s3://raw/a.jsonl.gz:6")


def test_files_that_cannot_be_right_are_refused(tokenizer_dir: Path, tmp_path: Path) -> None:
    def take(kind: str, path: Path, **options: object) -> None:
        import_tokens(kind, path, tokenizer_dir, "x", tmp_path / "out", domain="web", **options)  # type: ignore[arg-type]

    with pytest.raises(UserError, match=r"is not a token file of olmo, and contains none \(\*\.npy\)"):
        take("olmo", tmp_path / "nothing.npy")
    tokenizer = load(tokenizer_dir)
    ids = np.array([*tokenizer.encode("Some text that is long enough. " * 20), tokenizer.eos_id], "<u2")
    ids.tofile(tmp_path / "a.npy")
    with pytest.raises(UserError, match=r"a\.npy: document 0 holds token \d+, outside the vocabulary of 700; another token"):
        take("olmo", tmp_path / "a.npy", dtype="uint32")
    rng = np.random.default_rng(0)
    np.concatenate([np.append(rng.integers(94, 256, 30), tokenizer.eos_id) for _ in range(50)]).astype("<u2").tofile(tmp_path / "b.npy")
    with pytest.raises(UserError, match=r"b\.npy: \d+ of 32 documents do not decode to text; another tokenizer, or another --dtype\?"):
        take("olmo", tmp_path / "b.npy")
    (tmp_path / "c.npy").write_bytes(b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '<\xe32', 'shape': (,), }".ljust(117) + b"\n" + bytes(60))
    with pytest.raises(UserError, match=r"c\.npy is damaged, or not what its name says"):
        take("olmo", tmp_path / "c.npy")
    copied = Path(shutil.copytree(DATATROVE, tmp_path / "cut"))
    (copied / "00000_tokens.ds").write_bytes((copied / "00000_tokens.ds").read_bytes()[:-4])
    with pytest.raises(UserError, match=r"00000_tokens\.ds\.index does not fit its tokens: documents end at 11 of 9; is a file cut off"):
        take("datatrove", copied)


def test_an_imported_source_is_mixed_with_ones_own(
    recipe: Recipe, corpus: Path, tokenizer_dir: Path, tmp_path: Path
) -> None:
    tokenizer = load(tokenizer_dir)
    np.concatenate([np.array([*tokenizer.encode(text), tokenizer.eos_id], "<u2") for text in TEXTS]).tofile(tmp_path / "a.npy")
    import_tokens("olmo", tmp_path / "a.npy", tokenizer_dir, "web", tmp_path / "imported", domain="web")
    tree = recipe.model_dump()
    tree["shards"]["imported"] = {"web": str(tmp_path / "imported")}
    tree["train"]["phases"][0]["mixture"] = {"code": 0.5, "web": 0.5}
    mixed = Recipe.model_validate(tree)
    build_shards(mixed, corpus, tokenizer_dir, tmp_path / "shards")
    batches = Batches(mixed, tmp_path / "shards")
    rows = batches.documents(3)
    assert {row.source for row in rows} == {"code", "web"}
    web = next(number for number, row in enumerate(rows) if row.source == "web")
    text = tokenizer.decode(batches.batch(3).tokens[web].tolist(), skip_special=True)
    assert "things, naïve" in text
    verify(tmp_path / "shards")
    manifest = (tmp_path / "imported" / "manifest.json")
    manifest.write_text(manifest.read_text().replace(batches.manifest.tokenizer_sha256, "0" * 64))
    with pytest.raises(UserError, match=r"shards\.imported\.web: .* was imported for another tokenizer \(000000000000, this run's is"):
        build_shards(mixed, corpus, tokenizer_dir, tmp_path / "shards")
