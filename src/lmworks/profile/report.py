"""The profile of a step: tables of memory, time and data with planned and measured values, and the largest item of each with the recipe key
that changes it.

Of several ranks, memory is that of the rank with most, times are those of the rank that works longest by itself, and data are sums.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from lmworks.errors import UserError
from lmworks.metrics.system import mfu
from lmworks.plan.automatic import machine_for
from lmworks.plan.layout import describe
from lmworks.plan.memory_kinds import KINDS, Remedy, StepMemory, largest, step_memory, total
from lmworks.plan.plan import PhasePlan, make_plan
from lmworks.profile.measure import Measured
from lmworks.profile.remedies import data_remedy, time_remedy
from lmworks.profile.spans import FORWARD, OPTIMIZER, SCORING, WHOLE
from lmworks.profile.target import Target
from lmworks.profile.workspace import RANDOM
from lmworks.recipe.schema.artifacts import save_interval
from lmworks.recipe.schema.units import Duration

PARTS = ("data", "rollouts", "scoring", "forward", "backward", "optimizer", "collectives", "validation", "save", "gap")
"""The parts of the time of a step, in their order. Scoring is what `dpo` and `grpo` compute without gradients: forward passes over the
labels before an update, and by the reference. Validation and save are divided by the steps between two of them; the gap is what no other
part explains."""


# of the parts that are marked in a step
_NAMES = {"scoring": SCORING, "forward": FORWARD, "backward": WHOLE, "optimizer": OPTIMIZER, "gap": ""}


@dataclass(frozen=True)
class Item:
    """A row of a table: what was planned (None where the plan says nothing) and measured, in bytes, seconds or as a share."""

    planned: float | None
    measured: float


@dataclass(frozen=True)
class Largest:
    """The largest item of a table, and the change that makes it smaller; None where there is none."""

    name: str
    measured: float
    remedy: Remedy | None


@dataclass(frozen=True)
class RankTime:
    """Seconds of a step of a rank: all of it, its own work (without collectives and what it waits for), and its wait for data; its peak of
    memory in bytes; and its pipeline stage."""

    rank: int
    host: str
    stage: int
    step: float
    own: float
    data: float
    memory: float


@dataclass(frozen=True)
class Profile:
    """See the module. `step_seconds` is the mean wall time of a step with its gap, without validation and save; `spread` the
    interquartile range of the timed steps relative to their median."""

    target: str
    stage: str
    phase: str
    first_step: int
    warm_up: int
    timed: int
    layout: str
    device: str
    sequences: int
    sequence_length: int
    micro_batch_size: int
    memory: Mapping[str, Item]
    memory_peak: float
    largest_memory: Largest
    time: Mapping[str, Item]
    step_seconds: float
    planned_step_seconds: float | None
    spread: float
    tokens_per_second: float
    mfu: float
    planned_mfu: float | None
    largest_time: Largest
    data: Mapping[str, float]
    largest_data: Largest
    ranks: tuple[RankTime, ...]
    slowest: int | None
    kernels: tuple[Mapping[str, float | str], ...]
    notes: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def from_plain(value: Mapping[str, Any]) -> Profile:
    """The profile of what `plain` returned."""
    items = {table: {name: Item(**item) for name, item in value[table].items()} for table in ("memory", "time")}
    tops = {
        table: Largest(**{**value[table], "remedy": None if value[table]["remedy"] is None else Remedy(**value[table]["remedy"])})
        for table in ("largest_memory", "largest_time", "largest_data")
    }
    lists = {"ranks": tuple(RankTime(**one) for one in value["ranks"]), "kernels": tuple(value["kernels"]), "notes": tuple(value["notes"])}
    return Profile(**{**value, **items, **tops, **lists})


def make_profile(target: Target, found: Sequence[Measured], asked: int) -> Profile:
    """The profile of what all ranks have measured; `target` with its own recipe, not that of the workspace."""
    slow = max(found, key=lambda one: _mean(one, "wall") - _collectives(one))
    full = max(found, key=_needed)
    plan, phase_plan, planned_mfu, notes = _planned(target, slow, full)
    time, memory = _time(target, slow, phase_plan), _memory(full, plan)
    data = _data(found, slow)
    step = _mean(slow, "wall")
    kinds = {name: item.measured for name, item in memory.items()}
    kind, part, waste = largest(kinds), max(time, key=lambda name: time[name].measured), max(_SHARES, key=lambda name: data[name])
    changes = None
    with suppress(UserError, AssertionError):
        changes = None if plan is None else plan.remedy(kind, kinds[kind])
    seconds = {name: item.measured for name, item in time.items()}
    if len(slow.steps) < asked:
        notes = [*notes, f"{slow.phase} has too few steps for {asked} timed ones: {len(slow.steps)} were timed"]
    if target.run_dir is None and target.stage == "pretrain":
        notes = [*notes, RANDOM]
    return Profile(
        target=target.name, stage=target.stage, phase=slow.phase, first_step=slow.first_step, warm_up=slow.warm_up, timed=len(slow.steps),
        layout=describe(target.recipe.layout), device=slow.device, sequences=slow.rows, sequence_length=slow.length,
        micro_batch_size=slow.micro_batch_size, memory=memory, memory_peak=full.memory_peak,
        largest_memory=Largest(kind, kinds[kind], changes), time=time,
        step_seconds=step, planned_step_seconds=_planned_step(phase_plan), spread=_spread(slow),
        tokens_per_second=slow.tokens_per_step / step, mfu=mfu(slow.flops_per_step, step, slow.peak_flops * len(found)),
        planned_mfu=planned_mfu, largest_time=Largest(part, seconds[part], time_remedy(target, part, seconds, slow)), data=data,
        largest_data=Largest(waste, data[waste], data_remedy(target, waste, data)),
        ranks=tuple(
            RankTime(one.rank, one.host, one.pipeline_stage, _mean(one, "wall"),
                     _mean(one, "wall") - _collectives(one) - _mean(one, "data"), _mean(one, "data"), one.memory_peak)
            for one in found
        ),
        slowest=slow.rank if len(found) > 1 else None, kernels=tuple(slow.kernels), notes=tuple(notes),
    )  # fmt: skip


def _mean(one: Measured, part: str) -> float:
    """Seconds of a step. Of medians the parts would not sum up to the whole: what is slow in one step is another part than in the next."""
    return statistics.fmean(step[part] for step in one.steps)


def _collectives(one: Measured) -> float:
    """Seconds of a step in which a rank waits for others."""
    return _mean(one, "collectives") + sum(_exposed(one).values())


def _exposed(one: Measured) -> dict[str, float]:
    """Seconds of each part in which a rank waits for a collective: the share of the profiled step, of the time of the timed ones."""
    return {part: one.exposed.get(name, 0.0) * _mean(one, part) for part, name in _NAMES.items()}


def _spread(one: Measured) -> float:
    walls = sorted(step["wall"] for step in one.steps)
    if len(walls) < 4:
        return 0.0
    low, _, high = statistics.quantiles(walls, n=4)
    return (high - low) / statistics.median(walls)


def _needed(one: Measured) -> float:
    """Bytes without those of the runtime, in which ranks that train the same differ."""
    return total(one.memory) - one.memory.get("runtime", 0.0)


def _planned(target: Target, one: Measured, full: Measured) -> tuple[StepMemory | None, PhasePlan | None, float | None, list[str]]:
    """The planned memory of a step of the rank `full`, the plan of its phase, the MFU that it assumes, and what is to be said if there is
    none."""
    recipe = target.recipe
    try:
        cluster = machine_for(recipe)
        shape = one.length, one.micro_batch_size, one.rows, one.phase_index
        memory = step_memory(recipe, target.stage, cluster, *shape, full.pipeline_stage)
        plan = make_plan(memory.recipe, "", cluster, recipe.layout, unfit=True)
    except (UserError, AssertionError) as error:
        return None, None, None, [f"there is no plan to compare with: {error}"]
    phase = next((phase for phase in plan.phases if phase.name == one.phase), None)
    return memory, phase, plan.mfu, []


def _memory(one: Measured, plan: StepMemory | None) -> dict[str, Item]:
    """The table of memory. `other` is what is in the peak of the process and in no row: on a CPU the C library keeps what was freed. What
    the process has freed before the model was made, such as weights that it has read from a file, is used again, and not of the runtime."""
    planned: Mapping[str, float] = {}
    with suppress(UserError, AssertionError):
        planned = {} if plan is None else plan.kinds()
    measured = dict.fromkeys(KINDS, 0.0) | {name: size for name, size in one.memory.items() if name in KINDS}
    known = total(measured) - measured["other"]
    if not one.allocator and known > one.memory_peak:
        again = min(known - one.memory_peak, measured["runtime"])
        measured["runtime"], known = measured["runtime"] - again, known - again
    measured["other"] = max(measured["other"], one.memory_peak + (measured["runtime"] if one.allocator else 0.0) - known)
    return {
        name: Item(planned.get(name), measured[name])
        for name in KINDS
        if measured[name] or planned.get(name)
    }  # fmt: skip


def _time(target: Target, one: Measured, plan: PhasePlan | None) -> dict[str, Item]:
    """The table of time, in seconds of one step."""
    measured = {part: _mean(one, part) for part in ("data", "rollouts", "scoring", "forward", "backward", "optimizer", "gap")}
    waits = _exposed(one)
    measured["collectives"] = _collectives(one)
    for part, seconds in waits.items():
        measured[part] -= seconds
    train = target.recipe.train
    if one.validation is not None:
        measured["validation"] = one.validation / _steps_between(train.validate_every, one)
    if one.save is not None:
        by_time = float(train.save_every_time) if train.save_every_time is not None else save_interval(one.save, 1)
        step = _mean(one, "wall")
        measured["save"] = one.save / max(1.0, min(_steps_between(train.save_every, one), by_time / step))
    planned = _planned_parts(plan)
    return {part: Item(planned.get(part), measured.get(part, 0.0)) for part in PARTS if measured.get(part) or planned.get(part)}


def _steps_between(every: Duration, one: Measured) -> float:
    return float(max(1, every.interval(max(1, one.stage_steps), max(1, one.stage_tokens))))


def _planned_parts(plan: PhasePlan | None) -> dict[str, float]:
    """Seconds of a step by the plan: two thirds of the computation are the backward pass. Of the optimizer and of gaps it says nothing."""
    if plan is None or not plan.steps:
        return {}
    overheads = plan.overheads
    compute = plan.compute_seconds / plan.steps
    return {
        "data": overheads.data / plan.steps, "forward": compute / 3, "backward": 2 * compute / 3,
        "collectives": overheads.communication / plan.steps, "validation": overheads.validation / plan.steps,
        "save": overheads.saves / plan.steps,
    }  # fmt: skip


def _planned_step(plan: PhasePlan | None) -> float | None:
    if plan is None or not plan.steps:
        return None
    return (plan.compute_seconds + plan.overheads.communication + plan.overheads.data) / plan.steps


_SHARES = ("waiting", "padding", "without_loss")  # of the table of data, that can be too large


def _data(found: Sequence[Measured], slow: Measured) -> dict[str, float]:
    """The table of data: shares of the time and of the tokens, speeds in bytes per second, and sizes of documents and batches."""
    sums = {name: sum(one.data.get(name, 0.0) for one in found) for name in ("tokens", "padding", "without_loss", "documents")}
    reads, seconds = (sum(one.data.get(name, 0.0) for one in found) for name in ("read_bytes", "read_seconds"))
    step = _mean(slow, "wall")
    tokens = max(1.0, sums["tokens"])
    each = reads / max(1.0, sum(one.data.get("reads", 0.0) for one in found)) * len(found)  # bytes that all ranks read for a step
    return {
        "waiting": max(_mean(one, "data") / step for one in found), "padding": sums["padding"] / tokens,
        "without_loss": sums["without_loss"] / tokens, "read_bytes_per_second": reads / seconds if seconds else math.inf,
        "needed_bytes_per_second": each / step, "tokens_per_document": (tokens - sums["padding"]) / max(1.0, sums["documents"]),
        "batch_bytes": max(one.data.get("batch_bytes", 0.0) for one in found),
    }  # fmt: skip
