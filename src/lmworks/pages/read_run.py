"""Reads the records of a run directory in one pass. Any part may be missing, and the run may be active."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.io.run_layout import MODEL_STAGES
from lmworks.metrics.names import ELAPSED
from lmworks.pages import record_files
from lmworks.pages.findings import read_findings
from lmworks.pages.record_files import MOST, conform, lines, mapping, number, read_document, read_stages, run_state
from lmworks.pages.run_records import Json, Mark, Run, Series, Start, Training
from lmworks.recipe.former import translated
from lmworks.recipe.load import load_resolved
from lmworks.recipe.schema.recipe import Recipe
from lmworks.ui.amounts import compact
from lmworks.watch.ledger import GREW, LEDGER, START_OVER, shown_step

_PER_LAYER = 120  # buckets of each per-layer series; there may be hundreds of them
_FIRST_EVENTS, _LAST_EVENTS = 40, 260
_MARKS = 400
_SAMPLES = 32  # kept per prompt
_PROMPTS = 12
_RECORDS = ("resolved.json", LEDGER, "metrics.jsonl")


def require_records(run_dir: Path) -> None:
    """Raise `UserError` if a folder has no records of a run, so that no page is written into a folder of others."""
    if not run_dir.is_dir() or any((run_dir / name).is_file() for name in _RECORDS):
        return  # `read_run` refuses what is no folder
    if (run_dir / "ablation.json").is_file():
        raise UserError(f"{run_dir} is an ablation and not a run; its page is {run_dir / 'ablation.html'}, those of its runs lie below it")
    raise UserError(f"{run_dir} has no records of a run: neither {', '.join(_RECORDS[:-1])} nor {_RECORDS[-1]} of lmworks")


def read_run(run_dir: Path, judge: bool = True) -> Run:
    """Read all records, with the doctor's findings unless `judge` is false, which costs more than the rest for a small run. Raises
    `UserError` only if `run_dir` is not a directory."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} is not a run directory; make one with: lmworks run RECIPE")
    tree = translated(read_document(run_dir / "resolved.json"))
    recipe = _recipe(run_dir / "resolved.json") if tree else None
    training = {stage.stage: Training() for stage in MODEL_STAGES}
    events, left_out, reason = _ledger(run_dir / LEDGER, training)
    for stage in MODEL_STAGES:
        _metrics(stage.place(run_dir) / "metrics.jsonl", training[stage.stage])
        _read_samples(stage.place(run_dir) / "samples.jsonl", training[stage.stage])
    _followed(run_dir / "follow.jsonl", training)
    findings = read_findings(run_dir, training) if judge else []
    omitted = [one.stage for one in MODEL_STAGES[1:] if tree.get(one.stage) is None and not one.place(run_dir).is_dir()]
    if recipe is not None and not recipe.has_text:  # a base model is tuned
        omitted += [name for name in ("corpus", "shards") if not (run_dir / name).is_dir()]
    stages = read_stages(run_dir, omitted)
    return Run(
        run_dir,
        str(tree.get("name") or run_dir.resolve().name),
        recipe,
        tree,
        training,
        events,
        left_out,
        read_document(run_dir / "corpus" / "report.json", record_files.CORPUS),
        read_document(run_dir / "tokenizer" / "report.json", record_files.TOKENIZER),
        read_document(run_dir / "evaluate" / "results.json", record_files.RESULTS),
        read_document(run_dir / "export" / "parity.json"),
        stages,
        run_state(run_dir, stages, training, bool(events)),
        reason,
        findings,
    )


def _recipe(path: Path) -> Recipe | None:
    try:
        return load_resolved(path)
    except UserError:  # written by an older lmworks; the page is still useful
        return None


def _processes(starts: Sequence[Start]) -> deque[tuple[int, Start]]:
    """The starts with the step after which their metrics begin: a later one that has gone back further has cut them."""
    steps = accumulate((start.step for start in reversed(starts)), min)
    return deque(zip(reversed(list(steps)), starts, strict=True))


