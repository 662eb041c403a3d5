"""Kinds of ablations whose arms continue a checkpoint with its optimizer state: annealing on new data, and the critical batch size.

An arm has the phases up to the checkpoint, and one phase of its own after them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from lmworks.ablate.file import DEFAULT_MEASURES, Ablation, Expansion, Findings
from lmworks.ablate.kinds import Rescale, rescaled
from lmworks.ablate.run_set import Branch
from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.recipe.changes import as_tree
from lmworks.recipe.load import load_resolved
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import Phase
from lmworks.recipe.timeline import Schedules, Timeline


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
    from lmworks.train.build import identity as identity_of

    if listing.differences(identity_of(recipe), identity):
        raise UserError(f"checkpoint: {path} is of another model than the recipe; name the run itself as recipe, or its recipe file")


def _until(trained: Recipe, timeline: Timeline, step: int, path: Path) -> tuple[tuple[Phase, ...], Phase]:
    """The phases up to a step, the last of them cut there, and the phase that the step before it belongs to."""
    phases = list(trained.train.phases)
    index = timeline.phase_of(step - 1)
    if grows := [phase.name for phase in phases[: index + 1] if phase.loss_ramp is not None]:
        raise UserError(
            f"checkpoint: the batch of phase {grows[0]} grows with the loss (batch_ramp.kind), so the steps up to {path.name} follow from "
            "no recipe; choose a run without it"
        )
    reached = phases[index]
    tokens = timeline.tokens_before(step) - timeline.tokens_before(timeline.first_step(index))
    changes = {"tokens": f"{tokens} tokens", "lr_schedule": {"kind": "constant", "warmup": "0 steps"}, "mixture_changes": []}
    before = (*phases[:index], Phase.model_validate(as_tree(reached) | changes))
    cut = Timeline(list(before))
    if cut.steps != step or cut.tokens_before(step) != timeline.tokens_before(step):
        raise UserError(f"checkpoint: {path.name} lies in a batch ramp; choose a checkpoint behind it")
    return before, reached


_DIGITS = 12  # of a weight: the old mixture as new data is the old one again, whatever its sums are rounded to


class Anneal(Ablation):
    """Annealing, to judge new data (the method of arXiv:2407.21783, section 3.1.3): a checkpoint continued over the budget while the
    learning rate falls linearly to 0, with the mixture that it was trained on (the baseline), and with 40% of it and 60% of new data."""

    kind: Literal["anneal"] = "anneal"
    checkpoint: str = Field(
        description="what to continue: a run, which stands for its newest checkpoint, or the directory of a checkpoint in one"
    )
    candidates: dict[str, dict[str, float]] = Field(
        min_length=1, description="new data of each arm by its name: weights of sources of the recipe; they are scaled to a sum of 1"
    )
    old: float = Field(0.4, ge=0, lt=1, description="fraction of the mixture that the checkpoint was trained on, in arms with new data")

    @field_validator("candidates")
    @classmethod
    def _weighted(cls, value: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        for name, weights in value.items():
            if name == "old":
                raise ValueError("old is the name of the baseline; give this arm another")
            if not weights or min(weights.values()) <= 0:
                raise ValueError(f"{name} needs at least one source, with weights above 0")
        return value

    def expand(self, recipe: Recipe) -> Expansion:
        if self.budget is None:
            raise UserError("kind anneal needs budget, the tokens to continue for")
        start = find_start(self.checkpoint, recipe)
        batch = int(start.phase.global_batch_tokens)
        tokens = int(self.budget) // batch * batch
        if not tokens:
            raise UserError(f"budget: {int(self.budget):,} tokens are less than one step of {batch:,}; raise it")
        arms = {}
        for name, new in {"old": {}, **self.candidates}.items():
            total = sum(new.values())
            kept = self.old if new else 1.0
            mixture = {source: kept * weight for source, weight in start.phase.mixture.items() if kept}
            for source, weight in new.items():
                mixture[source] = mixture.get(source, 0.0) + (1 - kept) * weight / total
            mixture = {source: round(weight, _DIGITS) for source, weight in mixture.items()}
            arms[name] = start.overrides(
                name="anneal", tokens=f"{tokens} tokens", mixture=mixture, global_batch_tokens=f"{batch} tokens",
                learning_rate_scale=start.rate, lr_schedule={"kind": "linear", "warmup": "0 steps", "min_lr_ratio": 0.0},
            )  # fmt: skip
        return Expansion(arms, "old", start.branch, fixed_tokens=True)


LOSS = "validation/loss"


class CriticalBatch(Ablation):
    """Critical batch size by branching (Merrill et al. 2025, arXiv:2505.23971): a checkpoint continued over equal tokens with larger
    batches and a rescaled learning rate. The largest batch whose held-out loss is within `tolerance` of the first is reported, beside
    the gradient noise scale (McCandlish et al. 2018, arXiv:1812.06162)."""

    kind: Literal["critical-batch"] = "critical-batch"
    checkpoint: str = Field(
        description="what to continue: a run, which stands for its newest checkpoint, or the directory of a checkpoint in one"
    )
    factors: list[int] = Field([1, 2, 4, 8], min_length=2, description="factors on the batch size of the checkpoint; 1 is the baseline")
    rescale: Rescale = Field("sqrt", description="how the learning rate follows the batch size")
    tolerance: float = Field(0.01, gt=0, description="rise of the held-out loss that counts as none, in nats per token")

    default_measures: ClassVar = (*DEFAULT_MEASURES, LOSS)

    def expand(self, recipe: Recipe) -> Expansion:
        if self.budget is None:
            raise UserError("kind critical-batch needs budget, the tokens that each branch trains on")
        if min(self.factors) != 1 or len(set(self.factors)) < len(self.factors):
            raise UserError("factors: must be whole numbers from 1 on that differ from each other, 1 among them")
        start = find_start(self.checkpoint, recipe)
        batch = int(start.phase.global_batch_tokens)
        largest = max(self.factors) * batch
        tokens = int(self.budget) // largest * largest  # whole steps of every branch
        if not tokens:
            raise UserError(f"budget: {int(self.budget):,} tokens are less than one step of the largest batch, {largest:,}; raise it")
        arms, labels = {}, {}
        for factor in sorted(self.factors):
            arms[f"batch-times-{factor}"] = start.overrides(
                name="branch", tokens=f"{tokens} tokens", mixture=start.phase.mixture, global_batch_tokens=f"{factor * batch} tokens",
                learning_rate_scale=start.rate * rescaled(factor, self.rescale), lr_schedule={"kind": "constant", "warmup": "0 steps"},
            )  # fmt: skip
            labels[f"batch-times-{factor}"] = float(factor * batch)
        return Expansion(arms, "batch-times-1", start.branch, fixed_tokens=True, labels=labels)

    def conclude(self, findings: Findings) -> dict[str, Any] | None:
        return findings.critical_batch(LOSS, self.tolerance)
