"""`time`: minutes become plain numbers before the first step. The speed is said (`LMWORKS_MACHINE`), and so low that hours are planned:
what a test itself takes is nothing beside them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Done, Lmworks

from lmworks.errors import UserError
from lmworks.io.files import read_json
from lmworks.recipe import scaling_laws
from lmworks.recipe.load import load_recipe, load_resolved
from lmworks.recipe.parameters import count_active_parameters, count_parameters
from lmworks.run import time_budget
from lmworks.shards.batches import Batches
from lmworks.train import calibrate
from lmworks.ui.amounts import amount
from lmworks.watch.ledger import read_ledger
from tiny_run import Tiny, before_each_step, checkpoint, curve, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
HOURS = "40h"  # some times what the tiny recipe's own budgets take at the speed below
SPEED = 1e5


class Runs:
    """`lmworks pretrain` of the tiny recipe on a machine of some speed, stopped by `stop_at` before that step."""

    def __init__(self, lmworks: Lmworks, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.lmworks, self.tiny, self.monkeypatch, self.tmp_path = lmworks, tiny, monkeypatch, tmp_path

    def fresh(self, name: str) -> Path:
        return self.tiny.copy(self.tmp_path / name).run_dir

    def __call__(self, run_dir: Path, *words: str, speed: float = SPEED, stop_at: int | None = 0, command: str = "pretrain") -> Done:
        def stop(step: int) -> None:
            if step == stop_at:
                raise UserError("the power went")

        with self.monkeypatch.context() as patch:
            patch.setenv("LMWORKS_MACHINE", f"peak=1e11,speed={speed}")
            before_each_step(patch, stop)
            done = self.lmworks(command, self.tiny.recipe, "--set", f"run_dir={run_dir}", *words)
        assert (done.code, "the power went" in done.err) == ((2, True) if stop_at is not None else (0, False)), done.err
        return done


@pytest.fixture
def runs(lmworks: Lmworks, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runs:
    return Runs(lmworks, tiny, monkeypatch, tmp_path)


def budgets(run_dir: Path) -> dict[str, int]:
    """Tokens by phase, and of tuning."""
    recipe = load_resolved(run_dir / "resolved.json")
    tuning = int(recipe.tune.planned_tokens) if recipe.tune else 0
    return {phase.name: int(phase.tokens) for phase in recipe.train.phases} | {"tune": tuning}


def event(run_dir: Path, name: str = "budget") -> dict[str, Any]:
    (found,) = [line for line in read_ledger(run_dir / "ledger.jsonl") if line["event"] == name]
    return found


def test_twice_the_speed_is_twice_the_tokens_in_plain_numbers(runs: Runs) -> None:
    one, two = runs.fresh("one"), runs.fresh("two")
    said = runs(one, "--time", HOURS).out
    runs(two, "--time", HOURS, speed=2 * SPEED)
    slow, fast = budgets(one), budgets(two)
    assert {name: fast[name] / slow[name] for name in slow} == pytest.approx(dict.fromkeys(slow, 2.3), rel=0.15), "fixed costs once"
    assert {name: slow[name] % 256 for name in slow} == dict.fromkeys(slow, 0), "whole steps"
    assert slow["general"] / slow["long"] == pytest.approx(3008 / 2048, rel=0.1)
    tree = read_json(one / "resolved.json")
    assert [phase["tokens"] for phase in tree["train"]["phases"]] == [f"{slow['general']} tokens", f"{slow['long']} tokens"]
    found = event(one)
    assert [number["new"] for number in found["numbers"]] == [f"{tokens} tokens" for tokens in slow.values()]
    assert "times 3008 tokens for 40.0 hours: 1e+05 FLOP/s, as given by LMWORKS_MACHINE" in found["numbers"][0]["why"]
    assert sum(found["planned"].values()) == pytest.approx(0.97 * 40 * 3600, rel=0.01)
    assert f"{found['planned']['pretrain']:.0f} s" in said
    shown = runs.lmworks("show", runs.tiny.recipe, "--set", f"run_dir={one}", "--time", HOURS, "--json")
    assert json.loads(shown.out)["origins"]["train.phases.general.tokens"] == f"derived: {found['numbers'][0]['why']}"


def test_a_started_run_keeps_its_numbers_on_a_machine_of_another_speed(runs: Runs) -> None:
    ours, plain = runs.fresh("ours"), runs.fresh("plain")
    time = ("--time", "15h")
    runs(ours, *time, stop_at=6)  # behind the checkpoint of step 4
    given, first = budgets(ours), (ours / "resolved.json").read_bytes()
    runs(ours, *time, speed=50 * SPEED, stop_at=None)
    assert (ours / "resolved.json").read_bytes() == first
    event(ours)  # there is one
    numbers = [word for name in ("general", "long") for word in ("--set", f"train.phases.{name}.tokens={given[name]} tokens")]
    runs(plain, *numbers, stop_at=None)
    assert same_bits(checkpoint(ours), checkpoint(plain)) == []
    assert curve(ours) == curve(plain)


def test_a_run_that_has_begun_refuses_another_time_and_one_that_has_not_takes_it(runs: Runs) -> None:
    run_dir = runs.fresh("run")
    runs(run_dir, "--time", HOURS)
    before = budgets(run_dir)
    runs(run_dir, "--time", HOURS, speed=2 * SPEED)
    assert budgets(run_dir) == before, "numbers that were given are kept, also where nothing was trained yet"
    runs(run_dir, "--time", "60h", stop_at=6)
    after = budgets(run_dir)
    assert after["general"] > 1.3 * before["general"]
    again = [runs.tiny.recipe, "--set", f"run_dir={run_dir}"]
    refused = runs.lmworks("pretrain", *again, "--time", "50h").error
    assert "time (216000 s -> 180000 s)" in refused and "--allow time" in refused and "tokens" not in refused
    assert "train.phases.general.tokens" in runs.lmworks("pretrain", *again).error, "without a time its numbers are others"
    assert budgets(run_dir) == after


def test_rates_follow_the_tokens_where_the_recipe_leaves_them_open(runs: Runs) -> None:
    run_dir = runs.fresh("run")
    runs(run_dir, "--time", HOURS, "--set", "optimizer.learning_rate=null")
    recipe, tokens = load_resolved(run_dir / "resolved.json"), budgets(run_dir)
    model = recipe.model
    assert model.vocab_size and model.hidden_size
    hidden = count_parameters(model) - 2 * model.vocab_size * model.hidden_size
    assert recipe.optimizer.learning_rate == scaling_laws.peak_learning_rate(hidden, tokens["general"] + tokens["long"])
    assert recipe.optimizer.adam_learning_rate == 0.01, "as it is written"


@pytest.mark.parametrize(
    ("time", "lost"),
    [("40h", []), ("17h", ["questions (50 -> 10 per task)"]), ("16h", ["questions (50 -> 10 per task)", "tuning, so there is"]),
     ("1h", ["questions (50 -> 10 per task)", "tuning, so there is", "the time limit: with the minimum of 20 steps per phase it"])],
)  # fmt: skip
def test_what_is_given_up_where_time_is_short(runs: Runs, time: str, lost: list[str]) -> None:
    run_dir = runs.fresh("run")
    said = runs(run_dir, "--time", time, "--set", "evaluate.tasks=[spell_backward]").out
    found = event(run_dir)["given_up"]
    assert [text[: len(start)] for text, start in zip(found, lost, strict=True)] == lost
    assert ("given up for the time of" in said) == bool(lost)
    assert "; ".join(found) in " ".join(said.split())
    recipe = load_resolved(run_dir / "resolved.json")
    assert recipe.evaluate.task_items == (10 if lost else 50)
    assert (recipe.tune is None) == (len(lost) > 1)
    assert all(phase.tokens >= 20 * phase.global_batch_tokens for phase in recipe.train.phases)


def test_tuning_that_was_given_up_is_told_at_the_end_and_by_every_later_command(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = runs.fresh("run")
    told = "given up for the time of 60.0 minutes: tuning, so there is no tuned model; the time limit: with the minimum"
    words = [runs.tiny.recipe, "--set", f"run_dir={run_dir}", "--time", "1h"]
    monkeypatch.setenv("LMWORKS_MACHINE", f"peak=1e11,speed={SPEED}")
    assert "tuning was given up for the time of 60.0 minutes; give it a budget" in runs.lmworks("tune", *words).error
    assert not (run_dir / "checkpoints").exists(), "asked for, it is refused before anything is trained"
    for _ in range(2):
        before, _, after = " ".join(runs.lmworks("run", *words).out.split()).partition("Where everything is")
        assert told in before
        assert told in after
    assert "tuning was given up" in runs.lmworks("tune", *words).error
    own = runs.lmworks("run", *words, "--set", "tune.tokens=512 tokens").out
    assert "no tuned model" not in own and (run_dir / "tune" / "checkpoints").is_dir(), "with a budget of its own it is made after all"


LONG = "1000000 steps"
CHANGE = "train.phases.general.mixture_changes=[{at: 100000 tokens, mixture: {docs: 1.0}}]"


@pytest.mark.parametrize(
    ("words", "speed", "said"),
    [(["train.phases.general.lr_schedule={warmup: 1000000 steps}"], SPEED, "phase general: lr_schedule.warmup of 1000000 steps is longer"),
     (["tune.lr_schedule={warmup: 1000000 steps}"], SPEED, "phase tune: lr_schedule.warmup of 1000000 steps is longer than the phase's "),
     (["train.phases.long.qk_norm_steps=1000000 steps"], SPEED, "phase long: qk_norm_steps of 1000000 steps are 1,000,000 steps,"),
     (["model.moe.temperature=8", "model.moe.temperature_steps=1000000"], SPEED, "model.moe.temperature_steps 1,000,000 are not over when"),
     ([CHANGE], SPEED, "phase general: the mixture change at 100000 tokens falls on step"),
     ([CHANGE, "shards.max_epochs=1.5"], 1e9, "phase general: the mixture change at 100000 tokens falls on step")],
    ids=["warmup", "tuning", "qk_norm", "temperature", "mixture", "little_text"],
)  # fmt: skip
def test_what_does_not_scale_with_the_budgets_is_refused_before_anything_is_trained(
    runs: Runs, words: list[str], speed: float, said: str
) -> None:  # fmt: skip
    run_dir = runs.fresh("run")
    runs.monkeypatch.setenv("LMWORKS_MACHINE", f"peak=1e11,speed={speed}")
    sets = [word for one in words for word in ("--set", one)]
    refused = runs.lmworks("run", runs.tiny.recipe, "--set", f"run_dir={run_dir}", "--time", HOURS, *sets).error
    assert refused.startswith(f"time: with the token budgets for 40.0 hours, {said}")
    assert not (run_dir / "checkpoints").exists()
    assert "budget" not in {line["event"] for line in read_ledger(run_dir / "ledger.jsonl")}, "the next command may take other numbers"


@pytest.mark.parametrize(
    ("words", "why"),
    [(["tune.lr_schedule={warmup: 20 steps}"], "a warm-up longer than the 8 steps of the proportion"),
     (["tune.tokens=100 tokens"], "a proportion smaller than a step"),
     (["train.phases.general.lr_schedule={warmup: 20 steps}"], "of a phase"),
     ([CHANGE, "shards.max_epochs=1000"], "a change of the mixture behind the fewest steps")],
    ids=["warmup", "tokens", "phase", "mixture"],
)  # fmt: skip
def test_the_proportions_of_a_time_are_refused_nothing(runs: Runs, words: list[str], why: str) -> None:
    run_dir = runs.fresh("run")
    sets = ["--time", HOURS, *(word for one in words for word in ("--set", one))]
    shown = runs.lmworks("show", runs.tiny.recipe, "--set", f"run_dir={run_dir}", *sets)
    assert shown.code == 0, shown.err
    runs(run_dir, *sets, speed=10 * SPEED)
    found = budgets(run_dir)
    assert found["tune"] > 20 * 256 and found["general"] > 100_000, why


def test_a_run_that_has_its_budgets_is_held_to_them(runs: Runs) -> None:
    run_dir = runs.fresh("run")
    runs(run_dir, "--time", HOURS)
    words = [runs.tiny.recipe, "--set", f"run_dir={run_dir}", "--time", HOURS, "--set", f"train.phases.general.lr_schedule.warmup={LONG}"]
    for command in ("show", "pretrain", "plan"):
        assert f"phase general: lr_schedule.warmup of {LONG} is longer" in runs.lmworks(command, *words).error


def test_another_time_of_a_run_that_has_begun_is_that_of_another_run(runs: Runs) -> None:
    """Neither the budgets of the run, nor the proportions of an open size, stand for an answer. The run itself would refuse it."""
    run_dir = runs.fresh("run")
    (run_dir / "checkpoints" / "step-00000004").mkdir(parents=True)
    words = (runs.tiny.recipe, "--set", f"run_dir={run_dir}", "--json")

    def said(command: str, *more: str) -> dict[str, Any]:
        done = runs.lmworks(command, *words, *more)
        assert done.code == 0, done.err
        return json.loads(done.out)

    other = f"{run_dir} has begun without a time and keeps its budgets, so this is for another run (--set run_dir=DIR); time is 40.0 hours"
    cluster = ("--cluster", "8xh100")
    assert said("show")["note"] == said("plan", *cluster)["note"] == ""
    assert said("show", "--time", HOURS)["note"].startswith(other)
    for size in ((), ("--size", "auto")):
        found = said("plan", "--time", HOURS, *cluster, *size)
        assert found["note"].startswith(other)
        assert found["seconds"] == pytest.approx(40 * 3600, rel=0.01) and found["budget"]["seconds"] == 40 * 3600
    runs.tiny.resolve(f"run_dir={run_dir}", f"time={HOURS}").save(run_dir)
    assert "has begun with a time of 40.0 hours and keeps its budgets" in said("show", "--time", "50h")["note"]
    own = said("plan", "--time", HOURS, *cluster)
    assert own["note"] == f"time is 40.0 hours: {run_dir} has its token budgets for it already, and keeps them on any machine"
    assert "budget" not in own
    assert "has begun at a size of its own" in said("show", "--time", HOURS, "--size", "auto")["note"]


def test_epochs_of_tuning_take_the_time_of_their_data(runs: Runs) -> None:
    epochs = ("--set", "tune.tokens=null", "--set", "tune.epochs=2")
    planned = {}
    for name, data in (("few", "tune.data.sums.max_rows=20"), ("many", "tune.data.sums.max_rows=200"), ("counted", "seed=5")):
        run_dir = runs.fresh(name)
        if name == "counted":  # before the run the tokens are estimated, because the tokenizer is trained by it
            shutil.rmtree(run_dir / "tokenizer")
            data = "tune.data.sums.max_rows=200"
        runs(run_dir, "--time", "400h", *epochs, "--set", data)
        planned[name] = event(run_dir)["planned"]["tune"]
        assert event(run_dir)["given_up"] == []
    assert planned["many"] / planned["few"] == pytest.approx(10, rel=0.3), "rows, and what a validation takes"
    assert planned["counted"] == planned["many"]


def test_tuning_whose_data_are_not_read_before_is_not_predicted(runs: Runs) -> None:
    run_dir = runs.fresh("run")
    data = "tune.data=[{name: sums, kind: tasks, tasks: [chain_sum], max_rows: 100}]"
    runs(run_dir, "--time", HOURS, "--set", "tune.tokens=null", "--set", "tune.epochs=2", "--set", data)
    found = event(run_dir)
    assert "tune" not in found["planned"]
    assert found["given_up"] == ["the time of tune, which is not predicted and comes on top"]


@pytest.mark.parametrize("budget", ["tune.tokens=2Ki", "tune.epochs=2"])
def test_tuning_that_was_given_up_is_made_with_the_budget_that_is_advised(runs: Runs, budget: str) -> None:
    run_dir = runs.fresh("run")
    words = ["--time", "1h", "--set", "tune.tokens=null", "--set", budget]
    runs.monkeypatch.setenv("LMWORKS_MACHINE", f"peak=1e11,speed={SPEED}")
    refused = runs.lmworks("tune", runs.tiny.recipe, "--set", f"run_dir={run_dir}", *words).error
    advice = refused.partition("such as ")[2].partition(", or")[0].split()
    before = event(run_dir)
    runs(run_dir, *words, *advice, command="tune")
    assert event(run_dir) == before, "the other budgets are kept"
    assert budgets(run_dir)["tune"] == 100_000


def test_a_stage_planned_to_take_no_time_has_no_predicted_speed(runs: Runs) -> None:
    run_dir = runs.fresh("run")
    runs(run_dir, "--time", "60s", "--set", "tune=null", "--set", "shards.max_epochs=6", speed=1e13)
    assert event(run_dir)["planned"]["pretrain"] == 0
    found = event(run_dir, "prediction")
    assert set(found["figures"]) == {"seconds", "perf/memory", "checkpoint_bytes"}
    assert "0 s (the speed that was measured for the time budget)" in (run_dir / "report.html").read_text()


def test_the_order_in_which_things_are_given_up() -> None:
    recipe = load_recipe("quickstart").recipe
    reductions = [keys for keys, *_ in time_budget._reductions(recipe, 600)]
    assert reductions == [("evaluate", "benchmark_items"), ("evaluate", "task_items"), ("tune",)]


def test_a_fast_machine_does_not_learn_a_small_text_by_heart(runs: Runs) -> None:
    run_dir = runs.fresh("run")
    runs(run_dir, "--time", HOURS, "--set", "shards.max_epochs=6", speed=1e9)
    assert event(run_dir)["given_up"] == ["part of the time stays unused: no source is read more than 6 times (shards.max_epochs)"]
    shares = Batches(load_resolved(run_dir / "resolved.json"), run_dir / "shards").order.shares()
    assert 5.5 < max(share.epochs for share in shares) <= 6


def test_a_time_that_is_over_before_training_is_refused(runs: Runs) -> None:
    run_dir = runs.fresh("run")
    refused = runs.lmworks("run", runs.tiny.recipe, "--set", f"run_dir={run_dir}", "--time", "0.001s").error
    assert "are not enough, preparing the data alone took" in refused and "run the same command again" in refused
    assert not (run_dir / "checkpoints").exists()
    assert "add time: 10min" in runs.lmworks("show", runs.tiny.recipe, "--size", "auto").error


def test_the_size_follows_from_the_speed(runs: Runs) -> None:
    active = []
    words = ("--time", "60h", "--size", "auto", "--set", "shards.max_epochs=1e6")
    for name, speed in (("one", 4e9), ("four", 16e9)):
        run_dir = runs.fresh(name)
        runs(run_dir, *words, speed=speed)
        tree, recipe = read_json(run_dir / "resolved.json"), load_resolved(run_dir / "resolved.json")
        size = tree["size"]
        assert size == amount(scaling_laws.parse_size(size)) != "auto"
        tokens = sum(phase.tokens for phase in recipe.train.phases)
        active.append(count_active_parameters(recipe.model))
        assert tokens / active[-1] == pytest.approx(20, rel=0.3), "shapes come in steps"
        assert [int(phase.sequence_length) for phase in recipe.train.phases] == [32, 64]
        told = runs(run_dir, *words).out
        assert told.count("done before") == 3, "corpus, tokenizer and shards know nothing of the size"
    assert active[1] / active[0] == pytest.approx(2, rel=0.3)


def test_the_summary_has_what_was_planned_beside_what_it_took(runs: Runs) -> None:
    run_dir = runs.fresh("run")
    said = runs(run_dir, "--time", "19h", stop_at=None, command="run").out
    found = event(run_dir, "time")
    assert list(found["planned_and_actual"]) == ["data, start and measuring", "pretrain", "tune", "evaluate", "export"]
    assert all(planned >= 0 and took is not None for planned, took in found["planned_and_actual"].values())
    assert "Where the time went" in said and f"{found['planned_and_actual']['pretrain'][0]:.0f}" in said
    predicted = {line["stage"]: line["tokens"] for line in read_ledger(run_dir / "ledger.jsonl") if line["event"] == "prediction"}
    assert predicted["tune"] == budgets(run_dir)["tune"], "not those of the proportion"


def test_a_run_without_a_time_is_as_it_was(runs: Runs) -> None:
    run_dir = runs.fresh("run")
    before = read_json(run_dir / "resolved.json") | {"run_dir": str(run_dir)}
    runs(run_dir)
    assert read_json(run_dir / "resolved.json") == before
    assert before["time"] is None
    assert not (run_dir / "ledger.jsonl").exists() or not {"budget", "time"} & {e["event"] for e in read_ledger(run_dir / "ledger.jsonl")}


@pytest.mark.parametrize(
    ("speeds", "fewest"), [({4: 100.0, 2: 98.0, 1: 60.0}, 2), ({4: 100.0, 2: 60.0}, 4), ({4: 50.0, 2: 90.0, 1: 100.0}, 1)]
)
def test_threads_that_gain_nothing_are_not_used(speeds: dict[int, float], fewest: int) -> None:
    assert calibrate.fewest_threads(speeds) == fewest


class Threads:
    """`lmworks pretrain --time 60s` on a machine of 4 cores whose speed is `speeds` by threads; returns those that the first step has."""

    def __init__(self, lmworks: Lmworks, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lmworks, self.tiny, self.monkeypatch = lmworks, tiny, monkeypatch
        self.speeds: dict[int, float] = {}

    def __call__(self, run_dir: Path, threads: str = "null", cores: int = 4, stop_at: int = 0) -> int:
        found: list[int] = []

        def stop(step: int) -> None:
            found.append(torch.get_num_threads())
            if step == stop_at:
                raise UserError("the power went")

        tried = iter(self.speeds.values())
        step_seconds = calibrate._Model.step_seconds

        def seconds(model: Any, batch: Any, patience: float, bar: Any) -> list[float]:
            speed = next(tried, None)  # where it is said, no step is made: threads that wait for those of other programs burn seconds
            return [batch.tokens.size / speed] if speed else step_seconds(model, batch, 0.0, bar)

        with self.monkeypatch.context() as patch:
            patch.setenv("LMWORKS_MACHINE", f"peak=1e11,cores={cores}")
            patch.setattr(calibrate._Model, "step_seconds", seconds)
            before_each_step(patch, stop)
            words = ("--set", f"run_dir={run_dir}", "--set", f"threads={threads}", "--set", "train.save_every=1 steps", "--time", "60s")
            done = self.lmworks("pretrain", self.tiny.recipe, *words)
        assert "the power went" in done.err, done.err
        return found[-1]


@pytest.fixture
def threads(lmworks: Lmworks, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Iterator[Threads]:
    before = torch.get_num_threads()
    yield Threads(lmworks, tiny, monkeypatch)
    torch.set_num_threads(before)


def test_a_run_with_a_time_trains_with_the_fewest_threads_that_are_as_fast(runs: Runs, threads: Threads) -> None:
    run_dir = runs.fresh("run")
    threads.speeds = {4: 1000.0, 2: 990.0, 1: 700.0}
    assert threads(run_dir, stop_at=2) == 2  # behind a checkpoint
    number = event(run_dir)["numbers"][0]
    assert (number["key"], number["old"], number["new"]) == ("threads", 4, 2)
    assert number["why"].endswith("1,000 tokens/s with 4, 990 tokens/s with 2, 700 tokens/s with 1")
    assert load_resolved(run_dir / "resolved.json").threads == 2
    assert threads(run_dir, cores=8, stop_at=3) == 2, "kept on a machine of other cores"


def test_threads_that_the_recipe_says_are_not_measured(runs: Runs, threads: Threads) -> None:
    run_dir = runs.fresh("run")
    threads.speeds = {2: 1000.0}
    assert threads(run_dir, "2") == 2
    assert all(number["key"] != "threads" for number in event(run_dir)["numbers"])
