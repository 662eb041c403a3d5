"""A small corpus in which everything happens: real pages, planted copies, noise, boilerplate, broken rows, an evaluation text."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from lmworks.corpus import prepare
from lmworks.corpus.analysis.prepared import PreparedCorpus
from lmworks.corpus.contamination import Question
from lmworks.io.run_layout import corpus_files
from lmworks.recipe.schema.corpus import Corpus, Source
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.steps import Clean, Lines, Rules

COPIED = 7  # its text stands three more times in the source
QUESTION = "Which of the four winds carries the salt of the seventh sea over the glass hills before the first bell of autumn rings?"
FOOTER = "Printed by the office of weights and measures, third floor, on recycled paper."


def pages(count: int) -> list[str]:
    """Pages of the Python reference, all different."""
    from pydoc_data.topics import topics

    long = [topics[name].strip() for name in sorted(topics) if len(topics[name]) > 600]
    return list(dict.fromkeys(long))[:count]


def rows() -> list[str]:
    """Pages with planted duplicates, leaks and errors among them."""
    rng, found = random.Random(11), pages(40)
    noise = ["".join(rng.choice("qxzvkjw 0123456789") for _ in range(900)) for _ in range(6)]
    footed = [f"{page}\n{FOOTER}" for page in found[20:26]]
    return [*found, *[found[COPIED]] * 3, *noise, *footed, f"Riddles of the harbour, collected by the lamplighters.\n\n{QUESTION}"]


def write(path: Path, texts: Sequence[str]) -> Path:
    lines = [json.dumps({"text": text}) for text in texts]
    path.write_text("\n".join([*lines, '{"text": "broken', '{"text": null}']) + "\n", encoding="utf-8")
    return path


def source(path: Path, name: str = "pages") -> Source:
    return Source(name=name, kind="jsonl", path=str(path), domain="docs", license="PSF-2.0")


def recipe(path: Path, **corpus: Any) -> Recipe:
    code = Source(
        name="code", kind="stdlib", document_format="code", include="json/*.py", domain="code", language="code", license="PSF-2.0"
    )
    plain = {"sources": [source(path), code], "steps": [Clean(), Lines(within=False, across_documents=2), Rules()],
        "validation_fraction": 0.1}
    return Recipe(name="evidence", seed=3, corpus=Corpus(**{**plain, "part_bytes": "100kB", **corpus}))


def make(folder: Path, texts: Sequence[str] | None = None, **corpus: Any) -> PreparedCorpus:
    """Write the rows to `folder`/rows.jsonl and prepare the corpus in `folder`/corpus."""
    folder.mkdir(parents=True, exist_ok=True)
    path = write(folder / "rows.jsonl", rows() if texts is None else texts)
    prepare(recipe(path, **corpus), folder / "corpus", [Question("riddles/0", QUESTION, "")], folder)
    return PreparedCorpus(folder / "corpus")


def decisions(corpus: PreparedCorpus) -> dict[str, dict[str, Any]]:
    """All rows of the decisions, by id."""
    files = sorted((corpus.out / "decisions").rglob("*.parquet"))
    return {row["id"]: row for path in files for row in pq.read_table(path).to_pylist()}


def kept(corpus: PreparedCorpus, split: str = "train") -> dict[str, str]:
    """Texts of a split, by id."""
    paths = [path for some in corpus_files(corpus.out, split).values() for path in some]
    return {row["id"]: row["text"] for path in paths for row in pq.read_table(path, columns=["id", "text"]).to_pylist()}
