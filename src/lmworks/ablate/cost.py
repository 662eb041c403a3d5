"""What a set of runs costs: runs, tokens, operations, hours and disk, before it starts and after it has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmworks.ablate.run_set import Arm, Run, RunSet, shared_bytes
from lmworks.ablate.runs import end_with_parent, server
from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.io.files import only_one, read_json, write_json
from lmworks.pages.read_run import read_run
from lmworks.plan.costs import disk
from lmworks.plan.counts import flops_per_token
from lmworks.recipe.schema.evaluate import Evaluate
from lmworks.shards.indexed import token_dtype

if TYPE_CHECKING:
    from lmworks.recipe.schema.recipe import Recipe
    from lmworks.shards.batch import Batch
    from lmworks.train.calibrate import Speed

FILE = "speed.json"
_PATIENCE = 2.0  # seconds of training steps for each arm and sequence length in a turn
_TURNS = 3
_ADVICE = "memory ran out while its speed was measured ({}); lower its train.micro_batch_sequences, or close other programs"
Json = dict[str, Any]


@dataclass(frozen=True)
class Cost:
    """Totals. `hours` are predicted, over `jobs` processes side by side; None before anything was measured. `basis` says
    what they were predicted from. `measured_hours` of training are of the `finished` runs, on one process each."""

    runs: int
    tokens: int
    flops: float
    disk: float
    hours: float | None
    basis: str
    finished: int
    measured_hours: float
    predicted_hours_of_finished: float | None
    measured_disk: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def flops_of(arm: Arm) -> float:
    """Training operations of one run of an arm, those of a checkpoint that it continues left out."""
    total, before = 0.0, arm.started_at
    for phase in arm.recipe.train.phases:
        tokens = int(phase.tokens)
        here = max(0, tokens - before)
        before = max(0, before - tokens)
        total += flops_per_token(arm.recipe.model, int(phase.sequence_length)).total * here
    return total


def calibrate(runs: RunSet, arms: Sequence[Arm], threads: int, on_wait: Callable[[], None] = lambda: None) -> None:
    """Measure how long a run of these arms takes, on their own data, model and optimizer, unless that is known already. An arm that cannot
    train here costs the others nothing: `failures` says why, and the next call tries it again.

    One process of a set does so, and the others wait for what it has found. What is known is not measured again: budgets of equal time
    follow from it. The arms take turns, and the median of the turns counts: what else the machine does then slows all of them.
    """
    with only_one(runs.out / FILE, on_wait):
        known = _known(runs.out)
        if new := [arm for arm in arms if arm.name not in known]:
            for name, found in _measured(runs, new, threads):
                known[name] = found
                write_json(runs.out / FILE, known)


def _measured(runs: RunSet, arms: Sequence[Arm], threads: int) -> Iterator[tuple[str, Json]]:
    """The arms as they are measured or have failed, and what was found."""
    from lmworks.run.time_budget import batches_by_length
    from lmworks.run.time_estimate import fixed_work, predict_seconds

    new = [(arm, arm.recipe.model_copy(update={"evaluate": Evaluate(references=False), "threads": threads})) for arm in arms]
    batches = {arm.name: [*batches_by_length(recipe, runs.data_dir(arm)).values()] for arm, recipe in new}
    speeds: dict[str, list[Speed]] = {arm.name: [] for arm, _ in new}
    for turn in range(_TURNS):
        for arm, recipe in list(new):
            why = ""
            try:
                speeds[arm.name].append(measure_apart(recipe, batches[arm.name], _PATIENCE, partial(_flops_per_token, recipe)))
            except Exception as error:
                if not isinstance(error, UserError) and not machine.is_out_of_memory(error):
                    raise
                why = str(error) if isinstance(error, UserError) else _ADVICE.format(" ".join(str(error).split())[:200])
            if why:
                new.remove((arm, recipe))
                yield arm.name, {"failed": why}
            elif turn == _TURNS - 1:
                speed = sorted(speeds[arm.name], key=partial(_tokens_per_second, arm))[_TURNS // 2]
                seconds = predict_seconds(recipe, speed, fixed_work(recipe, runs.data_dir(arm)))["pretrain"]
                flops, per_second = flops_of(arm), _tokens_per_second(arm, speed)
                seconds *= flops / flops_of(replace(arm, branch=None))
                yield arm.name, {"seconds": seconds, "flops": flops, "tokens_per_second": per_second, "threads": threads}


def measure_apart(recipe: Recipe, batches: Sequence[Batch], patience: float, flops_per_token: Callable[[int], float]) -> Speed:
    """`train.calibrate.measure` in a process of its own, with the threads of the recipe: the kernel may kill it for want of memory, which
    is a `UserError`. Its errors are raised here."""
    from lmworks.train.calibrate import measure

    if machine.speed() is not None:  # nothing is measured
        return measure(recipe, batches, patience, flops_per_token)
    with ProcessPoolExecutor(1, server(recipe.threads or machine.threads()), end_with_parent) as executor:
        try:
            return executor.submit(measure, recipe, batches, patience, flops_per_token).result()
        except BrokenProcessPool:
            raise UserError(_ADVICE.format("its process was killed")) from None


def _flops_per_token(recipe: Recipe, length: int) -> float:
    return flops_per_token(recipe.model, length).total


def _tokens_per_second(arm: Arm, speed: Speed) -> float:
    phases = arm.recipe.train.phases
    seconds = sum(
        int(phase.tokens) * flops_per_token(arm.recipe.model, int(phase.sequence_length)).total / speed.train[int(phase.sequence_length)]
        for phase in phases
    )
    return sum(int(phase.tokens) for phase in phases) / seconds


def speeds(out: Path) -> dict[str, float]:
    """Measured tokens per second by arm; empty before the calibration."""
    return {name: float(one["tokens_per_second"]) for name, one in _known(out).items()}


def failures(out: Path) -> dict[str, str]:
    """Why arms could not be measured, by arm."""
    return {name: str(one["failed"]) for name, one in _recorded(out).items() if "failed" in one}


def _known(out: Path) -> dict[str, Json]:
    return {name: one for name, one in _recorded(out).items() if "failed" not in one}


def _recorded(out: Path) -> dict[str, Json]:
    found: dict[str, Json] = read_json(out / FILE) if (out / FILE).exists() else {}
    return found


def training_seconds(run: Run) -> float:
    """Seconds that a run has trained, pauses between its processes left out."""
    return read_run(run.directory).pretrain.seconds


def cost(runs: RunSet, seconds: Mapping[Path, float], jobs: int) -> Cost:
    """The cost, given the training seconds of the finished runs by directory.

    A run is predicted from the finished runs of its arm, else from the calibration of its arm, else from that of the baseline, in the ratio
    of the operations.
    """
    known = _known(runs.out)
    flops = {arm.name: flops_of(arm) for arm in runs.arms.values()}
    measured = {name: known.get(name, known.get(runs.baseline.name)) for name in runs.arms}
    calibrated = {name: one["seconds"] * flops[name] / one["flops"] for name, one in measured.items() if one is not None}
    finished: dict[str, list[float]] = {}
    for run in runs.runs:
        if run.directory in seconds:
            finished.setdefault(run.arm.name, []).append(seconds[run.directory])
    per_run = calibrated | {name: sum(one) / len(one) for name, one in finished.items()}
    total = sum(per_run[run.arm.name] for run in runs.runs) if len(per_run) == len(runs.arms) else None
    done = [run for run in runs.runs if run.directory in seconds]
    predicted = sum(calibrated[run.arm.name] for run in done) if done and all(run.arm.name in calibrated for run in done) else None
    return Cost(
        runs=len(runs.runs),
        tokens=sum(run.arm.tokens - run.arm.started_at for run in runs.runs),
        flops=sum(flops[run.arm.name] for run in runs.runs),
        disk=sum(_checkpoint_bytes(run.arm) for run in runs.runs) + _data_bytes(runs),
        hours=None if total is None else total / jobs / 3600,
        basis="finished runs" if finished else "a calibration of a few seconds" if calibrated else "",
        finished=len(done),
        measured_hours=sum(seconds[run.directory] for run in done) / 3600,
        predicted_hours_of_finished=None if predicted is None else predicted / 3600,
        measured_disk=shared_bytes([runs.out]),
    )


def _checkpoint_bytes(arm: Arm) -> float:
    """One checkpoint stays of each run."""
    return disk(arm.recipe).checkpoint


def _data_bytes(runs: RunSet) -> float:
    """The part of the token files of the different data that the budget reads."""
    arms = {arm.data_key: arm for arm in runs.arms.values()}
    width = token_dtype(runs.baseline.recipe.model.vocab_size or 0).itemsize
    return float(sum(arm.tokens * width for arm in arms.values()))
