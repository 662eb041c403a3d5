"""The allocator of the GPU holds much more memory than tensors use, and allocations succeed only after it has freed some."""

from __future__ import annotations

from lmworks.watch.evidence import Evidence, ratio
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_RESERVED, _RETRIES = 1.3, 0.01
_FEWEST = 20  # lines


def _check(evidence: Evidence) -> Finding | None:
    held, used, retries = (evidence.series(f"perf/{name}").finite for name in ("memory_reserved", "memory", "alloc_retries"))
    if len(held) < _FEWEST:
        raise NotJudged(f"fewer than {_FEWEST} lines")
    late = retries.part(0.2, 1)
    often = float(late.values.sum()) / max(float(late.steps[-1] - late.steps[0]), 1.0)
    more = ratio(held.part(0.5, 1).median, used.part(0.5, 1).median)
    measured = [
        Measurement(
            "memory that the allocator holds relative to the most that tensors have used",
            more,
            high=_RESERVED,
            source="1.0 to 1.15 in steady runs (pytorch#35901)",
        ),
        Measurement("allocations per step that had to free cached memory first", often, high=_RETRIES, source="0 after the first steps"),
    ]
    if not measured[1].abnormal:
        return None
    micro = evidence.number("train.micro_batch_sequences")
    changes = [
        Change("launch.environment.PYTORCH_ALLOC_CONF", "expandable_segments:True", "segments that grow instead of new ones", "resume")
    ]
    if micro > 1:
        changes.append(
            Change(
                "train.micro_batch_sequences",
                f"{int(micro) // 2}",
                "less memory for activations; the batch stays the same",
                "resume; a step takes a little longer",
            )
        )
    return Finding(
        measured,
        steps=(int(held.steps[0]), int(held.steps[-1])),
        excluded=[Exclusion("memory-growing", "it is memory of the GPU, and tensors do not use more than before")],
        changes=changes,
        check_afterwards="perf/alloc_retries is 0 over a hundred steps",
        next_measurement="lmworks profile RUN, which shows what the allocator holds",
    )


RULE = Rule(
    "memory-fragmented",
    "The memory of the GPU is fragmented.",
    "machine",
    ("out-of-memory", "slow"),
    _check,
    "Tensors of changing sizes, as of packed rows or long answers, leave holes between them that no later tensor fits into. The allocator "
    "then frees its cache and tries again, which waits for the GPU, and late in a run memory is not enough although much of it is free "
    "(pytorch#35901).",
    applies=lambda evidence: evidence.on_gpu,
    needs=("perf/memory_reserved", "perf/memory", "perf/alloc_retries"),
    look_alikes={"memory-growing": "memory of the host"},
)
