"""From the values of runs to verdicts, tables and the page, on values that are given."""

from __future__ import annotations

import html
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from given_results import BITS, ONE_PHASE, results

from lmworks.ablate.document import document, markdown, save
from lmworks.ablate.measures import Curve
from lmworks.ablate.results import Results
from lmworks.ablate.run_set import save_arms
from lmworks.ablate.verdict import judge
from lmworks.errors import UserError
from lmworks.pages.ablation_page import FILE, write_ablation_page
from tiny_run import Tiny


def verdict(found: Results, arm: str) -> dict[str, Any]:
    return next(one for one in document(found)["verdicts"] if one["arm"] == arm)


def test_lower_bits_per_byte_are_better(tiny: Tiny, tmp_path: Path) -> None:
    found = results(tiny, tmp_path, {"base": [2.0, 2.1, 1.9], "good": [1.5, 1.61, 1.4], "bad": [2.5, 2.6, 2.41], "same": [2.0, 2.1, 2.0]})
    words = {name: verdict(found, name)["verdict"] for name in ("good", "bad", "same")}
    assert words == {"good": "better", "bad": "worse", "same": "no difference shown"}
    same = verdict(found, "same")
    written = document(found)
    assert not same["paired"] and "80% power to find a difference of" in same["why"]
    assert same["tokens_needed"] == same["seeds_needed"] * 2 * written["arms"]["same"]["tokens"]
    table = written["measures"][BITS]
    assert table["quality"]["trust"] and table["noise"]["paired"]["sd"] < table["noise"]["unpaired"]["sd"]


def test_few_seeds_are_not_paired(tiny: Tiny, tmp_path: Path) -> None:
    """Two arms with three seeds would leave two degrees of freedom. With eight seeds, pairing has seven, and removes what seeds share."""
    shared, own = np.linspace(-0.1, 0.1, 8), np.array([1, -1, -1, 1, 1, -1, -1, 1]) * 0.01
    for seeds, is_paired, df in ((3, False, 4), (8, True, 7)):
        values = {"base": list(2 + shared[:seeds]), "good": list(1.9 + (shared + own)[:seeds])}
        (folder := tmp_path / str(seeds)).mkdir()
        found = document(results(tiny, folder, values))
        (one,) = found["verdicts"]
        floor = found["measures"][BITS]["noise"]["paired" if is_paired else "unpaired"]["sd"]  # of two arms: their own
        assert (one["paired"], round(one["df"]), found["measures"][BITS]["noise_floor"]) == (is_paired, df, floor)
        assert one["noise"] == pytest.approx(floor)
        assert ("not paired by seed, because so few seeds" in markdown(found)) is not is_paired
    assert one["verdict"] == "better", "the spread over seeds is 0.07, of which the pairs share nearly all"


def test_a_noisy_baseline_gives_no_verdict_and_the_assumption_is_printed(tiny: Tiny, tmp_path: Path) -> None:
    """Seven arms agree to 0.01, and the baseline varies by 0.3: pooled over the arms, its mean would be "shown" to differ from all."""
    wide = {"base": [2.0, 2.6, 2.3]} | {f"arm-{index}": [2.0, 2.01, 2.02] for index in range(7)}
    found = document(results(tiny, tmp_path, wide))
    assert {one["verdict"] for one in found["verdicts"]} == {"no difference shown"}
    (line,) = found["assumptions"]
    assert "Arms need not vary alike" in line and line in markdown(found)
    assert line in html.unescape(write_ablation_page(_saved(tiny, tmp_path, wide)).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("equal", "ratio", "told"), [("time", 0.8, True), ("time", 1.25, True), ("time", 1.05, False), ("tokens", 0.8, False)]
)
def test_arms_that_did_not_train_for_an_equal_time_are_named(tiny: Tiny, tmp_path: Path, equal: str, ratio: float, told: bool) -> None:
    """Seed by seed: other programs ran beside all but the first, of both arms."""
    found = results(tiny, tmp_path, {"base": [2.0, 2.01, 2.02], "fast": [1.9, 1.91, 1.92]}, equal=equal)
    for run in found.experiment.runs:
        found.seconds[run.directory] = (300 if run.seed > 1 else 100) * (ratio if run.arm.name == "fast" else 1)
    lines = [line for line in document(found)["assumptions"] if line.startswith("not at equal time")]
    assert [f"fast has trained for {ratio:.2f} of the baseline's time" in line for line in lines] == [True] * told


