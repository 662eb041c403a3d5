"""Writes our benchmark sets as tasks of lm-evaluation-harness, YAML and JSON lines, so that anyone can repeat our scores there.

The worked examples stand in the prompts, so that the tasks need nothing else. Multiple-choice sets are written in the forms that are scored
by log-likelihood, and GSM8K with its number. Other replies are judged by code, which a task file cannot state.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lmworks import __version__
from lmworks.errors import UserError
from lmworks.evaluate.generation.interface import Prompt
from lmworks.evaluate.sets import benchmarks as loading
from lmworks.evaluate.sets.benchmarks import GENERATION, check_names
from lmworks.evaluate.sets.forms import cloze, letters
from lmworks.evaluate.sets.items import ChoiceItem, score_name
from lmworks.evaluate.sets.scoring import shots_of
from lmworks.io import files
from lmworks.io.destinations import require_folder
from lmworks.recipe.schema.evaluate import Benchmark
from lmworks.ui.terminal import bar

FORMS = ("cloze", "letters")
METRICS = {"byte": "acc_bytes", "char": "acc_norm", "none": "acc"}
"""Our normalizations that lm-evaluation-harness has, and its names for them."""
_DIGITS = r"-?[$]?[0-9][0-9,]*(?:\.[0-9]+)?"
_NUMBERS = {"stated": rf"(?:####|(?i:answer is)):? *({_DIGITS})", "last-number": f"({_DIGITS})"}
"""A number that is stated as the answer, and the last number. A reply counts in lmworks by the first, and if it has none and has ended, by
the second (`verify/numbers.py`, which reads more ways of stating an answer)."""
_README = """\
Benchmark sets of lmworks {version} as tasks of lm-evaluation-harness. Run them in this folder:

    lm_eval --model hf --model_args pretrained=MODEL,dtype=DTYPE,max_length=CONTEXT --include_path . --tasks {first}

CONTEXT and DTYPE are `context` and `dtype` of the model in results.json of lmworks, float32 or bfloat16: in another type, rounding decides
items whose choices are nearly alike, such as 1 of 40. `acc_bytes` is the score of lmworks in cloze form, and `acc` in letter form and
for sets with several contexts.

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

    Raises `UserError` for a set that cannot be written, and `Unavailable` for one whose data cannot be had.
    """
    require_folder(folder, "DIR")
    check_names(benchmarks)
    written = []
    with bar("exporting sets", len(benchmarks)) as progress:
        for benchmark in benchmarks:
            if benchmark.file is None and benchmark.name in GENERATION:
                written.append(_write_numbers(folder, benchmark, most))
            else:
                for form in forms:
                    written.append(_write(folder, benchmark, form, shots_of(benchmark, form), most))  # type: ignore[arg-type]
            progress.advance()
    lines = [f"- {one.task}: {one.score}, {one.items:,} items" for one in written]
    files.write_text(folder / "README.md", _README.format(version=__version__, first=written[0].task, table="\n".join(lines)))
    return written


def _write(folder: Path, benchmark: Benchmark, form: str, shots: int, most: int | None) -> Exported:
    loaded = loading.load(benchmark, benchmark.items or most, shots)
    make = letters if form == "letters" else cloze
    items = []
    for item in loaded.items:
        if not isinstance(item, ChoiceItem):
            raise UserError(f"{benchmark.name} has no choices, so lm-evaluation-harness cannot score it by log-likelihood; leave it out")
        items.append(make(item, loaded.shown_before(item, shots)))  # type: ignore[arg-type]
    partial = any(len(set(item.contexts)) > 1 for item in items)
    task = _partial(items) if partial else _plain(items)
    norms = ("none",) if partial or form == "letters" else tuple(METRICS)
    config = {
        "output_type": "multiple_choice", **task.columns, "target_delimiter": task.delimiter,
        "metric_list": [{"metric": METRICS[norm], "aggregation": "mean", "higher_is_better": True} for norm in norms],
    }  # fmt: skip
    return _finish(folder, benchmark.name, form, shots, config, list(task.rows))


def _write_numbers(folder: Path, benchmark: Benchmark, most: int | None) -> Exported:
    """A set whose replies are judged by a number."""
    if benchmark.name != "gsm8k":
        raise UserError(f"{benchmark.name} judges replies by code, which a task of lm-evaluation-harness cannot state; leave it out")
    chosen = GENERATION[benchmark.name].open(benchmark)
    shots = chosen.shots if benchmark.shots is None else benchmark.shots
    asked = chosen.prompts(benchmark.items or most, shots, _NoLimit())
    rows = [{"id": one.id, "prompt": one.text, "answer": one.answer} for one in asked]
    filters = [
        {"name": name, "filter": [{"function": "regex", "regex_pattern": pattern, "group_select": -1}, {"function": "take_first"}]}
        for name, pattern in _NUMBERS.items()
    ]
    config = {
        "output_type": "generate_until", "doc_to_text": "prompt", "doc_to_target": "answer", "target_delimiter": " ",
        "generation_kwargs": {"until": list(asked[0].stop), "max_gen_toks": asked[0].max_new_tokens, "do_sample": False},
        "filter_list": filters,
        "metric_list": [
            {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True, "regexes_to_ignore": [",", "\\$", "\\.0+$"]}
        ],
    }  # fmt: skip
    return _finish(folder, benchmark.name, "generate", shots, config, rows)


class _NoLimit:
    """A model of any context: the prompts of these sets do not depend on it."""

    context: int | None = None

    def length(self, prompt: Prompt) -> int:
        return len(prompt.text)


def _finish(folder: Path, name: str, form: str, shots: int, config: dict[str, Any], rows: list[dict[str, Any]]) -> Exported:
    task, score = task_name(name, form, shots), score_name(name, form, shots)
    files.write_text(folder / f"{task}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": f"{task}.jsonl"}}, "test_split": "test", "num_fewshot": 0}
    whole = {"task": task, **data, **config, "metadata": {"version": 1.0, "lmworks": __version__, "score": score}}
    files.write_text(folder / f"{task}.yaml", yaml.safe_dump(whole, sort_keys=False, allow_unicode=True))
    return Exported(task, score, len(rows))


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
