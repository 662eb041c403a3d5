"""What is said and kept when memory runs out in training: one line with the largest item and its key, and the table in RUN/oom/rank-N.json.

The kinds that a rank keeps are counted (`lmworks.train.observe.memory_kinds`). Activations and logits are the rest, divided by where memory
ran out and by the plan; such figures are marked `estimated`. On a GPU, memory that the caching allocator has reserved and not allocated
says whether the step is too large or the memory is fragmented; RUN/oom/snapshot-rank-N.json has its segments.
"""

from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from lmworks.errors import UserError, one_line
from lmworks.host.devices import has_bf16
from lmworks.host.machine import is_out_of_memory
from lmworks.io.files import write_json
from lmworks.parallel.mesh import own_device
from lmworks.parallel.process_group import is_launched
from lmworks.plan.memory_kinds import FRAGMENTED, KINDS, Remedy, StepMemory, largest, step_memory
from lmworks.recipe.schema.layout import Cluster
from lmworks.recipe.schema.recipe import Recipe
from lmworks.train.observe.memory_kinds import InUse, allocator_statistics, kept_bytes, memory_in_use
from lmworks.train.stage import TrainingContext
from lmworks.train.step import micro_batch_of
from lmworks.ui.amounts import size
from lmworks.ui.terminal import console
from lmworks.watch.ledger import LEDGER, Ledger

