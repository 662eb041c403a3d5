"""Turns the recipe's `time` into token budgets, before the first training step, with the measured speed of this machine.

The token budgets in the recipe are then proportions: one factor scales the budgets of all phases and of tuning to fill the time that
remains after data preparation and before validation, evaluation and export. The resulting numbers go into the ledger and resolved.json.
A run keeps its numbers, also on another machine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from lmworks.checkpoint import listing
from lmworks.errors import UserError, raise_first
from lmworks.host import machine
from lmworks.io.files import read_json, sha256_file
from lmworks.io.run_layout import MODEL_STAGES
from lmworks.plan.budget import FEWEST, SIZES, largest_factor, scale_budgets
from lmworks.plan.counts import flops_per_token
from lmworks.recipe.changes import as_tree
from lmworks.recipe.checks import phase_refusals
from lmworks.recipe.document import Keys
from lmworks.recipe.keys import display, get
from lmworks.recipe.load import Numbers, Resolved
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.units import Seconds, Tokens
from lmworks.run.time_estimate import (
    FEW_ITEMS,
    FixedWork,
    fixed_work,
    predict_seconds,
    shortest_batches,
    total_seconds,
    training_seconds,
    tuning_steps,
)
from lmworks.ui.amounts import amount, days
from lmworks.watch.ledger import LEDGER, Ledger, events_of

if TYPE_CHECKING:
    from lmworks.parallel.mesh import Ranks
    from lmworks.plan.stages import StageData
    from lmworks.shards.batches import Batch
    from lmworks.train.calibrate import Speed

EVENT = "budget"
BEFORE = "data, start and measuring"
_SLACK = 0.03  # fraction of the time reserved for saves, metrics, the run page and everything that is not predicted
_THREADS: Keys = ("threads",)
_TUNE: Keys = ("tune",)
_NO_TUNING = "tuning, so there is no tuned model"
_LEAST = 0.25  # fraction of the time that training gets before evaluation is reduced


def recorded_budget(resolved: Resolved, run_dir: Path) -> Resolved | None:
    """The recipe with the budgets that were recorded when its run began; None if there are none yet.

    A key that has been changed in the recipe since then keeps its new value.
    """
    recipe = resolved.recipe
    if recipe.time is None:
        return resolved
    events = events_of(run_dir, EVENT)
    begun = listing.has_checkpoints(run_dir / "checkpoints")
    if not events:
        return resolved if begun else None
    tree, numbers = as_tree(recipe), {tuple(number["keys"]): number for number in events[-1]["numbers"]}
    same = {
        keys: number
        for keys, number in numbers.items()
        if get(tree, keys) in (number["old"], number["new"]) or (keys == _THREADS and _derived(resolved, keys))  # a machine of other cores
    }
    own = _TUNE in numbers and numbers[_TUNE]["new"] is None and _has_own_budget(recipe, numbers[_TUNE]["old"])
    changed = numbers.keys() - same.keys() - ({_TUNE} if own else set())
    if not begun and (changed or events[-1]["seconds"] != recipe.time):
        return None
    return resolved.settled({keys: (number["new"], number["why"]) for keys, number in same.items()})


def begun_otherwise(recipe: Recipe, run_dir: Path) -> str:
    """How the run has begun, where it keeps other budgets than those of the recipe's `time`; empty if it has not begun, or has this time.
    `recipe` has the recorded budgets."""
    if recipe.time is None or not listing.has_checkpoints(run_dir / "checkpoints"):
        return ""
    own = read_json(run_dir / "resolved.json").get("time")
    if own != recipe.time.text():
        return "without a time" if own is None else f"with a time of {days(Seconds.parse(own))}"
    return "at a size of its own" if recipe.size == "auto" else ""


def _has_own_budget(recipe: Recipe, given_up: Mapping[str, Any]) -> bool:
    """Whether tuning has got another budget since it was given up with these values."""
    tune = as_tree(recipe)["tune"]
    return tune is not None and any(tune[key] != given_up.get(key) for key in ("tokens", "epochs"))


def given_up(recipe: Recipe, run_dir: Path) -> Text | None:
    """What the run does without to stay within its time, for the terminal; None if there is nothing. `recipe` has its budgets."""
    events = events_of(run_dir, EVENT) if recipe.time is not None else []
    kept = {_NO_TUNING} if recipe.tune is not None else set()  # with a budget of its own since then
    listed = [text for text in events[-1]["given_up"] if text not in kept] if events else []
    return Text(f"given up for the time of {days(float(recipe.time or 0))}: {'; '.join(listed)}", "yellow") if listed else None


def require_kept(recipe: Recipe, run_dir: Path, stage: str | None) -> None:
    """Raise `UserError` if a stage that the user asks for was given up for the time. `recipe` has its budgets."""
    if stage == "tune" and recipe.tune is None:
        numbers = events_of(run_dir, EVENT)[-1]["numbers"]
        epochs = any(number["old"].get("epochs") for number in numbers if number["keys"] == list(_TUNE))
        raise UserError(
            f"tuning was given up for the time of {days(float(recipe.time or 0))}; give it a budget of its own, such as "
            f"{'--set tune.epochs=null ' if epochs else ''}--set tune.tokens=100k, or take a new run_dir and a longer --time"
        )


def measure_speed(recipe: Recipe, run_dir: Path, ranks: Ranks | None) -> Speed:
    """Measure the speed of the recipe's own steps on a batch of each sequence length. Called on all ranks."""
    from lmworks.train import calibrate
    from lmworks.train.step import micro_batch_of

    found = batches_by_length(recipe, run_dir, 1 if ranks is None else ranks.size("dp"))
    if recipe.tune is not None and (length := int(recipe.tune.sequence_length)) not in found:
        rows = min(int(recipe.tune.global_batch_tokens) // length, 4 * micro_batch_of(recipe, length))
        found[length] = calibrate.random_batch(recipe, length, rows)
    return calibrate.measure(
        recipe, list(found.values()), _patience(recipe), lambda length: flops_per_token(recipe.model, length).total, ranks
    )  # fmt: skip


def batches_by_length(recipe: Recipe, run_dir: Path, data_ranks: int = 1) -> dict[int, Batch]:
    """For each sequence length of pretraining what a step reads, of at most four micro-batches on each data rank.

    Random tokens would not do: with documents as long as a row attention sees more keys than in training, and with more sequences than a
    step has the optimizer costs less per token.
    """
    from lmworks.shards.manifest import check_vocabulary
    from lmworks.train.step import micro_batch_of

    assert recipe.model.vocab_size
    batches = shortest_batches(recipe, run_dir)
    check_vocabulary(batches.manifest, recipe.model.vocab_size, sha256_file(run_dir / "tokenizer" / "tokenizer.json"))
    found: dict[int, Batch] = {}
    for index, phase in enumerate(batches.order.timeline.phases):
        length = phase.sequence_length
        if length not in found:
            rows = min(phase.full, 4 * micro_batch_of(recipe, length) * data_ranks)
            found[length] = batches.batch(batches.order.timeline.first_step(index), 0, rows)
    return found


def _patience(recipe: Recipe) -> float:
    """Seconds of measuring one thing."""
    assert recipe.time is not None
    return min(30.0, 0.01 * recipe.time)


def choose_threads(resolved: Resolved) -> dict[Keys, tuple[Any, str]]:
    """The fewest CPU threads that train as fast as all, for a process that trains alone; nothing where the recipe says how many, on a GPU,
    where the size of the model is still open, and where the machine's speed was said."""
    from lmworks.parallel.mesh import own_device
    from lmworks.train import calibrate

    recipe = resolved.recipe
    if recipe.size == "auto" or machine.speed() is not None or not _derived(resolved, _THREADS):
        return {}
    if (recipe.threads or 1) == 1 or own_device().type != "cpu":
        return {}
    speeds = calibrate.speed_by_threads(recipe, _patience(recipe) / 2)
    fewest = calibrate.fewest_threads(speeds)
    measured = ", ".join(f"{speed:,.0f} tokens/s with {threads}" for threads, speed in speeds.items())
    return {_THREADS: (fewest, f"the fewest CPU threads that train as fast as any number: {measured}")} if fewest != recipe.threads else {}


def _derived(resolved: Resolved, keys: Keys) -> bool:
    """Whether nobody wrote this value."""
    return resolved.origins[display(as_tree(resolved.recipe), keys)].kind == "derived"


def settle_budget(
    resolved: Resolved, run_dir: Path, spent: Callable[[], float], speed_of: Callable[[Recipe], Speed], alone: bool,
    tuning: StageData | None = None,
) -> tuple[Resolved, list[str]]:  # fmt: skip
    """Turn the time of a recipe whose shards exist into token budgets, and record them in the ledger.

    `spent` returns the seconds of the command so far, `speed_of` measures a recipe, `alone` says that there are no other ranks, `tuning` is
    what was read of the data of tuning. Returns the recipe with the budgets, and lines for the terminal: how they were computed, and the
    planned times. What was given up is in the ledger (`given_up`). Raises `UserError` if the time is already over, and, before anything is
    recorded, if a schedule or a change of the mixture is longer than its budget.
    """
    recipe = resolved.recipe
    assert recipe.time is not None
    whole = float(recipe.time)
    if spent() >= whole:
        raise UserError(
            f"time: {days(whole)} are not enough, preparing the data alone took {days(spent())}; run the same command again, whose time "
            f"starts from zero with the data done, or allow more time, such as --time {4 * spent():.0f}s"
        )
    work = fixed_work(recipe, run_dir, tuning)
    numbers = choose_threads(resolved) if alone else {}
    recipe = resolved.settled(numbers).recipe
    speed = speed_of(recipe)
    if recipe.size == "auto":
        numbers |= _choose_size(resolved, whole * (1 - _SLACK) - spent(), speed, work)
        recipe = resolved.settled(numbers).recipe
        speed = speed_of(recipe)
    before = spent()
    left = whole * (1 - _SLACK) - before
    lost = []
    for keys, value, text, least in _reductions(recipe, whole):
        shortest = scale_budgets(recipe, 0)
        if total_seconds(shortest, speed, work) + max(0.0, least - training_seconds(shortest, speed, work)) <= left:
            break
        recipe = _with(recipe, keys, value)
        numbers[keys] = value, f"reduced to stay within {days(whole)}"
        lost.append(text)
    factor = largest_factor(lambda factor: total_seconds(scale_budgets(recipe, factor), speed, work) <= left)
    with _naming_time(whole):
        readings = _max_epochs_read(scale_budgets(recipe, factor), run_dir) / recipe.shards.max_epochs
    if readings > 1:
        factor *= 0.99 / readings
        text = f"no source is read more than {recipe.shards.max_epochs:g} times (shards.max_epochs)"
        lost.append(f"part of the time stays unused: {text}")
    recipe = scale_budgets(recipe, factor)
    planned = {BEFORE: before, **predict_seconds(recipe, speed, work)}
    fixed = sum(planned.values()) - before - training_seconds(recipe, speed, work)
    why = f"{days(whole)}: {_describe_speed(speed)}, {before:.0f} s before the first step, {fixed:.0f} s besides training; in whole steps"
    asked = resolved.settled(numbers).recipe
    for index, (phase, old) in enumerate(zip(recipe.train.phases, asked.train.phases, strict=True)):
        numbers["train", "phases", index, "tokens"] = _scaled_tokens(phase.tokens, old.tokens, why)
    if recipe.tune is not None and asked.tune is not None and asked.tune.epochs is None:
        numbers["tune", "tokens"] = _scaled_tokens(recipe.tune.planned_tokens, asked.tune.planned_tokens, why)
    if sum(planned.values()) > whole:
        lost.append(f"the time limit: with the minimum of {FEWEST} steps per phase it takes about {days(sum(planned.values()))}")
    if beyond := [one.stage for one in MODEL_STAGES if getattr(recipe, one.stage, None) is not None and one.stage not in planned]:
        lost.append(f"the time of {' and '.join(beyond)}, which is not predicted and comes on top")
    settled = resolved.settled(numbers)
    with _naming_time(whole):
        _require_room(settled.recipe, run_dir, work)
    _write_ledger(resolved, run_dir, numbers, planned, lost, why)
    return settled, [why, "planned: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in planned.items())]


@contextmanager
def _naming_time(whole: float) -> Iterator[None]:
    """Say in a refusal where the budgets come from, which nobody wrote."""
    try:
        yield
    except UserError as error:
        raise UserError(f"time: with the token budgets for {days(whole)}, {error}") from None


def _require_room(recipe: Recipe, run_dir: Path, work: FixedWork) -> None:
    """Raise `UserError` if the budgets have no room for what does not scale with them, as training would later."""
    from lmworks.shards.batches import Batches
    from lmworks.train.stage import check_steps

    raise_first(phase_refusals(recipe))
    Batches(recipe, run_dir / "shards")
    if recipe.tune is not None and (known := tuning_steps(recipe.tune, work)) is not None:
        check_steps(recipe, "tune", *known, held_out=0)


def _scaled_tokens(tokens: Tokens, old: Tokens, why: str) -> tuple[str, str]:
    return tokens.text(), f"{tokens / old:.3g} times {old.text()} for {why}"


def _write_ledger(resolved: Resolved, run_dir: Path, numbers: Numbers, planned: Mapping[str, float], lost: list[str], why: str) -> None:
    tree = as_tree(resolved.recipe)
    listed = [
        {"key": display(tree, keys), "keys": list(keys), "old": get(tree, keys), "new": value, "why": reason}
        for keys, (value, reason) in numbers.items()
    ]
    with Ledger(run_dir / LEDGER) as ledger:
        ledger.write(
            EVENT, seconds=float(resolved.recipe.time or 0), why=why, numbers=listed, given_up=lost,
            planned={name: round(seconds, 1) for name, seconds in planned.items()},
        )  # fmt: skip


def _choose_size(resolved: Resolved, left: float, speed: Speed, work: FixedWork) -> dict[Keys, tuple[Any, str]]:
    """The largest size whose own budget, 20 tokens per active parameter, fits into `left` seconds. Sequence lengths are not
    changed, because the tokenizer was trained for them."""
    phases = resolved.recipe.train.phases
    lengths: dict[Keys, tuple[Any, str]] = {
        ("train", "phases", index, "sequence_length"): (phase.sequence_length.text(), "as the tokenizer was trained for")
        for index, phase in enumerate(phases)
    }

    why = "the compute-optimal size for the time at the measured speed (arXiv:2203.15556)"

    def numbers(size: int) -> dict[Keys, tuple[Any, str]]:
        return {("size",): (amount(size), why), **lengths}

    def seconds(size: int) -> float:
        return total_seconds(resolved.settled(numbers(size)).recipe, speed, work)

    return numbers(SIZES[max(0, bisect_right(SIZES, left, key=seconds) - 1)])


def _reductions(recipe: Recipe, whole: float) -> Iterator[tuple[Keys, Any, str, float]]:
    """What is reduced if time is short, in this order: a key, its new value, a text, and the training seconds below which it is reduced."""
    wanted = recipe.evaluate
    if wanted.benchmarks and wanted.benchmark_items > FEW_ITEMS:
        text = f"benchmark items ({wanted.benchmark_items} -> {FEW_ITEMS} per set)"
        yield ("evaluate", "benchmark_items"), FEW_ITEMS, text, _LEAST * whole
    if wanted.tasks and wanted.task_items > FEW_ITEMS:
        yield ("evaluate", "task_items"), FEW_ITEMS, f"questions ({wanted.task_items} -> {FEW_ITEMS} per task)", _LEAST * whole
    if recipe.tune is not None:
        yield _TUNE, None, _NO_TUNING, 0.0


def _with(recipe: Recipe, keys: Keys, value: Any) -> Recipe:
    first, *rest = map(str, keys)
    node = value if not rest else getattr(recipe, first).model_copy(update={rest[0]: value})
    return recipe.model_copy(update={first: node})


def _max_epochs_read(recipe: Recipe, run_dir: Path) -> float:
    """Epochs of the source that is read most often."""
    from lmworks.shards.batches import Batches

    endless = recipe.model_copy(update={"shards": recipe.shards.model_copy(update={"max_epochs": float("inf")})})
    return max(share.epochs for share in Batches(endless, run_dir / "shards").order.shares())


def _describe_speed(speed: Speed) -> str:
    if not speed.steps:
        return f"{speed.forward:.3g} FLOP/s, as given by LMWORKS_MACHINE"
    by_length = " and ".join(f"{tokens:,.0f}" for tokens in speed.tokens.values())
    lengths = " and ".join(f"{length:,}" for length in speed.tokens)
    return f"{by_length} tokens/s measured in {speed.steps} steps (sequence length {lengths})"


def planned_and_actual_seconds(run_dir: Path, actual: Mapping[str, float | None]) -> dict[str, tuple[float, float | None]]:
    """Planned and actual seconds by stage; empty for a run without `time`."""
    events = events_of(run_dir, EVENT)
    planned = events[-1]["planned"] if events else {}
    return {name: (seconds, seconds if name == BEFORE else actual.get(name)) for name, seconds in planned.items()}
