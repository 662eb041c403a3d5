"""The stages that train weights, in their order: where each keeps its files, and what its model is called.

A stage starts from the final weights of the one before it. Everything that lists models or their checkpoints derives from `MODEL_STAGES`.

Paths of the documents of a corpus: SPLIT/OUTPUT/PART.parquet, with the columns `COLUMNS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks.errors import UserError

USED = "used_step"  # key in a checkpoint's meta: the step whose weights the stage has if it ends with this checkpoint
_STEP = re.compile(r"step-(\d{8,})\Z")


@dataclass(frozen=True)
class ModelStage:
    """`stage` is the name of the stage, and of its recipe section except for pretraining; `title` is its name in tables and pages; `model`
    is the name of the model that it trains. `folder` holds its checkpoints, metrics and samples, relative to the run directory.
    """

    stage: str
    title: str
    model: str
    folder: str = ""

    @property
    def checkpoints(self) -> str:
        """The folder of its checkpoints, relative to the run directory."""
        return f"{self.folder}/checkpoints" if self.folder else "checkpoints"

    @property
    def input(self) -> str:
        """Its checkpoints among the inputs of other stages: a name that ends in / means the newest checkpoint."""
        return f"{self.checkpoints}/"

    def place(self, run_dir: Path) -> Path:
        """The folder of its files."""
        return run_dir / self.folder if self.folder else run_dir


BASE = ModelStage("pretrain", "Pretraining", "base")
MODEL_STAGES = (
    BASE,
    ModelStage("tune", "Tuning", "tuned", "tune"),
    ModelStage("dpo", "Preference optimization", "dpo", "dpo"),
    ModelStage("grpo", "Reinforcement learning", "grpo", "grpo"),
)
MODELS = tuple(stage.model for stage in MODEL_STAGES)
INPUTS = tuple(stage.input for stage in MODEL_STAGES)


def of_model(model: str) -> ModelStage:
    """The stage that trains `model`. Raises `UserError` with the known names."""
    for stage in MODEL_STAGES:
        if stage.model == model:
            return stage
    raise UserError(f"{model!r} is not the name of a model; the names are {', '.join(MODELS)}")


def of_stage(name: str) -> ModelStage:
    """The stage called `name`. Raises `UserError` with the known names."""
    for stage in MODEL_STAGES:
        if stage.stage == name:
            return stage
    raise UserError(f"{name!r} trains no weights; the stages that do are {', '.join(one.stage for one in MODEL_STAGES)}")


def of_checkpoint(path: Path) -> tuple[ModelStage, Path]:
    """The stage that a checkpoint belongs to, by its path, and the run directory."""
    place = path.parent.parent
    for stage in MODEL_STAGES:
        if stage.folder and stage.folder == place.name:
            return stage, place.parent
    return BASE, place


def up_to(model: str) -> tuple[ModelStage, ...]:
    """The stages whose weights `model` descends from, its own included."""
    return MODEL_STAGES[: MODELS.index(of_model(model).model) + 1]


def last(stages: Iterable[ModelStage]) -> ModelStage:
    """The latest of some stages; that of the base model if there are none."""
    return max(stages, key=MODEL_STAGES.index, default=BASE)


def checkpoint_name(step: int) -> str:
    """The directory name of a step's checkpoint; sorts by step."""
    return f"step-{step:08d}"


def step_in(name: str) -> int | None:
    """The step in the name of a checkpoint's directory; None for any other name."""
    match = _STEP.match(name)
    return int(match[1]) if match else None


def ewc_folder(phase: str) -> str:
    """The folder, beside the checkpoints of a stage, of what elastic weight consolidation estimated when a phase began."""
    return f"ewc-{phase}"


def final_checkpoint_of(newest: Path, meta: Mapping[str, Any]) -> Path:
    """The checkpoint with the weights of a stage, whose newest one has this meta: training resumes from the newest, and what follows the
    stage starts from this one. They differ after early stopping, where it is the best."""
    step = meta.get(USED)
    return newest.with_name(checkpoint_name(step)) if isinstance(step, int) else newest


COLUMNS = ("id", "text", "source", "domain", "language", "origin", "facts")
"""All strings. `id` is SOURCE/PART/NUMBER, followed by .VARIANT for a variant; `origin` is the file and row that was read; `facts` is a
JSON object."""


def corpus_files(corpus_dir: Path, split: str) -> dict[str, list[Path]]:
    """The files of each output (a source, or a quality bucket of one) in `corpus_dir`/`split`, by name and part."""
    found: dict[str, list[Path]] = {}
    for path in sorted((Path(corpus_dir) / split).glob("[!.]*/[!.]*.parquet")):
        found.setdefault(path.parent.name, []).append(path)
    return found


def part_path(corpus_dir: Path, split: str, output: str, part: int) -> Path:
    """The file of one part of an output. A part without documents has no file."""
    return Path(corpus_dir) / split / output / f"{part:05d}.parquet"
