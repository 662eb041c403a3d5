"""`lmworks ladder run`: the runs of a ladder file, and the law that is fitted to them.

A ladder file has for each size a trunk at a constant learning rate, and for each horizon a decay that branches off from it. A trunk of H
tokens serves all shorter horizons too, since a model that is annealed from any of its checkpoints is about as good as one that was planned
for that horizon (Hägele et al. 2024, arXiv:2405.18392). The runs of a size cost (1 - decay) times the largest horizon plus decay times
their sum, instead of their sum.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from lmworks.ablate.cost import calibrate, cost, training_seconds
from lmworks.ablate.document import cost_text
from lmworks.ablate.file import OF_LADDER, refuse_own_keys
from lmworks.ablate.run_set import (
    ALWAYS,
    DEFAULTS,
    NAME,
    Arm,
    Branch,
    RunSet,
    Seeds,
    prepare_data,
    run_dir,
    save_arms,
    seed_list,
    share_tokenizer,
    take_directory,
)
from lmworks.ablate.runs import Runner, described, state_of
from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.io.destinations import require_folder
from lmworks.io.files import write_text
from lmworks.ladder.comparable import require_one_ladder
from lmworks.ladder.design import Point
from lmworks.ladder.downstream import fit_downstream, split_benchmarks
from lmworks.ladder.fit import BOOTSTRAPS, fit_law
from lmworks.ladder.points import UNIT, read_points
from lmworks.ladder.predictions import save_settings
from lmworks.plan.laws import LAW_FILE, LossLaw, save_law
from lmworks.recipe.changes import as_tree
from lmworks.recipe.document import parse_file
from lmworks.recipe.load import as_node, load_recipe, load_resolved
from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.evaluate import Evaluate
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import Phase
from lmworks.recipe.schema.units import Tokens
from lmworks.run.runner import StageEvent
from lmworks.ui.terminal import bar
from lmworks.watch.ledger import RunLock

FILE = "ladder.yaml"
TRUNK = "trunk"
_AT_THE_END = ("train.validate_every=100%", "train.sample_every=100%")
_MOST_RUNS = 1000


class LadderFile(Node):
    """A ladder: one recipe at several sizes and token budgets."""

    name: str | None = Field(
        None, pattern=f"^{NAME}$", description="name of the ladder and of its directory; that of the file when omitted"
    )
    recipe: str = Field(description="recipe of all runs: a file, the name of a shipped recipe, or a run directory")
    set: list[str] = Field(default_factory=list, description="overrides of the recipe for all runs, each A.B=C as for --set")
    sizes: dict[str, list[str]] = Field(
        description="at least 3 sizes: overrides of the recipe by the name of the size, such as 30M: [size=30M]"
    )
    horizons: list[Tokens] = Field(min_length=3, description="at least 3 token budgets, each trained at every size")
    decay_fraction: float = Field(0.2, gt=0, lt=1, description="part of each horizon in which the rate falls to 0 (wsd schedule)")
    warmup_fraction: float = Field(0.05, gt=0, lt=1, description="warm-up of the learning rate, as a fraction of the shortest horizon")
    seeds: Seeds = Field(
        1, description="number of seeds (1, 2, ...), or a list of them; each run sets train.seed to its seed, and two or more of them show "
        "how much the loss depends on it"
    )  # fmt: skip
    out: str | None = Field(None, description="directory of the ladder; runs/ladders/NAME when omitted")

    @field_validator("sizes", mode="before")
    @classmethod
    def _named(cls, sizes: Any) -> Any:
        if isinstance(sizes, list):
            size = sizes[0] if sizes and isinstance(sizes[0], str) else "30M"
            raise ValueError(f"each size has a name and its overrides; write {{{size}: [size={size}], ...}}")
        return sizes


def resolve(path: Path, out: Path | None = None) -> RunSet:
    """The runs of a ladder file, each checked before anything runs. `out` replaces its directory. Raises `UserError` of one line."""
    if not path.is_file():
        raise UserError(f"{path} is not a file; write one with recipe, sizes and horizons (docs/sizing.md)")
    ladder = as_node(parse_file(path), LadderFile)
    out = out or Path(ladder.out or f"runs/ladders/{ladder.name or path.stem}")
    sizes = ladder.sizes
    for where, overrides in {"set": ladder.set, **{f"size {size}": own for size, own in sizes.items()}}.items():
        refuse_own_keys(f"{path}: {where}", overrides, "ladder", OF_LADDER)
    if len(sizes) < 3:
        raise UserError(f"{path}: sizes: a law needs at least 3 sizes, and there are {len(sizes)}; add some")
    if len(sizes) * len(ladder.horizons) * len(seed_list(ladder.seeds)) > _MOST_RUNS:
        raise UserError(f"{path}: sizes, horizons and seeds make more than {_MOST_RUNS} runs; use fewer")
    arms: dict[str, Arm] = {}
    for size, own in sizes.items():
        if not re.fullmatch(NAME, size):
            raise UserError(f"{path}: sizes: {size!r} cannot be the name of a directory; use letters, digits, dots, dashes and underscores")
        try:
            arms |= {arm.name: arm for arm in _arms_of_size(ladder, size, own, out)}
        except UserError as error:
            raise UserError(f"{path}: size {size}: {error}") from None
    trunks = [arm for arm in arms.values() if arm.branch is None]
    largest = max(trunks, key=lambda arm: _matrix_size(arm.recipe))
    if len({_matrix_size(arm.recipe) for arm in trunks}) < len(trunks):
        raise UserError(f"{path}: sizes: two of them have the same number of parameters; change one")
    giver = next(arm for arm in arms.values() if arm.branch is not None and arm.branch.trunk == largest.name)  # of the shortest horizon,
    arms = share_tokenizer(arms, giver, out)  # which stays as it is when one is added
    for arm in trunks:
        try:
            require_one_ladder(largest.recipe, arm.recipe, arm.name, largest.name, "let the sizes change the shape of the model only")
        except UserError as error:
            raise UserError(f"{path}: sizes: {error}") from None
    text = path.read_text(encoding="utf-8")
    seeds, baseline = seed_list(ladder.seeds), arms[largest.name]
    return RunSet("lmworks ladder run", ladder.recipe, tuple(ladder.set), path, out, arms, baseline, seeds, text=text)


def _matrix_size(recipe: Recipe) -> int:
    from lmworks.ladder.points import size_and_tokens

    return size_and_tokens(recipe)[0]


def _arms_of_size(ladder: LadderFile, size: str, own: Sequence[str], out: Path) -> Iterator[Arm]:
    """The trunk of a size, and a branch for each horizon."""
    defaults, chosen = [*DEFAULTS, *_AT_THE_END], [*ladder.set, *own, *ALWAYS]
    recipe = load_recipe(ladder.recipe, [*defaults, *chosen]).recipe
    of_trunk, of_branch = ([*defaults, *scored, *chosen] for scored in _evaluations(recipe.evaluate))
    phases = recipe.train.phases
    if not phases:
        raise UserError("the recipe has no phases to train; add train.phases to it")
    pattern = _longest(phases)
    batch = int(pattern.global_batch_tokens)
    steps = sorted(int(horizon) // batch for horizon in ladder.horizons)
    decays = [max(1, round(ladder.decay_fraction * count)) for count in steps]
    ends = [count - decay for count, decay in zip(steps, decays, strict=True)]  # of the parts of the trunk
    if ends[0] < 1:
        raise UserError(
            f"horizons: the shortest is of {steps[0]} steps of {batch:,} tokens, of which {decays[0]} decay: none is left before them; "
            "give more tokens, or lower decay_fraction or global_batch_tokens"
        )
    if any(one <= before for before, one in pairwise(ends)):
        raise UserError(f"horizons: two are of almost the same number of steps of {batch:,} tokens; spread them")
    warmup = max(1, round(ladder.warmup_fraction * steps[0]))
    if warmup > ends[0]:
        raise UserError(
            f"warmup_fraction: the warm-up of {warmup} steps lasts longer than the {ends[0]} steps before the decay of the shortest "
            "horizon; lower it"
        )
    parts = [
        _part(pattern, f"to-{count}", (end - before) * batch, {"kind": "constant", "warmup": f"{0 if before else warmup} steps"})
        for count, before, end in zip(steps, [0, *ends], ends, strict=False)
    ]
    name = f"{size}-{TRUNK}"
    trunk_dir = run_dir(out, name, seed_list(ladder.seeds)[0])
    of_trunk = [*of_trunk, f"checkpoints.keep_last={len(parts)}"]
    rates = _rates(_arm(ladder, name, of_trunk, parts), trunk_dir.parent)
    yield replace(_arm(ladder, name, [*of_trunk, *rates], parts), grows=True)
    for index, (count, decay, end) in enumerate(zip(steps, decays, ends, strict=True)):
        tail = _part(pattern, "decay", decay * batch, {"kind": "wsd", "warmup": "0 steps", "decay": "100%", "min_lr_ratio": 0.0})
        checkpoint = trunk_dir / "checkpoints" / listing.name_of(end)
        arm = _arm(ladder, f"{size}-{count * batch}", [*of_branch, *rates], [*parts[: index + 1], tail])
        yield replace(arm, branch=Branch(trunk_dir, checkpoint, end, end * batch, name))


def _longest(phases: Sequence[Phase]) -> Phase:
    return max(phases, key=lambda phase: int(phase.tokens))


def _rates(trunk: Arm, directory: Path) -> list[str]:
    """Overrides for the learning rates that the recipe leaves out. They are derived from the tokens of a run: a branch would go on at
    another rate than its trunk, and a trunk that grows at another one than it began with."""
    begun = directory / "resolved.json"
    optimizer = (load_resolved(begun) if begun.exists() else trunk.recipe).optimizer
    rates = {f"optimizer.{key}": getattr(optimizer, key) for key in ("learning_rate", "adam_learning_rate")}
    return [f"{key}={rate}" for key, rate in rates.items() if trunk.resolved.origins[key].kind == "derived"]


def _evaluations(evaluate: Evaluate) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The overrides by which a trunk scores no benchmarks, and a branch scores them at its end, on as many items as a finished model."""
    if not evaluate.benchmarks:
        return (), ()
    items = max(evaluate.every_items, evaluate.benchmark_items)
    return ("evaluate.every=never",), ("evaluate.every=100%", f"evaluate.every_items={items}")


