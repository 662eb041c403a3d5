"""What the doctor is compared with: the thresholds of trainproof, 6 sigma over 128 steps, and a decision tree that is fitted to the runs.

The first two only say that something is wrong. The tree names a cause; it sees summaries of the same metrics and is fitted to the runs that
the rules were tuned on, so it shows whether the rules by hand miss something that the numbers hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

WINDOW, SIGMAS = 128, 6.0
LEAVES = 100


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """The metrics of all stages of a run, one after the other."""
    lines: list[dict[str, Any]] = []
    for stage in ("", "tune", "dpo", "grpo"):
        path = folder / stage / "metrics.jsonl"
        lines += [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return lines


def trainproof(lines: Sequence[Mapping[str, Any]]) -> str:
    """The verdict of trainproof's checks on a log: PASS, WARN or FAIL, and the ids of its findings."""
    from trainproof.epoch import check_records

    names = {
        "step": "step", "train/loss": "loss", "optim/learning_rate": "lr", "optim/grad_norm": "grad_norm", "validation/loss": "eval_loss",
        "time": "time", "perf/step_seconds": "step_time", "perf/data_wait": "loader_time",
    }  # fmt: skip
    records = [{theirs: math.nan if line[ours] is None else line[ours] for ours, theirs in names.items() if ours in line} for line in lines]
    found = check_records([record for record in records if "loss" in record])
    ids = [one["id"] for one in found["findings"] if one["level"] in ("FAIL", "WARN")]
    return f"{found['verdict']} {' '.join(ids)}".strip()


def six_sigma(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a loss or a gradient norm is 6 standard deviations above the mean of the 128 steps before it, as OLMo-core's policy skips
    steps; a value that is not finite counts."""
    for name in ("train/loss", "optim/grad_norm"):
        values = [line.get(name) for line in lines if name in line]
        if any(value is None for value in values):
            return True
        series = np.array(values, float)
        for at in range(WINDOW, len(series)):
            before = series[at - WINDOW : at]
            if series[at] > before.mean() + SIGMAS * max(float(before.std()), 1e-12):
                return True
    return False


_LOGGED = (
    "train/loss", "optim/grad_norm", "optim/clipped", "optim/update_ratio", "optim/weight_norm", "optim/learning_rate", "optim/loss_scale",
    "train/valid_tokens", "train/batch_tokens", "train/spikes", "train/bad_steps", "validation/loss", "validation/forgetting",
    "validation/reward_accuracy", "experts/load_max", "experts/load_cv", "experts/dead", "experts/bias_max", "perf/step_seconds",
    "perf/data_wait", "perf/save_seconds", "perf/gap_seconds", "perf/cpu_seconds", "system/throttled_seconds", "system/load",
    "dpo/reward_chosen", "dpo/margin", "grpo/equal_groups", "grpo/wrong", "grpo/solved", "grpo/truncated", "grpo/failed",
    "train/repeated_rows", "train/effective_sources", "optim/unchanged_weights",
)  # fmt: skip
_EVENTS = ("spike", "bad_step", "not_finite", "rollback", "corruption", "resume", "recipe_changed", "save_failed", "restart", "slow_rank",
           "rank_exit", "resumed_step")  # fmt: skip
FEATURES = (
    *(f"{name}:{what}" for name in _LOGGED for what in ("first", "median", "last", "most", "trend")),
    "validation - train", "domains:spread", "domains:gain", "sources:spread", *(f"event:{name}" for name in _EVENTS),
)  # fmt: skip


def features(folder: Path) -> list[float]:
    """Summaries of a run for the tree; -1 for what was not measured."""
    lines = read_lines(folder)
    columns: dict[str, list[float]] = {}
    for line in lines:
        for name, value in line.items():
            columns.setdefault(name, []).append(1e30 if value is None else float(value))
    found: list[float] = []
    for name in _LOGGED:
        series = np.clip(np.array(columns.get(name, []), float), -1e30, 1e30)
        if not len(series):
            found += [-1.0] * 5
            continue
        tail = max(1, len(series) // 5)
        middle = float(np.median(series[len(series) // 2 - tail // 2 : len(series) // 2 + tail // 2 + 1]))
        found += [float(series[0]), float(np.median(series)), float(np.median(series[-tail:])), float(series.max())]
        found.append(float(np.median(series[-tail:])) - middle)
    last = {name: values[-1] for name, values in columns.items()}
    found.append(last.get("validation/loss", -1.0) - last.get("train/loss", 0.0))
    domains = {name: values for name, values in columns.items() if name.startswith("validation/") and name.count("/") == 2 and
               name.endswith("/bits_per_byte")}  # fmt: skip
    ends = [values[-1] for values in domains.values()]
    found.append(max(ends) - min(ends) if ends else -1.0)
    found.append(min((values[0] - values[-1] for values in domains.values()), default=-1.0))
    sources = [values[-1] for name, values in columns.items() if name.startswith("train/source/")]
    found.append(max(sources) - min(sources) if sources else -1.0)
    ledger = folder / "ledger.jsonl"
    events = [json.loads(line).get("event") for line in ledger.read_text().splitlines()] if ledger.exists() else []
    return [float(np.clip(value, -3e38, 3e38)) for value in [*found, *(float(events.count(name)) for name in _EVENTS)]]


def fit_tree(rows: Sequence[Sequence[float]], causes: Sequence[str]) -> Any:
    """A tree of at most `LEAVES` leaves, more than two for each cause. Healthy runs and causes weigh alike."""
    from sklearn.tree import DecisionTreeClassifier

    return DecisionTreeClassifier(max_leaf_nodes=LEAVES, class_weight="balanced", random_state=0).fit(np.array(rows), np.array(causes))
