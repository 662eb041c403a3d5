"""The profile of several ranks: how what they measured is joined, what is said of it, and how they are started; and what reaches the
measurement."""

from __future__ import annotations

import io
import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from lmworks.errors import UserError
from lmworks.parallel.mesh import Ranks
from lmworks.profile import run, spawn
from lmworks.profile.allocations import exposed
from lmworks.profile.measure import Measured
from lmworks.profile.render import render
from lmworks.profile.report import Profile, make_profile
from lmworks.profile.target import Target, open_target
from lmworks.ui.amounts import span
from patience import PATIENCE
from written_run import RECIPE, command_line

TWO = ("layout.dp_shard=2", "layout.zero=3", "train.validate_every=10 steps", "train.save_every=10%")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "written.yaml"
    path.write_text(RECIPE)
    return path


def rank(number: int, waits: float, memory: float, walls: Sequence[float] = (1.0,), **more: Any) -> Measured:
    """What a rank of a run of 100 steps has measured: in a step it waits for so long, and computes forward for a second less."""
    nothing = dict.fromkeys(("data", "rollouts", "scoring", "backward", "optimizer", "gap"), 0.0)
    parts = nothing | {"forward": 1.0 - waits, "collectives": waits}
    return Measured(
        number, f"host-{number}", "CPU", length=64, rows=16, phase="main", stage_steps=100, stage_tokens=102_400, tokens_per_step=1024.0,
        micro_batch_size=8, flops_per_step=2e9, peak_flops=1e10, steps=[parts | {"step": wall, "wall": wall} for wall in walls],
        memory={"weights": memory}, memory_peak=memory, data={"reads": 4, "read_bytes": 4096.0, "read_seconds": 1.0, "tokens": 4096.0},
        **more,
    )  # fmt: skip


def joined(recipe: Path, *found: Measured, overrides: Sequence[str] = TWO) -> Profile:
    target = open_target(str(recipe), [f"run_dir={recipe.parent}/run", *overrides], None, None, None)
    return make_profile(target, found, len(found[0].steps))


def test_memory_is_of_the_rank_with_most_and_time_of_the_one_that_works_longest(recipe: Path) -> None:
    found = joined(recipe, rank(0, 0.1, 1e6), rank(1, 0.4, 5e6, walls=(1.1,)))
    assert found.slowest == 0, "the other one is longer under way, and waits for it"
    assert found.memory["weights"].measured == 5e6 and found.memory_peak == 5e6
    assert found.time["forward"].measured == pytest.approx(0.9) and found.time["collectives"].measured == pytest.approx(0.1)
    assert found.mfu == pytest.approx(2e9 / (2 * 1e10)), "of the peak of both"
    assert found.data["needed_bytes_per_second"] == pytest.approx(2 * 1024), "of both"


def test_memory_that_was_freed_before_the_model_was_made_is_counted_once(recipe: Path) -> None:
    """It is read from a file: the process is larger before it trains than the runtime that it needs."""
    kinds = {"weights": 5e6, "activations": 1e6}
    for runtime, peak, expected in ((9e6, 10e6, 4e6), (4e6, 10e6, 4e6), (3e6, 10e6, 3e6), (2e6, 5e6, 0.0)):
        found = joined(recipe, replace(rank(0, 0.0, 0.0), memory=kinds | {"runtime": runtime}, memory_peak=peak), overrides=())
        measured = {name: item.measured for name, item in found.memory.items() if item.measured}
        assert measured.pop("other", 0.0) == max(0.0, 4e6 - expected) * (peak == 10e6)
        assert measured == kinds | ({"runtime": expected} if expected else {})


def test_a_wait_inside_of_a_part_is_a_collective_and_counted_once(recipe: Path) -> None:
    found = joined(recipe, rank(0, 0.0, 1e6, exposed={"forward": 0.25}), rank(1, 0.5, 1e6))
    assert found.time["forward"].measured == pytest.approx(0.75) and found.time["collectives"].measured == pytest.approx(0.25)


