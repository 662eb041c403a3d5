"""The kernel has killed a rank for want of memory."""

from __future__ import annotations

from lmworks.watch.evidence import Evidence, ratio
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, Rule
from lmworks.watch.rules._ranks import failures, has_ranks, place


def _check(evidence: Evidence) -> Finding | None:
    for one in reversed(failures(evidence)):
        killed = [end for end in one.unasked if end.get("oom_kill") and end.get("signal") == "SIGKILL"]
        if not killed or (one.first and not one.first.get("oom_kill")):
            continue
        memory = evidence.series("perf/resident_memory").finite
        micro = evidence.number("train.micro_batch_sequences")
        measured = [
            Measurement("processes of its control group that were killed for want of memory", 1, high=0, source="the kernel's counter")
        ]
        if len(memory):
            measured += [
                Measurement("resident memory of the first rank in the last line", memory.last / 1e9, unit="GB"),
                Measurement(
                    "the same relative to the first tenth of the lines",
                    ratio(memory.last, memory.part(0, 0.1).median),
                    high=1.5,
                    source="steady in healthy runs",
                ),
            ]
        changes = [Change("train.micro_batch_sequences", f"{int(micro) // 2}", "the batch stays the same", "resume")] if micro > 1 else []
        return Finding(
            measured,
            steps=(one.step, one.step),
            where=place(one, killed[0]["rank"]),
            exact=True,
            excluded=[Exclusion("dead-rank", "the kernel counted a kill for want of memory while this rank ended")],
            changes=[
                *changes,
                Change("train.activation_checkpointing", "full", "recompute activations", "resume; a step takes a third longer"),
                Change(
                    advice="raise the memory limit of the container or the job (launch.slurm.memory), or put fewer ranks on the host",
                    cost="resume",
                ),
            ],
            check_afterwards="perf/resident_memory stays below the limit; lmworks plan RECIPE says what a rank needs",
        )
    return None


RULE = Rule(
    "out-of-memory-killed",
    "The kernel has killed a rank for want of memory.",
    "ranks",
    ("out-of-memory", "hangs"),
    _check,
    "When the memory of a machine or of a container is used up, the kernel kills a process with SIGKILL, which leaves no message and "
    "looks "
    "like a rank that has vanished. The container counts these kills, and the parent of the ranks compares the counter before and after.",
    applies=has_ranks,
    outranks=("dead-rank",),
    look_alikes={"dead-rank": "no kill was counted", "memory-growing": "the memory grew with the steps before"},
)
