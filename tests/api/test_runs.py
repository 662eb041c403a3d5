"""A run from Python: started, interrupted, resumed, and read; what is read is what the commands print."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command import Lmworks

import lmworks
from lmworks.metrics.log import read
from lmworks.watch.ledger import Ledger
from lmworks.watch.stop_signals import graceful_stop
from tiny_run import Tiny, before_each_step

ROOT = Path(__file__).parents[2]


def test_a_run_is_interrupted_resumed_and_read(
    lmworks_command: Lmworks, tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As in a notebook: there is no terminal, and the stop button sends SIGINT."""
    short = {"train.phases.general.tokens": "1536 tokens", "train.phases.long.tokens": "512 tokens", "train.validate_every": "4 steps"}
    recipe = lmworks.load_recipe(tiny_copy.recipe, short, run_dir=str(tiny_copy.run_dir))
    with monkeypatch.context() as patch:
        before_each_step(patch, lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 5 else None)
        with pytest.raises(lmworks.Interrupted, match=r"stopped by SIGINT and saved at step 6; resume with: recipe\.run\(\)"):
            recipe.run(to="pretrain")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert lmworks.open_run(tiny_copy.run_dir).stages == ["corpus", "tokenizer", "shards"]
    run = recipe.run(to="pretrain")
    assert "pretrain took" in capfd.readouterr().out
    assert recipe.run(to="pretrain", quiet=True).path == run.path and capfd.readouterr().out == ""
    assert run.stages == ["corpus", "tokenizer", "shards", "pretrain"] and run.config == recipe.config

    table = run.metrics()
    records = read(tiny_copy.run_dir)
    assert table.rows == len(records) and table["step"] == [record["step"] for record in records]
    assert table["train/loss"] == [record.get("train/loss") for record in records] and list(table)[:2] == ["step", "time"]
    assert set(table) == {name for record in records for name in record}
    held_out = run.metrics(names=["validation/bits_per_byte"])
    assert list(held_out) == ["step", "validation/bits_per_byte"] and None in held_out["validation/bits_per_byte"]
    shown = held_out.dropna("step", "validation/bits_per_byte")
    assert 0 < shown.rows < held_out.rows and None not in shown["validation/bits_per_byte"]
    assert table.to_pandas()["train/loss"].tolist()[-1] == table["train/loss"][-1]
    assert f"<p>{table.rows:,} rows, {len(table)} columns</p>" in table._repr_html_()
    assert run.metrics("tune").rows == 0
    for call, said in (
        (lambda: run.metrics("tuned"), "'tuned' has no metrics; take one of pretrain, tune, dpo, grpo"),
        (lambda: run.metrics(names=["train/los"]), "has logged no train/los in pretrain; it has logged: step, time, "),
        (lambda: table.dropna("loss"), "there is no column 'loss'"),
        (run.results, "has no evaluation; make it with: lmworks evaluate RECIPE"),
        (lambda: run.batch(10**6), "step 1000000 does not exist: the run has 10 steps"),
        (lambda: lmworks.open_run(tiny_copy.recipe.parent), "is not a run directory"),
    ):
        with pytest.raises(lmworks.UserError) as error:
            call()
        assert said in str(error.value)
    assert [event["event"] for event in run.events()].count("resume") == 1

    completion = run.model().generate("def ", max_new_tokens=3)
    assert completion.text == run.model("base").generate("def ", max_new_tokens=3).text
    execute_page(tiny_copy.run_dir, tiny_copy.recipe.parent / "page", monkeypatch)
    steps = json.loads(lmworks_command("ckpt", "list", run.path, "--json").out)
    assert run.model(int(steps[0]["step"])).name == f"run@{steps[0]['step']}"


def execute_page(run_dir: Path, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """The Python of docs/python.md, with this run as runs/quickstart."""
    folder.mkdir()
    (folder / "recipes").symlink_to(ROOT / "recipes")
    (folder / "runs").mkdir()
    (folder / "runs" / "quickstart").symlink_to(run_dir)
    found = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"), re.S)
    assert len(found) >= 5
    names: dict[str, Any] = {"__name__": "page"}
    with patch.context() as inner:
        inner.chdir(folder)
        for block in found:
            exec(block, names)
    assert names["model"].name.endswith("@base") and names["planned"].dollars > 0


def test_a_batch_is_what_the_command_prints(lmworks_command: Lmworks, tiny_copy: Tiny) -> None:
    run = lmworks.open_run(str(tiny_copy.run_dir))
    batch = run.batch(7)
    assert batch.to_json() == json.loads(lmworks_command("data", "batch", tiny_copy.run_dir, 7, "--json").out)
    assert batch.phase == "general" and batch.tokens.shape == batch.labels.shape == (8, 32) and not batch.left_out
    assert batch.text(0) == run.tokenizer.decode(batch.tokens[0].tolist())
    # where a document says that it comes from, its text is
    row = next(one for one in batch.documents if one.source == "code")
    span = row.documents[0]
    path = Path(span.origin.rpartition("#")[0] or span.origin)
    text = (path if path.is_absolute() else tiny_copy.texts / "code" / path.name).read_text(encoding="utf-8")
    piece = run.tokenizer.decode(batch.tokens[batch.documents.index(row)][: span.stop - span.start].tolist())
    assert piece.strip().splitlines()[1] in text
    with Ledger(tiny_copy.run_dir / "ledger.jsonl") as ledger:
        ledger.write("rollback", stage="pretrain", step=9, to_step=6, skip=[7, 8])
    assert run.batch(7).left_out and not run.batch(8).left_out


def test_a_second_interrupt_in_a_notebook_ends_the_run_and_not_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with graceful_stop() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        clock[0] += 2
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
