"""Whether a run that was hit ended as if it had not been.

The undisturbed twin has the same layout, so that every step's weights, on every rank, and the last checkpoint are compared bit for bit.
A run whose world changed is compared with one process: the same rows in every step, and losses within `CLOSE`. Sums over ranks come in
another order there, which in fp32 moves a loss by some 1e-6 of itself per step; a near-tie between two experts that falls the other
way moves one token of 128, some 1e-3. A wrong batch or a lost update moves it by 1e-1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from plans import PLANTED, Plan
from running import Run

from lmworks.checkpoint import listing
from lmworks.checkpoint.manifest import problem
from tiny_run import checkpoint, curve, same_bits

CLOSE = 5e-3  # relative
Records = Mapping[int, list[dict[str, Any]]]  # by rank


@dataclass(frozen=True)
class Twin:
    """What an undisturbed run has done: `rows` by (step, row of the whole batch), `weights` by (step, rank)."""

    dir: Path
    rows: dict[tuple[int, int], str]
    weights: dict[tuple[int, int], str]
    curve: list[dict[str, Any]]

    @classmethod
    def of(cls, run: Run) -> Twin:
        records = {rank: run.records(rank) for rank in range(run.plan.ranks)}
        return cls(
            run.dir,
            {(line["step"], line["start"] + i): row for lines in records.values() for line in lines for i, row in enumerate(line["rows"])},
            {(line["step"], rank): line["weights"] for rank, lines in records.items() for line in lines},
            curve(run.dir),
        )


def problems(run: Run, twin: Twin) -> Iterator[str]:
    """What is wrong with a run that has ended; nothing if all is well."""
    plan, records = run.plan, {rank: run.records(rank) for rank in range(run.plan.ranks)}
    yield from order(records, twin.rows, plan.steps, left_out(run))
    now = since(records, max((event["time"] for event in run.events("rollback")), default=0.0)) if plan.window else records
    yield from repeated(now)
    yield from bits(now, twin.weights, plan)
    if plan.window:
        first = {rank: [line for line in lines if line["step"] < plan.window[0]] for rank, lines in records.items()}
        yield from bits(first, twin.weights, plan)
    yield from work_lost(run, now)
    yield from written(run, twin.curve)
    if plan.same_bits and (differing := same_bits(checkpoint(run.dir), checkpoint(twin.dir))):
        yield f"the last checkpoint differs from the undisturbed one in {len(differing)} tensors, such as {differing[0]}"


def written(run: Run, expected: list[dict[str, Any]]) -> Iterator[str]:
    """What is wrong with what a run has written: its curve, its checkpoints and its ledger."""
    yield from _curve(run, expected)
    yield from _checkpoints(run)
    yield from _ledger(run)


def since(records: Records, when: float) -> Records:
    """What was trained after a time; before it, a window that is left out now was trained, and what follows it on other weights."""
    return {rank: [line for line in lines if line["time"] > when] for rank, lines in records.items()}


def left_out(run: Run) -> set[int]:
    """Steps that a rollback has left out."""
    return {step for event in run.events("rollback") if event["skip"] for step in range(*event["skip"])}


def order(records: Records, rows: Mapping[tuple[int, int], str], steps: int, without: set[int]) -> Iterator[str]:
    """Every row that any rank has trained on, in any life, is that of the undisturbed run, and none is missing."""
    seen = set()
    for rank, lines in records.items():
        for line in lines:
            for i, row in enumerate(line["rows"]):
                at = (line["step"], line["start"] + i)
                seen.add(at)
                if rows.get(at) != row:
                    yield f"rank {rank} trained on another row {at[1]} in step {at[0]}"
                    return
    missing = [at for at in rows if at not in seen and at[0] not in without]
    if missing:
        yield f"row {missing[0][1]} of step {missing[0][0]} was never trained on, and {len(missing) - 1} others"
    if extra := [at for at in seen if at[0] >= steps]:
        yield f"step {extra[0][0]} is behind the end of the run"


def repeated(records: Records) -> Iterator[str]:
    """A step that was trained twice by a world of one size, with nothing left out between, had the same outcome twice."""
    for rank, lines in records.items():
        found: dict[tuple[int, int], str] = {}
        sizes = {line["ranks"] for line in lines}
        for line in lines if len(sizes) == 1 else ():
            if found.setdefault((line["step"], line["ranks"]), line["weights"]) != line["weights"]:
                yield f"rank {rank} repeated step {line['step']} and got other weights"
                return


def bits(records: Records, weights: Mapping[tuple[int, int], str], plan: Plan) -> Iterator[str]:
    """Each rank's weights after each step are those of the twin: all of them, or until a step whose update was left out."""
    if plan.resized:
        return
    until = plan.moment if plan.kind in PLANTED else plan.steps
    for rank, lines in records.items():
        for line in lines:
            if line["step"] < until and weights.get((line["step"], rank)) != line["weights"]:
                yield f"the weights of rank {rank} after step {line['step']} are not those of the undisturbed run"
                return
            if plan.kind in PLANTED and line["step"] == until > 0 and weights.get((until - 1, rank)) != line["weights"]:
                yield f"the bad step {until} has changed the weights of rank {rank}"
                return


