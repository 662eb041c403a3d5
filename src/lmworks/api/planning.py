"""The plan of a recipe with what its run would refuse: what `lmworks plan` prints and `Recipe.plan` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmworks.errors import UserError

if TYPE_CHECKING:
    from lmworks.plan.budget import TimeBudget
    from lmworks.plan.laws import LossLaw
    from lmworks.plan.plan import Plan
    from lmworks.recipe.load import Resolved
    from lmworks.recipe.schema.layout import Cluster
    from lmworks.recipe.schema.recipe import Recipe


@dataclass(frozen=True)
class PlannedRun:
    """What a run is predicted to need.

    plan: parameters, FLOPs, memory in bytes, seconds and dollars. budget: how the tokens (and the size) were fitted to `time`; None without
    a time. refusals: why the run would not start. warnings: what may come out badly. note: where the budgets for `time` come from; empty
    without a time.
    """

    plan: Plan
    budget: TimeBudget | None = None
    refusals: tuple[UserError, ...] = ()
    warnings: tuple[str, ...] = ()
    note: str = ""
    law: LossLaw | None = field(default=None, repr=False)

    @property
    def seconds(self) -> float:
        """Predicted seconds of the phases that are trained."""
        return self.plan.seconds

    @property
    def dollars(self) -> float:
        """Predicted price; 0 for a cluster without one."""
        return self.plan.dollars

    def to_json(self) -> dict[str, Any]:
        """The JSON that `lmworks plan --json` prints."""
        from lmworks.plan.budget import as_plain
        from lmworks.plan.plan import plain

        value = plain(self.plan)
        cautions = self.law.cautions(self.plan.counts.active_computed, self.plan.tokens) if self.law else []
        value["warnings"] += [*cautions, *self.warnings]
        value["refusals"] = [str(error) for error in self.refusals]
        value["note"] = self.note
        return value | ({"budget": as_plain(self.budget)} if self.budget else {})


def settled_budget(resolved: Resolved) -> tuple[Resolved, str]:
    """The recipe with the numbers that its run was given for its `time`; and what is to be said where it has none for this time."""
    from lmworks.run.time_budget import begun_otherwise, recorded_budget
    from lmworks.ui.amounts import days

    assert resolved.recipe.run_dir
    run_dir = Path(resolved.recipe.run_dir)
    settled = recorded_budget(resolved, run_dir)
    other = "" if settled is None else begun_otherwise(settled.recipe, run_dir)
    if settled is not None and not other:
        return settled, ""
    assert resolved.recipe.time is not None
    kept = f"{run_dir} has begun {other} and keeps its budgets, so this is for another run (--set run_dir=DIR); " if other else ""
    return resolved, (
        f"{kept}time is {days(resolved.recipe.time)}: `lmworks run` sets the token budgets by the speed that it measures, and takes data "
        "preparation, evaluation and export out of the time"
    )


def predict(
    resolved: Resolved, cluster: str | Cluster | None = None, *, mfu: float | str | None = None, calibrate: bool = False,
    law: LossLaw | None = None, served_tokens: float = 0.0, shipped: bool = False, last: str | None = None,
) -> PlannedRun:  # fmt: skip
    """Predict a run on a cluster, by default this machine.

    mfu: the model FLOPs utilization to assume, from 0.001 to 1, or a run directory in which it was measured. calibrate: measure it here.
    law: the scaling law of a ladder. served_tokens: tokens that the model is to serve, where `size: auto` chooses a size. shipped: whether
    the recipe is an example, whose files nobody has; then missing files are warnings. last: the stage with which the run ends; what only a
    later one would do is left out, and what it would refuse is said where `lmworks run --to` refuses it.
    Raises `UserError` if there is no plan, with the first reason why the run would not start.
    """
    from lmworks.plan.automatic import this_machine
    from lmworks.plan.budget import fit_time
    from lmworks.plan.plan import make_plan
    from lmworks.recipe.load import load_cluster
    from lmworks.run.prediction import text_beyond_epochs
    from lmworks.run.refusals import Before, look_ahead
    from lmworks.run.stage_data import EXACT_BYTES
    from lmworks.run.stages import checked_stages, stages_for
    from lmworks.ui.amounts import days

    stages = [stage.name for stage in stages_for(resolved.recipe, last)]
    resolved, note = settled_budget(resolved)
    recipe, beside = resolved.recipe, resolved.path.parent
    if calibrate and not {*(["pretrain"] if recipe.trains_base else recipe.later_stages)} & {*stages}:
        raise UserError(f"--calibrate measures the speed of training, and nothing is trained up to {stages[-1]}; leave it out")
    where = load_cluster(cluster, beside) if isinstance(cluster, str) else cluster or this_machine(recipe.threads)
    if calibrate and cluster is not None:
        _require_devices_here(where)
    assert recipe.run_dir
    run_dir = Path(recipe.run_dir)
    before = Before(recipe, run_dir, beside, most=EXACT_BYTES, proportions=bool(note))
    refusals = list(look_ahead(before, [stage.name for stage in checked_stages(recipe, last)]))
    certain = [error for check, error in refusals if not check.here or (not shipped and cluster is None)]
    rehearsed, budget, short = None, None, None
    options: dict[str, Any]
    if calibrate and not recipe.trains_base and not refusals:
        from lmworks.run.rehearsal import rehearse

        rehearsed = rehearse(resolved, before.data, before.tokenizer, last)
        options = {"measured_mfu": rehearsed.mfu, "measured_source": rehearsed.how, "layout_in_mfu": False}
    else:
        measured, source, whole = _mfu(mfu, recipe, where, calibrate and recipe.trains_base)
        options = {"measured_mfu": measured, "measured_source": source, "layout_in_mfu": whole}
    if note:  # there is a time, and no run has turned it into tokens yet
        assert recipe.time is not None
        fitted, made, budget = fit_time(
            resolved, where, float(recipe.time), choose_size=recipe.size == "auto", served_tokens=served_tokens, law=law,
            stages=stages, **options,
        )  # fmt: skip
        short = text_beyond_epochs(fitted.recipe, run_dir)
    else:
        if recipe.time is not None:
            note = f"time is {days(recipe.time)}: {run_dir} has its token budgets for it already, and keeps them on any machine"
        try:
            made = make_plan(
                recipe, resolved.fingerprint, where, unfit=True, data=before.data,
                measured=rehearsed.stages if rehearsed is not None and cluster is None else None, stages=stages, **options,
            )  # fmt: skip
        except ValueError:
            if not certain:
                raise
            raise UserError("; ".join(map(str, certain))) from None  # they say why there is no plan
    doubtful = [f"on this machine, the run would refuse: {error}" for _, error in refusals if error not in certain]
    doubtful += [short] if short else []
    warnings = [*before.notes, *doubtful] if cluster is None else doubtful
    return PlannedRun(made, budget, tuple(certain), tuple(warnings), note, law if made.phases else None)


def _require_devices_here(cluster: Cluster) -> None:
    """Raise `UserError` if the devices of a cluster are others than those of this machine, which has only its own speed to measure."""
    import torch

    from lmworks.host.devices import find_gpu

    here = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    kinds = find_gpu(here), find_gpu(cluster.device)
    if cluster.on_cpu == torch.cuda.is_available() or (None not in kinds and kinds[0] != kinds[1]):
        raise UserError(
            f"--calibrate measures the speed of this machine, {here}, and cluster {cluster.name} has others ({cluster.device}); leave it "
            "out, or give --mfu a number or a run on such devices"
        )


def _mfu(given: float | str | None, recipe: Recipe, cluster: Cluster, calibrate: bool) -> tuple[float | None, str, bool]:
    """The MFU that replaces the cluster's, its origin, and whether it contains communication between machines and pipeline bubble."""
    if calibrate:
        from lmworks.plan.counts import flops_per_token
        from lmworks.train.calibrate import calibrate as measure

        return *measure(recipe, lambda length, count: flops_per_token(recipe.model, length, micro_batches=count).total), False
    if given is None:
        return None, "", True
    try:
        mfu = float(given)
    except ValueError:
        from lmworks.run.prediction import measured_mfu

        found = measured_mfu(Path(str(given)), cluster)
        return found.mfu, found.source, found.with_layout
    if not 0.001 <= mfu <= 1:
        raise UserError(f"--mfu is a number from 0.001 to 1, or a run directory; {given} is neither")
    return mfu, "as given by --mfu", True
