"""`lmworks evaluate MODEL --harness` and `lmworks export-harness`, from the command line."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from command import Lmworks

from lmworks.evaluate import harness
from lmworks.io.files import read_json
from saved_run import save_run
from tiny_run import Tiny

needs_harness = pytest.mark.skipif(find_spec("lm_eval") is None, reason="no lm-eval: pip install 'lmworks[harness]'")
PIQA = [{"goal": f"how to do {n}", "sol1": f"do it {n} times", "sol2": "never", "label": n % 2} for n in range(12)]


@pytest.fixture(scope="module")
def run(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_run(tiny, folder := tmp_path_factory.mktemp("harness") / "run")
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Rows for the set piqa, as `--data` takes them."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PIQA))
    return tmp_path / "data"


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
@needs_harness
def test_our_scores_are_repeated_by_an_exported_task(lmworks: Lmworks, run: Path, data: Path, tmp_path: Path) -> None:
    done = lmworks("export-harness", tmp_path / "tasks", "--tasks", "piqa", "--data", data, "--json")
    assert done.code == 0, done.err
    written = {one["score"]: one for one in json.loads(done.out)}
    assert written.keys() == {"piqa/cloze/0-shot", "piqa/letters/5-shot"}
    cloze = written["piqa/cloze/0-shot"]
    assert cloze == {"task": "lmworks_piqa_cloze_0-shot", "score": "piqa/cloze/0-shot", "items": 12}
    readme = (tmp_path / "tasks" / "README.md").read_text()
    assert "dtype=DTYPE" in readme and "DTYPE are `context` and `dtype` of the model in results.json" in readme
    assert "lmworks_piqa_letters_5-shot" in readme and "--include_path ." in readme
    shutil.rmtree(data)  # the tasks need nothing else

    names = ",".join(one["task"] for one in written.values())
    options = ("--harness", names, "--include-path", tmp_path / "tasks", "--out", tmp_path / "out")
    done = lmworks("evaluate", f"{run}@base", *options)
    assert done.code == 0, done.err
    assert all(word in done.out for word in (cloze["task"], "acc_bytes", "0."))
    theirs = read_json(tmp_path / "out" / "results.json")["models"]["run@base"]["scores"]

    data.mkdir()
    (data / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PIQA))
    done = lmworks("evaluate", f"{run}@base", "--tasks", "piqa", "--form", "cloze,letters", "--data", data, "--json")
    ours = json.loads(done.out)["models"]["run@base"]["scores"]
    for score, metric in (("piqa/cloze/0-shot", "acc_bytes"), ("piqa/letters/5-shot", "acc")):
        entry = theirs[f"{written[score]['task']}/lm-eval/0-shot/{metric}"]
        assert (entry["correct"], entry["n"]) == (ours[score]["correct"], ours[score]["n"])
    outcomes = records(tmp_path / "out" / "outcomes-run@base.jsonl")
    assert len(outcomes) == sum(entry["n"] for entry in theirs.values())
    document = read_json(tmp_path / "out" / "lm-eval-run@base.json")
    assert document["results"][cloze["task"]]["acc_bytes,none"] == ours["piqa/cloze/0-shot"]["score"]
    assert document["config"]["model"] == "run@base" and document["configs"][cloze["task"]]["metadata"]["score"] == "piqa/cloze/0-shot"
    samples = records(tmp_path / "out" / "lm-eval-run@base.jsonl")
    assert {sample["task"] for sample in samples} == set(names.split(",")) and samples[0]["arguments"][0][0].startswith("Goal:")


@needs_harness
def test_options_reach_the_tasks(lmworks: Lmworks, run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "baber" / "piqa"
    folder.mkdir(parents=True)
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PIQA))
    options = ("--data", tmp_path / "data", "--shots", "2", "--items", "3", "--apply-chat-template", "--out", tmp_path / "out")
    done = lmworks("evaluate", run, "--harness", "piqa", *options, "--json")
    assert done.code == 0, done.err
    entry = json.loads(done.out)["models"]["run@tuned"]["scores"]["piqa/lm-eval-chat/2-shot/acc"]
    assert (entry["n"], entry["shots"]) == (3, 2)
    [prompt, *_] = [sample["arguments"][0][0] for sample in records(tmp_path / "out" / "lm-eval-run@tuned.jsonl")]
    assert (prompt.count("<|user|>"), prompt.count("<|assistant|>")) == (3, 3)
    first = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("lm-eval-*")}
    again = ("--data", tmp_path / "data", "--shots", "1", "--items", "3", "--out", tmp_path / "out")
    assert lmworks("evaluate", run, "--harness", "piqa", *again).code == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("lm-eval-*")}.items() >= first.items()
    assert read_json(tmp_path / "out" / "lm-eval-run@tuned.2.json")["config"]["apply_chat_template"] is False
    scores = read_json(tmp_path / "out" / "results.json")["models"]["run@tuned"]["scores"]
    assert {"piqa/lm-eval-chat/2-shot/acc", "piqa/lm-eval/1-shot/acc"} <= set(scores)  # a question in a chat is another one


def test_wrong_arguments_are_one_line(lmworks: Lmworks, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "belong to --harness" in lmworks("evaluate", run, "--tasks", "piqa", "--include-path", tmp_path).error
    for extra in ("--tasks", "--form", "--samples"):
        error = lmworks("evaluate", run, "--harness", "piqa", extra, "2" if extra == "--samples" else "piqa").error
        assert f"in their own form; leave {extra} out" in error
    assert lmworks("evaluate", run, "--harness", "piqa", "--failures").error == (
        "--failures has no effect with --harness, only with a recipe or --tasks; leave it out"
    )
    assert "--set changes a recipe" in lmworks("evaluate", run, "--harness", "piqa", "--set", "a=b").error
    assert "--form free: lm-evaluation-harness scores" in lmworks("export-harness", tmp_path, "--tasks", "piqa", "--form", "free").error
    assert "ruler" in (error := lmworks("export-harness", tmp_path, "--tasks", "ruler-niah-single-1").error) and "judges replies" in error
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    assert lmworks("evaluate", run, "--harness", "piqa").error == (
        "--harness needs lm-evaluation-harness: pip install 'lmworks[harness]'"
    )


@needs_harness
def test_wrong_tasks_are_one_line(lmworks: Lmworks, run: Path, tmp_path: Path) -> None:
    assert "did you mean piqa?" in lmworks("evaluate", run, "--harness", "piqqa").error
    assert "is no device of this machine" in lmworks("evaluate", run, "--harness", "piqa", "--device", "cuda:99").error
    assert "names no task" in lmworks("evaluate", run, "--harness", ",").error
    assert "is not a directory" in lmworks("evaluate", run, "--harness", "piqa", "--data", "nowhere").error
    assert "two sources of the same rows" in lmworks("evaluate", run, "--harness", "piqa", "--data", tmp_path, "--hub").error
    folder = tmp_path / ("long" * 50)  # a message that is cut would lose its end
    folder.mkdir()
    (folder / "task.yaml").write_text("task: mine\ndoc_to_text: !function code.text\n")
    assert "--trust-task-code" in lmworks("evaluate", run, "--harness", "mine", "--include-path", folder).error


@needs_harness
def test_prompts_that_are_cut_are_counted(lmworks: Lmworks, run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "baber" / "piqa"
    folder.mkdir(parents=True)
    long = PIQA[0] | {"goal": "how to go on " * 400}
    (folder / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [long, *PIQA]))
    done = lmworks("evaluate", f"{run}@base", "--harness", "piqa", "--data", tmp_path / "data", "--shots", "0", "--out", tmp_path / "out")
    assert "2 of 26 requests did not fit into the context of" in " ".join(done.out.split()), done.err
    [note] = read_json(tmp_path / "out" / "lm-eval-run@base.json")["config"]["notes"]
    assert note.endswith("and lost their beginnings")


def test_a_task_is_exported_with_its_own_examples(lmworks: Lmworks, tmp_path: Path) -> None:
    """As many as `lmworks evaluate` shows, which the name of the task says."""
    rows = [{"question": f"what is {n}?", "choices": ["red", "green"], "answer": n % 2} for n in range(10)]
    (tmp_path / "colors.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "colors.yaml").write_text("file: colors.jsonl\nchoices: choices\nshots: 2\n")
    done = lmworks("export-harness", tmp_path / "tasks", "--tasks", tmp_path / "colors.yaml", "--json")
    assert [one["score"] for one in json.loads(done.out)] == ["colors/cloze/2-shot", "colors/letters/2-shot"], done.err


def test_exported_tasks_ask_for_the_precision_that_was_scored(lmworks: Lmworks, data: Path, tmp_path: Path) -> None:
    """A model is scored in bf16 where the processor multiplies it: in fp32, 1 of 40 picks was another."""
    assert lmworks("export-harness", tmp_path / "tasks", "--tasks", "piqa", "--data", data).code == 0
    readme = (tmp_path / "tasks" / "README.md").read_text(encoding="utf-8")
    assert "dtype=DTYPE" in readme and "dtype=float32" not in readme
    assert "`context` and `dtype` of the model in results.json" in readme
