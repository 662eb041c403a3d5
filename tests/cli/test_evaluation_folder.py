"""`lmworks evaluate MODEL --out DIR`: further models and further sets are added to a folder, and nothing that it holds is lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Lmworks
from test_evaluate_command import own_task

from lmworks.export.export import write_huggingface
from lmworks.io import jsonl
from lmworks.io.files import read_json, write_json
from lmworks.run import model_evaluation
from lmworks.tokenizer import load
from saved_run import save_run
from tiny_run import Tiny

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def run(tiny: Tiny, tmp_path: Path) -> Path:
    save_run(tiny, tmp_path / "a" / "run")
    return tmp_path / "a" / "run"


def task(folder: Path, name: str, count: int = 6) -> Path:
    rows = [{"question": f"{name} {n}?", "choices": ["red", "green"], "answer": n % 2} for n in range(count)]
    return own_task(folder, name, rows, "choices: choices", "form: cloze")


def export(tiny: Tiny, to: Path, seed: int) -> Path:
    from lmworks.model import Transformer
    from lmworks.model.init import initialize

    model = initialize(Transformer(tiny.resolve(f"run_dir={to}").recipe.model), seed=seed).eval()
    write_huggingface(model, load(tiny.run_dir / "tokenizer"), to, torch.float32)
    return to


def scored(lmworks: Lmworks, out: Path, model: object, *tasks: Path) -> dict[str, Any]:
    """The entry that the command prints, with its `name`."""
    done = lmworks("evaluate", model, "--tasks", ",".join(map(str, tasks)), "--out", out, "--device", "cpu", "--json")
    assert done.code == 0, done.err
    [(name, entry)] = json.loads(done.out)["models"].items()
    return {"name": name, **entry, "said": done.err}


def ids(out: Path, name: str, kind: str = "outcomes") -> dict[str, int]:
    """The number of records of each set."""
    sets = [one["score"].split("/")[0] for one in jsonl.read(out / f"{kind}-{name}.jsonl")]
    return {one: sets.count(one) for one in sets}


def test_two_models_of_one_name_are_two_models(lmworks: Lmworks, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out, colors = tmp_path / "out", task(tmp_path, "colors")
    for number, name in enumerate(("emaA", "emaH")):
        export(tiny, Path(name, "export", "huggingface"), number)
    first, second = (scored(lmworks, out, f"{name}/export/huggingface", colors) for name in ("emaA", "emaH"))
    assert (first["name"], second["name"]) == ("huggingface", "emaH-export-huggingface")
    assert f"{out} has results of another huggingface" in second["said"] and "another" not in first["said"]
    saved = read_json(out / "results.json")["models"]
    for one, other in ((first, "emaA"), (second, "emaH")):
        entry = saved[one["name"]]
        assert entry["scores"] == one["scores"] and entry["source"]["path"] == str(tmp_path / other / "export" / "huggingface")
        assert ids(out, one["name"]) == ids(out, one["name"], "items") | {"colors": 6} == {"colors": 6}
    assert saved["huggingface"]["source"]["weights"] != saved["emaH-export-huggingface"]["source"]["weights"]
    # other weights in the same folder, and a copy of the first ones elsewhere
    export(tiny, Path("emaH", "export", "huggingface"), 7)
    assert scored(lmworks, out, "emaH/export/huggingface", colors)["name"] == "emaH-export-huggingface-2"
    shutil.copytree("emaA/export/huggingface", "copy/huggingface")
    assert scored(lmworks, out, "copy/huggingface", colors)["name"] == "huggingface"
    assert read_json(out / "results.json")["models"].keys() == {*saved, "emaH-export-huggingface-2"}
    found = json.loads(lmworks("compare", f"{out}@huggingface", f"{out}@emaH-export-huggingface", "--json").out)
    assert [one["name"] for one in found["models"]] == ["out@huggingface", "out@emaH-export-huggingface"]


def test_runs_of_one_name_and_an_extended_context_are_models_of_their_own(
    lmworks: Lmworks, run: Path, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_run(tiny, tmp_path / "b" / "run")
    shutil.rmtree(tmp_path / "b" / "run" / "checkpoints")
    shutil.copytree(run / "checkpoints" / "step-00000004", tmp_path / "b" / "run" / "checkpoints" / "step-00000004")
    out, colors = tmp_path / "out", task(tmp_path, "colors")
    assert [scored(lmworks, out, f"{one}/run@base", colors)["name"] for one in "ab"] == ["run@base", "b-run@base"]
    for rope, name in (("yarn:2", "run@base"), ("yarn:2", "run@base"), ("linear:2", "a-run@base-linear-2")):
        done = lmworks("evaluate", "a/run@base", "--tasks", colors, "--out", tmp_path / "ropes", "--rope", rope, "--json")
        assert list(json.loads(done.out)["models"]) == [name], done.err
    assert scored(lmworks, tmp_path / "ropes", "a/run@base", colors)["name"] == "a-run@base"
    models = read_json(tmp_path / "ropes" / "results.json")["models"]
    assert [one["source"].get("rope") for one in models.values()] == ["yarn:2", "linear:2", None]
    assert len(read_json(out / "results.json")["models"]) == 2


def test_other_sets_of_the_same_weights_are_added(lmworks: Lmworks, run: Path, tmp_path: Path) -> None:
    out, model = tmp_path / "out", f"{run}@base"
    first, second, third = task(tmp_path, "colors"), task(tmp_path, "shapes", 8), task(tmp_path, "sizes", 10)
    pooled = "all sets/cloze/0-shot"
    before = scored(lmworks, out, model, first, second)
    assert before["scores"][pooled]["n"] == 14
    after = scored(lmworks, out, model, third)
    assert set(after["scores"]) == {"sizes/cloze/0-shot"}
    [entry] = read_json(out / "results.json")["models"].values()
    scores = {name: one for name, one in (before["scores"] | after["scores"]).items() if name != pooled}
    assert {name: one for name, one in entry["scores"].items() if name != pooled} == scores
    whole = entry["scores"][pooled]
    assert (whole["n"], whole["sets"]) == (24, ["colors", "shapes", "sizes"])
    assert whole["correct"] == sum(one["correct"] for one in scores.values()) and whole["verdict"].endswith(", not clean")
    assert ids(out, "run@base") == {"colors": 6, "shapes": 8, "sizes": 10} and len(ids(out, "run@base", "items")) == 3
    # a set that is scored again replaces its own records, and no others
    task(tmp_path, "shapes", 4)
    scored(lmworks, out, model, second)
    assert ids(out, "run@base") == {"colors": 6, "sizes": 10, "shapes": 4}
    done = lmworks("evaluate", model, "--tasks", first, "--out", out, "--failures", "--json")
    assert set(json.loads(done.out)["failures"]["run@base"]) == {"colors/cloze/0-shot"}


def test_another_chat_template_is_another_model(lmworks: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    """It decides what a model is asked, as its tokenizer does: scores of both would stand as those of one."""
    out, colors, model = tmp_path / "out", task(tmp_path, "colors"), export(tiny, tmp_path / "model", 0)
    first = scored(lmworks, out, model, colors)
    assert scored(lmworks, out, model, colors)["name"] == first["name"] == "model"
    template = model / "chat_template.jinja"
    template.write_text((template.read_text() if template.exists() else "") + "{# of another version #}")
    assert scored(lmworks, out, model, colors)["name"] != "model"


def test_a_model_without_numbers_is_not_scored(lmworks: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    """Every comparison with NaN is false, so its first choice would count as its answer."""
    from safetensors.torch import load_file, save_file

    model = export(tiny, tmp_path / "model", 0)
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    cloze = "of 12 texts a log-probability that is not a number (NaN)"
    for form, said in (("cloze", cloze), ("free", "logits of the model are not numbers")):
        done = lmworks("evaluate", model, "--tasks", task(tmp_path, "colors"), "--form", form, "--out", tmp_path / "out", "--device", "cpu")
        assert done.code == 2 and said in done.error and not (tmp_path / "out" / "results.json").exists()


def test_results_of_earlier_versions_are_kept_beside(lmworks: Lmworks, run: Path, tmp_path: Path) -> None:
    """They do not say which weights they are of. What a stage has written beside the models stays too."""
    out, colors, model = tmp_path / "out", task(tmp_path, "colors"), f"{run}@base"
    scored(lmworks, out, model, colors)
    old = read_json(out / "results.json")
    del old["models"]["run@base"]["source"]
    write_json(out / "results.json", old | {"how": {"scores": "so"}})
    one = scored(lmworks, out, model, task(tmp_path, "shapes"))
    assert one["name"].endswith("a-run@base") and "/" not in one["name"]
    saved = read_json(out / "results.json")
    assert saved["models"] == old["models"] | {one["name"]: saved["models"][one["name"]]} and saved["how"] == {"scores": "so"}
    assert ids(out, "run@base") == {"colors": 6} and ids(out, one["name"]) == {"shapes": 6}
    assert lmworks("compare", f"{out}@run@base", f"{out}@{one['name']}", "--json").code in (0, 2)


def test_a_folder_that_cannot_be_used_is_refused_before_the_model_is_opened(
    lmworks: Lmworks, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    colors, out = task(tmp_path, "colors"), tmp_path / "out"
    scored(lmworks, out, f"{run}@base", colors)
    monkeypatch.setattr(model_evaluation, "open_model", lambda *_, **__: pytest.fail("the model was opened"))
    (tmp_path / "file").write_text("")

    def refused(out: Path) -> str:
        return lmworks("evaluate", f"{run}@base", "--tasks", colors, "--out", out).error

    place = tmp_path / "file"
    assert refused(place) == f"--out {place} cannot be written: {place} is not a directory; choose another path"
    assert f"{tmp_path / 'file'} is not a directory; choose another path" in refused(tmp_path / "file" / "deep" / "er")
    text = (out / "results.json").read_text()
    for damaged in (text[:300], "[]", '{"models": {"a": 1}}'):
        (out / "results.json").write_text(damaged)
        assert "choose another folder with --out, or remove this file" in refused(out)
        assert (out / "results.json").read_text() == damaged
    (out / "results.json").write_text(text)
    (out / "outcomes-run@base.jsonl").write_text('{"score": \n{}\n')
    assert "outcomes-run@base.jsonl" in refused(out)


def test_scores_that_cannot_be_written_are_printed(
    lmworks: Lmworks, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder was usable when the evaluation began."""
    real = model_evaluation.evaluate_model

    def then_blocked(*given: Any, **options: Any) -> Any:
        (tmp_path / "out").write_text("")
        return real(*given, **options)

    monkeypatch.setattr(model_evaluation, "evaluate_model", then_blocked)
    done = lmworks("evaluate", f"{run}@base", "--tasks", task(tmp_path, "colors"), "--out", tmp_path / "out", "--json")
    assert "cannot write" in done.error and json.loads(done.out)["models"]["run@base"]["scores"].keys() == {"colors/cloze/0-shot"}
