"""Runs tasks of lm-evaluation-harness on one of our models. Only the command that runs them imports this file (extra `harness`).

A run leaves our results and outcomes, the harness's own results and samples, and a table.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import torch
from lm_eval.evaluator import evaluate
from rich.table import Table

from lmworks.errors import UserError
from lmworks.evaluate import results_folder
from lmworks.evaluate.harness.lm import HarnessLM
from lmworks.evaluate.harness.task_data import Source
from lmworks.evaluate.harness.task_index import check_names, loaders, manager
from lmworks.evaluate.records import EvaluationResults
from lmworks.evaluate.results_folder import Evaluated, Origin
from lmworks.evaluate.sets.items import score_name, short_digest
from lmworks.evaluate.statistics import Score
from lmworks.io import files
from lmworks.ui.terminal import bar, console
from lmworks.weights.open import OpenModel

FORM = "lm-eval"
_SEED = 1234  # of examples and of resampling: the default of lm-evaluation-harness
_ITERATIONS = 1000  # resamplings of a standard error that has no formula


@dataclass(frozen=True)
class HarnessOptions:
    """What to run. `shots` and `limit` (items per task) replace what a task says; `where` is that of `Source`."""

    tasks: Sequence[str]
    include_path: Path | None = None
    trusted: bool = False
    shots: int | None = None
    limit: int | None = None
    chat_template: bool = False
    where: str | None = None


@dataclass(frozen=True)
class HarnessResults:
    """`document` is what lm-evaluation-harness returns, with the samples; `notes` say what was used instead of what a task names, and how
    many prompts were cut."""

    document: dict[str, Any]
    notes: list[str]

    @property
    def rows(self) -> list[tuple[str, int, str, int, float, float | None]]:
        """Task or group, examples, metric (and filter), items, value, standard error."""
        rows = []
        for task, metrics in (self.document["results"] | self.document.get("groups", {})).items():
            for name, value in metrics.items():
                metric, _, of_filter = name.partition(",")
                if not of_filter or metric.endswith("_stderr") or not isinstance(value, int | float):
                    continue
                error = metrics.get(f"{metric}_stderr,{of_filter}")
                label = metric if of_filter == "none" else f"{metric} ({of_filter})"
                shots = self.document["n-shot"].get(task, 0)
                items = metrics.get("sample_len") or sum(metrics.get("sample_count", {}).values())
                rows.append((task, shots, label, int(items), float(value), float(error) if isinstance(error, int | float) else None))
        return rows

    @property
    def _form(self) -> str:
        """Questions in the chat template of the model are asked in another form than those in plain text."""
        return f"{FORM}-chat" if self.document["config"]["apply_chat_template"] else FORM

    def scores(self) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
        """The scores and outcomes as our own evaluation writes them, of all metrics that are right or wrong for an item."""
        scores: dict[str, dict[str, Any]] = {}
        outcomes: list[dict[str, Any]] = []
        for task, samples in self.document["samples"].items():
            shots = int(self.document["n-shot"].get(task, 0))
            for metric, of_filter in dict.fromkeys((metric, one["filter"]) for one in samples for metric in one["metrics"]):
                marked = [(one, one[metric]) for one in samples if one["filter"] == of_filter and metric in one]
                if not all(isinstance(mark, int | float | bool) and mark in (0, 1) for _, mark in marked):
                    continue
                label = metric if of_filter == "none" else f"{metric} ({of_filter})"
                name, right = score_name(task, self._form, shots, label), [bool(mark) for _, mark in marked]
                chance = sum(_chance(one) for one, _ in marked) / len(marked)
                entry = Score(sum(right), len(right), chance, chance).to_json()
                about = {"set": task, "form": self._form, "shots": shots, "norm": None, "chosen": False, "reason": "asked for"}
                scores[name] = entry | about
                outcomes += (
                    {"score": name, "set": task, "id": str(one["doc_id"]), "subject": "", "correct": bool(mark), "value": float(mark),
                     "failure": None if mark else "wrong", "tokens": 0, "asked": short_digest(one["doc_hash"], one["target_hash"])}
                    for one, mark in marked
                )  # fmt: skip
        return scores, outcomes


def _chance(sample: dict[str, Any]) -> float:
    """1 / number of choices of a multiple-choice item; 0 elsewhere."""
    answers = sample["filtered_resps"]
    return 1 / len(answers) if len(answers) > 1 and all(isinstance(one, list | tuple) and len(one) == 2 for one in answers) else 0.0


def run(opened: OpenModel, options: HarnessOptions) -> HarnessResults:
    """Run the tasks on a model.

    Raises `UserError` for a task that does not exist, that has no data or names code that is not trusted, and for one that executes what
    the model writes.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    tasks = manager(options.include_path, options.trusted)
    check_names(tasks, options.tasks)
    source = Source(options.where, options.shots)
    random.seed(0)
    np.random.seed(_SEED)
    torch.manual_seed(_SEED)
    with source.installed(), loaders(options.trusted):
        with bar("loading tasks") as source.progress:
            loaded = _load(tasks, options)
        for note in source.notes:
            console.print(note, style="yellow")
        for task in loaded["tasks"].values():
            _set_examples(task, options.shots)
        asked = HarnessLM(opened)
        found = evaluate(
            asked, loaded, limit=options.limit, bootstrap_iters=_ITERATIONS, apply_chat_template=options.chat_template,
            fewshot_as_multiturn=options.chat_template,
        )  # fmt: skip
    assert found is not None
    document, notes = dict(found), [*source.notes, *asked.notes]
    document["config"] = asked.get_model_info() | {
        "lm_eval_version": lm_eval.__version__, "apply_chat_template": options.chat_template, "limit": options.limit, "seed": _SEED,
        "data": options.where, "notes": notes,
    }  # fmt: skip
    return HarnessResults(document, notes)


