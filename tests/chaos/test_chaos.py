"""The campaign's own parts: what it plans is legal and repeatable, and its judge sees what is wrong. The campaign itself: `make chaos`."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from campaign import Campaign, name_of, table, undisturbed
from judge import Records, bits, lost_at_most, lost_steps, order, repeated, since, work_lost, written
from plans import BORDERS, DECK, FIRST, IN_A_ROLL_BACK, LAYOUTS, PLANTED, POINTS, RAMP, STEPS, draw, harmless, overrides
from running import Run
from strikes import spoil

from lmworks.cli.main import main
from lmworks.plan.automatic import machine_for
from lmworks.plan.layout import problems
from lmworks.recipe.schema.layout import layout_for, world_size
from tiny_run import Tiny, curve

SEEDS = 8 * sum(DECK.values())


def test_a_seed_is_a_plan() -> None:
    plans = [draw(seed) for seed in range(SEEDS)]
    assert plans == [draw(seed) for seed in range(SEEDS)]
    assert Counter(plan.kind for plan in plans) == {kind: 8 * cards for kind, cards in DECK.items()}
    assert {plan.ranks for plan in plans} == {1, 2, 3, 4}
    assert all(0 <= plan.rank < plan.ranks and plan.moment < STEPS for plan in plans)
    assert all(plan.supervised for plan in plans if plan.ranks > 1)
    without = [draw(seed, {kind: cards for kind, cards in DECK.items() if kind != "full disk"}) for seed in range(100)]
    assert "full disk" not in {plan.kind for plan in without}


def test_every_plan_is_a_legal_recipe(tiny: Tiny) -> None:
    """Each layout once, with its model, and the smaller world of those that shrink."""
    plans = {name_of(plan): plan for plan in map(draw, range(SEEDS))}
    assert len(plans) >= sum(map(len, LAYOUTS.values()))
    for plan in plans.values():
        recipe = tiny.resolve(*overrides(plan), *harmless(plan)).recipe
        for ranks in {plan.ranks, plan.ranks - plan.resized}:
            layout = layout_for(recipe.layout, ranks)
            cluster = machine_for(recipe.model_copy(update={"layout": layout}))
            assert not [one for phase in recipe.train.phases for one in problems(recipe, cluster, layout, phase)]
            assert world_size(layout) == ranks


def test_one_twin_for_all_runs_of_a_layout() -> None:
    plans = [draw(seed) for seed in range(SEEDS)]
    for plan in plans:
        still = undisturbed(plan)
        assert undisturbed(still) == still or plan.resized
        if not plan.resized:
            assert overrides(still) == overrides(plan)
    assert len({name_of(undisturbed(plan)) for plan in plans if not plan.window}) == sum(map(len, LAYOUTS.values())) + 1


def test_faults_meet_every_border() -> None:
    """Bad steps at the first and the last step and on both sides of ramp and phase border; windows that begin, end and stand there."""
    plans = [draw(seed) for seed in range(SEEDS)]
    borders = {step for border in BORDERS for step in (border - 1, border) if step < STEPS}
    assert borders <= {plan.moment for plan in plans if plan.kind in PLANTED}
    assert {FIRST, STEPS - 1} <= {plan.moment for plan in plans if plan.how == "roll back"}
    windows = [plan.window for plan in plans if plan.window]
    assert {RAMP, FIRST, STEPS - 1} <= {start for start, _ in windows}
    assert {RAMP, FIRST, STEPS, STEPS + 5} <= {stop for _, stop in windows}
    assert any(start < FIRST < stop for start, stop in windows)
    assert all(plan.save_every <= plan.window[0] < plan.window[1] and plan.window[0] < STEPS for plan in plans if plan.window)
    points = {plan.point[0] for plan in map(draw, range(2 * SEEDS)) if plan.point}
    assert points == {f"{when} {what}" for when in ("before", "after") for what in {*POINTS, *IN_A_ROLL_BACK}}


def line(step: int, life: str = "a", weights: str = "", rows: tuple[str, ...] = ("x", "y"), start: int = 0) -> dict[str, Any]:
    named = [f"{row}{step}" for row in rows]
    return {"life": life, "step": step, "start": start, "ranks": 2, "time": 5.0, "rows": named, "weights": weights or f"w{step}"}


ROWS = {(step, row): f"{name}{step}" for step in range(4) for row, name in enumerate("xy")}


def changed(records: Records, rank: int, number: int, **values: Any) -> Records:
    lines = list(records[rank])
    lines[number] = lines[number] | values
    return {**records, rank: lines}


def test_the_order_of_the_data_is_judged() -> None:
    """Two data ranks, killed after step 2 and gone on from step 1."""
    steps = [(0, "a"), (1, "a"), (2, "a"), (1, "b"), (2, "b"), (3, "b")]
    good: Records = {rank: [line(step, life, rows=("xy"[rank],), start=rank) for step, life in steps] for rank in range(2)}
    assert list(order(good, ROWS, 4, set())) == []
    assert "another row 1 in step 2" in next(order(changed(good, 1, 2, rows=["x2"]), ROWS, 4, set()))
    short = {rank: lines[:-1] for rank, lines in good.items()}
    assert "row 0 of step 3 was never trained on" in next(order(short, ROWS, 4, set()))
    assert list(order(short, ROWS, 4, {3})) == []
    assert lost_steps(good) == [(3, 1, 5.0)] and lost_at_most(good) == 2


def test_weights_are_judged() -> None:
    plan = replace(draw(0), kind="kill all", how="all", ranks=1, layout={})
    records: Records = {0: [line(0), line(1), line(1, "b"), line(2, "b"), line(3, "b")]}
    weights = {(step, 0): f"w{step}" for step in range(4)}
    assert list(bits(records, weights, plan)) == list(repeated(records)) == []
    wrong = changed(records, 0, 2, weights="other")
    assert "after step 1 are not those" in next(bits(wrong, weights, plan))
    assert "repeated step 1 and got other weights" in next(repeated(wrong))
    poisoned = replace(plan, kind="poisoned batch", moment=2)
    assert "bad step 2 has changed" in next(bits(records, weights, poisoned))
    assert list(bits(changed(records, 0, 3, weights="w1"), weights, poisoned)) == []
    assert list(bits({0: [line(0)]}, weights, replace(poisoned, moment=0))) == [], "nothing is before the first step"


def test_what_follows_a_window_is_judged_by_what_was_trained_without_it() -> None:
    records: Records = {0: [line(step) | {"time": 1.0} for step in range(4)] + [line(3, "b", weights="without step 2")]}
    assert "repeated step 3" in next(repeated(records))
    assert list(repeated(since(records, 1.0))) == [] and [one["step"] for one in since(records, 1.0)[0]] == [3]


def test_a_checkpoint_that_was_reported_is_gone_on_from_unless_a_roll_back_removed_it(tmp_path: Path) -> None:
    run = Run(replace(draw(0), kind="skip window", window=(3, 4), save_every=1, asynchronous=False), tmp_path / "tiny.yaml", tmp_path, 0.0)
    records: Records = {0: [line(step) | {"time": 3.0} for step in (2, 3)] + [line(step, "b") for step in (3, 4)]}

    def judged(*events: tuple[str, int, float]) -> list[str]:
        told = [{"event": name, "step": step, "to_step": 2, "skip": [3, 4], "time": when} for name, step, when in events]
        (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(event) + "\n" for event in told), encoding="utf-8")
        return [one for one in work_lost(run, records) if "had been reported" in one]

    assert judged(("checkpoint", 16, 1.0), ("rollback", 16, 2.0), ("checkpoint", 3, 4.0), ("checkpoint", 16, 6.0)) == []
    assert judged(("checkpoint", 16, 1.0)) == ["the run went on from step 3, though the checkpoint of step 16 had been reported"]
    assert "the checkpoint of step 4 had been" in judged(("rollback", 16, 2.0), ("checkpoint", 4, 4.0))[0]


def test_a_run_that_nothing_has_struck_is_sound(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the commands write is judged, so that no run of a campaign fails because a stage has learned to write something else."""
    plan = replace(draw(0), kind="skip window", window=(FIRST, STEPS), ranks=1, layout={}, supervised=False, how="end", save_every=1)
    run = Run(undisturbed(plan), tiny.recipe, tiny.copy(tmp_path / "run").run_dir, patience=0.0)

    def lmworks(*words: object) -> None:
        monkeypatch.setattr(sys, "argv", ["lmworks", *map(str, words)])
        main()  # which exits with a code if it is not 0

    lmworks(*run.command())
    whole = curve(run.dir)
    run.plan = replace(run.plan, kind="none", window=None)
    assert list(written(run, whole)) == []
    assert "differs from that of the undisturbed run from step 3 on" in next(written(run, [*whole[:2], {"step": 3}, *whole[3:]]))
    run.plan = undisturbed(plan)
    assert "tells of rollbacks []" in next(written(run, whole))
    lmworks("ckpt", "rollback", run.dir, FIRST - 2, "--skip-steps", f"{FIRST}:{STEPS}")
    lmworks(*run.command())
    assert list(written(run, curve(run.dir))) == []


