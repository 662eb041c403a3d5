"""Checks of the data order: sequences are shuffled, each is read once per epoch, and the cost does not depend on the length of the run.

They detect two published failures (SmolLM3 report): documents were shuffled but their sequences were read consecutively, so that whole
batches came from one long file and the loss was noisy; and an index that grew with the number of steps filled the memory, so that long
runs stalled.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from lmworks.doctor.preflight.check_result import CheckContext, CheckResult
from lmworks.plan.amounts import size
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.units import Tokens
from lmworks.shards.order.order import Order
from lmworks.shards.read.batches import Batches

_SEQUENCES = 20_000  # checked per phase
_NEAR = 50  # two sequences are neighbors if their distance is at most 1/50 of the range
_TOO_OFTEN = 0.15  # fraction of neighbors above chance
_FEWEST = 16  # sequences; with fewer the comparison with chance is meaningless
_LONGER = 1000
_STEPS, _TRIES = 5, 3
_SLOWER, _SLOWER_SECONDS = 3.0, 0.05
_LARGER, _LARGER_BYTES = 1.5, 1 << 19


def shuffled(context: CheckContext) -> CheckResult:
    """Check for every phase that consecutive sequences come from all parts of the text, and that none repeats within an epoch."""
    context.need_shards()
    order = context.batches.order
    looked, pairs = 0, 0
    worst = ("", 0.0, 0.0)
    for phase, steps in enumerate(order.timeline.phases):
        count = min(steps.sequences, _SEQUENCES)
        found = order.locate(phase, np.arange(count))
        looked += count
        for index in np.unique(found.source):
            mine = found.source == index
            name = order.sources[index]
            where = f"phase {steps.name}, source {name}"
            sequence, epoch = found.sequence[mine], found.epoch[mine]
            if problem := _repeated(order, phase, name, sequence, epoch):
                return CheckResult("fail", f"{where}: {problem}", "this is a bug in the data order; report it with resolved.json")
            by_chance, found_near, count = _neighbor_fraction(sequence, order.share(phase, name).sequences)
            pairs += count
            if found_near - by_chance > worst[1] - worst[2] or not worst[0]:
                worst = (where, found_near, by_chance)
    documents = {span.id for row in context.batches.documents(0) for span in row.documents}
    rows = context.batches.order.sequences(0)[1]
    figures = {"sequences": float(looked), "pairs": float(pairs), "documents_in_first_batch": float(len(documents)), "neighbours": worst[1]}
    text = f"{looked:,} sequences, each once an epoch; the first batch of {rows} draws on {len(documents):,} documents"
    if worst[1] - worst[2] > _TOO_OFTEN:
        return CheckResult(
            "fail", f"{worst[0]}: {worst[1]:.0%} of consecutive sequences are neighbors in the text, {worst[2]:.0%} by chance",
            "shuffle by sequence, not by document: otherwise a long file fills whole batches, and the loss is noisy", figures,
        )  # fmt: skip
    close = f"{worst[1]:.0%} of neighbors in a batch are close in the text, {worst[2]:.0%} by chance"
    return CheckResult("ok", f"{text}; {close}", figures=figures)


def _repeated(order: Order, phase: int, name: str, sequence: np.ndarray, epoch: np.ndarray) -> str | None:
    """A description of the error if a sequence repeats within an epoch or is out of range; otherwise None."""
    available = order.share(phase, name).sequences
    for number in np.unique(epoch):
        read = sequence[epoch == number]
        once = np.unique(read)
        if len(once) < len(read):
            return f"{len(read) - len(once):,} sequences repeat within epoch {number}"
        if len(once) > available or once[0] < 0 or once[-1] >= available:
            return f"sequences outside its range of {available:,} are read"
    return None


def _neighbor_fraction(sequence: np.ndarray, available: int) -> tuple[float, float, int]:
    """The fraction of consecutive sequences that are neighbors by chance, the measured fraction, and the number of pairs."""
    if available < _FEWEST or len(sequence) <= _FEWEST:
        return 0.0, 0.0, 0
    near = max(1, available // _NEAR)
    chance = 2 * near / available
    gaps = np.abs(np.diff(sequence))
    return chance, float((gaps <= near).mean()), len(gaps)


def independent_of_budget(context: CheckContext) -> CheckResult:
    """Compare time and memory of setup and of single batches for the token budget and for one that is a thousand times larger."""
    context.need_shards()
    with TemporaryDirectory() as folder:
        view = _view(context.shards_dir, Path(folder))
        small, large = (_cost(longer(context.recipe, factor), view) for factor in (1, _LONGER))
    figures = {f"{name}_{kind}": value for kind, cost in (("planned", small), ("longer", large))
               for name, value in zip(("seconds", "bytes"), cost, strict=True)}  # fmt: skip
    text = (
        f"a batch takes {1e3 * small[0]:.1f} ms and {size(small[1])} as planned, {1e3 * large[0]:.1f} ms and {size(large[1])} "
        f"with a budget {_LONGER:,} times larger"
    )
    if large[0] > _SLOWER * small[0] + _SLOWER_SECONDS or large[1] > _LARGER * small[1] + _LARGER_BYTES:
        advice = "time or memory grows with the number of steps: long runs would slow down or run out of memory"
        return CheckResult("fail", text, advice, figures)
    return CheckResult("ok", text, figures=figures)


def longer(recipe: Recipe, factor: int) -> Recipe:
    """The recipe with `factor` times the token budget in every phase, and without a limit on epochs."""
    phases = [phase.model_copy(update={"tokens": Tokens(int(phase.tokens) * factor)}) for phase in recipe.train.phases]
    shards = recipe.shards.model_copy(update={"max_epochs": float("inf"), "cache": None})
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"phases": phases}), "shards": shards})


def _cost(recipe: Recipe, shards_dir: Path) -> tuple[float, float]:
    """Seconds per batch (the best of several tries, the median over steps), and the peak of allocated bytes."""
    batches = Batches(recipe, shards_dir)
    steps = [round(at) for at in np.linspace(0, batches.steps - 1, _STEPS)]
    times = [min(_seconds(batches, step) for _ in range(_TRIES)) for step in steps]
    del batches
    tracemalloc.start()
    try:
        batches = Batches(recipe, shards_dir)
        for step in steps:
            batches.batch(step)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return statistics.median(times), float(most)


def _seconds(batches: Batches, step: int) -> float:
    began = time.perf_counter()
    batches.batch(step)
    return time.perf_counter() - began


def _view(shards_dir: Path, folder: Path) -> Path:
    """The shards under another path, so that row plans for the larger budget are not stored with them."""
    for path in shards_dir.iterdir():
        if path.name != "packing":
            (folder / path.name).symlink_to(path.resolve())
    return folder
