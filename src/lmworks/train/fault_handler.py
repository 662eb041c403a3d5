"""Handles the faults of a run as the policies of `watch` decide: rollbacks, failed saves, data starvation, slow ranks.

Every rank has a handler and makes the same calls; rank 0 writes each decision to the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from lmworks.checkpoint import listing
from lmworks.checkpoint.checkpoints import Checkpoints
from lmworks.checkpoint.communicator import world_communicator
from lmworks.errors import UserError
from lmworks.optim.optimizer import Updates
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.launch import Stability
from lmworks.shards.batch import Batch
from lmworks.train.corruption import find_corruption
from lmworks.ui import terminal
from lmworks.watch import ledger as skips
from lmworks.watch.ledger import START_OVER, Ledger, Rollback, Skips, since_start_over
from lmworks.watch.monitors import FailedSaves, SlowRanks, Starvation, advice, slowest_rank, time_matmul
from lmworks.watch.policy import BadSteps, Policy, RollbackRequest

SHORTEST_PAUSE = 1.0
"""Seconds between two attempts of the last save: where steps take less, all attempts would be over before room can be made."""

_COMPARED_ROWS = 256  # of each rank

SkipsSame = Callable[[int, tuple[int, int] | None, Skips], tuple[int, int] | None]
"""(step of the checkpoint, steps to skip, those that are skipped already) -> the steps to skip after the rollback."""


class FaultHandler:
    """The fault policies of one stage of a run. `history` has the rollbacks of the stage, from its ledger. Batches, and the ledger's events
    about them, count from 0; messages count steps as the metrics do (`shown_step`)."""

    def __init__(
        self,
        options: Stability,
        bad_steps: BadSteps,
        checkpoints: Checkpoints,
        ledger: Ledger,
        *,
        stage: str,
        save_every: int,
        rollback_after: int,
        cached: bool,
    ) -> None:
        self.options, self.checkpoints, self.ledger, self.stage, self._cached = options, checkpoints, ledger, stage, cached
        self.policy = Policy(options, bad_steps, self._report, rollback_after)
        self.saves = FailedSaves(options.max_failed_saves, save_every)
        self.starvation = Starvation(options.starved_fraction)
        self._slow = {what: SlowRanks(options.slow_threshold_mads) for what in ("arithmetic", "data and host")}
        self._communicator = world_communicator()
        self.history = self._communicator.broadcast(skips.rollbacks(ledger.read(), stage))

    @property
    def skips(self) -> Skips:
        """The steps that are skipped."""
        return Skips(self.history)

    def _report(self, event: str, **fields: Any) -> None:
        self.ledger.write(event, stage=self.stage, **fields)

    def _warn(self, text: str) -> None:
        if self._communicator.is_first:
            terminal.console.print(text, style="yellow")

    # State that a checkpoint's meta holds.

    def meta(self) -> dict[str, Any]:
        """The state from which a resumed run makes the same decisions."""
        return {"stability": self.policy.state(), "rollbacks": [asdict(one) for one in self.history]}

    def is_undone(self, step: int, meta: dict[str, Any]) -> bool:
        """Whether a rollback has undone this checkpoint."""
        return skips.undone(step, len(meta.get("rollbacks", [])), self.history)

    def load(self, meta: dict[str, Any]) -> None:
        """Continue from a checkpoint with this meta. Rollbacks that are missing in the ledger (a lost file) are written to it again."""
        if "stability" in meta:
            self.policy.load(meta["stability"])
        known = [Rollback(**one | {"skip": one["skip"] and tuple(one["skip"])}) for one in meta.get("rollbacks", [])]
        for one in known[len(self.history) :]:
            self._report(skips.ROLLBACK, **asdict(one))
            self.history.append(one)

    def begin(self) -> None:
        """Begin at step 0, because there is no checkpoint. If the ledger knows of some, they were deleted, so that the stage starts over:
        the rollbacks of its former course, what they skip, and its changes of the mixture no longer hold."""
        lines = since_start_over(self.ledger.read(), self.stage)
        saved = [line["step"] for line in lines if line["event"] == "checkpoint" and line.get("stage") == self.stage]
        reached = self._communicator.broadcast(max(saved, default=0))
        if not reached:
            return
        self._report(START_OVER, step=reached, rollbacks=len(self.history))
        self._warn(
            f"{self.checkpoints.directory} has no checkpoint any more, so {self.stage} starts over from step 0; the rollbacks, skipped "
            f"steps and changes of the mixture of the run that had reached step {reached:,} do not apply"
        )
        self.history = []

    def roll_back(self, step: int, phase_began: int, request: RollbackRequest, skips_same: SkipsSame | None = None) -> bool:
        """Record a rollback, if there is a checkpoint to load and the phase has a rollback left; the trainer then loads the checkpoint.
        `skips_same` gives the steps to skip where the rollback gives other data to the steps after it.

        Returns False where the run continues without a rollback; raises `UserError` where it must not continue.
        """
        found = self.target(step, phase_began, request)
        if found is None:
            return False
        skip = self.policy.window(step, found) if request.skip else None
        if skips_same is not None:
            skip = skips_same(found, skip, self.skips)
        begun = step if request.reason else step + 1  # as `shown_step` counts it
        made = Rollback(begun, found, skip, request.reason)
        self._report(skips.ROLLBACK, **asdict(made))
        self.history.append(made)
        why = f"{request.reason}; " if request.reason else ""
        self._warn(f"step {step + 1:,}: {why}going back to step {found:,}{skips.skipped_steps(skip)}")
        return True

    def target(self, step: int, phase_began: int, request: RollbackRequest) -> int | None:
        """The step of the checkpoint that a rollback goes back to. None where the run continues without one, at the new level of the loss;
        raises `UserError` where it must not continue."""
        if request.to_step is not None:
            return request.to_step
        found = self._newest_good(request.step) if self.policy.may_roll_back(self.history, phase_began) else None
        if found is None:
            if request.stop is not None:
                raise self.policy.give_up(step, request, self.history)
            self.policy.accept(step)
        return found

    def report_not_finite(self, step: int, first_operator: str | None, update: tuple[int, int] = (0, 1)) -> None:
        """Report the first operator with a result that is not finite in a step; `first_operator` is that of this rank, if it has one.
        `update`: the number of the update that was not finite, and of how many."""
        reports = [(rank, found) for rank, found in enumerate(self._communicator.all_gather(first_operator)) if found is not None]
        first = "no operator: when the step was run again, forward and backward were finite"
        if reports:
            rank, first = reports[0]
            first += f", on rank {rank}" if self._communicator.size > 1 else ""
        number, count = update
        what, changes = f"step {step + 1:,}", "changes no weight"
        if count > 1:
            what, changes = f"update {number + 1} of {count} in {what}", "changes no weight, nor do those after it"
        self._report("not_finite", step=step, first=first, **({"update": number} if count > 1 else {}))
        self._warn(f"{what} was not finite and {changes}; it began with {first}")

    def check_corruption(
        self, step: int, model: ParallelModel, optimizer: Updates, batch: Batch, micro_batch_size: int
    ) -> RollbackRequest | None:
        """Test for silent corruption and report the rank at fault. Returns a rollback, or raises `UserError` (`on_corruption: stop`)."""
        found = find_corruption(model, optimizer, batch, micro_batch_size, self._communicator)
        if found is None:
            return None
        self._report("corruption", step=step, ranks=found.ranks, certain=found.certain, what=found.what)
        stop = f"silent corruption on {found}; remove its machine and run the same command again; it resumes from the last checkpoint"
        if self.options.on_corruption == "stop":
            raise UserError(f"stopped at step {step + 1}: {stop}")
        return RollbackRequest(step, f"silent corruption on {found}", stop, skip=False)

    def _newest_good(self, at_most: int) -> int | None:
        """The newest good checkpoint of a step at most this; or, if the last rollback led there and did not help, the one before it."""
        found = self.checkpoints.latest_good(at_most, self.is_undone)
        if found is not None and self.history and self.history[-1].to_step == listing.step_of(found):
            found = self.checkpoints.latest_good(listing.step_of(found) - 1, self.is_undone) or found
        return None if found is None else listing.step_of(found)

    # Saves, data, ranks.

    def run_on_all(self, work: Callable[[], None]) -> None:
        """Run `work` on each rank; a `UserError` on any is raised on all."""
        self._communicator.run_on_all(work)

    def save_failed(self, step: int, error: UserError) -> None:
        """Warn and schedule a retry; raises the error after `stability.max_failed_saves` failures in a row."""
        self._count_failed_save(step, error)
        self._warn(f"step {step:,}: {error}. Training continues; the next attempt is after step {self.saves.retry_at:,}")

    def last_save_failed(self, step: int, error: UserError, step_seconds: float) -> float:
        """`save_failed` where no step is left to train: returns the seconds until the next attempt, those that the steps until then would
        have taken."""
        seconds = max(SHORTEST_PAUSE, self._count_failed_save(step, error) * step_seconds)
        self._warn(f"step {step:,}: {error}. This is the last step; the next attempt is in {seconds:,.0f} s")
        return seconds

    def _count_failed_save(self, step: int, error: UserError) -> int:
        """Report a failed save; returns the steps until the next attempt."""
        self._report("save_failed", step=step, reason=str(error), in_a_row=self.saves.in_a_row + 1)
        return self.saves.failed(step, error)

    def observe_data_wait(self, step: int, waited: float, seconds: float) -> None:
        """Record the seconds that a step waited for its batch, and the seconds of the whole step; warns about starvation."""
        share = self.starvation.observe(waited, seconds)
        if share is not None:
            self._report("data_starved", step=step, share=round(share, 3), steps=self.starvation.steps)
            self._warn(f"step {step:,}: {share:.0%} of the time goes into waiting for data; {advice(self._cached)}")

    def compare_ranks(
        self, step: int, own: float, step_seconds: float, data_wait: float, reader: int, rows: list[int], device: torch.device
    ) -> dict[str, float]:
        """Compare the seconds per step that each rank spends outside the step's work (`own`), its arithmetic, and the seconds that it has
        waited for data since the last line: `perf/slowest_rank`, `perf/slowest_excess`, `perf/data_wait_max`, `perf/starved_rank`.
        And the hashes of its rows of the step: `train/shared_rows`, the share that ranks that should read different ones (`reader`) have
        read several times.

        Empty alone. A rank that is slow in one of the first two for several comparisons is named.
        """
        if self._communicator.size == 1:
            return {}
        gathered = self._communicator.all_gather((time_matmul(device), own, step_seconds, data_wait, reader, rows[:_COMPARED_ROWS]))
        arithmetic, host, steps, waits, readers, batches = (list(values) for values in zip(*gathered, strict=True))
        typical = median(steps)
        floors = {"arithmetic": 0.25 * median(arithmetic), "data and host": 0.1 * typical}
        for what, seconds in (("arithmetic", arithmetic), ("data and host", host)):
            for rank in self._slow[what].observe(seconds, floors[what]):
                slow, others = seconds[rank], median(seconds) if len(seconds) > 2 else min(seconds)
                self._report("slow_rank", step=step, rank=rank, what=what, seconds=round(slow, 6), median=round(others, 6))
                self._warn(f"step {step:,}: rank {rank} is slow ({what}: {slow:.3g} s against {others:.3g} s of the others)")
        slowest, excess = slowest_rank(arithmetic, host, typical)
        starved = waits.index(max(waits))
        found = {
            "perf/slowest_rank": slowest, "perf/slowest_excess": excess, "perf/data_wait_max": waits[starved], "perf/starved_rank": starved,
        }  # fmt: skip
        read = Counter(row for one in dict(zip(readers, batches, strict=True)).values() for row in set(one))
        shared, rows_read = sum(times - 1 for times in read.values()), sum(read.values())
        return found | {"train/shared_rows": shared / max(1, rows_read)}
