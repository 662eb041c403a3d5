"""An ablation file to arms with resolved recipes, each checked before anything runs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lmworks.ablate.kinds.base import NAME, Ablation, Branch, Expansion, meant
from lmworks.ablate.kinds.registry import kinds
from lmworks.ablate.measures import Measure
from lmworks.ablate.measures import resolve as resolve_measures
from lmworks.errors import UserError
from lmworks.files import read_json
from lmworks.optim.schedules import Schedules
from lmworks.recipe.loading.document import parse_file
from lmworks.recipe.loading.load import Resolved, as_node, load_recipe, load_resolved, shipped_folder
from lmworks.recipe.schema.effect import BEFORE_TUNING
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.tree.effects import readers
from lmworks.recipe.tree.fingerprint import Change, as_tree, canonical, changed_keys
from lmworks.run.staleness import recipe_values
from lmworks.shards.order.timeline import Timeline

RESULTS = "ablation.json"
DATA_STAGES = ("corpus", "tokenizer", "shards")
_DEFAULTS = ("checkpoints.keep_last=1", "checkpoints.keep_best=false")  # for all arms; `set` comes after
_ALWAYS = ("time=null", "tune=null")  # budgets are tokens, and arms are base models
_ORDER = ("name", "tokens", "mixture", "mixture_changes", "sequence_length", "global_batch_size", "batch_ramp")


@dataclass(frozen=True, eq=False)
class Arm:
    """One arm: its overrides and its recipe. `changes` is what distinguishes it from the baseline."""

    name: str
    overrides: tuple[str, ...]
    resolved: Resolved
    changes: tuple[Change, ...] = ()
    label: float | None = None

    @property
    def recipe(self) -> Recipe:
        return self.resolved.recipe

    @cached_property
    def tokens(self) -> int:
        """Training tokens of each run, those of a checkpoint that it continues included."""
        return sum(phase.tokens for phase in Timeline(self.recipe.train.phases).phases)

    @cached_property
    def data_key(self) -> str:
        """A hash of the recipe values that the corpus, the tokenizer and the shards are made from."""
        values = {path: value for path, value in recipe_values(self.recipe).items() if set(readers(path)) & set(DATA_STAGES)}
        return hashlib.sha256(canonical(values)).hexdigest()[:12]

    @cached_property
    def order(self) -> Any:
        """What decides, together with the seed and the token files, which tokens a step reads."""
        phases = [{key: value for key, value in as_tree(phase).items() if key in _ORDER} for phase in self.recipe.train.phases]
        return [phases, self.recipe.shards.packing, as_tree(self.recipe.tokenizer)["path"] or self.data_key]

    @cached_property
    def effective(self) -> dict[str, Any]:
        """The recipe values that a stage reads: equal ones give equal runs."""
        return {path: value for path, value in recipe_values(self.recipe).items() if readers(path)}


@dataclass(frozen=True, eq=False)
class Run:
    """One run: an arm with a seed."""

    arm: Arm
    seed: int
    directory: Path

    @property
    def name(self) -> str:
        return f"{self.arm.name}, seed {self.seed}"


@dataclass(frozen=True, eq=False)
class Experiment:
    """A resolved ablation. Everything of it lies below `out`."""

    ablation: Ablation
    path: Path
    out: Path
    arms: dict[str, Arm]
    baseline: Arm
    measures: list[Measure]
    branch: Branch | None
    earlier: Mapping[str, Any] = field(default_factory=dict)  # noise floors of the ablation that `noise` names, by measure
    text: str = field(repr=False, default="")

    @property
    def seeds(self) -> list[int]:
        return self.ablation.seed_list

    @cached_property
    def runs(self) -> list[Run]:
        """All runs, seed by seed, so that an unfinished ablation has whole seeds."""
        return [Run(arm, seed, self.directory(arm) / f"seed-{seed}") for seed in self.seeds for arm in self.arms.values()]

    @property
    def started_at(self) -> int:
        """Tokens of the checkpoint that the arms continue."""
        return self.branch.tokens if self.branch else 0

    def directory(self, arm: Arm) -> Path:
        return self.out / "arms" / arm.name

    def data_dir(self, arm: Arm) -> Path:
        """The directory with the corpus, tokenizer and shards of an arm."""
        return self.out / "data" / arm.data_key

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
    if given.is_file():
        return given
    if (shipped := folder / f"{path}.yaml").is_file():
        return shipped
    known = sorted(one.stem for one in folder.glob("*.yaml"))
    raise UserError(f"there is no ablation file {str(path)!r}, as a file or by name; {meant(given.stem, known)}")


def resolve(path: str | Path, out: Path | None = None, speeds: Mapping[str, float] | None = None) -> Experiment:
    """Resolve an ablation file and check every arm. `out` replaces its directory.

    `speeds` are tokens per second of the arms, for `equal: time`; without them all arms have the same tokens.
    Raises `UserError` of one line.
    """
    ablation, found, text = load_file(path)
    name = ablation.name or found.stem
    out = out or Path(ablation.out or f"runs/ablations/{name}")
    base = load_recipe(ablation.recipe, [*_DEFAULTS, *ablation.set]).recipe
    try:
        expansion = ablation.expand(base)
        if expansion.fixed_tokens and ablation.equal == "time":
            raise UserError(f"equal: time does not apply to kind {ablation.kind}, whose arms train on equal tokens; leave equal out")
    except UserError as error:
        raise UserError(f"{found}: {error}") from None
    arms = dict(_resolve_arms(ablation, expansion, speeds or {}))
    arms = _share_tokenizer(ablation, arms, expansion.baseline, out)
    _refuse_equal(arms, found)
    baseline = arms[expansion.baseline]
    arms = {
        one.name: Arm(
            one.name, one.overrides, one.resolved, tuple(_matter(changed_keys(baseline.recipe, one.recipe))), expansion.labels.get(one.name)
        )
        for one in arms.values()
    }
    measures = resolve_measures(
        ablation.measures or ablation.default_measures, {arm.name: arm.recipe for arm in arms.values()}, _tokenizers(arms, baseline)
    )
    return Experiment(ablation, found, out, arms, arms[expansion.baseline], measures, expansion.branch, _earlier_noise(ablation), text)


def _earlier_noise(ablation: Ablation) -> dict[str, Any]:
    if ablation.noise is None:
        return {}
    path = Path(ablation.noise).expanduser() / RESULTS
    document = read_json(path)
    try:
        return {name: {kind: one["noise"][kind] for kind in ("paired", "unpaired")} for name, one in document["measures"].items()}
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"noise: {path} is not the result of an ablation; name the directory of one") from None


def _resolve_arms(ablation: Ablation, expansion: Expansion, speeds: Mapping[str, float]) -> Iterator[tuple[str, Arm]]:
    for name, own in expansion.arms.items():
        overrides = [*_DEFAULTS, *ablation.set, *own, *_ALWAYS]
        try:
            if not re.fullmatch(NAME, name):
                raise UserError(
                    "cannot be the name of an arm, which is that of its directory: use letters, digits, dots, dashes and underscores"
                )
            if any(one.partition("=")[0].strip() in ("train.seed", "run_dir") for one in own):
                raise UserError("sets train.seed or run_dir, which the ablation sets for each run; use seeds and out instead")
            resolved = load_recipe(ablation.recipe, overrides)
            if not resolved.recipe.train.phases:
                raise UserError("has no phases to train; add train.phases to the recipe")
            if not expansion.fixed_tokens:
                factor = speeds[name] / speeds[expansion.baseline] if speeds else 1.0
                overrides.append(f"train.phases={json.dumps(_with_budget(resolved.recipe, ablation, factor))}")
                resolved = load_recipe(ablation.recipe, overrides)
            timeline = Timeline(resolved.recipe.train.phases)
            Schedules(resolved.recipe.train.phases, [one.steps for one in timeline.phases], timeline.tokens_before)
        except UserError as error:
            raise UserError(f"arm {name}: {error}") from None
        yield name, Arm(name, tuple(own), resolved)


def _with_budget(recipe: Recipe, ablation: Ablation, factor: float) -> list[dict[str, Any]]:
    """The phases with the budget divided in their proportions, in whole steps."""
    planned = sum(int(phase.tokens) for phase in recipe.train.phases)
    budget = (int(ablation.budget) if ablation.budget is not None else planned) * factor
    batches = [int(phase.global_batch_size) for phase in recipe.train.phases]
    steps = [int(budget * phase.tokens / planned) // batch for phase, batch in zip(recipe.train.phases, batches, strict=True)]
    longest = max(range(len(steps)), key=steps.__getitem__)
    steps[longest] += max(0, int(budget) - sum(n * batch for n, batch in zip(steps, batches, strict=True))) // batches[longest]
    for phase, batch, n in zip(recipe.train.phases, batches, steps, strict=True):
        if n < 1:
            raise UserError(
                f"the budget gives phase {phase.name} less than one step of {batch:,} tokens; raise budget or lower global_batch_size"
            )
    return [as_tree(phase) | {"tokens": f"{n * batch} tokens"} for phase, batch, n in zip(recipe.train.phases, batches, steps, strict=True)]


def _share_tokenizer(ablation: Ablation, arms: dict[str, Arm], baseline: str, out: Path) -> dict[str, Arm]:
    """Give the tokenizer of the baseline to the arms that would train the same kind on other text: an arm changes what it says, no more."""
    base = arms[baseline]
    found = {}
    for name, arm in arms.items():
        if arm.data_key != base.data_key and base.recipe.tokenizer.path is None and arm.recipe.tokenizer == base.recipe.tokenizer:
            path = out / "data" / base.data_key / "tokenizer" / "tokenizer.json"
            phases = json.dumps([as_tree(phase) for phase in arm.recipe.train.phases])
            overrides = [*_DEFAULTS, *ablation.set, *arm.overrides, *_ALWAYS, f"train.phases={phases}", f"tokenizer.path={path}"]
            arm = Arm(name, arm.overrides, load_recipe(ablation.recipe, overrides))
        found[name] = arm
    return found


def _tokenizers(arms: Mapping[str, Arm], baseline: Arm) -> dict[str, Any]:
    """What tells the tokenizers of the arms apart. One that is read from the baseline's directory is the baseline's."""

    def key(arm: Arm) -> Any:
        tree = as_tree(arm.recipe.tokenizer)
        shared = tree["path"] is not None and f"/{baseline.data_key}/tokenizer/" in tree["path"]
        return as_tree(baseline.recipe.tokenizer) if shared else tree

    return {name: key(arm) for name, arm in arms.items()}


def _matter(changes: Sequence[Change]) -> Iterator[Change]:
    """The changes that a stage reads."""
    return (change for change in changes if any(readers(key) for key in change.keys) and change.path != "tokenizer.path")


def _refuse_equal(arms: Mapping[str, Arm], path: Path) -> None:
    seen: dict[bytes, str] = {}
    for name, arm in arms.items():
        values = canonical(arm.effective)
        if values in seen:
            own = " ".join(arm.overrides) or "nothing"
            raise UserError(
                f"{path}: arm {name} ({own}) changes nothing that a run reads: its recipe equals that of arm {seen[values]}; change a key "
                "of it, or remove it (kind: noise measures equal arms)"
            )
        seen[values] = name


def save_arms(experiment: Experiment) -> None:
    """Record the arms in the directory of the ablation. Raises `UserError` if it began with other recipes."""
    for arm in experiment.arms.values():
        path = experiment.directory(arm) / "resolved.json"
        if path.exists():
            changes = _matter(changed_keys(load_resolved(path), arm.recipe))
            changed = [change for change in changes if any(set(readers(key)) & set(BEFORE_TUNING) for key in change.keys)]
            if changed:
                more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
                raise UserError(
                    f"{experiment.path}: arm {arm.name} has changed since this ablation began: {changed[0]}{more}; undo it, give the "
                    "arm another name, or choose another directory with --out"
                )
        arm.resolved.save(path.parent)
