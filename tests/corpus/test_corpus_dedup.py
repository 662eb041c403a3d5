"""Which copy is kept: by priority, by source, whatever the parts; and what is only reported."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from lmworks.corpus import prepare
from lmworks.corpus.report import Report
from lmworks.documents import corpus_files
from lmworks.recipe.recipe import Recipe


def words(number: int, count: int = 120) -> list[str]:
    rng = random.Random(number)
    return [f"w{rng.randrange(10**6)}" for _ in range(count)]


def near(number: int, changed: int) -> str:
    """The text of this number, of which one word in a row of five is another: its likeness is (116 - 5c) / (116 + 5c)."""
    text = words(number)
    for place in range(changed):
        text[10 + 10 * place] = f"other{place}"
    return " ".join(text)


def text(number: int) -> str:
    return " ".join(words(number))


def write(folder: Path, sources: dict[str, list[Any]]) -> list[dict[str, Any]]:
    made = []
    for name, rows in sources.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row if isinstance(row, dict) else {"text": row}) + "\n" for row in rows))
        made.append({"name": name, "kind": "jsonl", "path": str(path), "licence": "mine"})
    return made


def run(folder: Path, sources: list[dict[str, Any]], **corpus: Any) -> tuple[Report, set[str]]:
    """The report, and the ids of what is left."""
    corpus = {"sources": sources, "steps": [], "decontaminate": None, "validation_fraction": 0, **corpus}
    report = prepare(Recipe.model_validate({"name": "test", "corpus": corpus}), folder / "out")
    files = [path for paths in corpus_files(folder / "out", "train").values() for path in paths]
    return report, {identity for path in files for identity in pq.read_table(path)["id"].to_pylist()}


def reasons(report: Report) -> dict[str, int]:
    return {f"{source.name} {reason}": one.documents for source in report.sources for reason, one in source.dropped.items()}


def two(folder: Path) -> list[dict[str, Any]]:
    """In both: an equal text (0), a near one (1), and each its own (2, 3)."""
    return write(folder, {"web": [text(0), text(1), text(2)], "books": [text(0).upper(), near(1, 2), text(3)]})


def test_the_first_source_keeps_its_copy(tmp_path: Path) -> None:
    report, left = run(tmp_path, two(tmp_path))
    assert left == {"web/0/0", "web/0/1", "web/0/2", "books/0/2"}
    assert reasons(report) == {"books duplicate": 1, "books near_duplicate": 1}


def test_priority_decides_which_copy_is_kept(tmp_path: Path) -> None:
    report, left = run(tmp_path, two(tmp_path), dedup={"priority": ["books"]})
    assert left == {"web/0/2", "books/0/0", "books/0/1", "books/0/2"}
    assert reasons(report) == {"web duplicate": 1, "web near_duplicate": 1}


@pytest.mark.parametrize(
    ("strategy", "lost"),
    [
        ({"exact": False, "minhash": False}, {}),
        ({"minhash": False}, {"books duplicate": 1}),
        ({"exact": False}, {"books near_duplicate": 2}),
        ({"threshold": 0.95}, {"books duplicate": 1}),
    ],
)
def test_each_source_says_what_may_go(tmp_path: Path, strategy: dict[str, Any], lost: dict[str, int]) -> None:
    web, books = two(tmp_path)
    report, _ = run(tmp_path, [web, {**books, "dedup": strategy}])
    assert reasons(report) == lost


def test_a_lower_threshold_of_one_source_is_searched_for(tmp_path: Path) -> None:
    rows = {"web": [text(number) for number in range(40)], "books": [text(99), *(near(number, 6) for number in range(40))]}
    web, books = write(tmp_path, rows)
    assert reasons(run(tmp_path, [web, books])[0]) == {}
    found = reasons(run(tmp_path, [web, {**books, "dedup": {"threshold": 0.5}}])[0])  # they are alike by 0.59
    assert found == {"books near_duplicate": 40}


def test_one_address_is_one_document(tmp_path: Path) -> None:
    rows = [{"text": text(number), "url": url} for number, url in enumerate(["https://www.a.org/x/?utm_source=y", "http://a.org/x", ""])]
    sources = [{**source, "keep": ["url"]} for source in write(tmp_path, {"web": [*rows, {"text": text(4), "url": ""}]})]
    assert reasons(run(tmp_path, sources)[0]) == {}
    assert reasons(run(tmp_path, sources, dedup={"url": True})[0]) == {"web duplicate_url": 1}


def test_checking_drops_nothing_and_says_what_would_go(tmp_path: Path) -> None:
    report, left = run(tmp_path, two(tmp_path), dedup={"check_only": True})
    assert len(left) == 6
    assert {reason: one.documents for reason, one in report.would_drop.items()} == {"duplicate": 1, "near_duplicate": 1}


def test_the_cut_into_parts_makes_no_difference(tmp_path: Path) -> None:
    rng = random.Random(5)
    rows = [near(rng.randrange(60), rng.randrange(5)) for _ in range(300)]
    kept = []
    for size in ("1GB", "20KB"):
        sources = write(tmp_path, {"web": rows[:200], "books": rows[200:]})
        report, _ = run(tmp_path, sources, part_bytes=size)
        files = corpus_files(tmp_path / "out", "train")
        kept.append({name: [row for path in paths for row in pq.read_table(path)["text"].to_pylist()] for name, paths in files.items()})
    assert report.sources[0].parts > 5
    assert kept[0] == kept[1]
    assert 50 < len(kept[0]["web"]) + len(kept[0]["books"]) < 150


def test_many_copies_of_one_text_are_one(tmp_path: Path) -> None:
    report, left = run(tmp_path, write(tmp_path, {"web": [text(1)] * 300 + [near(1, 1)] * 300 + [text(2)]}))
    assert left == {"web/0/0", "web/0/600"}
    assert reasons(report) == {"web duplicate": 598, "web near_duplicate": 1}
