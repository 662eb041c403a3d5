"""An ablation file to arms with resolved recipes, each checked before anything runs.

The noise floors of an earlier ablation count only for the recipe and the budget that they were measured with, so its results state both.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lmworks.ablate.file import OF_ABLATION, Ablation, Expansion, meant, refuse_own_keys
from lmworks.ablate.kinds import kinds
from lmworks.ablate.measures import Measure, needs_evaluation
from lmworks.ablate.measures import resolve as resolve_measures
from lmworks.ablate.run_set import ALWAYS, DEFAULTS, NAME, Arm, RunSet, matter, run_dir, seed_list, share_tokenizer
from lmworks.ablate.sample import SAMPLES, require_same
from lmworks.errors import UserError
from lmworks.io.files import read_json
from lmworks.recipe.changes import as_tree, canonical, changed_keys, readers
from lmworks.recipe.document import parse_file
from lmworks.recipe.former import with_former_paths
from lmworks.recipe.load import as_node, load_recipe, load_resolved, shipped, shipped_folder
from lmworks.recipe.schema.base import BEFORE_TUNING, StageName
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.timeline import Schedules, Timeline
from lmworks.run.run_dir import recipe_values

CONDITIONS = "noise_conditions"
_SEEDS = ("train.seed", "train.init_seed")  # a floor is about what these change
_SHOWN = 3
_WEIGHTS = "drawn anew for each arm and seed"  # as `runs.seeds_of` does; floors of an earlier version do not say so


def conditions(baseline: Arm) -> dict[str, Any]:
    """What a noise floor holds for: the training tokens of a run, and a hash of each recipe value of the baseline that a stage reads. And
    what makes it one: initial weights that vary over seeds."""
    values = {
        path: _hash(value)
        for path, value in recipe_values(baseline.recipe).items()
        if (readers(path) or path in SAMPLES) and path not in _SEEDS and not _is_budget(path)
    }
    return {"tokens": baseline.tokens - baseline.started_at, "recipe": values, "weights": _WEIGHTS}


def _hash(value: Any) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()[:16]


def _is_budget(path: str) -> bool:
    return path.startswith("train.phases.") and path.endswith(".tokens")


_FLOORS = ("paired", "unpaired")


def read_floors(
    folder: Path, name: str, baseline: Arm, measures: Sequence[Measure], stages: Sequence[StageName], needs_all: bool
) -> dict[str, Any]:
    """The noise floors by measure in `folder`/`name`, for runs of the baseline up to `stages`.

    Raises `UserError` if they were measured with another recipe or budget, lack the noise of initial weights, or lack a measure: one of
    them if the ablation `needs_all`, because it has one seed, else every one. What a floor was measured on (`sample`) is compared when runs
    have finished.
    """
    path = folder.expanduser() / name
    document = read_json(path)
    try:
        floors = {
            measure: {kind: one["noise"][kind] for kind in _FLOORS} | {"sample": one.get("sample")}
            for measure, one in document["measures"].items()
        }
        known = [measure for measure, one in floors.items() if any(one[kind]["df"] for kind in _FLOORS)]
        there: Mapping[str, Any] | None = document.get(CONDITIONS)
        fixed = there is not None and there.get("weights") != _WEIGHTS and _fixes_weights(folder.expanduser(), document)
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"noise: {path} is not the result of an ablation; name the directory of one") from None
    if there is None:
        raise UserError(f"noise: {path} is of a version that did not record its recipe; run its lmworks ablate command again to add it")
    if fixed:
        raise UserError(
            f"noise: the runs of {folder} have the same initial weights with every seed (train.init_seed, in an earlier version), so its "
            "floors lack the noise of initial weights; run that ablation again in another directory"
        )
    _require_equal(folder, there, baseline, stages)
    missing = [measure.name for measure in measures if measure.name not in known]
    if missing and (needs_all or len(missing) == len(measures)):
        raise UserError(
            f"noise: {folder} has no noise floor of {missing[0]}; add it to the measures there and run that ablation again, or leave it out"
        )
    return floors


def _fixes_weights(folder: Path, document: Mapping[str, Any]) -> bool:
    """Whether the runs of an ablation of an earlier version have a `train.init_seed`, which that version kept over all seeds."""
    recipes = [path for name in document["arms"] if (path := run_dir(folder, name, 0).parent / "resolved.json").is_file()]
    return document["kind"] == "noise" or any(load_resolved(path).train.init_seed is not None for path in recipes)


def _require_equal(folder: Path, there: Mapping[str, Any], baseline: Arm, stages: Sequence[StageName]) -> None:
    here = conditions(baseline)
    own = f"make a noise floor of this one with kind: noise and budget: {here['tokens']} tokens"
    if there["tokens"] != here["tokens"]:
        raise UserError(f"noise: the runs of {folder} have {there['tokens']:,} training tokens, and these have {here['tokens']:,}; {own}")
    before, after = with_former_paths(there["recipe"], as_tree(baseline.recipe), _hash), here["recipe"]
    other = [
        path for path in {**after, **before}
        if before.get(path) != after.get(path) and (path in SAMPLES or set(readers(path)) & set(stages))
    ]  # fmt: skip
    if other:
        more = f" and {len(other) - _SHOWN} more" if len(other) > _SHOWN else ""
        raise UserError(f"noise: the baseline of {folder} has another recipe ({', '.join(other[:_SHOWN])}{more}); {own}")


RESULTS = "ablation.json"


@dataclass(frozen=True, eq=False)
class Experiment(RunSet):
    """A resolved ablation."""

    ablation: Ablation = field(kw_only=True)
    measures: list[Measure] = field(kw_only=True)
    earlier: Mapping[str, Any] = field(default_factory=dict, kw_only=True)  # noise floors of the ablation that `noise` names, by measure

    @property
    def started_at(self) -> int:
        """Tokens of the checkpoint that all arms continue."""
        return self.baseline.started_at

    def is_paired(self, arm: Arm) -> bool:
        """Whether a seed gives this arm the data order that it gives the baseline."""
        return bool(arm.order == self.baseline.order)


def load_file(path: str | Path) -> tuple[Ablation, Path, str]:
    """Read an ablation file, by path or by the name of a shipped one. Raises `UserError` with file and line."""
    found = _find(path)
    document = parse_file(found)
    kind = document.tree.get("kind", "arms")
    if not isinstance(kind, str) or kind not in kinds():
        raise UserError(f"{document.place(('kind',))}: there is no kind {kind!r} of ablation; {meant(str(kind), kinds())}")
    return as_node(document, kinds()[kind]), found, found.read_text(encoding="utf-8")


def _find(path: str | Path) -> Path:
    given, folder = Path(path), shipped_folder() / "ablations"
    for one in (given, folder / f"{path}.yaml"):
        if one.is_file():
            return one
    raise UserError(f"there is no ablation file {str(path)!r}, as a file or by name; {meant(given.stem, shipped('ablations'))}")


def resolve(path: str | Path, out: Path | None = None, speeds: Mapping[str, float] | None = None) -> Experiment:
    """Resolve an ablation file and check every arm. `out` replaces its directory.

    `speeds` are tokens per second of the arms, for `equal: time`; an arm without one has the tokens of the baseline.
    Raises `UserError` of one line.
    """
    ablation, found, text = load_file(path)
    name = ablation.name or found.stem
    out = out or Path(ablation.out or f"runs/ablations/{name}")
    base = load_recipe(ablation.recipe, [*DEFAULTS, *ablation.set]).recipe
    try:
        refuse_own_keys("set", ablation.set, "ablation", OF_ABLATION)
        expansion = ablation.expand(base)
        if expansion.fixed_tokens and ablation.equal == "time":
            raise UserError(f"equal: time does not apply to kind {ablation.kind}, whose arms train on equal tokens; leave equal out")
    except UserError as error:
        raise UserError(f"{found}: {error}") from None
    arms = _resolve_arms(ablation, expansion, speeds or {})
    arms = share_tokenizer(arms, arms[expansion.baseline], out)
    base = arms[expansion.baseline].recipe
    arms = {
        name: replace(one, changes=tuple(matter(changed_keys(base, one.recipe))), label=expansion.labels.get(name), branch=expansion.branch)
        for name, one in arms.items()
    }
    baseline = arms[expansion.baseline]
    measures = resolve_measures(
        ablation.measures or ablation.default_measures, {arm.name: arm.recipe for arm in arms.values()}, _tokenizers(arms, baseline)
    )
    require_same(measures, {arm.name: arm.recipe for arm in arms.values()})
    last: StageName = "evaluate" if needs_evaluation(measures) else "pretrain"
    stages = tuple(dict.fromkeys((*BEFORE_TUNING, last)))
    _refuse_equal(arms, stages, found)
    seeds, earlier = seed_list(ablation.seeds), dict[str, Any]()
    if ablation.noise is not None:
        earlier = read_floors(Path(ablation.noise), RESULTS, baseline, measures, stages, needs_all=len(seeds) == 1)
    return Experiment(
        "lmworks ablate", ablation.recipe, tuple(ablation.set), found, out, arms, baseline, seeds, last, text,
        ablation=ablation, measures=measures, earlier=earlier,
    )  # fmt: skip


def _resolve_arms(ablation: Ablation, expansion: Expansion, speeds: Mapping[str, float]) -> dict[str, Arm]:
    """The arms in the order of the file. The baseline is resolved first, because the others get its tokens, or its time."""
    found: dict[str, Arm] = {}
    budget = None if ablation.budget is None else int(ablation.budget)
    for name in sorted(expansion.arms, key=lambda name: name != expansion.baseline):
        own = expansion.arms[name]
        overrides = [*DEFAULTS, *ablation.set, *own, *ALWAYS]
        try:
            if not re.fullmatch(NAME, name):
                raise UserError(
                    "cannot be the name of an arm, which is that of its directory: use letters, digits, dots, dashes and underscores"
                )
            refuse_own_keys("its overrides", own, "ablation", OF_ABLATION)
            resolved = load_recipe(ablation.recipe, overrides)
            if not resolved.recipe.train.phases:
                raise UserError("has no phases to train; add train.phases to the recipe")
            if not expansion.fixed_tokens:
                budget = _planned(resolved.recipe) if budget is None else budget
                equal = _planned(found[expansion.baseline].recipe) if found and not speeds else None
                factor = speeds[name] / speeds[expansion.baseline] if name in speeds else 1.0
                overrides.append(f"train.phases={json.dumps(_with_budget(resolved.recipe, budget * factor, equal))}")
                resolved = load_recipe(ablation.recipe, overrides)
            timeline = Timeline(resolved.recipe.train.phases)
            Schedules(resolved.recipe.train.phases, [one.steps for one in timeline.phases], timeline.tokens_before)
        except UserError as error:
            raise UserError(f"arm {name}: {error}") from None
        found[name] = Arm(name, tuple(own), resolved)
    return {name: found[name] for name in expansion.arms}


def _planned(recipe: Recipe) -> int:
    return sum(int(phase.tokens) for phase in recipe.train.phases)


def _with_budget(recipe: Recipe, budget: float, equal: int | None) -> list[dict[str, Any]]:
    """The phases with the budget divided in their proportions, in whole steps; with `equal`, as near to so many tokens as steps of the
    longest phase allow."""
    planned = _planned(recipe)
    batches = [int(phase.global_batch_tokens) for phase in recipe.train.phases]
    steps = [int(budget * phase.tokens / planned) // batch for phase, batch in zip(recipe.train.phases, batches, strict=True)]
    longest = max(range(len(steps)), key=steps.__getitem__)

    def left(tokens: int) -> int:
        return tokens - sum(n * batch for n, batch in zip(steps, batches, strict=True))

    steps[longest] += max(0, left(int(budget))) // batches[longest]
    if equal is not None:
        steps[longest] += round(left(equal) / batches[longest])
    for phase, batch, n in zip(recipe.train.phases, batches, steps, strict=True):
        if n < 1:
            raise UserError(
                f"the budget gives phase {phase.name} less than one step of {batch:,} tokens; raise budget or lower global_batch_tokens"
            )
    return [as_tree(phase) | {"tokens": f"{n * batch} tokens"} for phase, batch, n in zip(recipe.train.phases, batches, steps, strict=True)]


def _tokenizers(arms: Mapping[str, Arm], baseline: Arm) -> dict[str, Any]:
    """What tells the tokenizers of the arms apart. One that is read from the baseline's directory is the baseline's."""

    def key(arm: Arm) -> Any:
        tree = as_tree(arm.recipe.tokenizer)
        shared = tree["path"] is not None and f"/{baseline.data_key}/tokenizer/" in tree["path"]
        return as_tree(baseline.recipe.tokenizer) if shared else tree

    return {name: key(arm) for name, arm in arms.items()}


def _refuse_equal(arms: Mapping[str, Arm], stages: Sequence[StageName], path: Path) -> None:
    seen: dict[bytes, str] = {}
    for name, arm in arms.items():
        values = canonical(arm.effective(stages))
        if values in seen:
            tokens = "all arms have the tokens of the baseline, whatever their phases say; " if _says_tokens(arm) else ""
            raise UserError(
                f"{path}: arm {name} equals arm {seen[values]} in all that is trained or measured; {tokens}change another key, or remove "
                "it (kind: noise compares equal arms)"
            )
        seen[values] = name


def _says_tokens(arm: Arm) -> bool:
    return any(re.fullmatch(r"train\.phases\.[^.=]+\.tokens", one.partition("=")[0].strip()) for one in arm.overrides)
