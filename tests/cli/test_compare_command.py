"""`lmworks compare` from the command line: runs, steps, checkpoints, exports and tables, with outcomes that are computed once."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Lmworks

from lmworks.evaluate import compared_models
from lmworks.io import jsonl
from saved_run import save_run
from tiny_run import Tiny

SCORE = "arc-easy/cloze/0-shot"
SHOWN = "arc-easy/cloze/2-shot"  # with two worked examples
ITEMS = 24


def rows(folder: Path) -> Path:
    """Questions in the format of ARC."""
    path = folder / "arc.jsonl"
    lines = []
    words = [name for name in sorted(sys.stdlib_module_names) if name.isalpha() and 4 <= len(name) <= 6]
    for n in range(ITEMS):
        choices = {"text": words[3 * n : 3 * n + 3], "label": ["A", "B", "C"]}
        lines.append({"id": f"q{n}", "question": f"Which of {n} things and one more?", "choices": choices, "answerKey": "ABC"[n % 3]})
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


@pytest.fixture(scope="module")
def run(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three models whose recipe lists a set in a local file, and whose corpus has held-out text."""
    folder = tmp_path_factory.mktemp("compare")
    to = folder / "run"
    save_run(tiny, to)
    tree = json.loads((to / "resolved.json").read_text())
    tree["evaluate"]["benchmarks"] = [{"name": "arc-easy", "path": str(rows(folder))}]
    (to / "resolved.json").write_text(json.dumps(tree))
    shutil.copytree(tiny.run_dir / "corpus" / "validation", to / "corpus" / "validation")
    return to


