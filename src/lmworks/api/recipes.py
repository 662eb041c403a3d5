"""Recipes in Python: load one from a file, a name, YAML text or a dictionary; show, plan and run it as the commands do."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lmworks.api.planning import PlannedRun, predict
from lmworks.errors import UserError
from lmworks.recipe.changes import as_tree
from lmworks.recipe.keys import flatten
from lmworks.recipe.load import Origin, Resolved, load_recipe_text, shipped_folder
from lmworks.recipe.load import load_recipe as load_file
from lmworks.recipe.schema.recipe import Recipe as RecipeTree
from lmworks.run.start import require_stage, start_run

if TYPE_CHECKING:
    from lmworks.api.runs import Run
    from lmworks.api.steps import TrainingSession
    from lmworks.recipe.schema.layout import Cluster


class Recipe:
    """A resolved recipe: every value is set, by default, preset, file, override or derivation.

    `config` is the typed tree: `recipe.config.model.hidden_size`. Keys and values are those of the recipe reference.
    """

    def __init__(self, resolved: Resolved, shipped: bool = False) -> None:
        self._resolved, self._shipped = resolved, shipped

    def __repr__(self) -> str:
        return f"<lmworks.Recipe {self.config.name}: {self.run_dir}>"

    @property
    def config(self) -> RecipeTree:
        """The values as a typed, frozen tree."""
        return self._resolved.recipe

    @property
    def run_dir(self) -> Path:
        """The directory that the run writes."""
        assert self.config.run_dir
        return Path(self.config.run_dir)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all values, in hexadecimal."""
        return self._resolved.fingerprint

    def values(self) -> dict[str, Any]:
        """Every value by its dotted key, as `lmworks show --json` prints it: `values()["model.hidden_size"]`."""
        return flatten(as_tree(self._resolved.recipe))

    def origin(self, key: str) -> Origin:
        """Where a value came from: default, preset, recipe, override, or derived with its formula. Raises `KeyError` for no key."""
        return self._resolved.origins[key]

    def plan(
        self, cluster: str | Cluster | None = None, *, mfu: float | str | None = None, calibrate: bool = False, to: str | None = None
    ) -> PlannedRun:
        """Predict parameters, FLOPs, memory, time and cost, as `lmworks plan` does; what the run would refuse is in `refusals`.

        cluster: a cluster file, a name, or a number of GPUs such as "8xh100"; by default this machine. mfu: model FLOPs utilization to
        assume, or a run directory in which it was measured. calibrate: measure it on this machine, half a minute. to: the last stage of the
        run, as of `run`.
        Raises `UserError` if there is no plan.
        """
        require_stage(to, "to")
        return predict(self._resolved, cluster, mfu=mfu, calibrate=calibrate, shipped=self._shipped, last=to)

    def run(self, to: str | None = None, allow: Sequence[str] = (), *, quiet: bool = False) -> Run:
        """Run the stages up to and including `to` (by default all), as `lmworks run` does: stages that are done are skipped, others are
        resumed or repeated. Runs in this process; `lmworks launch` runs on several ranks.

        allow: keys that may differ from those that training began with. quiet: print nothing of the stages to standard output.
        An interrupt (Ctrl-C, or the stop button of a notebook) during training finishes the step, saves and raises `Interrupted`; during
        data stages it raises `KeyboardInterrupt`. Call `run` again to resume. Raises `UserError` for what the command would refuse.
        """
        from lmworks.api.runs import Run
        from lmworks.ui.terminal import Terminal

        require_stage(to, "to")
        out = Terminal(quiet=True) if quiet else Terminal()
        return Run(start_run(self._resolved, out, last=to, allow=allow, resume_command="recipe.run()"))

    def training_session(self) -> TrainingSession:
        """Prepare the data, and open the model, its optimizer and its batches for a loop of your own; see `lmworks.api.steps`. The run
        resumes from its newest checkpoint. Raises `UserError` for what `run` would refuse."""
        from lmworks.api.steps import TrainingSession

        return TrainingSession(self._resolved)


def load_recipe(
    recipe: str | PathLike[str] | Mapping[str, Any], overrides: Mapping[str, Any] | Sequence[str] = (), *,
    size: str | None = None, time: str | None = None, corpus_only: bool = False, **sections: Any,
) -> Recipe:  # fmt: skip
    """Load, complete and check a recipe.

    recipe: a file, the name of a shipped recipe, a run directory, YAML text (of more than one line), or a dictionary of its keys.
    overrides: values by dotted key, `{"train.phases.general.tokens": "2M"}`, or texts as behind `--set`, `["seed=7"]`. Maps are merged into
    the recipe; lists and other values replace what stands there. Keyword arguments are overrides too: `seed=7, model={"hidden_size": 64}`.
    size: a parameter count such as "125M", from which all else is derived. time: wall time of the whole run, such as "8min".
    corpus_only: the recipe may lack a model; only its corpus can be made then.
    Relative paths in text or a dictionary begin at the working directory. Raises `UserError` of one line that names the key.
    """
    given = list(_written(overrides)) if isinstance(overrides, Mapping) else [overrides] if isinstance(overrides, str) else list(overrides)
    given += _written(sections | ({} if time is None else {"time": time}))
    if isinstance(recipe, Mapping):
        return Recipe(load_recipe_text(_as_text(recipe), given, size, corpus_only))
    if isinstance(recipe, str) and "\n" in recipe.strip():
        return Recipe(load_recipe_text(recipe, given, size, corpus_only))
    resolved = load_file(fspath(recipe), given, size, corpus_only)
    return Recipe(resolved, shipped=resolved.path.resolve().parent == shipped_folder().resolve())


def _as_text(recipe: Mapping[str, Any]) -> str:
    """The YAML of a dictionary, which is kept in the run directory. Raises `UserError` for values that are no plain data."""
    try:
        plain = json.loads(json.dumps(_plain(recipe), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UserError(f"a recipe has maps, lists, texts, numbers, true, false and null only: {error}") from None
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=sys.maxsize)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return fspath(value) if isinstance(value, PathLike) else value


def _written(overrides: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The overrides as they stand behind `--set`. Maps are gone into, so that they do not replace what they do not name."""
    for key, value in overrides.items():
        if isinstance(value, Mapping) and value:
            yield from _written(value, f"{above}{key}.")
            continue
        if "=" in str(key):
            raise UserError(f"{str(key)[:100]!r} is no key of a recipe; write overrides as {{'a.b': value}}, or as the text 'a.b=value'")
        try:
            yield f"{above}{key}={json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)}"
        except (TypeError, ValueError) as error:
            raise UserError(f"{above}{key} has a value that no recipe can have: {error}") from None
