"""`lmworks evaluate --follow` and `--failures` from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command import Lmworks
from test_compare_command import rows

from lmworks.io import jsonl
from lmworks.pages.run_page import write_page
from lmworks.watch.ledger import Ledger
from saved_run import save_run
from tiny_run import Tiny


@pytest.fixture(scope="module")
def saved(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with three checkpoints and a set in a local file."""
    folder = tmp_path_factory.mktemp("followed")
    save_run(tiny, folder / "run")
    tree = json.loads((folder / "run" / "resolved.json").read_text())
    tree["evaluate"] |= {"benchmarks": [{"name": "arc-easy", "path": str(rows(folder))}], "every_items": 20}
    (folder / "run" / "resolved.json").write_text(json.dumps(tree))
    with Ledger(folder / "run" / "ledger.jsonl") as ledger:
        for stage in ("pretrain", "tune"):
            ledger.write("start", stage=stage, steps=30, tokens=1000)
            ledger.write("finish", stage=stage, step=30)
    return folder / "run"


def test_a_finished_run_is_followed_to_its_end(lmworks: Lmworks, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, run := tmp_path / "run")
    done = lmworks("evaluate", "--follow", run, "--device", "cpu")
    assert (done.code, done.out.strip()) == (0, f"evaluated 3 checkpoints of {run}"), done.err
    records = jsonl.read(run / "follow.jsonl")
    assert [(one["stage"], one["step"]) for one in records] == [("pretrain", 4), ("pretrain", 30), ("tune", 8)]
    for record, where in zip(records, ("@4", "@base", "@tuned"), strict=True):  # the same items in the same form
        data = rows(tmp_path).rename(tmp_path / "arc-easy.jsonl").parent
        scored = lmworks("evaluate", f"{run}{where}", "--tasks", "arc-easy", "--form", "cloze", "--items", 20, "--data", data, "--json")
        (model,) = json.loads(scored.out)["models"].values()
        score = model["scores"]["arc-easy/cloze/0-shot"]
        assert record["eval/arc-easy/cloze-0-shot"] == score["score"] and score["n"] == 20
        assert record["eval/arc-easy/bits_per_byte"] == pytest.approx(score["bits_per_byte"])
    page = write_page(run).read_text()
    assert page.count("<h3>Benchmarks during training</h3>") == 2 and ">arc-easy" in page  # of pretraining and of tuning
    assert lmworks("evaluate", "--follow", run, "--device", "cpu").out.startswith("evaluated 0 checkpoints")


def test_other_sets_and_other_rows_are_asked_of_checkpoints_that_were_evaluated(lmworks: Lmworks, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, run := tmp_path / "run")
    shutil.rmtree(run / "tune")
    (tmp_path / "own.yaml").write_text("file: rows.jsonl\nchoices: c\n")

    def follow(*options: object) -> str:
        return lmworks("evaluate", "--follow", run, "--device", "cpu", *options).out.split()[1]

    def write(word: str) -> None:
        rows = [{"question": f"{word} {n}?", "c": ["one", "two"], "answer": n % 2} for n in range(6)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    own = ("--tasks", tmp_path / "own.yaml")
    write("Which")
    assert [follow(*options) for options in ((), own, (), own, (*own, "--items", 4))] == ["2", "2", "0", "0", "2"]
    write("What")
    assert [follow(*own), follow(*own), follow()] == ["2", "0", "0"]
    records = jsonl.read(run / "follow.jsonl")
    assert ["eval/own/cloze-0-shot" in one for one in records] == [False] * 2 + [True] * 6


def test_failures_of_a_model(lmworks: Lmworks, saved: Path, tmp_path: Path) -> None:
    data = rows(tmp_path).rename(tmp_path / "arc-easy.jsonl").parent
    options = ("--tasks", "arc-easy", "--form", "cloze,free", "--data", data, "--device", "cpu", "--failures")
    found = json.loads(lmworks("evaluate", f"{saved}@base", *options, "--json").out)
    (name,) = found["models"]
    for score, told in found["failures"][name].items():
        measured = found["models"][name]["scores"][score]
        assert told["n"] == measured["n"] and told["failed"] == measured["n"] - measured["correct"]
        assert measured.get("failures", told["kinds"]) == told["kinds"]
    examples = found["failures"][name]["arc-easy/cloze/0-shot"]["examples"]["wrong"]
    assert "things and one more?" in examples[0]["question"] and examples[0]["right"] != examples[0]["answer"]
    shown = lmworks("evaluate", f"{saved}@base", *options).out
    assert "Failures in % of the items" in shown and "by length of the prompt" in shown and "wrong: arc-easy/cloze/0-shot q" in shown


def test_bad_input_is_one_line(lmworks: Lmworks, saved: Path, tmp_path: Path) -> None:
    for arguments, expected in (
        ((), "name a recipe or a model, or a run to follow"),
        (("--follow", tmp_path), "is not a run directory"),
        (("quickstart", "--follow", saved), "leave quickstart out"),
        (("--follow", saved, "--set", "seed=1"), "leave --set out"),
        (("--follow", saved, "--device", "cuda:99"), "is no device of this machine"),
        (("--follow", saved, "--tasks", "arc-eazy"), "did you mean arc-easy?"),
        (("--follow", saved, "--json"), "--json has no effect with --follow, only with --tasks or --harness; leave it out"),
        (("--follow", saved, "--failures"), "--failures has no effect with --follow"),
        (("--follow", saved, "--shots", 3), "--shots has no effect with --follow"),
        (("--follow", saved, "--out", tmp_path), "--out has no effect with --follow"),
        (("--follow", saved, "--harness", "piqa"), "--harness has no effect with --follow"),
    ):
        error = lmworks("evaluate", *arguments).error
        assert expected in error, error
