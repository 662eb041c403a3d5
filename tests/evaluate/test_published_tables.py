"""Tables of published scores, in three formats, and broken ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmworks.errors import UserError
from lmworks.evaluate.results import read_table


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "t.json",
            '{"model": "peer", "scores": {"piqa/cloze/0-shot": {"score": 0.75, "n": 1000}, '
            '"boolq/cloze/0-shot": {"correct": 20, "n": 40}}}',
        ),
        ("t.yaml", "model: peer\nscores:\n  piqa/cloze/0-shot: {score: 75%, n: 1000}\n  boolq/cloze/0-shot: {score: 0.5, n: 40}\n"),
        ("peer.csv", "name,score,n\npiqa/cloze/0-shot,0.75,1000\nboolq/cloze/0-shot,50%,40\n"),
    ],
)
def test_three_formats(tmp_path: Path, name: str, text: str) -> None:
    found = read_table(write(tmp_path, name, text))
    assert found.name == "peer" and found.published
    one, two = found.scores["piqa/cloze/0-shot"], found.scores["boolq/cloze/0-shot"]
    assert (one.set, one.n, one.score, one.items) == ("piqa", 1000, 0.75, None)
    assert (two.set, two.n, two.score) == ("boolq", 40, 0.5)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("t.json", "{", "no table of scores"),
        ("t.json", "[1]", "no table of scores"),
        ("t.json", '{"scores": {"a": {"score": 0.5, "n": 10}, "a": {"score": 0.6, "n": 10}}}', "'a' is written twice in this map"),
        ("t.yaml", "scores:\n  a: {score: 0.5, n: 10}\n  a: {score: 0.6, n: 10}\n", "3: 'a' is written twice in this map"),
        ("t.json", '{"scores": {}}', "has no scores"),
        ("t.json", '{"models": {"base": {}}}', "give its folder"),
        ("t.yaml", "scores: {a: {score: 0.5}}", "has no n"),
        ("t.yaml", "scores: {a: {score: 50, n: 10}}", "or 62%"),
        ("t.yaml", "scores: {a: {score: .nan, n: 10}}", "is no number"),
        ("t.yaml", "scores: {a: {score: true, n: 10}}", "is no number"),
        ("t.yaml", "scores: {a: {correct: 11, n: 10}}", "from 0 to n"),
        ("t.yaml", "scores: {a: {score: 0.5, n: 1e12}}", "from 1 to 10,000,000"),
        ("t.yaml", "scores: {a: {score: 0.5, n: 2.5}}", "from 1 to 10,000,000"),
        ("t.yaml", "a: &a [*a, *a]\nscores: !!python/object/apply:os.system [id]", "no table of scores"),
        ("t.csv", "score,n\n0.5,10\n", "without a name"),
        ("t.csv", "name,score,n\na,0.5,10\na,0.6,10\n", "twice"),
        ("t.csv", "name,score,n\na,x,10\n", "is no number"),
    ],
)
def test_broken_ones_are_one_line(tmp_path: Path, name: str, text: str, expected: str) -> None:
    with pytest.raises(UserError, match="^[^\n]*" + expected.replace(" ", r"\s")):
        read_table(write(tmp_path, name, text))


def test_an_enormous_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmworks.evaluate import results

    monkeypatch.setattr(results, "_MOST_BYTES", 1000)
    with pytest.raises(UserError, match="no table"):
        read_table(write(tmp_path, "t.json", " " * 2000))
