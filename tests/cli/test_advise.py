"""`lmworks advise`: the way that is advised, by need, data and means."""

from __future__ import annotations

import json
from typing import Any

import pytest
from command import Lmworks
from hypothesis import given, settings
from hypothesis import strategies as st

from lmworks.plan.advice import NEEDS, Option, Situation, Trained, advise
from lmworks.recipe.load import load_cluster
from lmworks.ui.amounts import amount

RANK = {"prompt": 0, "tune": 1, "continue": 2, "train": 3}


def ways(lmworks: Lmworks, *words: str) -> dict[str, dict[str, Any]]:
    done = lmworks("advise", "--cluster", "8xh100", *words, "--json")
    assert done.code == 0, done.err
    options = json.loads(done.out)["options"]
    assert [one["route"] for one in options] == ["prompt", "tune", "continue", "train"]
    assert [one["verdict"] for one in options].count("advised") == 1
    return {one["route"]: one for one in options}


@pytest.mark.parametrize(
    ("words", "advised"),
    [
        (("--need", "facts", "--tokens", "10B"), "prompt"),
        (("--need", "form", "--examples", "200"), "prompt"),
        (("--need", "form", "--examples", "5000"), "tune"),
        (("--need", "skill", "--examples", "50000"), "tune"),
        (("--need", "knowledge", "--tokens", "5M"), "prompt"),
        (("--need", "knowledge", "--tokens", "300M"), "continue"),
        (("--need", "language", "--tokens", "50B", "--time", "2d"), "continue"),
        (("--need", "language", "--tokens", "50B", "--time", "10min"), "prompt"),
        (("--need", "own", "--tokens", "100B"), "train"),
    ],
)
def test_the_first_way_that_meets_the_need_is_advised(lmworks: Lmworks, words: tuple[str, ...], advised: str) -> None:
    assert ways(lmworks, *words)[advised]["verdict"] == "advised"


def test_costs_are_those_of_the_operations(lmworks: Lmworks) -> None:
    """Tuning 8B on 10,000 examples of 600 tokens, three times: 6 N D over 8 x 989 TFLOPS at 40%."""
    found = ways(lmworks, "--need", "skill", "--examples", "10000")["tune"]
    assert found["seconds"] == pytest.approx(6 * 8e9 * 18e6 / (8 * 989e12 * 0.4), rel=1e-3)
    assert found["dollars"] == pytest.approx(8 * found["seconds"] / 3600 * 2.5, rel=1e-3)
    train = ways(lmworks, "--need", "own", "--time", "7d", "--tokens", "1B")["train"]
    assert train["seconds"] == pytest.approx(7 * 86_400, rel=0.01), "the time is used"
    assert "distinct tokens are needed" in train["reason"]


@pytest.mark.parametrize(("time", "cluster"), [("3d", "8xh100"), ("10min", "2-cores"), ("2h", "1xh200")])
def test_it_says_what_plan_says(lmworks: Lmworks, time: str, cluster: str) -> None:
    words = ("--time", time, "--cluster", cluster)
    planned = json.loads(lmworks("plan", *words, "--json").out)
    done = lmworks("advise", "--need", "own", "--tokens", "100B", *words, "--json")
    trained = json.loads(done.out)["options"][-1]
    assert {name: trained[name] for name in ("tokens", "seconds", "dollars")} == {
        name: pytest.approx(planned[name]) for name in ("tokens", "seconds", "dollars")
    }
    assert f"{amount(planned['counts']['active'])} active parameters" in trained["reason"]


def test_adapters_take_four_operations_where_plan_counts_four(lmworks: Lmworks) -> None:
    """70B fits only with adapters on 8 H100."""
    found = ways(lmworks, "--need", "skill", "--examples", "10000", "--base", "70B")["tune"]
    assert found["seconds"] == pytest.approx(4 * 70e9 * 18e6 / (8 * 989e12 * 0.4), rel=1e-3)


