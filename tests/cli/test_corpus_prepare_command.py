"""`lmworks corpus prepare` as a user meets it: a recipe without a model, the gate's three answers, a dry run of deduplication."""

from __future__ import annotations

import gzip
import json
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from command import Lmworks

from lmworks.io.run_layout import corpus_files

QUESTION = "Which of the four winds carries the salt of the seventh sea over the glass hills before the first bell of autumn rings?"
PROSE = (
    "The committee met on the first of May and heard what the farmers of the valley had to say. Nobody expected that the river would rise "
    "again so soon after the long rains of that spring. With great patience they repaired the old bridge, stone by stone, before the "
    "harvest came in. It is said that children still find coins in the mud where the market once used to be."
)
Write = Callable[..., Path]


def words(seed: int, count: int = 120) -> str:
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(10**6)}" for _ in range(count))


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A recipe of a corpus and nothing else, and its one source."""

    def make(texts: list[str], **more: Any) -> Path:
        (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        source = {"name": "mine", "kind": "jsonl", "path": f"{tmp_path}/texts.jsonl", "license": "mine", "domain": "prose"}
        corpus = {"sources": [source], "steps": [{"step": "rules"}], "validation_fraction": 0, **more.pop("corpus", {})}
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump({"name": "mine", "run_dir": f"{tmp_path}/run", "corpus": corpus, **more}))
        return path

    return make


def kept(run: Path) -> list[str]:
    paths = [path for found in corpus_files(run / "corpus", "train").values() for path in found]
    return sorted(identity for path in paths for identity in pq.read_table(path)["id"].to_pylist())


def test_no_model_is_needed_and_what_rules_drop_is_told_with_value_and_limit(lmworks: Lmworks, write: Write, tmp_path: Path) -> None:
    recipe = write([PROSE, *(f"Too short {number}." for number in range(3))])
    told = lmworks("corpus", "prepare", recipe)
    assert told.code == 0, told.err
    assert "of 4 dropped by the rule word_count" in told.out
    drawn = json.loads(lmworks("corpus", "sample", recipe, "--reason", "word_count", "--json").out)
    assert [one["detail"] for one in drawn] == ["3, at least 50"] * 3
    assert "dropped: word_count (3, at least 50)" in lmworks("corpus", "trace", tmp_path / "run", "mine/0/1").out
    recipe.write_text(recipe.read_text() + "model: {preset: glm-tiny}\n")
    assert "done before" in lmworks("corpus", "prepare", recipe).out, "a model makes no other corpus"


@pytest.fixture
def leaky(write: Write, tmp_path: Path) -> Callable[[str], Path]:
    """A recipe whose second document holds a question that is asked."""

    def make(gate: str) -> Path:
        (tmp_path / "test.jsonl").write_text(json.dumps({"q": QUESTION, "a": "none"}) + "\n")
        protect = [{"name": "riddles", "path": f"{tmp_path}/test.jsonl", "question": "q", "answer": "a"}]
        corpus = {"steps": [], "decontaminate": {"action": gate}}
        return write([words(1), f"{words(2)}\n{QUESTION}\n{words(3)}", words(4)], corpus=corpus, evaluate={"protect": protect})

    return make


def test_the_gate_drops_what_is_asked(lmworks: Lmworks, leaky: Callable[[str], Path], tmp_path: Path) -> None:
    told = lmworks("corpus", "prepare", leaky("drop"))
    assert told.code == 0 and kept(tmp_path / "run") == ["mine/0/0", "mine/0/2"], told.err
    report = json.loads((tmp_path / "run/corpus/report.json").read_text())
    assert report["protected"]["riddles"] == {"items": 1, "trivial": 0, "found": 1, "documents": 1}


def test_a_gate_that_reports_names_the_leak_and_keeps_it(lmworks: Lmworks, leaky: Callable[[str], Path], tmp_path: Path) -> None:
    told = lmworks("corpus", "prepare", leaky("report"))
    assert told.code == 0 and kept(tmp_path / "run") == ["mine/0/0", "mine/0/1", "mine/0/2"], told.err
    report = json.loads((tmp_path / "run/corpus/report.json").read_text())
    (leak,) = report["contamination"]
    assert leak["id"] == "mine/0/1" and leak["against"].startswith("riddles") and QUESTION[:30] in leak["passage"]
    assert "kept, but contains protected text" in lmworks("corpus", "trace", tmp_path / "run", "mine/0/1").out


def test_a_gate_that_fails_stops_the_command_and_names_the_leak(lmworks: Lmworks, leaky: Callable[[str], Path], tmp_path: Path) -> None:
    recipe = leaky("fail")
    for _ in range(2):  # a second try finds it again
        error = lmworks("corpus", "prepare", recipe).error
        assert "1 training documents contain protected text, the first mine/0/1 that of riddles" in error
        assert "set corpus.decontaminate.action to drop" in error
        assert not (tmp_path / "run/corpus/report.json").exists()
    assert lmworks("corpus", "prepare", recipe, "--set", "corpus.decontaminate.action=drop").code == 0
    assert kept(tmp_path / "run") == ["mine/0/0", "mine/0/2"]


def test_a_dry_run_of_deduplication_says_what_prepare_will_drop_and_writes_nothing(lmworks: Lmworks, write: Write, tmp_path: Path) -> None:
    base, passage = words(1), words(9, 60)
    near = base.replace(base.split()[50], "another")
    dedup = {"substring": {"min_words": 50}}
    recipe = write([base, base.upper(), near, f"{words(2)} {passage}", f"{words(3)} {passage}"], corpus={"steps": [], "dedup": dedup})
    before = sorted(tmp_path.rglob("*"))
    found = json.loads(lmworks("corpus", "prepare", recipe, "--dedup-dry-run", "--json").out)
    assert sorted(tmp_path.rglob("*")) == before
    assert found[0]["came"]["documents"] == 5
    dropped = {method: one["documents"] for method, one in found[0]["dropped"].items()}
    assert dropped == {"duplicate": 1, "near_duplicate": 1, "passages_cut": 1}
    assert found[0]["dropped"]["passages_cut"]["bytes"] >= len(passage)
    example = found[0]["examples"]["near_duplicate"][0]
    assert (example["id"], example["copy_of"]) == ("mine/0/2", "mine/0/0") and example["copied_text"] == base[:400]
    told = lmworks("corpus", "prepare", recipe, "--dedup-dry-run").out
    assert "mine/0/2  near duplicate of mine/0/0" in told and "passages cut" in told
    assert lmworks("corpus", "prepare", recipe, "--json").error.startswith("--json needs --dedup-dry-run")
    assert "read" in lmworks("corpus", "prepare", recipe, "--dry-run").out and sorted(tmp_path.rglob("*")) == before
    assert lmworks("corpus", "prepare", recipe).code == 0
    assert kept(tmp_path / "run") == ["mine/0/0", "mine/0/3", "mine/0/4"], "it drops what the dry run has said"


def test_a_source_of_duplicates_is_named_with_what_removed_its_documents(lmworks: Lmworks, write: Write, tmp_path: Path) -> None:
    """And what is said helps: with the priority that it names, the copies of that source are kept."""
    texts = [words(seed) for seed in range(6)]
    recipe = write(texts, corpus={"steps": []})
    tree = yaml.safe_load(recipe.read_text())
    (tmp_path / "again.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, " "]))
    tree["corpus"]["sources"].append(tree["corpus"]["sources"][0] | {"name": "again", "path": f"{tmp_path}/again.jsonl"})
    recipe.write_text(yaml.safe_dump(tree))
    error = lmworks("corpus", "prepare", recipe).error
    assert f"source again ({tmp_path}/again.jsonl): none of its 7 documents is left to train on (" in error
    assert "duplicate 6" in error and "empty text 1" in error and "copies of documents in mine 6" in error
    assert "corpus.dedup.priority: [again]" in error and "optional: true" in error and "rejected.jsonl" in error
    tree["corpus"]["dedup"] = {"priority": ["again"]}
    tree["corpus"]["sources"][0]["optional"] = True
    recipe.write_text(yaml.safe_dump(tree))
    done = lmworks("corpus", "prepare", recipe)
    assert done.code == 0, done.err
    assert "copies of documents in again 6" in " ".join(done.out.split())


def test_a_folder_of_text_is_read_by_ending_and_the_rest_is_counted_and_named(lmworks: Lmworks, write: Write, tmp_path: Path) -> None:
    """Neither Markdown nor a page is text; capital letters and compression change nothing; `include` reads what it names."""
    recipe, folder = write([]), tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text(words(1))
    (folder / "deep" / "B.TXT").write_text(words(2))
    (folder / "c.Txt.gz").write_bytes(gzip.compress(words(3).encode()))
    others = ("notes.md", "page.HTML", "rows.jsonl", "deep/README", "photo.png")
    for number, name in enumerate(others):
        (folder / name).write_text(words(10 + number))
    with zipfile.ZipFile(folder / "more.zip", "w") as archive:
        archive.writestr("d.txt", words(4))
        archive.writestr("e.md", words(5))
    tree = yaml.safe_load(recipe.read_text())
    first = tree["corpus"]["sources"][0]

    def prepared(**source: Any) -> tuple[str, list[str]]:
        tree["corpus"] |= {"steps": [], "sources": [first | {"kind": "text", "path": str(folder), **source}]}
        recipe.write_text(yaml.safe_dump(tree))
        done = lmworks("corpus", "prepare", recipe)
        assert done.code == 0, done.err
        paths = [path for found in corpus_files(tmp_path / "run" / "corpus", "train").values() for path in found]
        origins = sorted(Path(origin).name for path in paths for origin in pq.read_table(path)["origin"].to_pylist())
        return " ".join(done.out.split()), origins

    said, origins = prepared()
    assert origins == ["B.TXT", "a.txt", "c.Txt.gz", "d.txt"]
    report = json.loads((tmp_path / "run" / "corpus" / "report.json").read_text())
    about = report["passed_over"]["mine"]
    assert about.startswith("5 files with other endings not read (") and "in a folder kind text reads .txt, .text" in about
    assert all(f"1 {ending}" in about for ending in (".md", ".html", ".jsonl", ".png", "no ending")), about
    assert "passed over" in said and "5 files" in said and report["sources"][0]["quarantined"]["other_ending"]["documents"] == 1
    assert "5 files with other endings" in " ".join(lmworks("plan", recipe, "--set", "size=1M").out.split())
    assert prepared(path=f"{folder}/*")[1] == ["a.txt", "c.Txt.gz", "d.txt"], "a pattern without an ending is a folder"
    assert prepared(path=f"{folder}/*.md")[1] == ["notes.md"], "what is named is read"
    assert prepared(include="*.md")[1] == ["e.md", "notes.md"], "also inside an archive, whatever that is called"
    assert prepared(kind="markdown")[1] == ["e.md", "notes.md"]
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "notes.md").write_text(words(1))
    tree["corpus"]["sources"][0] |= {"path": str(tmp_path / "only"), "kind": "text"}
    recipe.write_text(yaml.safe_dump(tree))
    error = lmworks("corpus", "prepare", recipe).error
    assert "no files at" in error and "1 file with other endings not read (1 .md" in error


def test_a_dry_run_needs_no_model_either(lmworks: Lmworks, write: Write) -> None:
    told = lmworks("corpus", "prepare", write([PROSE]), "--dry-run")
    assert told.code == 0 and "read" in told.out, told.err
