"""Where the documents of a corpus lie: SPLIT/OUTPUT/PART.parquet, with the columns of `COLUMNS`."""

from __future__ import annotations

from pathlib import Path

COLUMNS = ("id", "text", "source", "domain", "language", "origin", "facts")
"""All strings. `id` is SOURCE/PART/NUMBER, with .VARIANT behind it if a step made it of that document, `origin` the file and row that was
read, `facts` a JSON object of what else is known."""


def corpus_files(corpus_dir: Path, split: str) -> dict[str, list[Path]]:
    """The files of each output (a source, or a quality bucket of one) in `corpus_dir`/`split`, by name and part."""
    found: dict[str, list[Path]] = {}
    for path in sorted((Path(corpus_dir) / split).glob("[!.]*/[!.]*.parquet")):
        found.setdefault(path.parent.name, []).append(path)
    return found


def part_path(corpus_dir: Path, split: str, output: str, part: int) -> Path:
    """The file of one part of an output. Parts without a document have none."""
    return Path(corpus_dir) / split / output / f"{part:05d}.parquet"