def _saved(tiny: Tiny, folder: Path, values: dict[str, list[float]]) -> Path:
    found = results(tiny, folder, values)
    save(found)
    return found.experiment.out


def test_the_noise_of_recorded_items_counts(tiny: Tiny, tmp_path: Path) -> None:
    """2,000 ablations of two equal arms of three seeds, scored on 60 items of which each arm finds others hard. What is recorded per item
    is read from the runs: without it, a quarter of these ablations have a verdict."""
    random, shown, seeds, count = np.random.default_rng(9), 0, 3, 60
    found = results(
        tiny, tmp_path, {"base": [0.5] * seeds, "other": [0.5] * seeds}, measures=["evaluation/colors/cloze/0-shot"],
        set=["evaluate.benchmarks=[{name: colors, path: x}]"],
    )  # fmt: skip
    (measure,) = found.experiment.measures
    readings = [[found.readings[found.experiment.directory(arm) / f"seed-{seed}"] for seed in range(1, 1 + seeds)]
                for arm in found.experiment.arms.values()]  # fmt: skip
    for _ in range(2000):
        hard, tastes = random.normal(size=count), random.normal(size=(2, 1, count))
        right = (hard + tastes + 0.5 * random.normal(size=(2, seeds, count)) > 0).astype(float)
        for of_arm, runs in zip(readings, right, strict=True):
            for reading, run in zip(of_arm, runs, strict=True):
                reading.values[measure.name] = float(run.mean())
                reading.items[measure.name] = {str(index): float(one) for index, one in enumerate(run)}
        shown += judge([one for _, _, one in found.contrasts()])[0].outcome != "no difference shown"
    assert shown <= 0.05 * 2000


SCORE = "eval/colors/cloze-0-shot"


def scored(tiny: Tiny, folder: Path, values: dict[str, list[float]], items: int | None, chance: float | None) -> Results:
    """The same for a score during training, with the number of its items and its chance level as a run records them."""
    found = results(tiny, folder, values, measures=[SCORE], set=["evaluate.benchmarks=[{name: colors, path: x}]", "evaluate.every=50%"])
    for reading in found.readings.values():
        value = reading.values.pop(BITS)
        reading.values[SCORE] = value
        rising = [value - 0.03, value - 0.02, value - 0.01, value]
        reading.curves[SCORE] = Curve([100.0, 200.0, 300.0, 400.0], rising)
        reading.counts.update({} if items is None else {SCORE: items})
        reading.baselines.update({} if chance is None else {SCORE: chance})
    return found


def test_a_difference_at_or_below_chance_is_not_better(tiny: Tiny, tmp_path: Path) -> None:
    """Curves that rise, seeds that agree, arms far apart: at chance the measure is not to be trusted, and higher is not better."""
    low = {"base": [0.10, 0.101, 0.099], "more": [0.20, 0.201, 0.199]}
    high = {name: [value + 0.4 for value in of_arm] for name, of_arm in low.items()}
    for values, chance, word, trust in ((low, 0.25, "higher", False), (low, None, "higher", False), (high, 0.25, "better", True)):
        found = document(scored(tiny, tmp_path, values, 100_000, chance))
        (one,) = found["verdicts"]
        quality = found["measures"][SCORE]["quality"]
        assert (one["verdict"], quality["trust"], quality["above_chance"]) == (word, trust, trust), (values, chance, quality)
        level = "an unknown chance level" if chance is None else "chance (0.25)"
        assert (f"neither of the two is shown to be above {level}" in one["why"]) is not trust
        assert (found["measures"][SCORE]["items"], found["measures"][SCORE]["chance"]) == (100_000, chance)
        assert trust or quality["reasons"] == ["no arm is shown to be above chance"]


def test_the_choice_of_few_items_counts(tiny: Tiny, tmp_path: Path) -> None:
    """Seeds agree to 0.001, so the noise over seeds alone would show a difference of 0.1; 20 items cannot show it, 10,000 can."""
    values = {"base": [0.60, 0.601, 0.599], "more": [0.70, 0.701, 0.699]}
    few, many = (document(scored(tiny, tmp_path, values, items, 0.25))["verdicts"][0] for items in (20, 10_000))
    assert (few["verdict"], many["verdict"]) == ("no difference shown", "better")
    assert few["from_items"] == pytest.approx(np.sqrt((0.6 * 0.4 + 0.7 * 0.3) / 20)) and "more items" in few["why"]


