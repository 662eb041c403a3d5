"""Writes our benchmark sets as tasks of lm-evaluation-harness, YAML and JSON lines, so that anyone can repeat our scores there.

The worked examples stand in the prompts, so that the tasks need nothing else. Multiple-choice sets are written in the forms that are scored
by log-likelihood. Free answers are read from replies by rules that a task file cannot state.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lmworks import __version__, files
from lmworks.errors import UserError
from lmworks.evaluate.forms import prompts
from lmworks.evaluate.items import ChoiceItem, score_name
from lmworks.evaluate.sets import loading
from lmworks.progress import bar
from lmworks.recipe.schema.evaluate import Benchmark

FORMS = ("cloze", "letters")
METRICS = {"byte": "acc_bytes", "char": "acc_norm", "none": "acc"}
"""Our normalizations that lm-evaluation-harness has, and its names for them."""
_README = """\
Benchmark sets of lmworks {version} as tasks of lm-evaluation-harness. Run them in this folder:

    lm_eval --model hf --model_args pretrained=MODEL,dtype=float32,max_length=CONTEXT --include_path . --tasks {first}

CONTEXT is the context length in results.json of lmworks. `acc_bytes` is the score of lmworks in cloze form, `acc` in letter form.

{table}
"""


@dataclass(frozen=True)
class Exported:
    """A task file that was written, for the score `score` of `items` items."""

    task: str
    score: str
    items: int


def task_name(name: str, form: str, shots: int) -> str:
    """The name of the task for a set in a form."""
    return f"lmworks_{name}_{form}_{shots}-shot"


def export(folder: Path, benchmarks: Sequence[Benchmark], forms: Sequence[str] = FORMS, most: int | None = None) -> list[Exported]:
    """Write the sets into `folder`, at most `most` items each, the same that our evaluation asks; None for all.

    Raises `UserError` for a set without choices, and `Unavailable` for one whose data cannot be had.
    """
    written = []
    with bar("exporting sets", len(benchmarks) * len(forms)) as progress:
        for benchmark in benchmarks:
            for form in forms:
                shots = benchmark.shots if benchmark.shots is not None else prompts.SHOTS[form]  # type: ignore[index]
                written.append(_write(folder, benchmark, form, shots, most))
                progress.advance()
    lines = [f"- {one.task}: {one.score}, {one.items:,} items" for one in written]
    files.write_text(folder / "README.md", _README.format(version=__version__, first=written[0].task, table="\n".join(lines)))
    return written


def _write(folder: Path, benchmark: Benchmark, form: str, shots: int, most: int | None) -> Exported:
    loaded = loading.load(benchmark, benchmark.items or most, shots)
    make = prompts.letters if form == "letters" else prompts.cloze
    items = []
    for item in loaded.items:
        if not isinstance(item, ChoiceItem):
            raise UserError(f"{benchmark.name} has no choices, so lm-evaluation-harness cannot score it by log-likelihood; leave it out")
        items.append(make(item, loaded.shown_before(item, shots)))  # type: ignore[arg-type]
    name = task_name(benchmark.name, form, shots)
    partial = any(len(set(item.contexts)) > 1 for item in items)
    task = _partial(items) if partial else _plain(items)
    rows, delimiter = list(task.rows), task.delimiter
    files.write_text(folder / f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    norms = ("none",) if partial or form == "letters" else tuple(METRICS)
    config = {
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}}, "test_split": "test",
        "output_type": "multiple_choice", **task.columns, "target_delimiter": delimiter, "num_fewshot": 0,
        "metric_list": [{"metric": METRICS[norm], "aggregation": "mean", "higher_is_better": True} for norm in norms],
        "metadata": {"version": 1.0, "lmworks": __version__, "score": score_name(benchmark.name, form, shots)},
    }  # fmt: skip
    files.write_text(folder / f"{name}.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    return Exported(name, score_name(benchmark.name, form, shots), len(rows))


@dataclass(frozen=True)
class _Task:
    rows: Iterator[dict[str, Any]]
    columns: dict[str, str]
    delimiter: str


def _plain(items: Sequence[ChoiceItem]) -> _Task:
    """One context, and a continuation for each choice."""
    delimiter = _delimiter([rest for item in items for rest in item.continuations])
    rows = (
        {"id": item.id, "subject": item.subject, "context": item.contexts[0],
         "choices": [rest[len(delimiter) :] for rest in item.continuations], "answer": item.answer}
        for item in items
    )  # fmt: skip
    return _Task(rows, {"doc_to_text": "context", "doc_to_choice": "choices", "doc_to_target": "answer"}, delimiter)


def _partial(items: Sequence[ChoiceItem]) -> _Task:
    """A context for each choice, and one continuation: what lm-evaluation-harness calls multiple inputs."""
    delimiter = _delimiter([rest for item in items for rest in item.continuations])
    if any(len(set(item.continuations)) > 1 for item in items):
        raise UserError(f"{items[0].set} has items in which contexts and continuations differ; lm-evaluation-harness has no such task")
    rows = (
        {"id": item.id, "subject": item.subject, "contexts": list(item.contexts), "continuation": item.continuations[0][len(delimiter) :],
         "answer": item.answer}
        for item in items
    )  # fmt: skip
    return _Task(rows, {"doc_to_text": "answer", "doc_to_choice": "contexts", "doc_to_target": "continuation"}, delimiter)


def _delimiter(continuations: Sequence[str]) -> str:
    """The space before every continuation, which does not count in its length; nothing if some lack it."""
    return " " if all(rest.startswith(" ") for rest in continuations) else ""