def _curve(run: Run, expected: list[dict[str, Any]]) -> Iterator[str]:
    lines, plan = curve(run.dir), run.plan
    trained = [line["step"] for line in lines if "train/loss" in line]  # a last step that is left out is validated, too
    if trained != [step + 1 for step in range(plan.steps) if step not in left_out(run)]:
        yield f"the curve has the steps {trained}"
    elif plan.same_bits and lines != expected:
        first = next((one["step"] for one, other in zip(lines, expected, strict=False) if one != other), plan.steps)
        yield f"the curve differs from that of the undisturbed run from step {first} on"
    elif plan.resized:
        for one, other in zip(lines, expected, strict=True):
            if abs(one["train/loss"] / other["train/loss"] - 1) > CLOSE:
                yield f"the loss of step {one['step']} is {one['train/loss']:.5f}, not {other['train/loss']:.5f}"
                return


def lost_steps(records: Records) -> list[tuple[int, int, float]]:
    """For each new life of the first rank: the steps that were done before it, the step from which it went on, and when."""
    lives: dict[str, list[dict[str, Any]]] = {}
    for line in records[0]:
        lives.setdefault(line["life"], []).append(line)
    return [(before[-1]["step"] + 1, after[0]["step"], after[0]["time"]) for before, after in pairwise(lives.values())]


def lost_at_most(records: Records) -> int:
    return max([done - again for done, again, _ in lost_steps(records)] + [0])


def work_lost(run: Run, records: Records) -> Iterator[str]:
    """No checkpoint that was reported is lost, but one that was damaged, and those behind a roll-back, which it removes; so at most one
    interval is, and where saves are written in the background, what is trained until they are whole: the trainer waits for one before it
    begins the next."""
    plan, damaged = run.plan, damaged_step(run)
    if plan.kind == "full disk":  # there is nowhere to save to, which is the fault
        return
    without = left_out(run)
    for done, again, when in lost_steps(records):
        rollbacks = [(event["time"], event["to_step"]) for event in run.events("rollback") if event["time"] < when]
        since_then, reported = max(rollbacks, default=(0.0, 0))
        saved = [event["step"] for event in run.events("checkpoint") if since_then < event["time"] < when and event["step"] != damaged]
        reported = max([reported, *saved])
        if again < reported:
            yield f"the run went on from step {again}, though the checkpoint of step {reported} had been reported"
        # A save that is due in a window is not made.
        allowed = plan.save_every * (1 + plan.asynchronous + (damaged is not None) + bool(without))
        if (lost := sum(step not in without for step in range(again, done))) > allowed:
            yield f"{lost} steps were lost (from {done} back to {again}), with a checkpoint every {plan.save_every}"
    if plan.kind == "SIGTERM" and not run.events("restart") and any(done != again for done, again, _ in lost_steps(records)):
        yield f"a run that was asked to stop went on elsewhere: {lost_steps(records)}"


def damaged_step(run: Run) -> int | None:
    """Of the checkpoint that the campaign has damaged."""
    return listing.step_of(Path(run.notes["damaged"]).parent) if "damaged" in run.notes else None


def _checkpoints(run: Run) -> Iterator[str]:
    folder = run.dir / "checkpoints"
    for path in listing.directories(folder):
        if reason := problem(path):
            yield f"{path.name} was left behind bad: {reason}"
    if left := [path.name for path in folder.iterdir() if path.name.startswith(".step-")]:
        yield f"unfinished checkpoints were left behind: {left}"
    if not (found := listing.directories(folder)) or listing.step_of(found[-1]) != run.plan.steps:
        yield "the last step was not saved"


def _ledger(run: Run) -> Iterator[str]:
    """What was resumed from had been saved, and what had been damaged was refused; nothing else was found wrong."""
    plan = run.plan
    events = run.ledger()
    training = [event for event in events if event.get("stage") == "pretrain" and event["event"] != "prediction_error"]  # which follows
    if not training or training[-1]["event"] != "finish":
        yield f"the ledger ends with {training[-1:]}"
    bad = {event["step"] for event in events if event["event"] == "bad_step"}
    if bad != ({plan.moment} if plan.kind in PLANTED else set()):
        yield f"the ledger tells of bad steps {sorted(bad)}"
    went_back = [event["skip"] if plan.window else event["step"] for event in events if event["event"] == "rollback"]
    if went_back != ([list(plan.window)] if plan.window else [plan.moment] if plan.how == "roll back" else []):
        yield f"the ledger tells of rollbacks {went_back}"
    refused = [event for event in events if event["event"] == "checkpoint_refused"]
    damaged = damaged_step(run)
    if others := [event for event in refused if listing.step_of(Path(event["path"])) != damaged]:
        yield f"a checkpoint that nobody had damaged was refused: {others[0]}"
    if damaged is not None:
        yield from _damaged(run, events, damaged, bool(refused))


def _damaged(run: Run, events: list[dict[str, Any]], step: int, refused: bool) -> Iterator[str]:
    after = [event for event in events if event["time"] >= run.notes["at"]]
    resumed = next((event["step"] for event in after if event["event"] == "resume"), None)
    if resumed == step:
        yield f"the run went on from the damaged checkpoint of step {step}"
    elif not refused and (resumed is None or resumed < step):
        yield f"the damaged checkpoint of step {step} was passed over in silence; the run went on from {resumed}"