def test_validation_and_save_are_divided_by_the_steps_between_two(recipe: Path) -> None:
    found = joined(recipe, rank(0, 0.5, 1e6, validation=5.0, save=30.0), rank(1, 0.5, 1e6))
    assert found.time["validation"].measured == pytest.approx(0.5) and found.time["save"].measured == pytest.approx(3.0)
    remedy = found.largest_time.remedy
    assert found.largest_time.name == "save" and remedy is not None and remedy.change in (
        "train.save_every='20%'", "checkpoints.asynchronous=true",
    )  # fmt: skip
    later = joined(recipe, rank(0, 0.5, 1e6, save=30.0), rank(1, 0.5, 1e6), overrides=[*TWO, "checkpoints.asynchronous=true"])
    assert later.largest_time.remedy is not None and later.largest_time.remedy.change == "train.save_every='20%'"


def test_the_parts_of_a_step_sum_up_to_it(recipe: Path) -> None:
    """Though what is slow in one step is fast in the next; and in the table, with validation and save, which the step has not."""
    one = rank(0, 0.0, 1e6, validation=5.0, save=30.0)
    slow = [("forward",), ("backward",), ("forward", "backward", "gap"), ("optimizer",), ()]
    parts = [dict.fromkeys(one.steps[0], 0.01) | dict.fromkeys(part, 1.0) | {"collectives": 0.0} for part in slow]
    names = ("data", "rollouts", "scoring", "forward", "backward", "optimizer", "gap")
    steps = [step | dict.fromkeys(("step", "wall"), sum(step[name] for name in names)) for step in parts]
    found = joined(recipe, replace(one, steps=steps), overrides=TWO[2:])
    inside = {name: item.measured for name, item in found.time.items() if name not in ("validation", "save")}
    assert sum(inside.values()) == pytest.approx(found.step_seconds) == pytest.approx(sum(step["wall"] for step in steps) / 5)
    with (out := Console(file=io.StringIO(), width=200)).capture() as said:
        out.print(render(found))
    table = said.get().partition("Time of a step")[2].strip().partition("MFU")[0]
    rows = {name: cells for name, *cells in (re.split("  +", line.strip()) for line in table.splitlines())}
    wholes = sum(item.planned or 0.0 for item in found.time.values()), sum(item.measured for item in found.time.values())
    assert rows["without validation and save"][:2] == [span(found.planned_step_seconds or 0.0), span(found.step_seconds)]
    assert rows["all"][:2] == [span(value) for value in wholes]


def test_a_size_that_is_not_chosen_yet_is_not_profiled(recipe: Path) -> None:
    with pytest.raises(UserError, match="size: auto has no shape before the run has chosen a size"):
        open_target(str(recipe), [f"run_dir={recipe.parent}/run", "time=1h"], "auto", None, None)


def test_the_spread_is_relative_to_the_step(recipe: Path) -> None:
    walls = [10.0, 10.0, 10.0, 11.0, 11.0, 11.0, 12.0, 12.0, 12.0]
    found = joined(recipe, rank(0, 0.1, 1e6, walls=walls), rank(1, 0.1, 1e6, walls=walls))
    assert found.spread == pytest.approx(2 / 11, abs=0.01)


def test_the_command_starts_ranks_that_answer_in_json_and_shows_them(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Sequence[str], int]] = []
    slow_save = rank(0, 0.1, 1e6, save=30.0)
    answer = json.dumps(joined(recipe, slow_save, rank(1, 0.4, 5e6)).plain())
    monkeypatch.setattr(spawn, "run_ranks", lambda words, ranks: asked.append((words, ranks)) or answer)
    sets = [word for one in (f"run_dir={recipe.parent}/run", *TWO) for word in ("--set", one)]
    code, out, _ = command_line(monkeypatch, capsys, "profile", recipe, *sets, "--steps", "3")
    assert code == 0 and asked == [(["profile", str(recipe), *sets, "--steps", "3", "--json"], 2)]
    assert "0 on host-0" in out and "slowest by its own work" in out
    said = " ".join(out.split())
    assert re.search(r"largest: save, [^;]+; --set ", said), "an item that is worth a change"
    assert re.search(r"largest: waiting for batches, [^;]+; less than ", said), "and one that is not"
    code, out, _ = command_line(monkeypatch, capsys, "profile", recipe, *sets, "--json")
    assert code == 0 and asked[1][0].count("--json") == 1 and json.loads(out) == json.loads(answer)


