"""The preflight checks in their order, and the function that runs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.io.files import write_json
from lmworks.preflight import alerts, data, disks, environment, evaluation, hosts, layouts, saving, steps
from lmworks.preflight.check_result import CheckContext, CheckResult, MissingInput
from lmworks.watch.run_files import PREFLIGHT


@dataclass(frozen=True)
class Check:
    """One check. With `all_ranks` it runs on all ranks together; otherwise on the first rank only."""

    name: str
    title: str
    work: Callable[[CheckContext], CheckResult]
    all_ranks: bool = False


CHECKS = (
    Check("versions", "environment and versions", environment.versions),
    Check("health", "health of the hosts", hosts.healthy, all_ranks=True),
    Check("plan", "plan for these machines", environment.planned),
    Check("disks", "free space, bandwidth and stalls of every disk that is written to", disks.written),
    Check("reading", "bandwidth and stalls of the token files' disk", disks.read),
    Check("collectives", "bandwidth and latency between ranks", environment.network, all_ranks=True),
    Check("hashes", "token files and their lineage", data.hashes),
    Check("vocabulary", "tokenizer and vocabulary", data.vocabulary),
    Check("first-batches", "the first batch of every phase, forward and backward", steps.first_batches, all_ranks=True),
    Check("init", "initial weights do not depend on the layout", layouts.same_start),
    Check("parallel", "several ranks compute the same as one", layouts.same_steps),
    Check("shuffled", "batches are shuffled by sequence", data.shuffled),
    Check("saving", "save, kill, resume on another layout, on the real storage", saving.resumes),
    Check("spare", "a host that is lost is replaced by a spare, and training resumes", hosts.replaced),
    Check("export", "an export computes what was trained", saving.export_round_trip),
    Check("evaluation", "what is measured during and after training, on a few items", evaluation.dry_run),
    Check("alerts", "a test alert reaches its targets", alerts.sent),
)


@dataclass(frozen=True)
class Answer:
    """The result of a check, and its duration in seconds."""

    number: int
    check: Check
    finding: CheckResult
    seconds: float

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        about = {"number": self.number, "name": self.check.name, "title": self.check.title, "seconds": round(self.seconds, 3)}
        return {**about, **asdict(self.finding)}


def preflight(context: CheckContext, begin: Callable[[int, Check], None], end: Callable[[Answer], None]) -> list[Answer]:
    """Run all checks in their order; `begin` and `end` are called for each. Changes nothing in the run. Called on the first rank, while the
    other ranks `follow`."""
    answers = []
    try:
        for number, check in enumerate(CHECKS, 1):
            begin(number, check)
            if check.all_ranks and context.ranks is not None:
                context.ranks.broadcast(check.name)
            began = time.monotonic()
            finding = ask(check, context)
            answers.append(Answer(number, check, finding, time.monotonic() - began))
            end(answers[-1])
    finally:
        if context.ranks is not None:
            context.ranks.broadcast(None)
    return answers


def document(answers: Sequence[Answer]) -> dict[str, Any]:
    """The results as they are kept in the folder of a run and in a bundle."""
    return {"time": round(time.time(), 3), "checks": [answer.plain() for answer in answers]}


def keep(answers: Sequence[Answer], run_dir: Path) -> None:
    """Write the results into the folder of a run, if there is one: a preflight makes none. Raises `UserError` or `OSError` if it cannot be
    written."""
    if run_dir.is_dir():
        write_json(run_dir / PREFLIGHT, document(answers))


def follow(context: CheckContext) -> None:
    """Run the checks of all ranks, on every rank but the first."""
    assert context.ranks is not None
    named = {check.name: check for check in CHECKS}
    while (name := context.ranks.receive_broadcast()) is not None:
        ask(named[name], context)


def ask(check: Check, context: CheckContext) -> CheckResult:
    """Run one check; an exception in it becomes a failed result."""
    try:
        return check.work(context)
    except MissingInput as reason:
        return CheckResult("skip", str(reason), reason.advice)
    except UserError as error:
        what, _, advice = str(error).partition("; ")
        return CheckResult("fail", what, advice)
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        return CheckResult("fail", what, "fix the cause before the run starts; the run would fail in the same way")
