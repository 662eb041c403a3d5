"""Paths of the documents of a corpus: SPLIT/OUTPUT/PART.parquet, with the columns `COLUMNS`."""

from __future__ import annotations

from pathlib import Path

COLUMNS = ("id", "text", "source", "domain", "language", "origin", "facts")
"""All strings. `id` is SOURCE/PART/NUMBER, followed by .VARIANT for a variant; `origin` is the file and row that was read; `facts` is a
JSON object."""


def corpus_files(corpus_dir: Path, split: str) -> dict[str, list[Path]]:
    """The files of each output (a source, or a quality bucket of one) in `corpus_dir`/`split`, by name and part."""
    found: dict[str, list[Path]] = {}
    for path in sorted((Path(corpus_dir) / split).glob("[!.]*/[!.]*.parquet")):
        found.setdefault(path.parent.name, []).append(path)
    return found


def part_path(corpus_dir: Path, split: str, output: str, part: int) -> Path:
    """The file of one part of an output. A part without documents has no file."""
    return Path(corpus_dir) / split / output / f"{part:05d}.parquet"
