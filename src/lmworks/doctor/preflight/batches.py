"""The order of the data: shuffled by sequence, each sequence once, and no dearer for being long.

Two published mishaps are looked for (the SmolLM3 report). Documents were shuffled but their sequences read one after another, so that a
whole batch came from one long file, and the loss was noisy. And an index that grew with the planned steps filled the memory, so that long
runs stalled where short ones did not.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from lmworks.doctor.preflight.check_result import CheckContext, CheckResult
from lmworks.plan.render import size
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.units import Tokens
from lmworks.shards.order.order import Order
from lmworks.shards.read.batches import Batches

_SEQUENCES = 20_000  # of a phase that are looked at
_NEAR = 50  # two sequences are neighbours if less than this part of the range lies between them
_TOO_OFTEN = 0.15  # neighbours beyond chance
_FEWEST = 16  # sequences and pairs below which chance says nothing
_LONGER = 1000
_STEPS, _TRIES = 5, 3
_SLOWER, _SLOWER_SECONDS = 3.0, 0.05
_LARGER, _LARGER_BYTES = 1.5, 1 << 19


def shuffled(context: CheckContext) -> CheckResult:
    """Of every phase, whether sequences that follow each other come from all over the text, and none comes twice before all came once."""
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
                return CheckResult("fail", f"{where}: {problem}", "this is a fault of the data order; report it with resolved.json")
            beyond, seen, judged = _neighbours(sequence, order.share(phase, name).sequences)
            pairs += judged
            if seen - beyond > worst[1] - worst[2] or not worst[0]:
                worst = (where, seen, beyond)
    documents = {span.id for row in context.batches.documents(0) for span in row.documents}
    rows = context.batches.order.sequences(0)[1]
    figures = {"sequences": float(looked), "pairs": float(pairs), "documents_in_first_batch": float(len(documents)), "neighbours": worst[1]}
    text = f"{looked:,} sequences, each once an epoch; the first batch of {rows} draws on {len(documents):,} documents"
    if worst[1] - worst[2] > _TOO_OFTEN:
        return CheckResult(
            "fail", f"{worst[0]}: {worst[1]:.0%} of consecutive sequences are neighbors in the text, {worst[2]:.0%} by chance",
            "shuffle by sequence, not by document: one bad long file would fill whole batches, and the loss would be noisy", figures,
        )  # fmt: skip
    close = f"{worst[1]:.0%} of neighbors in a batch are close in the text, {worst[2]:.0%} by chance"
    return CheckResult("ok", f"{text}; {close}", figures=figures)


def _repeated(order: Order, phase: int, name: str, sequence: np.ndarray, epoch: np.ndarray) -> str | None:
    """What is wrong if a sequence comes twice in an epoch, or not at all in one that was read whole."""
    there = order.share(phase, name).sequences
    for number in np.unique(epoch):
        read = sequence[epoch == number]
        once = np.unique(read)
        if len(once) < len(read):
            return f"{len(read) - len(once):,} sequences come twice in epoch {number}"
        if len(once) > there or once[0] < 0 or once[-1] >= there:
            return f"sequences outside the {there:,} of its range are read"
    return None


def _neighbours(sequence: np.ndarray, there: int) -> tuple[float, float, int]:
    """Share of near pairs by chance, share found, and how many pairs were judged; in one list, in the order of reading."""
    if there < _FEWEST or len(sequence) <= _FEWEST:
        return 0.0, 0.0, 0
    near = max(1, there // _NEAR)
    chance = 2 * near / there
    gaps = np.abs(np.diff(sequence))
    return chance, float((gaps <= near).mean()), len(gaps)


def independent_of_budget(context: CheckContext) -> CheckResult:
    """Time and memory of single batches, and of getting ready for them, for the budget and for one a thousand times larger."""
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
        advice = "something is kept per step or sequence of the run: long runs would slow down or run out of memory"
        return CheckResult("fail", text, advice, figures)
    return CheckResult("ok", text, figures=figures)


def longer(recipe: Recipe, factor: int) -> Recipe:
    """The recipe with so many times the budget in every phase, and no limit to how often text is read."""
    phases = [phase.model_copy(update={"tokens": Tokens(int(phase.tokens) * factor)}) for phase in recipe.train.phases]
    shards = recipe.shards.model_copy(update={"max_epochs": float("inf"), "cache": None})
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"phases": phases}), "shards": shards})


def _cost(recipe: Recipe, shards_dir: Path) -> tuple[float, float]:
    """Seconds of a batch (the best of some tries, the median over steps) and the most bytes that all of it held at a time."""
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
    """The shards under another path, so that rows packed for a budget that nobody planned are not kept beside them."""
    for path in shards_dir.iterdir():
        if path.name != "packing":
            (folder / path.name).symlink_to(path.resolve())
    return folder
