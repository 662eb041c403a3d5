"""Which copy is kept: by priority, by source, whatever the parts; and what is only reported."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from lmworks.corpus import prepare
from lmworks.corpus.engine.duplicates_pass import _held
from lmworks.corpus.report import Report
from lmworks.io.run_layout import corpus_files
from lmworks.recipe.schema.recipe import Recipe


def words(number: int, count: int = 120) -> list[str]:
    rng = random.Random(number)
    return [f"w{rng.randrange(10**6)}" for _ in range(count)]


def near(number: int, changed: int) -> str:
    """The text of this number with `changed` words replaced, one per five: its similarity is (116 - 5c) / (116 + 5c)."""
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
        made.append({"name": name, "kind": "jsonl", "path": str(path), "license": "mine"})
    return made


def run(folder: Path, sources: list[dict[str, Any]], **corpus: Any) -> tuple[Report, set[str]]:
    """The report, and the ids of the remaining documents."""
    corpus = {"sources": sources, "steps": [], "decontaminate": None, "validation_fraction": 0, **corpus}
    report = prepare(Recipe.model_validate({"name": "test", "corpus": corpus}), folder / "out")
    files = [path for paths in corpus_files(folder / "out", "train").values() for path in paths]
    return report, {identity for path in files for identity in pq.read_table(path)["id"].to_pylist()}


def reasons(report: Report) -> dict[str, int]:
    return {f"{source.name} {reason}": one.documents for source in report.sources for reason, one in source.dropped.items()}


def two_sources(folder: Path) -> list[dict[str, Any]]:
    """Each source has an equal text (0), a near-duplicate (1), and texts of its own (2, 3)."""
    return write(folder, {"web": [text(0), text(1), text(2)], "books": [text(0).upper(), near(1, 2), text(3)]})


def test_the_first_source_keeps_its_copy(tmp_path: Path) -> None:
    report, left = run(tmp_path, two_sources(tmp_path))
    assert left == {"web/0/0", "web/0/1", "web/0/2", "books/0/2"}
    assert reasons(report) == {"books duplicate": 1, "books near_duplicate": 1}


def test_priority_decides_which_copy_is_kept(tmp_path: Path) -> None:
    report, left = run(tmp_path, two_sources(tmp_path), dedup={"priority": ["books"]})
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
    web, books = two_sources(tmp_path)
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
    sources = [{**source, "fact_keys": ["url"]} for source in write(tmp_path, {"web": [*rows, {"text": text(4), "url": ""}]})]
    assert reasons(run(tmp_path, sources)[0]) == {}
    assert reasons(run(tmp_path, sources, dedup={"url": True})[0]) == {"web duplicate_url": 1}


@pytest.mark.parametrize("threshold", [0.6, 0.8])
def test_the_table_says_how_many_words_a_copy_may_change(tmp_path: Path, threshold: float) -> None:
    """A copy with a word changed a little less often than it says is dropped, with one a little more often it stays."""
    (line, *_) = run(tmp_path, write(tmp_path, {"web": [text(0)]}), dedup={"minhash": {"threshold": threshold}})[0].advice
    every = int(re.search(r"one word in (\d+) ", line)[1])  # type: ignore[index]

    def copy(step: int) -> str:
        return " ".join("changed" if place % step == step // 2 else word for place, word in enumerate(words(5, 3000)))

    for step, stays in ((every - 4, 2), (every + 4, 1)):
        sources = write(tmp_path, {"web": [copy(10**9), copy(step)]})
        assert len(run(tmp_path, sources, dedup={"minhash": {"threshold": threshold}})[1]) == stays, step
    web = run(tmp_path, [{**source, "domain": "web"} for source in write(tmp_path, {"web": [text(0)]})])[0].advice
    assert len(web) == 3 and "dedup.substring" in web[2]


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


def passages(folder: Path, **corpus: Any) -> tuple[Report, dict[str, str]]:
    """Documents in two sources that share passages of 60 words; returns the report, and the remaining texts by id."""
    shared, other = " ".join(words(100, 60)), " ".join(words(200, 60))
    web = [f"{text(0)}\n{shared}\n{text(1)}", f"{text(2)}\n{text(2)}", f"{shared}\nonly a little more", text(3)]
    books = [f"{text(4)}\n{other}", f"{other}\n{text(5)}\n{shared}"]
    report, _ = run(folder, write(folder, {"web": web, "books": books}), **corpus)
    files = [path for paths in corpus_files(folder / "out", "train").values() for path in paths]
    rows = [row for path in files for row in pq.read_table(path, columns=["id", "text"]).to_pylist()]
    return report, {row["id"]: row["text"] for row in rows}


def test_passages_that_stood_earlier_are_cut(tmp_path: Path) -> None:
    shared, other = " ".join(words(100, 60)), " ".join(words(200, 60))
    report, left = passages(tmp_path, dedup={"substring": {"min_words": 50}})
    assert left == {
        "web/0/0": f"{text(0)}\n{shared}\n{text(1)}",
        "web/0/1": text(2),
        "web/0/3": text(3),
        "books/0/0": f"{text(4)}\n{other}",
        "books/0/1": text(5),
    }
    assert reasons(report) == {"web repeated_passages": 1}
    for source in report.sources:
        gone = sum(one.bytes for one in source.dropped.values())
        edited = sum(passage.edited for passage in source.steps)
        assert source.came.bytes == gone - edited + source.train.bytes
        assert edited < -300


def test_priority_decides_which_passage_stays(tmp_path: Path) -> None:
    _, left = passages(tmp_path, dedup={"substring": {"min_words": 50}, "priority": ["books"]})
    assert left["books/0/1"] == f"{text(5)}\n{' '.join(words(100, 60))}"
    assert left["web/0/0"] == f"{text(0)}\n{text(1)}"


def test_passages_are_cut_alike_however_the_sources_are_cut(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = passages(tmp_path / "a", dedup={"substring": {"min_words": 50}})[1]
    report, parts = passages(tmp_path / "b", dedup={"substring": {"min_words": 50}}, part_bytes="1KB")
    assert report.sources[0].parts > 1
    assert sorted(whole.values()) == sorted(parts.values())


def test_without_the_option_nothing_is_cut(tmp_path: Path) -> None:
    assert passages(tmp_path)[1]["web/0/1"] == f"{text(2)}\n{text(2)}"
    again = passages(tmp_path, dedup={"substring": {"min_words": 50}})[1]
    assert again["web/0/1"] == text(2)
    assert passages(tmp_path)[1]["web/0/1"] == f"{text(2)}\n{text(2)}"


def test_texts_that_differ_in_symbols_only_are_no_copies(tmp_path: Path) -> None:
    rng = random.Random(3)
    names = enumerate(zip("abcdefgh", "ijklmnop", strict=True))
    lines = [f"    {name} = {name} {{}} {other} {{}} {number}" for number, (name, other) in names]
    body = "\n".join(lines)
    functions = [f"def f():\n{body.format(*(rng.choice('+-*/%&|^') for _ in range(16)))}\n    return a" for _ in range(40)]
    mazes = ["Find the way:\n" + "\n".join("".join(rng.choice("#. ") for _ in range(20)) for _ in range(8)) for _ in range(40)]
    smileys = ["How do you feel? " + "".join(rng.choice("😀😃😄😁😆😅🤣😂") for _ in range(30)) for _ in range(40)]
    report, left = run(tmp_path, write(tmp_path, {"code": functions, "mazes": mazes, "smileys": smileys}))
    assert len(left) == 120, reasons(report)


def test_prose_in_other_markup_is_a_copy(tmp_path: Path) -> None:
    plain = [" ".join(words(number)[:40]) + ".\n" + " ".join(words(number)[40:]) for number in range(5)]
    marked = [f"# **{one.replace('.', '!').replace(chr(10), chr(10) + '> * ')}**" for one in plain]
    report, left = run(tmp_path, write(tmp_path, {"plain": plain, "marked": [*marked, text(99)]}))
    assert len(left) == 6, reasons(report)


class _Rows:
    """Six documents of one source, the last of which is a variant of the first."""

    pieces = (SimpleNamespace(source=SimpleNamespace(name="web")),)
    originals = np.array([0, 1, 2, 3, 4, 0])
    kept = (np.array([(key, 10) for key in range(6)], dtype=[("key", np.uint64), ("bytes", np.int64)]),)

    def __len__(self) -> int:
        return 6

    def span(self, number: int) -> slice:
        return slice(0, 6)


def test_neither_copies_nor_variants_are_held_out() -> None:
    corpus = SimpleNamespace(validation_fraction=0.99, max_validation_bytes=1_000)
    job: Any = SimpleNamespace(recipe=SimpleNamespace(corpus=corpus), sources=[SimpleNamespace(name="web")])
    rows: Any = _Rows()
    copies = np.array([False, True, False, True, False, False])
    assert _held(job, rows, copies).tolist() == [True, False, True, False, False, False]  # one of the three stays to be trained on
