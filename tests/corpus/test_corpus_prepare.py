"""The whole stage on real text: counts add up, nothing leaks, the same bytes come out after a kill, and bad input is told in one line."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from lmworks.corpus import prepare, table
from lmworks.corpus.contamination import Question
from lmworks.corpus.engine.step_runner import SAMPLES
from lmworks.corpus.report import Report
from lmworks.corpus.units import ngrams, units
from lmworks.errors import UserError
from lmworks.io.run_layout import COLUMNS, corpus_files
from lmworks.recipe.schema.corpus import Corpus, Dedup, Minhash, Source
from lmworks.recipe.schema.recipe import Recipe

DOCS = Source(name="docs", kind="stdlib", document_format="docs", include="email/*.py", domain="docs", language="en", license="PSF-2.0")
CODE = Source(name="code", kind="stdlib", document_format="code", include="email/*.py", domain="code", language="code", license="PSF-2.0")


def recipe(*sources: Source, **corpus: Any) -> Recipe:
    return Recipe(name="test", corpus=Corpus(sources=list(sources), **{"validation_fraction": 0.1, **corpus}))


def mine(path: Path, **more: Any) -> Source:
    return Source(**{"name": "mine", "kind": "jsonl", "path": str(path), "license": "test", "rules": "none", **more})


def write_rows(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    return path


def documents(out: Path, split: str, name: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in corpus_files(out, split).get(name, []):
        rows = pq.read_table(path)
        assert rows.column_names == list(COLUMNS)
        found |= zip(rows["id"].to_pylist(), rows["text"].to_pylist(), strict=True)
    return found


def fingerprint(out: Path) -> str:
    """Hash of the corpus without staged files, which may differ."""
    paths = sorted(path for path in out.rglob("*") if path.is_file() and "staging" not in path.parts)
    return hashlib.sha256(b"".join(str(path.relative_to(out)).encode() + path.read_bytes() for path in paths)).hexdigest()


def numbered(count: int, words: int = 60) -> list[str]:
    """Documents without a common run of words."""
    return [" ".join(f"word{place}of{number}" for place in range(words)) for number in range(count)]


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    out = tmp_path_factory.mktemp("stdlib") / "corpus"
    return out, prepare(recipe(DOCS, CODE), out)


def test_every_document_is_accounted_for(stdlib: tuple[Path, Report]) -> None:
    out, report = stdlib
    assert json.loads((out / "report.json").read_text()) == report.as_json()
    made = ["decisions", "manifest.json", "quarantine.jsonl", "rejected.jsonl", "report.json", "staging", "train", "validation"]
    assert sorted(path.name for path in out.iterdir()) == made
    for source in report.sources:
        lost = sum(count.documents for count in [*source.quarantined.values(), *source.dropped.values()])
        assert source.came.documents == source.not_drawn.documents + lost + source.train.documents + source.validation.documents
        for split, count in (("train", source.train), ("validation", source.validation)):
            found = documents(out, split, source.name)
            assert len(found) == count.documents > 0
            assert sum(len(text.encode()) for text in found.values()) == count.bytes
    assert report.sources[1].license == "PSF-2.0"


def test_what_was_rejected_can_be_looked_at(stdlib: tuple[Path, Report]) -> None:
    out, report = stdlib
    rows = [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]
    for source in report.sources:
        for reason, count in source.dropped.items():
            shown = [row for row in rows if (row["source"], row["reason"]) == (source.name, reason)]
            assert len(shown) == min(count.documents, SAMPLES)
            assert all(row["id"].startswith(f"{source.name}/") and row["text"] and row["origin"] for row in shown)


def test_no_held_out_run_of_13_words_is_left_in_train(stdlib: tuple[Path, Report]) -> None:
    out, report = stdlib
    assert sum(source.dropped["contaminated"].documents for source in report.sources if "contaminated" in source.dropped) > 0
    assert not report.widespread, "no run is so frequent here that it is boilerplate"

    def grams(split: str) -> set[int]:
        texts = [text for name in ("docs", "code") for text in documents(out, split, name).values()]
        return {gram for text in texts for gram in ngrams(units([text]).hashes, 13).tolist()}

    assert not grams("validation") & grams("train")


def test_contamination_names_the_passage(stdlib: tuple[Path, Report]) -> None:
    _, report = stdlib
    row = report.contamination[0]
    assert row["id"].split("/")[0] in ("docs", "code")
    assert row["against"].split("/")[0] in ("docs", "code")
    assert len(row["passage"].split()) > 5


def test_the_same_bytes_each_time(stdlib: tuple[Path, Report], tmp_path: Path) -> None:
    prepare(recipe(DOCS, CODE), tmp_path / "again")
    assert fingerprint(tmp_path / "again") == fingerprint(stdlib[0])


_RUN = """
import sys
from pathlib import Path
from lmworks.corpus import prepare
from lmworks.recipe.schema.recipe import Recipe
print("begun", flush=True)
prepare(Recipe.model_validate_json(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
"""


@pytest.mark.slow  # tests/corpus/test_corpus_engine.py kills a job with processes of its own
def test_killed_at_any_moment_and_typed_again_gives_the_same(stdlib: tuple[Path, Report], tmp_path: Path) -> None:
    out = tmp_path / "killed"
    (tmp_path / "recipe.json").write_text(recipe(DOCS, CODE).model_dump_json())
    seen = set()
    for files in (1, 6, 12):
        process = subprocess.Popen([sys.executable, "-c", _RUN, str(tmp_path / "recipe.json"), str(out)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        while process.poll() is None and sum(path.is_file() for path in out.rglob("*")) < files:
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        seen |= {str(path.relative_to(out)) for path in out.rglob("*")} if out.exists() else set()
    assert any(name.startswith("staging/") for name in seen), "one kill fell into the work"
    prepare(recipe(DOCS, CODE), out)
    assert fingerprint(out) == fingerprint(stdlib[0])


def test_nothing_of_an_earlier_recipe_is_left(tmp_path: Path) -> None:
    old = mine(write_rows(tmp_path / "a.jsonl", numbered(20)), name="old")
    prepare(recipe(old), tmp_path / "out")
    (tmp_path / "out" / "train" / "old" / ".00000.parquet.1.part").write_bytes(b"left by a killed process")
    (tmp_path / "out" / "validation" / "old" / "00007.parquet").write_bytes(b"of a part that is gone")
    prepare(recipe(old.model_copy(update={"name": "new"})), tmp_path / "out")
    left = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.p*")}
    kept = {name for name in left if not name.startswith("staging")}
    assert kept == {f"{folder}/new/00000.parquet" for folder in ("train", "validation", "decisions")}
    assert not [name for name in left if "old" in name]


def test_another_seed_holds_out_other_documents(stdlib: tuple[Path, Report], tmp_path: Path) -> None:
    prepare(recipe(DOCS, CODE).model_copy(update={"seed": 2}), tmp_path / "seed")
    assert set(documents(tmp_path / "seed", "validation", "docs")) != set(documents(stdlib[0], "validation", "docs"))


def test_duplicates_are_dropped_across_sources_and_the_first_is_kept(tmp_path: Path) -> None:
    texts = numbered(20, 200)
    edited = texts[3].replace("word100of3", "another")
    first = mine(write_rows(tmp_path / "a.jsonl", texts), name="first")
    second = mine(write_rows(tmp_path / "b.jsonl", [texts[0].upper().replace(" ", "\n"), edited, *numbered(40, 200)[20:]]), name="second")
    report = prepare(recipe(first, second), tmp_path / "out")
    assert report.sources[0].dropped == {}
    assert {reason: count.documents for reason, count in report.sources[1].dropped.items()} == {"duplicate": 1, "near_duplicate": 1}
    rows = {row["reason"]: row for row in map(json.loads, (tmp_path / "out" / "rejected.jsonl").read_text().splitlines())}
    assert (rows["duplicate"]["id"], rows["duplicate"]["copy_of"]) == ("second/0/0", "first/0/0")
    assert (rows["near_duplicate"]["id"], rows["near_duplicate"]["copy_of"]) == ("second/0/1", "first/0/3")
    without = prepare(recipe(first, second, dedup=Dedup(exact=False, minhash=None), decontaminate=None), tmp_path / "without")
    assert without.sources[1].dropped == {}


def test_held_out_documents_have_no_near_duplicate_in_train(tmp_path: Path) -> None:
    texts = numbered(30, 200)
    copies = [text.replace(f"word7of{number}", "x") for number, text in enumerate(texts)]
    prepare(recipe(mine(write_rows(tmp_path / "a.jsonl", texts + copies)), validation_fraction=0.3), tmp_path / "out")
    both = [int(name.split("/")[2]) % 30 for split in ("train", "validation") for name in documents(tmp_path / "out", split, "mine")]
    assert sorted(both) == list(range(30))


def test_evaluation_texts_are_kept_out(tmp_path: Path) -> None:
    question = "If three trains leave the station at noon and each of them travels sixty miles an hour, when do they meet?"
    texts = numbered(30)
    texts[4] += " " + question
    asked = [Question("trains/0", question), Question("trains/1", "Why?", "Yes."), Question("trains/2", "Who was the first?", "Nobody")]
    report = prepare(recipe(mine(write_rows(tmp_path / "a.jsonl", texts)), validation_fraction=0), tmp_path / "out", iter(asked))
    assert report.contamination == [{"id": "mine/0/4", "against": "trains/0", "passage": question.rstrip("?")}]
    assert report.protected == {"trains": {"items": 2, "trivial": 1, "found": 1, "documents": 1}}
    assert "mine/0/4" not in documents(tmp_path / "out", "train", "mine")


def test_max_bytes_draws_evenly_and_says_so(tmp_path: Path) -> None:
    texts = numbered(1000, 20)
    path = write_rows(tmp_path / "a.jsonl", texts)
    size = len(texts[0].encode())
    report = prepare(recipe(mine(path, max_bytes="50KB")), tmp_path / "out")
    (source,) = report.sources
    drawn = [int(name.split("/")[2]) for split in ("train", "validation") for name in documents(tmp_path / "out", split, "mine")]
    assert 50_000 - 2 * size < source.train.bytes + source.validation.bytes <= 50_000
    assert source.not_drawn.documents == 1000 - len(drawn)
    quarters = [sum(low <= number < low + 250 for number in drawn) for low in range(0, 1000, 250)]
    assert min(quarters) > len(drawn) / 8


def test_validation_stays_within_its_bytes_and_passes_over_giants(tmp_path: Path) -> None:
    texts = [*numbered(40, 30), " ".join(f"giant{place}" for place in range(50_000))]
    report = prepare(
        recipe(mine(write_rows(tmp_path / "a.jsonl", texts)), validation_fraction=0.4, max_validation_bytes="3KB"), tmp_path / "out"
    )
    (source,) = report.sources
    assert 0 < source.validation.bytes <= 3000
    assert source.train.documents + source.validation.documents == 41


def test_bad_rows_never_stop_the_job(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as out:
        out.write(b'{"text": "cut\n{"text": "\xff"}\n{"text": null}\n{"text": 5}\n{"text": "  "}\n{"text": "half \\ud83d"}\n')
        out.write(b'{"text": "')
        million = random.Random(0).randbytes(500_000).hex().encode()  # what shrinks far more than text does is a bomb
        for _ in range(70):
            out.write(million)
        out.write(b'"}\n')
        out.write("".join(json.dumps({"text": text}) + "\n" for text in numbered(20)).encode())
    report = prepare(recipe(mine(path)), tmp_path / "out")
    (source,) = report.sources
    assert {reason: count.documents for reason, count in source.quarantined.items()} == {
        "broken_json": 1, "bad_utf8": 2, "null_text": 1, "wrong_type": 1, "empty_text": 1, "enormous": 1}  # fmt: skip
    assert source.train.documents + source.validation.documents == 20
    rows = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()]
    assert {row["reason"] for row in rows} == set(source.quarantined)
    assert next(row for row in rows if row["reason"] == "broken_json")["origin"] == f"{path}:1"


def test_a_missing_source_stops_the_run_unless_optional(tmp_path: Path) -> None:
    gone = mine(tmp_path / "nowhere", name="gone", kind="text")
    with pytest.raises(
        UserError, match=f"source gone: no files at {tmp_path}/nowhere; check the path; or set optional: true to continue without it"
    ):
        prepare(recipe(gone), tmp_path / "out")
    good = mine(write_rows(tmp_path / "a.jsonl", numbered(20)))
    report = prepare(recipe(gone.model_copy(update={"optional": True}), good), tmp_path / "out")
    assert list(report.missing) == ["gone"]
    assert [source.name for source in report.sources] == ["mine"]
    with pytest.raises(UserError, match="none of the 1 corpus sources is available: source gone: no files"):
        prepare(recipe(gone.model_copy(update={"optional": True})), tmp_path / "out")


def test_an_optional_source_of_which_nothing_is_left_is_noted(tmp_path: Path) -> None:
    texts = numbered(20)
    copies = mine(write_rows(tmp_path / "b.jsonl", texts), name="copies")
    first = mine(write_rows(tmp_path / "a.jsonl", texts))
    with pytest.raises(UserError, match=r"source copies \(.*b.jsonl\): none of its 20 documents is left .*set optional: true"):
        prepare(recipe(first, copies), tmp_path / "out")
    report = prepare(recipe(first, copies.model_copy(update={"optional": True})), tmp_path / "out")
    assert [source.name for source in report.sources] == ["mine"]
    assert report.missing == {"copies": "none of its 20 documents is left to train on (duplicate 20; copies of documents in mine 20)"}
    assert not list((tmp_path / "out" / "train").glob("copies/*"))


def test_an_empty_source_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match=r"source mine \(.*a.jsonl\): has no documents; check its path, include and document_format"):
        prepare(recipe(mine(tmp_path / "a.jsonl")), tmp_path / "out")


def test_a_source_with_nothing_usable_says_why(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": 1}\n{"text": "too short"}\n')
    with pytest.raises(
        UserError, match=r"source mine .*: none of its 2 documents is usable \(wrong_type 1, word_count 1\); see rejected.jsonl"
    ):
        prepare(recipe(mine(tmp_path / "a.jsonl", rules="prose")), tmp_path / "out")
    assert "too short" in (tmp_path / "out" / "rejected.jsonl").read_text()


def test_a_book_that_is_dropped_for_its_length_is_told_so(tmp_path: Path) -> None:
    draw = random.Random(0)
    lines = (" ".join(f"{draw.choice(('the', 'and', 'sea', 'king'))} {draw.randrange(9**6):x}" for _ in range(5)) for _ in range(10_100))
    (tmp_path / "book.txt").write_text("\n".join(lines))
    advice = r"too_many_words 1\); by default each file is one document, .* such as a book: set rules: other for this source"
    with pytest.raises(UserError, match=advice):
        prepare(recipe(mine(tmp_path / "book.txt", kind="text", rules=None, domain="prose")), tmp_path / "out")
    report = prepare(recipe(mine(tmp_path / "book.txt", kind="text", rules="other")), tmp_path / "out")
    assert report.sources[0].train.documents == 1
    with pytest.raises(UserError, match=r"enormous 1\); .* corpus.max_document_bytes bytes: raise that"):
        prepare(recipe(mine(tmp_path / "book.txt", kind="text"), max_document_bytes="100 kB"), tmp_path / "out")


def test_a_recipe_without_sources_or_with_two_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the recipe has no corpus.sources: add one"):
        prepare(recipe(), tmp_path / "out")
    with pytest.raises(UserError, match="two sources called 'docs'"):
        prepare(recipe(DOCS, DOCS), tmp_path / "out")


def test_the_printed_table(stdlib: tuple[Path, Report]) -> None:
    console = Console(width=140, record=True, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(table(stdlib[1]))
    text = console.export_text()
    assert "docs en" in text
    assert "PSF-2.0" in text
    assert "contaminated" in text


def test_minhash_options_are_used(tmp_path: Path) -> None:
    texts = numbered(10, 100)
    edited = texts[0].replace("word50of0", "x")  # five of 96 shingles change: similarity 0.91
    path = write_rows(tmp_path / "a.jsonl", [*texts, edited])
    strict = prepare(recipe(mine(path), dedup=Dedup(minhash=Minhash(threshold=0.99)), validation_fraction=0), tmp_path / "strict")
    lax = prepare(recipe(mine(path), dedup=Dedup(minhash=Minhash(threshold=0.7)), validation_fraction=0), tmp_path / "lax")
    assert (strict.sources[0].train.documents, lax.sources[0].train.documents) == (11, 10)


def test_leaks_are_told_one_by_one_and_boilerplate_of_held_out_text_in_one_line() -> None:
    passed = [{"let_pass": True, "against": f"chats/{row}", "documents": 20 + row, "passage": f"topic {row}"} for row in range(17)]
    leaks = [{"let_pass": False, "against": f"mine/{row}", "documents": 12, "passage": f"question {row}"} for row in range(2)]
    console = Console(width=200)
    with console.capture() as said:
        console.print(table(Report(widespread=[*passed, *leaks], exempt=80)))
    lines = [line for line in said.get().splitlines() if "question" in line or "topic" in line]
    assert len(lines) == 3
    assert all(f"mine/{row}" in lines[row] and f'a leak, however frequent: "question {row}"' in lines[row] for row in range(2))
    assert "80 passages of held-out text were exempt as boilerplate" in lines[2] and '"topic 16"' in lines[2] and " 36 " in lines[2]
