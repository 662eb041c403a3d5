"""`lmworks corpus classifier` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from command import Lmworks


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    """Paragraphs of the language reference, and the same letters backwards."""
    texts = [text for topic in sorted(topics) for text in topics[topic].split("\n\n") if len(text) > 100][:700]
    rows = [{"text": text if number % 2 else text[::-1], "score": 4 if number % 2 else 1.5} for number, text in enumerate(texts)]
    path = tmp_path / "labels.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_train_show_and_evaluate(lmworks: Lmworks, labels: Path, tmp_path: Path) -> None:
    file = tmp_path / "q.safetensors"
    asked = ("--labels", labels, "--label-key", "score", "--minimum", 3)
    told = lmworks("corpus", "classifier", "train", file, *asked, "--bits", 16)
    assert told.code == 0 and "AUC " in told.out and f"model: {file}" in told.out
    shown = json.loads(lmworks("corpus", "classifier", "show", file, "--json").out)
    assert shown["held_out"]["auc_interval"][0] > 0.9 and shown["bits"] == 16
    again = json.loads(lmworks("corpus", "classifier", "evaluate", file, *asked, "--json").out)
    assert again["held_out"]["documents"] == 700 > shown["held_out"]["documents"]
    assert again["fingerprint"] == shown["fingerprint"]


def test_what_is_missing_is_said_in_one_line(lmworks: Lmworks, labels: Path, tmp_path: Path) -> None:
    file = tmp_path / "q.safetensors"
    train = ("corpus", "classifier", "train", file)
    assert lmworks(*train, "--good", labels).error.startswith("give either --labels PATH, or both --good and --bad")
    assert "has the score" in lmworks(*train, "--labels", labels, "--label-key", "score").error
    assert "has no 'label'; name the column of the labels with --label-key" in lmworks(*train, "--labels", labels).error
    assert "is neither a file, folder or glob" in lmworks(*train, "--good", labels, "--bad", tmp_path / "none").error
    assert "there is no classifier at" in lmworks("corpus", "classifier", "show", file).error
    assert not file.exists()
