"""Judges written runs: a healthy one with changes, for tests of rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmworks.watch.diagnosis import Diagnosis, all_rules, diagnose
from lmworks.watch.evidence import Evidence
from lmworks.watch.run_files import open_run
from written_run import budget, healthy, write_run

Metrics = dict[str, list[Any]]


def judge(
    folder: Path,
    change: Callable[[Metrics], None] = lambda metrics: None,
    events: Iterable[Mapping[str, Any]] = (),
    overrides: Sequence[str] = (),
    steps: int = 200,
    every: int = 1,
    only: str = "",
    planned: int = 0,
) -> Diagnosis:
    """The diagnosis of a healthy run of `steps` steps with the recipe's `overrides` that `change` has changed. every: the interval of the
    lines. only: the code of the only rule that is applied. planned: the steps of the recipe, if the run has not come to its end."""
    metrics = healthy(planned or steps, overrides)
    metrics = {name: values[:steps] for name, values in metrics.items()}
    change(metrics)
    at = [step for step in range(1, steps + 1) if step % every == 0 or step in (1, 10, 100)]
    lines = {name: [values[step - 1] for step in at] for name, values in metrics.items()}
    start = [{"event": "start", "steps": planned, "tokens": 1024 * planned}] if planned else []
    write_run(folder, lines, [*start, *events], overrides=[budget(planned or steps), *overrides], steps=at)
    return diagnose(Evidence(open_run(folder)), [all_rules()[only]] if only else None)


def named(found: Diagnosis) -> list[str]:
    """The codes of the problems and, with a question mark, of what is not sure."""
    return [one.code for one in found.problems] + [f"{one.code}?" for one in found.unsure]
