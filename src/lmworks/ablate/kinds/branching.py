"""Arms that continue a checkpoint with its optimizer state: the phases up to the checkpoint, and one phase of the arm's own behind them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks.ablate.run_set import Branch
from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.recipe.derivation.schedules import Schedules
from lmworks.recipe.derivation.timeline import Timeline
from lmworks.recipe.loading.load import load_resolved
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import Phase
from lmworks.recipe.tree.fingerprint import as_tree


@dataclass(frozen=True)
class Start:
    """The checkpoint to continue: `phase` is the phase that it lies in, `before` the phases up to it, `rate` its learning rate relative to
    the peak."""

    branch: Branch
    before: tuple[Phase, ...]
    phase: Phase
    rate: float

    def overrides(self, **phase: Any) -> list[str]:
        """The overrides of an arm that continues with this phase."""
        own = {
            "sequence_length": self.phase.sequence_length.text(), "bias_update_rate": self.phase.bias_update_rate,
            "mtp_loss_weight": self.phase.mtp_loss_weight, **phase,
        }  # fmt: skip
        phases = [*(as_tree(one) for one in self.before), own]
        return [f"train.phases={json.dumps(phases)}", f"tokenizer.path={self.branch.run_dir / 'tokenizer' / 'tokenizer.json'}"]


def find_start(text: str, recipe: Recipe) -> Start:
    """The checkpoint that `checkpoint` names: a run (its newest one), or a directory of a checkpoint in a run. Raises `UserError` if there
    is none, if it is of another model than `recipe`, or if its learning rate is 0."""
    path = Path(text).expanduser()
    if (path / "resolved.json").is_file():
        found = listing.directories(path / "checkpoints")
        if not found:
            raise UserError(f"checkpoint: the run {path} has no checkpoint yet; train it first with: lmworks pretrain {path}")
        path = found[-1]
    run_dir = path.parent.parent
    if not (listing.is_name(path.name) and path.is_dir() and (run_dir / "resolved.json").is_file()):
        raise UserError(
            f"checkpoint: {text} is neither a run directory nor a checkpoint of one; name one such as runs/NAME/checkpoints/step-00000100"
        )
    try:
        document = listing.read_meta(path)
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint: {path} cannot be read ({error}); choose another one, see lmworks ckpt list {run_dir}") from None
    _require_same_model(recipe, document["identity"], path)
    trained = load_resolved(run_dir / "resolved.json")
    step, timeline = int(document["step"]), Timeline(trained.train.phases)
    before, reached = _until(trained, timeline, step, path)
    rate = Schedules(trained.train.phases, [one.steps for one in timeline.phases], timeline.tokens_before).lr_factor(step - 1)
    if rate <= 0:
        raise UserError(
            f"checkpoint: the learning rate of {path.name} has decayed to 0, so nothing can be continued from it; choose an earlier one"
        )
    return Start(Branch(run_dir, path, step, timeline.tokens_before(step)), before, reached, rate)


def _require_same_model(recipe: Recipe, identity: Mapping[str, Any], path: Path) -> None:
    from lmworks.train.pretrain import identity as identity_of

    if json.loads(json.dumps(identity_of(recipe))) != json.loads(json.dumps(identity)):
        raise UserError(f"checkpoint: {path} is of another model than the recipe; name the run itself as recipe, or its recipe file")


def _until(trained: Recipe, timeline: Timeline, step: int, path: Path) -> tuple[tuple[Phase, ...], Phase]:
    """The phases up to a step, the last of them cut there, and the phase that the step before it belongs to."""
    phases = list(trained.train.phases)
    index = timeline.phase_of(step - 1)
    reached = phases[index]
    tokens = timeline.tokens_before(step) - timeline.tokens_before(timeline.first_step(index))
    changes = {"tokens": f"{tokens} tokens", "lr_schedule": {"kind": "constant", "warmup": "0 steps"}, "mixture_changes": []}
    before = (*phases[:index], Phase.model_validate(as_tree(reached) | changes))
    cut = Timeline(list(before))
    if cut.steps != step or cut.tokens_before(step) != timeline.tokens_before(step):
        raise UserError(f"checkpoint: {path.name} lies in a batch ramp; choose a checkpoint behind it")
    return before, reached