def test_a_layout_that_is_too_large_for_this_machine_starts_no_rank(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LMWORKS_MACHINE", "cores=2,peak=1e11")
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a rank was started"))
    sets = ("--set", f"run_dir={recipe.parent}/run", "--set", "layout.dp_shard=16")
    code, _, err = command_line(monkeypatch, capsys, "profile", recipe, *sets)
    assert code == 2 and "the layout has 16 ranks, and this machine has room for 8" in err


def test_a_rank_that_fails_ends_all_and_the_one_with_an_error_of_its_own_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second loses its peer, which comes out as a bug before the first has said why it left."""
    program = (
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('error: RuntimeError: connection closed; this is a bug in lmworks')\n"
        "time.sleep(0.5); sys.exit('error: the disk is full; delete files')"
    )
    popen = subprocess.Popen
    monkeypatch.setattr(spawn, "require_room", lambda ranks: None)
    monkeypatch.setattr(spawn, "_AFTER", PATIENCE)
    monkeypatch.setattr(subprocess, "Popen", lambda command, **given: popen([command[0], "-S", "-c", program], **given))
    with pytest.raises(UserError, match=r"^rank 0: the disk is full; delete files$"):
        spawn.run_ranks(["profile", "x.yaml"], 2)


def node(name: str, start: int, end: int, *children: Any) -> Any:
    return SimpleNamespace(name=name, start_time_ns=start, end_time_ns=end, children=children, typed=("TorchOp", None))


def test_a_collective_costs_the_time_in_which_nothing_is_computed() -> None:
    tree = [
        node("lmworks: forward and backward", 0, 100, node("lmworks: forward", 0, 40, node("aten::mm", 0, 40)), node("aten::mm", 40, 80)),
        node("gloo:all_reduce", 30, 90),
    ]  # fmt: skip
    found = exposed(tree)
    assert found["forward"] == 0.0 and found["forward and backward"] == pytest.approx(10 / 60) and found[""] == 0.0


def test_a_profile_measures_what_was_asked_for_and_sends_copies_and_deletes_nothing(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def measure(work: Target, ranks: Ranks, warm_up: int, timed: int, trace_events: int) -> Measured:
        asked.extend((work.recipe, warm_up, timed, trace_events))
        raise UserError("that is enough")

    monkeypatch.setattr(run, "_measure", measure)
    monkeypatch.setattr(run, "MOST", 300)
    sets = (f"run_dir={recipe.parent}/run", f"checkpoints.copy_to={recipe.parent}/copies", "checkpoints.keep_last=1")
    words = [word for one in (*sets, "metrics.wandb_project=x") for word in ("--set", one)]
    code, _, err = command_line(
        monkeypatch, capsys, "profile", recipe, *words, "--steps", "3", "--warm-up", "2", "--trace", recipe.parent / "trace.json"
    )
    assert code == 2 and "that is enough" in err
    work, *numbers = asked
    assert numbers == [2, 3, 300]
    assert work.checkpoints.copy_to is None and work.checkpoints.keep_last > 100 and work.metrics.wandb_project is None
    assert [path.name for path in recipe.parent.iterdir()] == [recipe.name]


def test_memory_that_runs_out_is_shown_as_a_table(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pretrain(context: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12")

    monkeypatch.setitem(run._STAGES, "pretrain", pretrain)
    words = ("--set", f"run_dir={recipe.parent}/run")
    code, out, err = command_line(monkeypatch, capsys, "profile", recipe, *words)
    assert code == 2 and "memory ran out in pretrain at step 0" in err
    assert "Memory when it ran out, in the start of the stage of step 0" in " ".join(out.split())
    code, out, _ = command_line(monkeypatch, capsys, "profile", recipe, *words, "--json")
    assert code == 2 and json.loads(out)["requested"] == 4096