FOLDER = "oom"  # of a run directory
_FIRST_STEPS = 20
"""Steps of a process within which memory that runs out would run out again: the run ends. Later the launcher restarts the ranks, which gets
rid of fragmentation and of what has grown."""
_MANY = 1 << 20  # rows, where a stage does not know them yet
_SEGMENTS, _BLOCKS = 1000, 100  # that a snapshot keeps, the largest, and blocks of each
_REQUESTED = re.compile(r"tried to allocate ([\d.,]+)\s*(bytes|[KMGT]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1.0, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40}
# Where memory ran out, by the innermost of our files in the traceback: what was done, and the kind that asked for more.
_PLACES = (
    ("model/loss", "loss of the head", "logits"),
    ("inference/", "drawing of answers", "rollouts"), ("train/rollouts", "drawing of answers", "rollouts"),
    ("optim/", "update of the weights", "optimizer state"),
    ("model/init", "making of the model", "weights"), ("parallel/parallelize", "making of the model", "weights"),
    ("train/build", "making of the model", "weights"), ("weights/", "loading of weights", "weights"),
    ("checkpoint/", "save or load of a checkpoint", "other"),
    ("shards/", "reading of a batch", "batches"), ("train/data/", "reading of a batch", "batches"),
    ("model/", "forward pass", "activations"), ("parallel/", "forward and backward pass", "activations"),
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where memory ran out: what was done, the kind of memory that was asked for, and how many bytes (0 where the error does not say)."""

    doing: str
    kind: str
    requested: float


@contextmanager
def explain_out_of_memory(context: TrainingContext, stage: str) -> Iterator[None]:
    """Within the block, an error of memory that has run out becomes one line, after the table was written. Raises `UserError`, or
    `RuntimeError` in a launched run that has trained for some time, which its launcher restarts."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        place, in_use, kept = place_of(error), memory_in_use(context.held), kept_bytes(context.held)
        device = None if context.held.model is None else context.held.model.device
        statistics, snapshot = allocator_statistics(device), _snapshot(device)
        repeats = context.held.trainer is None or context.held.trainer.step - context.held.first_step < _FIRST_STEPS
        record = _record(context, stage, place, in_use, kept, statistics) | {"error": one_line(f"{type(error).__name__}: {error}")}
        traceback.clear_frames(error.__traceback__)  # they hold what memory is needed for below
        context.held.trainer = context.held.optimizer = context.held.model = None
        error.__traceback__ = None
        gc.collect()
        sentence = _keep(context, record, snapshot)
        if is_launched() and not repeats:
            raise RuntimeError(sentence) from None
        raise UserError(sentence) from None


def place_of(error: BaseException) -> Place:
    """Where memory ran out, from the traceback and the message of the error."""
    found = _REQUESTED.search(str(error))
    requested = float(found[1].replace(",", "")) * _UNITS[found[2].lower()] if found else 0.0
    paths = list(_our_files(error.__traceback__))
    if any(path.startswith("model/loss") for path in paths[-2:]):
        return Place("loss of the head", "logits", requested)
    for path in reversed(paths):
        for start, doing, kind in _PLACES:
            if path.startswith(start):
                return Place(doing, kind, requested)
    return Place("start of the stage", "other", requested)


def _our_files(at: TracebackType | None) -> Iterator[str]:
    """The files of a traceback below src/lmworks, outermost first."""
    while at is not None:
        _, marked, path = at.tb_frame.f_code.co_filename.replace("\\", "/").rpartition("/lmworks/")
        if marked:
            yield path
        at = at.tb_next


def _record(
    context: TrainingContext, stage: str, place: Place, in_use: InUse, kept: Mapping[str, float], statistics: Mapping[str, float]
) -> dict[str, Any]:  # fmt: skip
    """The table and its largest item, as JSON values."""
    trainer, recipe = context.held.trainer, context.recipe
    step = 0 if trainer is None else trainer.step
    plan = planned_step(recipe, stage, in_use.limit, step_rows(context))
    planned = _planned(plan)
    measured = apportion(place, in_use, kept, statistics, planned)
    started = trainer is not None and step > context.held.first_step
    # In its first step a run may end before it has made what needs most: then the plan says what was to come.
    needed = measured if started else {name: max(held, planned.get(name, 0.0)) for name, held in measured.items()}
    cause = "caching allocator" if is_fragmented(statistics, place.requested) else largest(needed)
    remedy = _remedy(plan, cause, needed[cause])
    return {
        "stage": stage, "step": step, "rank": context.ranks.global_rank, "doing": place.doing, "requested": place.requested,
        "in_use": in_use.bytes, "limit": in_use.limit, "limit_of": in_use.limits, "allocator": dict(statistics),
        "kinds": {
            name: {"measured": measured[name], "planned": planned.get(name), "estimated": name in ("activations", "logits", "other")}
            for name in KINDS
        },
        "largest": {"kind": cause, "bytes": needed[cause], "remedy": None if remedy is None else asdict(remedy)},
    }  # fmt: skip


def step_rows(context: TrainingContext) -> tuple[int, int, int]:
    """Length, rows and phase of the step at which a stage is; zeros before it knows its batches."""
    trainer = context.held.trainer
    if trainer is None:
        return 0, 0, 0
    step = min(trainer.step, trainer.curriculum.steps - 1)
    phase = trainer.curriculum.phase(step)
    return phase.sequence_length, trainer.curriculum.sequences(step), phase.index


def planned_step(recipe: Recipe, stage: str, memory: float, step: tuple[int, int, int]) -> StepMemory | None:
    """The plan of a step on a device of so much memory; None where there is none for this recipe."""
    length, rows, phase = step
    device = own_device()
    cluster = Cluster(device=device.type.upper(), tflops=1.0, bf16=has_bf16(device), memory_gib=memory / 2**30)
    with suppress(UserError, AssertionError, IndexError):
        first = recipe.train.phases[0] if stage == "pretrain" else getattr(recipe, stage)
        length = length or int(first.sequence_length)
        return step_memory(recipe, stage, cluster, length, micro_batch_of(recipe, length, recipe.layout.pp > 1), rows or _MANY, phase)
    return None


def _planned(plan: StepMemory | None) -> dict[str, float]:
    with suppress(UserError, AssertionError):
        return {} if plan is None else plan.kinds()
    return {}


def _remedy(plan: StepMemory | None, kind: str, measured: float) -> Remedy | None:
    with suppress(UserError, AssertionError):
        return None if plan is None else plan.remedy(kind, measured)
    return None


def apportion(
    place: Place, in_use: InUse, kept: Mapping[str, float], statistics: Mapping[str, float], planned: Mapping[str, float]
) -> dict[str, float]:  # fmt: skip
    """Bytes by kind, with those that were asked for last: what is kept as it was counted, and the rest as activations and logits, by where
    memory ran out and by the plan."""
    found = dict.fromkeys(KINDS, 0.0) | dict(kept)
    found["runtime"] = in_use.before
    held = statistics.get("allocated", in_use.bytes - in_use.before)
    found["caching allocator"] = max(0.0, statistics.get("reserved", held) - held)
    rest = max(0.0, held - sum(kept.values()))
    if place.kind in ("logits", "optimizer state") or place.doing.endswith("backward pass"):
        activations = min(rest, planned.get("activations", rest))
        found["activations"], found["logits"] = activations, rest - activations
    elif place.kind == "activations":
        found["activations"] = rest
    else:
        found["other"] = rest
    found[place.kind] += place.requested
    return found


def is_fragmented(statistics: Mapping[str, float], requested: float) -> bool:
    """Whether the caching allocator has enough free memory, in pieces: reserved far above allocated, after it has given everything back and
    tried again, or more of it free than was asked for."""
    reserved, allocated = statistics.get("reserved", 0.0), statistics.get("allocated", 0.0)
    free = reserved - allocated
    return reserved > 0 and free > FRAGMENTED * reserved and (free > requested or statistics.get("alloc_retries", 0.0) > 0)


def sentence_of(record: Mapping[str, Any], place: Path) -> str:
    """The line that ends the run."""
    item, kinds, allocator = record["largest"], record["kinds"], record["allocator"]
    one, remedy = kinds[item["kind"]], item["remedy"]
    asked = f"{size(record['requested'])} more were asked for, and " if record["requested"] else ""
    head = (
        f"memory ran out in {record['stage']} at step {record['step']:,}, in the {record['doing']}: {asked}{size(record['in_use'])} of "
        f"{size(record['limit'])} ({record['limit_of']}) are in use"
    )
    if item["kind"] == "caching allocator":
        what = (
            f"the memory is fragmented: {size(allocator.get('reserved', 0.0))} are reserved and only "
            f"{size(allocator.get('allocated', 0.0))} allocated, after {allocator.get('alloc_retries', 0):.0f} retries; "
            "set the environment variable PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True and run the same command again"
        )
    else:
        what = f"the largest item is {item['kind']} with {size(item['bytes'])}"
        if one["measured"] < item["bytes"]:
            what += f" planned, of which {size(one['measured'])} were there; "
        else:
            what += f", {size(one['planned'])} planned; " if one["planned"] else "; "
        if remedy is not None:
            what += f"--set {remedy['change']} takes about {size(remedy['saves'])} off"
        else:
            what += "take a smaller model or batch, or more devices"
    return f"{head}; {what}; the table is in {place}"


def _keep(context: TrainingContext, record: dict[str, Any], snapshot: dict[str, Any] | None) -> str:
    """Write the table, the snapshot and an event, as far as the disk allows; returns the line."""
    folder = context.run_dir / FOLDER
    rank = record["rank"]
    path = folder / f"rank-{rank}.json"
    record["sentence"] = sentence_of(record, path)
    record["snapshot"] = None if snapshot is None else f"snapshot-rank-{rank}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if snapshot is not None:
            write_json(folder / record["snapshot"], snapshot)
        write_json(path, record)
        if context.ranks.is_first:
            about = {name: record[name] for name in ("stage", "step", "doing", "requested", "in_use", "limit")}
            with Ledger(context.run_dir / LEDGER) as ledger:
                ledger.write("out_of_memory", **about, largest=record["largest"]["kind"])
    except (OSError, UserError) as error:
        console.print(f"{path} could not be written: {error}", style="yellow")
    return str(record["sentence"])


def _snapshot(device: torch.device | None) -> dict[str, Any] | None:
    if device is None or device.type != "cuda":
        return None
    try:
        return read_snapshot(torch.cuda.memory._snapshot(device))
    except Exception as error:  # a device that has failed answers nothing; the table above is what matters
        return {"error": one_line(f"{type(error).__name__}: {error}")}


def read_snapshot(given: Mapping[str, Any]) -> dict[str, Any]:
    """The segments of `torch.cuda.memory._snapshot`, largest first, with the largest blocks of each, as JSON values; and the sums of all
    blocks by state. Nothing that has the form of code or an object is kept."""
    segments = sorted(given.get("segments", ()), key=lambda one: -int(one.get("total_size", 0)))
    sums: dict[str, int] = {}
    kept = []
    for number, segment in enumerate(segments):
        blocks = segment.get("blocks", ())
        for block in blocks:
            sums[str(block.get("state"))[:40]] = sums.get(str(block.get("state"))[:40], 0) + int(block.get("size", 0))
        if number < _SEGMENTS:
            biggest = sorted(blocks, key=lambda one: -int(one.get("size", 0)))[:_BLOCKS]
            kept.append({
                **{name: int(segment.get(name, 0)) for name in ("address", "total_size", "allocated_size", "active_size", "stream")},
                "segment_type": str(segment.get("segment_type", ""))[:40], "is_expandable": bool(segment.get("is_expandable", False)),
                "blocks": [{"size": int(block.get("size", 0)), "state": str(block.get("state"))[:40]} for block in biggest],
                "blocks_in_all": len(blocks),
            })  # fmt: skip
    return {"segments": kept, "segments_in_all": len(segments), "bytes_by_state": sums}
