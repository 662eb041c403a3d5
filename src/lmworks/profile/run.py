"""Profiles a target: opens its workspace, trains in it in this process or on the ranks that were started, and joins what they measured."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lmworks.errors import UserError
from lmworks.io.files import read_json
from lmworks.launch.rank_context import pin_rank
from lmworks.parallel.mesh import Ranks, alone
from lmworks.parallel.process_group import destroy_ranks, init_ranks, is_launched
from lmworks.profile.measure import Measured, Measurement, StepClock
from lmworks.profile.report import Profile, make_profile
from lmworks.profile.target import Target
from lmworks.profile.trace import MOST, write_trace
from lmworks.profile.workspace import workspace
from lmworks.recipe.schema.layout import world_size
from lmworks.run.out_of_memory import FOLDER, explain_out_of_memory
from lmworks.run.stages import StageContext, training_context
from lmworks.train.dpo import dpo
from lmworks.train.grpo import grpo
from lmworks.train.pretrain import pretrain
from lmworks.train.tune import tune
from lmworks.ui import terminal

_STAGES = {"pretrain": pretrain, "tune": tune, "dpo": dpo, "grpo": grpo}


class OutOfMemory(UserError):
    """Memory ran out while it was measured; `record` is the table (`lmworks.run.out_of_memory`)."""

    def __init__(self, message: str, record: dict[str, Any]) -> None:
        super().__init__(message)
        self.record = record


def profile(target: Target, warm_up: int, timed: int, trace: Path | None) -> Profile | None:
    """Measure the steps of a target. On several ranks all call this together, and the first gets the profile. Raises `UserError`."""
    first = int(os.environ.get("RANK", "0")) == 0
    with _workspace(target, first) as here, _without_output():
        ranks = _join(target)
        work = here if here is not None else replace(target, recipe=ranks.receive_broadcast())
        if here is not None:
            ranks.broadcast(work.recipe)
        work = replace(work, run_dir=Path(work.recipe.run_dir or "."), recipe=work.recipe.model_copy(update={"layout": ranks.layout}))
        try:
            found = _measure(work, ranks, warm_up, timed, MOST // ranks.world if trace is not None else 0)
            everything = _gather(found, ranks)
        finally:
            if is_launched():
                destroy_ranks()
    if not first:
        return None
    if trace is not None:
        write_trace(trace, [one.trace for one in everything])
    return make_profile(replace(target, recipe=target.recipe.model_copy(update={"layout": ranks.layout})), everything, timed)


@contextmanager
def _workspace(target: Target, first: bool) -> Iterator[Target | None]:
    if not first:
        yield None
        return
    with workspace(target) as found:
        yield found


def _join(target: Target) -> Ranks:
    if not is_launched():
        return alone()
    if target.recipe.launch.pin:
        pin_rank()
    return init_ranks(target.recipe.layout, float(target.recipe.launch.timeout), target.recipe.threads)


def _measure(work: Target, ranks: Ranks, warm_up: int, timed: int, trace_events: int) -> Measured:
    assert work.run_dir is not None
    if not ranks.distributed and world_size(work.recipe.layout) > 1:
        raise UserError(f"the layout has {world_size(work.recipe.layout)} ranks, and one was started")
    clock = StepClock()
    context = training_context(StageContext(work.recipe, work.run_dir, "", True, ranks=ranks, heartbeat=clock))
    measurement = Measurement(
        clock, context.held, context.flops_per_token, warm_up=warm_up, timed=timed, phase=work.phase, trace_events=trace_events
    )
    context = replace(context, run=measurement.run)
    try:
        with explain_out_of_memory(context, work.stage):
            _STAGES[work.stage](context)
    except UserError as error:
        record = work.run_dir / FOLDER / f"rank-{ranks.global_rank}.json"
        if record.is_file():
            raise OutOfMemory(str(error).rpartition("; the table is in")[0], read_json(record)) from None
        raise
    assert measurement.found is not None
    return measurement.found


def _gather(found: Measured, ranks: Ranks) -> list[Measured]:
    if not ranks.distributed:
        return [found]
    everything: list[Any] = [None] * ranks.world
    dist.all_gather_object(everything, found)
    return everything


@contextmanager
def _without_output() -> Iterator[None]:
    """What the stage says while it trains is no matter of its profile."""
    with terminal.bar("profile"):
        before, terminal.console.quiet = terminal.console.quiet, True
        try:
            yield
        finally:
            terminal.console.quiet = before
