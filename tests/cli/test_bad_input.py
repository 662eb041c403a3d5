"""What bad input gets, where the user meets it: exit code 2 and one line that says what, where and what to do."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command import Lmworks

from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.ui.exit_codes import ExitCode
from tiny_run import Tiny

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Mine = Callable[[str, str], Path]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("learning_rate_scale: 0.5", "learning_rate_scael: 0.5", r"mine.yaml:\d+: .*learning_rate_scael.*did you mean '?learning_rate_sca"),
        ("docs: 0.3}", "docs: 0.4}", r"phase general: mixture weights sum to 1.1, not 1; scale them by 0.909"),
        ("mixture: {docs: 1.0}", "mixture: {dosc: 1.0}", r"no source is called 'dosc'; did you mean 'docs'\?"),
        ("tokens: 2048 tokens", "tokens: 200 tokens", r"phase long: the budget of 200 tokens is smaller than one step of 256; lower"),
        ("tokens: 2048 tokens", "tokens: 3072.5", r"train.phases.long.tokens: 3072.5 has no unit; write for example '2.5M tokens'"),
        ("seed: 5", "seed: [5", r"mine.yaml:\d+: not readable as YAML: "),
    ],
)
def test_a_wrong_recipe(lmworks: Lmworks, mine: Mine, tmp_path: Path, old: str, new: str, said: str) -> None:
    error = lmworks("run", mine(old, new)).error
    assert re.search(said, error), error
    assert not (tmp_path / "run").exists()


def test_values_that_need_others(lmworks: Lmworks, tiny: Tiny) -> None:
    error = lmworks("plan", tiny.recipe, "--time", "10min", "--set", "train.phases=[]", "--set", "tune=null").error
    assert "time: time sets the budgets of pretraining, and this recipe has no train.phases" in error
    error = lmworks("run", tiny.recipe, "--set", "run_dir=s3://bucket/run").error
    assert "run_dir: a run directory has to be in a file system; checkpoints.copy_to and `lmworks copy` write to object storage" in error
    assert not Path("s3:").exists()


def test_a_recipe_that_is_not_there(lmworks: Lmworks) -> None:
    assert "there is no recipe 'quikstart', as a file or by name; did you mean quickstart?" in lmworks("run", "quikstart").error


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"source docs: no files at .*docs.jsonl; check the path; or set optional: true to continue without it"),
        (b"", r"source docs .*: has no documents; check its path, include and document_format"),
        (b'{"text": \n{"text"}\n', r"source docs .*: none of its 2 documents is usable \(broken_json 2\)"),
        (b'{"text": "caf\xe9"}\n', r"source docs .*: none of its 1 documents is usable \(bad_utf8 1\)"),
        (b'{"body": "words"}\n', r"source docs .*: none of its 1 documents is usable \(null_text 1\); set text_key to the column"),
        (gzip.compress(b'{"text": "words"}\n'), r"\(damaged_file 1\); .*docs.jsonl: it is compressed with gzip: unpack it, or add .gz"),
    ],
)
def test_a_source_that_gives_nothing(lmworks: Lmworks, mine: Mine, tiny: Tiny, tmp_path: Path, content: bytes | None, said: str) -> None:
    path = mine(f"path: {tiny.texts}/docs.jsonl", f"path: {tmp_path}/docs.jsonl")
    if content is not None:
        (tmp_path / "docs.jsonl").write_bytes(content)
    error = lmworks("corpus", "prepare", path).error
    assert re.search(said, error), error


def test_bad_lines_and_a_200_mb_document_are_set_aside_and_said(lmworks: Lmworks, mine: Mine, tiny: Tiny, tmp_path: Path) -> None:
    """Beside good documents they stop nothing; the report counts them and the quarantine says where they lie."""
    path = mine(f"path: {tiny.texts}/docs.jsonl", f"path: {tmp_path}/docs")
    (tmp_path / "docs").mkdir()
    shutil.copy(tiny.texts / "docs.jsonl", tmp_path / "docs" / "good.jsonl")
    (tmp_path / "docs" / "bad.jsonl").write_bytes(b'{"text": \n{"text": "caf\xe9"}\n')
    with open(tmp_path / "docs" / "enormous.jsonl", "wb") as file:
        file.write(b'{"text": "')
        for _ in range(200):
            file.write(b"word " * 200_000)
        file.write(b'"}\n')
    done = lmworks("corpus", "prepare", path)
    assert done.code == 0
    for words in ("broken json", "bad utf8", "enormous"):
        assert words in done.out
    rows = [json.loads(line) for line in (tmp_path / "run" / "corpus" / "quarantine.jsonl").read_text().splitlines()]
    assert {(row["reason"], Path(row["origin"]).name) for row in rows} == {
        ("broken_json", "bad.jsonl:1"), ("bad_utf8", "bad.jsonl:2"), ("enormous", "enormous.jsonl@0")
    }  # fmt: skip
    assert max(len(row["text"]) for row in rows) < 10_000


@pytest.mark.parametrize("key", ["vocab_size", "tokenizer_sha256"])
def test_a_vocabulary_that_is_not_that_of_the_shards(tiny_copy: Tiny, key: str) -> None:
    manifest = tiny_copy.run_dir / "shards" / "manifest.json"
    document = json.loads(manifest.read_text())
    document[key] = {"vocab_size": 5120, "tokenizer_sha256": "0" * 64}[key]
    manifest.write_text(json.dumps(document))
    said = {
        "vocab_size": "the model's vocab_size 512 is smaller than the shards' 5,120 entries; delete the shards folder",
        "tokenizer_sha256": "the shards were made with another tokenizer (000000000000, now ",
    }
    with pytest.raises(UserError, match=f"^{re.escape(said[key])}"):
        tiny_copy.pretrain()


@pytest.mark.parametrize(("file", "done"), [("validation/code-00000.idx", "cut"), ("train/code-00000.bin", "gone")])
def test_a_shard_that_is_not_whole_is_made_again(lmworks: Lmworks, tiny_copy: Tiny, file: str, done: str) -> None:
    path = tiny_copy.run_dir / "shards" / file
    content = path.read_bytes()
    path.unlink() if done == "gone" else path.write_bytes(content[:-2])
    said = lmworks("shards", "build", tiny_copy.recipe, "--set", f"run_dir={tiny_copy.run_dir}")
    assert said.code == 0 and f"repeated because shards/{file} is missing" in said.out
    assert path.read_bytes() == content


def test_a_corrupt_shard(lmworks: Lmworks, tiny_copy: Tiny) -> None:
    """A flipped bit gives a token of the vocabulary, so only the hash can tell."""
    path = tiny_copy.run_dir / "shards" / "train" / "docs-00000.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2 & ~1] ^= 1
    path.write_bytes(content)
    error = lmworks("pretrain", tiny_copy.recipe, "--set", f"run_dir={tiny_copy.run_dir}").error
    assert error.startswith(f"{path} is damaged (its hash differs); delete the folder ")
    assert "run the same command again" in error
    assert not listing.directories(tiny_copy.run_dir / "checkpoints")


def test_a_shard_that_goes_bad_later(lmworks: Lmworks, tiny_copy: Tiny) -> None:
    """Before a resume the shards are compared again, and a batch never holds a token that was not written."""
    tiny_copy.pretrain("train.phases.long.tokens=512 tokens")
    path = tiny_copy.run_dir / "shards" / "train" / "docs-00000.bin"
    tokens = np.fromfile(path, np.uint16)
    tokens[::50] = 60_000
    tokens.tofile(path)
    done = lmworks("pretrain", tiny_copy.recipe, "--set", f"run_dir={tiny_copy.run_dir}")
    assert "is damaged (its hash differs)" in done.error
    error = lmworks("data", "batch", tiny_copy.run_dir, 3).error
    assert re.search(r"docs-00000\.bin is damaged \(its checksum differs at byte 0\); delete the folder", error)


def test_a_checkpoint_of_another_model(lmworks: Lmworks, finished: Tiny, tmp_path: Path) -> None:
    """Put there by hand."""
    tiny_copy = finished.copy(tmp_path / "run")
    (tiny_copy.run_dir / "resolved.json").unlink()
    error = lmworks("pretrain", tiny_copy.recipe, "--set", f"run_dir={tiny_copy.run_dir}", "--set", "model.intermediate_size=96").error
    assert re.search(r"step-000000\d\d is a checkpoint of another model: model.intermediate_size is 64 there and 96 here; use", error)
    assert (tiny_copy.run_dir / "checkpoints").exists()


def test_a_run_directory_that_cannot_be_written(lmworks: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = lmworks("run", tiny.recipe, "--set", f"run_dir={tmp_path}/file/run").error
    assert error == f"cannot write {tmp_path}/file/run: a part of it is not a directory; choose another run_dir"
    for place in ("/proc/run", tmp_path / ("long" * 99)):  # no superuser writes here either
        error = lmworks("run", tiny.recipe, "--set", f"run_dir={place}").error
        assert error.startswith(f"cannot write {place}: ") and error.endswith("make it writable, or choose another run_dir")


def test_a_directory_that_is_no_run(lmworks: Lmworks, tmp_path: Path) -> None:
    for command in (("data", "batch", tmp_path, 0), ("ckpt", "list", tmp_path), ("ckpt", "verify", tmp_path)):
        assert lmworks(*command).error == f"{tmp_path} is not a run directory (no resolved.json); make one with: lmworks run RECIPE"
    assert "is not a run directory" in lmworks("report", tmp_path / "nowhere").error


def test_a_step_outside_the_run(lmworks: Lmworks, tiny: Tiny) -> None:
    assert lmworks("data", "batch", tiny.run_dir, 21).error == "step 21 does not exist: the run has 21 steps, numbered from 0 to 20"


def test_wrong_commands(lmworks: Lmworks) -> None:
    assert lmworks("trian").error == "there is no command 'trian'; write: lmworks run"
    assert "Missing argument 'RECIPE'" in lmworks("run").error
    assert "No such option" in lmworks("run", "quickstart", "--sett", "a=b").error
    assert lmworks().code == 2 and "Usage" in lmworks().out


def test_debug_shows_where_an_error_comes_from(lmworks: Lmworks) -> None:
    for arguments in (("--debug", "run", "nowhere"), ("run", "nowhere", "--debug")):
        done = lmworks(*arguments)
        assert done.code == 2 and "Traceback (most recent call last)" in done.err and "UserError: there is no recipe 'nowhere'" in done.err
        assert done.err.splitlines()[-1].startswith("error: there is no recipe 'nowhere'")


def test_a_fault_of_ours_is_one_line_too(lmworks: Lmworks, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmworks.run import runner

    monkeypatch.setattr(runner, "stages_for", lambda *_: 1 / 0)
    done = lmworks("run", tiny.recipe)
    said = "error: ZeroDivisionError: division by zero (this is a bug in lmworks; --debug shows the traceback)\n"
    assert (done.code, done.err) == (ExitCode.BUG, said)
    assert "Traceback" in lmworks("run", tiny.recipe, "--debug").err


def test_ctrl_c_outside_training(lmworks: Lmworks, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmworks.run import runner

    def interrupt(*_: object, **__: object) -> None:
        os.kill(os.getpid(), 2)

    monkeypatch.setattr(runner, "stages_for", interrupt)
    done = lmworks("run", tiny.recipe)
    assert (done.code, done.err) == (130, "interrupted; finished work is kept, and the same command resumes it\n")


def test_a_preemption_asks_the_scheduler_for_another_start(lmworks: Lmworks, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmworks.run import runner
    from lmworks.ui.terminal import Preempted

    def preempt(*_: object) -> None:
        raise Preempted("saved at step 5")

    monkeypatch.setattr(runner, "stages_for", preempt)
    done = lmworks("run", tiny.recipe)
    assert (done.code, done.err) == (75, "saved at step 5\n")


@pytest.mark.parametrize("error", [UserError, ValueError])
def test_no_message_and_no_traceback_holds_a_password(
    lmworks: Lmworks, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    from lmworks.run import runner

    def fail(*_: object) -> None:
        raise error("cannot read s3://me:pass5word@host/bucket")

    monkeypatch.setattr(runner, "stages_for", fail)
    for options in ((), ("--debug",)):
        said = lmworks("run", tiny.recipe, *options).err
        assert "cannot read s3://***@host/bucket" in said and "pass5word" not in said
        assert ("Traceback" in said) == bool(options)


@pytest.mark.parametrize("command", ["show quickstart --json", "show quickstart", "show --help"])
def test_a_reader_that_closes_the_pipe_is_told_nothing(command: str) -> None:
    """Whether Python, the console or the parser's help prints it: 1 would be a negative result, under pipefail a failed node."""
    process = subprocess.Popen([sys.executable, "-m", "lmworks.cli.main", *command.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == ExitCode.BROKEN_PIPE


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux only")
@pytest.mark.parametrize("command", ["show quickstart --json", "show quickstart", "show --help"])
def test_output_that_is_lost_is_said(command: str) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        words = [sys.executable, "-m", "lmworks.cli.main", *command.split()]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, encoding="utf-8")
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    assert (done.returncode, len(done.stderr.splitlines())) == (ExitCode.USER_ERROR, 1), done.stderr
    assert done.stderr.startswith("error: a disk is full (OSError: [Errno 28] No space left on device); free some space")


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_an_error_keeps_its_code_when_nobody_reads(closed: str) -> None:
    process = subprocess.Popen([sys.executable, "-m", "lmworks.cli.main", "plan", "nosuch"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    getattr(process, closed).close()
    assert process.wait() == ExitCode.USER_ERROR


@pytest.mark.parametrize(
    "command",
    [
        "report RUN", "ckpt list RUN", "data batch RUN 1", "copy RUN file:///nowhere", "evaluate --follow RUN", "bundle RUN", "doctor RUN",
        "profile RUN", "ablate RUN", "launch readmit RUN host",
    ],
)  # fmt: skip
def test_a_name_that_no_directory_can_have_is_no_run(lmworks: Lmworks, tmp_path: Path, command: str) -> None:
    run = str(tmp_path / ("a" * 256))  # in a folder that exists: otherwise that is what the system says
    done = lmworks(*(run if word == "RUN" else word for word in command.split()))
    assert done.code == ExitCode.USER_ERROR and "File name too long; a name has at most 255 bytes" in done.error, done.err
