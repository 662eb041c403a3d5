"""What a run is predicted to take before its first step, and how far off the prediction was.

The prediction is the plan for this machine. It is written to the ledger (event `prediction`) once for each stage that trains, before it
begins, and compared with what was measured when it has ended (event `prediction_error`). The run page shows both beside each other. The
speed of a run can be the basis of other plans (`lmworks plan --mfu RUN`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from lmworks.checkpoint.listing import directories
from lmworks.doctor.read_run import read_run
from lmworks.doctor.record_files import lines, number
from lmworks.errors import UserError
from lmworks.model_stages import BASE, of_stage
from lmworks.plan.flops import flops_per_token
from lmworks.plan.machine import machine_for
from lmworks.plan.plan import make_plan
from lmworks.plan.stage_data import StageData
from lmworks.recipe.schema.cluster import Cluster
from lmworks.recipe.schema.recipe import Recipe
from lmworks.run.rehearsal import kept
from lmworks.run.time_budget import planned_and_actual_seconds
from lmworks.watch.ledger import LEDGER, Ledger, events_of

PREDICTION, ERROR = "prediction", "prediction_error"
_NEWEST = 1000  # metrics lines whose median speed counts


@dataclass(frozen=True)
class MeasuredMfu:
    """The speed of a run as an MFU of a cluster. `with_layout`: communication between machines and pipeline bubble are in it."""

    mfu: float
    source: str
    with_layout: bool


def measured_mfu(run_dir: Path, cluster: Cluster) -> MeasuredMfu:
    """The MFU of `cluster` at which its devices are as fast as those that pretrained this run.

    Speed is the median of model FLOPs per second and device in the last 1,000 metrics lines since the newest start. Ranks on CPUs share
    one machine, which is one device. Raises `UserError` if the run has no such lines, or devices of another kind.
    """
    run = read_run(run_dir)
    if run.recipe is None or not run.pretrain.starts:
        raise UserError(f"{run_dir} has not begun to pretrain, so it has no speed; give another run, a number, or --calibrate")
    model, start = run.recipe.model, run.pretrain.starts[-1]
    if bool(start.cores) != cluster.on_cpu:
        devices = "CPUs" if start.cores else "accelerators"
        raise UserError(f"{run_dir} was trained on {devices}, and cluster {cluster.name} has others; name one of its kind with --cluster")
    speeds: deque[float] = deque(maxlen=_NEWEST)
    for record in lines(run_dir / "metrics.jsonl"):
        speed, length = number(record.get("perf/tokens_per_second")), int(number(record.get("train/sequence_length")))
        if speed > 0 and length > 0 and number(record.get("time")) >= start.time:
            speeds.append(speed * flops_per_token(model, length).total)
    if not speeds:
        raise UserError(f"{run_dir} has no metrics since it was last started; give another run, a number, or --calibrate")
    each = median(speeds) / (1 if start.cores else start.ranks)
    if (mfu := each / (cluster.tflops * 1e12)) > 1:
        raise UserError(
            f"{run_dir} ran at {each / 1e12:.3g} TFLOP/s per device, above the peak of cluster {cluster.name} ({cluster.tflops:g}); "
            "name the cluster on which it was trained with --cluster"
        )
    source = f"measured in {run_dir}: median of {len(speeds)} metrics lines, {each / 1e12:.3g} TFLOP/s per device"
    return MeasuredMfu(mfu, source, run.recipe.layout.pp > 1 or (not cluster.on_cpu and start.ranks > cluster.devices_per_node))


def record_prediction(recipe: Recipe, run_dir: Path, stage: str, data: Mapping[str, StageData]) -> None:
    """Write the prediction of a stage that trains, if there is none for these budgets and the layout can be planned for. `data` is what was
    read of the data of the stages after pretraining; a rehearsal of this recipe (`lmworks plan --calibrate`) on this machine is used."""
    data = {name: found for name, found in data.items() if name in recipe.later_stages}  # tuning may have been given up
    if stage != BASE.stage and recipe.trains_base:  # its own plan: that of a run without pretraining
        train = recipe.train.model_copy(update={"phases": []})
        recipe = recipe.model_copy(update={"train": train, "start_from": recipe.start_from or "the base model"})
    rehearsed = None if recipe.trains_base else kept(recipe, data)
    try:
        plan = make_plan(recipe, "", machine_for(recipe), data=data, measured=None if rehearsed is None else rehearsed.stages)
    except UserError:
        return
    phases = [phase for phase in plan.phases if stage in (BASE.stage, phase.name)]
    tokens = sum(phase.tokens for phase in phases)
    if not phases or any(event["tokens"] == tokens for event in events_of(run_dir, PREDICTION) if event["stage"] == stage):
        return
    training = seconds = sum(phase.seconds for phase in phases)
    source = f"{plan.mfu:.0%} MFU, {plan.mfu_source}"
    if planned := planned_and_actual_seconds(run_dir, {}).get(stage):
        training, source = planned[0], "the speed that was measured for the time budget"
        seconds = training
    elif rehearsed is not None:
        training, source = rehearsed.stages[stage]["steps"], rehearsed.how
    figures = {
        "perf/tokens_per_second": tokens / training, "seconds": seconds,
        "perf/memory": max(phase.placed.memory.total for phase in phases), "checkpoint_bytes": plan.disk.checkpoint,
    }  # fmt: skip
    with Ledger(run_dir / LEDGER) as ledger:
        ledger.write(PREDICTION, stage=stage, tokens=tokens, source=source, figures={k: float(f"{v:.6g}") for k, v in figures.items()})


def record_error(run_dir: Path, stage: str, seconds: float) -> None:
    """Write how far the newest prediction of a stage was from what it has measured when it has ended, once for each prediction. `seconds`
    are those that a stage after pretraining took in this process; of one that was interrupted they are not compared."""
    predictions, errors = ([one for one in events_of(run_dir, name) if one["stage"] == stage] for name in (PREDICTION, ERROR))
    if not predictions or len(errors) >= len(predictions):
        return
    training = read_run(run_dir).training[stage]
    measured = training.measured()
    if stage != BASE.stage:
        measured.pop("seconds", None)
        measured |= {"seconds": seconds} if len(training.starts) == 1 else {}
    for newest in directories(run_dir / of_stage(stage).checkpoints)[-1:]:  # not verified: that would read every byte of it
        measured["checkpoint_bytes"] = float(sum(path.stat().st_size for path in newest.rglob("*") if path.is_file()))
    figures = {
        name: {"predicted": predicted, "measured": found, "error": round(predicted / found - 1, 4)}
        for name, predicted in predictions[-1]["figures"].items()
        if (found := measured.get(name))
    }
    with Ledger(run_dir / LEDGER) as ledger:
        ledger.write(ERROR, stage=stage, source=predictions[-1]["source"], figures=figures)
