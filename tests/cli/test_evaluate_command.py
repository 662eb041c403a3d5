"""`lmworks evaluate` on models, and tasks of the user's own in a recipe, from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import Lmworks

from lmworks.evaluate.logprobs import PlainLogProbs
from lmworks.evaluate.sets import benchmarks, forms
from lmworks.io.files import read_json
from lmworks.recipe.schema.evaluate import Benchmark
from lmworks.tokenizer import load
from saved_run import save_run
from tiny_run import BRIEF, Tiny

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
PIQA = [{"goal": f"how to do {n}", "sol1": f"do it {n} times", "sol2": "never", "label": n % 2} for n in range(20)]


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def own_task(folder: Path, name: str, rows: list[dict[str, Any]], *keys: str) -> Path:
    (folder / f"{name}.jsonl").write_text(lines(rows))
    (folder / f"{name}.yaml").write_text("".join(f"{key}\n" for key in (f"file: {name}.jsonl", *keys)))
    return folder / f"{name}.yaml"


def test_a_model_is_scored_in_every_form(lmworks: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    models = save_run(tiny, tmp_path / "run")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "piqa.jsonl").write_text(lines(PIQA))
    sums = own_task(tmp_path, "sums", [{"question": f"{n} + 1?", "answer": n + 1} for n in range(8)], "metric: number")
    options = ("--form", "cloze,letters,free", "--data", tmp_path / "data", "--items", "12", "--out", tmp_path / "out")
    done = lmworks("evaluate", f"{tmp_path}/run@base", "--tasks", "piqa", *options, "--json")
    assert done.code == 0, done.err
    results = json.loads(done.out)
    (model,) = results["models"].values()
    assert set(model["scores"]) == {"piqa/cloze/0-shot", "piqa/letters/5-shot", "piqa/free/0-shot"}
    for name, score in model["scores"].items():
        assert score["n"] == 12 and score["form"] == name.split("/")[1] and score["reason"] == "asked for"
    assert model["scores"]["piqa/letters/5-shot"]["examples"]["from"] == "items that are not asked"
    assert sum(model["scores"]["piqa/free/0-shot"]["failures"].values()) == 12 - model["scores"]["piqa/free/0-shot"]["correct"]
    # the plain reference, one continuation at a time
    items = benchmarks.load(Benchmark(name="piqa", path=str(tmp_path / "data" / "piqa.jsonl")), 12, 0).items
    tokenizer, plain = load(tiny.run_dir / "tokenizer"), PlainLogProbs(models["base"], model["context"])
    answered = forms.answer(items, tokenizer, plain)  # type: ignore[arg-type]
    assert model["scores"]["piqa/cloze/0-shot"]["correct"] == forms.score(answered).correct
    # the training text was searched for none of it
    assert set(results["not_clean"]) == {"piqa"} and model["scores"]["piqa/cloze/0-shot"]["verdict"].endswith(", not clean")

    done = lmworks("evaluate", f"{tmp_path}/run@tuned", "--tasks", sums, "--shots", 2, "--items", 6, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert "sums/free/2-shot" in done.out
    saved = read_json(tmp_path / "out" / "results.json")["models"]
    assert set(saved) == {"run@base", "run@tuned"} and saved["run@base"] == model
    outcomes = [json.loads(line) for line in (tmp_path / "out" / "outcomes-run@base.jsonl").read_text().splitlines()]
    assert len(outcomes) == 36 and {one["score"] for one in outcomes} == set(model["scores"])


def test_the_form_that_suits_the_training_is_chosen_and_said(lmworks: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    save_run(tiny, tmp_path / "run")
    rows = [{"question": f"what is {n}?", "choices": ["red", "green"], "answer": n % 2} for n in range(10)]
    colors = own_task(tmp_path, "colors", rows, "choices: choices")
    done = lmworks("evaluate", f"{tmp_path}/run@base", "--tasks", colors)
    assert "colors/cloze/0-shot" in done.out and "letters" not in done.out.split("FLOPs")[0]
    assert "FLOPs, and models answer with letters from about 1e+21 on" in " ".join((done.out + done.err).split())
    few = own_task(tmp_path, "few", rows[:3], "choices: choices")
    done = lmworks("evaluate", f"{tmp_path}/run@base", "--tasks", few, "--form", "letters")
    assert done.code == 0 and "few/letters/1-shot" in done.out, done.err
    done = lmworks("evaluate", f"{tmp_path}/run@tuned", "--tasks", colors)
    assert "of its replies to probe items name a choice" in " ".join((done.out + done.err).split())


def test_wrong_arguments_are_one_line(lmworks: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    save_run(tiny, run := tmp_path / "run")
    assert lmworks("evaluate", run).error.startswith(f"{run} is a model: say on which sets to evaluate it with --tasks SET,...; known")
    assert "no benchmark set is called 'piqqa'; did you mean piqa?" in lmworks("evaluate", run, "--tasks", "piqqa").error
    assert "form: Input should be 'auto', 'cloze'" in lmworks("evaluate", run, "--tasks", "piqa", "--form", "essay").error
    assert lmworks("evaluate", run, "--tasks", "piqa", "--set", "seed=1").error == (
        f"--set changes a recipe, and with --tasks {run} is a model; leave one of them out"
    )
    assert lmworks("evaluate", run, "--tasks", "piqa", "--data", tmp_path).error == (
        f"--data {tmp_path} has neither piqa/ nor piqa.jsonl, piqa.parquet or piqa.arrow"
    )
    assert "does not exist" in lmworks("evaluate", tmp_path / "none", "--tasks", "piqa").error
    assert lmworks("evaluate", run, "--tasks", tmp_path / "none.yaml").error.startswith(f"the task {tmp_path}/none.yaml cannot be read: ")
    assert lmworks("evaluate", run, "--tasks", ",").error == "--tasks names no set; for example: --tasks arc-easy,sciq"


def test_sets_of_one_name_are_refused(lmworks: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    """Their scores and outcomes would have one name, and one would be lost."""
    save_run(tiny, run := tmp_path / "run")
    rows = [{"question": f"what is {n}?", "choices": ["red", "green"], "answer": n % 2} for n in range(4)]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        own_task(tmp_path / name, "colors", rows, "choices: choices")
    both = f"{tmp_path}/a/colors.yaml,{tmp_path}/b/colors.yaml"
    said = "evaluate.benchmarks: colors is listed twice, and its scores have one name; keep one, or rename a file"
    assert lmworks("evaluate", f"{run}@base", "--tasks", both).error == said
    assert lmworks("evaluate", f"{run}@base", "--tasks", f"{tmp_path}/a/colors.yaml", "--form", "cloze,cloze").error == said
    done = lmworks("evaluate", f"{run}@base", "--tasks", f"{tmp_path}/a/colors.yaml", "--form", "auto,cloze", "--out", tmp_path / "out")
    assert done.code == 0 and len((tmp_path / "out" / "outcomes-run@base.jsonl").read_text().splitlines()) == 4, done.err
    for name in ("piqa.jsonl", "piqa.parquet"):
        (tmp_path / name).write_text(lines(PIQA))
    (tmp_path / "piqa.README.md").write_text("about the rows")
    error = lmworks("evaluate", f"{run}@base", "--tasks", "piqa", "--data", tmp_path).error
    assert error == f"--data {tmp_path} has piqa.jsonl and piqa.parquet, of which one would be read; keep that one"


def test_options_of_models_are_refused_for_a_recipe(lmworks: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    """Each in one line, before a stage runs; the default value too, if it was given."""
    recipe = (tiny.recipe, "--set", f"run_dir={tmp_path / 'run'}")
    for name, *value in (
        ("--items", 5), ("--form", "auto"), ("--out", tmp_path), ("--json",), ("--device", "cpu"), ("--shots", 1), ("--data", tmp_path),
        ("--hub",), ("--lengths", "4096"), ("--wait", 1), ("--apply-chat-template",),
    ):  # fmt: skip
        error = lmworks("evaluate", *recipe, name, *value).error
        assert error.startswith(f"{name} has no effect with a recipe, only with --") and "set evaluate.* with --set" in error
    assert not (tmp_path / "run").exists()


def test_nothing_scored_is_an_error(lmworks: Lmworks, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the hub; with a second set that has rows, that one is scored."""

    def offline(*names: Any, **options: Any) -> Any:
        raise ConnectionError("cannot reach the hub")

    monkeypatch.setattr("datasets.load_dataset", offline)
    save_run(tiny, run := tmp_path / "run")
    for extra in ((), ("--json",), ("--out", tmp_path / "out")):
        error = lmworks("evaluate", f"{run}@base", "--tasks", "piqa", "--hub", *extra).error
        assert error.startswith("nothing was scored: piqa: cannot load ") and "cannot reach the hub; give the rows as files with" in error
    own = own_task(tmp_path, "sums", [{"question": f"{n} + 1?", "answer": n + 1} for n in range(8)], "metric: number")
    done = lmworks("evaluate", f"{run}@base", "--tasks", f"piqa,{own}", "--hub")
    assert done.code == 0 and "not measured: piqa" in " ".join(done.out.split()), done.err


