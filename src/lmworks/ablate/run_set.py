"""A set of runs that share data: arms, each a resolved recipe, times seeds, in one directory. Ablations and ladders are such sets.

There is one corpus, one tokenizer and one set of shards for all arms that would make the same. They lie in `OUT/data/KEY/`, one directory
for each combination of recipe values that the data stages read. A stage is taken from another directory, by hard links, where
`lmworks.run.run_dir` finds that it was made from equal inputs: from another KEY, from the recipe's own run, or from the run of a checkpoint
that is continued. Otherwise it is run. Each run of an arm then gets hard links to all three. Files of a stage are always replaced by a
rename and never written in place, so a link cannot change the original.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from lmworks.checkpoint import listing
from lmworks.corpus.read.snapshot import list_files as source_files
from lmworks.errors import UserError
from lmworks.io.files import explain_os_errors, link_tree, only_one
from lmworks.io.run_layout import MODEL_STAGES
from lmworks.recipe.changes import Change, as_tree, canonical, changed_keys, readers
from lmworks.recipe.load import Resolved, load_recipe, load_resolved
from lmworks.recipe.schema.base import BEFORE_TUNING, StageName
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.timeline import Timeline
from lmworks.run.run_dir import read_stamp, recipe_values, stage_inputs, stale_reason
from lmworks.run.runner import StageEvent, run_stages
from lmworks.run.stages import STAGES

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"  # of an arm, which is that of its directory
DATA_STAGES = ("corpus", "tokenizer", "shards")
# For all arms; `set` comes after. Nothing is exported, and what no class can express may be compared.
DEFAULTS = ("checkpoints.keep_last=1", "checkpoints.keep_best=false", "export.huggingface=false", "export.gguf=false")
ALWAYS = ("time=null", *(f"{stage.stage}=null" for stage in MODEL_STAGES[1:]))  # budgets are tokens, and arms are base models
_ORDER = ("name", "tokens", "mixture", "mixture_changes", "sequence_length", "global_batch_tokens", "batch_ramp")


_ARMS = "arms"
_RESOLVED = "resolved.json"
_MOST_SEEDS = 1000


def _check_seeds(value: int | list[int]) -> int | list[int]:
    if isinstance(value, int):
        if not 1 <= value <= _MOST_SEEDS:
            raise ValueError(f"must be from 1 to {_MOST_SEEDS}, or a list of seeds")
        return value
    if not value or any(one < 0 for one in value) or len(value) > _MOST_SEEDS:
        raise ValueError(f"must have from 1 to {_MOST_SEEDS} seeds, none of them negative")
    twice = [one for one in value if value.count(one) > 1]
    if twice:
        raise ValueError(f"lists {twice[0]} twice, and a run repeated with its seed gives the same result; remove one or take another seed")
    return value


Seeds = Annotated[int | list[int], AfterValidator(_check_seeds)]  # the number of seeds (1, 2, ...), or a list of them


def seed_list(seeds: int | list[int]) -> list[int]:
    """The seeds that a file of runs asks for."""
    return list(range(1, seeds + 1)) if isinstance(seeds, int) else list(seeds)


def run_dir(out: Path, arm: str, seed: int) -> Path:
    """The directory of a run in the directory of its set."""
    return out / _ARMS / arm / f"seed-{seed}"


@dataclass(frozen=True)
class Branch:
    """A checkpoint that runs continue; it has trained on `tokens` tokens in `steps` steps of the run in `run_dir`. `trunk` is the arm of
    that run if it belongs to the set: each run then continues the trunk with its own seed."""

    run_dir: Path
    checkpoint: Path
    steps: int
    tokens: int
    trunk: str | None = None


@dataclass(frozen=True, eq=False)
class Arm:
    """One arm: its overrides and its recipe. `changes` is what distinguishes it from the baseline; `branch` is the checkpoint that its runs
    continue. The runs of an arm that `grows` go on when it gets more phases at its end."""

    name: str
    overrides: tuple[str, ...]
    resolved: Resolved
    changes: tuple[Change, ...] = ()
    label: float | None = None
    branch: Branch | None = None
    grows: bool = False

    @property
    def recipe(self) -> Recipe:
        return self.resolved.recipe

    @cached_property
    def tokens(self) -> int:
        """Training tokens of each run, those of a checkpoint that it continues included."""
        return sum(phase.tokens for phase in Timeline(self.recipe.train.phases).phases)

    @property
    def started_at(self) -> int:
        """Tokens of the checkpoint that each run continues."""
        return self.branch.tokens if self.branch else 0

    @cached_property
    def data_key(self) -> str:
        """A hash of the recipe values that the corpus, the tokenizer and the shards are made from."""
        values = {path: value for path, value in recipe_values(self.recipe).items() if set(readers(path)) & set(DATA_STAGES)}
        return hashlib.sha256(canonical(values)).hexdigest()[:12]

    @cached_property
    def order(self) -> Any:
        """What decides, together with the seed and the token files, which tokens a step reads."""
        phases = [{key: value for key, value in as_tree(phase).items() if key in _ORDER} for phase in self.recipe.train.phases]
        return [phases, self.recipe.shards.packing, self.data_key]

    def effective(self, stages: Sequence[StageName]) -> dict[str, Any]:
        """The recipe values that these stages read: equal ones give equal results."""
        return {path: value for path, value in recipe_values(self.recipe).items() if set(readers(path)) & set(stages)}


@dataclass(frozen=True, eq=False)
class Run:
    """One run: an arm with a seed, and the checkpoint that it continues."""

    arm: Arm
    seed: int
    directory: Path
    branch: Branch | None = None

    @property
    def name(self) -> str:
        return f"{self.arm.name}, seed {self.seed}"


@dataclass(frozen=True, eq=False)
class RunSet:
    """Arms times seeds. `recipe` and `overrides` are what all arms have in common; everything of the set lies below `out`. `command` is the
    command line that runs it, and `last` the stage up to which each run goes."""

    command: str
    recipe: str
    overrides: tuple[str, ...]
    path: Path
    out: Path
    arms: dict[str, Arm]
    baseline: Arm
    seeds: list[int]
    last: str = "pretrain"
    text: str = field(repr=False, default="")

    @cached_property
    def runs(self) -> list[Run]:
        """All runs, seed by seed, so that an unfinished set has whole seeds."""
        return [
            Run(arm, seed, run_dir(self.out, arm.name, seed), self._branch(arm, seed)) for seed in self.seeds for arm in self.arms.values()
        ]

    def _branch(self, arm: Arm, seed: int) -> Branch | None:
        branch = arm.branch
        if branch is None or branch.trunk is None:
            return branch
        trunk = run_dir(self.out, branch.trunk, seed)
        return replace(branch, run_dir=trunk, checkpoint=trunk / branch.checkpoint.relative_to(branch.run_dir))

    def directory(self, arm: Arm) -> Path:
        return self.out / _ARMS / arm.name

    def data_dir(self, arm: Arm) -> Path:
        """The directory with the corpus, tokenizer and shards of an arm."""
        return _data_dir(self.out, arm)


def _data_dir(out: Path, arm: Arm) -> Path:
    return out / "data" / arm.data_key


def share_tokenizer(arms: Mapping[str, Arm], baseline: Arm, out: Path) -> dict[str, Arm]:
    """Give the tokenizer of the baseline to the arms that would train the same kind on other text, or on other shares of the same text: an
    arm changes what it says, no more."""
    path = _data_dir(out, baseline) / "tokenizer" / "tokenizer.json"

    def shared(arm: Arm) -> Arm:
        own = arm.recipe.tokenizer != baseline.recipe.tokenizer
        if arm.data_key == baseline.data_key or baseline.recipe.tokenizer.path is not None or own:
            return arm
        source = arm.resolved.source
        assert source is not None
        return replace(arm, resolved=load_recipe(source.path, [*source.overrides, f"tokenizer.path={path}"]))

    return {name: shared(arm) for name, arm in arms.items()}


def take_directory(out: Path, what: str) -> None:
    """Mark the directory as that of a set, by the folder of its arms, before anything else is written into it: a set that is ended at any
    point goes on. Raises `UserError` if it holds files and is none. `what` the set is called: "an ablation"."""
    holds = {path.name for path in out.iterdir()} - {"lock"}
    if holds and not (out / _ARMS).is_dir():  # looked for last, since another process may have begun the set meanwhile
        raise UserError(f"{out} holds files and is not {what}; choose another directory with --out")
    with explain_os_errors(out):
        (out / _ARMS).mkdir(exist_ok=True)


def matter(changes: Sequence[Change]) -> Iterator[Change]:
    """The changes that a stage reads."""
    return (change for change in changes if any(readers(key) for key in change.keys) and change.path != "tokenizer.path")


def save_arms(runs: RunSet, failed: Container[str] = ()) -> None:
    """Record the arms in the directory of the set, except those that have `failed` before their tokens were known. Raises `UserError` if it
    began with other recipes, and then records none."""
    arms = [arm for arm in runs.arms.values() if arm.name not in failed]
    for arm in arms:
        changed = _changed(arm, runs.directory(arm) / _RESOLVED)
        if not changed:
            continue
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        said = f"{runs.path}: arm {arm.name} has changed since its runs began: {changed[0]}{more}"
        if arm.grows and changed[0].path.startswith("train.phases"):
            raise UserError(f"{said}; only horizons longer than all others can be added: undo it, or choose another directory with --out")
        raise UserError(f"{said}; undo it, give the arm another name, or choose another directory with --out")
    for arm in arms:
        arm.resolved.save(runs.directory(arm))


def _changed(arm: Arm, begun: Path) -> list[Change]:
    """What is changed in the training of an arm since its runs began; phases that were added at the end of one that grows are not."""
    if not begun.exists():
        return []
    before, recipe = load_resolved(begun), arm.recipe
    if arm.grows:
        phases = recipe.train.phases[: len(before.train.phases)]
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"phases": phases})})
    return [change for change in matter(changed_keys(before, recipe)) if any(set(readers(key)) & set(BEFORE_TUNING) for key in change.keys)]


_STAGES = [stage for stage in STAGES if stage.name in DATA_STAGES]


def prepare_data(runs: RunSet, on_event: Callable[[StageEvent], None], on_wait: Callable[[str], None]) -> None:
    """Make the data of all arms, first of those that train a tokenizer, which others may take, and of these the baseline's. Several
    processes may call it; each directory is made by one of them."""
    made: list[Path] = []
    for arm in sorted((runs.baseline, *runs.arms.values()), key=lambda arm: arm.recipe.tokenizer.path is not None):
        directory = runs.data_dir(arm)
        if directory not in made:
            with only_one(directory, partial(on_wait, f"another process prepares the data in {directory}; waiting for it")):
                _prepare(runs, arm, directory, on_event)
            made.append(directory)


def _prepare(runs: RunSet, arm: Arm, directory: Path, on_event: Callable[[StageEvent], None]) -> None:
    source = arm.resolved.source
    assert source is not None
    resolved = load_recipe(source.path, [*source.overrides, f"run_dir={directory}"])
    recipe = resolved.recipe
    files = source_files(recipe, {})
    for stage in _STAGES:
        inputs = stage_inputs(stage, recipe, directory, files)
        if not stale_reason(stage, recipe, directory, inputs):
            continue
        for provider in _providers(runs, directory):
            if not stale_reason(stage, recipe, provider, inputs):
                link_tree(provider / stage.folder, directory / stage.folder)
                break
        else:
            run_stages(resolved, last=stage.name, on_event=_only_new(on_event), resume_command=f"{runs.command} {runs.path}")


def _only_new(on_event: Callable[[StageEvent], None]) -> Callable[[StageEvent], None]:
    return lambda event: None if event.kind == "skip" else on_event(event)


def _providers(runs: RunSet, directory: Path) -> Iterator[Path]:
    """Directories that may have a stage that was made from equal inputs."""
    yield from sorted(path for path in directory.parent.iterdir() if path.is_dir() and path != directory)
    own = load_recipe(runs.recipe, runs.overrides).recipe.run_dir
    yield Path(own or "")
    yield from dict.fromkeys(run.branch.run_dir for run in runs.runs if run.branch)


def link_data(runs: RunSet, run: Run) -> None:
    """Give a run the data of its arm, and the checkpoint that it continues."""
    source = runs.data_dir(run.arm)
    for stage in _STAGES:
        if read_stamp(run.directory / stage.folder) is None:
            link_tree(source / stage.folder, run.directory / stage.folder)
    branch, folder = run.branch, run.directory / "checkpoints"
    if branch and not listing.has_checkpoints(folder):
        link_tree(branch.checkpoint, folder / branch.checkpoint.name)


def shared_bytes(paths: Sequence[Path]) -> int:
    """Bytes on disk below these paths, each file once however many links it has."""
    seen: dict[tuple[int, int], int] = {}
    for top in paths:
        for folder, _, names in os.walk(top):
            for name in names:
                with suppress(FileNotFoundError):  # another process of the set replaces its files
                    found = os.lstat(os.path.join(folder, name))
                    seen[found.st_dev, found.st_ino] = found.st_size
    return sum(seen.values())