def test_one_seed_gives_no_verdict_unless_a_noise_floor_is_given(tiny: Tiny, tmp_path: Path) -> None:
    values = {"base": [2.0], "good": [1.5]}
    alone = verdict(results(tiny, tmp_path, values), "good")
    assert alone["verdict"] == "no verdict" and "one seed gives no noise floor" in alone["why"] and "with 5 seeds" in alone["why"]
    (tmp_path / "earlier").mkdir()
    earlier = results(tiny, tmp_path / "earlier", {"a": [2.0, 2.1, 1.9, 2.05], "b": [2.02, 2.11, 1.88, 2.04]})
    save(earlier)
    judged = verdict(results(tiny, tmp_path, values, noise=str(earlier.experiment.out)), "good")
    assert judged["verdict"] == "better" and judged["df"] == 3


def test_a_noise_floor_of_another_recipe_or_budget_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "earlier").mkdir()
    earlier = results(tiny, tmp_path / "earlier", {"a": [2.0, 2.1, 1.9, 2.05], "b": [2.02, 2.11, 1.88, 2.04]}, kind="noise")
    save(earlier)
    values, out = {"base": [2.0], "good": [1.5]}, earlier.experiment.out
    noise = {"noise": str(out)}
    kept = verdict(results(tiny, tmp_path, values, **noise), "good")
    assert kept["verdict"] == "better", "the initial weights of the copies are no other recipe"
    two = {name: of_arm * 2 for name, of_arm in values.items()}
    assert results(tiny, tmp_path, two, **noise, measures=[BITS, "validation/loss"]), "with two seeds the others have a floor of their own"
    refused: list[tuple[dict[str, Any], str]] = [
        ({"budget": "4096 tokens"}, f"noise: the runs of {out} have 4,864 training tokens, and these have 4,096; make a noise floor"),
        ({"set": ["optimizer.weight_decay=0.3"]}, "has another recipe (optimizer.weight_decay); make a noise floor of this one with"),
        ({"set": ["train.validation_bytes_per_domain=700 bytes"]}, "has another recipe (train.validation_bytes_per_domain)"),
        ({"measures": [BITS, "validation/loss"]}, f"noise: {out} has no noise floor of validation/loss; add it to the measures there"),
    ]  # fmt: skip
    for keys, error in refused:
        with pytest.raises(UserError) as raised:
            results(tiny, tmp_path, values, **noise, **keys)
        assert error in str(raised.value) and "\n" not in str(raised.value)
    written = json.loads((out / "ablation.json").read_text())
    (out / "ablation.json").write_text(json.dumps({key: value for key, value in written.items() if key != "noise_conditions"}))
    with pytest.raises(UserError, match="of a version that did not record its recipe; run its lmworks ablate command again"):
        results(tiny, tmp_path, values, **noise)


def test_a_noise_floor_whose_weights_did_not_vary_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    """As earlier versions made them: `kind: noise`, and arms with a train.init_seed of their own."""
    (tmp_path / "earlier").mkdir()
    given = {"a": [2.0, 2.1, 1.9, 2.05], "b": [2.02, 2.11, 1.88, 2.04]}
    for keys, is_refused in (({"kind": "noise"}, True), ({"set": ["train.init_seed=7"]}, True), ({}, False)):
        earlier = results(tiny, tmp_path / "earlier", given, **keys)
        save(earlier)
        save_arms(earlier.experiment)
        out = earlier.experiment.out
        assert results(tiny, tmp_path, {"base": [2.0], "good": [1.5]}, noise=str(out))
        written = json.loads((out / "ablation.json").read_text())
        del written["noise_conditions"]["weights"]
        (out / "ablation.json").write_text(json.dumps(written))
        if is_refused:
            with pytest.raises(UserError, match="have the same initial weights with every seed"):
                results(tiny, tmp_path, {"base": [2.0], "good": [1.5]}, noise=str(out))
        else:
            assert results(tiny, tmp_path, {"base": [2.0], "good": [1.5]}, noise=str(out))
        shutil.rmtree(out)


NAN = float("nan")

