"""Shards of made-up tokens: each document is counted up from a start of its own, so that any stretch tells where it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lmworks.io.files import sha256_file
from lmworks.shards.indexed import ENDING, IndexedWriter, fingerprints, with_ending
from lmworks.shards.manifest import MANIFEST, TOKEN_BYTES, Manifest, Shard, SourceShards, Split

VOCABULARY = 100_000


def write_token_shards(folder: Path, sources: Mapping[str, Sequence[Sequence[int]]]) -> Manifest:
    """`sources` gives the lengths of the documents of each shard of each source."""
    np.save(folder / TOKEN_BYTES, np.ones(VOCABULARY, np.int32))
    made, at = [], 0
    for source, lengths in sources.items():
        shards = []
        for number, documents in enumerate(lengths):
            name = f"train/{source}-{number:05d}"
            with IndexedWriter(folder / name, np.dtype("<i4")) as writer:
                for length in documents:
                    writer.add((at + np.arange(length)) % VOCABULARY)
                    at += length
            _, sums = fingerprints(with_ending(folder / name, ".bin"))
            with_ending(folder / name, ENDING).write_bytes(sums.tobytes())
            paths = {ending: with_ending(folder / name, ending) for ending in (".bin", ".idx", ENDING)}
            shards.append(
                Shard(
                    prefix=name, tokens=writer.tokens, documents=len(documents),
                    sha256={ending: sha256_file(path) for ending, path in paths.items()},
                    size={ending: path.stat().st_size for ending, path in paths.items()},
                )
            )
        tokens, documents = sum(shard.tokens for shard in shards), sum(shard.documents for shard in shards)
        split = Split(tokens=tokens, bytes=tokens, documents=documents, inputs=source, shards=tuple(shards))
        made.append(SourceShards(name=source, domain=source, train=split))
    manifest = Manifest(
        seed=1, vocab_size=VOCABULARY, dtype="int32", tokenizer_sha256="0" * 64, sources=tuple(made),
        token_bytes_sha256=sha256_file(folder / TOKEN_BYTES),
    )
    manifest.save(folder / MANIFEST)
    return manifest