def test_the_time_pays_for_a_part_of_the_examples_and_the_part_is_named(lmworks: Lmworks) -> None:
    """A minute of 8 x 989 TFLOPS at 40% over 4 operations, 8B parameters and three times 600 tokens: 3,296."""
    form = ("--need", "form", "--time", "1min", "--base", "8B")
    few, many = (ways(lmworks, *form, "--examples", count)["tune"] for count in ("1000", "50000"))
    assert few["verdict"] == many["verdict"] == "advised"
    assert "the time pays for 3,296 of the 50,000 examples, which are enough" in many["reason"]
    assert many["seconds"] <= 60.1 and many["tokens"] == 3296 * 1800
    none = ways(lmworks, "--need", "skill", "--time", "1min", "--base", "8B", "--examples", "50000")["tune"]
    assert none["verdict"] == "not affordable" and "the time pays for 3,296 of the 50,000 examples, and about 10,000 are" in none["reason"]


def test_a_second_on_a_cluster_trains_nothing(lmworks: Lmworks) -> None:
    found = ways(lmworks, "--need", "own", "--tokens", "10B", "--time", "1 s")
    assert found["train"]["verdict"] == "not affordable" and "at least 60 s to start it" in found["train"]["reason"]


BUDGETS = st.floats(1, 1e9)
AMOUNTS = st.floats(0, 12).map(lambda power: int(10**power) - 1)


def options(need: str, examples: int, tokens: int, base: int, seconds: float, cluster: str) -> tuple[str, dict[str, Option]]:
    """The advised way and all of them; a new model takes the compute-optimal tokens of the time."""
    where = load_cluster(cluster)
    speed = where.nodes * where.devices_per_node * where.tflops * 1e12 * where.mfu
    trained = Trained((seconds * speed / 120) ** 0.5, 20 * (seconds * speed / 120) ** 0.5, seconds)
    found = {one.route: one for one in advise(Situation(need, examples, tokens, base, seconds, where, trained))}  # type: ignore[arg-type]
    return next(one.route for one in found.values() if one.verdict == "advised"), dict(found)


@settings(max_examples=400, deadline=None)
@given(
    need=st.sampled_from(sorted(NEEDS)), examples=AMOUNTS, tokens=AMOUNTS, base=st.floats(7, 12).map(lambda power: int(10**power)),
    seconds=BUDGETS, cluster=st.sampled_from(["2-cores", "1xh200", "8xh100", "8192xh800"]), factor=st.floats(1, 1e4),
    grows=st.sampled_from(["seconds", "examples", "tokens"]),
)  # fmt: skip
def test_more_of_anything_never_leads_to_a_lesser_way(
    need: str, examples: int, tokens: int, base: int, seconds: float, cluster: str, factor: float, grows: str
) -> None:
    """With more time, examples or text, the advised way never falls back, no way trains less, and what is affordable stays so."""
    given_: dict[str, Any] = {"need": need, "examples": examples, "tokens": tokens, "base": base, "seconds": seconds, "cluster": cluster}
    less, before = options(**given_)
    more, after = options(**given_ | {grows: given_[grows] * factor if grows == "seconds" else int(given_[grows] * factor)})
    assert RANK[more] >= RANK[less], (before, after)
    for route, one in before.items():
        assert after[route].tokens >= one.tokens * (1 - 1e-9), (route, one, after[route])
        assert one.verdict in ("not affordable", "not enough") or after[route].verdict != "not affordable", (one, after[route])
        if one.verdict == "not affordable":
            assert "time pays for" in one.reason or "smallest run takes" in one.reason
        if one.verdict == "advised":
            assert one.seconds <= 1.01 * seconds, one


def test_what_the_time_does_not_pay_for_is_cut_or_refused(lmworks: Lmworks) -> None:
    short = ways(lmworks, "--need", "knowledge", "--tokens", "50B", "--time", "2d")["continue"]
    assert short["seconds"] == pytest.approx(2 * 86_400, rel=0.01) and short["verdict"] == "advised"
    assert ways(lmworks, "--need", "knowledge", "--tokens", "50B", "--time", "1min")["continue"]["verdict"] == "not affordable"