def test_a_run_that_diverged_is_named_and_left_out_of_its_arm_alone(tiny: Tiny, tmp_path: Path) -> None:
    good = {"base": [2.0, 2.1, 1.9], "good": [1.5, 1.61, 1.4]}
    found = results(tiny, tmp_path, good | {"wild": [2.3, NAN, NAN], "once": [2.4, NAN, 2.3]})
    written, alone = document(found), document(results(tiny, tmp_path, good))
    seeds = {one["arm"]: one["over_seeds"] for one in written["verdicts"]}
    assert seeds == {"good": [1, 2, 3], "wild": [1], "once": [1, 3]}
    first, expected = written["verdicts"][0], alone["verdicts"][0]
    assert all(first[key] == expected[key] for key in ("difference", "seeds", "noise", "df"))
    assert written["measures"][BITS]["noise"]["unpaired"]["df"] == 4, "of base and good: the table with the most degrees of freedom"
    assert written["measures"][BITS]["quality"] == alone["measures"][BITS]["quality"]
    lines = written["not_measured"]
    assert any("of wild, seed 2, 3: no finite value at the end" in line for line in lines)
    assert any("over seed 1, 3, where the baseline has a mean of 1.95" in line for line in lines), lines
    once = next(one for one in written["verdicts"] if one["arm"] == "once")
    assert once["difference"] == pytest.approx(2.35 - 1.95)
    assert "| 2 | 1.503 | 2.3 (seed 1) | 2.35 (seed 1, 3) |" in markdown(written), "a mean says which seeds it is of"
    lost = document(results(tiny, tmp_path, {"base": [2.0, NAN, 1.9], "good": [1.5, 1.61, 1.4]}))
    assert lost["verdicts"][0]["over_seeds"] == [1, 3] and "so no arm is compared over them" in lost["not_measured"][0]


def diverging(found: Results, arm: str, seeds: tuple[int, ...]) -> Results:
    for run in found.experiment.runs:
        if run.arm.name == arm and run.seed in seeds:
            why = "17 of 29 steps without an update: 15 bad steps, 1 rollback"
            found.readings[run.directory] = replace(found.readings[run.directory], diverged=why, tokens=500)
        else:
            found.readings[run.directory] = replace(found.readings[run.directory], tokens=1000)
    return found


def test_an_arm_that_diverged_with_a_finite_loss_has_its_own_verdict(tiny: Tiny, tmp_path: Path) -> None:
    """It costs the others nothing: noise floor, quality and verdicts are those without it."""
    good = {"base": [2.0, 2.1, 1.9], "good": [1.5, 1.61, 1.4]}
    alone = document(results(tiny, tmp_path, good))
    found = diverging(results(tiny, tmp_path, good | {"div": [103.0, 166.0, 395.0]}), "div", (1, 2, 3))
    written = document(found)
    first, last = written["verdicts"]
    assert (first["arm"], first["verdict"]) == ("good", "better") and first["p"] == alone["verdicts"][0]["p"]
    assert (last["arm"], last["verdict"], last["why"], last["difference"]) == ("div", "diverged", "it ends at 103 to 395 bits/byte", None)
    for key in ("noise", "noise_floor", "quality"):
        assert written["measures"][BITS][key] == alone["measures"][BITS][key]
    assert not any("not at equal tokens" in line for line in written["assumptions"]), "skipped steps are the cause, which is said"
    (line,) = written["not_measured"]
    assert line.startswith("div diverged: seed 1 (17 of 29 steps without an update: 15 bad steps, 1 rollback), seed 2 (")
    table = markdown(written)
    assert "| 2 | 1.503 | diverged |" in table and "| div | validation/bits_per_byte |  |  | diverged | it ends at" in table
    save(found)
    page = html.unescape(write_ablation_page(found.experiment.out).read_text(encoding="utf-8"))
    assert line in page and re.search('class="verdict below">diverged<', page) and "of 1 tested" in page


def test_a_seed_that_diverged_with_a_finite_loss_is_left_out(tiny: Tiny, tmp_path: Path) -> None:
    found = diverging(results(tiny, tmp_path, {"base": [2.0, 2.1, 1.9], "once": [2.4, 300.0, 2.3]}), "once", (2,))
    (one,) = document(found)["verdicts"]
    assert one["over_seeds"] == [1, 3] and one["difference"] == pytest.approx(2.35 - 1.95)


def test_a_sweep_beside_a_rate_that_diverged_is_not_to_be_extended_there(tiny: Tiny, tmp_path: Path) -> None:
    rates = [0.0025, 0.005, 0.01, 0.02, 0.04]
    falling = {str(rate): [2 - 0.1 * index, 2.001 - 0.1 * index, 2.002 - 0.1 * index] for index, rate in enumerate(rates)}
    found = diverging(results(tiny, tmp_path, falling, kind="learning-rate"), "rate-0.04", (1, 2, 3))
    conclusion = document(found)["conclusion"]
    assert len(conclusion["points"]) == 4 and "extend it" not in conclusion["text"]
    assert "the lowest arm is the last that has not diverged (0.04 has), so add arms between the two" in conclusion["text"]


