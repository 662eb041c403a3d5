"""All checks in their order, and the walk through them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from lmworks.doctor.preflight import batches, collectives, data, disks, environment, exporting, layouts, saving, steps
from lmworks.doctor.preflight.finding import Context, Finding, NotYet
from lmworks.errors import UserError


@dataclass(frozen=True)
class Check:
    """One question. What is done by `all_ranks` is so where there are several; the others are the first rank's."""

    name: str
    title: str
    work: Callable[[Context], Finding]
    all_ranks: bool = False


CHECKS = (
    Check("versions", "environment and versions", environment.versions),
    Check("plan", "the plan on these machines", environment.planned),
    Check("disks", "room, bandwidth and stalls of every disk written to", disks.written),
    Check("reading", "bandwidth and stalls of the token files' disk", disks.read),
    Check("collectives", "bandwidth and latency between ranks", collectives.measured, all_ranks=True),
    Check("hashes", "token files and their lineage", data.hashes),
    Check("vocabulary", "tokenizer and vocabulary", data.vocabulary),
    Check("first-batches", "the first batch of every phase, forward and backward", steps.first_batches, all_ranks=True),
    Check("init", "first weights do not depend on the layout", layouts.same_start),
    Check("parallel", "many ranks compute what one does", layouts.same_steps),
    Check("shuffled", "batches are shuffled by sequence", batches.shuffled),
    Check("budget", "batches cost the same in a longer run", batches.independent_of_budget),
    Check("saving", "save, kill, resume on another layout, on the real storage", saving.survives),
    Check("export", "an export computes what was trained", exporting.round_trip),
)


@dataclass(frozen=True)
class Answer:
    """What a check has found, and in how many seconds."""

    number: int
    check: Check
    finding: Finding
    seconds: float

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        about = {"number": self.number, "name": self.check.name, "title": self.check.title, "seconds": round(self.seconds, 3)}
        return {**about, **asdict(self.finding)}


def preflight(context: Context, begin: Callable[[int, Check], None], end: Callable[[Answer], None]) -> list[Answer]:
    """Ask all questions in their order; `begin` and `end` hear of each. Changes nothing of the run. By the first rank, while the others
    `follow`."""
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


def follow(context: Context) -> None:
    """Take part, as another rank than the first, in what all do together."""
    assert context.ranks is not None
    named = {check.name: check for check in CHECKS}
    while (name := context.ranks.receive_broadcast()) is not None:
        ask(named[name], context)


def ask(check: Check, context: Context) -> Finding:
    """What one check finds; whatever goes wrong in it is a finding, too."""
    try:
        return check.work(context)
    except NotYet as reason:
        return Finding("skip", str(reason), reason.advice)
    except UserError as error:
        what, _, advice = str(error).partition("; ")
        return Finding("fail", what, advice)
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        return Finding("fail", what, "mend the cause before the run starts; it would meet it, too")