def _part(pattern: Phase, name: str, tokens: int, lr_schedule: dict[str, Any]) -> dict[str, Any]:
    """A phase like the recipe's longest one, of these tokens and this schedule; a checkpoint is saved at its end."""
    own = {
        "name": name, "tokens": f"{tokens} tokens", "learning_rate_scale": 1.0, "save_every": "100%", "batch_ramp": None,
        "mixture_changes": [], "lr_schedule": lr_schedule,
    }  # fmt: skip
    return as_tree(pattern) | own


def _arm(ladder: LadderFile, name: str, overrides: Sequence[str], phases: Sequence[dict[str, Any]]) -> Arm:
    return Arm(name, tuple(overrides), load_recipe(ladder.recipe, [*overrides, f"train.phases={json.dumps(phases)}"]))


def run_ladder(ladder: RunSet, jobs: int, on_event: Callable[[StageEvent], None], on_note: Callable[[str], None]) -> list[Path]:
    """Run what is open of a ladder, `jobs` processes side by side; returns the directories of the runs that a law is fitted to.

    Raises `UserError`, and `Interrupted` when asked to stop; the same call goes on.
    """
    out = ladder.out
    require_folder(out)
    with RunLock(out):
        take_directory(out, "a ladder of runs")
        if note := _phases_left_out(ladder):
            on_note(note)
        save_arms(ladder)
        write_text(out / FILE, ladder.text)
        prepare_data(ladder, on_event, on_note)
        seconds = {run.directory: training_seconds(run) for run in ladder.runs if state_of(ladder, run) == "done"}
        if len(seconds) < len(ladder.runs):
            calibrate(ladder, [ladder.baseline], max(1, machine.threads() // jobs))
            on_note(cost_text(cost(ladder, seconds, jobs).to_json()))
        Runner(ladder, ladder.runs, seconds, jobs, lambda run: on_note(f"{run.arm.name}: done"), on_note).work()
    return points_of(ladder)


def _phases_left_out(ladder: RunSet) -> str:
    """What to say of a recipe with several phases; empty for one."""
    phases = load_recipe(ladder.recipe, ladder.overrides).recipe.train.phases
    longest = _longest(phases)
    if not (others := [phase.name for phase in phases if phase is not longest]):
        return ""
    return (
        f"the ladder trains on the data of the recipe's longest phase ({longest.name}) and leaves out {', '.join(others)}: its law does "
        "not hold for a run with all of them"
    )


def list_runs(ladder: RunSet) -> list[dict[str, object]]:
    """Every run with its state, its tokens and the command that it is."""
    return [
        {"name": run.arm.name, "tokens": run.arm.tokens - run.arm.started_at, **described(ladder, run)} for run in ladder.runs
    ]


def points_of(ladder: RunSet) -> list[Path]:
    """The runs whose learning rate decays: those that branch off from the trunks."""
    return [run.directory for run in ladder.runs if run.branch is not None]


def fit_runs(folder: Path, runs: Sequence[Path]) -> tuple[LossLaw, list[Point]]:
    """Fit a law of the loss, and one of each benchmark, to finished runs and write them into `folder`; returns them and the points of the
    runs. Raises `UserError`."""
    if (folder / "resolved.json").is_file():
        raise UserError(f"{folder} is a run, not the directory of a ladder; name that before the runs: lmworks ladder fit DIR RUN ...")
    require_folder(folder, "DIR")
    points = read_points(list(runs))
    with bar("bootstrap", BOOTSTRAPS * (1 + len(split_benchmarks(points)[0]))) as progress:
        law = fit_law(points, UNIT, f"fitted to {len(points)} runs", bootstraps=BOOTSTRAPS, advance=progress.advance)
        law = replace(law, benchmarks=fit_downstream(points, bootstraps=BOOTSTRAPS, advance=progress.advance))
    folder.mkdir(parents=True, exist_ok=True)
    save_settings(folder, list(runs))
    save_law(law, folder / LAW_FILE)
    return law, points