def _metrics(path: Path, training: Training) -> None:
    series = training.series
    recent: deque[tuple[float, float]] = deque(maxlen=200)
    starts = _processes(training.starts)
    before, last, own = None, 0.0, Start(0.0)  # of the line before, or of the start of its process: time, elapsed seconds
    for record in lines(path):
        step, now = record.get("step"), record.get("time")
        if not isinstance(step, int | float) or not isinstance(now, int | float) or not (0 <= step < MOST and 0 <= now < MOST):
            continue
        while starts and starts[0][0] < step:
            _, after = starts.popleft()
            if after.trained is not None:
                training.add_time(max(0.0, after.trained - last) if after.reached > own.step else 0.0, own)
            elif before is not None and before < after.before < after.time:
                training.add_time(after.before - before, own)
            own, before, last = after, after.time, 0.0
            recent.clear()
        if isinstance(elapsed := record.get(ELAPSED), int | float) and 0 <= elapsed < MOST:
            training.add_time(elapsed - last if elapsed >= last else elapsed, own)
            last = elapsed
        elif before is not None and now > before:  # written by an older lmworks
            training.add_time(now - before, own)
        before = now
        training.newest = max(training.newest, now)
        training.elapsed.add(step, training.seconds)
        for name, value in record.items():
            finite = isinstance(value, int | float) and -MOST < value < MOST
            if name in ("step", "time") or not (finite or value is None):
                continue
            if name not in series:
                series[name] = Series(_PER_LAYER if name.startswith("experts/") and name.count("/") == 2 else 500)
            if finite:
                series[name].add(step, value)
            else:
                series[name].interrupt(step)
        if isinstance(tokens := record.get("train/tokens"), int | float) and -MOST < tokens < MOST:
            recent.append((training.seconds, tokens))
    if len(recent) > 1 and recent[-1][0] > recent[0][0]:
        training.tokens_per_second = (recent[-1][1] - recent[0][1]) / (recent[-1][0] - recent[0][0])


def _followed(path: Path, training: dict[str, Training]) -> None:
    """Add the scores of a process that follows the run; of a checkpoint that was evaluated again, the last ones, and none of a course
    that is over."""
    found: dict[tuple[str, str], dict[float, float]] = {}
    for record in lines(path):
        stage, step = record.get("stage"), record.get("step")
        if stage not in training or not isinstance(step, int) or not 0 <= step < MOST:
            continue
        if isinstance(when := record.get("time"), int | float) and when < training[stage].since:
            continue
        for name, value in record.items():
            if name.startswith("eval/") and isinstance(value, int | float) and -MOST < value < MOST:
                found.setdefault((stage, name), {})[step] = value
    for (stage, name), points in found.items():
        series = training[stage].series
        own = dict(series[name].means()) if name in series else {}
        series[name] = Series()
        for step, value in sorted((own | points).items()):
            series[name].add(step, value)


