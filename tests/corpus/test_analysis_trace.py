"""Every document of a corpus is traced: doing the steps again ends where the decisions say, and where it does not, that is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import analysis_corpus as made
import pytest

from lmworks.corpus.analysis import trace as tracing
from lmworks.corpus.analysis.prepared import PreparedCorpus
from lmworks.corpus.analysis.trace import MAX_LINES, Trace, changed_lines, trace
from lmworks.errors import UserError

STEP = '''
from lmworks.corpus.document import Document, Drop, step


@step(makes=["shouts"], statistics=["shouts"])
def calm(document: Document, most: int = 5) -> Document | Drop:
    count = document.text.count("!")
    return Drop("shouting", f"{count} times", {"shouts": count}) if count > most else document.with_facts(shouts=count)
'''


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PreparedCorpus:
    return made.make(tmp_path_factory.mktemp("evidence"))


@pytest.fixture(scope="module")
def traces(corpus: PreparedCorpus) -> dict[str, Trace]:
    return {identity: trace(corpus, identity) for identity in made.decisions(corpus)}


def event(found: Trace, stage: str) -> tracing.TraceEvent:
    (one,) = [one for one in found.moments if one.stage == stage]
    return one


def test_every_document_ends_as_it_was_decided(corpus: PreparedCorpus, traces: dict[str, Trace]) -> None:
    rows = made.decisions(corpus)
    assert len({row["fate"] for row in rows.values()}) > 5
    for identity, found in traces.items():
        fate, last = rows[identity]["fate"], found.moments[-1]
        assert found.agrees, identity
        assert found.decision == rows[identity]
        if fate in ("train", "validation"):
            assert last.stage == "write" and last.outcome.startswith(f"{fate}/")
        else:
            assert last.stage == fate and last.outcome.startswith("dropped")
            assert rows[identity]["reason"] in last.outcome or fate == "decontaminate"


def test_what_was_kept_stands_where_it_is_said(corpus: PreparedCorpus, traces: dict[str, Trace]) -> None:
    import pyarrow.parquet as pq

    for found in (one for one in traces.values() if one.kept):
        assert found.kept
        name, _, row = found.kept.rpartition(":")
        columns = pq.read_table(corpus.out / name).slice(int(row), 1).to_pylist()[0]
        assert columns["id"] == found.id and columns["text"].startswith(found.text)


def test_what_a_step_changes_is_shown(traces: dict[str, Trace]) -> None:
    cut = [one for one in traces.values() if event_or_none(one, "lines") and event(one, "lines").changed]
    footed = [one for one in cut if any(made.FOOTER[:60] in line and line.startswith("- ") for line in event(one, "lines").changed)]
    assert len(footed) == 4, "six pages have the footer, and from the third on it is boilerplate"
    assert all(event(one, "lines").facts["lines_dropped"] for one in footed)


def event_or_none(found: Trace, stage: str) -> tracing.TraceEvent | None:
    return next((one for one in found.moments if one.stage == stage), None)


def test_a_copy_names_its_original_and_a_leak_its_passage(traces: dict[str, Trace]) -> None:
    copies = [one for one in traces.values() if one.decision["fate"] == "dedup"]
    assert copies
    for one in copies:
        assert one.decision["copy_of"] in one.moments[-1].outcome and "whose fate is" in one.moments[-1].outcome
    leak = next(one for one in traces.values() if one.decision["detail"] == "riddles/0")
    assert any(made.QUESTION[:-1] in line for line in leak.moments[-1].changed)
    for one in traces.values():
        if one.decision["fate"] == "decontaminate":
            assert one.moments[-1].changed, "each has its passage"


def test_passages_without_what_is_staged_come_from_the_report(tmp_path: Path, traces: dict[str, Trace]) -> None:
    corpus = made.make(tmp_path, keep_staged=False)
    assert [path.name for path in (corpus.out / "staging").iterdir()] == ["job.json"]
    for identity, row in made.decisions(corpus).items():
        found = trace(corpus, identity)
        assert found.agrees
        if row["fate"] == "decontaminate":
            assert list(found.moments[-1].changed) == list(traces[identity].moments[-1].changed)[:1]


def test_a_step_of_ones_own_that_has_changed_since_is_told(tmp_path: Path) -> None:
    texts = [f"Page {number}. {'Read this now! ' * number}" for number in range(12)]
    (tmp_path / "mine.py").write_text(STEP)
    steps = [{"step": "python", "file": "mine.py", "function": "calm", "options": {"most": 5}}]
    corpus = made.make(tmp_path, texts, steps=steps, decontaminate=None, dedup={"minhash": None})
    shouting = trace(corpus, "pages/0/9")
    assert shouting.agrees
    assert shouting.moments[-1] == tracing.TraceEvent("calm", "dropped: shouting (9 times)", {"shouts": 9})
    assert event(trace(corpus, "pages/0/3"), "calm").facts == {"shouts": 3}
    (tmp_path / "mine.py").write_text(STEP.replace("> most", "> most + 1"))
    assert not trace(corpus, "pages/0/6").agrees and trace(corpus, "pages/0/9").agrees
    (tmp_path / "mine.py").write_text(STEP.replace("else document", 'else document.with_text("x" + document.text)'))
    assert not trace(corpus, "pages/0/3").agrees, "it is kept as before, with another text"


def test_a_source_that_has_changed_is_told(tmp_path: Path) -> None:
    corpus = made.make(tmp_path, made.pages(6))
    rows = (tmp_path / "rows.jsonl").read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps({"text": "Something else entirely."}), *rows[1:]]))
    assert not trace(corpus, "pages/0/0").agrees
    (tmp_path / "rows.jsonl").write_text("\n".join(["", *rows]))
    with pytest.raises(UserError, match="source pages has changed"):
        trace(corpus, "pages/0/2")


def test_relative_paths_start_where_the_corpus_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    made.write(Path("rows.jsonl"), made.pages(6))
    made.make(tmp_path / "there", made.pages(6), sources=[made.source(Path("rows.jsonl"))])
    monkeypatch.chdir(tmp_path)
    corpus = PreparedCorpus(Path("there/corpus"))
    assert trace(corpus, "pages/0/1").agrees
    assert Path.cwd() == tmp_path


@pytest.mark.parametrize(
    ("identity", "told"),
    [
        ("pages", "is not a document id"),
        ("pages/x/1", "is not a document id"),
        ("books/0/1", "no source 'books'"),
        ("pages/99/1", "no part 99"),
        ("pages/0/999999", "ends before it"),
    ],
)
def test_what_is_no_document_is_one_line(corpus: PreparedCorpus, identity: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        trace(corpus, identity)


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        ("a\nb\nc", "a\nc", ["- b"]),
        ("a\nc", "a\nb\nc", ["+ b"]),
        ("a\n", "a", ["- (empty line)"]),
        ("x" * 500 + "old tail", "x" * 500 + "new tail", ["- ..." + "x" * 30 + "old tail", "+ ..." + "x" * 30 + "new tail"]),
        ("same", "same", []),
        ("\n".join(map(str, range(MAX_LINES))), "\n".join(map(str, range(MAX_LINES, 0, -1))), None),
    ],
)
def test_differences(before: str, after: str, shown: list[str] | None) -> None:
    found: list[Any] = changed_lines(before, after)
    assert found == shown if shown is not None else "lines were replaced by" in found[0]


def test_many_differences_are_cut_short() -> None:
    found = changed_lines("\n".join(f"old {number}" for number in range(99)), "\n".join(f"new {number}" for number in range(99)), most=10)
    assert len(found) == 11 and found[-1] == "... and 188 more lines"


def test_a_document_of_repeated_passages_is_told_as_such(tmp_path: Path) -> None:
    page = made.pages(3)
    texts = [*page, f"{page[0][:900]} Only this is new."]
    corpus = made.make(
        tmp_path, texts, dedup={"minhash": None, "substring": {"min_words": 50, "min_remaining_fraction": 0.5}}, validation_fraction=0
    )
    found = trace(corpus, "pages/0/3")
    assert (found.decision["fate"], found.decision["reason"]) == ("dedup", "repeated_passages")
    last = found.moments[-1]
    assert last.stage == "dedup" and last.outcome.startswith("dropped: repeated_passages, ")
    assert any("Only this is new" in line for line in last.changed)
    assert found.agrees
