"""What is profiled: a stage of a recipe, or of a run with its newest weights; and the recipe as it trains with nothing else around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.io.run_layout import MODEL_STAGES, of_stage
from lmworks.recipe.keys import nearest_or_all
from lmworks.recipe.load import Resolved, load_recipe
from lmworks.recipe.schema.artifacts import Metrics
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.units import Seconds
from lmworks.run.run_dir import require_run
from lmworks.run.start import choose_mesh_here
from lmworks.run.time_budget import recorded_budget
from lmworks.shards.manifest import MANIFEST

_NEVER = Seconds(1e9)  # of a save by time
_MOST_KEPT = 1000  # checkpoints: those of the run are links, and none is deleted


@dataclass(frozen=True)
class Target:
    """A recipe and the stage of it that is profiled. `run_dir` has the data and the weights, which are read and never changed; None where
    there are none yet. `phase`: the number of the phase of pretraining to begin with; None for that of the newest weights."""

    name: str
    resolved: Resolved | None
    recipe: Recipe
    stage: str
    run_dir: Path | None
    phase: int | None = None

    @property
    def has_weights(self) -> bool:
        """Whether the stage has trained already."""
        return self.run_dir is not None and listing.has_checkpoints(self.run_dir / of_stage(self.stage).checkpoints)


def open_target(name: str, overrides: Sequence[str], size: str | None, stage: str | None, phase: str | None) -> Target:
    """The target of the command line: `name` is a recipe, or a run directory. Raises `UserError`."""
    run = Path(name)
    resolved: Resolved | None = None
    run_dir: Path | None = run
    if run.is_dir():
        recipe = require_run(run)
        if overrides:
            resolved = load_recipe(str(run / "resolved.json"), [f"run_dir={run}", *overrides], size)
            recipe = resolved.recipe
    else:
        resolved = load_recipe(name, list(overrides), size)
        assert resolved.recipe.run_dir
        there = Path(resolved.recipe.run_dir)
        resolved = choose_mesh_here(recorded_budget(resolved, there) or resolved)
        recipe = resolved.recipe
        run_dir = there if (there / "shards" / MANIFEST).exists() or (there / "tokenizer" / "tokenizer.json").exists() else None
    if recipe.size == "auto":
        raise UserError("size: auto has no shape before the run has chosen a size; profile one that you name with --size, such as 5M")
    chosen = _stage(recipe, run if run.is_dir() else None, stage)
    return Target(name, resolved, recipe, chosen, run_dir, _phase(recipe, chosen, phase))


def _stage(recipe: Recipe, run: Path | None, asked: str | None) -> str:
    """The stage: the one that was asked for, else the latest of a run that has trained, else the first that trains."""
    there = [*(["pretrain"] if recipe.trains_base else []), *recipe.later_stages]
    if not there:
        raise UserError("the recipe trains nothing; give it train.phases, tune, dpo or grpo")
    if asked is not None:
        if asked not in there:
            raise UserError(f"--stage {asked[:100]!r} is not a stage of this recipe that trains; {nearest_or_all(asked, there)}")
        return asked
    trained = [
        one.stage for one in MODEL_STAGES if run is not None and one.stage in there and listing.has_checkpoints(run / one.checkpoints)
    ]
    return trained[-1] if trained else there[0]


def _phase(recipe: Recipe, stage: str, asked: str | None) -> int | None:
    if asked is None:
        return None
    names = [phase.name for phase in recipe.train.phases] if stage == "pretrain" else []
    if asked not in names:
        raise UserError(f"--phase {asked[:100]!r} is not a phase of {stage}; {nearest_or_all(asked, names) if names else 'it has none'}")
    return names.index(asked)


def alone(recipe: Recipe, stage: str, run_dir: Path) -> Recipe:
    """The recipe of a profile: nothing is sent, copied or published, no save is due by time, and later stages start from the weights that
    there are."""
    train = recipe.train.model_copy(update={
        "save_every_time": _NEVER,
        "phases": [phase.model_copy(update={"save_every": None, "needle": False}) for phase in recipe.train.phases],
    })  # fmt: skip
    checkpoints = recipe.checkpoints.model_copy(update={"local": None, "copy_to": None, "keep_last": _MOST_KEPT})
    evaluate = recipe.evaluate.model_copy(update={"every": None, "prompts": ("The",)})
    changes = {
        "run_dir": str(run_dir), "train": train, "checkpoints": checkpoints, "evaluate": evaluate,
        "metrics": Metrics(detail_every=recipe.metrics.detail_every),
    }  # fmt: skip
    return recipe.model_copy(update=changes)