def compared(lmworks: Lmworks, *arguments: object) -> dict[str, Any]:
    done = lmworks("compare", *arguments, "--json", "--device", "cpu")
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_models_of_a_run_are_evaluated_once(
    lmworks: Lmworks, run: Path, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real = compared_models.open_model
    monkeypatch.setattr(compared_models, "open_model", lambda where, device: opened.append(str(where)) or real(where, device))
    names = [f"{run}@base", f"{run}@4", run / "tune" / "checkpoints" / "step-00000008"]
    found = compared(lmworks, *names, "--cache", tmp_path / "cache", "--form", "cloze", "--tasks", "arc-easy")
    assert [one["name"] for one in found["models"]] == ["run@base", "run@4", "run@tuned-8"]
    assert opened == [str(one) for one in names]
    for comparison, one in zip(found["comparisons"], found["models"][1:], strict=True):
        row = comparison["scores"][0]
        assert (comparison["a"], comparison["b"]) == ("run@base", one["name"])
        assert (row["score"], row["n"], row["kind"]) == (SCORE, ITEMS, "paired")
        records = [
            {line["id"]: line["correct"] for line in jsonl.read(Path(model["origin"]) / f"outcomes-{model['name']}.jsonl")}
            for model in (found["models"][0], one)
        ]
        lost = {key for key in records[0] if records[0][key] and not records[1][key]}
        assert set(row["lost_ids"]) == lost and row["lost"] - row["gained"] == round(-ITEMS * row["difference"])
        example = (row["examples"]["lost"] + row["examples"]["gained"])[0]
        assert "things and one more?" in example["question"] and example["right"] and example["a"] != example["b"]
        bits = comparison["bits_per_byte"]
        assert {one["domain"] for one in bits} == {"all domains", "docs"}
        assert all(math.isfinite(one["difference"]) and one["n"] > 5 for one in bits)
    assert found["tests"] == 2 * (1 + 2)
    assert found["failures"]["run@base"][SCORE]["kinds"].keys() == {"wrong"}
    again = compared(lmworks, *names, "--cache", tmp_path / "cache", "--form", "cloze", "--tasks", "arc-easy")
    assert again == found and len(opened) == 3
    compared(lmworks, *names, "--cache", tmp_path / "cache", "--form", "cloze", "--tasks", "arc-easy", "--items", 20)
    assert len(opened) == 6


def test_other_rows_under_the_same_name_are_asked_anew_and_not_paired_with_the_old(
    lmworks: Lmworks, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real = compared_models.open_model
    monkeypatch.setattr(compared_models, "open_model", lambda where, device: opened.append(str(where)) or real(where, device))
    task, data = tmp_path / "own.yaml", tmp_path / "rows.jsonl"
    task.write_text("file: rows.jsonl\nquestion: q\nchoices: c\nanswer: a\n")

    def write(first: int) -> None:
        rows = [{"q": f"What comes after {n if n else first}?", "c": [str(n), str(n + 1)], "a": 1} for n in range(ITEMS)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    asked = ("--tasks", task, "--form", "cloze", "--cache", tmp_path / "cache")
    write(0)
    old = compared(lmworks, f"{run}@base", f"{run}@4", *asked)
    write(1000)
    new = compared(lmworks, f"{run}@base", f"{run}@4", *asked)
    assert len(opened) == 4
    rows = [json.loads(lmworks("compare", one["origin"], other["origin"], "--json").out)["comparisons"][0]
            for one, other in ((old["models"][0], old["models"][1]), (old["models"][0], new["models"][1]))]  # fmt: skip
    assert [row["scores"][0]["n"] for row in rows] == [ITEMS, ITEMS - 1]
    assert "1 of 24 items of equal ids" in rows[1]["not_comparable"][0]["reason"]
    task.write_text(task.read_text() + "examples: shown.jsonl\nshots: 1\n")
    for shown in ("How many?", "How few?"):
        (tmp_path / "shown.jsonl").write_text(json.dumps({"q": shown, "c": ["1", "2"], "a": 0}) + "\n")
        compared(lmworks, f"{run}@base", f"{run}@4", *asked)
    assert len(opened) == 8


def test_a_run_an_export_and_a_published_table(lmworks: Lmworks, run: Path, tmp_path: Path) -> None:
    """The stored outcomes of the run decide what the export is asked; the table has no items."""
    from lmworks.export.export import write_huggingface
    from lmworks.tokenizer import load
    from lmworks.weights.open import open_model

    mine = tmp_path / "run"
    shutil.copytree(run, mine)
    asked = ("--tasks", "arc-easy", "--form", "cloze", "--shots", 2)
    first = compared(lmworks, f"{run}@base", f"{run}@4", "--cache", tmp_path / "cache", *asked)
    stored = Path(first["models"][0]["origin"])
    (mine / "evaluate").mkdir()
    for name in ("outcomes", "documents"):
        shutil.copy(stored / f"{name}-run@base.jsonl", mine / "evaluate" / f"{name}-base.jsonl")
    shutil.copy(stored / "questions.jsonl", mine / "evaluate")
    (mine / "evaluate" / "results.json").write_text((stored / "results.json").read_text().replace('"run@base"', '"base"'))
    write_huggingface(open_model(f"{run}@4", "cpu").model, load(run / "tokenizer"), tmp_path / "export", torch.float32)
    table = tmp_path / "peer.yaml"
    table.write_text(f"scores: {{{SHOWN}: {{score: 96%, n: 2000}}, piqa/cloze/0-shot: {{score: 0.8, n: 1000}}}}\n")
    page = tmp_path / "page.html"
    found = compared(lmworks, f"{mine}@base", tmp_path / "export", table, "--cache", tmp_path / "cache", "--html", page)
    ours, peer = found["comparisons"]
    wanted, got = first["comparisons"][0]["scores"][0], ours["scores"][0]
    assert {key: got[key] for key in ("a", "b", "lost_ids", "interval")} == {key: wanted[key] for key in ("a", "b", "lost_ids", "interval")}
    assert found["models"][0]["origin"] == str(mine / "evaluate")
    assert (peer["scores"][0]["kind"], peer["scores"][0]["verdict"]) == ("unpaired", "better")
    assert peer["not_comparable"] == [{"score": "piqa/cloze/0-shot", "reason": "run@base has no score of piqa"}]
    text = page.read_text()
    for part in ("export, peer against run@base", SHOWN, "Held-out bits per byte", "Lost and gained", "things and one more?"):
        assert part in text
    assert "<script" not in text
    shown = lmworks("compare", f"{mine}@base", table, "--cache", tmp_path / "cache").out
    assert "peer against run@base" in shown and "better, unpaired" in shown and "not comparable: piqa/cloze/0-shot" in shown
    (mine / "evaluate" / "stage.json").write_text(json.dumps({"done": True, "inputs": {"checkpoints/": "another"}}))
    stale = compared(lmworks, f"{mine}@base", f"{mine}@4", "--cache", tmp_path / "cache")
    assert "of an earlier model" in stale["models"][0]["notes"][0] and stale["models"][0]["origin"].startswith(str(tmp_path / "cache"))


def test_a_folder_with_several_models_is_named_once(lmworks: Lmworks, tmp_path: Path) -> None:
    for name in ("ev1", "ev2"):
        (tmp_path / name).mkdir()
        models = {"a": {}, "b": {}} if name == "ev1" else {"c": {}}
        (tmp_path / name / "results.json").write_text(json.dumps({"models": models}))
        for model in models:
            (tmp_path / name / f"outcomes-{model}.jsonl").write_text("")
    one = tmp_path / "ev1"
    for asked in (one, f"{one}@c"):
        assert lmworks("compare", asked, tmp_path / "ev2").error == f"{one} has the results of a and b; name one as {one}@a"


def test_bad_input_is_one_line(lmworks: Lmworks, run: Path, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain = tmp_path / "plain"
    save_run(tiny, plain)
    (tmp_path / "x.txt").write_text("")
    (tmp_path / "t.csv").write_text("name,score,n\nfoo/cloze/0-shot,0.5,10\n")
    (tmp_path / "u.csv").write_text("name,score,n\nbar/cloze/0-shot,0.5,10\n")
    other = tmp_path / "other"
    shutil.copytree(run, other)
    tokenizer = json.loads((other / "tokenizer" / "tokenizer.json").read_text())
    tokenizer["model"]["merges"].pop()
    (other / "tokenizer" / "tokenizer.json").write_text(json.dumps(tokenizer))
    for arguments, expected in (
        ((run,), "two or more different models"),
        ((run, run), "two or more different models"),
        ((run, tmp_path / "nowhere"), "does not exist; give a run directory"),
        ((run, tmp_path / "x.txt"), "a published table is one of .json"),
        ((f"{plain}@base", f"{plain}@4"), "no recipe says what to evaluate; name the sets: --tasks"),
        ((f"{run}@base", f"{run}@77"), "has no checkpoint of step 77; the steps there are: 4, 30"),
        ((tmp_path / "t.csv", tmp_path / "u.csv"), "t and u have no score and no held-out text in common"),
        ((f"{run}@base", f"{run}@4", "--tasks", "arc-eazy"), "did you mean arc-easy?"),
        ((f"{run}@4", f"{other}@4"), "is not the tokenizer that the weights of this run were trained with"),
    ):
        error = lmworks("compare", *arguments).error
        assert expected in error, error