def test_a_task_of_ones_own_is_kept_out_of_the_corpus_and_watched(lmworks: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    from test_protection import ITEM, OTHER, trained_on, with_leak

    def rows(*questions: str) -> list[dict[str, Any]]:
        return [{"question": question, "choices": ["the north one", "none"], "answer": 0} for question in questions]

    arguments = with_leak(tiny, tmp_path, ITEM, OTHER)
    task = own_task(tmp_path, "winds", rows(ITEM), "choices: choices")
    asked = ("--set", f"evaluate.benchmarks=[{task}]")
    done = lmworks("corpus", "prepare", *arguments, *asked)
    assert done.code == 0, done.err
    assert ITEM not in trained_on(tmp_path / "run") and OTHER in trained_on(tmp_path / "run")
    own_task(tmp_path, "winds", rows(ITEM, OTHER), "choices: choices")
    done = lmworks("corpus", "prepare", *arguments, *asked)
    assert "winds" in done.out + done.err and OTHER not in trained_on(tmp_path / "run")
    missing = f"evaluate.benchmarks=[{{name: piqa, path: {tmp_path}/no}}]"
    assert "has no data files" in lmworks("corpus", "prepare", *arguments, "--set", missing).error


def test_a_whole_run_with_own_tasks(tiny_copy: Tiny, tmp_path: Path) -> None:
    """Base and tuned are scored in the same form, and paired; open questions are answered freely."""
    rows = [{"question": f"what is {n}?", "choices": ["red", "green"], "answer": n % 2} for n in range(10)]
    colors = own_task(tmp_path, "colors", rows, "choices: choices")
    sums = own_task(tmp_path, "sums", [{"question": f"{n} + 1?", "answer": n + 1} for n in range(8)], "metric: number")
    asked = (f"evaluate.benchmarks=[{colors}, {sums}]", "evaluate.every=never")
    tiny_copy.walk(*asked, *BRIEF, last="evaluate", allow=["evaluate.benchmarks"])
    results = read_json(tiny_copy.run_dir / "evaluate" / "results.json")
    for model in results["models"].values():
        assert {"colors/cloze/0-shot", "sums/free/0-shot"} <= set(model["scores"])
    assert results["models"]["base"]["scores"]["colors/cloze/0-shot"]["chosen"]
    assert set(results["compared"]) >= {"colors/cloze/0-shot", "sums/free/0-shot"}
    assert "sums/free/0-shot" in (tiny_copy.run_dir / "report.html").read_text()