def _ledger(path: Path, training: dict[str, Training]) -> tuple[list[Json], int, str]:
    """Assign the events to the training stages. Returns the events to show, the number of omitted ones, and why the run stopped."""
    first: list[Json] = []
    rest: deque[Json] = deque(maxlen=_LAST_EVENTS)
    shown, reason = 0, ""
    stage, changed = "pretrain", ""
    for event in (conform(line, record_files.EVENT) for line in lines(path)):
        what = str(event.get("event", ""))
        if event.get("stage") in training:
            stage = event["stage"]
        part = training[stage]
        step = shown_step(event) or 0
        if what in ("start", "resume"):
            cores = max(1, int(number(event.get("threads")))) if event.get("device", "cpu") == "cpu" else 0
            ranks = max(1, int(number(event.get("ranks"))))
            paid = number(event["trained_for"]) if isinstance(event.get("trained_for"), int | float) else None
            before, reached = number(event.get("trained_until")), int(number(event.get("reached")))
            part.starts.append(Start(number(event.get("time")), ranks, cores, before, paid, reached, step if what == "resume" else -1))
            part.newest = max(part.newest, part.starts[-1].time)
            part.done, reason = False, ""
        if what == "start" or (what == "resume" and "planned_tokens" in event):  # a phase may have been added in between
            planned = event.get("tokens" if what == "start" else "planned_tokens")
            part.planned_steps, part.planned_tokens = int(number(event.get("steps"))), int(number(planned))
        if what == GREW:
            part.planned_steps = int(number(event.get("steps")))
            part.marks.append(Mark("recipe", step, f"batch of {compact(number(event.get('tokens_per_step')))} tokens"))
        if what == "resume":
            part.marks.append(Mark("resume", step, "resumed"))
            if changed:
                part.marks.append(Mark("recipe", step, changed))
                changed = ""
        elif what == "phase":
            part.phases = [*((at, name) for at, name in part.phases if at < step), (step, str(event.get("phase")))]
        elif what == "finish":
            part.done = True
        elif what == START_OVER:
            part.start_over(number(event.get("time")))
        elif what == "prediction":
            part.prediction, part.scored = event, {}
        elif what == "prediction_error":
            part.scored = mapping(event.get("figures"))
        elif what == "bad_step":
            part.marks.append(Mark("bad", step, "not finite, no update"))
        elif what in _FAULTS:
            part.marks.append(Mark(what, step, _describe_fault(event)))
        elif what == "recipe_changed":
            changes = [*_records(event.get("allowed")), *_records(event.get("harmless"))]
            changed = "changed " + ", ".join(str(change.get("key")) for change in changes)
        elif what == "checkpoint":
            if "path" not in event:
                continue  # written when the save begins; the event with a path follows when it is complete
            part.marks.append(Mark("checkpoint", step, "checkpoint"))
        elif what == "stopped":
            reason = str(event.get("reason", ""))
        elif what == "checkpoint_pruned":
            continue
        if len(part.marks) > 2 * _MARKS:
            part.marks = _thinned(part.marks)
        shown += 1
        (first if len(first) < _FIRST_EVENTS else rest).append(event)
    return [*first, *rest], shown - len(first) - len(rest), reason


_FAULTS = ("spike", "rollback", "corruption", "slow_rank", "finding")


def _describe_fault(event: Json) -> str:
    match event.get("event"):
        case "spike":
            return f"spike of the loss or gradient norm ({event.get('action', '')})"
        case "rollback":
            return f"rolled back to step {event.get('to_step')}"
        case "finding":
            return f"{event.get('code')}: {event.get('sentence') or ''}"
        case "corruption":
            return f"silent corruption on rank {', '.join(map(str, _list(event.get('ranks'))))}"
        case _:
            return f"rank {event.get('rank')} is slow ({event.get('what', '')})"


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _thinned(marks: list[Mark]) -> list[Mark]:
    """Every other mark of each kind."""
    seen: Counter[str] = Counter()
    kept = []
    for mark in marks:
        if seen[mark.kind] % 2 == 0:
            kept.append(mark)
        seen[mark.kind] += 1
    return kept


def _read_samples(path: Path, training: Training) -> None:
    for record in (conform(line, record_files.SAMPLE) for line in lines(path)):
        prompt = record.get("prompt")
        if not isinstance(prompt, str) or not isinstance(record.get("step"), int):
            continue
        if prompt not in training.samples and len(training.samples) == _PROMPTS:
            continue
        kept = training.samples.setdefault(prompt, [])
        kept[:] = [one for one in kept if one["step"] < record["step"]]  # a resumed run repeats samples
        if len(kept) == _SAMPLES:
            del kept[1::2]
        kept.append(record)


def _records(value: object) -> list[Json]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
