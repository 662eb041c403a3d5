"""`lmworks run` and what looks at a run, as processes of their own where signals and locks matter."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from command import Lmworks

from lmworks.checkpoint import listing
from lmworks.shards.batches import Batches
from lmworks.train import trainer
from lmworks.watch.ledger import RunLock, read_ledger
from tiny_run import FIRST, STEPS, Tiny, before_each_step, checkpoint, curve, same_bits
from written_run import write_run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
LMWORKS = [sys.executable, "-m", "lmworks.cli.main"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def command(*arguments: object) -> list[str]:
    return [*LMWORKS, *map(str, arguments)]


def test_ctrl_c_saves_says_how_to_go_on_and_the_rest_is_the_same(
    lmworks: Lmworks, tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = "train.phases.general.tokens=4000 tokens"
    arguments = ("pretrain", tiny_copy.recipe, "--set", f"run_dir={tiny_copy.run_dir}", "--set", longer)
    with monkeypatch.context() as patch:
        before_each_step(patch, lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 3 else None)
        stopped = lmworks(*arguments)
    said = stopped.err
    assert stopped.code == 130, said
    saved = listing.step_of(listing.directories(tiny_copy.run_dir / "checkpoints")[-1])
    assert "stopping after this step; press Ctrl-C again to stop at once, without saving" in said
    again = shlex.join(["lmworks", *map(str, arguments)])
    assert said.splitlines()[-1] == f"stopped by SIGINT and saved at step {saved}; resume with: {again}"
    assert "Traceback" not in said
    assert curve(tiny_copy.run_dir)[-1]["step"] == saved
    assert (tiny_copy.run_dir / "report.html").exists()

    reference = tiny_copy.copy(tiny_copy.run_dir.parent / "reference")
    for name in ("checkpoints", "metrics.jsonl", "samples.jsonl"):
        path = reference.run_dir / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    reference.pretrain(longer)
    done = lmworks(*shlex.split(again)[1:])
    assert done.code == 0, done.err
    assert f"pretrain resumes from step {saved} of " in done.err
    assert same_bits(checkpoint(tiny_copy.run_dir), checkpoint(reference.run_dir)) == []
    assert curve(tiny_copy.run_dir) == curve(reference.run_dir)


def test_two_processes_on_one_run_directory(tiny_copy: Tiny) -> None:
    with RunLock(tiny_copy.run_dir):
        again = command("run", tiny_copy.recipe, "--set", f"run_dir={tiny_copy.run_dir}")
        done = subprocess.run(again, capture_output=True, encoding="utf-8", env=ENVIRONMENT, check=False)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == (
        f"error: {tiny_copy.run_dir} is in use by process {os.getpid()} on {socket.gethostname()}; "
        "wait for it, stop it, or choose another run_dir\n"
    )


def test_the_whole_way_and_once_more(lmworks: Lmworks, tiny_copy: Tiny) -> None:
    """What is printed on the way and at the end, and that the second time only says what was done before."""
    arguments = ("run", tiny_copy.recipe, "--set", f"run_dir={tiny_copy.run_dir}")
    first = lmworks(*arguments)
    assert first.code == 0, first.err
    for words in ("Corpus: raw text to clean documents: done before", "Pretraining", "pretrain took ", "Where everything is",
                  "What was measured", f"{2816 + 2048:,} tokens in {STEPS} steps", "the run page: open it in a browser",
                  "the tuned model"):  # fmt: skip
        assert words in first.out, words
    assert first.out.rstrip().endswith(f"lmworks chat {tiny_copy.run_dir}")
    second = lmworks(*arguments)
    assert second.code == 0 and second.out.count("done before") == 7 and " took " not in second.out
    assert second.out.rstrip().endswith(f"lmworks chat {tiny_copy.run_dir}")


@pytest.mark.parametrize("step", [0, FIRST - 1, FIRST, STEPS - 1])
def test_the_batch_of_any_step(lmworks: Lmworks, tiny: Tiny, step: int) -> None:
    """Of a run that has not trained a step: all of them lie in the future. The JSON has what the trainer gets."""
    batch = Batches(tiny.resolve().recipe, tiny.run_dir / "shards").batch(step)
    rows = json.loads(lmworks("data", "batch", tiny.run_dir, step, "--json").out)
    assert [row["tokens"] for row in rows] == batch.tokens.tolist()
    assert {row["source"] for row in rows} == ({"code", "docs"} if step < FIRST else {"docs"})
    for row in rows:
        assert row["documents"][0]["origin"].startswith(str(tiny.texts))
    shown = lmworks("data", "batch", tiny.run_dir, step).out
    assert shown.startswith(f"step {step}: {len(rows)} sequences of {batch.tokens.shape[1]} tokens, {batch.valid_tokens:,} labels")
    assert rows[0]["documents"][0]["id"] in shown


def test_the_batches_of_a_past_run_are_those_it_was_trained_on(lmworks: Lmworks, tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, list[list[int]]] = {}
    honest = trainer.train_step
    monkeypatch.setattr(trainer, "train_step", lambda model, optimizer, batch, **more: (
        seen.update({batch.step: batch.tokens.tolist()}), honest(model, optimizer, batch, **more))[1])  # fmt: skip
    tiny_copy.pretrain()
    assert sorted(seen) == list(range(STEPS))
    for step in (0, 5, FIRST, STEPS - 1):
        assert [row["tokens"] for row in json.loads(lmworks("data", "batch", tiny_copy.run_dir, step, "--json").out)] == seen[step]


def test_checkpoints_are_listed_and_verified(lmworks: Lmworks, finished: Tiny, tmp_path: Path) -> None:
    run = finished.copy(tmp_path / "run")
    rows = json.loads(lmworks("ckpt", "list", run.run_dir, "--json").out)
    base = [row for row in rows if Path(row["path"]).parent == run.run_dir / "checkpoints"]
    tuned = [row for row in rows if Path(row["path"]).parent == run.run_dir / "tune" / "checkpoints"]
    assert base[-1]["step"] == STEPS and base[-1]["tokens"] == 2816 + 2048 and base[-1]["phase"] == "long" and tuned
    assert base[-1]["metric"] == pytest.approx(curve(run.run_dir)[-1]["validation/bits_per_byte"])
    assert all(row["problem"] is None and row["bytes"] > 100_000 for row in rows)
    assert f"step-{STEPS:08d}" in lmworks("ckpt", "list", run.run_dir).out
    verified = lmworks("ckpt", "verify", run.run_dir, "--json")
    assert verified.code == 0 and all(row["good"] for row in json.loads(verified.out)) and len(json.loads(verified.out)) == len(rows)

    data = Path(base[-1]["path"]) / "data-00000-00000.bin"
    data.write_bytes(data.read_bytes()[:-1])
    verified = lmworks("ckpt", "verify", run.run_dir, "--json")
    assert verified.code == 1
    (bad,) = [row for row in json.loads(verified.out) if not row["good"]]
    assert bad["path"] == base[-1]["path"] and "data-00000-00000.bin has" in bad["problem"]
    assert lmworks("ckpt", "verify", run.run_dir).code == 1
    assert data.parent.exists()  # looking changes nothing


def test_a_run_without_checkpoints(lmworks: Lmworks, tiny: Tiny) -> None:
    assert lmworks("ckpt", "list", tiny.run_dir).out == "no checkpoints yet\n"
    assert json.loads(lmworks("ckpt", "list", tiny.run_dir, "--json").out) == []


def test_the_page_of_a_run_that_can_only_be_read(lmworks: Lmworks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", {"train/loss": [2.0, 1.0]})
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **how: real(path, mode, **how) and not (Path(path) == run and mode & os.W_OK))
    done = lmworks("report", run)
    assert done.code == 2 and f"{run} cannot be written" in done.error and "with --out" in done.error, done.err
    for out, page in ((tmp_path / "page.html", tmp_path / "page.html"), (tmp_path, tmp_path / "report.html")):
        done = lmworks("report", run, "--out", out)
        assert done.code == 0 and page.read_text().startswith("<!"), done.err
    assert not (run / "report.html").exists()
    done = lmworks("report", run, "--out", "/sys/page.html")
    assert done.code == 2 and "run_dir" not in done.error, done.err


def test_the_report(lmworks: Lmworks, finished: Tiny, tmp_path: Path) -> None:
    run = finished.copy(tmp_path / "run")
    (run.run_dir / "report.html").unlink()
    done = lmworks("report", run.run_dir)
    assert done.out == f"{run.run_dir}/report.html\n"
    assert "tiny" in (run.run_dir / "report.html").read_text()
    other = run.copy(tmp_path / "other")
    recorded = other.run_dir / "resolved.json"
    recorded.write_text(recorded.read_text().replace('"name": "tiny"', '"name": "the other one"'))
    (tmp_path / "ours.yaml").write_text("device: 2 CPU cores\ntflops: 1\nmemory_gib: 4\ndollars_per_device_hour: 7.25\n")
    done = lmworks("report", run.run_dir, other.run_dir, "--cluster", tmp_path / "ours.yaml")
    assert done.out == f"{run.run_dir}/comparison.html\n"
    page = (run.run_dir / "comparison.html").read_text()
    assert "the other one" in page and "at $7.25 per device and hour (ours)" in page


@pytest.mark.parametrize("command", ["show", "plan"])
def test_json_of_a_recipe(lmworks: Lmworks, tiny: Tiny, command: str) -> None:
    assert json.loads(lmworks(command, tiny.recipe, "--json").out)


def test_a_tokenizer_is_compared(lmworks: Lmworks, finished: Tiny) -> None:
    done = lmworks("tokenizer", "eval", finished.run_dir, "--against", finished.run_dir / "tokenizer" / "tokenizer.json")
    assert done.code == 0 and "docs" in done.out
    other = str(finished.run_dir / "tokenizer" / "tokenizer.json")
    rows = json.loads(lmworks("tokenizer", "eval", finished.run_dir, "--against", other, "--json").out)
    assert {row["tokenizer"] for row in rows} == {"this", other}
    assert read_ledger(finished.run_dir / "ledger.jsonl")[-1]["event"] == "run_ended"


def test_a_new_domain_and_the_vocabulary_size_are_judged(lmworks: Lmworks, finished: Tiny) -> None:
    before = {path: path.read_bytes() for path in (finished.run_dir / "tokenizer").iterdir()}
    rows = json.loads(lmworks("tokenizer", "eval", str(finished.run_dir), "--json").out)
    assert {row["source"] for row in rows} == {"code", "docs"}
    rows = json.loads(lmworks("tokenizer", "drift", str(finished.run_dir), "--add", "docs", "--json").out)
    assert [(row["source"], row["added"]) for row in rows] == [("code", False), ("docs", True)]
    assert rows[1]["change"] < 0
    assert lmworks("tokenizer", "drift", str(finished.run_dir), "--add", "books").code == 2
    sizes = ("tokenizer", "sizes", str(finished.run_dir), "--size", "400", "--size", "512", "--size", "700")
    assert [row["entries"] for row in json.loads(lmworks(*sizes, "--json").out)] == [400, 512]
    larger = json.loads(lmworks(*sizes, "--train-to", "800", "--json").out)
    assert [row["entries"] for row in larger] == [400, 512, 700]
    assert sum(row["recommended"] for row in larger) == 1
    assert "the smallest vocabulary within 1%" in " ".join(lmworks(*sizes).out.split())
    assert before == {path: path.read_bytes() for path in (finished.run_dir / "tokenizer").iterdir()}


def test_conversations_are_shown_with_what_is_trained(lmworks: Lmworks, finished: Tiny, tmp_path: Path) -> None:
    found = json.loads(lmworks("data", "conversations", finished.run_dir, "--count", 2, "--json").out)
    assert list(found["sets"]) == ["sums"] and len(found["conversations"]) == 2
    for one in found["conversations"]:
        trained = [text for text, is_trained in one["pieces"] if is_trained]
        others = "".join(text for text, is_trained in one["pieces"] if not is_trained)
        assert trained and 0 < one["trained"] < one["tokens"]
        assert "<|user|>" in others and not any("<|user|>" in text.removesuffix("<|user|>") for text in trained)
    printed = lmworks("data", "conversations", finished.run_dir).out
    assert "⟦" in printed and "% trained" in printed
    assert "there is no set 'tales'" in lmworks("data", "conversations", finished.run_dir, "--set", "tales").error
    assert "has no conversations yet" in lmworks("data", "conversations", tmp_path).error
