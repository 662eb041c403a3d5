"""What a change of the recipe does to the text of a run that has begun: what was trained stays, and nothing of it is trained again.

A resume goes by the number of the step. So the steps that were trained must have the same sequences by the new recipe as they had, which is
asked of the two orders rather than of each key: batch and its ramp, sequence length, mixture and its changes, seed, packing, the names and
places of phases, and the tokens of those that ended. A change that would give them others is refused, also if its key is allowed.

What later phases read may change, and with it how the text is divided. The ranges of the phases that have begun are kept then, by the line
`ranges_kept` of the ledger, which the order follows (`lmworks.shards.order.KeptRanges`).
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.recipe.changes import readers
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import Phase
from lmworks.recipe.timeline import PhaseSteps
from lmworks.watch.batch_growth import read_growths
from lmworks.watch.ledger import Ledger

if TYPE_CHECKING:
    from lmworks.shards.order import KeptRanges, Order

_ENDLESS = 1 << 50  # tokens of a source: what was read does not depend on how much there is


def keep_order(run_dir: Path, before: Recipe, recipe: Recipe, keys: Collection[str]) -> KeptRanges | None:
    """The ranges to keep when these `keys` of the recipe of a run that has begun have changed; None if the order is the same.

    Raises `UserError` if a step that was trained would have had other sequences, and if there is too little text for the new phases.
    """
    from lmworks.shards.batches import Batches
    from lmworks.shards.manifest import MANIFEST
    from lmworks.shards.order import Order
    from lmworks.train.data.mixture import next_step, read_changes

    saved = listing.directories(run_dir / "checkpoints")
    if not saved or not before.trains_base or not any("pretrain" in readers(key) for key in keys):
        return None
    step, changes, growths = listing.step_of(saved[-1]), read_changes(run_dir).order, read_growths(run_dir)
    tokens = {name: _ENDLESS for one in (before, recipe) for name in _sources(one)}
    old, new = (Order(one, tokens, changes, growths=growths) for one in (before, recipe))
    if old.fingerprint() == new.fingerprint():
        return None
    require_same_past(old, new, before, recipe, step, f"lmworks data mixture {run_dir} --at {max(step, next_step(run_dir))}")
    shards = run_dir / "shards"
    if not (shards / MANIFEST).is_file():
        raise UserError(
            f"the recipe changed what phases read, and {shards} is missing, by which the text that was read is known; make it again first, "
            "with the recipe as it was: lmworks shards RECIPE"
        )
    kept = Batches(before, shards, changes, growths=growths).order.kept(step)
    if not any({"corpus", "shards"} & set(readers(key)) for key in keys):  # otherwise the new token files are not there yet
        Batches(recipe, shards, [*changes, kept], growths=growths)
    return kept


def record(run_dir: Path, kept: KeptRanges) -> None:
    """Record ranges that are kept in the ledger, which the order of the run follows from now on."""
    from lmworks.train.data.mixture import KEPT

    with Ledger(run_dir / "ledger.jsonl") as ledger:
        ledger.write(KEPT, step=kept.step, ranges=kept.ranges, files=kept.files)


def _sources(recipe: Recipe) -> list[str]:
    return [*(name for source in recipe.corpus.sources for name in (source.name, *source.outputs)), *recipe.shards.imported]


def require_same_past(old: Order, new: Order, before: Recipe, recipe: Recipe, step: int, command: str) -> None:
    """Raise `UserError` if the sequences of a step before `step` are others in the `new` order. `command` changes the run's mixture."""
    if old.seed != new.seed:
        raise UserError(
            f"the order of the text that was trained is drawn from the seed {old.seed}; keep it with --set train.seed={old.seed}, or "
            "choose another run_dir"
        )
    if old.packing != new.packing:
        raise UserError(f"the text that was trained is packed by {old.packing}; keep shards.packing, or choose another run_dir")
    begun = [number for number in range(len(old.timeline.phases)) if old.timeline.first_step(number) < step]
    for number in begun:
        was, name = old.timeline.phases[number], old.timeline.phases[number].name
        if number >= len(new.timeline.phases) or new.timeline.phases[number].name != name:
            raise UserError(
                f"phase {name}, number {number + 1} of this run, has begun; keep its name and its place, and add phases after it, or "
                "choose another run_dir"
            )
        now, phases = new.timeline.phases[number], (before.train.phases[number], recipe.train.phases[number])
        if was.sequence_length != now.sequence_length:
            raise UserError(
                f"phase {name} has trained on sequences of {was.sequence_length:,} tokens, not {now.sequence_length:,}; keep its "
                "sequence_length, and add a phase with another one after it"
            )
        inside = min(step - old.timeline.first_step(number), was.steps)
        _require_same_steps(was, now, inside, *phases, ended=number != begun[-1])
        drawn = [[one for one in plan.segments if one[0] < was.before(inside)] for plan in (old.mixtures[number], new.mixtures[number])]
        tables = [[(first, mixture.names, mixture.slots.tolist()) for first, mixture in segments] for segments in drawn]
        if tables[0] != tables[1]:
            changed = phases[0].mixture != phases[1].mixture
            weights = " ".join(f"--set {source}={weight:g}" for source, weight in phases[1].mixture.items())
            instead = f"; to change it from now on: {command} {weights}" if changed and inside < was.steps else ""
            raise UserError(
                f"phase {name} has read {was.before(inside):,} sequences with its mixture; undo the change of train.phases.{name}."
                f"{'mixture' if changed else 'mixture_changes'}{instead or ', or plan it for a later step'}"
            )


def _require_same_steps(was: PhaseSteps, now: PhaseSteps, inside: int, old: Phase, new: Phase, ended: bool) -> None:
    """Raise `UserError` if the first `inside` steps of a phase are others now, or if it has `ended` and would have more of them."""
    length, key = was.sequence_length, f"train.phases.{was.name}"
    trained = was.before(inside) * length
    if (old.global_batch_tokens, old.batch_ramp) == (new.global_batch_tokens, new.batch_ramp) and now.steps < inside:
        raise UserError(f"phase {was.name} has trained {trained:,} tokens; set {key}.tokens to at least that, or choose another run_dir")
    if now.before(inside) != was.before(inside):
        raise UserError(
            f"phase {was.name} has trained {trained:,} tokens in {inside:,} steps, which would be {now.before(inside) * length:,} tokens "
            f"with the changed batch: text would be trained twice or left out. Undo {_of_batch(was, old, new, key)}; for another batch "
            f"from now on, end the phase with {key}.tokens='{trained} tokens' and add one after it ({key}.lr_schedule.phases=2 spans both)"
        )
    if ended and now.steps != was.steps:
        raise UserError(
            f"phase {was.name} ended after {was.tokens:,} tokens, and later phases have begun; keep {key}.tokens, and raise those of the "
            "last phase or add one"
        )


def _of_batch(was: PhaseSteps, old: Phase, new: Phase, key: str) -> str:
    """The keys by which the batch of a phase changed, for a refusal."""
    names = [name for name in ("global_batch_tokens", "batch_ramp") if getattr(old, name) != getattr(new, name)]
    if names:
        return " and ".join(f"{key}.{name}" for name in names)
    return f"{key}.tokens, of which its batch ramp is a share, or set {key}.batch_ramp.over='{was.ramp_steps} steps'"