def test_a_seed_that_one_of_many_lacks_costs_less_than_an_arm(tiny: Tiny, tmp_path: Path) -> None:
    ten = {name: list(np.linspace(2, 2.1, 10)) for name in ("base", "a", "b")}
    found = results(tiny, tmp_path, ten | {"once": [*ten["a"][:9], NAN]})
    arms, seeds = found.complete(found.experiment.measures[0])
    assert len(arms) == 4 and seeds == list(range(1, 10))


@pytest.mark.parametrize(("tokens", "told"), [(0.83, True), (1.02, True), (1.005, False)])
def test_arms_that_did_not_train_on_equal_tokens_are_named(tiny: Tiny, tmp_path: Path, tokens: float, told: bool) -> None:
    found = results(tiny, tmp_path, {"base": [2.0, 2.01, 2.02], "big": [1.9, 1.91, 1.92]})
    for run in found.experiment.runs:
        found.readings[run.directory] = replace(found.readings[run.directory], tokens=10_000 * (tokens if run.arm.name == "big" else 1))
    lines = [line for line in document(found)["assumptions"] if line.startswith("not at equal tokens")]
    assert [f"big has trained on {10_000 * tokens:,.0f} tokens, {tokens:.2f} of the baseline's" in line for line in lines] == [True] * told
    arms = {"base": [], "big": ["train.phases.general.global_batch_tokens=1280 tokens"]}
    planned = results(tiny, tmp_path, {"base": [2.0], "big": [1.9]}, arms=arms, set=[ONE_PHASE])
    assert any("not at equal tokens: big" in line for line in document(planned)["assumptions"]), "by the plan, where nothing was recorded"


def test_a_sweep_gives_the_optimum(tiny: Tiny, tmp_path: Path) -> None:
    rates = [0.0025, 0.005, 0.01, 0.02, 0.04]
    values = {str(rate): [2 + 0.1 * np.log2(rate / 0.012) ** 2 + 0.002 * seed for seed in range(3)] for rate in rates}
    found = results(tiny, tmp_path, values, kind="learning-rate")
    assert [arm.label for arm in found.experiment.arms.values()] == pytest.approx(rates)
    assert found.experiment.baseline.name == "rate-0.01"
    conclusion = document(found)["conclusion"]
    assert conclusion["best"] == pytest.approx(0.012, rel=0.01) and not conclusion["at_edge"]
    assert conclusion["low"] < 0.012 < conclusion["high"]
    falling = {str(rate): [2 - 0.1 * index, 2.001 - 0.1 * index, 2.002 - 0.1 * index] for index, rate in enumerate(rates)}
    assert "edge of the sweep" in document(results(tiny, tmp_path, falling, kind="learning-rate"))["conclusion"]["text"]


def test_the_page_and_the_tables_show_all(tiny: Tiny, tmp_path: Path) -> None:
    found = results(tiny, tmp_path, {"base": [2.0, 2.1, 1.9], "good": [1.5, 1.61, 1.4]})
    page = write_ablation_page(save(found) and found.experiment.out).read_text()
    curves = page.split('id="data">')[1].split("</script>")[0]
    assert all(f'"name":"{arm}"' in curves for arm in ("base", "good")) and curves.count('"low":[') == curves.count('"high":[') == 2
    assert "better" in page and "optimizer.learning_rate (0.01 -&gt; 0.002)" in page and (found.experiment.out / FILE).exists()
    text = markdown(document(found))
    assert "| good | validation/bits_per_byte | −0.497 |" in text and "| better |" in text


def test_names_from_a_file_cannot_write_into_the_page(tiny: Tiny, tmp_path: Path) -> None:
    found = results(tiny, tmp_path, {"base": [2.0, 2.1], "good": [1.5, 1.61]})
    written = save(found)
    written["verdicts"][0]["why"] = written["measures"][BITS]["unit"] = "<script>alert(1)</script>"
    curves = written["measures"][BITS]["curves"]
    curves["<script>alert(1)</script>"] = curves["good"]
    written["arms"]["<script>alert(1)</script>"] = written["arms"]["good"]
    (found.experiment.out / "ablation.json").write_text(json.dumps(written))
    page = write_ablation_page(found.experiment.out).read_text()
    assert "<script>alert" not in page and page.count("<script") == 2, "the numbers of the charts and what draws them"