def _load(tasks: Any, options: HarnessOptions) -> Any:
    try:
        loaded = tasks.load(list(options.tasks))
    except UserError:
        raise
    except Exception as error:  # a task file may be wrong in any way, and its functions may raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise UserError(f"--harness {','.join(options.tasks)}: the task cannot be loaded ({reason})") from error
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise UserError(f"--harness: {name} executes programs that the model writes; for HumanEval use --tasks humaneval, in a sandbox")
        if getattr(task, "MULTIMODAL", False):
            raise UserError(f"--harness: {name} shows images or sound, and lmworks models read text; leave it out")
    return loaded


def _set_examples(task: Any, shots: int | None) -> None:
    """The number of worked examples, as lm-evaluation-harness settles it: a task that says 0 always has none."""
    own = task.get_config("num_fewshot")
    if own is None or (shots is not None and own != 0):
        task.set_config("num_fewshot", shots or 0)
    task.set_fewshot_seed(seed=_SEED)


def evaluated(opened: OpenModel, found: HarnessResults) -> Evaluated:
    """The scores, as those of an evaluation of ours."""
    scores, outcomes = found.scores()
    dtype = str(opened.model.compute_dtype).removeprefix("torch.")
    model = {"context": opened.context, "dtype": dtype, "scores": scores, "unavailable": {}}
    return Evaluated(opened.name, model, {}, EvaluationResults(scores, outcomes))


def record(one: Evaluated, found: HarnessResults, out_dir: Path, origin: Origin) -> Evaluated:
    """Write everything into `out_dir`; the scores under the name that they have there. What lm-evaluation-harness reports of another run of
    it on the same model is kept: its files get a number.

    results.json, outcomes-NAME.jsonl     the metrics that are right or wrong for an item, as for our own scores
    lm-eval-NAME.json                     what lm-evaluation-harness reports: all metrics, task configurations, versions
    lm-eval-NAME.jsonl                    its samples: prompts, answers and marks of every item
    """
    one = results_folder.add(out_dir, one, origin)
    document = {key: value for key, value in found.document.items() if key != "samples"}
    samples = [{"task": task, **sample} for task, of_task in found.document["samples"].items() for sample in of_task]
    text = "".join(json.dumps(sample, ensure_ascii=False, default=str) + "\n" for sample in samples)
    names = (f"lm-eval-{one.name}{f'.{number}' if number > 1 else ''}" for number in count(1))
    with files.only_one(out_dir / results_folder.FILE):
        name = next(name for name in names if not (out_dir / f"{name}.json").exists())
        files.write_text(out_dir / f"{name}.jsonl", text)
        files.write_text(out_dir / f"{name}.json", json.dumps(document, indent=2, ensure_ascii=False, default=str) + "\n")
    return one


def table(name: str, found: HarnessResults) -> Table:
    """All metrics with their standard errors, as lm-evaluation-harness reports them."""
    made = Table(title=f"lm-evaluation-harness {found.document['config']['lm_eval_version']}: {name}", title_justify="left")
    for heading in ("task", "examples", "metric", "items", "value"):
        made.add_column(heading, justify="left" if heading in ("task", "metric", "value") else "right")
    for task, shots, metric, items, value, error in found.rows:
        made.add_row(task, str(shots), metric, f"{items:,}", f"{value:.4f}" + (f" ± {error:.4f}" if error is not None else ""))
    if found.notes:
        made.caption = "; ".join(found.notes)
    return made
