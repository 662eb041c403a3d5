"""Values that no healthy run writes: no rule takes them for damaged evidence, since a broken run is what the doctor is for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_rules_tuning import DPO, GRPO, TUNE, manifest

from lmworks.io.run_layout import of_stage
from lmworks.watch.diagnosis import diagnose
from lmworks.watch.evidence import Evidence, WholeRun
from lmworks.watch.run_files import open_run
from written_run import budget, healthy, write_run

STEPS = 60
OFTEN = ("train/tokens", "train/sequence_length", "train/effective_sources", "train/repeated_rows", "train/shared_rows",
         "train/source/text/loss",
         "validation/loss", "validation/prose/loss", "validation/prose/bits_per_byte", "validation/code/loss",
         "validation/general_bits_per_byte", "validation/forgetting", "validation/reward_accuracy", "optim/grad_rms/embedding",
         "optim/grad_rms/matrices", "optim/loss_scale", "experts/load_cv", "experts/load_max", "experts/dead", "experts/bias_max",
         "perf/gap_seconds", "perf/cpu_seconds", "perf/resident_memory", "perf/memory", "perf/memory_reserved", "perf/alloc_retries",
         "perf/slowest_rank", "perf/slowest_over_median", "system/load", "system/cpu_pressure", "system/memory_total",
         "dpo/reward_chosen", "dpo/reward_rejected", "dpo/margin", "grpo/equal_groups", "grpo/wrong", "grpo/solved", "grpo/empty",
         "grpo/truncated", "grpo/unparsed", "grpo/failed", "grpo/reward", "grpo/mismatch_mean")  # fmt: skip
"""Metrics besides those of a healthy run, so that rules find what they need."""
VALUES: dict[str, Callable[[int], Any]] = {
    "zeros": lambda at: 0.0, "null": lambda at: None, "infinity": lambda at: float("inf"), "not a number": lambda at: float("nan"),
    "negative": lambda at: -1.0, "tiny": lambda at: 1e-320, "huge": lambda at: 9e99,
    "zeros at first": lambda at: 0.0 if at < STEPS // 2 else 1.0, "zeros at last": lambda at: 1.0 if at < STEPS // 2 else 0.0,
    "null at last": lambda at: 1.0 if at < STEPS // 2 else None, "one line": lambda at: 0.0 if at == STEPS // 2 else ...,
}  # fmt: skip
STAGES = {"pretrain": [], "tune": [TUNE], "dpo": [DPO], "grpo": [GRPO]}


def spoiled(folder: Path, stage: str) -> Callable[[dict[str, list[Any]]], dict[str, str]]:
    """Judges a run of a stage whose metrics are healthy but for some: by code, the reasons of rules whose evidence is called damaged."""
    usual = healthy(STEPS) | {name: [1.0] * STEPS for name in OFTEN}
    events = [
        {"event": "spike", "step": STEPS // 2, "loss": 9.0, "grad_norm": 0.0}, {"event": "resume", "step": STEPS // 2},
        {"event": "checkpoint", "step": 0, "seconds": 0.0, "bytes": 0}, {"event": "finish"},
    ]  # fmt: skip
    write_run(folder, usual, events, stage, [budget(STEPS), *STAGES[stage]], documents=manifest())
    files = open_run(folder)
    whole = WholeRun.read(files)

    def damaged(strange: dict[str, list[Any]]) -> dict[str, str]:
        evidence = Evidence(files, of_stage(stage), whole)
        for at, line in enumerate(evidence.lines):
            line.update({name: values[at] for name, values in strange.items() if values[at] is not ...})
            for name in [name for name, values in strange.items() if values[at] is ...]:
                line.pop(name, None)
        return {code: why for code, why in diagnose(evidence).not_judged.items() if "damaged" in why}

    return damaged


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, of sums that are infinite
@pytest.mark.parametrize("stage", STAGES)
def test_no_value_of_the_metrics_ends_a_rule(stage: str, tmp_path: Path) -> None:
    damaged = spoiled(tmp_path, stage)
    names = [*healthy(STEPS), *OFTEN]
    for kind, value in VALUES.items():
        strange = [value(at) for at in range(STEPS)]
        assert damaged(dict.fromkeys(names, strange)) == {}, f"{kind} in all metrics"
        for name in names if (kind, stage) == ("zeros", "pretrain") else ():
            assert damaged({name: strange}) == {}, f"{kind} in {name}"
