"""The growths of a batch that grows as the loss falls (`train.phases[].batch_ramp.kind: loss`), by the ledger of a run.

An event `batch_grew` names the phase, the first step of the larger batch and its tokens; it is written before that step is trained.
`Timeline` follows these events, and so does every reader of a run. A rollback to an earlier step forgets the growth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmworks.io.files import explain_damage
from lmworks.io.run_layout import BASE
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import Phase
from lmworks.recipe.timeline import Growth, Timeline, fewest_steps
from lmworks.watch.ledger import GREW, LEDGER, ROLLBACK, read_ledger, since_start_over


def growths(lines: Iterable[Mapping[str, Any]]) -> tuple[Growth, ...]:
    """The growths that hold, from the lines of a ledger, in the order of their steps."""
    found: list[Growth] = []
    for line in since_start_over(lines, BASE.stage):
        if line["event"] == GREW:
            found.append(Growth(str(line["phase"]), int(line["step"]), int(line["tokens_per_step"])))
        elif line["event"] == ROLLBACK and line.get("stage", BASE.stage) == BASE.stage:
            found = kept(found, int(line["to_step"]))
    return tuple(sorted(found, key=lambda one: one.step))


def kept(known: Iterable[Growth], to_step: int) -> list[Growth]:
    """The growths that a rollback to a checkpoint of `to_step` steps leaves."""
    return [one for one in known if one.step <= to_step]


def read_growths(run_dir: Path) -> tuple[Growth, ...]:
    """The growths of a run; none without a ledger."""
    path = Path(run_dir) / LEDGER
    if not path.exists():
        return ()
    lines = read_ledger(path)
    with explain_damage(path):
        return growths(lines)


def timeline_of(recipe: Recipe, run_dir: Path) -> Timeline:
    """The steps of a run: those of its recipe, with the growths of its batch so far. Raises `UserError`."""
    grows = any(phase.loss_ramp is not None for phase in recipe.train.phases)
    return Timeline(recipe.train.phases, read_growths(run_dir) if grows else ())


def describe(phases: Sequence[Phase], known: Sequence[Growth] = ()) -> list[str]:
    """A line for each phase whose batch grows with the loss: the sizes so far, and the steps that it may have."""
    timeline, lines = Timeline(phases, known), []
    for phase, steps in zip(phases, timeline.phases, strict=True):
        if phase.loss_ramp is None:
            continue
        grown = [f"to {one.tokens:,} at step {one.step:,}" for one in known if one.phase == phase.name]
        so_far = f"it grew {', '.join(grown)}" if grown else "it has not grown yet"
        lines.append(
            f"phase {phase.name}: the batch of {int(phase.loss_ramp.start_tokens):,} tokens grows with the loss, up to "
            f"{int(phase.global_batch_tokens):,}; {so_far}; at least {fewest_steps(phase, steps):,} "
            f"steps, at most {steps.steps:,}"
        )
    return lines


def skip_of_rollback(
    phases: Sequence[Phase], known: Sequence[Growth], windows: Sequence[tuple[int, int]], to_step: int, skip: tuple[int, int] | None
) -> tuple[int, int] | None:
    """The steps whose data a rollback to `to_step` skips, if it is to skip those of `skip` and `windows` are skipped already.

    A rollback that forgets a growth gives other data to the steps after it. To skip the same data, it then skips all that was read since
    the checkpoint, up to the first step that has the end of those windows before it.
    """
    left = kept(known, to_step)
    if len(left) == len(known):
        return skip
    first = min(one.step for one in known if one.step > to_step)
    stops = [stop for _, stop in (*windows, *((skip,) if skip else ())) if stop > first]
    if not stops:
        return skip
    before, after = Timeline(phases, known), Timeline(phases, left)
    last = min(max(stops), before.steps) - 1
    begin, count = before.sequences(last)
    return to_step, after.first_unread(before.phase_of(last), begin + count)
