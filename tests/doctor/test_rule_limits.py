"""The limits of rules from both sides: a value just inside of a healthy range, and one just outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rule_verdicts import STEPS, at_validations, falling, judge, verdict
from test_rules_data import SOURCES, manifest, run
from test_rules_machine import moe
from test_rules_machine import run as on_machine
from test_rules_tuning import COUNT, dpo, forgotten, tune
from test_rules_tuning import manifest as conversations

from lmworks.watch.rule import Finding


@pytest.mark.parametrize(
    ("load_cv", "load_max", "dead", "expected"),
    [
        (0.5, 2.6, 0.0, "silent"), (0.7, 2.2, 0.0, "silent"), (0.5, 2.6, 0.5, "silent"),
        (0.7, 2.6, 0.0, "named"), (0.5, 2.6, 1.2, "named"), (0.7, 2.2, 1.2, "named"),
    ],
)  # fmt: skip
def test_collapsed_experts(load_cv: float, load_max: float, dead: float, expected: str, tmp_path: Path) -> None:
    assert verdict(judge(tmp_path, "experts-collapsed", **moe(load_cv, load_max, dead, method="none"))) == expected


@pytest.mark.parametrize(("dead", "expected"), [(0.0, "silent"), (1.2, "named")])
def test_experts_that_tuning_uses_unevenly_have_not_collapsed_while_all_are_used(dead: float, expected: str, tmp_path: Path) -> None:
    """The tokens of a dialogue go to the experts that know dialogues: 0.81 and 2.6 in tuning of the quickstart."""
    given = moe(0.9, 3.0, dead)
    given["overrides"] = [*given["overrides"], "tune={data: [{name: chats, kind: files, path: chats.jsonl}]}"]
    given["metrics"] |= {"optim/learning_rate": [0.003] * STEPS}
    found = judge(tmp_path, "experts-collapsed", stage="tune", **given)
    assert verdict(found) == expected
    assert not isinstance(found, Finding) or [(one.key, one.value) for one in found.changes] == [("tune.learning_rate", "0.001")]


@pytest.mark.parametrize(("tokens", "expected"), [(128.0, "named"), (64.0, "not judged")])
def test_experts_of_few_tokens_are_empty_by_chance(tokens: float, expected: str, tmp_path: Path) -> None:
    given = moe(1.6, 3.8, 5, method="none")
    given["metrics"] |= {"train/batch_tokens": [tokens] * STEPS}
    assert verdict(judge(tmp_path, "experts-collapsed", **given)) == expected


@pytest.mark.parametrize(("rate", "expected"), [(0.02, "silent"), (0.05, "named")])
def test_the_rate_of_the_bias(rate: float, expected: str, tmp_path: Path) -> None:
    assert verdict(judge(tmp_path, "bias-rate-too-high", **moe(0.5, 2.0, 0, 1.0, rate))) == expected


UNSTEADY = [0.5, 0.9, 0.8, 0.7, 0.75]


@pytest.mark.parametrize(
    ("rises", "rate", "expected"),
    [
        ([0.1, 0.2, 0.3, 0.34, 0.38], 0.02, "silent"), ([0.2, 0.3, 0.4, 0.45, 0.5], 0.02, "named"),
        (UNSTEADY, 0.006, "named"), (UNSTEADY, 0.004, "unsure"),
    ],
)  # fmt: skip
def test_forgetting(rises: list[float], rate: float, expected: str, tmp_path: Path) -> None:
    assert verdict(tune(tmp_path, "forgetting", {}, forgotten(rises), f"tune.learning_rate={rate}")) == expected


@pytest.mark.parametrize(
    ("rejected", "accuracy", "rise", "expected"),
    [
        (-9, 0.7, 0.0, "silent"), (-14, 0.7, 0.0, "named"), (-14, 0.81, 0.0, "unsure"), (-14, 0.79, 0.0, "named"),
        (-14, 0.85, 0.5, "unsure"), (-14, 0.85, 0.7, "named"),
    ],
)  # fmt: skip
def test_preferences(rejected: float, accuracy: float, rise: float, expected: str, tmp_path: Path) -> None:
    measured: dict[str, Any] = {"validation/reward_accuracy": at_validations([0.8, 0.85, accuracy], COUNT)}
    measured |= {name: values for name, values in forgotten([0.0, 0.1, rise]).items() if name != "validation/loss"}
    assert verdict(dpo(tmp_path, -1, rejected, measured)) == expected


@pytest.mark.parametrize(("share", "expected"), [(0.015, "silent"), (0.03, "named")])
def test_copies(share: float, expected: str, tmp_path: Path) -> None:
    assert verdict(judge(tmp_path, "duplicated-data", **run(metrics={"train/repeated_rows": [share] * STEPS}))) == expected


@pytest.mark.parametrize(
    ("lowest", "end", "expected"), [(4.0, 4.06, "silent"), (4.0, 4.13, "named"), (0.5, 0.52, "silent"), (0.5, 0.56, "named")]
)
def test_overfitting(lowest: float, end: float, expected: str, tmp_path: Path) -> None:
    curve = {domain: [*np.linspace(5, lowest, 5), *np.linspace(lowest, end, 6)[1:]] for domain in SOURCES.values()}
    loss = {"train/loss": falling(5.0, lowest - 0.5, noise=0.001)} if lowest > 1 else {"train/loss": falling(5.0, 0.2, noise=0.001)}
    assert verdict(judge(tmp_path, "overfitting", **run(validation=curve, metrics=loss, documents=manifest(tokens=20_000)))) == expected


@pytest.mark.parametrize(
    ("share", "end", "expected"), [(0.02, 4.84, "named"), (0.05, 4.84, "silent"), (0.0, 4.5, "named"), (0.0, 4.05, "silent")]
)
def test_a_missing_domain(share: float, end: float, expected: str, tmp_path: Path) -> None:
    shares = {"chats": (1 - share) / 2, "news": (1 - share) / 2} | ({"docs": share} if share else {})
    assert verdict(judge(tmp_path, "missing-domain", **run(shares, {"code": np.linspace(5.0, end, 10)}))) == expected


@pytest.mark.parametrize(("per_step", "expected"), [(1.0e6, "silent"), (2.5e6, "named")])
def test_growing_memory(per_step: float, expected: str, tmp_path: Path) -> None:
    memory = {"perf/resident_memory": 1e9 + per_step * np.arange(STEPS)}
    assert verdict(judge(tmp_path, "memory-growing", **on_machine(memory))) == expected


@pytest.mark.parametrize(("retries", "expected"), [(1, "silent"), (4, "named")])
def test_fragments(retries: int, expected: str, tmp_path: Path) -> None:
    often = {"perf/alloc_retries": [float(step in range(60, 60 + retries)) for step in range(STEPS)]}
    memory = {"perf/memory": [5e10] * STEPS, "perf/memory_reserved": [7.6e10] * STEPS}
    assert verdict(judge(tmp_path, "memory-fragmented", **on_machine(memory | often))) == expected


@pytest.mark.parametrize(
    ("masked", "valid", "expected"), [(200, 450.0, "silent"), (500, 450.0, "named"), (0, 15.0, "silent"), (0, 7.0, "named")]
)
def test_masked_labels(masked: int, valid: float, expected: str, tmp_path: Path) -> None:
    given = conversations(left_out={"wrong mask": masked})
    assert verdict(tune(tmp_path, "labels-all-masked", given, {"train/valid_tokens": [valid] * COUNT})) == expected


@pytest.mark.parametrize(
    ("ranks", "seconds", "moved", "expected"),
    [(1, 12.0, 0, "named"), (1, 8.0, 0, "note"), (2, 8.0, 0, "named"), (1, 0.4, 0, "silent"), (8, 0.6, 0, "note"), (64, 0.6, 0, "named"),
     (1, 12.0, 1, "named"), (1, 12.0, 2, "silent")],
)  # fmt: skip
def test_pauses_by_their_length_on_all_ranks_and_their_regularity(
    ranks: int, seconds: float, moved: int, expected: str, tmp_path: Path
) -> None:
    """Every 20 of 200 steps of 9.8 s; `moved`: pauses that come 7 steps late, each of which breaks two of the nine intervals."""
    every = {step + 7 * (step in (90, 150)[:moved]) for step in range(10, STEPS, 20)}
    gap = {"perf/gap_seconds": [seconds if step in every else 0.01 for step in range(1, STEPS + 1)]}
    given = on_machine(gap, events=[{"event": "resume", "step": 0, "ranks": ranks}])
    assert verdict(judge(tmp_path, "periodic-pause", **given)) == expected
