"""Clean documents to token shards: encoded, shuffled, with lineage and hashes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lmworks.documents import corpus_files
from lmworks.errors import UserError
from lmworks.files import atomic_path, explain_os_errors, sha256_file
from lmworks.progress import Bar, bar
from lmworks.recipe.recipe import Recipe
from lmworks.shards import lineage
from lmworks.shards.indexed import IndexedFile, IndexedWriter, token_dtype, with_ending
from lmworks.shards.manifest import MANIFEST, TOKEN_BYTES, Manifest, Shard, SourceShards, Split, SplitName
from lmworks.shards.permute import derive_key, permute

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from lmworks.tokenizer import Tokenizer

_ENCODE_BYTES = 8 << 20  # text handed to the tokenizer at one time
_UNFINISHED = "unfinished.json"
_FILES = (".bin", ".idx", lineage.ENDING)
_SPLITS: tuple[SplitName, ...] = ("train", "validation")


def build(recipe: Recipe, corpus_dir: Path, tokenizer_dir: Path, out_dir: Path) -> Manifest:
    """Write the shards of every source in `corpus_dir`; returns the manifest, which is also written, last.

    Each document ends with <|endoftext|>. The documents of a source lie in the order of a keyed permutation, so that any stretch of a
    shard is a fair sample of the source. Memory holds some text and the identities of one source's documents, whatever their size.
    Killed and started again it keeps the sources that were finished from the same inputs; the result is the same.

    Raises UserError for a missing or empty corpus, a broken parquet file, and a tokenizer that loses bytes.
    """
    from lmworks.tokenizer import load

    corpus_dir, out_dir = Path(corpus_dir), Path(out_dir)
    tokenizer = load(Path(tokenizer_dir))
    tokenizer_sha256 = sha256_file(Path(tokenizer_dir) / "tokenizer.json")
    splits = {split: corpus_files(corpus_dir, split) for split in _SPLITS}
    if not splits["train"]:
        raise UserError(f"{corpus_dir}/train holds no .parquet file; make the corpus first with: lmworks run RECIPE")
    found = {(split, name): list(filter(_rows, paths)) for split in _SPLITS for name, paths in splits[split].items()}
    filled = {key: paths for key, paths in found.items() if paths}
    with explain_os_errors(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
        with atomic_path(out_dir / TOKEN_BYTES) as aside, open(aside, "wb") as handle:
            np.save(handle, tokenizer.byte_lengths, allow_pickle=False)
    manifest = Manifest(
        seed=recipe.seed,
        vocab_size=tokenizer.vocab_size,
        dtype=token_dtype(tokenizer.vocab_size).name,
        tokenizer_sha256=tokenizer_sha256,
        token_bytes_sha256=sha256_file(out_dir / TOKEN_BYTES),
        sources=(),
    )
    finished = _finished(out_dir)
    with bar("shards", sum(path.stat().st_size for paths in filled.values() for path in paths)) as progress:
        for name in splits["train"]:
            if ("train", name) not in filled:
                raise UserError(f"{corpus_dir}/train/{name} has no documents; take source {name} out of the recipe, or loosen its rules")
            made: dict[str, Split] = {}
            for split in _SPLITS:
                if paths := filled.get((split, name)):
                    job = _Job(recipe, tokenizer, name, paths, out_dir, split, tokenizer_sha256)
                    made[split] = finished.get(job.inputs) or job.run(progress)
            source = SourceShards(name=name, domain=_first(filled["train", name][0], "domain"), **made)
            manifest = manifest.model_copy(update={"sources": (*manifest.sources, source)})
            manifest.save(out_dir / _UNFINISHED)
    _remove_strangers(out_dir, manifest)
    manifest.save(out_dir / MANIFEST)
    (out_dir / _UNFINISHED).unlink()
    return manifest


class _Job:
    """One split of one source, from its parts of the corpus."""

    def __init__(
        self, recipe: Recipe, tokenizer: Tokenizer, name: str, paths: list[Path], out_dir: Path, split: SplitName, tokenizer_sha256: str
    ) -> None:
        self.name, self.paths, self.out_dir, self.split, self.tokenizer = name, paths, out_dir, split, tokenizer
        self.threads, self.shard_tokens = recipe.threads, int(recipe.shards.shard_tokens)
        self.key = derive_key(recipe.seed, "documents", name)
        facts = [[sha256_file(path) for path in paths], tokenizer_sha256, recipe.seed, self.shard_tokens, split, name]
        self.inputs = hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def run(self, progress: Bar) -> Split:
        """Encode in the order of the corpus to a file aside, then copy the documents in shuffled order.

        Reading text in shuffled order would unpack a group of parquet rows for each document; tokens are cheap to read anywhere.
        """
        import pyarrow as pa

        aside = self.out_dir / self.split / f".{self.name}.encoded"
        document_bytes = self._encode(aside, progress)
        encoded = IndexedFile(aside)
        order = permute(np.arange(encoded.documents), encoded.documents, self.key)
        tokens = encoded.document_start(order + 1) - encoded.document_start(order)
        known = _columns(self.paths, ("id", "origin", "domain", "language"))
        known = known.append_column("bytes", pa.array(document_bytes))
        shards: list[Shard] = []
        for start, stop in pairwise(_cuts(tokens, self.shard_tokens)):
            about = known.take(order[start:stop]).append_column("tokens", pa.array(tokens[start:stop]))
            shards.append(self._write_shard(len(shards), encoded, order[start:stop], about))
        for ending in (".bin", ".idx"):
            with_ending(aside, ending).unlink()
        return Split(
            tokens=len(encoded), bytes=int(document_bytes.sum()), documents=encoded.documents, inputs=self.inputs, shards=tuple(shards)
        )

    def _encode(self, aside: Path, progress: Bar) -> np.ndarray:
        """Write the tokens of all documents; returns the bytes of text of each, (documents,) int64."""
        files = [_open(path) for path in self.paths]
        share = sum(path.stat().st_size for path in self.paths) / sum(file.metadata.num_rows for file in files)
        document_bytes: list[int] = []
        with IndexedWriter(aside, token_dtype(self.tokenizer.vocab_size)) as writer:
            for texts in (texts for file in files for texts in _texts(file)):
                for text, ids in zip(texts, self.tokenizer.encode_batch(texts, threads=self.threads), strict=True):
                    size = len(text.encode())
                    if int(self.tokenizer.byte_lengths[ids].sum()) != size:
                        raise UserError(
                            f"the tokenizer does not give back document {len(document_bytes)} of {self.split}/{self.name} byte for byte; "
                            "use a byte-level tokenizer without normalisation"
                        )
                    writer.add(np.append(ids, self.tokenizer.eos_id))
                    document_bytes.append(size)
                progress.advance(share * len(texts))
                progress.note(f"{self.name} {writer.tokens / 1e6:.1f}M tokens")
        return np.array(document_bytes, np.int64)

    def _write_shard(self, number: int, encoded: IndexedFile, documents: np.ndarray, about: pa.Table) -> Shard:
        import pyarrow.parquet as pq

        name = f"{self.split}/{self.name}-{number:05d}"
        prefix = self.out_dir / name
        with IndexedWriter(prefix, encoded.dtype) as writer:
            for document in documents.tolist():
                writer.add(encoded.document(document))
        with atomic_path(with_ending(prefix, lineage.ENDING)) as aside:
            pq.write_table(about, aside, row_group_size=lineage.ROWS_PER_GROUP)
        paths = {ending: with_ending(prefix, ending) for ending in _FILES}
        return Shard(
            prefix=name,
            tokens=writer.tokens,
            documents=len(documents),
            sha256={ending: sha256_file(path) for ending, path in paths.items()},
            size={ending: path.stat().st_size for ending, path in paths.items()},
        )


def _cuts(tokens: np.ndarray, shard_tokens: int) -> list[int]:
    """Where shards begin among documents of the given lengths, and the end: a shard closes with the document that fills it."""
    until, cuts = np.cumsum(tokens), [0]
    while cuts[-1] < len(tokens):
        done = int(until[cuts[-1] - 1]) if cuts[-1] else 0
        cuts.append(min(int(np.searchsorted(until, done + shard_tokens)) + 1, len(tokens)))
    return cuts


def _finished(out_dir: Path) -> dict[str, Split]:
    """What an earlier try completed and is still there in full, by the hash of its inputs."""
    found: dict[str, Split] = {}
    for name in (MANIFEST, _UNFINISHED):
        path = out_dir / name
        if not path.exists():
            continue
        for source in Manifest.load(out_dir, name).sources:
            for split in (source.train, source.validation):
                if split and all(_intact(out_dir, shard) for shard in split.shards):
                    found[split.inputs] = split
    return found


def _intact(out_dir: Path, shard: Shard) -> bool:
    paths = {ending: with_ending(out_dir / shard.prefix, ending) for ending in shard.sha256}
    return all(path.exists() and sha256_file(path) == shard.sha256[ending] for ending, path in paths.items())


def _remove_strangers(out_dir: Path, manifest: Manifest) -> None:
    """Delete what killed tries and sources that are gone left behind."""
    splits = [split for source in manifest.sources for split in (source.train, source.validation) if split]
    ours = {with_ending(out_dir / shard.prefix, ending) for split in splits for shard in split.shards for ending in shard.sha256}
    there = [*out_dir.glob("train/*"), *out_dir.glob("validation/*"), *out_dir.glob("*.part")]
    for path in there:
        if path not in ours:
            path.unlink()


def _open(path: Path) -> pq.ParquetFile:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is not readable parquet ({str(error).splitlines()[0]}); delete the corpus folder and run again") from None


def _rows(path: Path) -> int:
    rows: int = _open(path).metadata.num_rows
    return rows


def _first(path: Path, column: str) -> str:
    return str(next(_open(path).iter_batches(batch_size=1, columns=[column])).column(0)[0].as_py())


def _columns(paths: list[Path], names: tuple[str, ...]) -> pa.Table:
    """The columns as large strings: taking rows from more than 2 GiB of plain ones overflows."""
    import pyarrow as pa

    wide = pa.schema([(name, pa.large_string()) for name in names])
    return pa.concat_tables([_open(path).read(columns=list(names)).cast(wide) for path in paths]).combine_chunks()


def _texts(file: pq.ParquetFile) -> Iterator[list[str]]:
    """The documents in batches of about `_ENCODE_BYTES`."""
    held: list[str] = []
    size = 0
    for batch in file.iter_batches(batch_size=64, columns=["text"]):
        texts: list[str] = batch.column(0).to_pylist()
        held += texts
        size += batch.nbytes
        if size >= _ENCODE_BYTES:
            yield held
            held, size = [], 0
    if held:
        yield held
