"""What a run is predicted to take before its first step, and how far off the prediction was.

The prediction is the plan for this machine. It is written to the ledger (event `prediction`) once, before training, and compared with what
was measured when pretraining has ended (event `prediction_error`). The run page shows both beside each other.
"""

from __future__ import annotations

from pathlib import Path

from lmworks.checkpoint.listing import directories
from lmworks.doctor.read_run import read_run
from lmworks.errors import UserError
from lmworks.plan.machine import machine_for
from lmworks.plan.plan import make_plan
from lmworks.recipe.schema.recipe import Recipe
from lmworks.run.time_budget import planned_and_actual_seconds
from lmworks.watch.ledger import LEDGER, Ledger, events_of

PREDICTION, ERROR = "prediction", "prediction_error"


def record_prediction(recipe: Recipe, run_dir: Path) -> None:
    """Write the prediction of pretraining, if there is none for these budgets and the layout can be planned for."""
    tokens = sum(int(phase.tokens) for phase in recipe.train.phases)
    if any(event["tokens"] == tokens for event in events_of(run_dir, PREDICTION)):
        return
    try:
        plan = make_plan(recipe, "", machine_for(recipe))
    except UserError:
        return
    seconds, source = plan.seconds, f"{plan.mfu:.0%} MFU, {plan.mfu_source}"
    if planned := planned_and_actual_seconds(run_dir, {}).get("pretrain"):
        seconds, source = planned[0], "the speed that was measured for the time budget"
    figures = {
        "perf/tokens_per_second": tokens / seconds, "seconds": seconds,
        "perf/memory": max(phase.placed.memory.total for phase in plan.phases), "checkpoint_bytes": plan.disk.checkpoint,
    }  # fmt: skip
    with Ledger(run_dir / LEDGER) as ledger:
        ledger.write(PREDICTION, stage="pretrain", tokens=tokens, source=source, figures={k: float(f"{v:.6g}") for k, v in figures.items()})


def record_error(run_dir: Path) -> None:
    """Write how far the newest prediction was from what finished pretraining has measured, once for each prediction."""
    predictions = events_of(run_dir, PREDICTION)
    if not predictions or len(events_of(run_dir, ERROR)) >= len(predictions):
        return
    measured = read_run(run_dir).pretrain.measured()
    for newest in directories(run_dir / "checkpoints")[-1:]:  # not verified: that would read every byte of it
        measured["checkpoint_bytes"] = float(sum(path.stat().st_size for path in newest.rglob("*") if path.is_file()))
    figures = {
        name: {"predicted": predicted, "measured": found, "error": round(predicted / found - 1, 4)}
        for name, predicted in predictions[-1]["figures"].items()
        if (found := measured.get(name))
    }
    with Ledger(run_dir / LEDGER) as ledger:
        ledger.write(ERROR, stage="pretrain", source=predictions[-1]["source"], figures=figures)