def test_own_weights_need_text(lmworks: Lmworks) -> None:
    found = ways(lmworks, "--need", "own", "--tokens", "0")
    assert found["train"]["verdict"] == "not enough" and found["prompt"]["verdict"] == "advised"
    assert found["train"]["reason"].endswith("there is no text; give your distinct tokens with --tokens")


def test_a_base_model_that_the_memory_does_not_hold_is_not_advised(lmworks: Lmworks) -> None:
    """16 bytes a trained parameter (arXiv:1910.02054), 2 a frozen one, on 8 x 74.5 GiB."""
    skill, knowledge = ("--need", "skill", "--examples", "50000"), ("--need", "knowledge", "--tokens", "300M", "--time", "365d")
    small = ways(lmworks, *skill, "--base", "8B")["tune"]
    assert small["verdict"] == "advised" and "takes" not in small["reason"] and "lora" not in small["reason"]
    adapted = ways(lmworks, *skill, "--base", "70B")["tune"]
    assert adapted["verdict"] == "advised" and "only with adapters (lora), since all weights take at least 1.1 TB" in adapted["reason"]
    assert "take a smaller --base" in ways(lmworks, *skill, "--base", "400B", "--time", "365d")["tune"]["reason"]
    assert ways(lmworks, *skill, "--base", "400B", "--time", "365d")["tune"]["verdict"] == "does not fit"
    assert ways(lmworks, *knowledge, "--base", "8B")["continue"]["verdict"] == "advised"
    assert ways(lmworks, *knowledge, "--base", "70B")["continue"]["verdict"] == "does not fit"
    assert "parameters on" in (long := ways(lmworks, "--need", "own", "--tokens", "100T", "--time", "9000d")["train"])["reason"]
    assert long["verdict"] == "advised" and long["tokens"] > 20 * 38e9, "the largest model that fits, on more tokens"


def test_money_is_a_time_and_a_price_makes_costs(lmworks: Lmworks) -> None:
    need = ("--need", "language", "--tokens", "50B")
    found = ways(lmworks, *need, "--money", "960")["continue"]
    assert found["dollars"] == pytest.approx(960, rel=0.01) and found["seconds"] == pytest.approx(2 * 86_400, rel=0.01)
    dear = ways(lmworks, *need, "--money", "960", "--price", "5")["continue"]
    assert dear["seconds"] == pytest.approx(86_400, rel=0.01) and dear["dollars"] == pytest.approx(960, rel=0.01)
    assert "$960 (384 device-hours)" in lmworks("advise", "--cluster", "8xh100", *need, "--money", "960").out
    free = ("advise", "--cluster", "2-cores", "--need", "form", "--examples", "5000", "--base", "1B")
    assert "2-cores has no price, so the cost is in device-hours: give --price" in lmworks(*free).out
    assert "has no price" not in lmworks(*free, "--price", "0.1").out and "$" in lmworks(*free, "--price", "0.1").out


def test_it_prints_the_ways_and_the_next_step(lmworks: Lmworks) -> None:
    done = lmworks("advise", "--need", "own", "--tokens", "3B", "--cluster", "8xh100")
    assert done.code == 0 and "next: lmworks plan --time" in done.out and "not enough" in done.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--need", "magic"), "is not known; it is one of: form"),
        (("--need", "form", "--base", "big"), "is not a number of parameters"),
        (("--need", "form", "--tokens", "many"), "many"),
        (("--need", "own", "--time", "0d"), "'0d' is no time at all"),
        (("--need", "form", "--cluster", "nowhere"), "there is no cluster"),
        (("--need", "form", "--money", "5", "--time", "1d"), "--time and --money both set the time; give one of them"),
        (
            ("--need", "form", "--money", "5", "--cluster", "2-cores"),
            "--money: 2-cores has no price; give --price per device-hour, or --time",
        ),
    ],
)
def test_bad_input_is_one_line(lmworks: Lmworks, words: tuple[str, ...], message: str) -> None:
    assert message in lmworks("advise", *words).error