@pytest.mark.parametrize("how", ["flip", "truncate"])
def test_a_spoilt_file_differs(tmp_path: Path, how: str) -> None:
    path = tmp_path / "file"
    for seed in range(20):
        path.write_bytes(bytes(100))
        spoil(path, how, random.Random(seed))
        data = path.read_bytes()
        assert len(data) < 100 if how == "truncate" else sum(byte.bit_count() for byte in data) == 1


def test_the_table_has_a_line_per_fault() -> None:
    outcomes = [
        {"kind": kind, "verdict": verdict, "restarts": 1, "lost": lost, "seconds": 10.0}
        for kind, verdict, lost in (("hang", "passed", 2), ("hang", "failed", 3), ("SIGTERM", "passed", 0))
    ]
    lines = table(outcomes).splitlines()[2:]
    assert lines == ["| SIGTERM | 1 | 1 | 1 | 0 | 10 |", "| hang | 2 | 1 | 1 | 3 | 10 |", "| all | 3 | 2 | 1 | 3 | 10 |"]


@pytest.mark.slow
def test_a_few_runs(tmp_path: Path) -> None:
    """One rank and two, killed, stopped, damaged, with a bad step; a second call has nothing left to do."""
    campaign = Campaign(tmp_path / "chaos")
    kinds = {"kill a rank", "SIGTERM", "damaged checkpoint", "poisoned batch", "full disk", "skip window", "kill between"}
    seeds, wanted = [], kinds & set(campaign.kinds)
    for seed in range(100):
        plan = draw(seed, campaign.kinds)
        if plan.kind in wanted and plan.ranks <= 2:
            wanted.remove(plan.kind)
            seeds.append(seed)
    campaign.run(seeds, jobs=1)
    lines = (campaign.out / "outcomes.jsonl").read_text().splitlines()
    assert len(lines) == len(seeds)
    assert all('"verdict":"passed"' in one for one in lines), lines
    assert not list(campaign.out.glob("run-*/ledger.jsonl"))
    campaign.run(seeds, jobs=1)
    assert (campaign.out / "outcomes.jsonl").read_text().splitlines() == lines
